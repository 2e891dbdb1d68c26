"""The operator written out densely: short, differentiated by JAX itself, the contract of all implementations.

Memory: several `[N, V]` arrays. For tests and tiny vocabularies.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.contract import Inputs, Options
from calibjax.kernels.operator import Call
from calibjax.kernels.softcap import softcapped
from calibjax.kernels.stats import FLOOR


def check(options: Options, sharded: bool) -> str:
    """A line for `explain`; raises NotImplementedError for options that a dense formula does not take."""
    for option, given in (
        ("chunk_size", options.chunk_size is not None),
        ("filter_threshold", options.filter_threshold is not None),
        ("save_logits", options.save_logits),
        ("sharding", sharded),
    ):
        if given:
            raise NotImplementedError(f"it is dense and takes no {option}.")
    return "dense, several [N, V] arrays in memory"


def statistics(call: Call, inputs: Inputs) -> dict[str, Array]:
    """The statistics in `call.wanted` in float32, or in float64 where an input is; see `VocabStats`."""
    hidden, unembedding, bias, scale, targets, _ = inputs.masked()
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(hidden.dtype, unembedding.dtype))
    z = jnp.matmul(hidden.astype(dtype), unembedding.astype(dtype).T, precision=call.options.precision)
    if bias is not None:
        z = z + bias.astype(dtype)[None, :]
    z = softcapped(z, call.options.softcap)
    finite = jnp.maximum(z, FLOOR)  # a bias of −inf removes an entry: p = 0, and 0·z = 0
    scaled = scale[:, None].astype(dtype) * finite
    p = jax.nn.softmax(scaled, axis=-1)
    expected = jnp.sum(p * finite, axis=-1)
    variance = jax.lax.stop_gradient(jnp.sum(p * (finite - expected[:, None]) ** 2, axis=-1))
    # NaN of finite logits: s·z, its rounding or the square of z exceeds the dtype; the largest has all the probability.
    largest = jax.lax.stop_gradient(jnp.max(finite, axis=-1))
    expected = jnp.where(jnp.isnan(expected) & jnp.isfinite(largest), largest, expected)
    variance = jnp.where(jnp.isnan(variance) & jnp.isfinite(largest), 0.0, variance)
    everything = {
        "log_normalizer": jax.nn.logsumexp(scaled, axis=-1),
        "mean_logit": jnp.mean(z, axis=-1),
        "max_logit": jnp.max(z, axis=-1),
        "argmax": jnp.argmax(z, axis=-1).astype(jnp.int32),
        "expected_logit": expected,
        "logit_variance": variance,
    }
    if targets is not None:
        everything["target_logit"] = jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    return {name: everything[name] for name in call.wanted}
