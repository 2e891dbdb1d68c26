"""What a row of a report says, whatever it is drawn on: titles, colours, cells and the verdict."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

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
    "temperature": "single temperature",
    "ats": "ATS",
    "base": "base model",
    "base_temperature": "base model + temperature",
    "edited": "residual edited",
    "fine_tuned": "fine-tuned",
    "fine_tuned_temperature": "fine-tuned + temperature",
}


ABSENT = "\N{EN DASH}"


class TextTable(NamedTuple):
    """A table before it is drawn; all but the first column are numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Part(NamedTuple):
    """What a kind of run has to show beside its sets: sentences, names of figures, tables."""

    title: str
    findings: list[str]
    figures: tuple[str, ...]
    tables: list[TextTable]


def figure_of(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a method's row; None where it has none."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def title_of(name: str) -> str:
    """A method as it is shown."""
    return _TITLES.get(name, name)


def binning(closed: str) -> str:
    """The edges of a bin, as mathematics writes them."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}[closed]


def _number(key: str, form: str = ".4f") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: ABSENT if row.get(key) is None else format(row[key], form)


def _ece(row: Mapping[str, Any]) -> str:
    return f"{row['ece']['value']:.4f} [{row['ece']['low']:.4f}, {row['ece']['high']:.4f}]"


def _accuracy(row: Mapping[str, Any]) -> str:
    ends = row.get("accuracy_interval")
    return f"{row['accuracy']:.4f}" + (f" [{ends['low']:.4f}, {ends['high']:.4f}]" if ends else "")


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
    ("against", "ECE less single temperature", _ece_against),
    ("adaptive_ece", "adaptive ECE", _number("adaptive_ece")),
    ("smooth_ece", "smooth ECE", _number("smooth_ece")),
    ("log_loss", "log loss of being right", lambda row: "inf" if row["log_loss"] is None else f"{row['log_loss']:.4f}"),
    ("auroc", "AUROC", _number("auroc")),
    ("aurc", "AURC", _number("aurc")),
    ("excess_aurc", "excess AURC", _number("excess_aurc")),
    ("ks_error", "KS error", _number("ks_error")),
    ("debiased_l2", "debiased L2", _number("debiased_l2")),
    ("changed", "changed", _number("changed", ",")),
    ("parameters", "parameters", _number("parameters", ",")),
    ("fit_seconds", "fit (s)", _number("fit_seconds", ".2f")),
)
"""Field of a row, title, text of a cell. Those that no row has are not shown."""


def unit_of(results: Mapping[str, Any]) -> str:
    return results.get("unit", "tokens")


def described(results: Mapping[str, Any]) -> str:
    """How many predictions a set has, and what is taken for their confidence where that is said."""
    said = f"; confidence: {results['confidence']}" if "confidence" in results else ""
    return f"{results['tokens']:,} {unit_of(results)}{said}"


def remarks(results: Mapping[str, Any]) -> list[str]:
    """What else is to be known of the answers to a benchmark: how it was asked, and what the model could not read."""
    lines = []
    if "shots" in results:
        own = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
        lines.append(f"{results['shots']} examples before a question; {results['source']}; the harness's own: {own}")
    if results.get("cut"):
        lines.append(f"{results['cut']:,} prompts were longer than the model reads and lost their start")
    if results.get("too_long"):
        lines.append(f"{results['too_long']:,} questions left out: an option alone is longer than the model reads")
    return lines


def verdict(results: Mapping[str, Any]) -> str:
    """One line: whether ATS came out truer than the single temperature and the model as it is, a fine-tuned model than
    the one it was made from, or a model with an edited residual stream than without.

    Worse on expected calibration error or on negative log-likelihood (or, without one, Brier score) counts as worse.
    """
    methods = results["methods"]
    if {"base", "fine_tuned"} <= methods.keys():
        before, after = methods["base"], methods["fine_tuned"]
        figures = (
            f"ECE {after['ece']['value']:.4f} against {before['ece']['value']:.4f}; "
            f"NLL {after['nll']:.4f} against {before['nll']:.4f}"
        )
        if after["ece"]["value"] > before["ece"]["value"] or after["nll"] > before["nll"]:
            return f"WARNING: the fine-tuned model is worse than the base model here: {figures}."
        return f"The fine-tuned model is truer than the base model: {figures}."
    if {"uncalibrated", "edited"} <= methods.keys():
        before, after = methods["uncalibrated"], methods["edited"]
        figures = (
            f"ECE {after['ece']['value']:.4f} against {before['ece']['value']:.4f}, accuracy {after['accuracy']:.4f} "
            f"against {before['accuracy']:.4f}"
        )
        if after["ece"]["value"] > before["ece"]["value"]:
            return f"WARNING: the edit chosen on one half makes the other half worse: {figures}."
        return f"Edited along its calibration direction, on the half that did not choose it: {figures}."
    if not {"ats", "temperature", "uncalibrated"} <= methods.keys():
        return ""
    ats, single, base = (methods[name] for name in ("ats", "temperature", "uncalibrated"))
    # Of written answers there is no likelihood of the right one: the Brier score takes its place.
    key, title = ("brier", "Brier") if any(row["nll"] is None for row in (ats, single, base)) else ("nll", "NLL")
    ece = f"ECE {ats['ece']['value']:.4f} against {single['ece']['value']:.4f}"
    nll = f"{title} {ats[key]:.4f} against {single[key]:.4f}"
    worse = [
        text
        for text, lost in (
            (ece, ats["ece"]["value"] > single["ece"]["value"]),
            (nll, ats[key] > single[key]),
        )
        if lost
    ]
    if worse:
        return f"WARNING: ATS is worse than a single temperature here: {'; '.join(worse)}."
    if ats["ece"]["value"] > base["ece"]["value"] or ats[key] > base[key]:
        return (
            f"WARNING: ATS is worse than the uncalibrated model here: ECE {ats['ece']['value']:.4f} against "
            f"{base['ece']['value']:.4f}; {title} {ats[key]:.4f} against {base[key]:.4f}."
        )
    before = f"uncalibrated {base['ece']['value']:.4f}, {base[key]:.4f}"
    return f"ATS is truer than a single temperature: {ece}; {nll} ({before})."


NARROW = tuple(key for key, *_ in _COLUMNS if key not in ("rmsce", "debiased_ece"))
"""The fields of a table of tokens in a terminal of 120 columns; the page has all."""

SHORT = ("nll", "brier", "ece", "rmsce", "confidence", "accuracy", "against", "auroc")
"""Columns of a benchmark in a terminal."""


def cells_of(results: Mapping[str, Any], columns: Collection[str] | None = None) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set; `columns` are the fields to show, None for all."""
    methods = results["methods"]
    shown = [
        (title, cell)
        for key, title, cell in _COLUMNS
        if any(key in row for row in methods.values()) and (columns is None or key in columns)
    ]
    rows = [[title_of(name), *(cell(row) for _, cell in shown)] for name, row in methods.items()]
    return ["method", *(title for title, _ in shown)], rows


def sets_of(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Titles and results of the sets of a run, the held-out one first."""
    sets = [(document["held_out"].get("title", "held out"), document["held_out"])]
    tasks = document.get("tasks", {})
    if len(tasks) > 1:
        sets += tasks.items()
    return sets + [(f"transfer to {name}", results) for name, results in document.get("transfer", {}).items()]
