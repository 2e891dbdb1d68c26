"""Tables and figures of a study, from the contents of its metrics.json."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibjax.eval.report.figures import Drawing, Panel
from calibjax.eval.report.rows import ABSENT, TextTable, short, signed, significance_mark, title_of
from calibjax.eval.report.schema import (
    Against,
    ComparedFigure,
    Difference,
    StudyDocument,
    StudyFigure,
    StudyRow,
    StudySet,
)
from calibjax.plot import LINES, MARKS, MUTED, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPARED: tuple[ComparedFigure, ...] = ("nll", "brier", "ece")
"""Figures of a row that are compared with another row's."""
_PANELS: tuple[tuple[str, tuple[StudyFigure, ...]], ...] = (
    ("NLL", ("nll",)),
    ("ECE", ("ece",)),
    ("mean confidence of correct and wrong predictions", ("confidence_right", "confidence_wrong")),
)


def study_tables(document: StudyDocument) -> list[TextTable]:
    """A table for each set of sequences; of transfer, one for each method and figure."""
    if document["study"] == "transfer":
        figures: tuple[ComparedFigure, ...] = ("nll", "ece")
        return [transfer_table(document, method, figure) for method in ("temperature", "ats") for figure in figures]
    return [variant_table(title, of_set) for title, of_set in document["sets"].items()]


def study_table(document: StudyDocument) -> TextTable:
    """The variants on the first set, with NLL compared; of transfer, ATS by NLL."""
    if document["study"] == "transfer":
        return transfer_table(document, "ats", "nll")
    return variant_table(*next(iter(document["sets"].items())))


def study_figures(document: StudyDocument) -> Iterator[Drawing]:
    """Every figure of a study."""
    if document["study"] == "transfer":
        yield transfer_figure(document)
        return
    draw = alpha_figure if document["study"] == "alpha" else rows_figure
    for index, (title, of_set) in enumerate(document["sets"].items()):
        name = document["study"]
        yield draw(of_set, f"{name}-{index}" if index else name, f"{document['question']} ({title})")


# --- one table and figure a set ---


def variant_table(title: str, of_set: StudySet) -> TextTable:
    """A row for every variant on a set: figures, and paired differences from the row that it is compared with."""
    rows = []
    for name, row in of_set["methods"].items():
        against = row.get("against")
        rows.append(
            [
                title_of(name),
                *(_mean(row[figure]) for figure in ("nll", "brier", "ece")),
                f"[{short(row['ece']['low'])}, {short(row['ece']['high'])}]",
                *(_difference(against[f]) if against else ABSENT for f in COMPARED),
                title_of(against["name"]) if against else ABSENT,
                *(_mean(row[figure], ".3f") for figure in ("confidence_right", "confidence_wrong")),
                f"{row.get('parameters', 0):,}",
            ]
        )
    accuracy = of_set["methods"]["uncalibrated"]["accuracy"]["value"]
    columns = ["", "NLL", "Brier", "ECE", "ECE, 95% interval", "Δ NLL [95% interval]", "Δ Brier [95% interval]"]
    columns += ["Δ ECE [95% interval]", "Δ against", "confidence, correct", "confidence, wrong", "parameters"]
    trained = [row["nll"]["value"] for row in of_set["methods"].values()]
    return TextTable(
        f"{title}: {of_set['tokens']:,} tokens of {of_set['windows']:,} sequences, accuracy {accuracy:.4f} of all",
        columns,
        rows,
        order=(1, 5, 3, 8, 2, 4, 7, 6, 9, 10, 11),
        best=(trained.index(min(trained)),),
    )


def compared_with(of_set: StudySet) -> str:
    """The rows that the differences of a set are from, since a narrow table has no column for them; "" for none."""
    rows: dict[str, list[str]] = {}
    for name, row in of_set["methods"].items():
        if against := row.get("against"):
            rows.setdefault(title_of(against["name"]), []).append(title_of(name))
    if not rows:
        return ""
    *few, (reference, _) = sorted(rows.items(), key=lambda item: len(item[1]))
    parts = [f"of {', '.join(names)} from {other}" for other, names in few]
    return f"Δ: {'; '.join([*parts, f'of the others from {reference}' if few else f'from {reference}'])}."


