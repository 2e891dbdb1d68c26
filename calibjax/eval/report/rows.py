"""The rows of a report, in the terminal and on the page: titles, colours, columns and cells."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from calibjax.eval.report.schema import AnySet, ComparisonSet, Difference, Document

# Okabe and Ito's colour-blind safe set.
COLOURS = {
    "uncalibrated": "#D55E00",
    "temperature": "#0072B2",
    "ats": "#009E73",
    "base": "#D55E00",
    "base_temperature": "#E69F00",
    "fine_tuned": "#0072B2",
    "fine_tuned_temperature": "#56B4E9",
    "edited": "#0072B2",
    "pretrained": "#D55E00",
    "partition": "#E69F00",
    "lhts": "#0072B2",
}
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


ABSENT = "\N{EN DASH}"


class TextTable(NamedTuple):
    """A table before it is drawn; all but the first column are numbers.

    Attributes:
        title: above the table.
        columns: titles of the columns.
        rows: cells of each row.
        order: numbers of columns but the first, the most important first; the others follow from left to right. A
            terminal that is too narrow drops columns from the end of this order.
        best: numbers of the rows that are highlighted.
        groups: of each row the title of its group, which stands above the group's first row; empty for none.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    order: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


class Part(NamedTuple):
    """A section for one kind of run, beside its sets: findings as sentences, names of figures, tables."""

    title: str
    findings: list[str]
    figures: tuple[str, ...]
    tables: list[TextTable]


