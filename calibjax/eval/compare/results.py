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
    """The rows of a comparison, best first.

    `nll` is the negative log-likelihood of the true class, null for methods that give a confidence alone; `log_loss`
    that of correctness (`metrics.negative_log_likelihood`), null where it is infinite: `certain_and_wrong` counts wrong
    predictions with confidence 1, or right ones with 0. `changed` is the number of predictions that the method changed
    from "uncalibrated", or else from the first row. `against` holds the difference from `reference` for each of
    `COMPARED` (`metrics.Comparison`), with the p-value corrected for the number of rows (`metrics.holm`);
    `against_uncalibrated` the same, uncorrected.

    Args:
        results: name -> result.
        reference: name of temperature scaling.
        groups: labels `[N]`; points of one group are resampled together.
        bins, closed: of the reliability bins.
        resamples, seed: of the bootstrap.
        sort: figure to order the rows by; fits that did not converge follow the others.
    """
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    summing: dict[str, Any] = {"groups": groups, "bins": bins, "closed": closed, "seed": seed}
    resampled = {name: _resample(result.outcome, summing, options) for name, result in results.items()}
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
    for key in COMPARED:  # corrected for all rows that are compared in the same figure
        compared = {name: against[key] for name, row in rows.items() if key in (against := row.get("against", {}))}
        corrected = metrics.holm({name: against.get("p_value", math.nan) for name, against in compared.items()})
        for name, against in compared.items():
            against["holm_p"] = corrected[name]
    unconverged = not_converged(results)
    return dict(sorted(rows.items(), key=lambda item: (item[0] in unconverged, *_order(item[1], sort))))


class _Resampled(NamedTuple):
    """The sums of a method with its log loss, those with its likelihood or None, and its figures on each resample."""

    sums: CalibrationSums
    likelihood: CalibrationSums | None
    draws: dict[str, np.ndarray]


def _resample(outcome: Outcome, summing: Mapping[str, Any], options: Mapping[str, Any]) -> _Resampled:
    pair = outcome.confidence, outcome.correct
    sums = metrics.pooled_sums(*pair, **summing)
    values = metrics.resample_sums(sums, _scores_and_bins, **options)
    draws = {"brier": values[:, 0], "log_loss": values[:, 1], "bins": values[:, 2:]}
    if outcome.log_prob is None:
        return _Resampled(sums, None, draws)
    likelihood = metrics.pooled_sums(*pair, log_prob=outcome.log_prob, **summing)
    draws["nll"] = metrics.resample_sums(likelihood, _scores_and_bins, **options)[:, 1]
    return _Resampled(sums, likelihood, draws)


def _row(
    result: Result, resampled: _Resampled, base: Outcome, convention: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    outcome, (sums, likelihood, draws) = result.outcome, resampled
    row: dict[str, Any] = metrics.summarise(sums)
    log_loss = row.pop("nll")
    c, y = pair = outcome.confidence, outcome.correct
    unknown = base.choice is None or outcome.choice is None
    return row | {
        "nll": None if likelihood is None else _finite(metrics.summarise(likelihood)["nll"]),
        "log_loss": _finite(log_loss),
        "certain_and_wrong": int((((c <= 0) & (y > 0)) | ((c >= 1) & (y < 1))).sum()),
        **ece_json(metrics.error_interval(sums, **options), **convention),
        "adaptive_ece": _finite(float(metrics.adaptive_calibration_error(*pair, bins=convention["bins"]))),
        "smooth_ece": _finite(float(metrics.smooth_ece(*pair))),
        "auroc": _finite(float(metrics.auroc(*pair))),
        "changed": 0 if unknown else int((base.choice != outcome.choice).sum()),
        "parameters": result.parameters,
        "fit_seconds": round(result.fit_seconds, 4),
        "reliability": reliability_json(metrics.total(sums), draws["bins"]),
    }


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


def _order(row: Mapping[str, Any], sort: SortKey) -> tuple[bool, float]:
    value = figure_of(row, sort)
    return (True, 0.0) if value is None else (False, -value if sort == "auroc" else value)
