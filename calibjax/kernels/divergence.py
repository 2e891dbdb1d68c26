"""KL divergences between predictions of different hidden states, without storing the logits of either."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.kernels.chunked import choose_chunk_size, fold, take_rows
from calibjax.kernels.contract import Inputs
from calibjax.kernels.sharded import VocabSharding, in_auto_axes, leading_spec, sum_over_vocab
from calibjax.kernels.stats import softcapped
from calibjax.runtime.arrays import AnyArray, as_jax


def kl_divergences(
    hidden: Float[AnyArray, "*B D"],
    others: Float[AnyArray, "K *B D"],
    unembedding: Float[AnyArray, "V D"],
    *,
    log_normalizer: Float[AnyArray, "*B"],
    other_log_normalizers: Float[AnyArray, "K *B"],
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    sharding: VocabSharding | None = None,
) -> Float[Array, "K *B"]:
    """KL(p‖q_k) of the next-token distributions of `hidden` and of each of the `others`, in nats.

    KL(p‖q) = Σ_v p_v (z_v − z'_v) − lse(z) + lse(z'): with both normalizers known from `vocab_stats`, a sum over chunks
    of the vocabulary and over its shards. Forward only. Memory beyond inputs and outputs: float32 logits of the K + 1
    for a chunk. The error is about 1e-6 of the largest logit.

    Args:
        hidden: hidden states of the reference p, `[..., D]`; `others`: hidden states of the K others, `[K, ..., D]`.
        unembedding: `[V, D]`, of all.
        log_normalizer: log Σ_v exp(z_v) of `hidden`, `[...]`; `other_log_normalizers`: of the others, `[K, ...]`.
        bias, softcap, sharding: as in `vocab_stats`.

    Returns:
        float32 `[K, ...]`, at least 0.
    """
    hidden, others, unembedding, log_normalizer, other_log_normalizers = map(
        as_jax, (hidden, others, unembedding, log_normalizer, other_log_normalizers)
    )
    bias = None if bias is None else as_jax(bias)
    if sharding is not None and sharding.explicit_axes:

        def run(sharding: VocabSharding, arrays: dict[str, Any]) -> Array:
            return kl_divergences(**arrays, softcap=softcap, sharding=sharding)

        arrays = {"hidden": hidden, "others": others, "unembedding": unembedding, "bias": bias}
        arrays |= {"log_normalizer": log_normalizer, "other_log_normalizers": other_log_normalizers}
        return in_auto_axes(sharding, run, arrays, (None, *leading_spec(hidden)))
    count, shape = others.shape[0], hidden.shape[:-1]
    states = jnp.concatenate([hidden[None], others])
    states = states.reshape(count + 1, -1, hidden.shape[-1]).swapaxes(0, 1)
    normalizer = log_normalizer.reshape(-1)
    inputs = Inputs(states, unembedding, bias, scale=jnp.ones_like(normalizer), targets=None, valid=None)
    over_vocab = functools.partial(_expected_differences, softcap)
    if sharding is not None:
        over_vocab = functools.partial(sum_over_vocab, sharding, over_vocab, count)
    total = over_vocab(inputs, normalizer).T.reshape(count, *shape)
    return jnp.maximum(total - log_normalizer[None] + other_log_normalizers, 0.0)


def _expected_differences(
    softcap: float | None, inputs: Inputs, log_normalizer: Float[Array, " N"]
) -> Float[Array, "N K"]:
    """Σ_v p_v (z_v − z'_v) over the rows of W in `inputs`. Its hidden states are [N, K + 1, D]; the first gives z."""
    states, unembedding, bias, *_ = inputs

    def step(total: Array, start: Array | int, width: int, _: None) -> tuple[Array, None]:
        z = jnp.einsum(
            "nkd,cd->nkc",
            states,
            take_rows(unembedding, start, width).astype(states.dtype),
            preferred_element_type=jnp.float32,
            precision="highest" if states.dtype == jnp.float32 else None,
        )
        if bias is not None:
            z = z + take_rows(bias, start, width).astype(jnp.float32)[None, None, :]
        z = softcapped(z, softcap)
        p = jnp.exp(z[:, :1] - log_normalizer[:, None, None])
        terms = jnp.where(p == 0, 0.0, p * (z[:, :1] - z[:, 1:]))  # not 0·NaN, of −inf − −inf
        return total + jnp.sum(terms, axis=-1), None

    (tokens, count, _), vocab_size = states.shape, unembedding.shape[0]
    zero = jnp.zeros((tokens, count - 1), jnp.float32)
    return fold(step, zero, vocab_size, choose_chunk_size(tokens * count, vocab_size))[0]
