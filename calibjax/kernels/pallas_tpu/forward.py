"""TPU kernels of the forward pass: the statistics alone, and the statistics with the rows that dh needs.

Both walk the grid (token blocks, vocabulary blocks), the vocabulary fastest, with all of D on chip. A vocabulary block
is cut into units: while the matrix unit multiplies one, the vector unit works on the logits of the one before, in the
same straight-line code, so that neither waits for the other.

The statistics kernel has the vocabulary along sublanes and tokens along lanes: a state [8, tokens] takes eight rows of
logits at a time by elementwise operations, and only at the end are its eight sublanes merged, by `stats.merge`'s rule.
The rows kernel has tokens along sublanes, as its second product e·W wants, states [tokens, 128], and one maximum for
each token, by which the sums [tokens, D] are rescaled once a unit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.operator import Call, Model
from calibjax.kernels.pallas_tpu.blocks import LANES, SLICE, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.common import (
    NEVER,
    column,
    finite,
    pack,
    pack_ids,
    pallas,
    product,
    softcapped,
    walk_blocks,
)
from calibjax.kernels.slopes import LOG2_E, slope, unit_of_logits
from calibjax.kernels.stats import FLOOR, Moments

_OUTPUTS = ("max_logit", "weight", "first", "second", "total", "target", "argmax")  # rows of the result
_INTEGERS = ("argmax",)


def _states(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a kernel; `best` is the largest logit that a sublane or lane has seen."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "target", "argmax") if name in needed))


def _initial(name: str, shape: tuple[int, ...]) -> Array:
    if name in _INTEGERS:
        return jnp.zeros(shape, jnp.int32)
    return jnp.full(shape, FLOOR if name in ("best", "top") else 0.0, jnp.float32)


def _fold(state, pieces, raw, places, scale, target, start, top=None):
    """The state after pieces of logits of its own shape, and their exponentials relative to the new maximum.

    Args:
        state: name -> array, see `_states`; with `top`, the maximum of the whole token is under "top".
        pieces: logits, `FLOOR` where there is none.
        raw: what `total` adds for each of them.
        places: of each, the index of its first column counted from `start`.
        scale: s·log₂e.
        target: index of the target counted from `start` and from the sublane or lane.
        top: None: the state's own maximum is the reference; or a function from the best logits to the reference.
    """
    new = dict(state)
    best = state["best"]
    if "argmax" in state:
        place = jnp.full(best.shape, NEVER, jnp.int32)
        for z, k in zip(pieces, places, strict=True):
            larger = z > best
            best, place = jnp.where(larger, z, best), jnp.where(larger, k, place)
        new["argmax"] = jnp.where(place > NEVER, place + start, state["argmax"])
    else:
        best = functools.reduce(jnp.maximum, pieces, best)
    new["best"] = best
    reference, old = (best, state["best"]) if top is None else (top(best), state["top"])
    delta = old - reference
    ratio = jnp.exp2(delta * scale)
    weight, first, second = state["weight"], state.get("first"), state.get("second")
    if second is not None:
        second = ratio * (second + delta * (2.0 * first + delta * weight))
    if first is not None:
        first = ratio * (first + delta * weight)
    weight = ratio * weight
    exponentials = []
    for z, addend, k in zip(pieces, raw, places, strict=True):
        shifted = z - reference
        e = jnp.exp2(shifted * scale)
        exponentials.append(e)
        weight = weight + e
        if first is not None:
            moment = e * shifted
            first = first + moment
            second = None if second is None else second + moment * shifted
        if "total" in state:
            new["total"] = new["total"] + addend
        if "target" in state:
            new["target"] = new["target"] + jnp.where(target == k, addend, 0.0)
    new |= {"weight": weight} | ({} if first is None else {"first": first})
    new |= ({} if second is None else {"second": second}) | ({} if top is None else {"top": reference})
    return new, exponentials, ratio


def _statistics_kernel(*refs, call: Call, vocab_size: int, blocks: Blocks, names, has_bias: bool, save: bool):
    tokens_ref, x_ref, w_ref = refs[:3]
    bias_ref = refs[3] if has_bias else None
    out_ref = refs[3 + has_bias]
    saved_ref = refs[4 + has_bias] if save else None
    z_ref, *state_refs = refs[4 + has_bias + save :]
    state = dict(zip(names, state_refs, strict=True))
    columns, unit = blocks.columns, blocks.unit
    width = x_ref.shape[0]
    step, steps = pl.program_id(1), pl.num_programs(1)
    units = columns // unit

    @pl.when(step == 0)
    def _():
        for name in names:
            state[name][...] = _initial(name, state[name].shape)

    def multiply(c: int):
        rows = pl.ds(c * unit, unit)
        z = product(call, w_ref[rows, :], x_ref[...], (1, 1))
        if bias_ref is not None:
            turned = jnp.broadcast_to(bias_ref[:, rows], (LANES, unit)).T
            z = z + jnp.concatenate([turned] * (width // LANES), axis=1)
        if saved_ref is not None:
            z = softcapped(call, z)
            saved_ref[rows, :] = z
        z_ref[c % 2] = z

    def absorb(slot: int, offset: int, count: int, ghost: bool = False):
        """The logits in `slot`, whose first column has the index `offset` in this block; `count` of them exist.

        `ghost`: they are the previous block's, so in the first step there are none.
        """
        sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
        for group in range(0, width, LANES):
            lanes = pl.ds(group, LANES)
            scale = jnp.broadcast_to(tokens_ref[0:1, lanes], (8, LANES))
            target = None
            if "target" in names:
                wanted = jnp.broadcast_to(tokens_ref[1:2, lanes], (8, LANES)).astype(jnp.int32)
                target = wanted - sublane - step * columns
            pieces, raw, places = [], [], []
            for k in range(0, min(count, unit), 8):
                z = z_ref[slot, k : k + 8, lanes]
                z = z if save else softcapped(call, z)
                keep = None if count - k >= 8 else sublane < count - k
                if ghost:
                    real = jnp.broadcast_to(step, (8, LANES)) > 0
                    keep = real if keep is None else keep & real
                pieces.append(finite(z, has_bias) if keep is None else jnp.where(keep, finite(z, has_bias), FLOOR))
                raw.append(z if keep is None else jnp.where(keep, z, 0.0))
                places.append(offset + k)
            new, _, _ = _fold(
                {name: state[name][:, lanes] for name in names}, pieces, raw, places, scale, target, step * columns
            )
            for name in names:
                state[name][:, lanes] = new[name]

    def walk(count: int):
        """A block with `count` columns: each unit's product beside the arithmetic on the logits before it."""
        multiply(0)
        absorb((units - 1) % 2, -unit, unit, ghost=True)
        for c in range(1, -(-count // unit)):
            multiply(c)
            absorb((c - 1) % 2, (c - 1) * unit, unit)

    left = walk_blocks(vocab_size, columns, step, walk)

    @pl.when(step == steps - 1)
    def _():
        last = -(-left // unit) - 1
        absorb(last % 2, last * unit, left - last * unit)
        best = state["best"][...]
        scale = jnp.broadcast_to(tokens_ref[0:1, :], best.shape)
        top = jnp.max(best, axis=0, keepdims=True)
        delta = best - top
        ratio = jnp.exp2(delta * scale)
        weight = state["weight"][...]
        found = {"max_logit": top, "weight": jnp.sum(ratio * weight, axis=0, keepdims=True)}
        if "first" in names:
            first = state["first"][...]
            found["first"] = jnp.sum(ratio * (first + delta * weight), axis=0, keepdims=True)
            if "second" in names:
                second = state["second"][...] + delta * (2.0 * first + delta * weight)
                found["second"] = jnp.sum(ratio * second, axis=0, keepdims=True)
        for name in ("total", "target"):
            if name in names:
                found[name] = jnp.sum(state[name][...], axis=0, keepdims=True)
        if "argmax" in names:
            index = state["argmax"][...] + jax.lax.broadcasted_iota(jnp.int32, best.shape, 0)
            index = jnp.where(best == top, index.astype(jnp.float32), float(vocab_size))
            found["argmax"] = jnp.min(index, axis=0, keepdims=True)
        _write(out_ref, found)


def _write(out_ref, found: dict[str, Array]):
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
    for row, name in enumerate(_OUTPUTS):
        if name in found:
            out_ref[row : row + 1, :] = found[name]


def _rows_kernel(*refs, call: Call, vocab_size: int, blocks: Blocks, names, has_bias: bool, has_target: bool):
    tokens_ref, x_ref, w_ref = refs[:3]
    bias_ref = refs[3] if has_bias else None
    out_ref, rows_ref, z_ref, e_ref, sums_ref, scale_ref, target_ref, *state_refs = refs[3 + has_bias :]
    state = dict(zip(names, state_refs, strict=True))
    columns, unit = blocks.columns, blocks.unit
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens = x_ref.shape[0]
    group = min(64, tokens)

    @pl.when(step == 0)
    def _():
        for name in names:
            state[name][...] = _initial(name, state[name].shape)
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)
        scale_ref[...] = column(tokens_ref, 0)
        if has_target:
            lane = jax.lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1)
            target_ref[...] = column(tokens_ref, 1).astype(jnp.int32) - lane

    def multiply(c: int):
        z = product(call, x_ref[...], w_ref[pl.ds(c * unit, unit), :], (1, 1))
        z_ref[c % 2] = z if bias_ref is None else z + bias_ref[:, pl.ds(c * unit, unit)]

    def absorb(c: int, count: int) -> Array:
        """Folds `count` columns of unit c into the state, writes their weights; returns the ratio of the old sums."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 1)
        ratios = []
        for start in range(0, tokens, group):
            part = pl.ds(start, group)
            target = target_ref[part, :] - step * columns if has_target else None
            pieces, raw, places = [], [], []
            for k in range(0, min(count, unit), LANES):
                z = softcapped(call, z_ref[c % 2, part, k : k + LANES])
                keep = None if count - k >= LANES else lane < count - k
                pieces.append(finite(z, has_bias) if keep is None else jnp.where(keep, finite(z, has_bias), FLOOR))
                raw.append(z if keep is None else jnp.where(keep, z, 0.0))
                places.append(c * unit + k)
            old = {name: state[name][part, :] for name in names}
            new, exponentials, ratio = _fold(
                old,
                pieces,
                raw,
                places,
                scale_ref[part, :],
                target,
                step * columns,
                top=lambda best, old=old: jnp.maximum(old["top"], jnp.max(best, axis=1, keepdims=True)),
            )
            for name in names:
                state[name][part, :] = new[name]
            for i, (e, z, k) in enumerate(zip(exponentials, pieces, places, strict=True)):
                e = e if call.softcap is None else e * slope(call, z)
                e = e if target is None else jnp.where(target == k, 0.0, e)
                e_ref[c % 2, part, i * LANES : (i + 1) * LANES] = e.astype(e_ref.dtype)
            ratios.append(ratio[:, :1])
        return jnp.concatenate(ratios, axis=0)

    def accumulate(c: int, count: int, ratio: Array):
        size = min(unit, -(-count // LANES) * LANES)
        w_rows = pl.ds(c * unit, size)
        for start in range(0, sums_ref.shape[1], SLICE):
            part = pl.ds(start, min(SLICE, sums_ref.shape[1] - start))
            w = w_ref[w_rows, part]
            if count < size:
                w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < count, w, jnp.zeros_like(w))
            sums_ref[:, part] = sums_ref[:, part] * ratio + product(call, e_ref[c % 2, :, :size], w, (1, 0))

    def walk(count: int):
        """Three stages at a time: the product of unit c + 1, the arithmetic on unit c, the sums of unit c − 1."""
        units = -(-count // unit)
        counts = [min(unit, count - c * unit) for c in range(units)]
        ratio = None
        multiply(0)
        for c in range(units):
            if c + 1 < units:
                multiply(c + 1)
            new_ratio = absorb(c, counts[c])
            if ratio is not None:
                accumulate(c - 1, unit, ratio)
            ratio = new_ratio
        assert ratio is not None
        accumulate(units - 1, counts[-1], ratio)

    walk_blocks(vocab_size, columns, step, walk)

    @pl.when(step == steps - 1)
    def _():
        turned = {name: state[name][...].T for name in names if name not in _INTEGERS}
        found = {"max_logit": turned["top"][0:1]}
        for name in ("weight", "first", "second", "total", "target"):
            if name in names:
                found[name] = jnp.sum(turned[name], axis=0, keepdims=True)
        if "argmax" in names:
            lane = jax.lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1)
            index = (state["argmax"][...] + lane).astype(jnp.float32).T
            index = jnp.where(turned["best"] == found["max_logit"], index, float(vocab_size))
            found["argmax"] = jnp.min(index, axis=0, keepdims=True)
        _write(out_ref, found)
        weight = jnp.sum(state["weight"][...], axis=1, keepdims=True)
        rows_ref[...] = (sums_ref[...] / weight).astype(rows_ref.dtype)


def moments(
    call: Call,
    model: Model,
    scale: Array,
    targets: Array | None,
    needed: frozenset[str],
    save: bool,
    blocks: Blocks,
    interpret,
) -> tuple[Moments, Array | None]:
    """The moments of the whole vocabulary by one kernel: with "rows" in `needed` two products, else one.

    With `save`, which rules out "rows", also the logits for `backward`: float32 [V, N], in units of the soft-cap.
    """
    hidden, unembedding, bias, _ = model
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    with_rows = "rows" in needed
    columns = min(blocks.columns, -(-vocab_size // (2 * blocks.unit)) * 2 * blocks.unit)
    blocks = blocks._replace(columns=columns)
    in_logits = unit_of_logits(call)
    rows = [scale * (LOG2_E * in_logits)]
    if targets is not None:
        rows.append(pack_ids(targets))
    names = _states(needed) + (("top",) if with_rows else ())
    block, has_bias = blocks.tokens, bias is not None
    per_token = pl.BlockSpec((8, block), lambda i, j: (0, i))
    state = (block, LANES) if with_rows else (8, block)
    states = [pltpu.VMEM(state, jnp.int32 if name in _INTEGERS else jnp.float32) for name in names]
    kernel: Any = functools.partial(_statistics_kernel, save=save)
    scratch = [pltpu.VMEM((2, blocks.unit, block), jnp.float32)]
    out_specs, out_shape = [per_token], [jax.ShapeDtypeStruct((8, tokens), jnp.float32)]
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    if with_rows:
        kernel = functools.partial(_rows_kernel, has_target=targets is not None)
        out_specs, out_shape = [*out_specs, x_spec], [*out_shape, jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)]
        scratch = [
            pltpu.VMEM((2, block, blocks.unit), jnp.float32),
            pltpu.VMEM((2, block, blocks.unit), hidden.dtype),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, LANES), jnp.float32),
            pltpu.VMEM((block, LANES), jnp.int32),
        ]
    if save:
        out_specs.append(pl.BlockSpec((columns, block), lambda i, j: (j, i)))
        out_shape.append(jax.ShapeDtypeStruct((vocab_size, tokens), jnp.float32))
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    work = tokens * width * vocab_size
    out = pallas(
        functools.partial(kernel, call=call, vocab_size=vocab_size, blocks=blocks, names=names, has_bias=has_bias),
        name="calibjax_statistics_rows" if with_rows else "calibjax_statistics",
        grid=grid,
        in_specs=[per_token, x_spec, pl.BlockSpec((columns, width), lambda i, j: (j, 0))]
        + ([pl.BlockSpec((1, columns), lambda i, j: (0, j))] if has_bias else []),
        out_specs=out_specs,
        out_shape=out_shape,
        scratch=[*scratch, *states],
        vmem=vmem_bytes("rows" if with_rows else "statistics", blocks, width, hidden.dtype.itemsize, saved=save),
        flops=(4 if with_rows else 2) * work,
        bytes_accessed=(tokens + grid[0] * vocab_size) * width * hidden.dtype.itemsize + 4 * save * tokens * vocab_size,
        transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
        interpret=interpret,
    )(pack(rows), hidden, unembedding, *([bias[None, :]] if bias is not None else []))
    found: dict[str, Array] = dict(zip(_OUTPUTS, out[0], strict=False))
    for name, power in (("max_logit", 1), ("first", 1), ("second", 2), ("total", 1), ("target", 1)):
        found[name] = found[name] * in_logits**power
    first, second, total, target = (
        found[name] if name in needed else None for name in ("first", "second", "total", "target")
    )
    of_vocabulary = Moments(
        max_logit=found["max_logit"],
        argmax=found["argmax"].astype(jnp.int32) if "argmax" in needed else None,
        weight=found["weight"],
        first=first,
        second=second,
        total=total,
        target=target,
        rows=out[1] if with_rows else None,
    )
    return of_vocabulary, out[1] if save else None
