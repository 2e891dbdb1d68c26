"""The keys and values of the tokens so far, kept so that a further token costs one row of attention.

A cache is a pytree that goes through pure functions: `reserve` gives new tokens their columns and positions, the blocks
compute their keys and values, `fill` stores them. Rows may be padded on the left, so that all of them grow by the same
columns; what stands in a column, and what a token sees, is decided by segment ids alone, as everywhere.
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
        keys, values: `[L, B, S, K, H]`, or `[B, S, K, H]` for a single block; keys are rotated already.
        segment_ids: which sequence of its row each column belongs to; 0 is padding.
        length: columns filled.
    """

    keys: Float[Array, "*L B S K H"]
    values: Float[Array, "*L B S K H"]
    segment_ids: Int[Array, "B S"]
    length: Int[Array, ""]


def empty_cache(
    config: BlockConfig, rows: int, columns: int, *, layers: int | None = None, dtype: DTypeLike = jnp.float32
) -> Cache:
    """Makes a cache with nothing in it.

    Args:
        config: of the blocks.
        rows, columns: how many sequences B, and how many tokens S of each, padding included.
        layers: blocks L; None for a single one, whose arrays have no first axis.
        dtype: compute dtype of the blocks.

    Returns:
        The cache; under a mesh (`jax.set_mesh`) rows and heads are divided like the blocks' activations.
    """
    shape = (rows, columns, config.num_kv_heads, config.head_dim)
    zeros = constrain_cache(jnp.zeros(shape if layers is None else (layers, *shape), dtype))
    return Cache(zeros, zeros, jnp.zeros((rows, columns), jnp.int32), jnp.int32(0))


def reserve(cache: Cache, segment_ids: Int[Array, "B T"]) -> tuple[Cache, Int[Array, "B T"]]:
    """Enters the segment ids of the next T tokens; returns the cache and their positions, counted in each segment."""
    segments = jax.lax.dynamic_update_slice_in_dim(
        cache.segment_ids, segment_ids.astype(jnp.int32), cache.length, axis=1
    )
    positions = jax.lax.dynamic_slice_in_dim(segment_positions(segments), cache.length, segment_ids.shape[1], axis=1)
    return cache._replace(segment_ids=segments), positions


def fill(cache: Cache, new: KeysValues) -> Cache:
    """Stores the keys and values of the tokens whose columns were reserved."""
    keys, values = (
        constrain_cache(jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), cache.length, axis=old.ndim - 3))
        for old, x in zip((cache.keys, cache.values), new, strict=True)
    )
    return Cache(keys, values, cache.segment_ids, cache.length + new[0].shape[-3])
