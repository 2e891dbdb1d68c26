"""The statistics of logits that are at hand: those of a model that gives no hidden states, or of cached decoding."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.api import masked_statistics
from calibjax.kernels.curves import SCALES, VocabCurves
from calibjax.kernels.operator import masked
from calibjax.kernels.reference import of_logits
from calibjax.kernels.stats import STATISTICS, VocabStats


def dense_stats(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."] | None = None,
    *,
    scale: Float[Array, "..."] | None = None,
    where: Bool[Array, "..."] | None = None,
) -> VocabStats:
    """`vocab_stats` of logits z `[..., V]`; differentiable in `scale`, and several arrays of that size in memory."""
    s = jnp.ones(logits.shape[:-1], jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32)
    _, values, valid = _evaluate(logits, targets, s, where, None)
    return VocabStats(**values, valid=valid, scale=s)


def dense_curves(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."],
    *,
    scales: tuple[float, ...] = SCALES,
    top_k: int = 0,
) -> VocabCurves:
    """`vocab_curves` of logits z `[..., V]`; one scale after another, each with several arrays of that size."""
    z, values, valid = _evaluate(logits, targets, jnp.ones(targets.shape, jnp.float32), None, scales)
    return VocabCurves(
        log_weight=values.pop("log_normalizer"),
        expected_difference=values.pop("expected_logit"),
        **values,
        top_logits=masked(valid, jax.lax.top_k(z, top_k)[0]) if top_k else None,
        valid=valid,
        scales=scales,
    )


def _evaluate(
    logits: Any, targets: Any, scale: Array, where: Any, scales: tuple[float, ...] | None
) -> tuple[Array, dict[str, Any], Array]:
    """Logits in float32, 0 where a token does not count; the statistics by name; and which tokens count."""
    valid = jnp.ones(logits.shape[:-1], bool) if where is None else where
    valid = valid if targets is None else valid & (targets != -100)
    z = jax.lax.stop_gradient(masked(valid, logits.astype(jnp.float32)))
    index = None if targets is None else jnp.where(valid, targets, 0)
    values = of_logits(z, jnp.where(valid, scale, 1.0), index, scales)
    if targets is not None:
        values["correct"] = values["argmax"] == targets
    return z, dict.fromkeys(STATISTICS) | masked_statistics(values, valid), valid
