"""Hopper kernel of the forward pass: the statistics of the logits, each block of logits born and consumed in registers.

One program on every multiprocessor walks through its share of the work (`schedule.Schedule`). Its third warpgroup
copies blocks of hidden states and unembedding, [128, 64] and [256, 64], into a ring in shared memory (TMA); the first
two multiply them, 64 tokens each, into [64, 256] float32 registers (wgmma), and fold these into the running statistics
of their tokens: maximum, sums of exponentials in base 2, Σz, argmax. The ring runs on across tiles: while one
warpgroup is at its exponentials, the other multiplies, and the next tile's operands arrive. Only a few floats for each
token and piece of the vocabulary leave the chip; the pieces are merged by `stats.merge`.

TMA gives zeros for what lies outside an array: tokens beyond the last are computed and dropped, columns beyond V are
logits of 0, which add nothing to Σz and which a select removes from all else.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats
from calibjax.kernels.operator import Call, Model
from calibjax.kernels.pallas_gpu.schedule import ROWS, TILE, TOKENS, WARPGROUPS, Schedule
from calibjax.kernels.stats import FLOOR, Moments

LOG2_E = math.log2(math.e)
_SLICE = 64  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_SAFE = 100.0  # power of 2 up to which exponentials of soft-capped logits, and their sum, need no maximum
_NO_COLUMN = 2**30


def _whole_tiles(x: Array) -> Array:
    """`x` padded with zeros to whole tiles of TMA; itself where it has them."""
    padding = [(0, -size % tile) for size, tile in zip(x.shape, TILE, strict=True)]
    return x if not any(after for _, after in padding) else jnp.pad(x, padding)


def _softcapped(x: Array, cap: float) -> Array:
    """tanh(x / cap) = 1 − 2 / (1 + exp(2 x / cap)), right to some 3e-7; the GPU's tanh instruction is to 5e-4."""
    root = jax.lax.rsqrt(1.0 + jnp.exp2(x * (2.0 * LOG2_E / cap)))
    return 1.0 - 2.0 * (root * root)


