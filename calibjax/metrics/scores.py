"""Proper scores of a confidence, their parts and summary; errors of the confidence that a sampled answer is right."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlog1py, xlogy
from jaxtyping import Array, Float, Int

from calibjax.metrics._points import divisor, metric, points
from calibjax.metrics.errors import bias_from_sums, ece_from_sums, mce_from_sums, rmsce_from_sums, variance_of_mean
from calibjax.metrics.sums import CalibrationSums, total
from calibjax.runtime.arrays import AnyArray


@metric(from_sums=lambda sums: sums.brier / sums.points)
def brier_score(confidence, correct, *, where=None):
    """Brier score of the top prediction, mean (confidence − correctness)²: float32 scalar in [0, 1].

    NaN where no point counts. For the arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    return data.mean(jnp.square(data.confidence - data.correct))


@metric(from_sums=lambda sums: sums.nll / sums.points)
def negative_log_likelihood(confidence, correct, *, where=None):
    """Log loss of correctness y under confidence c, mean −[y log c + (1 − y) log(1 − c)], nats.

    Infinite if a confidence of exactly 0 or 1 (in float32) was wrong. The NLL of target tokens is the `nll` of
    `calibration_sums(..., log_prob=...)`. For the arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    return data.mean(-xlogy(data.correct, data.confidence) - xlog1py(1 - data.correct, -data.confidence))


class BrierParts(NamedTuple):
    """brier = reliability − resolution + uncertainty + within, each a scalar.

    Attributes:
        reliability: Σ_b (n_b/n) (conf_b − acc_b)²: miscalibration, lower is better.
        resolution: Σ_b (n_b/n) (acc_b − acc)²: spread of the bins' accuracies, higher is better.
        uncertainty: variance of correctness; acc (1 − acc) if correctness is 0 or 1.
        within: remainder from the spread of confidence within bins; 0 if confidences within each bin are equal.
    """

    reliability: np.ndarray
    resolution: np.ndarray
    uncertainty: np.ndarray
    within: np.ndarray


def brier_parts(sums: CalibrationSums, *, debiased: bool = False) -> BrierParts:
    """Decomposition of the Brier score (Murphy 1973) with the remainder due to binning (Stephenson et al. 2008).

    Few points in a bin make reliability and resolution too large, because the noise of the bin's accuracy counts as
    miscalibration and as resolution. `debiased` subtracts it from both: Σ_b (n_b/n) s²_b/n_b with s²_b the sample
    variance of correctness in the bin (Ferro and Fricker 2012, doi 10.1002/qj.1924); uncertainty becomes the sample
    variance. The sum does not change, and reliability or resolution may be negative.

    Args:
        sums: with every point in a bin (ValueError otherwise); more bins make the remainder smaller.
        debiased: remove the bias of few points (ValueError for a count that is not a whole number); bins of one point
            are left as they are.
    """
    sums = CalibrationSums(*(np.asarray(x, np.float64) for x in sums))
    if sums.dropped.any():
        raise ValueError('brier_parts: some points are in no bin; use sums with closed="right" or "left".')
    points, _, correct, squared = sums.whole()
    fraction = sums.count / points[..., None]
    accuracy = correct / points
    spread = np.square(sums.correct / divisor(sums.count) - accuracy[..., None])
    reliability = np.square(rmsce_from_sums(sums))
    resolution = (fraction * spread).sum(-1)
    uncertainty = squared / points - np.square(accuracy)
    within = sums.brier / points - (reliability - resolution + uncertainty)
    if debiased:
        if (sums.count % 1 != 0).any():
            raise ValueError("brier_parts: debiased expects sums of whole counts, got fractional counts.")
        noise = (fraction * variance_of_mean(sums.count, sums.correct, sums.correct_squared)).sum(-1)
        variance = variance_of_mean(points, correct, squared)
        reliability, resolution = reliability - noise, resolution - noise + variance
        uncertainty = uncertainty + variance
    return BrierParts(reliability, resolution, uncertainty, within)


def summarise(sums: CalibrationSums) -> dict[str, float]:
    """nll, brier, accuracy, confidence, bias, ece, mce and rmsce of all points, computed in float64 on the host.

    Leading axes of the sums (sequences, batches) are added up. `nll` is NaN if a point that counts has no
    log-probability. Raises ValueError if no point counts.
    """
    whole = total(sums)
    count, confidence, correct, _ = whole.whole()
    if not count:
        raise ValueError("summarise: expected at least one point that counts, got none.")
    return {
        "nll": float(whole.nll / count),
        "brier": float(whole.brier / count),
        "accuracy": float(correct / count),
        "confidence": float(confidence / count),
        "bias": float(bias_from_sums(whole)),
        "ece": float(ece_from_sums(whole)),
        "mce": float(mce_from_sums(whole)),
        "rmsce": float(rmsce_from_sums(whole)),
    }


def success_fraction(successes: Int[AnyArray, "..."], samples: Int[AnyArray, "..."]) -> Float[Array, "..."]:
    """Fraction c/n of correct samples of a question, float32; NaN where n is 0.

    `successes` c and `samples` n have one shape, or n is a scalar. Every metric accepts the fraction as `correct`: a
    noisy target, whose expected Brier score at a success probability q is (confidence − q)² + q(1 − q)/n.
    """
    samples = jnp.asarray(samples)
    fraction = jnp.asarray(successes) / jnp.maximum(samples, 1)
    return jnp.where(samples > 0, fraction, jnp.nan)


@jax.jit
def capability_error(
    confidence: Float[AnyArray, "..."], successes: Int[AnyArray, "..."], samples: Int[AnyArray, "..."]
) -> Float[Array, "..."]:
    """Unbiased estimate of (confidence − q)², q the success probability of a question: (confidence − c/n)² − v,
    v = c(n − c)/(n²(n − 1)), which is the unbiased estimate of the variance of c/n.

    The mean over questions is the capability-calibration error of arXiv 2602.13540 without the noise of the samples;
    the estimate of a single question may be negative.

    Args:
        confidence: in the success of a sampled answer, in [0, 1], any shape.
        successes: c, 0 <= c <= n, same shape.
        samples: n, same shape or a scalar; independent of the confidence.

    Returns:
        float32, same shape; NaN where n < 2.
    """
    c, n = jnp.asarray(successes), jnp.asarray(samples)
    fraction = success_fraction(c, n)
    variance = fraction * (1 - fraction) / jnp.maximum(n - 1, 1)
    return jnp.where(n >= 2, jnp.square(jnp.asarray(confidence, jnp.float32) - fraction) - variance, jnp.nan)


@functools.partial(jax.jit, static_argnames="k")
def pass_at_k(successes: Int[AnyArray, "..."], samples: Int[AnyArray, "..."], k: int) -> Float[Array, "..."]:
    """Unbiased estimate of P(at least one of k samples is right), 1 − C(n − c, k)/C(n, k) (Chen et al. 2021, eq. 1).

    Args:
        successes: c, 0 <= c <= n, any shape.
        samples: n, of the same shape or a scalar.
        k: number of samples drawn, a static integer >= 1.

    Returns:
        float32, the shape of `successes`; NaN where n < k.
    """
    _check_samples(k)
    c = jnp.asarray(successes)
    n = jnp.broadcast_to(jnp.asarray(samples), c.shape)
    j = jnp.arange(k).reshape(*(1 for _ in c.shape), k)
    fail = jnp.maximum((n - c)[..., None] - j, 0) / jnp.maximum(n[..., None] - j, 1)
    return jnp.where(n >= k, 1 - jnp.prod(fail, axis=-1), jnp.nan)


@functools.partial(jax.jit, static_argnames="k")
def predicted_pass_at_k(confidence: Float[AnyArray, "..."], k: int) -> Float[Array, "..."]:
    """P(at least one of k independent samples is right) under the confidence in one sample, 1 − (1 − confidence)^k.

    float32, of the shape of the confidences in [0, 1]; k is static. If confidence is calibrated only on average over
    questions of equal confidence, the prediction is too high because the function is concave; like `grouping_loss`,
    the excess over the mean of `pass_at_k` measures how much these questions differ.
    """
    _check_samples(k)
    return -jnp.expm1(k * jnp.log1p(-jnp.asarray(confidence).astype(jnp.float32)))


def _check_samples(k: int) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k: expected an integer of at least 1, got {k!r}.")
