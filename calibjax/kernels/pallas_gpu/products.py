"""Hopper kernel of the products dz·W and dzᵀ·h that leaves out blocks of dz, for `filter_threshold`.

A tile [128, 256] of the result takes, of a list of blocks of dz that matter, one after the other: blocks of 128 tokens
by as many columns as a tile of logits has. What is left out is neither read nor multiplied. As in `tiles`, one
warpgroup fills a ring in shared memory and two multiply from it, 64 rows each, with float32 sums in registers, in an
order that never changes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from calibjax.kernels.pallas_gpu.schedule import ROWS, TOKENS, WARPGROUPS, Blocks, programs
from calibjax.kernels.pallas_gpu.tiles import TRANSFORMS, whole_tiles

_WIDTH = 256  # columns of D in a tile of the result


def _kernel(
    counts_ref,
    lists_ref,
    slopes_ref,
    factor_ref,
    out_ref,
    slopes_ring,
    factor_ring,
    full,
    empty,
    *,
    blocks: Blocks,
    of_columns: bool,
) -> None:
    depth, stages = blocks.depth, blocks.stages
    # Rows of the result that share a list, and what the products of a block of the list run over.
    shared, length = (blocks.columns, TOKENS) if of_columns else (TOKENS, blocks.columns)
    of_block = length // depth
    warpgroup = jax.lax.axis_index("warpgroup")
    tiles = out_ref.shape[0] // TOKENS
    units = tiles * (out_ref.shape[1] // _WIDTH)

    def walk(unit):
        """`unit(first row, first column, list, products, step)` for each tile of the result; the steps of the ring."""

        def run(info, carry):
            tile, place = jax.lax.rem(info.index[0], tiles), jax.lax.div(info.index[0], tiles)
            row = tile * TOKENS
            which = jax.lax.div(row, shared)
            steps = counts_ref[which] * of_block
            unit(row, place * _WIDTH, which, steps, carry)
            return carry + steps

        return plgpu.nd_loop((units,), collective_axes="program", init_carry=jnp.int32(0))(run)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def unit(row, place, which, steps, step):
            def load(i, _):
                slot = jax.lax.rem(step + i, stages)
                pl.when(step + i >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                block = lists_ref[which, jax.lax.div(i, of_block)]
                start = block * length + jax.lax.rem(i, of_block) * depth
                rows, inner = pl.ds(row, TOKENS), pl.ds(start, depth)
                source = slopes_ref.at[inner, rows] if of_columns else slopes_ref.at[rows, inner]
                plgpu.copy_gmem_to_smem(source, slopes_ring.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(factor_ref.at[inner, pl.ds(place, _WIDTH)], factor_ring.at[slot], full.at[slot])

            jax.lax.fori_loop(0, steps, load, None)

        total = walk(unit)

        # Nobody leaves before all of its blocks were taken.
        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):
            plgpu.barrier_wait(empty.at[jax.lax.rem(step, stages)])

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def unit(row, place, which, steps, step):
            def multiply(accumulator):
                def product(i, _):
                    slot = jax.lax.rem(step + i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    own = pl.ds(warpgroup * ROWS, ROWS)
                    block = slopes_ring.at[slot]
                    block = block.at[:, own].transpose((1, 0)) if of_columns else block.at[own]
                    plgpu.wgmma(accumulator, block, factor_ring.at[slot])
                    plgpu.wgmma_wait(1)  # the product before this one is done with its block
                    pl.when(i > 0)(lambda: release(i - 1))

                def release(i):
                    plgpu.barrier_arrive(empty.at[jax.lax.rem(step + i, stages)])

                jax.lax.fori_loop(0, steps, product, None)
                plgpu.wgmma_wait(0)
                pl.when(steps > 0)(lambda: release(steps - 1))
                return accumulator[...]

            found = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, _WIDTH), jnp.float32))
            out_ref[pl.ds(row + warpgroup * ROWS, ROWS), pl.ds(place, _WIDTH)] = found

        walk(unit)


def over_kept(
    slopes: Float[Array, "N C"],
    factor: Float[Array, "K D"],
    keep: Bool[Array, "n c"],
    of_columns: bool,
    blocks: Blocks,
    device_kind: str,
    interpret,
) -> Float[Array, "M D"]:
    """slopes·factor [N, D] with a factor [C, D], or `of_columns` slopesᵀ·factor [C, D] with one [N, D], in float32.

    Only blocks that `keep` marks count, of 128 tokens by `blocks.columns`.
    """
    keep = keep.T if of_columns else keep
    counts = jnp.sum(keep, axis=1, dtype=jnp.int32)
    lists = jnp.argsort(~keep, axis=1, stable=True).astype(jnp.int32)
    rows, width = slopes.shape[1 if of_columns else 0], factor.shape[1]
    padded = -(-width // _WIDTH) * _WIDTH
    depth, stages = blocks.depth, blocks.stages
    own = [
        plgpu.SMEM(
            (stages, *((depth, TOKENS) if of_columns else (TOKENS, depth))), slopes.dtype, transforms=TRANSFORMS
        ),
        plgpu.SMEM((stages, depth, _WIDTH), slopes.dtype, transforms=TRANSFORMS),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    kernel = functools.partial(_kernel, blocks=blocks, of_columns=of_columns)
    [product] = plgpu.kernel(
        lambda *refs: pl.run_scoped(lambda *scoped: kernel(*refs, *scoped), *own, collective_axes="warpgroup"),
        out_type=[jax.ShapeDtypeStruct((rows, padded), jnp.float32)],
        grid=(min(programs(blocks, device_kind), rows // TOKENS * (padded // _WIDTH)),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="calibjax_products_of_kept",
    )(counts, lists, slopes, whole_tiles(factor))
    return product[:, :width]
