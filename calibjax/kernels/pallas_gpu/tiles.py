"""Tiles of logits on Hopper.

One program on every multiprocessor walks through its part of the work (`schedule.Schedule`). Its third warpgroup copies
blocks of hidden states and unembedding, [128, 64] and [256, 64], into a ring in shared memory (TMA); the first two
multiply them, 64 tokens each, into [64, 256] float32 registers (wgmma), which the caller reduces. The ring runs on
across tiles: while one warpgroup is at its exponentials, the other multiplies, and the next tile's operands arrive.

TMA gives zeros outside an array: tokens beyond the last are computed and dropped, columns beyond V are logits of 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from calibjax.kernels.contract import LOG2_E, Options, Refs
from calibjax.kernels.pallas_gpu.schedule import ROWS, TILE, TOKENS, WARPGROUPS, Schedule

TRANSFORMS = (plgpu.TilingTransform(TILE), plgpu.SwizzleTransform(2 * TILE[1]))

Fold = Callable[[Array, Array, list[Any]], Sequence[Any]]
"""(first column, [64, columns] of h Wᵀ, state) -> state."""


def whole_tiles(x: Array) -> Array:
    """`x` padded with zeros to whole tiles of TMA; itself where it has them."""
    missing = [-size % tile for size, tile in zip(x.shape, TILE, strict=True)]
    return jnp.pad(x, [(0, count) for count in missing]) if any(missing) else x


def softcap_in_units(options: Options, z: Array) -> Array:
    """The logits in units of the soft-cap; without one, unchanged.

    tanh(z / cap) = 1 − 2 / (1 + exp(2 z / cap)), right to some 3e-7; the GPU's tanh instruction is to 5e-4.
    """
    if options.softcap is None:
        return z
    root = jax.lax.rsqrt(1.0 + jnp.exp2(z * (2.0 * LOG2_E / options.softcap)))
    return 1.0 - 2.0 * (root * root)


def biased(z: Array, bias_ref, first: Array) -> Array:
    """`z` [64, columns] with the bias of its columns, from `first` on, where there is one."""
    if bias_ref is None:
        return z
    bias = plgpu.load(bias_ref, pl.ds(first, z.shape[1]), optimized=False)
    return z + jax.lax.broadcast_in_dim(bias, z.shape, (1,))


def _fill(ring: Refs, schedule: Schedule, tokens, start, end, step) -> Array:
    """Loads the blocks of the tiles `start` to `end` of a unit; returns the step after them."""
    blocks = schedule.blocks

    def tile(columns, step):
        def load(k, step):
            slot = jax.lax.rem(step, blocks.stages)
            pl.when(step >= blocks.stages)(lambda: plgpu.barrier_wait(ring.empty.at[slot]))
            depth = pl.ds(k * blocks.depth, blocks.depth)
            for source, target, rows in (
                (ring.hidden, ring.hidden_ring, pl.ds(tokens * TOKENS, TOKENS)),
                (ring.weights, ring.weights_ring, pl.ds(columns * blocks.columns, blocks.columns)),
            ):
                plgpu.copy_gmem_to_smem(source.at[rows, depth], target.at[slot], ring.full.at[slot])
            return step + 1

        return jax.lax.fori_loop(0, pl.cdiv(ring.hidden.shape[1], blocks.depth), load, step)

    return jax.lax.fori_loop(start, end, tile, step)


def _multiply(ring: Refs, schedule: Schedule, warpgroup: Array, first_step: Array) -> Array:
    """The logits of a warp group's rows, `[64, columns]`, from the blocks of the ring that begin at `first_step`."""
    blocks = schedule.blocks
    steps = pl.cdiv(ring.hidden.shape[1], blocks.depth)

    def multiply(accumulator):
        def product(step):
            slot = jax.lax.rem(step, blocks.stages)
            plgpu.barrier_wait(ring.full.at[slot])
            rows = ring.hidden_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
            plgpu.wgmma(accumulator, rows, ring.weights_ring.at[slot].transpose((1, 0)))

        def release(step):
            plgpu.barrier_arrive(ring.empty.at[jax.lax.rem(step, blocks.stages)])

        def following(step, _):
            product(step)
            plgpu.wgmma_wait(1)  # the product before this one is done with its block
            release(step - 1)

        last_step = first_step + steps - 1
        product(first_step)
        jax.lax.fori_loop(first_step + 1, last_step + 1, following, None)
        plgpu.wgmma_wait(0)
        release(last_step)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, blocks.columns), jnp.float32))


