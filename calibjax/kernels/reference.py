"""The operator written out densely: short, differentiated by JAX itself, the contract of all implementations.

Memory: several `[N, V]` arrays. For tests, tiny vocabularies, and logits that are at hand.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.contract import Implementation, Inputs, Options
from calibjax.kernels.operator import masked, masked_statistics
from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import FLOOR, STATISTICS, VocabStats, dense_cumulants, softcapped


class Reference(Implementation):
    """Runs on one device, with any options of the formula itself; float64 where an input is."""

    gives_expected_row = False
    is_dense = True

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        if options.chunk_size is not None or options.save_logits:
            raise NotImplementedError("it is dense and takes no chunk_size, save_logits or sharding.")
        return "dense, several [N, V] arrays in memory"

    def compute(self, options: Options, statistics: frozenset[str], inputs: Inputs) -> dict[str, Array]:
        hidden, unembedding, bias, scale, targets, _ = inputs.masked()
        dtype = jnp.promote_types(jnp.float32, jnp.promote_types(hidden.dtype, unembedding.dtype))
        z = jnp.matmul(hidden.astype(dtype), unembedding.astype(dtype).T, precision=options.precision)
        if bias is not None:
            z = z + bias.astype(dtype)[None, :]
        values = dense_values(softcapped(z, options.softcap), scale.astype(dtype), targets, options.scales)
        return {name: values[name] for name in statistics}


def dense_values(
    z: Float[Array, "... V"],
    s: Float[Array, "..."],
    targets: Int[Array, "..."] | None,
    scales: tuple[float, ...] | None,
) -> dict[str, Array]:
    """All statistics but `correct` of logits z at hand, see `operator.compute`."""
    finite = jnp.maximum(z, FLOOR)  # a bias of −inf removes an entry: p = 0, and 0·z = 0
    # Relative to the largest logit m: s·m may exceed the dtype, and so may s·(z − m), whose exponential is 0 then.
    m = jax.lax.stop_gradient(jnp.max(finite, axis=-1))
    difference = jnp.maximum(finite - m[..., None], FLOOR)
    if scales is None:
        log_weight, shift, variance = dense_cumulants(difference, s)
        log_weight, shift = s * m + log_weight, m + shift
    else:
        at_scales = jax.lax.map(functools.partial(dense_cumulants, difference), jnp.asarray(scales, z.dtype))
        log_weight, shift, variance = (jnp.moveaxis(x, 0, -1) for x in at_scales)
    values = {
        "log_normalizer": log_weight,
        "mean_logit": jnp.mean(z, axis=-1),
        "max_logit": jnp.max(z, axis=-1),
        "argmax": jnp.argmax(z, axis=-1).astype(jnp.int32),
        "expected_logit": shift,
        "logit_variance": variance,
    }
    if targets is not None:
        target = jnp.take_along_axis(z, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
        values["target_logit"] = target[..., 0]
    return values


def dense_stats(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."] | None = None,
    *,
    scale: Float[Array, "..."] | None = None,
    where: Bool[Array, "..."] | None = None,
) -> VocabStats:
    """`vocab_stats` of logits z `[..., V]`, of a model without hidden states or of cached decoding.

    Differentiable in `scale`.
    """
    s = jnp.ones(logits.shape[:-1], jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32)
    _, values, valid = dense_statistics(logits, targets, s, where, None)
    return VocabStats(**values, valid=valid, scale=s)


def dense_statistics(
    logits: Any, targets: Any, scale: Array, where: Any, scales: tuple[float, ...] | None
) -> tuple[Array, dict[str, Any], Array]:
    """Logits in float32, 0 where a token does not count; the statistics by name; and which tokens count."""
    valid = jnp.ones(logits.shape[:-1], bool) if where is None else where
    valid = valid if targets is None else valid & (targets != -100)
    z = jax.lax.stop_gradient(masked(valid, logits.astype(jnp.float32)))
    index = None if targets is None else jnp.where(valid, targets, 0)
    values = dense_values(z, jnp.where(valid, scale, 1.0), index, scales)
    if targets is not None:
        values["correct"] = values["argmax"] == targets
    return z, dict.fromkeys(STATISTICS) | masked_statistics(values, valid), valid
