"""The statistics of logits that are at hand: those of a model that gives no hidden states, or of cached decoding."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.curves import SCALES, VocabCurves
from calibjax.kernels.operator import masked
from calibjax.kernels.stats import FLOOR, VocabStats, cumulants


def dense_stats(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."] | None = None,
    *,
    scale: Float[Array, "..."] | None = None,
    where: Bool[Array, "..."] | None = None,
) -> VocabStats:
    """`vocab_stats` of logits z `[..., V]`; differentiable in `scale`, and several arrays of that size in memory."""
    z, constants, valid = _constants(logits, targets, where)
    s = jnp.ones(valid.shape, jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32)
    counted = jnp.where(valid, s, 1.0)
    largest = constants["max_logit"]
    log_weight, mean, variance = cumulants(jnp.maximum(z - largest[..., None], FLOOR), counted)
    values = {
        "log_normalizer": counted * largest + log_weight,
        "expected_logit": largest + mean,
        "logit_variance": variance,
    }
    values = {name: masked(valid, value) for name, value in values.items()}
    return VocabStats(**values, **constants, valid=valid, scale=s)


def dense_curves(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."],
    *,
    scales: tuple[float, ...] = SCALES,
    where: Bool[Array, "..."] | None = None,
    top_k: int = 0,
) -> VocabCurves:
    """`vocab_curves` of logits z `[..., V]`; one scale after another, each with several arrays of that size."""
    z, constants, valid = _constants(logits, targets, where)
    difference = jnp.maximum(z - constants["max_logit"][..., None], FLOOR)
    jets = jax.lax.map(lambda s: cumulants(difference, s), jnp.asarray(scales, jnp.float32))
    f, slope, curvature = (masked(valid, jnp.moveaxis(x, 0, -1)) for x in jets)
    top = masked(valid, jax.lax.top_k(z, top_k)[0]) if top_k else None
    return VocabCurves(
        log_weight=f,
        expected_difference=slope,
        logit_variance=curvature,
        **constants,
        top_logits=top,
        valid=valid,
        scales=scales,
    )


def _constants(logits: Any, targets: Any, where: Any) -> tuple[Array, dict[str, Any], Array]:
    """Logits in float32, 0 where a token does not count; what no scale changes; and which tokens count."""
    valid = jnp.ones(logits.shape[:-1], bool) if where is None else where
    if targets is not None:
        valid = valid & (targets != -100)
    z = jax.lax.stop_gradient(masked(valid, logits.astype(jnp.float32)))
    argmax = masked(valid, jnp.argmax(z, axis=-1).astype(jnp.int32), -1)
    constants: dict[str, Any] = {
        "target_logit": None,
        "mean_logit": jnp.mean(z, axis=-1),
        "max_logit": jnp.maximum(jnp.max(z, axis=-1), jnp.finfo(jnp.float32).min),
        "argmax": argmax,
        "correct": None,
    }
    if targets is not None:
        index = jnp.where(valid, targets, 0)[..., None]
        target_logit = jnp.take_along_axis(z, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
        constants |= {"target_logit": target_logit, "correct": valid & (argmax == targets)}
    return z, constants, valid
