"""The figures of a comparison: one row per method, each compared with temperature scaling."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from calibjax import metrics
from calibjax.eval.compare.contenders import Outcome, Result, not_converged
from calibjax.eval.figures_json import accuracy_of_bins, curve_json, ece_json, reliability_json
from calibjax.eval.report.tables import figure_of
from calibjax.metrics import CalibrationSums, Closed

SortKey = Literal[
    "ece",
    "debiased_ece",
    "adaptive_ece",
    "smooth_ece",
    "mce",
    "brier",
    "log_loss",
    "nll",
    "auroc",
    "parameters",
    "fit_seconds",
]
COMPARED = ("ece", "brier", "log_loss", "nll")
"""Figures that are compared with those of temperature scaling, on the same resamples."""


def comparison_json(
    results: Mapping[str, Result],
    *,
    reference: str,
    groups: np.ndarray | None = None,
    bins: int = 15,
    closed: Closed = "right",
    resamples: int = 1000,
    seed: int = 0,
    sort: SortKey = "log_loss",
) -> dict[str, dict[str, Any]]:
    """The rows of a comparison, best first: the fields of `results_json` and those that a comparison adds.

    `nll` is the negative log-likelihood of the true class, and null for methods that give a confidence alone;
    `log_loss` is that of correctness (`metrics.negative_log_likelihood`), which all methods have: null where it is
    infinite, because `certain_and_wrong` predictions were given 0 or 1 and were not so. Further: debiased_ece
    (`metrics.error_interval`), adaptive_ece, smooth_ece, auroc; `changed`, the number of predictions that the method
    changed; parameters, fit_seconds. `against` holds, for each of `COMPARED`, the difference from `reference`:
    difference, 95% interval, fraction of resamples in which it is lower, p-value (`metrics.Comparison`), and that
    p-value corrected for the number of rows compared (`metrics.holm`); `against_uncalibrated` the same, uncorrected.

    Args:
        results: name -> result. `changed` counts from "uncalibrated", or else from the first.
        reference: name of temperature scaling.
        groups: labels `[N]`; points of one group are resampled together.
        bins, closed: of the reliability bins.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        sort: figure to order the rows by; fits that did not converge follow the others.
    """
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    binning_of_sums: dict[str, Any] = {"groups": groups, "bins": bins, "closed": closed, "seed": seed}
    resampled = {name: _resample(result.outcome, binning_of_sums, options) for name, result in results.items()}
    base = results.get("uncalibrated", next(iter(results.values()))).outcome
    rows = {
        name: _row(result, resampled[name], base, {"bins": bins, "closed": closed}, options)
        for name, result in results.items()
    }
    for name, result in results.items():
        pair = result.outcome.confidence, result.outcome.correct
        rows[name]["curve"] = curve_json(metrics.reliability_curve(*pair, groups=groups, seed=seed))
    for name, row in rows.items():
        for field, other in (("against", reference), ("against_uncalibrated", "uncalibrated")):
            if other in rows:
                pairs = (row, rows[other]), (resampled[name], resampled[other])
                row[field] = {} if name == other else _differences(*pairs, options)
    _correct(rows)
    unconverged = not_converged(results)
    return dict(sorted(rows.items(), key=lambda item: (item[0] in unconverged, *_order(item[1], sort))))


def _correct(rows: Mapping[str, dict[str, Any]]) -> None:
    """Adds `holm_p` to every difference: corrected for all rows that are compared in the same figure."""
    for key in COMPARED:
        compared = {name: against[key] for name, row in rows.items() if key in (against := row.get("against", {}))}
        corrected = metrics.holm({name: against.get("p_value", math.nan) for name, against in compared.items()})
        for name, against in compared.items():
            against["holm_p"] = corrected[name]


class _Resampled(NamedTuple):
    """The sums of a method with its log loss, those with its likelihood or None, and its figures on each resample."""

    sums: CalibrationSums
    likelihood: CalibrationSums | None
    draws: dict[str, np.ndarray]


def _resample(outcome: Outcome, binning_of_sums: Mapping[str, Any], options: Mapping[str, Any]) -> _Resampled:
    def sums_of(log_prob: np.ndarray | None) -> CalibrationSums:
        return metrics.pooled_sums(outcome.confidence, outcome.correct, log_prob=log_prob, **binning_of_sums)

    sums = sums_of(None)
    values = metrics.resample_sums(sums, _scores_and_bins, **options)
    draws = {"brier": values[:, 0], "log_loss": values[:, 1], "bins": values[:, 2:]}
    if outcome.log_prob is None:
        return _Resampled(sums, None, draws)
    likelihood = sums_of(outcome.log_prob)
    draws["nll"] = metrics.resample_sums(likelihood, _scores_and_bins, **options)[:, 1]
    return _Resampled(sums, likelihood, draws)


def _row(
    result: Result, resampled: _Resampled, base: Outcome, convention: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    outcome, (sums, likelihood, draws) = result.outcome, resampled
    row: dict[str, Any] = metrics.summarise(sums)
    log_loss = row.pop("nll")
    pair = np.asarray(outcome.confidence), np.asarray(outcome.correct)
    unknown = base.choice is None or outcome.choice is None
    row |= {
        "nll": None if likelihood is None else _finite(metrics.summarise(likelihood)["nll"]),
        "log_loss": _finite(log_loss),
        "certain_and_wrong": _certain_and_wrong(outcome),
        **ece_json(metrics.error_interval(sums, **options), **convention),
        "adaptive_ece": _finite(float(metrics.adaptive_calibration_error(*pair, bins=convention["bins"]))),
        "smooth_ece": _finite(float(metrics.smooth_ece(*pair))),
        "auroc": _finite(float(metrics.auroc(*pair))),
        "changed": 0 if unknown else int((base.choice != outcome.choice).sum()),
        "parameters": result.parameters,
        "fit_seconds": round(result.fit_seconds, 4),
        "reliability": reliability_json(metrics.total(sums), draws["bins"]),
    }
    return row


def _differences(
    rows: tuple[dict[str, Any], dict[str, Any]], resampled: tuple[_Resampled, _Resampled], options: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """The figures of the first row compared with the second's; without those that one of both does not have."""
    first, second = resampled
    ece: Any = metrics.error_comparison(first.sums, second.sums, **options)._asdict()
    out: dict[str, dict[str, float]] = {"ece": ece}
    for key in COMPARED:
        one, two = (figure_of(row, key) for row in rows)
        if key != "ece" and one is not None and two is not None and key in first.draws and key in second.draws:
            comparison: Any = metrics.compare_resamples(one - two, first.draws[key], second.draws[key])._asdict()
            out[key] = comparison
    return out


def _scores_and_bins(sums: CalibrationSums) -> np.ndarray:
    """Brier score and log loss of each resample, and the accuracy of each bin."""
    points = sums.whole()[0]
    scores = np.stack([sums.brier / points, sums.nll / points], axis=-1)
    return np.concatenate([scores, accuracy_of_bins(sums)], axis=1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _certain_and_wrong(outcome: Outcome) -> int:
    c, y = outcome.confidence, outcome.correct
    return int((((c <= 0) & (y > 0)) | ((c >= 1) & (y < 1))).sum())


def _order(row: Mapping[str, Any], sort: SortKey) -> tuple[bool, float]:
    value = figure_of(row, sort)
    return (True, 0.0) if value is None else (False, -value if sort == "auroc" else value)
