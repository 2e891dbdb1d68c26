"""The methods of a set as rows of a table, for the terminal, the page and the model card: titles, columns and cells."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from calibjax.eval.report.schema import Document

ABSENT = "\N{EN DASH}"
Row = Mapping[str, Any]
_TITLES = {
    "temperature": "temperature scaling",
    "ats": "ATS",
    "base": "base model",
    "base_temperature": "base + temperature scaling",
    "edited": "residual stream edited",
    "fine_tuned": "fine-tuned",
    "fine_tuned_temperature": "fine-tuned + temperature scaling",
    "greedy": "greedy answer",
}
UNCONVERGED = (
    "the fit ended before an optimum; separable data, and classes that are never the label, have no finite one"
)
_BEFORE = ("uncalibrated", "base", "pretrained")
_AFTER = ("ats", "fine_tuned", "edited", "lhts", "temperature")


class TextTable(NamedTuple):
    """A table before it is drawn; all but the first column are numbers.

    Attributes:
        title: above the table.
        columns: titles of the columns.
        rows: cells of each row.
        order: numbers of columns but the first, the most important first; the others follow from left to right. A
            terminal that is too narrow drops columns from the end of this order.
        best: numbers of the rows that are highlighted.
        groups: the title of each row's group, which stands above the group's first row; empty for none.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    order: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], **options: Any) -> TextTable:
    """A table with a row for each of `rows`, whose cells `columns` computes; `options` are fields of `TextTable`."""
    return TextTable(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], **options)


# --- numbers ---


def short(value: float, form: str = ".4f") -> str:
    """A number without the zero before its decimal point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def interval(row: Row, form: str = ".4f", *, zero: bool = False) -> str:
    """A figure, or a difference with its sign, and its interval: "value [low, high]".

    Args:
        row: `value` or `difference`, `low` and `high`.
        form: of all three.
        zero: keep the zeros before decimal points.
    """
    name, form = ("difference", f"+{form}") if "difference" in row else ("value", form)
    value, low, high = (format(row[key], form) if zero else short(row[key], form) for key in (name, "low", "high"))
    return f"{value} [{low}, {high}]"


def is_lower(against: Row) -> bool:
    """Whether a figure is significantly lower than the other: the interval of the difference lies below 0."""
    return against["high"] < 0


def is_higher(against: Row) -> bool:
    """Whether a figure is significantly higher than the other: the interval of the difference lies above 0."""
    return against["low"] > 0


# --- sets ---


def title_of(name: str) -> str:
    """The displayed name of a method."""
    return _TITLES.get(name, name)


def figure_of(row: Row, key: str) -> float | None:
    """A figure of a method's row; None if the row does not have it."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def binning(closed: str) -> str:
    """The edges of a bin as an interval."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}.get(closed, closed)


def unit_of(results: Row) -> str:
    """The name of the predictions of a set."""
    return results.get("unit", "tokens")


def counted(results: Row) -> str:
    """The number of predictions of a set."""
    return f"{results['tokens']:,} {unit_of(results)}"


def sets_of(document: Document) -> list[tuple[str, Row]]:
    """Titles and results of the sets of a run, the held-out one first."""
    sets = [(document["held_out"].get("title", "held out"), document["held_out"])]
    if len(document.get("tasks", ())) > 1:
        sets += document["tasks"].items()
    return sets + [(f"transfer to {name}", results) for name, results in document.get("transfer", {}).items()]


def pair_of(results: Row) -> tuple[str, str]:
    """The names of the rows before and after: of a comparison its winner, else what the run fitted."""
    names = list(results["methods"])
    before = next((name for name in _BEFORE if name in names), names[0])
    if "sort" in results:
        return before, winner(results)
    return before, next((name for key in _AFTER for name in names if name.partition("-")[0] == key), before)


def difference_of(results: Row, name: str, key: str) -> Row | None:
    """The difference of a figure from the row before, with its interval; None where the document has none.

    Older documents have the intervals of both figures: where these are apart, the difference is real too.
    """
    methods, before = results["methods"], pair_of(results)[0]
    row, base = methods[name], methods[before]
    if key in (against := row.get("against_uncalibrated", {})):
        return against[key]
    if before == results.get("reference") and key in (against := row.get("against", {})):
        return against[key]
    mine, first = (each["ece"] if key == "ece" else each.get("intervals", {}).get(key) for each in (row, base))
    value, other = figure_of(row, key), figure_of(base, key)
    if mine is None or first is None or value is None or other is None:
        return None
    return {"difference": value - other, "low": mine["low"] - first["high"], "high": mine["high"] - first["low"]}


def winner(results: Row) -> str:
    """The method of a comparison to use: that of the lowest log loss among those that beat temperature scaling.

    Beaten is an interval of the difference below 0 and p < 0.05 after Holm's correction. A fit that did not converge
    never wins. Temperature scaling where none does; where it has no finite log loss, the lowest of the others.
    """
    rows, reference = results["methods"], results["reference"]
    unconverged = results.get("not_converged", ())
    candidates = {n: row for n, row in rows.items() if n not in unconverged and row["log_loss"] is not None}
    if figure_of(rows.get(reference, {}), "log_loss") is not None:
        candidates = {n: row for n, row in candidates.items() if _beats(row.get("against", {}).get("log_loss"))}
    fallback = reference if reference in rows else "uncalibrated"
    return min(candidates, key=lambda name: candidates[name]["log_loss"], default=fallback)


def _beats(against: Row | None) -> bool:
    return against is not None and is_lower(against) and against.get("holm_p", math.nan) < 0.05


def compares_confidences(results: Row) -> bool:
    """Whether the rows of a set are several confidences in the same answers, none of them corrected."""
    others = results["methods"].keys() - {"uncalibrated"}
    answers = unit_of(results) == "questions" and "sort" not in results
    return answers and 0 < len(others) < len(results["methods"]) and "temperature" not in others


def remarks(results: Row) -> list[str]:
    """Notes on a benchmark: its prompts, the harness's own metrics, and prompts too long for the model."""
    lines = []
    if "shots" in results:
        own = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
        parts = [f"{results['shots']} examples before each question", results["source"]]
        lines.append("; ".join([*parts, f"lm-eval's own metrics: {own}"] if own else parts))
    if results.get("cut"):
        lines.append(f"{results['cut']:,} prompts exceeded the model's context and were cut at the start")
    if results.get("too_long"):
        lines.append(f"{results['too_long']:,} questions left out: an option alone exceeds the model's context")
    return lines