def _states(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a token; `best` is its largest logit."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "argmax") if name in needed))


def _initial(name: str) -> Array:
    if name == "argmax":
        return jnp.zeros((ROWS,), jnp.int32)
    return jnp.full((ROWS,), FLOOR if name == "best" else 0.0, jnp.float32)


def _fold(state: dict[str, Array], z: Array, raw: Array, scale: Array, start: Array, fixed: bool) -> dict[str, Array]:
    """The state after more logits.

    Args:
        state: name -> [64], see `_states`.
        z: [64, columns], `FLOOR` where there is no column.
        raw: what `total` adds for each of them.
        scale: [64], s·log₂e.
        start: index of the first column.
        fixed: the sums are of exp(s z), not of exp(s (z − best)).
    """

    def wide(x: Array) -> Array:
        return jax.lax.broadcast_in_dim(x, z.shape, (0,))

    top = jnp.max(z, axis=1)
    best = jnp.maximum(state["best"], top)
    new = {"best": best}
    if "argmax" in state:
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        place = jnp.min(jnp.where(z == wide(top), column, _NO_COLUMN), axis=1)
        new["argmax"] = jnp.where(top > state["best"], place + start, state["argmax"])
    weight, first, second = state["weight"], state.get("first"), state.get("second")
    shifted = z
    if not fixed:
        delta = state["best"] - best
        ratio = jnp.exp2(delta * scale)
        if second is not None:
            assert first is not None
            second = ratio * (second + delta * (2.0 * first + delta * weight))
        if first is not None:
            first = ratio * (first + delta * weight)
        weight = ratio * weight
        shifted = z - wide(best)
    e = jnp.exp2(shifted * wide(scale))
    new["weight"] = weight + jnp.sum(e, axis=1)
    if first is not None:
        moment = e * shifted
        new["first"] = first + jnp.sum(moment, axis=1)
        if second is not None:
            new["second"] = second + jnp.sum(moment * shifted, axis=1)
    if "total" in state:
        new["total"] = state["total"] + jnp.sum(raw, axis=1)
    return new


def _kernel(
    *refs, call: Call, vocab_size: int, schedule: Schedule, names: tuple[str, ...], has_bias: bool, fixed: bool
) -> None:
    hidden_ref, weights_ref, scale_ref = refs[:3]
    bias_ref = refs[3] if has_bias else None
    floats_ref = refs[3 + has_bias]
    argmax_ref = refs[4 + has_bias] if "argmax" in names else None
    hidden_ring, weights_ring, full, empty = refs[-4:]
    blocks, paired = schedule.blocks, schedule.blocks.cluster > 1
    steps = pl.cdiv(hidden_ref.shape[1], blocks.depth)
    warpgroup = jax.lax.axis_index("warpgroup")
    of_pair = jax.lax.axis_index("pair") if paired else 0

    def walk(unit) -> Array:
        """The steps of the ring after `unit(token tile, piece, first tile, last tile + 1, step)` of all our units."""

        def run(info, carry):
            tokens, *others = schedule.unit(info.index[0])
            return unit(tokens * blocks.cluster + of_pair, *others, carry)

        return plgpu.nd_loop((schedule.units,), collective_axes="program", init_carry=jnp.int32(0))(run)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def unit(tokens, _, start, end, step):
            def tile(columns, step):
                def load(k, step):
                    slot = jax.lax.rem(step, blocks.stages)
                    pl.when(step >= blocks.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    depth = pl.ds(k * blocks.depth, blocks.depth)
                    for ref, ring, rows, shared in (
                        (hidden_ref, hidden_ring, pl.ds(tokens * TOKENS, TOKENS), ()),
                        (weights_ref, weights_ring, pl.ds(columns * blocks.columns, blocks.columns), "pair"),
                    ):
                        axes = shared if paired else ()
                        plgpu.copy_gmem_to_smem(ref.at[rows, depth], ring.at[slot], full.at[slot], collective_axes=axes)
                    return step + 1

                return jax.lax.fori_loop(0, steps, load, step)

            return jax.lax.fori_loop(start, end, tile, step)

        total = walk(unit)

        # Nobody leaves before all of its blocks were taken: the other of a pair still reports to our barriers.
        @pl.loop(jnp.maximum(total - blocks.stages, 0), total)
        def _(step):
            plgpu.barrier_wait(empty.at[jax.lax.rem(step, blocks.stages)])

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def logits(first_step: Array) -> Array:
            """[64, columns], from the blocks of the ring that begin at `first_step`."""

            def multiply(accumulator):
                def product(step):
                    slot = jax.lax.rem(step, blocks.stages)
                    plgpu.barrier_wait(full.at[slot])
                    own = hidden_ring.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                    plgpu.wgmma(accumulator, own, weights_ring.at[slot].transpose((1, 0)))

                def release(step):
                    plgpu.barrier_arrive(empty.at[jax.lax.rem(step, blocks.stages)])

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

        def unit(tokens, piece, start, end, step):
            rows = pl.ds(tokens * TOKENS + warpgroup * ROWS, ROWS)
            scale = plgpu.load(scale_ref, rows, optimized=False)

            def tile(columns, carry):
                step, *values = carry
                whole, state = logits(step), dict(zip(names, values, strict=True))
                for offset in range(0, blocks.columns, _SLICE):
                    first = columns * blocks.columns + offset
                    z = whole[:, offset : offset + _SLICE]
                    if bias_ref is not None:
                        bias = plgpu.load(bias_ref, pl.ds(first, _SLICE), optimized=False)
                        z = z + jax.lax.broadcast_in_dim(bias, z.shape, (1,))
                    if call.softcap is not None:
                        z = _softcapped(z, call.softcap)
                    raw = z
                    if has_bias:  # which may be −inf
                        z = jnp.maximum(z, FLOOR)
                    if vocab_size % blocks.columns:
                        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                        z = jnp.where(column < vocab_size - first, z, FLOOR)
                    state = _fold(state, z, raw, scale, first, fixed)
                return (step + steps, *(state[name] for name in names))

            step, *values = jax.lax.fori_loop(start, end, tile, (step, *map(_initial, names)))
            found = dict(zip(names, values, strict=True))
            if argmax_ref is not None:
                argmax_ref[piece, rows] = found.pop("argmax")
            for i, value in enumerate(found.values()):
                floats_ref[piece, i, rows] = value
            return step

        walk(unit)


def _pieces(
    call: Call, model: Model, scale: Array, names: tuple[str, ...], fixed: bool, schedule: Schedule, interpret
) -> dict[str, Float[Array, "P N"] | Int[Array, "P N"]]:
    """By the kernel, the values `names` of every piece of the vocabulary, in units of the soft-cap."""
    hidden, unembedding, bias, _ = model
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    blocks, padded = schedule.blocks, schedule.padded_tokens
    arguments = [_whole_tiles(hidden), _whole_tiles(unembedding), jnp.pad(scale, (0, padded - tokens))]
    if bias is not None:
        arguments.append(jnp.pad(bias, (0, -vocab_size % blocks.columns)))
    floats = tuple(name for name in names if name != "argmax")
    results = [jax.ShapeDtypeStruct((schedule.pieces, len(floats), padded), jnp.float32)]
    if "argmax" in names:
        results.append(jax.ShapeDtypeStruct((schedule.pieces, padded), jnp.int32))
    transforms = (plgpu.TilingTransform(TILE), plgpu.SwizzleTransform(2 * TILE[1]))
    kernel = functools.partial(
        _kernel,
        call=call,
        vocab_size=vocab_size,
        schedule=schedule,
        names=names,
        has_bias=bias is not None,
        fixed=fixed,
    )
    taken: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": blocks.stages}
    scratch = [
        *(
            plgpu.SMEM((blocks.stages, rows, blocks.depth), hidden.dtype, transforms=transforms)
            for rows in (TOKENS, blocks.columns)
        ),
        plgpu.Barrier(num_arrivals=2, num_barriers=blocks.stages),
        plgpu.ClusterBarrier(collective_axes=("pair",), **taken) if blocks.cluster > 1 else plgpu.Barrier(**taken),
    ]
    found = plgpu.kernel(
        lambda *refs: pl.run_scoped(lambda *own: kernel(*refs, *own), *scratch, collective_axes="warpgroup"),
        out_type=results,
        grid=(schedule.programs,),
        grid_names=("program",),
        cluster=(blocks.cluster,) if blocks.cluster > 1 else (),
        cluster_names=("pair",) if blocks.cluster > 1 else (),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="calibjax_statistics",
    )(*arguments)
    pieces = {name: found[0][:, i, :tokens] for i, name in enumerate(floats)}
    return pieces | ({"argmax": found[1][:, :tokens]} if "argmax" in names else {})


def _merged(pieces: Moments, scale: Float[Array, " N"]) -> Moments:
    """The moments of the whole vocabulary, from those of its pieces [P, N]: pairs of them at a time."""
    merge = jax.vmap(stats.merge, (0, 0, None))
    while (count := pieces.max_logit.shape[0]) > 1:
        half = count // 2
        first, second, rest = (
            jax.tree.map(lambda x, part=part: x[part], pieces)
            for part in (slice(half), slice(half, 2 * half), slice(2 * half, None))
        )
        pieces = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), merge(first, second, scale), rest)
    return jax.tree.map(lambda x: x[0], pieces)