def figure_of(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a method's row; None if the row does not have it."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def title_of(name: str) -> str:
    """The displayed name of a method."""
    return _TITLES.get(name, name)


def binning(closed: str) -> str:
    """The edges of a bin as an interval."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}[closed]


def _number(key: str, form: str = ".4f") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: ABSENT if row.get(key) is None else format(row[key], form)


UNCONVERGED = (
    "the fit ended before an optimum; separable data, and classes that are never the label, have no finite one"
)


def _ece(row: Mapping[str, Any]) -> str:
    return f"{row['ece']['value']:.4f} [{row['ece']['low']:.4f}, {row['ece']['high']:.4f}]"


def _accuracy(row: Mapping[str, Any]) -> str:
    ends = row.get("accuracy_interval")
    return f"{row['accuracy']:.4f}" + (f" [{ends['low']:.4f}, {ends['high']:.4f}]" if ends else "")


def _with_interval(key: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        ends = row.get("intervals", {}).get(key)
        return _number(key)(row) + (f" [{ends['low']:.4f}, {ends['high']:.4f}]" if ends else "")

    return cell


def _ece_against(row: Mapping[str, Any]) -> str:
    against = row.get("against", {}).get("ece")
    return (
        ABSENT if against is None else f"{against['difference']:+.4f} [{against['low']:+.4f}, {against['high']:+.4f}]"
    )


_COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("nll", "NLL", _number("nll")),
    ("brier", "Brier", _number("brier")),
    ("ece", "ECE [95% interval]", _ece),
    ("debiased_ece", "debiased ECE", _number("debiased_ece")),
    ("mce", "MCE", _number("mce")),
    ("rmsce", "RMSCE", _number("rmsce")),
    ("confidence", "confidence", _number("confidence")),
    ("accuracy", "accuracy", _accuracy),
    ("exact_error", "exact error", _number("exact_error")),
    ("against", "Δ ECE against temperature scaling", _ece_against),
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


_INTERVALS = {"nll": "NLL", "brier": "Brier", "accuracy": "accuracy"}
"""Titles of the figures that `held_out_table` gives with their intervals where it is asked to."""


def short(value: float, form: str = ".4f") -> str:
    """A number without the zero before its decimal point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def signed(against: Difference, form: str = ".4f") -> str:
    """A difference with its sign and its interval."""
    difference, low, high = (short(against[key], f"+{form}") for key in ("difference", "low", "high"))
    return f"{difference} [{low}, {high}]"


def is_lower(against: Difference) -> bool:
    """Whether a figure is significantly lower than the other: the interval of the difference lies below 0."""
    return against["high"] < 0


def is_higher(against: Difference) -> bool:
    """Whether a figure is significantly higher than the other: the interval of the difference lies above 0."""
    return against["low"] > 0


def winner(results: ComparisonSet) -> str:
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
    return min(candidates, key=lambda name: candidates[name]["log_loss"] or 0.0, default=fallback)


def _beats(against: Difference | None) -> bool:
    return against is not None and is_lower(against) and against.get("holm_p", math.nan) < 0.05


def significance_mark(against: Difference) -> str:
    """`+` for a significantly lower (better) figure, `-` for a significantly higher one, else a space."""
    return "+" if is_lower(against) else "-" if is_higher(against) else " "


def unit_of(results: Mapping[str, Any]) -> str:
    """The name of the predictions of a set."""
    return results.get("unit", "tokens")


def described(results: Mapping[str, Any]) -> str:
    """The number of predictions of a set, and the definition of their confidence if the document has it."""
    definition = f"; confidence: {results['confidence']}" if "confidence" in results else ""
    return f"{counted(results)}{definition}"


def counted(results: Mapping[str, Any]) -> str:
    """The number of predictions of a set."""
    return f"{results['tokens']:,} {unit_of(results)}"


def compares_confidences(results: Mapping[str, Any]) -> bool:
    """Whether the rows of a set are several confidences in the same answers, none of them corrected."""
    others = results["methods"].keys() - {"uncalibrated"}
    answers = unit_of(results) == "questions" and "sort" not in results
    return answers and 0 < len(others) < len(results["methods"]) and "temperature" not in others


def remarks(results: Mapping[str, Any]) -> list[str]:
    """Notes on a benchmark: its prompts, the harness's own metrics, and prompts too long for the model."""
    lines = []
    if "shots" in results:
        own = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
        told = [f"{results['shots']} examples before each question", results["source"]]
        lines.append("; ".join([*told, f"lm-eval's own metrics: {own}"] if own else told))
    if results.get("cut"):
        lines.append(f"{results['cut']:,} prompts exceeded the model's context and were cut at the start")
    if results.get("too_long"):
        lines.append(f"{results['too_long']:,} questions left out: an option alone exceeds the model's context")
    return lines


_IMPORTANCE = ("ece", "nll", "brier", "accuracy", "exact_error", "against", "mce", "confidence", "auroc")
"""The columns that a narrow terminal keeps the longest; the others follow in the order of `_COLUMNS`."""


def cells_of(results: Mapping[str, Any], keys: Collection[str]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set; `keys` are the figures to show."""
    shown = [column for column in _columns_of([results]) if column[0] in keys]
    rows = [[title_of(name), *(cell(row) for _, _, cell in shown)] for name, row in results["methods"].items()]
    return ["method", *(title for _, title, _ in shown)], rows


def _columns_of(sets: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, Callable[[Mapping[str, Any]], str]]]:
    sets = list(sets)
    found = {key for results in sets for row in results["methods"].values() for key in row if row[key] is not None}
    columns = [column for column in _COLUMNS if column[0] in found]
    reference = sets[0].get("reference", "temperature") if sets else "temperature"
    if reference.endswith("temperature"):
        return columns
    return [(key, title.replace("temperature scaling", title_of(reference)), cell) for key, title, cell in columns]


def held_out_table(document: Document, *, intervals: bool = False) -> TextTable:
    """The rows of all sets of a run in one table: the held-out set first. ECE has its interval, and with `intervals`
    so have NLL, Brier score and accuracy, where the document has them."""
    sets = sets_of(document)
    shown = _columns_of(results for _, results in sets)
    if intervals and any("intervals" in row for _, results in sets for row in results["methods"].values()):
        shown = [
            (key, f"{_INTERVALS[key]} [95% interval]", _with_interval(key)) if key in _INTERVALS else (key, title, cell)
            for key, title, cell in shown
        ]
    named = [(title, name, row) for title, results in sets for name, row in results["methods"].items()]
    rows = [[title_of(name), *(cell(row) for _, _, cell in shown)] for _, name, row in named]
    groups = tuple(title for title, _, _ in named) if len(sets) > 1 else ()
    keys = [key for key, *_ in shown]
    order = sorted(range(len(keys)), key=lambda i: (keys[i] not in _IMPORTANCE, _rank(keys[i])))
    if all(compares_confidences(results) for _, results in sets):  # they differ in AUROC, and not in accuracy
        order.sort(key=lambda i: keys[i] not in ("ece", "brier", "auroc"))
    counts = ", ".join(f"{title}: {counted(results)}" for title, results in sets)
    columns = ["method", *(title for _, title, _ in shown)]
    return TextTable(counts, columns, rows, tuple(i + 1 for i in order), groups=groups)


def _rank(key: str) -> int:
    return _IMPORTANCE.index(key) if key in _IMPORTANCE else [name for name, *_ in _COLUMNS].index(key)


def sets_of(document: Document) -> list[tuple[str, AnySet]]:
    """Titles and results of the sets of a run, the held-out one first."""
    sets: list[tuple[str, AnySet]] = [(document["held_out"].get("title", "held out"), document["held_out"])]
    if "tasks" in document and len(document["tasks"]) > 1:
        sets += document["tasks"].items()
    if "transfer" in document:
        sets += [(f"transfer to {name}", results) for name, results in document["transfer"].items()]
    return sets