def failures(results: Row) -> list[str]:
    """A line for each reason why methods have no row, or none of a fit that converged."""
    lines = []
    unconverged = dict.fromkeys(results.get("not_converged", ()), UNCONVERGED)
    for word, reasons in (
        ("Failed", results.get("failed", {})),
        ("Not converged", unconverged),
        ("Left out", results.get("left_out", {})),
    ):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(title_of(name) for name in reasons if reasons[name] == reason)
            lines.append(f"{word}: {names}: {reason}.")
    return lines


# --- the table of a run ---


def _number(key: str, form: str = ".4f") -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value, ends = row.get(key), row.get(f"{key}_interval")
        if value is None:
            return ABSENT
        return format(value, form) if ends is None else interval({"value": value, **ends}, form, zero=True)

    return cell


def _against(key: str) -> Callable[[Row], str]:
    return lambda row: interval(row["against"][key], zero=True) if key in row.get("against", {}) else ABSENT


_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("nll", "NLL", _number("nll")),
    ("brier", "Brier", _number("brier")),
    ("ece", "ECE [95% interval]", lambda row: interval(row["ece"], zero=True)),
    ("debiased_ece", "debiased ECE", _number("debiased_ece")),
    ("mce", "MCE", _number("mce")),
    ("rmsce", "RMSCE", _number("rmsce")),
    ("confidence", "confidence", _number("confidence")),
    ("accuracy", "accuracy", _number("accuracy")),
    ("exact_error", "exact error", _number("exact_error")),
    ("against", "Δ ECE against temperature scaling", _against("ece")),
    ("against", "Δ Brier against temperature scaling", _against("brier")),
    ("adaptive_ece", "adaptive ECE", _number("adaptive_ece")),
    ("smooth_ece", "smooth ECE", _number("smooth_ece")),
    ("log_loss", "log loss of correctness", lambda row: "inf" if row["log_loss"] is None else f"{row['log_loss']:.4f}"),
    ("auroc", "AUROC", _number("auroc")),
    ("aurc", "AURC", _number("aurc")),
    ("excess_aurc", "excess AURC", _number("excess_aurc")),
    ("ks_error", "KS error", _number("ks_error")),
    ("debiased_l2", "debiased L2", _number("debiased_l2")),
    ("changed", "changed", _number("changed", ",")),
    ("parameters", "parameters", _number("parameters", ",")),
    ("fit_seconds", "fit (s)", _number("fit_seconds", ".2f")),
)
"""Field of a row, title, text of a cell. Fields that no row has are not shown."""
_IMPORTANCE = ("ece", "nll", "brier", "accuracy", "exact_error", "against", "mce", "confidence", "auroc")
"""The columns that a narrow terminal keeps the longest; the others follow in the order of `_COLUMNS`."""
_MEANS = {"nll": "NLL", "brier": "Brier", "accuracy": "accuracy"}
"""Titles of the figures that `held_out_table` gives with their intervals where it is asked to."""


