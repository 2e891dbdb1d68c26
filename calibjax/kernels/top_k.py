"""The k largest logits of each token, without holding all of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.chunked import choose_chunk_size, fold, rows
from calibjax.kernels.softcap import softcapped

_PRECISION = jax.lax.Precision.HIGHEST


class TopLogits(NamedTuple):
    """The k largest logits, largest first, float32 `[..., k]`, and their indices, int32 `[..., k]`."""

    logits: Float[Array, "... k"]
    ids: Int[Array, "... k"]


def top_logits(
    hidden: Float[Array, "*B D"],
    unembedding: Float[Array, "V D"],
    k: int,
    *,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[Array, "*B"] | None = None,
) -> TopLogits:
    """The k largest of the logits z = softcap(h Wᵀ + b), with their indices in the vocabulary.

    The indices come from one pass over chunks of the vocabulary that keeps the k best so far and is not differentiated.
    Then those k rows of the unembedding are gathered and their logits computed again: the gradient is that of k·N
    logits, whatever V. Memory beyond inputs and outputs: a float32 block `[N, C]`, and the gathered rows `[N, k, D]`.
    It runs on one device, or as XLA splits it; there is no sharded form.

    Args:
        hidden: `[..., D]`, floating point.
        unembedding: `[V, D]`, floating point.
        k: 1 to V.
        bias: `[V]`, added before the soft-cap.
        softcap: cap > 0, or None.
        where: `[...]`, False for tokens that do not count: they hold 0 and pass no gradient, even with NaN in `hidden`.

    Returns:
        `TopLogits`. Of equal logits the lowest index comes first.

    Raises:
        ValueError: for shapes or a k that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> top = top_logits(jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]), k=2)
        >>> top.logits.tolist(), top.ids.tolist()
        ([[3.0, 2.0]], [[1, 2]])
    """
    vocab_size = unembedding.shape[0]
    if hidden.ndim < 1 or unembedding.ndim != 2 or hidden.shape[-1] != unembedding.shape[1]:
        raise ValueError(f"expected hidden [..., D] and unembedding [V, D], got {hidden.shape}, {unembedding.shape}.")
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k: expected 1 to the vocabulary size {vocab_size}, got {k}.")
    shape = hidden.shape[:-1]
    flat = hidden.reshape(-1, hidden.shape[-1])
    valid = None if where is None else jnp.broadcast_to(where, shape).reshape(-1)
    if valid is not None:
        flat = jnp.where(valid[:, None], flat, 0)

    frozen, weights, offsets = jax.lax.stop_gradient((flat, unembedding, bias))

    def step(best: TopLogits, start: Array | int, width: int, _: None) -> TopLogits:
        block = rows(weights, start, width)
        z = jnp.einsum("nd,cd->nc", frozen, block, preferred_element_type=jnp.float32, precision=_PRECISION)
        if offsets is not None:
            z = z + rows(offsets, start, width).astype(jnp.float32)[None, :]
        largest, column = jax.lax.top_k(z, min(k, width))  # the soft-cap keeps the order
        both = jnp.concatenate([best.logits, largest], axis=1)  # earlier chunks first: of equals the lowest index stays
        ids = jnp.concatenate([best.ids, column + start], axis=1)
        logits, index = jax.lax.top_k(both, k)
        return TopLogits(logits, jnp.take_along_axis(ids, index, axis=1))

    tokens = flat.shape[0]
    nothing = TopLogits(jnp.full((tokens, k), -jnp.inf, jnp.float32), jnp.zeros((tokens, k), jnp.int32))
    ids = fold(step, nothing, vocab_size, choose_chunk_size(tokens, vocab_size)).ids

    own = unembedding[ids]
    z = jnp.einsum("nd,nkd->nk", flat, own, preferred_element_type=jnp.float32, precision=_PRECISION)
    if bias is not None:
        z = z + bias[ids].astype(jnp.float32)
    z = softcapped(z, softcap)
    if valid is not None:
        z, ids = jnp.where(valid[:, None], z, 0.0), jnp.where(valid[:, None], ids, -1)
    return TopLogits(z.reshape(*shape, k), ids.reshape(*shape, k))
