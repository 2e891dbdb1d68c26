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
    largest = jax.lax.stop_gradient(jnp.max(finite, axis=-1, keepdims=True))
    beyond = jnp.isinf(scale[:, None].astype(dtype) * largest)  # beyond the range of the dtype only differences count
    scaled = jnp.where(beyond, scale[:, None].astype(dtype) * (finite - largest), scaled)
    p = jax.nn.softmax(scaled, axis=-1)
    expected = jnp.sum(p * finite, axis=-1)
    root = float(jnp.finfo(dtype).max) ** 0.5  # whose square is finite: 0 times it is 0
    everything = {
        "log_normalizer": jnp.where(beyond[:, 0], jnp.inf * jnp.sign(largest[:, 0]), jax.nn.logsumexp(scaled, axis=-1)),
        "mean_logit": jnp.mean(z, axis=-1),
        "max_logit": jnp.max(z, axis=-1),
        "argmax": jnp.argmax(z, axis=-1).astype(jnp.int32),
        "expected_logit": expected,
        "logit_variance": jax.lax.stop_gradient(
            jnp.sum(p * jnp.clip(finite - expected[:, None], -root, root) ** 2, -1)
        ),
    }
    if targets is not None:
        everything["target_logit"] = jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    return {name: everything[name] for name in call.wanted}
