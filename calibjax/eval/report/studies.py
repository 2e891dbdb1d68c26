"""Tables and figures of a study, from the contents of its metrics.json."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibjax.eval.report.figures import blank
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
from calibjax.plot import INK, LINES, MARKS, MUTED, legend, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def study_figures(document: StudyDocument) -> Iterator[tuple[str, "Figure"]]:
    """(name of a file, figure)."""
    if document["study"] == "transfer":
        yield "transfer", transfer_figure(document)
        return
    draw = alpha_figure if document["study"] == "alpha" else rows_figure
    for index, (title, of_set) in enumerate(document["sets"].items()):
        name = document["study"]
        yield f"{name}-{index}" if index else name, draw(of_set, f"{document['question']} ({title})")


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


def _mean(figure: Mapping[str, Any], form: str = ".4f") -> str:
    """The mean over the seeds, ± half their range."""
    spread = (max(figure["seeds"]) - min(figure["seeds"])) / 2
    return short(figure["value"], form) + (f" ±{short(spread, form)}" if len(figure["seeds"]) > 1 else "")


def _difference(against: Difference) -> str:
    return f"{signed(against)} {significance_mark(against)}".rstrip()


def _gap(against: Difference) -> str:
    return f"{short(against['difference'], '+.4f')} {significance_mark(against)}".rstrip()


def rows_figure(of_set: StudySet, title: str) -> "Figure":
    """A line for each row: NLL, ECE, and mean confidence of correct and wrong predictions, intervals, all seeds.

    The uncalibrated model is named in the title: drawn to scale, it would squeeze the others together.
    """
    rows = dict(of_set["methods"])
    left_out = rows.pop("uncalibrated")
    figure = blank(12.6, 1.4 + 0.32 * len(rows))
    axes = figure.subplots(1, len(_PANELS), sharey=True)
    lines = np.arange(len(rows))[::-1]
    for axis, (label, names) in zip(axes, _PANELS, strict=True):
        for name, colour, mark in zip(names, LINES, MARKS, strict=False):
            of_rows = [row[name] for row in rows.values()]
            axis.hlines(lines, [f["low"] for f in of_rows], [f["high"] for f in of_rows], color=colour, linewidth=1.5)
            axis.plot([f["value"] for f in of_rows], lines, mark, color=colour, markersize=6, label=_word(name))
            for line, of_row in zip(lines, of_rows, strict=True):
                seeds = of_row["seeds"]
                axis.plot(seeds, [line - 0.25] * len(seeds), "|", color=colour, markersize=5, alpha=0.8)
        scaled = rows["temperature"]
        for name in names:
            axis.axvline(scaled[name]["value"], color=MUTED, linewidth=1, linestyle="--")
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=5)
        plain(axis)
        if len(names) > 1:
            legend(axis)
    axes[0].set_yticks(lines, [title_of(name) for name in rows], fontsize="small")
    axes[0].set_ylim(-0.7, len(rows) - 0.3)
    figures = ", ".join(f"{name.upper()} {short(left_out[name]['value'])}" for name in ("nll", "ece"))
    note = f"bars: 95% interval; ticks: each seed; dashed: temperature scaling; not drawn: uncalibrated, {figures}"
    figure.suptitle(f"{title}\n{note}", fontsize=10, color=INK)
    return figure


def alpha_figure(of_set: StudySet, title: str) -> "Figure":
    """NLL, ECE, and mean confidence of correct (filled) and wrong predictions by alpha, a line for each loss."""
    rows = of_set["methods"]
    figure = blank(12.6, 4.2)
    axes = figure.subplots(1, len(_PANELS))
    losses = list(dict.fromkeys(row["loss"] for row in rows.values() if "loss" in row and row.get("alpha") is not None))
    for axis, (label, names) in zip(axes, _PANELS, strict=True):
        for loss, colour, mark in zip(losses, LINES, MARKS, strict=False):
            curve = [row for row in rows.values() if row.get("alpha") is not None and row.get("loss") == loss]
            alphas = [row.get("alpha") for row in curve]
            for name, fill in zip(names, (colour, "white"), strict=False):
                value, low, high = ([row[name][key] for row in curve] for key in ("value", "low", "high"))
                label_of = loss if name == names[0] else None
                axis.plot(alphas, value, mark + "-", color=colour, markerfacecolor=fill, markersize=5, label=label_of)
                axis.fill_between(alphas, low, high, color=colour, alpha=0.2, linewidth=0)
        for name in names:
            axis.axhline(rows["temperature"][name]["value"], color=MUTED, linewidth=1, linestyle="--")
            axis.axhline(rows["uncalibrated"][name]["value"], color=MUTED, linewidth=1, linestyle=":")
        axis.set(xlabel="alpha", ylabel=label)
        plain(axis)
    legend(axes[0])
    note = "dashed: temperature scaling; dotted: uncalibrated; hollow: wrong predictions; bands: 95% interval"
    figure.suptitle(f"{title}\n{note}", fontsize=10, color=INK)
    return figure


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


def transfer_figure(document: StudyDocument) -> "Figure":
    """The differences of both methods in NLL and ECE: fitted on (rows) by tested on (columns)."""
    from matplotlib.colors import TwoSlopeNorm

    domains = list(document["sets"])
    size = 0.75 * len(domains) + 1.8
    figure = blank(2 * size, 1.75 * size)
    axes = figure.subplots(2, 2)
    figures: tuple[ComparedFigure, ...] = ("nll", "ece")
    for column, name in enumerate(figures):
        gaps = {method: _gaps(document, method, name) for method in ("temperature", "ats")}
        reach = max(float(np.abs(list(gaps.values())).max()), 1e-6)
        for row, (method, values) in enumerate(gaps.items()):
            axis = axes[row, column]
            axis.imshow(values, cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -reach, reach))
            for i, source in enumerate(domains):
                for j, target in enumerate(domains):
                    own = document["sets"][target]["methods"][row_name(method, source)]
                    text = short(own[name]["value"], ".3f") if i == j else short(values[i, j], "+.3f")
                    dark = abs(values[i, j]) > 0.6 * reach
                    axis.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)
            axis.set_xticks(range(len(domains)), domains, rotation=30, ha="right", fontsize="small")
            axis.set_yticks(range(len(domains)), domains, fontsize="small")
            axis.set(xlabel="tested on", ylabel="fitted on", title=f"{title_of(method)}: {name.upper()}")
            plain(axis)
    note = "diagonal: fitted on the domain itself; elsewhere the difference from that (red: worse)"
    figure.suptitle(f"{document['question']}\n{note}", fontsize=10, color=INK)
    return figure


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
