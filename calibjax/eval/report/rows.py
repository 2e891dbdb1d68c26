"""What a row of a report says, whatever it is drawn on: titles, colours, cells and the verdict."""

from collections.abc import Callable, Mapping
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


def _ece_against(row: Mapping[str, Any]) -> str:
    against = row.get("against", {}).get("ece")
    return (
        ABSENT if against is None else f"{against['difference']:+.4f} [{against['low']:+.4f}, {against['high']:+.4f}]"
    )


_COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("nll", "NLL", _number("nll")),
    ("brier", "Brier", _number("brier")),
    ("ece", "ECE [95% interval]", _ece),
    ("mce", "MCE", _number("mce")),
    ("confidence", "confidence", _number("confidence")),
    ("accuracy", "accuracy", _number("accuracy")),
    ("exact_error", "exact error", _number("exact_error")),
    ("against", "ECE less single temperature", _ece_against),
    ("adaptive_ece", "adaptive ECE", _number("adaptive_ece")),
    ("smooth_ece", "smooth ECE", _number("smooth_ece")),
    ("log_loss", "log loss of being right", lambda row: "inf" if row["log_loss"] is None else f"{row['log_loss']:.4f}"),
    ("auroc", "AUROC", _number("auroc")),
    ("changed", "changed", _number("changed", ",")),
    ("parameters", "parameters", _number("parameters", ",")),
    ("fit_seconds", "fit (s)", _number("fit_seconds", ".2f")),
)
"""Field of a row, title, text of a cell. Those that no row has are not shown."""


def unit_of(results: Mapping[str, Any]) -> str:
    return results.get("unit", "tokens")


def verdict(results: Mapping[str, Any]) -> str:
    """One line: whether ATS came out truer than the single temperature and the model as it is, a fine-tuned model than
    the one it was made from, or a model with an edited residual stream than without.

    Worse on expected calibration error or on negative log-likelihood counts as worse.
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
    ece = f"ECE {ats['ece']['value']:.4f} against {single['ece']['value']:.4f}"
    nll = f"NLL {ats['nll']:.4f} against {single['nll']:.4f}"
    worse = [
        text
        for text, lost in (
            (ece, ats["ece"]["value"] > single["ece"]["value"]),
            (nll, ats["nll"] > single["nll"]),
        )
        if lost
    ]
    if worse:
        return f"WARNING: ATS is worse than a single temperature here: {'; '.join(worse)}."
    if ats["ece"]["value"] > base["ece"]["value"] or ats["nll"] > base["nll"]:
        return (
            f"WARNING: ATS is worse than the uncalibrated model here: ECE {ats['ece']['value']:.4f} against "
            f"{base['ece']['value']:.4f}; NLL {ats['nll']:.4f} against {base['nll']:.4f}."
        )
    before = f"uncalibrated {base['ece']['value']:.4f}, {base['nll']:.4f}"
    return f"ATS is truer than a single temperature: {ece}; {nll} ({before})."


def cells_of(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set."""
    methods = results["methods"]
    shown = [(title, cell) for key, title, cell in _COLUMNS if any(key in row for row in methods.values())]
    rows = [[title_of(name), *(cell(row) for _, cell in shown)] for name, row in methods.items()]
    return ["method", *(title for title, _ in shown)], rows


def sets_of(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Titles and results of the sets of a run, the held-out one first."""
    sets = [("held out", document["held_out"])]
    return sets + [(f"transfer to {name}", results) for name, results in document.get("transfer", {}).items()]
