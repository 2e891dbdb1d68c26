"""Bootstrap intervals of metrics and paired comparisons of two models.

Whole groups (documents, questions, sequences) are drawn with replacement because points within a group are dependent;
without groups, every point is a group. More than `POOLS` groups are first merged at random into `POOLS` pools of nearly
equal size, and whole pools are drawn: the spread is the same, with a relative error of (2 POOLS)^-½ (0.7%; 1,000
resamples have 2.2%), and time and memory no longer grow with resamples × points.

Intervals are percentiles, except for binned calibration errors, which are biased: `intervals` computes these. Draws
depend only on the seed and the number of groups, so comparisons of two metrics with the same of both are paired.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import xlog1py, xlogy

from calibjax.metrics._points import check
from calibjax.metrics.errors import ece_from_sums
from calibjax.metrics.intervals import Interval, PairedDifference, error_comparison, error_interval, sign_test
from calibjax.metrics.sums import CalibrationSums, bin_index, equal_mass_index
from calibjax.runtime.arrays import as_array, label_numbers, plain_array
from calibjax.runtime.options import Closed

POOLS = 10_000
_DRAWS = 2**22  # largest number of draws and weights held at once


def _pool_of_group(groups: int, seed: int) -> np.ndarray:
    if groups <= POOLS:
        return np.arange(groups)
    return np.random.default_rng((seed, 1)).permutation(groups) % POOLS


def _pool_of_point(count: int, groups: Any, seed: int) -> np.ndarray:
    label = np.arange(count) if groups is None else label_numbers("groups", groups, count)
    return _pool_of_group(int(label.max()) + 1, seed)[label]


@functools.lru_cache(maxsize=1)
def _draws(pools: int, resamples: int, seed: int, width: int) -> tuple[np.ndarray, ...]:
    """How often each pool is drawn, uint16 `[rows, pools]` each, for at least `resamples` rows in all.

    `width`: numbers that the caller holds for each row. Cached: methods share pools, and drawing takes longest.
    """
    if not pools or resamples < 1:
        raise ValueError(f"expected at least one group and one resample, got {pools} and {resamples}.")
    rng = np.random.default_rng(seed)
    rows = max(1, min(resamples, _DRAWS // width))
    equal = np.full(pools, 1.0 / pools)
    return tuple(rng.multinomial(pools, equal, size=rows).astype(np.uint16) for _ in range(0, resamples, rows))


def percentile_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval (low, high) of the values of resamples, `[resamples]`; ValueError for `level` not in (0, 1).

    NaN is ignored; (NaN, NaN) if no value is left. A bound is infinite at, or next to, an infinite value.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}.")
    values = np.asarray(values)[~np.isnan(values)]
    if not len(values):
        return np.nan, np.nan
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    below = np.quantile(values, ends, method="lower")
    above = np.quantile(values, ends, method="higher")
    t = (len(values) - 1) * ends % 1
    with np.errstate(invalid="ignore"):  # np.quantile's own interpolation subtracts infinities
        low, high = np.where(below == above, below, (1 - t) * below + t * above).tolist()
    return low, high


def resample_sums(
    sums: CalibrationSums, statistic: Callable = ece_from_sums, *, resamples: int = 1000, seed: int = 0
) -> np.ndarray:
    """Statistic of each resample of the groups of `sums`, float64 `[resamples]` or `[resamples, k]`.

    Args:
        sums: leading axis `[G]` of groups; or `[G, M]`, for M models on the same draws.
        statistic: maps `CalibrationSums` `[R, bins]` (`[R, M, bins]` for M models; numpy float64) to `[R]` or `[R, k]`.
        resamples: number of bootstrap samples >= 1 (ValueError for fewer, or for no group).
        seed: of the draws.
    """
    groups = len(np.asarray(sums.count))
    pools = min(groups, POOLS)
    draws = _draws(pools, resamples, seed, max(pools, 1))
    pool = _pool_of_group(groups, seed)
    order = np.argsort(pool, kind="stable")
    starts = np.searchsorted(pool[order], np.arange(pools))
    pooled = [np.add.reduceat(np.asarray(x, np.float64)[order], starts, axis=0) for x in sums]
    values = []
    for drawn in draws:
        counts = drawn.astype(np.float64)
        values.append(statistic(CalibrationSums(*(_drawn_sum(counts, x) for x in pooled))))
    return np.concatenate(values)[:resamples]


def _drawn_sum(drawn: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Times drawn `[R, pools]` · value `[pools, ...]`. A pool that is not drawn adds nothing, even if infinite."""
    total = np.tensordot(drawn, np.where(np.isfinite(values), values, 0.0), axes=(1, 0))
    infinite = values == np.inf
    undefined = np.isnan(values) | (values == -np.inf)
    for mask, value in ((infinite, np.inf), (undefined, np.nan)):
        if mask.any():
            is_drawn = np.tensordot(drawn, mask.astype(np.float64), axes=(1, 0)) > 0
            total = np.where(is_drawn, value, total)
    return total