def _mean(figure: Mapping[str, Any], form: str = ".4f") -> str:
    """The mean over the seeds, ± half their range."""
    spread = (max(figure["seeds"]) - min(figure["seeds"])) / 2
    return short(figure["value"], form) + (f" ±{short(spread, form)}" if len(figure["seeds"]) > 1 else "")


def _difference(against: Difference) -> str:
    return f"{signed(against)} {significance_mark(against)}".rstrip()


def _gap(against: Difference) -> str:
    return f"{short(against['difference'], '+.4f')} {significance_mark(against)}".rstrip()


def rows_figure(of_set: StudySet, name: str, title: str) -> Drawing:
    """A line for each row: NLL, ECE, and mean confidence of correct and wrong predictions, intervals, all seeds.

    The uncalibrated model is named in the note: drawn to scale, it would squeeze the others together.
    """
    rows = dict(of_set["methods"])
    left_out = rows.pop("uncalibrated")
    lines = np.arange(len(rows))[::-1]

    def draw(ax: "Axes", names: tuple[StudyFigure, ...]) -> None:
        for of_figure, colour, mark in zip(names, LINES, MARKS, strict=False):
            of_rows = [row[of_figure] for row in rows.values()]
            ax.hlines(lines, [f["low"] for f in of_rows], [f["high"] for f in of_rows], color=colour, linewidth=1.5)
            ax.plot([f["value"] for f in of_rows], lines, mark, color=colour, markersize=6, label=_word(of_figure))
            for line, of_row in zip(lines, of_rows, strict=True):
                ax.plot(of_row["seeds"], [line - 0.25] * len(of_row["seeds"]), "|", color=colour, markersize=5)
            ax.axvline(rows["temperature"][of_figure]["value"], color=MUTED, linewidth=1, linestyle="--")
        ax.set_yticks(lines, [title_of(row) for row in rows], fontsize="small", parse_math=False)
        ax.set_ylim(-0.7, len(rows) - 0.3)
        ax.locator_params(axis="x", nbins=5)
        plain(ax)
        if len(names) > 1:
            legend(ax, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(names))

    figures = ", ".join(f"{figure.upper()} {short(left_out[figure]['value'])}" for figure in ("nll", "ece"))
    note = f"bars: 95% interval; ticks: each seed; dashed: temperature scaling; not drawn: uncalibrated, {figures}"
    height = 0.8 + 0.26 * len(rows)
    panels = [Panel(label, "", lambda ax, names=names: draw(ax, names), 4.6, height) for label, names in _PANELS]
    return Drawing(name, title, panels, note)


def alpha_figure(of_set: StudySet, name: str, title: str) -> Drawing:
    """NLL, ECE, and mean confidence of correct (filled) and wrong predictions by alpha, a line for each loss."""
    rows = of_set["methods"]
    losses = list(dict.fromkeys(row["loss"] for row in rows.values() if "loss" in row and row.get("alpha") is not None))

    def draw(ax: "Axes", names: tuple[StudyFigure, ...]) -> None:
        for loss, colour, mark in zip(losses, LINES, MARKS, strict=False):
            curve = [row for row in rows.values() if row.get("alpha") is not None and row.get("loss") == loss]
            alphas = np.array([row.get("alpha") for row in curve], np.float64)
            for of_figure, fill in zip(names, (colour, "white"), strict=False):
                value, low, high = ([row[of_figure][key] for row in curve] for key in ("value", "low", "high"))
                label_of = loss if of_figure == names[0] else None
                ax.plot(alphas, value, mark + "-", color=colour, markerfacecolor=fill, markersize=5, label=label_of)
                ax.fill_between(alphas, low, high, color=colour, alpha=0.2, linewidth=0)
        for of_figure in names:
            ax.axhline(rows["temperature"][of_figure]["value"], color=MUTED, linewidth=1, linestyle="--")
            ax.axhline(rows["uncalibrated"][of_figure]["value"], color=MUTED, linewidth=1, linestyle=":")
        ax.set(xlabel="alpha")
        legend(plain(ax))

    note = "dashed: temperature scaling; dotted: uncalibrated; hollow: wrong predictions; bands: 95% interval"
    panels = [Panel(label, "", lambda ax, names=names: draw(ax, names), 4.2, 3.6) for label, names in _PANELS]
    return Drawing(name, title, panels, note)