def _kernel(body: Callable[..., None], refs: Refs, schedule: Schedule) -> None:
    blocks = schedule.blocks
    steps = pl.cdiv(refs.hidden.shape[1], blocks.depth)
    warpgroup = jax.lax.axis_index("warpgroup")

    def walk(unit) -> Array:
        """Calls `unit(token tile, piece, first tile, last tile + 1, step)` for this program's units; the last step."""

        def run(info, carry):
            return unit(*schedule.unit(info.index[0]), carry)

        return plgpu.nd_loop((schedule.units,), collective_axes="program", init_carry=jnp.int32(0))(run)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        total = walk(lambda tokens, _, start, end, step: _fill(refs, schedule, tokens, start, end, step))

        # The loader stays until all of its blocks were taken.
        @pl.loop(jnp.maximum(total - blocks.stages, 0), total)
        def _(step):
            plgpu.barrier_wait(refs.empty.at[jax.lax.rem(step, blocks.stages)])

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")

        def unit(tokens, piece, start, end, step):
            after = step

            def tiles(fold: Fold, initial: Sequence[Any]) -> list[Any]:
                nonlocal after

                def tile(columns, carry):
                    step, *state = carry
                    following = step + steps
                    first_column = columns * blocks.columns
                    z = _multiply(refs, schedule, warpgroup, step)
                    return following, *fold(first_column, z, state)

                after, *state = jax.lax.fori_loop(start, end, tile, (step, *initial))
                return state

            body(refs, rows=pl.ds(tokens * TOKENS + warpgroup * ROWS, ROWS), piece=piece, tiles=tiles)
            return after

        walk(unit)


def over_tiles(
    body: Callable[..., None],
    hidden: Array,
    unembedding: Array,
    arguments: Mapping[str, Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    schedule: Schedule,
    interpret: Any,
) -> dict[str, Array]:
    """`results`, as `body` writes them, by name.

    `body(refs, rows=, piece=, tiles=)` is traced once, with the references of arguments (in the memory of the GPU),
    results and scratch (shared memory) by name. It runs in a warpgroup for each unit of work: 64 tokens, `rows`, and a
    piece of the vocabulary. It calls `tiles(fold, first state)` once, for the state after all tiles of the unit. The
    kernel has its name. `hidden` and `unembedding` have 16 bits.
    """
    blocks = schedule.blocks
    rings = {
        name: plgpu.SMEM((blocks.stages, rows, blocks.depth), hidden.dtype, transforms=TRANSFORMS)
        for name, rows in (("hidden_ring", TOKENS), ("weights_ring", blocks.columns))
    }
    memory = {
        **scratch,
        **rings,
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=blocks.stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=blocks.stages),
    }
    names = ("hidden", "weights", *arguments, *results, *memory)

    def kernel(*operands: Any) -> None:
        def with_memory(*scoped: Any) -> None:
            _kernel(body, Refs(zip(names, (*operands, *scoped), strict=True)), schedule)

        pl.run_scoped(with_memory, *memory.values(), collective_axes="warpgroup")

    outputs = plgpu.kernel(
        kernel,
        out_type=list(results.values()),
        grid=(schedule.programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=f"calibjax_{body.__name__}",
    )(whole_tiles(hidden), whole_tiles(unembedding), *arguments.values())
    return dict(zip(results, outputs, strict=True))