def columns_of(sets: Iterable[Row]) -> list[tuple[str, str, Callable[[Row], str]]]:
    """Field, title and cell of every column that some method of the sets has."""
    sets = list(sets)
    fields = {key for results in sets for row in results["methods"].values() for key in row if row[key] is not None}
    reference = sets[0].get("reference", "temperature")
    named = "temperature scaling" if reference.endswith("temperature") else title_of(reference)
    return [(key, title.replace("temperature scaling", named), cell) for key, title, cell in _COLUMNS if key in fields]


def cells_of(results: Row, keys: Collection[str]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set; `keys` are the figures to show."""
    shown = [column for column in columns_of([results]) if column[0] in keys]
    rows = [[title_of(name), *(cell(row) for _, _, cell in shown)] for name, row in results["methods"].items()]
    return ["method", *(title for _, title, _ in shown)], rows


def held_out_table(document: Document, *, intervals: bool = False) -> TextTable:
    """The rows of all sets of a run in one table, the held-out set first.

    Args:
        document: of a run.
        intervals: show those of NLL, Brier score and accuracy too, where the document has them. ECE always has its.
    """
    sets = sets_of(document)
    shown = columns_of(results for _, results in sets)
    named = [(title, name, row) for title, results in sets for name, row in results["methods"].items()]
    if intervals and any("intervals" in row for *_, row in named):
        named = [
            (title, name, {**{f"{key}_interval": ends for key, ends in row.get("intervals", {}).items()}, **row})
            for title, name, row in named
        ]
        shown = [(key, f"{title} [95% interval]" if key in _MEANS else title, cell) for key, title, cell in shown]
    order = sorted(range(len(shown)), key=lambda index: _rank(shown[index][0]))
    if sets[0][1].get("unit") == "questions":
        order.sort(key=lambda index: shown[index][0] not in ("ece", "accuracy"))
    if all(compares_confidences(results) for _, results in sets):  # they differ in AUROC, and not in accuracy
        order.sort(key=lambda index: shown[index][0] not in ("ece", "brier", "auroc"))
    return TextTable(
        ", ".join(f"{title}: {counted(results)}" for title, results in sets),
        ["method", *(title for _, title, _ in shown)],
        [[title_of(name), *(cell(row) for _, _, cell in shown)] for _, name, row in named],
        tuple(index + 1 for index in order),
        groups=tuple(title for title, _, _ in named) if len(sets) > 1 else (),
    )


def _rank(key: str) -> int:
    return _IMPORTANCE.index(key) if key in _IMPORTANCE else len(_IMPORTANCE)


# --- the table of a comparison ---

_FIGURES = {
    "nll": "NLL",
    "brier": "Brier",
    "debiased_ece": "debiased ECE",
    "adaptive_ece": "adaptive ECE",
    "smooth_ece": "smooth ECE",
    "mce": "MCE",
    "auroc": "AUROC",
}


def comparison_table(results: Row, where: str) -> TextTable:
    """A row for every method of `compare`, best first: log loss and its difference from temperature scaling, and more.

    Args:
        results: the held-out set.
        where: a few words on the data.
    """

    def figure(key: str) -> Callable[[Row], str]:
        return lambda row: ABSENT if figure_of(row, key) is None else short(row[key])

    def difference(key: str) -> Callable[[Row], str]:
        return lambda row: interval(row["against"][key]) if key in row.get("against", {}) else ABSENT

    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: row["title"],
        "log loss": lambda row: "inf" if row["log_loss"] is None else short(row["log_loss"]),
        "Δ log loss [95% interval]": difference("log_loss"),
        "p (Holm)": _p_value,
        "accuracy": figure("accuracy"),
        "ECE": lambda row: short(row["ece"]["value"]),
        "ECE, 95% interval": lambda row: interval(row["ece"]).partition(" ")[2],
        **{title: figure(key) for key, title in _FIGURES.items()},
        "Δ ECE [95% interval]": difference("ece"),
        "Δ Brier [95% interval]": difference("brier"),
        "changed": lambda row: f"{row['changed']:,}",
        "parameters": lambda row: f"{row['parameters']:,}",
        "fit s": lambda row: f"{row['fit_seconds']:.2f}",
    }
    unconverged = results.get("not_converged", ())
    rows = [
        {**row, "title": title_of(name) + (" (not converged)" if name in unconverged else "")}
        for name, row in results["methods"].items()
    ]
    title = f"{where}: {counted(results)}, by {results['sort'].replace('_', ' ')}"
    return table_of(title, rows, columns, best=(list(results["methods"]).index(winner(results)),))


def _p_value(row: Row) -> str:
    p = row.get("against", {}).get("log_loss", {}).get("holm_p", math.nan)
    return ABSENT if math.isnan(p) else short(p, ".3f")