def _word(name: str) -> str:
    return {"confidence_right": "correct", "confidence_wrong": "wrong"}.get(name, name)


# --- transfer ---


def transfer_table(document: StudyDocument, method: str, figure: ComparedFigure) -> TextTable:
    """Fitted on (rows) by tested on (columns): the figure on the domain itself, and elsewhere Δ against it."""
    domains, rows = list(document["sets"]), []
    for source in ("uncalibrated", *domains):
        cells = []
        for target in domains:
            row = document["sets"][target]["methods"][row_name(method, source)]
            if source in (target, "uncalibrated"):
                cells.append(short(row[figure]["value"]))
            else:
                cells.append(_gap(_against(row)[figure]))
        rows.append([source, *cells])
    if method == "ats":
        own = [_against(document["sets"][domain]["methods"][row_name("ats", domain)])[figure] for domain in domains]
        rows.append(["ATS, Δ against temperature scaling", *(_gap(against) for against in own)])
    return TextTable(
        f"{figure.upper()}, {title_of(method)}: fitted on (row), tested on held-out sequences of (column); where these "
        "differ, Δ against the one fitted on the column's own domain",
        ["fitted on", *domains],
        rows,
    )


def _against(row: StudyRow) -> Against:
    assert "against" in row, "every row of transfer but the base model's is compared"
    return row["against"]


def row_name(method: str, source: str) -> str:
    """The row of a method fitted on a domain; `source` is "uncalibrated" for the base model."""
    return source if source == "uncalibrated" else f"{method} from {source}"


def transfer_figure(document: StudyDocument) -> Drawing:
    """The differences of both methods in NLL and ECE: fitted on (rows) by tested on (columns)."""
    domains = list(document["sets"])
    size = 0.75 * len(domains) + 1.6
    figures: tuple[ComparedFigure, ...] = ("nll", "ece")
    methods = ("temperature", "ats")
    gaps = {(name, method): _gaps(document, method, name) for name in figures for method in methods}

    def draw(ax: "Axes", name: ComparedFigure, method: str) -> None:
        from matplotlib.colors import TwoSlopeNorm

        values = gaps[name, method]
        reach = max(*(float(np.abs(gaps[name, each]).max()) for each in methods), 1e-6)
        ax.imshow(values, cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -reach, reach))
        for i, source in enumerate(domains):
            for j, target in enumerate(domains):
                own = document["sets"][target]["methods"][row_name(method, source)]
                text = short(own[name]["value"], ".3f") if i == j else short(values[i, j], "+.3f")
                dark = abs(values[i, j]) > 0.6 * reach
                ax.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        ax.set_xticks(range(len(domains)), domains, rotation=30, ha="right", fontsize="small", parse_math=False)
        ax.set_yticks(range(len(domains)), domains, fontsize="small", parse_math=False)
        ax.set(xlabel="tested on", ylabel="fitted on")
        plain(ax)

    panels = [
        Panel(
            f"{title_of(method)}: {name.upper()}",
            "",
            lambda ax, at=(name, method): draw(ax, *at),
            size,
            size,
            slanted=True,
        )
        for name, method in gaps
    ]
    note = "diagonal: fitted on the domain itself; elsewhere the difference from that (red: worse)"
    return Drawing("transfer", document["question"], panels, note)


def _gaps(document: StudyDocument, method: str, figure: ComparedFigure) -> np.ndarray:
    """`[source, target]`; 0 on the diagonal."""
    domains = list(document["sets"])
    return np.array(
        [
            [
                0.0
                if source == target
                else _against(document["sets"][target]["methods"][row_name(method, source)])[figure]["difference"]
                for target in domains
            ]
            for source in domains
        ]
    )