def resample_metric(
    metric: Callable,
    confidence: Any,
    correct: Any,
    *,
    groups: Any = None,
    where: Any = None,
    resamples: int = 1000,
    seed: int = 0,
    **options: Any,
) -> np.ndarray:
    """A one-call metric on each resample of arrays, `[resamples]`; NaN where undefined (AUROC of one class).

    Args:
        metric: a metric of `calibjax.metrics` that takes (confidence `[N]`, correct `[N]`, where=), or a similar
            function whose `where` accepts counts. ECE, MCE, RMSCE, bias, Brier score and NLL take seconds for a million
            points; other metrics are computed on all points for each resample.
        confidence, correct: `[N]`.
        groups: `[N]`, labels of any type; points of equal label are drawn together. By default each point is a group.
        where: `[N]` bool or 0/1, False for points that do not count.
        resamples: number of bootstrap samples >= 1.
        seed: of the draws.
        options: options of the metric, such as bins=.

    Raises:
        ValueError: for invalid shapes or values, weights other than 0 and 1, no point that counts, or no resample.
    """
    confidence, correct, groups = _counted_points(confidence, correct, groups, where)
    statistic = getattr(metric, "from_sums", None)
    if statistic is not None:
        sums = pooled_sums(confidence, correct, groups=groups, seed=seed, **options)
        return resample_sums(sums, statistic, resamples=resamples, seed=seed)
    pool = _pool_of_point(len(confidence), groups, seed)
    mapped = _mapped(metric, tuple(sorted(options.items())))
    arrays = [jnp.asarray(x) for x in (pool, confidence, correct)]
    draws = _draws(int(pool.max()) + 1, resamples, seed, len(pool))
    values = [np.asarray(mapped(jnp.asarray(drawn, jnp.float32), *arrays), np.float64) for drawn in draws]
    return np.concatenate(values)[:resamples]


@functools.lru_cache(maxsize=64)
def _mapped(metric: Callable, options: tuple) -> Callable:
    """Maps the metric over rows of draws; cached so that calls of one shape compile once."""

    def resample(draw, pool, confidence, correct):
        return metric(confidence, correct, where=draw[pool], **dict(options))

    return jax.jit(jax.vmap(resample, in_axes=(0, None, None, None)))


