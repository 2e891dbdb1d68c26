"""TPU kernel for rows W[ids] where the kernels have W transposed (`common.Axes`): XLA would copy all of W for them.

The ids are sorted, and a step of the grid takes from one block of columns of Wᵀ the rows of one block of ids, by a
product with zeros and ones: each block of W that has any is read once or, where two blocks of ids share it, twice in a
row. The product is exact where W is finite; NaN and infinity also reach other rows of their block (0 · NaN).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import Options
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.blocks import LANES, UNPLANNED, Blocks, vmem_bytes


def _kernel(_, block_of_step, ids_ref, unembedding, rows, *, options: Options, vocab_size: int) -> None:
    size, width = rows.shape
    axes = common.Axes.of(vocab_size, width)
    columns = unembedding.shape[axes.vocab]
    block = block_of_step[pl.program_id(0)]
    ids = common.column(ids_ref, 0).astype(jnp.int32) - block * columns
    inside = ((ids >= 0) & (ids < columns))[:, :1]
    places = ids - jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 1)
    hits = jnp.concatenate([jnp.where(places == k, 1.0, 0.0) for k in range(0, columns, LANES)], axis=1)
    hits = hits.astype(unembedding.dtype)

    def walk(count: int):
        for part in common.slices(width):
            w = common.existing(axes.rows(unembedding, slice(None), part), count, axes.vocab)
            gathered = common.product(options, hits, w, (1, axes.vocab)).astype(rows.dtype)
            rows[:, part] = jnp.where(inside, gathered, rows[:, part])

    common.walk_blocks(vocab_size, columns, block, walk)


def _steps(ids: Array, blocks: int) -> tuple[Array, Array]:
    """The block of ids and the block of W of each step of the grid, int32 [steps].

    `ids` [chunks, size] are the blocks of W that hold the sorted ids. The number of steps suffices for any ids; steps
    that are not needed repeat the last.
    """
    first, last = ids[:, 0], ids[:, -1]
    ends = jnp.cumsum(last - first + 1)
    step = jnp.arange(len(ids) + blocks - 1, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.sum(ends[None, :] <= step[:, None], axis=1, dtype=jnp.int32), len(ids) - 1)
    return chunk, jnp.minimum(last[chunk] + step - ends[chunk] + 1, last[chunk])


def rows(unembedding: Array, ids: Array, blocks: Blocks, interpret: Any) -> tuple[Array, Array]:
    """The rows W[ids], ids in [0, V), of a W that the kernels have transposed, and where each id's row is among them.

    `blocks` are those of the statistics kernel. Returns rows [M, D], M >= N, sorted by id, and the place int32 [N] of
    each id: W[ids] = rows[place].
    """
    (vocab_size, width), dtype, size = unembedding.shape, unembedding.dtype, LANES
    columns = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    tokens = jnp.arange(len(ids), dtype=jnp.int32)
    ordered, order = jax.lax.sort((ids, tokens), num_keys=1)
    _, places = jax.lax.sort((order, tokens), num_keys=1)
    ordered = jnp.pad(ordered, (0, -len(ids) % size), mode="edge")
    chunk, block = _steps((ordered // columns).reshape(-1, size), pl.cdiv(vocab_size, columns))
    axes = common.Axes.of(vocab_size, width)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    gathered = pl.pallas_call(
        functools.partial(_kernel, options=Options(precision=precision), vocab_size=vocab_size),
        name="calibjax_gather",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=chunk.shape,
            in_specs=[
                pl.BlockSpec((8, size), lambda s, chunk, block: (0, chunk[s])),
                axes.block(columns, width, lambda s, chunk, block: block[s]),
            ],
            out_specs=pl.BlockSpec((size, width), lambda s, chunk, block: (chunk[s], 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(ordered), width), dtype),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_bytes("statistics", blocks, width, dtype.itemsize) * 9 // 8 + UNPLANNED,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * size * width * columns * len(chunk),
            bytes_accessed=(vocab_size + len(ordered)) * width * dtype.itemsize,
            transcendentals=0,
        ),
    )(chunk, block, common.pack([ordered]), axes.ordered(unembedding))
    return gathered, places