def _target_logits(call: Call, model: Model, targets: Int[Array, " N"]) -> Float[Array, " N"]:
    """z_y, by gathering the rows of the targets; 0 where they lie outside [0, V)."""
    inside = (targets >= 0) & (targets < model.unembedding.shape[0])
    ids = jnp.where(inside, targets, 0)
    rows = model.unembedding[ids].astype(jnp.float32)
    z = jnp.sum(model.hidden.astype(jnp.float32) * rows, axis=1)
    z = z if model.bias is None else z + model.bias[ids]
    z = z if call.softcap is None else call.softcap * jnp.tanh(z / call.softcap)
    return jnp.where(inside, z, 0.0)


def moments(
    call: Call,
    model: Model,
    scale: Float[Array, " N"],
    targets: Int[Array, " N"] | None,
    needed: frozenset[str],
    schedule: Schedule,
    interpret,
) -> Moments:
    """The moments of the whole vocabulary, but for `rows`.

    Under a soft-cap logits are bounded, and the sums need no running maximum while s·cap is at most 69 for every token:
    a second program of the same kernel, chosen as the scales are known. Not with `second`, which would cancel.
    """
    unit = 1.0 if call.softcap is None else call.softcap
    power = scale * (LOG2_E * unit)
    names = _states(needed)

    def run(fixed: bool) -> Moments:
        found = _pieces(call, model, power, names, fixed, schedule, interpret)
        best, weight, first, second = (found.get(name) for name in ("best", "weight", "first", "second"))
        assert best is not None
        assert weight is not None
        if fixed:  # from exp(s z) to exp(s (z − best))
            ratio = jnp.exp2(-best * power[None, :])
            first = None if first is None else ratio * (first - best * weight)
            weight = ratio * weight
        pieces = Moments(
            max_logit=best * unit,
            argmax=found.get("argmax"),
            weight=weight,
            first=None if first is None else first * unit,
            second=None if second is None else second * unit**2,
            total=None if (total := found.get("total")) is None else total * unit,
        )
        return _merged(pieces, scale)

    if call.softcap is None or "second" in needed:
        merged = run(False)
    else:
        merged = jax.lax.cond(jnp.all(power <= _SAFE), lambda: run(True), lambda: run(False))
    if targets is None or "target" not in needed:
        return merged
    return merged._replace(target=_target_logits(call, model, targets))