def _counted_points(confidence: Any, correct: Any, groups: Any, where: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    check({"confidence": confidence, "correct": correct}, where)
    if where is not None and not np.isin(where, (0, 1)).all():
        raise ValueError("where: expected True or False for each point; resampling does not take weights.")
    groups = None if groups is None else as_array(groups)
    if groups is not None and groups.shape != np.shape(confidence):
        raise ValueError(f"groups: expected one label for each of {len(confidence)} points, got {groups.shape}.")
    counts = np.ones(len(confidence), bool) if where is None else np.asarray(where, bool)
    if not counts.any():
        raise ValueError("expected at least one point that counts, got none.")
    groups = None if groups is None else groups[counts]
    return as_array(confidence)[counts], as_array(correct)[counts], groups


def _error_sums(
    metric: Callable, arrays: tuple[Any, Any], groups: Any = None, where: Any = None, bins: int = 15, **options: Any
) -> tuple[CalibrationSums, dict[str, Any]]:
    """Sums per pool for a binned error of (confidence, correct), and the options of `error_interval`."""
    confidence, correct, groups = _counted_points(*arrays, groups, where)
    closed = options.pop("closed", "right")
    if getattr(metric, "from_sums", None) is None:  # its bins depend on the points
        index = equal_mass_index(jnp.asarray(confidence, jnp.float32), jnp.ones(len(confidence)), bins)
    else:
        index = bin_index(jnp.asarray(confidence), bins, closed)
    pool = _pool_of_point(len(confidence), groups, options.get("seed", 0))
    sums = _sums_of_pools(pool, np.asarray(index), confidence, correct, bins)
    return sums, {"norm": getattr(metric, "norm", None), **options}


def pooled_sums(
    confidence: Any,
    correct: Any,
    *,
    log_prob: Any = None,
    groups: Any = None,
    bins: int = 15,
    closed: Closed = "right",
    seed: int = 0,
) -> CalibrationSums:
    """`CalibrationSums` of points as `resample_sums` takes them, float64 `[G, bins]` for G <= `POOLS` groups.

    Args:
        confidence, correct: `[N]`, in [0, 1].
        log_prob: `[N]`, log-probability of the target, for `nll`. By default `nll` is the log loss of correctness.
        groups: `[N]`, labels of any type. By default each point is a group.
        bins, closed: as in `bin_index`.
        seed: of the pools, used if there are more than `POOLS` groups.
    """
    check({"confidence": confidence, "correct": correct})
    confidence, correct = as_array(confidence), as_array(correct)
    index = np.asarray(bin_index(confidence, bins, closed))
    return _sums_of_pools(_pool_of_point(len(confidence), groups, seed), index, confidence, correct, bins, log_prob)


def _sums_of_pools(
    pool: np.ndarray, index: np.ndarray, confidence: Any, correct: Any, bins: int, log_prob: Any = None
) -> CalibrationSums:
    """`CalibrationSums` `[pools, bins]` in float64 of points with the given bins."""
    c, y = (np.clip(np.asarray(x, np.float32), 0, 1).astype(np.float64) for x in (confidence, correct))
    if log_prob is None:  # the loss is that of correctness
        log_prob = xlogy(y, c) + xlog1py(1 - y, -c)
    pools = int(pool.max()) + 1

    def add(value):
        cells = np.bincount(pool * (bins + 1) + index, weights=value, minlength=pools * (bins + 1))
        return cells.reshape(pools, bins + 1)

    sums = np.stack([add(x) for x in (np.ones_like(c), c, y, y * y)])  # [4, pools, bins + 1]
    return CalibrationSums(
        *sums[..., :bins],
        dropped=sums[..., bins].T,
        brier=np.bincount(pool, weights=(c - y) ** 2, minlength=pools),
        nll=np.bincount(pool, weights=-np.asarray(log_prob, np.float64), minlength=pools),
    )


def metric_interval(
    metric: Callable, confidence: Any, correct: Any, *, level: float = 0.95, **options: Any
) -> Interval:
    """A one-call metric of arrays with its interval, which always contains the value.

    ECE, adaptive ECE, RMSCE and MCE have the interval of `error_interval`, other metrics percentiles of resamples. The
    small-sample bias of `smooth_ece` and `debiased_calibration_error` is not corrected; percentiles of 30 points cover
    91% to 95% at `level` 95%. A resample with an infinite value (the NLL of a wrong answer with confidence 1) is
    infinite. For the arguments see `resample_metric`; `level` is the coverage.

    Example:
        >>> from calibjax.metrics import brier_score
        >>> correct = np.arange(400) % 4 > 0
        >>> value, low, high = metric_interval(brier_score, np.full(400, 0.75), correct, resamples=200)
        >>> value, 0.1 < low < value < high < 0.3
        (0.1875, True)
    """
    if getattr(metric, "norm", None) is not None:  # a binned error
        sums, error_options = _error_sums(metric, (confidence, correct), **options)
        _, low, high, _ = error_interval(sums, level=level, **error_options)
    else:
        low, high = percentile_interval(resample_metric(metric, confidence, correct, **options), level)
    value = _on_all_points(metric, (confidence, correct), options)
    return Interval(value, float(np.minimum(low, value)), float(np.maximum(high, value)))  # NaN stays NaN


def _on_all_points(metric: Callable, arrays: tuple[Any, Any], options: dict[str, Any]) -> float:
    metric_options = {name: value for name, value in options.items() if name not in ("groups", "resamples", "seed")}
    return float(metric(*map(plain_array, arrays), **metric_options))


def compare_resamples(
    difference: float, first: np.ndarray, second: np.ndarray, level: float = 0.95
) -> PairedDifference:
    """`PairedDifference` from the values of a metric for two models on the same resamples, `[resamples]` each.

    `difference`: first − second on all points; `level`: coverage of the interval.
    """
    with np.errstate(invalid="ignore"):
        values = first - second  # NaN, which is ignored, where both are infinite
    values = values[~np.isnan(values)]
    low, high = percentile_interval(values, level)
    fraction_lower, p_value = sign_test(int((values < 0).sum()), int((values > 0).sum()), len(values))
    return PairedDifference(difference, low, high, fraction_lower, p_value)


def paired_comparison(
    metric: Callable, first: tuple[Any, Any], second: tuple[Any, Any], *, level: float = 0.95, **options: Any
) -> PairedDifference:
    """Compares a metric between two models on the same points, which are resampled together.

    ECE, adaptive ECE, RMSCE and MCE are compared by `error_comparison`, other metrics by percentiles.

    Args:
        metric: as in `resample_metric`.
        first: (confidence `[N]`, correct `[N]`) of the first model.
        second: the same arrays of the second model, point by point (ValueError for other shapes).
        level: coverage of the interval.
        options: groups, where, resamples, seed and options of the metric, as in `resample_metric`.
    """
    shapes = [np.shape(arrays[0]) for arrays in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"paired comparison: expected the same points, got shapes {shapes[0]} and {shapes[1]}.")
    difference = _on_all_points(metric, first, options) - _on_all_points(metric, second, options)
    if getattr(metric, "norm", None) is not None:  # a binned error
        first_sums, error_options = _error_sums(metric, first, **options)
        second_sums, _ = _error_sums(metric, second, **options)
        compared = error_comparison(first_sums, second_sums, level=level, **error_options)
        low, high = min(compared.low, difference), max(compared.high, difference)
        return compared._replace(difference=difference, low=low, high=high)
    first_values = resample_metric(metric, *first, **options)
    second_values = resample_metric(metric, *second, **options)
    return compare_resamples(difference, first_values, second_values, level)
