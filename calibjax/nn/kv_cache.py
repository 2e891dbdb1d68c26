"""Key/value cache for incremental decoding.

A cache is a pytree for pure functions: `reserve` assigns columns and positions to new tokens, the blocks compute their
keys and values, `fill` stores them. Rows may be padded on the left, so that all rows grow by the same columns. As
elsewhere, segment ids alone determine which columns a token attends to.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.nn.blocks import BlockConfig, KeysValues, segment_positions
from calibjax.runtime.sharding import constrain_cache


class Cache(NamedTuple):
    """Keys and values of S columns, of which the first `length` are filled.

    Attributes:
        keys, values: `[L, B, S, K, H]`, or `[B, S, K, H]` for a single block; keys are rotated.
        segment_ids: segment of each column; 0 is padding.
        length: number of filled columns.
    """

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]
    segment_ids: Int[Array, "B S"]
    length: Int[Array, ""]


def empty_cache(
    config: BlockConfig, rows: int, columns: int, *, layers: int | None = None, dtype: DTypeLike = jnp.float32
) -> Cache:
    """Makes an empty cache.

    Args:
        config: configuration of the blocks.
        rows, columns: number of sequences B, and of tokens S per sequence including padding.
        layers: number of blocks L; None for a single block, whose arrays have no layer axis.
        dtype: compute dtype of the blocks.

    Returns:
        The cache; under a mesh (`jax.set_mesh`) rows and heads are sharded like the blocks' activations.
    """
    shape = (rows, columns, config.num_kv_heads, config.head_dim)
    zeros = constrain_cache(jnp.zeros(shape if layers is None else (layers, *shape), dtype))
    return Cache(zeros, zeros, jnp.zeros((rows, columns), jnp.int32), jnp.int32(0))


def reserve(cache: Cache, segment_ids: Int[Array, "B T"]) -> tuple[Cache, Int[Array, "B T"]]:
    """Stores the segment ids of the next T tokens; returns the cache and their positions within segments."""
    segments = jax.lax.dynamic_update_slice_in_dim(
        cache.segment_ids, segment_ids.astype(jnp.int32), cache.length, axis=1
    )
    positions = jax.lax.dynamic_slice_in_dim(segment_positions(segments), cache.length, segment_ids.shape[1], axis=1)
    return cache._replace(segment_ids=segments), positions


def fill(cache: Cache, new: KeysValues) -> Cache:
    """Stores the keys and values of the tokens in their reserved columns."""
    keys, values = (
        constrain_cache(jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), cache.length, axis=old.ndim - 3))
        for old, x in zip((cache.keys, cache.values), new, strict=True)
    )
    return Cache(keys, values, cache.segment_ids, cache.length + new[0].shape[-3])
