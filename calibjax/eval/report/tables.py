"""The methods of a set as rows of a table, for the terminal, the page and the model card: titles, columns and cells."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from calibjax.eval.report.schema import Document
from calibjax.runtime.errors import quantity

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
UNCONVERGED = "no optimum reached; separable data, scores at chance and classes that never occur have no finite one"
_BEFORE = ("uncalibrated", "base", "pretrained")
_AFTER = ("ats", "fine_tuned", "edited", "lhts", "temperature")


class TextTable(NamedTuple):
    """A table before it is drawn; every column but the first holds numbers.

    Attributes:
        order: indices of the columns from 1, the most important first; the others follow from left to right. A terminal
            that is too narrow drops columns from the end of this order.
        best: indices of the rows that are highlighted.
        groups: title of the group of each row, shown above the group's first row; empty if there are no groups.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    order: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], **options: Any) -> TextTable:
    """A table with a row for each of `rows`, whose cells `columns` computes; `options` are fields of `TextTable`."""
    cells = [[text(row) for text in columns.values()] for row in rows]
    return TextTable(title, list(columns), cells, **options)


# --- numbers ---


def short(value: float, form: str = ".4f") -> str:
    """A number without the zero before its decimal point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def interval(row: Row, form: str = ".4f", *, leading_zero: bool = False) -> str:
    """A figure, or a difference with its sign, and its interval: "value [low, high]"."""
    name, form = ("difference", f"+{form}") if "difference" in row else ("value", form)
    value, low, high = row[name], row["low"], row["high"]
    if leading_zero:
        return f"{value:{form}} [{low:{form}}, {high:{form}}]"
    return f"{short(value, form)} [{short(low, form)}, {short(high, form)}]"


def scientific(log_value: float) -> str:
    """e^log_value as text, even where a float cannot hold it; rounded down, so that a lower bound remains one."""
    exponent = math.floor(log_value / math.log(10))
    if -2 <= exponent < 4:
        return f"{math.floor(1e4 * math.exp(log_value)) / 1e4:.4f}"
    digits = math.floor(100 * math.exp(log_value - exponent * math.log(10))) / 100
    return f"{digits:.2f}e{exponent:+d}"


def is_lower(against: Row) -> bool:
    """Whether the interval of a difference lies below 0: the figure is significantly lower than the other."""
    return against["high"] < 0


def is_higher(against: Row) -> bool:
    """Whether the interval of a difference lies above 0: the figure is significantly higher than the other."""
    return against["low"] > 0


def differs(against: Row) -> bool:
    """Whether the interval of a difference excludes 0."""
    return is_lower(against) or is_higher(against)


# --- sets ---


def title_of(name: str) -> str:
    return _TITLES.get(name, name)


def figure_of(row: Row, key: str) -> float | None:
    return row["ece"]["value"] if key == "ece" else row.get(key)


def binning(closed: str) -> str:
    """The edges of a bin as an interval."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}.get(closed, closed)


def unit_of(results: Row) -> str:
    return results.get("unit", "tokens")


def counted(results: Row) -> str:
    return f"{results['tokens']:,} {unit_of(results)}"


def sets_of(document: Document) -> list[tuple[str, Row]]:
    """Titles and results of the sets of a run, the held-out one first, then its parts and texts of other kinds."""
    sets = [(document["held_out"].get("title", "held out"), document["held_out"])]
    if len(document.get("tasks", ())) > 1:
        sets += document["tasks"].items()
    for name, row in document.get("transfer", {}).items():
        sets.append((name if name.endswith(", held out") else f"transfer to {name}", row))
    return sets


def pair_of(results: Row) -> tuple[str, str]:
    """The names of the rows before and after; "after" is the winner of a comparison, else what the run fitted."""
    names = list(results["methods"])
    before = next((name for name in _BEFORE if name in names), names[0])
    if "sort" in results:
        return before, winner(results)
    fitted = (name for key in _AFTER for name in names if name.partition("-")[0] == key)
    return before, next(fitted, before)


