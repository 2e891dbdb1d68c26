"""How far other hidden states' predictions are from given ones, without holding either's logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.kernels.chunked import choose_chunk_size, fold, rows


def kl_divergences(
    hidden: Float[Array, "*B D"],
    others: Float[Array, "K *B D"],
    unembedding: Float[Array, "V D"],
    *,
    log_normalizer: Float[Array, "*B"],
    other_log_normalizers: Float[Array, "K *B"],
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "K *B"]:
    """KL(p‖q_k) of the next-token distributions of `hidden` and of each of the `others`, in nats.

    KL(p‖q) = Σ_v p_v (z_v − z'_v) − lse(z) + lse(z'): with both normalizers known from `vocab_stats`, the sum runs over
    chunks of the vocabulary, each of which needs only its own logits. Forward only. Memory beyond inputs and outputs: a
    float32 block `[K + 1, N, C]` of the logits, C columns at a time, as `chunked.choose_chunk_size` says for (K + 1) N
    tokens. The difference of sums is known to about 1e-6 of the largest logit's size.

    Args:
        hidden: of the reference p, `[..., D]`, floating point.
        others: of the K others, `[K, ..., D]`.
        unembedding: `[V, D]`, for all.
        log_normalizer: log Σ_v exp(z_v) of `hidden`, `[...]`.
        other_log_normalizers: of the others, `[K, ...]`.
        bias, softcap: as in `vocab_stats`.

    Returns:
        float32 `[K, ...]`, at least 0.
    """
    count, shape = others.shape[0], hidden.shape[:-1]
    states = jnp.concatenate([hidden[None], others]).reshape(count + 1, -1, hidden.shape[-1])
    normalizer = log_normalizer.reshape(-1)

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

    tokens, vocab_size = states.shape[1], unembedding.shape[0]
    zero = jnp.zeros((count, tokens), jnp.float32)
    total = fold(step, zero, vocab_size, choose_chunk_size((count + 1) * tokens, vocab_size))
    return jnp.maximum(total.reshape(count, *shape) - log_normalizer[None] + other_log_normalizers, 0.0)
