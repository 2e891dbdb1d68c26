"""The k largest logits of each token, without holding all of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.chunked import choose_chunk_size, fold, take_rows
from calibjax.kernels.operator import masked
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import softcapped
from calibjax.runtime.arrays import AnyArray, as_jax


class TopLogits(NamedTuple):
    """The k largest logits, largest first, float32 `[..., k]`, and their indices, int32 `[..., k]`."""

    logits: Float[Array, "... k"]
    ids: Int[Array, "... k"]


def top_logits(
    hidden: Float[AnyArray, "*B D"],
    unembedding: Float[AnyArray, "V D"],
    k: int,
    *,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[AnyArray, "*B"] | None = None,
    sharding: VocabSharding | None = None,
) -> TopLogits:
    """The k largest of the logits z = softcap(h Wᵀ + b), with their indices in the vocabulary.

    The indices come from one pass over chunks of the vocabulary, or of each device's part, that is not differentiated.
    Then the k rows of the unembedding are gathered and their logits computed again: the gradient is of k·N logits only.

    Args:
        hidden, unembedding, bias, softcap: as in `vocab_stats`.
        k: 1 to V.
        where: `[...]`, False for tokens that do not count: they hold 0 and pass no gradient, even with NaN in `hidden`.
        sharding: as in `vocab_stats`. Where V or the number of tokens does not divide among the devices, or the mesh
            has axes of type Explicit, XLA splits the computation.

    Returns:
        `TopLogits`. Equal logits are ordered by index.

    Raises:
        ValueError: for shapes or a k that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> top = top_logits(jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]), k=2)
        >>> top.logits.tolist(), top.ids.tolist()
        ([[3.0, 2.0]], [[1, 2]])
    """
    hidden, unembedding = as_jax(hidden), as_jax(unembedding)
    bias = None if bias is None else as_jax(bias)
    vocab_size = unembedding.shape[0]
    if hidden.ndim < 1 or unembedding.ndim != 2 or hidden.shape[-1] != unembedding.shape[1]:
        raise ValueError(f"expected hidden [..., D] and unembedding [V, D], got {hidden.shape}, {unembedding.shape}.")
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k: expected 1 to the vocabulary size {vocab_size}, got {k}.")
    shape = hidden.shape[:-1]
    valid = jnp.broadcast_to(True if where is None else as_jax(where), shape).reshape(-1)
    flat = masked(valid, hidden.reshape(-1, hidden.shape[-1]))
    ids = _top_ids(k, softcap, sharding, *jax.lax.stop_gradient((flat, unembedding, bias)))
    z = jnp.einsum("nd,nkd->nk", flat, unembedding[ids], preferred_element_type=jnp.float32, precision="highest")
    if bias is not None:
        z = z + bias[ids].astype(jnp.float32)
    z = masked(valid, softcapped(z, softcap))
    ids = masked(valid, ids, -1)
    return TopLogits(z.reshape(*shape, k), ids.reshape(*shape, k))


def _top_ids(
    k: int, softcap: float | None, sharding: VocabSharding | None, hidden: Array, unembedding: Array, bias: Array | None
) -> Int[Array, "N k"]:
    if sharding is None or sharding.explicit_axes:
        return _best(k, softcap, hidden, unembedding, bias, ()).ids
    sharding = sharding.without_trivial_axes()
    is_split = bool(sharding.tokens or sharding.vocab)
    rows_divide = unembedding.shape[0] % sharding.count(sharding.vocab) == 0
    tokens_divide = hidden.shape[0] % sharding.count(sharding.tokens) == 0
    if not (is_split and rows_divide and tokens_divide):
        return _best(k, softcap, hidden, unembedding, bias, ()).ids

    def local(hidden: Array, unembedding: Array, bias: Array | None) -> Array:
        best = _best(min(k, unembedding.shape[0]), softcap, hidden, unembedding, bias, sharding.width)
        if not sharding.vocab:
            return best.ids
        first = jax.lax.axis_index(sharding.vocab) * unembedding.shape[0]
        best = best._replace(ids=best.ids + first)
        candidates = jax.lax.all_gather(best, sharding.vocab, axis=1, tiled=True)
        return _largest(k, candidates).ids

    specs = (P(sharding.tokens), P(sharding.vocab, sharding.width), P(sharding.vocab))
    mapped = jax.shard_map(local, mesh=sharding.mesh, in_specs=specs, out_specs=P(sharding.tokens), check_vma=False)
    return mapped(hidden, unembedding, bias)


def _best(
    k: int, softcap: float | None, hidden: Array, unembedding: Array, bias: Array | None, width_axes: tuple[str, ...]
) -> TopLogits:
    """The k largest logits by chunks of the vocabulary; after the soft-cap, which makes large ones equal."""

    def step(best: TopLogits, start: Array | int, width: int, _: None) -> tuple[TopLogits, None]:
        block = take_rows(unembedding, start, width)
        if width_axes:
            block = jax.lax.all_gather(block, width_axes, axis=1, tiled=True)
        z = jnp.einsum("nd,cd->nc", hidden, block, preferred_element_type=jnp.float32, precision="highest")
        if bias is not None:
            z = z + take_rows(bias, start, width).astype(jnp.float32)[None, :]
        z = softcapped(z, softcap)
        z = jnp.where(z == 0, 0.0, z)  # `top_k` orders 0.0 before −0.0
        z = jnp.maximum(z, jnp.finfo(z.dtype).min)  # above `nothing`, also where a bias of −inf removes an entry
        largest, column = jax.lax.top_k(z, min(k, width))
        logits = jnp.concatenate([best.logits, largest], axis=1)
        ids = jnp.concatenate([best.ids, column + start], axis=1)
        return _largest(k, TopLogits(logits, ids)), None

    tokens, vocab_size = len(hidden), len(unembedding)
    lowest = jnp.full((tokens, k), -jnp.inf, jnp.float32)
    nothing = TopLogits(lowest, jnp.zeros((tokens, k), jnp.int32))
    return fold(step, nothing, vocab_size, choose_chunk_size(tokens, vocab_size))[0]


def _largest(k: int, candidates: TopLogits) -> TopLogits:
    """The k largest of `[N, m]` candidates; of equal ones the first is taken, so that the lowest index stays."""
    logits, index = jax.lax.top_k(candidates.logits, k)
    return TopLogits(logits, jnp.take_along_axis(candidates.ids, index, axis=1))
