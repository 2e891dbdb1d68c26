"""The figures of one method as plain data, from its sums: for every kind of prediction."""

from typing import Any

import numpy as np

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
    """Paired differences, first minus second, of `nll`, `brier` and `ece`, each a `metrics.Comparison` as a dictionary.

    Args:
        first, second: sums of two methods over the same groups `[G]`.
        resamples: of the groups.
        seed: of the resamples.
    """
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
    """Wilson's 95% interval of a proportion, for independent answers (Wilson 1927, doi 10.1080/01621459.1927.10502953).

    Unlike one of resamples it is not empty where all answers are right, or all wrong.
    """
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
    return {
        "count": [int(n) for n in whole.count],
        "confidence": _ratio(whole.confidence, whole.count),
        "accuracy": _ratio(whole.correct, whole.count),
        "low": [None if np.isnan(low) else low for low, _ in intervals],
        "high": [None if np.isnan(high) else high for _, high in intervals],
    }


def _ratio(total: AnyArray, count: AnyArray) -> list[float | None]:
    return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]


def curve_json(curve: metrics.ReliabilityCurve) -> dict[str, Any]:
    """The curve as lists, rounded to 5 digits after the point; null where there are too few points."""

    def numbers(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(value) else round(float(value), 5) for value in values]

    return {
        "bandwidth": curve.bandwidth,
        "density": [round(float(value), 5) for value in curve.density],
        "accuracy": numbers(curve.accuracy),
        "low": numbers(curve.low),
        "high": numbers(curve.high),
    }
