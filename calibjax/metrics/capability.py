"""Capability calibration: is the confidence the chance that a sampled answer is right, and what of k tries?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def success_share(successes: Int[Array, "..."], samples: Int[Array, "..."]) -> Float[Array, "..."]:
    """c/n, the soft target of a question of whose n samples c were right; NaN where n is 0.

    Every metric of `calibjax.metrics` takes it as `correct`. It is a noisy target: its Brier score holds the sampling
    variance q(1 − q)/n besides (confidence − q)², q being the true chance.
    """
    samples = jnp.asarray(samples)
    share = jnp.asarray(successes) / jnp.maximum(samples, 1)
    return jnp.where(samples > 0, share, jnp.nan)


@functools.partial(jax.jit, static_argnames="k")
def pass_at_k(successes: Int[Array, "..."], samples: Int[Array, "..."], k: int) -> Float[Array, "..."]:
    """Unbiased chance that one of k samples is right, 1 − C(n − c, k)/C(n, k) (Chen et al. 2021, eq. 1).

    Args:
        successes: c, 0 <= c <= n, any shape.
        samples: n, of the same shape or a scalar.
        k: samples drawn, a static integer >= 1.

    Returns:
        float32, the shape of `successes`; NaN where n < k.

    Example:
        >>> import jax.numpy as jnp
        >>> print(pass_at_k(jnp.array([0, 1, 2]), 4, k=2))
        [0.        0.5       0.8333333]
    """
    _check(k)
    c = jnp.asarray(successes)
    n = jnp.broadcast_to(jnp.asarray(samples), c.shape)
    j = jnp.arange(k).reshape(*(1 for _ in c.shape), k)
    fail = jnp.maximum((n - c)[..., None] - j, 0) / jnp.maximum(n[..., None] - j, 1)
    return jnp.where(n >= k, 1 - jnp.prod(fail, axis=-1), jnp.nan)


@functools.partial(jax.jit, static_argnames="k")
def predicted_pass_at_k(confidence: Float[Array, "..."], k: int) -> Float[Array, "..."]:
    """1 − (1 − confidence)^k: what a confidence in one sample says of k independent ones.

    Where confidence is the chance of each question, its mean is that of `pass_at_k`. Where it is right on average only
    (questions of one confidence differ), the prediction is too high, for the function is concave: the excess is another
    sight of `grouping_loss`.

    Args:
        confidence: in [0, 1], any shape.
        k: a static integer >= 1.

    Returns:
        float32, same shape.
    """
    _check(k)
    return -jnp.expm1(k * jnp.log1p(-jnp.asarray(confidence).astype(jnp.float32)))


def _check(k: int) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k: expected an integer of at least 1, got {k!r}.")