def winner(results: Row) -> str:
    """The method to use: the one with the lowest log loss among those that beat temperature scaling.

    A method beats it if the interval of the difference lies below 0 and p < 0.05 after Holm's correction; a fit that
    did not converge never does. If no method beats it, temperature scaling is returned. If temperature scaling has no
    finite log loss, the lowest of the others wins without a test.
    """
    rows, reference = results["methods"], results["reference"]
    has_loss = figure_of(rows.get(reference, {}), "log_loss") is not None
    losses = {}
    for name, row in rows.items():
        test = row.get("against", {}).get("log_loss")
        beats = bool(test) and is_lower(test) and test.get("holm_p", math.nan) < 0.05
        is_usable = row["log_loss"] is not None and name not in results.get("not_converged", ())
        if is_usable and (beats or not has_loss):
            losses[name] = row["log_loss"]
    fallback = reference if reference in rows else "uncalibrated"
    return min(losses, key=losses.__getitem__, default=fallback)


def compares_confidences(results: Row) -> bool:
    """Whether the rows of a set are several confidences in the same answers, none of them corrected."""
    others = results["methods"].keys() - {"uncalibrated"}
    answers = unit_of(results) == "questions" and "sort" not in results
    return answers and 0 < len(others) < len(results["methods"]) and "temperature" not in others


def remarks(results: Row) -> list[str]:
    """Notes on a benchmark: its prompts, the harness's own metrics, and prompts too long for the model."""
    lines = []
    if "shots" in results:
        parts = [f"{quantity(results['shots'], 'example')} before each question", results["source"]]
        if results["harness"]:
            harness_metrics = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
            parts.append(f"lm-eval's own metrics: {harness_metrics}")
        lines.append("; ".join(parts))
    if results.get("cut"):
        lines.append(f"{quantity(results['cut'], 'prompt')} cut at the start to the model's context")
    if results.get("too_long"):
        lines.append(f"{quantity(results['too_long'], 'question')} left out: an option exceeds the model's context")
    return lines


def failures(results: Row) -> list[str]:
    """A line for each reason why methods failed, did not converge or were left out."""
    lines = []
    reasons_by_kind = {
        "Failed": results.get("failed", {}),
        "Not converged": dict.fromkeys(results.get("not_converged", ()), UNCONVERGED),
        "Left out": results.get("left_out", {}),
    }
    for word, reasons in reasons_by_kind.items():
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(title_of(name) for name in reasons if reasons[name] == reason)
            lines.append(f"{word}: {names}: {reason}.")
    return lines


# --- the table of a run ---


def show(*path: str, form: str = ".4f", leading_zero: bool = True, absent: str = ABSENT) -> Callable[[Row], str]:
    """The function that shows the entry at a path in a row: a number, a figure with its interval, or a text.

    Without `leading_zero` 0.1234 is .1234. A row without such an entry shows `absent`.
    """

    def text(row: Row) -> str:
        value: Any = row
        for name in path:
            value = None if value is None else value.get(name)
        ends = row.get(f"{path[0]}_interval")
        if ends is not None:
            value = {"value": value, **ends}
        if value is None or isinstance(value, str):
            return value or absent
        if isinstance(value, dict):
            return interval(value, form, leading_zero=leading_zero)
        return format(value, form) if leading_zero else short(value, form)

    return text


class Column(NamedTuple):
    """A figure of the methods of a set: a field of their rows, its title, and the text of a row's cell."""

    key: str
    title: str
    text: Callable[[Row], str]
    better: str = ""  # "lower" or "higher", where one direction is better


COLUMNS = (
    Column("nll", "NLL", show("nll"), "lower"),
    Column("brier", "Brier", show("brier"), "lower"),
    Column("ece", "ECE [95% interval]", show("ece"), "lower"),
    Column("debiased_ece", "debiased ECE", show("debiased_ece"), "lower"),
    Column("mce", "MCE", show("mce"), "lower"),
    Column("rmsce", "RMSCE", show("rmsce"), "lower"),
    Column("confidence", "confidence", show("confidence")),
    Column("accuracy", "accuracy", show("accuracy"), "higher"),
    Column("exact_error", "exact error", show("exact_error"), "lower"),
    Column("against", "Δ ECE against temperature scaling", show("against", "ece")),
    Column("against", "Δ Brier against temperature scaling", show("against", "brier")),
    Column("adaptive_ece", "adaptive ECE", show("adaptive_ece"), "lower"),
    Column("smooth_ece", "smooth ECE", show("smooth_ece"), "lower"),
    Column("log_loss", "log loss of correctness", show("log_loss", absent="inf"), "lower"),
    Column("auroc", "AUROC", show("auroc"), "higher"),
    Column("aurc", "AURC", show("aurc"), "lower"),
    Column("excess_aurc", "excess AURC", show("excess_aurc"), "lower"),
    Column("ks_error", "KS error", show("ks_error"), "lower"),
    Column("debiased_l2", "debiased L2", show("debiased_l2"), "lower"),
    Column("changed", "changed", show("changed", form=",")),
    Column("parameters", "parameters", show("parameters", form=",")),
    Column("fit_seconds", "fit (s)", show("fit_seconds", form=".2f")),
)
"""Every figure of a method, in the order of the columns. Figures that no row has are not shown."""
_IMPORTANCE = ("ece", "nll", "brier", "accuracy", "exact_error", "against", "mce", "confidence", "auroc")
"""The columns that a narrow terminal keeps the longest; the others follow in the order of `COLUMNS`."""


