"""Figures of one method, from its sums, and of subjects, as plain data: for every kind of prediction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from calibjax import metrics
from calibjax.runtime.arrays import AnyArray


def row_json(
    sums: metrics.CalibrationSums, *, closed: metrics.Closed = "right", resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """The figures of one method: those of `results_json` without temperatures. `sums` has groups `[G]`."""
    row: dict[str, Any] = metrics.summarise(sums)
    whole = metrics.total(sums)
    row |= ece_json(metrics.error_interval(sums, resamples=resamples, seed=seed), bins=len(whole.count), closed=closed)
    drawn = metrics.resample_sums(sums, _bins_and_means, resamples=resamples, seed=seed)
    bins = len(whole.count)
    row["reliability"] = reliability_json(whole, drawn[:, :bins])
    ends = (metrics.percentile_interval(values) for values in drawn[:, bins:].T)
    row["intervals"] = {name: {"low": low, "high": high} for name, (low, high) in zip(_MEANS, ends, strict=True)}
    return row


def differences_json(
    first: metrics.CalibrationSums, second: metrics.CalibrationSums, *, resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Paired differences, first minus second, of `nll`, `brier` and `ece` over the same groups `[G]`, each a
    `metrics.Comparison` as a dictionary."""
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    drawn = [metrics.resample_sums(sums, _bins_and_means, **options) for sums in (first, second)]
    whole = [metrics.summarise(sums) for sums in (first, second)]
    out = {"ece": metrics.error_comparison(first, second, **options)._asdict()}
    for name in ("nll", "brier"):
        column = _MEANS.index(name) - len(_MEANS)
        difference = whole[0][name] - whole[1][name]
        out[name] = metrics.compare_resamples(difference, drawn[0][:, column], drawn[1][:, column])._asdict()
    return out


_MEANS = ("nll", "brier", "accuracy")


def _bins_and_means(sums: metrics.CalibrationSums) -> np.ndarray:
    """`accuracy_of_bins`, then the means of `_MEANS`: `[R, bins + 3]`."""
    count, _, correct, _ = (np.asarray(x) for x in sums.whole())
    means = np.stack([sums.nll, sums.brier, correct], axis=-1) / count[..., None]
    return np.concatenate([accuracy_of_bins(sums), means], axis=-1)


def ece_json(ece: metrics.ErrorInterval, **convention: Any) -> dict[str, Any]:
    """The fields `ece`, with its interval and convention, and `debiased_ece` of a row."""
    return {"ece": {"value": ece.value, "low": ece.low, "high": ece.high, **convention}, "debiased_ece": ece.debiased}


def wilson_interval(correct: int, count: int) -> dict[str, float]:
    """Wilson's 95% interval of a proportion, for independent answers (Wilson 1927, doi 10.1080/01621459.1927.10502953);
    unlike one of resamples it is not empty where all answers are right, or all wrong."""
    from scipy.stats import binomtest

    ends = binomtest(correct, count).proportion_ci(method="wilson")
    return {"low": float(ends.low), "high": float(ends.high)}


def accuracy_of_bins(sums: metrics.CalibrationSums) -> np.ndarray:
    """The accuracy of each bin (NaN where it is empty): `[R, bins]`, for `resample_sums`."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums.correct) / np.asarray(sums.count)


def reliability_json(whole: metrics.CalibrationSums, drawn: np.ndarray) -> dict[str, Any]:
    """Count, mean confidence, accuracy and its 95% interval per bin; None where the bin is empty.

    `drawn` are the accuracies on resamples, `[R, bins]`.
    """
    intervals = [metrics.percentile_interval(values) for values in drawn.T]

    def ratio(total: AnyArray) -> list[float | None]:
        return [float(t / n) if n else None for t, n in zip(total, whole.count, strict=True)]

    return {
        "count": [int(n) for n in whole.count],
        "confidence": ratio(whole.confidence),
        "accuracy": ratio(whole.correct),
        "low": [None if np.isnan(low) else low for low, _ in intervals],
        "high": [None if np.isnan(high) else high for _, high in intervals],
    }


def curve_json(curve: metrics.ReliabilityCurve) -> dict[str, Any]:
    """The curve as lists, rounded to 5 digits after the point; null where there are too few points."""
    lists = {
        name: [None if np.isnan(value) else round(float(value), 5) for value in getattr(curve, name)]
        for name in ("density", "accuracy", "low", "high")
    }
    return {"bandwidth": curve.bandwidth, **lists}


def subject_rows(
    subjects: Sequence[str], confidence: Float[np.ndarray, " N"], correct: Bool[np.ndarray, " N"]
) -> list[dict[str, Any]]:
    """Mean confidence and accuracy of each subject ("" for none), the most overconfident first.

    Rows of subject, questions, confidence, accuracy (`{"value", "low", "high"}`, by `wilson_interval`) and gap,
    confidence minus accuracy; empty if no question has a subject.
    """
    names, numbers = np.unique(np.asarray(subjects, str), return_inverse=True)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        mine = numbers == number
        count, right = int(mine.sum()), int(correct[mine].sum())
        accuracy = {"value": right / count, **wilson_interval(right, count)}
        mean = float(np.mean(confidence[mine], dtype=np.float64))
        gap = mean - accuracy["value"]
        rows.append({"subject": str(name), "questions": count, "confidence": mean, "accuracy": accuracy, "gap": gap})
    return sorted(rows, key=lambda row: -row["gap"]) if (names != "").any() else []
