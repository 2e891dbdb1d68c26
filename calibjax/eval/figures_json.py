"""Figures of one method, from its sums, and of subjects, as plain data: for every kind of prediction."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from calibjax import metrics
from calibjax.metrics.intervals import wilson_interval
from calibjax.runtime.arrays import AnyArray

Draws = dict[str, np.ndarray]
"""On R resamples of the groups: nll, brier, accuracy, confidence `[R]`; "bins", accuracies or NaN `[R, bins]`."""
_MEANS = ("nll", "brier", "accuracy", "confidence")


def draws_of(sums: metrics.CalibrationSums, seed: int = 0) -> Draws:
    """The figures of resamples; `sums` has groups `[G]`."""
    resampled = metrics.resample_sums(sums, _bins_and_means, seed=seed)
    bins, means = np.split(resampled, [-len(_MEANS)], axis=1)
    return {**dict(zip(_MEANS, means.T, strict=True)), "bins": bins}


def _bins_and_means(sums: metrics.CalibrationSums) -> np.ndarray:
    count, confidence, correct, _ = (np.asarray(x) for x in sums.totals())
    means = np.stack([sums.nll, sums.brier, correct, confidence], axis=-1) / count[..., None]
    with np.errstate(invalid="ignore", divide="ignore"):
        bins = np.asarray(sums.correct) / np.asarray(sums.count)
    return np.concatenate([bins, means], axis=-1)


def row_json(sums: metrics.CalibrationSums, draws: Draws, *, closed: metrics.Closed, seed: int) -> dict[str, Any]:
    """The figures of a method with the sums `[G]` and draws, as in `results_json` but without temperatures."""
    row: dict[str, Any] = metrics.summarise(sums)
    whole = metrics.total_sums(sums)
    row |= ece_json(metrics.error_interval(sums, seed=seed), bins=len(whole.count), closed=closed)
    row["reliability"] = reliability_json(whole, draws["bins"])
    ends = {name: metrics.percentile_interval(draws[name]) for name in ("nll", "brier", "accuracy")}
    row["intervals"] = {name: {"low": low, "high": high} for name, (low, high) in ends.items()}
    return row


def add_differences(
    rows: Mapping[str, dict[str, Any]],
    sums: Mapping[str, metrics.CalibrationSums],
    draws: Mapping[str, Draws],
    *,
    field: str,
    other: str,
    names: Sequence[str],
    seed: int,
) -> None:
    """Adds a `field` to each row but `other`: paired differences from it of `ece` and of those `names` both have."""
    for name, row in rows.items():
        if name == other:
            continue
        differences = {"ece": metrics.error_comparison(sums[name], sums[other], seed=seed)}
        for key in names:
            value, reference = row[key], rows[other][key]
            if value is not None and reference is not None:
                pair = draws[name][key], draws[other][key]
                differences[key] = metrics.compare_resamples(value - reference, *pair)
        row[field] = {key: difference._asdict() for key, difference in differences.items()}


def finite_or_none(value: float) -> float | None:
    """A figure as JSON holds it: null where it is not finite."""
    return value if math.isfinite(value) else None


def ece_json(ece: metrics.ErrorInterval, **convention: Any) -> dict[str, Any]:
    """The fields `ece`, with its interval and convention, and `debiased_ece` of a row."""
    return {"ece": {"value": ece.value, "low": ece.low, "high": ece.high, **convention}, "debiased_ece": ece.debiased}


def wilson_json(correct: float, count: int) -> dict[str, float]:
    low, high = wilson_interval(correct, count)
    return {"low": float(low), "high": float(high)}


def reliability_json(whole: metrics.CalibrationSums, accuracies: np.ndarray) -> dict[str, Any]:
    """Count, mean confidence, accuracy and its 95% interval per bin; None where the bin is empty.

    `accuracies` are those of resamples, `[R, bins]`.
    """
    intervals = [metrics.percentile_interval(values) for values in accuracies.T]

    def ratio(total: AnyArray) -> list[float | None]:
        return [float(t / n) if n else None for t, n in zip(total, whole.count, strict=True)]

    return {
        "count": [int(n) for n in whole.count],
        "confidence": ratio(whole.confidence),
        "accuracy": ratio(whole.correct),
        "low": [finite_or_none(low) for low, _ in intervals],
        "high": [finite_or_none(high) for _, high in intervals],
    }


def curve_json(curve: metrics.ReliabilityCurve) -> dict[str, Any]:
    """The curve as lists, rounded to 5 digits after the point; null where there are too few points."""
    row: dict[str, Any] = {"bandwidth": curve.bandwidth}
    for name in ("density", "accuracy", "low", "high"):
        row[name] = [finite_or_none(round(value, 5)) for value in getattr(curve, name).tolist()]
    return row


def subject_rows(
    subjects: Sequence[str], confidence: Float[np.ndarray, " N"], correct: AnyArray
) -> list[dict[str, Any]]:
    """Mean confidence and accuracy of each subject ("" for none), the most overconfident first.

    `correct` `[N]`: booleans, or numbers from 0 to 1. Each row has subject, questions, confidence, accuracy
    (`{"value", "low", "high"}`, by `wilson_interval`) and gap, confidence − accuracy. Empty without subjects.
    """
    names, numbers = np.unique(np.asarray(subjects, str), return_inverse=True)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        mine = numbers == number
        count = int(mine.sum())
        right = float(correct[mine].sum(dtype=np.float64))
        accuracy = {"value": right / count, **wilson_json(right, count)}
        mean = float(np.mean(confidence[mine], dtype=np.float64))
        gap = mean - accuracy["value"]
        rows.append({"subject": str(name), "questions": count, "confidence": mean, "accuracy": accuracy, "gap": gap})
    return sorted(rows, key=lambda row: -row["gap"]) if (names != "").any() else []