def columns_of(sets: Sequence[Row]) -> list[Column]:
    rows = itertools.chain.from_iterable(results["methods"].values() for results in sets)
    fields = {key for row in rows for key in row if row[key] is not None}
    reference = sets[0].get("reference", "temperature")
    named = "temperature scaling" if reference.endswith("temperature") else title_of(reference)
    present = [column for column in COLUMNS if column.key in fields]
    return [column._replace(title=column.title.replace("temperature scaling", named)) for column in present]


def held_out_table(document: Document, *, intervals: bool = False) -> TextTable:
    """The rows of all sets of a run in one table, the held-out set first.

    ECE always has an interval; `intervals` adds intervals of NLL, Brier score and accuracy of tokens.
    """
    sets = sets_of(document)
    shown = columns_of([results for _, results in sets])
    rows, groups, has_intervals = [], [], False
    for title, results in sets:
        for name, row in results["methods"].items():
            ends_of = row.get("intervals", {}) if intervals else {}
            has_intervals |= bool(ends_of)
            row = {**row, **{f"{key}_interval": ends for key, ends in ends_of.items()}}
            rows.append([title_of(name), *(column.text(row) for column in shown)])
            groups.append(title)
    with_interval = ("nll", "brier", "accuracy") if has_intervals else ()
    titles = [f"{column.title} [95% interval]" if column.key in with_interval else column.title for column in shown]
    first = ("ece", "accuracy") if unit_of(sets[0][1]) == "questions" else ()
    if all(compares_confidences(results) for _, results in sets):  # they differ in AUROC, and not in accuracy
        first = ("ece", "brier", "auroc")
    keys = [column.key for column in shown]
    importance = [*first, *_IMPORTANCE, *keys]
    order = sorted(range(len(keys)), key=lambda index: importance.index(keys[index]))
    return TextTable(
        ", ".join(f"{title}: {counted(results)}" for title, results in sets),
        ["method", *titles],
        rows,
        tuple(index + 1 for index in order),
        groups=tuple(groups) if len(sets) > 1 else (),
    )


def comparison_table(results: Row, where: str) -> TextTable:
    """A row for every method of `compare`, best first: log loss, its difference from temperature scaling, and more."""
    figure = functools.partial(show, leading_zero=False)
    title_by_key = {column.key: column.title for column in COLUMNS}
    further = ("nll", "brier", "debiased_ece", "adaptive_ece", "smooth_ece", "mce", "auroc")
    columns: dict[str, Callable[[Row], str]] = {
        "method": show("title"),
        "log loss": figure("log_loss", absent="inf"),
        "Δ log loss [95% interval]": figure("against", "log_loss"),
        "p (Holm)": figure("against", "log_loss", "holm_p", form=".3f"),
        "accuracy": figure("accuracy"),
        "ECE": figure("ece", "value"),
        "interval of ECE": lambda row: interval(row["ece"]).partition(" ")[2],
        **{title_by_key[key]: figure(key) for key in further},
        "Δ ECE [95% interval]": figure("against", "ece"),
        "Δ Brier [95% interval]": figure("against", "brier"),
        "changed": show("changed", form=","),
        "parameters": show("parameters", form=","),
        "fit s": show("fit_seconds", form=".2f"),
    }
    unconverged = results.get("not_converged", ())
    rows = [
        {**row, "title": title_of(name) + (" (not converged)" if name in unconverged else "")}
        for name, row in results["methods"].items()
    ]
    title = f"{where}: {counted(results)}, by {results['sort'].replace('_', ' ')}"
    return table_of(title, rows, columns, best=(list(results["methods"]).index(winner(results)),))
