"""Key/value cache for incremental decoding: a pytree for pure functions.

`full_cache` makes one of the prompts, `fork` repeats each row for several samples and appends free columns. In each
step `reserve` assigns columns and positions to the new tokens, the blocks compute their keys and values, and `fill`
stores them. Rows may be padded on the left: segment ids determine which columns a token attends to.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.nn.blocks import KeysValues, Past, segment_positions
from calibjax.runtime.sharding import constrain_cache


class Cache(NamedTuple):
    """Keys and values of P + S columns, of which the first `length` are filled.

    Attributes:
        keys, values: of the last S columns, `[L, B, K, S, H]`, or `[B, K, S, H]` of a single block; keys are rotated.
        segment_ids: segment of each column; 0 is padding.
        length: number of filled columns.
        shared: keys and values of the first P columns, `[L, A, K, P, H]`, of A prompts. The B / A samples of a prompt,
            which are consecutive rows, read them. None if P is 0.
    """

    keys: Float[Array, "*L B K S H"]
    values: Float[Array, "*L B K S H"]
    segment_ids: Int[Array, "B P+S"]
    length: Int[Array, ""]
    shared: KeysValues | None = None

    @property
    def past(self) -> Past:
        """Keys and values as the blocks take them."""
        own = self.keys, self.values
        return (own,) if self.shared is None else (self.shared, own)


def full_cache(new: KeysValues, segment_ids: Int[Array, "B T"]) -> Cache:
    """A full cache of the first T tokens, whose keys and values are `[L, B, K, T, H]`, or `[B, K, T, H]` of one block.

    Under a mesh (`jax.set_mesh`) rows and heads are sharded like the blocks' activations.
    """
    keys, values = map(constrain_cache, new)
    return Cache(keys, values, segment_ids.astype(jnp.int32), jnp.int32(segment_ids.shape[1]))


def reserve(cache: Cache, segment_ids: Int[Array, "B T"]) -> tuple[Cache, Int[Array, "B T"]]:
    """Stores the segment ids of the next T tokens; returns the cache and the tokens' positions in their segments."""
    segments = jax.lax.dynamic_update_slice_in_dim(cache.segment_ids, segment_ids.astype(jnp.int32), cache.length, 1)
    positions = jax.lax.dynamic_slice_in_dim(segment_positions(segments), cache.length, segment_ids.shape[1], axis=1)
    return cache._replace(segment_ids=segments), positions


def fill(cache: Cache, new: KeysValues) -> Cache:
    """Stores keys and values of the tokens that `reserve` was last called for, in their columns."""
    start = cache.length - (cache.segment_ids.shape[1] - cache.keys.shape[-2])

    def update(old: Array, x: Array) -> Array:
        return constrain_cache(jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), start, axis=old.ndim - 2))

    keys, values = update(cache.keys, new[0]), update(cache.values, new[1])
    return cache._replace(keys=keys, values=values, length=cache.length + new[0].shape[-2])


def fork(cache: Cache, count: int, columns: int) -> Cache:
    """Repeats every row of a full cache `count` times, each with free columns of its own; filled ones are shared."""
    assert cache.shared is None, "a cache is forked once"
    *layers, rows, heads, _, width = cache.keys.shape
    free = constrain_cache(jnp.zeros((*layers, rows * count, heads, columns, width), cache.keys.dtype))
    segment_ids = jnp.pad(jnp.repeat(cache.segment_ids, count, axis=0), ((0, 0), (0, columns)))
    return Cache(free, free, segment_ids, cache.length, (cache.keys, cache.values))
