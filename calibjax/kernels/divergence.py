"""How far other hidden states' predictions are from given ones, without holding either's logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from calibjax.kernels.chunked import choose_chunk_size, fold, rows
from calibjax.kernels.operator import Model
from calibjax.kernels.sharded import VocabSharding, over_pieces, split_rows


def kl_divergences(
    hidden: Float[Array, "*B D"],
    others: Float[Array, "K *B D"],
    unembedding: Float[Array, "V D"],
    *,
    log_normalizer: Float[Array, "*B"],
    other_log_normalizers: Float[Array, "K *B"],
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    sharding: VocabSharding | None = None,
) -> Float[Array, "K *B"]:
    """KL(p‖q_k) of the next-token distributions of `hidden` and of each of the `others`, in nats.

    KL(p‖q) = Σ_v p_v (z_v − z'_v) − lse(z) + lse(z'): with both normalizers known from `vocab_stats`, the sum runs over
    chunks of the vocabulary, each of which needs only its own logits; over a mesh, the sums of the vocabulary's shards
    are added. Forward only. Memory beyond inputs and outputs: a float32 block `[K + 1, N, C]` of the logits, C columns
    at a time, as `chunked.choose_chunk_size` says for (K + 1) N tokens. The difference of sums is known to about 1e-6
    of the largest logit's size.

    Args:
        hidden: of the reference p, `[..., D]`, floating point.
        others: of the K others, `[K, ..., D]`.
        unembedding: `[V, D]`, for all.
        log_normalizer: log Σ_v exp(z_v) of `hidden`, `[...]`.
        other_log_normalizers: of the others, `[K, ...]`.
        bias, softcap, sharding: as in `vocab_stats`.

    Returns:
        float32 `[K, ...]`, at least 0.

    Raises:
        ValueError: the unembedding cannot be divided as `sharding` says.
    """
    count, shape = others.shape[0], hidden.shape[:-1]
    states = jnp.concatenate([hidden[None], others]).reshape(count + 1, -1, hidden.shape[-1])
    normalizer = log_normalizer.reshape(-1)
    differences = _differences if sharding is None else functools.partial(_over_mesh, sharding)
    total = differences(states, normalizer, unembedding, bias, softcap)
    return jnp.maximum(total.reshape(count, *shape) - log_normalizer[None] + other_log_normalizers, 0.0)


def _differences(
    states: Float[Array, "M N D"],
    normalizer: Float[Array, " N"],
    unembedding: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    softcap: float | None,
) -> Float[Array, "K N"]:
    """Σ_v p_v (z_v − z'_v) over the rows given, p = exp(z − normalizer) and z of the first of the M = K + 1 states."""

    def step(total: Array, start: Array | int, width: int, _: None) -> Array:
        z = jnp.einsum(
            "knd,cd->knc",
            states,
            rows(unembedding, start, width).astype(states.dtype),
            preferred_element_type=jnp.float32,
            precision="highest" if states.dtype == jnp.float32 else None,
        )
        if bias is not None:
            z = z + rows(bias, start, width).astype(jnp.float32)[None, None, :]
        z = z if softcap is None else softcap * jnp.tanh(z / softcap)
        p = jnp.exp(z[0] - normalizer[:, None])
        return total + jnp.sum(p[None] * (z[:1] - z[1:]), axis=-1)

    (count, tokens, _), vocab_size = states.shape, unembedding.shape[0]
    zero = jnp.zeros((count - 1, tokens), jnp.float32)
    return fold(step, zero, vocab_size, choose_chunk_size(count * tokens, vocab_size))


def _over_mesh(
    sharding: VocabSharding,
    states: Float[Array, "M N D"],
    normalizer: Float[Array, " N"],
    unembedding: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    softcap: float | None,
) -> Float[Array, "K N"]:
    """`_differences`, each device taking its tokens and its part of the vocabulary."""
    sharding.check_shape(*unembedding.shape)
    sharding = sharding.without_trivial_axes()
    tokens = states.shape[1]
    padding = -tokens % sharding.count(sharding.tokens)
    states, normalizer = jnp.pad(states, ((0, 0), (0, padding), (0, 0))), jnp.pad(normalizer, (0, padding))
    head, tail = split_rows(Model(states, unembedding, bias, None), sharding.count(sharding.vocab))

    def local(head: Model, tail: tuple[Array, Array | None] | None, normalizer: Array) -> Array:
        def step(total: Array, weights: Array, bias: Array | None, *_) -> tuple[Array, None]:
            return total + _differences(head.hidden, normalizer, weights, bias, softcap), None

        zero = jnp.zeros((head.hidden.shape[0] - 1, head.hidden.shape[1]), jnp.float32)
        total, _ = over_pieces(sharding, head, step, zero)
        total = jax.lax.psum(total, sharding.vocab)
        return total if tail is None else step(total, *tail)[0]

    weights: Any = P(sharding.vocab, sharding.width)
    specs = Model(P(None, sharding.tokens), weights, P(sharding.vocab), None)  # pyright: ignore[reportArgumentType]
    total = jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(specs, P(), P(sharding.tokens)),
        out_specs=P(None, sharding.tokens),
        check_vma=False,
    )(head, tail, normalizer)
    return total[:, :tokens]
