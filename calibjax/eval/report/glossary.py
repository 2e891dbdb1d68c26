"""Definitions of what a page shows: listed at its end, and shown beside a number on hover, focus or tap."""

from collections.abc import Mapping
from typing import Any

from calibjax.eval.report.markup import Markup, element
from calibjax.eval.report.rows import binning, unit_of
from calibjax.eval.report.schema import AnySet

_DEFINITIONS = {
    "ECE": "Expected calibration error: the distance between mean confidence and accuracy in bins of confidence, "
    "averaged over predictions. 0 is calibrated. Interval: 95%, of the population's ECE in these bins.",
    "NLL": "Negative log-likelihood of what was observed, in nats per prediction; a proper score: lower is better, and "
    "no recalibration can cheat it.",
    "Brier": "Brier score: the mean of (confidence minus correctness) squared; a proper score.",
    "log loss of correctness": "Negative log-likelihood of the prediction being correct or not, in nats.",
    "accuracy": "Fraction of predictions that are correct. A temperature does not change it.",
    "confidence": "Mean probability that the model gives to its prediction. Above the accuracy: overconfident.",
    "MCE": "Maximum calibration error: the largest distance between confidence and accuracy of a bin.",
    "RMSCE": "Root of the mean squared distance between confidence and accuracy over bins.",
    "debiased ECE": "ECE corrected for the bias of bins with few points.",
    "adaptive ECE": "ECE in bins of equal numbers of points.",
    "smooth ECE": "Calibration error without bins: the residual smoothed by a kernel (Błasiok and Nakkiran 2024).",
    "AUROC": "Probability that a correct prediction has a higher confidence than a wrong one.",
    "AURC": "Area under the risk-coverage curve: mean error rate over all coverages.",
    "excess AURC": "AURC above that of a perfect ranking.",
    "KS error": "Kolmogorov-Smirnov calibration error, without bins.",
    "exact error": "Mean distance between the confidence and the known probability of the synthetic language.",
    "difference": "Difference from the first row; green is better, red is worse. Not a test of significance.",
    "Δ ECE against temperature scaling": "Paired difference in ECE with its 95% interval.",
    "distinct-2": "Fraction of pairs of words that are different: higher is more varied.",
}


def key_of(title: str) -> str | None:
    """The definition that a column's title names."""
    name = title.partition(" [")[0]
    return name if name in _DEFINITIONS else None


def term(title: str) -> Markup:
    """The title, with its definition on hover, focus and tap where there is one."""
    key = key_of(title)
    if key is None:
        return element("span", title)
    return element("span", title, class_="term", tabindex=0, aria_describedby=_id(key))


def glossary(results: AnySet) -> Markup:
    """All definitions and the conventions of a set, as a list."""
    entries = [(element("dt", name), element("dd", text, id=_id(name))) for name, text in _DEFINITIONS.items()]
    conventions = element("p", _conventions(results))
    return element("section", element("h2", "Definitions"), conventions, element("dl", entries, class_="glossary"))


def _id(key: str) -> str:
    return "d-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in key)


def _conventions(results: AnySet | Mapping[str, Any]) -> str:
    row: Mapping[str, Any] = next(iter(results["methods"].values()))
    ece, tokens = row["ece"], unit_of(results) == "tokens"
    closed = binning(ece["closed"]) if ece["closed"] in ("right", "left", "none") else ece["closed"]
    of = "the top probability of a token" if tokens else "the confidence"
    return (
        f"ECE and MCE: {ece['bins']} equal-width bins {closed} of {of}. Intervals are 95%, over "
        f"{results.get('clusters', 'sequences')}. In a reliability diagram a point is the accuracy of a bin at its "
        "mean confidence, with its interval; the curve is a kernel regression with its 95% band; the strip below "
        "is the density of the confidences. Below the diagonal: overconfident."
    )
