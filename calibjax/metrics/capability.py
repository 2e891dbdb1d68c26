"""Capability calibration: confidence as the probability that one of k sampled answers is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.runtime.arrays import AnyArray


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
    _check(k)
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
    _check(k)
    return -jnp.expm1(k * jnp.log1p(-jnp.asarray(confidence).astype(jnp.float32)))


def _check(k: int) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k: expected an integer of at least 1, got {k!r}.")
