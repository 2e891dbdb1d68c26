"""Binned calibration errors: the gap between mean confidence and accuracy in each bin, and norms of these gaps.

Each `*_from_sums` takes `CalibrationSums` with any leading axes, gives numpy for numpy, and NaN where no point counts.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.metrics._points import array_namespace, is_known, metric, nonzero, points
from calibjax.metrics.sums import CalibrationSums, bin_index, equal_mass_index, sums_of_index
from calibjax.runtime.arrays import AnyArray, as_jax
from calibjax.runtime.options import Closed

Norm = Literal["l1", "l2", "max"]


def _gaps(sums: CalibrationSums):
    """numpy or jax.numpy, and per bin: |mean confidence − accuracy| and the fraction of all points, NaN without any."""
    xp = array_namespace(sums.count)
    gap = xp.abs(sums.confidence - sums.correct) / nonzero(sums.count)
    total = sums.points[..., None]
    fraction = xp.where(total > 0, sums.count / nonzero(total), xp.nan)
    return xp, gap, fraction


def ece_from_sums(sums: CalibrationSums):
    """Expected calibration error Σ_b (n_b/n) |conf_b − acc_b| over the last axis; shape `[...]`, in [0, 1]."""
    _, gap, fraction = _gaps(sums)
    return (gap * fraction).sum(axis=-1)


def mce_from_sums(sums: CalibrationSums):
    """Maximum calibration error max_b |conf_b − acc_b| over non-empty bins; shape `[...]`, in [0, 1]."""
    xp, gap, fraction = _gaps(sums)
    return (gap + xp.where(xp.isnan(fraction), fraction, 0)).max(axis=-1)


def rmsce_from_sums(sums: CalibrationSums):
    """Root-mean-square calibration error (Σ_b (n_b/n) (conf_b − acc_b)²)^½; shape `[...]`, in [0, 1]."""
    _, gap, fraction = _gaps(sums)
    return _root((gap * gap * fraction).sum(axis=-1))


def debiased_from_sums(sums: CalibrationSums):
    """The formula of `debiased_calibration_error` (Kumar et al. 2019) on any bins; shape `[...]`, in [0, 1].

    Raises ValueError for a count that is not a whole number (NaN under jit): the correction depends on it.
    """
    if is_known(sums.count) and (np.asarray(sums.count) % 1 != 0).any():
        raise ValueError("debiased_from_sums: expected sums of whole counts, got fractional counts.")
    xp, gap, fraction = _gaps(sums)
    variance = variance_of_mean(sums.count, sums.correct, sums.correct_squared)
    square = xp.where(sums.count > 1, gap * gap - variance, 0) * fraction
    error = _root(xp.maximum(square.sum(axis=-1), 0))
    return xp.where((sums.count % 1 == 0).all(axis=-1), error, xp.nan)


def _root(square):
    """The square root, with gradient 0 at 0; NaN of NaN."""
    xp = array_namespace(square)
    return xp.where(square > 0, xp.sqrt(xp.where(square > 0, square, 1.0)), square)


def variance_of_mean(count, total, squares):
    """Unbiased estimate of the variance of a mean; 0 for fewer than two points."""
    xp = array_namespace(count)
    several = xp.maximum(count, 2)
    mean = total / several
    return xp.where(count > 1, (squares / several - mean * mean) / (several - 1), 0)


def bias_from_sums(sums: CalibrationSums):
    """Mean confidence − accuracy; shape `[...]`, in [−1, 1]."""
    xp = array_namespace(sums.count)
    count, confidence, correct, _ = sums.totals()
    return xp.where(count > 0, (confidence - correct) / nonzero(count), xp.nan)


def _binned(statistic, confidence, correct, where, bins: int, closed: Closed | None = None):
    """A statistic of bins of equal width, or without `closed` of equal mass, for which `where` holds counts."""
    data = points(confidence, correct, where, counts=closed is None)
    if closed is None:
        index = equal_mass_index(data.confidence, data.weight, bins)
    else:
        index = bin_index(data.confidence, bins, closed)
    sums = sums_of_index(index, data.confidence, data.correct, bins, data.weight)
    return data.nan_unless_usable(statistic(sums))


@metric("bins", "closed", from_sums=ece_from_sums, norm="l1")
def expected_calibration_error(
    confidence: Float[AnyArray, " N"],
    correct: AnyArray,
    *,
    bins: int = 15,
    closed: Closed = "right",
    where: AnyArray | None = None,
) -> Float[Array, ""]:
    """Expected calibration error, Σ_b (n_b/n) |mean confidence_b − accuracy_b| (Guo et al. 2017, eq. 3).

    Args:
        confidence: `[N]` in [0, 1], any float dtype.
        correct: `[N]`, 0/1, bool, or fractions of correct samples in [0, 1].
        bins: number of equal-width bins.
        closed: the bin of a confidence on an inner edge (`bin_index`); "none": it adds no gap, but counts in n.
        where: `[N]`, False for points that do not count; or finite weights >= 0, of which only the ratios matter.

    Returns:
        float32 scalar in [0, 1]; NaN where no point counts.

    Raises:
        ValueError: for invalid options or shapes and, outside jit, if a weight is invalid or a point that counts is NaN
            or not in [0, 1] (an excess of up to 1e-5 is rounding and is clipped).

    Example:
        >>> import jax.numpy as jnp
        >>> float(expected_calibration_error(jnp.array([0.75, 0.75]), jnp.array([1, 0]), bins=10))
        0.25
    """
    return _binned(ece_from_sums, confidence, correct, where, bins, closed)


@metric("bins", "closed", from_sums=mce_from_sums, norm="max")
def maximum_calibration_error(confidence, correct, *, bins: int = 15, closed: Closed = "right", where=None):
    """Maximum calibration error, max_b |mean confidence_b − accuracy_b| over non-empty bins.

    For the arguments see `expected_calibration_error`.
    """
    return _binned(mce_from_sums, confidence, correct, where, bins, closed)


@metric("bins", "closed", from_sums=rmsce_from_sums, norm="l2")
def root_mean_square_calibration_error(confidence, correct, *, bins: int = 15, closed: Closed = "right", where=None):
    """Root-mean-square calibration error, (Σ_b (n_b/n) (mean confidence_b − accuracy_b)²)^½.

    For the arguments see `expected_calibration_error`.
    """
    return _binned(rmsce_from_sums, confidence, correct, where, bins, closed)


@metric("bins", counts=True, norm="l1")
def adaptive_calibration_error(confidence, correct, *, bins: int = 15, where=None):
    """ECE over bins of equal mass, which `equal_mass_index` makes (Nguyen and O'Connor 2015).

    `where`: how often a point counts (ValueError for fractions, NaN under jit). Others: `expected_calibration_error`.
    """
    return _binned(ece_from_sums, confidence, correct, where, bins)


@metric("bins", counts=True)
def debiased_calibration_error(confidence, correct, *, bins: int = 15, where=None):
    """L2 calibration error with most of its small-sample bias removed (Kumar et al. 2019).

    (max(0, Σ_b (n_b/n) [(conf_b − acc_b)² − s²_b/n_b]))^½ with s²_b the sample variance of correctness in the bin
    (acc_b (1 − acc_b) n_b/(n_b − 1) where it is 0 or 1); bins of one point add nothing.

    The bins have equal mass (for equal width: `debiased_from_sums`). Arguments: as `adaptive_calibration_error`.
    """
    return _binned(debiased_from_sums, confidence, correct, where, bins)


@metric(from_sums=bias_from_sums)
def calibration_bias(confidence, correct, *, where=None):
    """Mean confidence − accuracy: positive if overconfident, negative if underconfident.

    For the arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    return data.mean(data.confidence - data.correct)


def classwise_calibration_error(
    probabilities: Float[AnyArray, "N K"],
    labels: Int[AnyArray, " N"] | Float[AnyArray, "N K"],
    *,
    bins: int = 15,
    closed: Closed = "right",
    where: AnyArray | None = None,
) -> Float[Array, ""]:
    """Class-wise calibration error: the ECE of each class' probability, averaged over classes (Kull et al. 2019).

    (1/K) Σ_k Σ_b (n_bk/n) |mean probability_bk − fraction of class k_b|.

    Args:
        probabilities: `[N, K]` in [0, 1].
        labels: `[N]`, integers in [0, K); or `[N, K]`, the fraction of each class among the samples of a point.
        bins, closed, where: as in `expected_calibration_error`.
    """
    if jnp.ndim(labels) == 1:
        labels = as_jax(labels)
        classes = jnp.shape(probabilities)[-1]
        known = (labels >= 0) & (labels < classes) & (labels == jnp.floor(labels))
        classes_of_labels = jax.nn.one_hot(labels.astype(int), classes)
        labels = jnp.where(known[:, None], classes_of_labels, jnp.nan)  # NaN raises if the point counts
    return _classwise(probabilities, labels, bins=bins, closed=closed, where=where)


@metric("bins", "closed", rank=2)
def _classwise(probabilities, labels, *, bins: int, closed: Closed, where):
    if where is not None:
        where = jnp.broadcast_to(jnp.asarray(where)[:, None], probabilities.shape)
    data = points(probabilities, labels, where)
    confidence, correct, weight = (x.T for x in data[:3])
    sums = sums_of_index(bin_index(confidence, bins, closed), confidence, correct, bins, weight)
    return data.nan_unless_usable(ece_from_sums(sums).mean())
