"""Proper scores of a confidence, their summary, and the error of a capability confidence."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.metrics._points import check, is_known, metric, points
from calibjax.metrics.errors import bias_from_sums, ece_from_sums, mce_from_sums, rmsce_from_sums
from calibjax.metrics.sums import CalibrationSums, total_sums
from calibjax.runtime.arrays import AnyArray, plain_array


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
    right, wrong = data.correct, 1 - data.correct
    # Selected before the logarithm, for the gradient.
    log_right = jnp.log(jnp.where(right > 0, data.confidence, 1.0))
    log_wrong = jnp.log1p(-jnp.where(wrong > 0, data.confidence, 0.0))
    return data.mean(-right * log_right - wrong * log_wrong)


def summarise(sums: CalibrationSums) -> dict[str, float]:
    """nll, brier, accuracy, confidence, bias, ece, mce and rmsce of all points, computed in float64 on the host.

    Leading axes of the sums (sequences, batches) are added up. `nll` is NaN if a point that counts has no
    log-probability. Raises ValueError if no point counts.
    """
    whole = total_sums(sums)
    count, confidence, correct, _ = whole.totals()
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

    `successes` c in [0, n] (else ValueError) and `samples` n have one shape, or n is a scalar. Every metric accepts the
    fraction as `correct`: a noisy target, of expected Brier score (confidence − q)² + q(1 − q)/n at a success rate q.
    """
    c, n = (jnp.asarray(plain_array(x)) for x in (successes, samples))
    wrong = (c < 0) | (c > n)
    if is_known(wrong) and wrong.any():
        raise ValueError("successes: expected 0 to samples.")
    return jnp.where(n > 0, (c / jnp.maximum(n, 1)).astype(jnp.float32), jnp.nan)


def capability_error(
    confidence: Float[AnyArray, "..."], successes: Int[AnyArray, "..."], samples: Int[AnyArray, "..."]
) -> Float[Array, "..."]:
    """Unbiased estimate of (confidence − q)², where q is the success probability of a question.

    (confidence − c/n)² − v, where v = c(n − c)/(n²(n − 1)) is the unbiased estimate of the variance of c/n. The mean
    over questions is the capability-calibration error of arXiv 2602.13540 without sampling noise. Values can be < 0.

    Args:
        confidence: that a sampled answer is right, in [0, 1], any shape.
        successes: c, 0 <= c <= n, same shape.
        samples: n, same shape or a scalar; independent of the confidence.

    Returns:
        float32, same shape; NaN where n < 2. Raises ValueError outside jit for values out of range.
    """
    confidence, n = (jnp.asarray(plain_array(x)) for x in (confidence, samples))
    check({"confidence": confidence}, rank=None)
    fraction = success_fraction(successes, n)
    variance = fraction * (1 - fraction) / jnp.maximum(n - 1, 1).astype(fraction.dtype)
    error = jnp.asarray(confidence, jnp.float32) - fraction
    return jnp.where(n >= 2, jnp.square(error) - variance, jnp.nan)
