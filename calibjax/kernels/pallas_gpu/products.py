"""Not run on a GPU yet: Hopper kernel of the block-sparse products dz·W and dzᵀ·h, for `filter_threshold`.

Blocks of dz have 128 tokens and as many columns as a tile of logits. A tile [128, 256] of the result takes those of a
list, one after the other; a block in no list is neither read nor multiplied. As in `tiles`, one warpgroup fills a ring
in shared memory and two multiply from it, 64 rows each, with float32 sums in registers, in an order that never changes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from calibjax.kernels.pallas_gpu.schedule import ROWS, TOKENS, WARPGROUPS, Blocks, Launch, programs
from calibjax.kernels.pallas_gpu.tiles import TRANSFORMS, whole_tiles

_WIDTH = 256  # columns of D in a tile of the result


class _Refs(NamedTuple):
    """References of the kernel: for each tile of the result the number and the list of its blocks; rings, barriers."""

    counts: Any
    lists: Any
    dz: Any
    factor: Any
    product: Any
    dz_ring: Any
    factor_ring: Any
    full: Any
    empty: Any


def _kernel(*references: Any, blocks: Blocks, of_columns: bool) -> None:
    refs = _Refs(*references)
    depth, stages = blocks.depth, blocks.stages
    # Rows of the result that share a list, and what the products of a block of the list run over.
    shared, length = (blocks.columns, TOKENS) if of_columns else (TOKENS, blocks.columns)
    of_block = length // depth
    warpgroup = jax.lax.axis_index("warpgroup")
    tiles = refs.product.shape[0] // TOKENS
    units = tiles * (refs.product.shape[1] // _WIDTH)

    def walk(unit):
        """`unit(first row, first column, list, products, step)` for each tile of the result; the steps of the ring."""

        def run(info, carry):
            tile, place = jax.lax.rem(info.index[0], tiles), jax.lax.div(info.index[0], tiles)
            row = tile * TOKENS
            which = jax.lax.div(row, shared)
            steps = refs.counts[which] * of_block
            unit(row, place * _WIDTH, which, steps, carry)
            return carry + steps

        return plgpu.nd_loop((units,), collective_axes="program", init_carry=jnp.int32(0))(run)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def unit(row, place, which, steps, step):
            def load(i, _):
                slot = jax.lax.rem(step + i, stages)
                pl.when(step + i >= stages)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
                block = refs.lists[which, jax.lax.div(i, of_block)]
                start = block * length + jax.lax.rem(i, of_block) * depth
                rows, inner = pl.ds(row, TOKENS), pl.ds(start, depth)
                source = refs.dz.at[inner, rows] if of_columns else refs.dz.at[rows, inner]
                plgpu.copy_gmem_to_smem(source, refs.dz_ring.at[slot], refs.full.at[slot])
                plgpu.copy_gmem_to_smem(
                    refs.factor.at[inner, pl.ds(place, _WIDTH)], refs.factor_ring.at[slot], refs.full.at[slot]
                )

            jax.lax.fori_loop(0, steps, load, None)

        total = walk(unit)

        # Nobody leaves before all of its blocks were taken.
        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):
            plgpu.barrier_wait(refs.empty.at[jax.lax.rem(step, stages)])

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def unit(row, place, which, steps, step):
            def multiply(accumulator):
                def product(i, _):
                    slot = jax.lax.rem(step + i, stages)
                    plgpu.barrier_wait(refs.full.at[slot])
                    own = pl.ds(warpgroup * ROWS, ROWS)
                    block = refs.dz_ring.at[slot]
                    block = block.at[:, own].transpose((1, 0)) if of_columns else block.at[own]
                    plgpu.wgmma(accumulator, block, refs.factor_ring.at[slot])
                    plgpu.wgmma_wait(1)  # the product before this one is done with its block
                    pl.when(i > 0)(lambda: release(i - 1))

                def release(i):
                    plgpu.barrier_arrive(refs.empty.at[jax.lax.rem(step + i, stages)])

                jax.lax.fori_loop(0, steps, product, None)
                plgpu.wgmma_wait(0)
                pl.when(steps > 0)(lambda: release(steps - 1))
                return accumulator[...]

            product = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, _WIDTH), jnp.float32))
            refs.product[pl.ds(row + warpgroup * ROWS, ROWS), pl.ds(place, _WIDTH)] = product

        walk(unit)


def sparse_product(
    dz: Float[Array, "N C"], factor: Float[Array, "K D"], keep: Bool[Array, "n c"], of_columns: bool, launch: Launch
) -> Float[Array, "M D"]:
    """dz·factor [N, D] with a factor [C, D], or `of_columns` dzᵀ·factor [C, D] with one [N, D], in float32.

    Only blocks that `keep` marks count, of 128 tokens by `blocks.columns`.
    """
    blocks = launch.blocks
    keep = keep.T if of_columns else keep
    counts = jnp.sum(keep, axis=1, dtype=jnp.int32)
    lists = jnp.argsort(~keep, axis=1, stable=True).astype(jnp.int32)
    rows, width = dz.shape[1 if of_columns else 0], factor.shape[1]
    padded = -(-width // _WIDTH) * _WIDTH
    depth, stages = blocks.depth, blocks.stages
    own = [
        plgpu.SMEM((stages, *((depth, TOKENS) if of_columns else (TOKENS, depth))), dz.dtype, transforms=TRANSFORMS),
        plgpu.SMEM((stages, depth, _WIDTH), dz.dtype, transforms=TRANSFORMS),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    kernel = functools.partial(_kernel, blocks=blocks, of_columns=of_columns)
    [product] = plgpu.kernel(
        lambda *refs: pl.run_scoped(lambda *scoped: kernel(*refs, *scoped), *own, collective_axes="warpgroup"),
        out_type=[jax.ShapeDtypeStruct((rows, padded), jnp.float32)],
        grid=(min(programs(blocks, launch.device_kind), rows // TOKENS * (padded // _WIDTH)),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=launch.interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="calibjax_sparse_product",
    )(counts, lists, dz, whole_tiles(factor))
    return product[:, :width]
