"""TPU kernels of the forward pass: the statistics alone, and the statistics with the rows that dh needs.

Both walk the grid (token blocks, vocabulary blocks), the vocabulary fastest, with all of D on chip. A vocabulary block
is cut into units: while the matrix unit multiplies one, the vector unit processes the logits of the previous one, in
the same straight-line code, so that neither waits for the other.

The statistics kernel has the vocabulary along sublanes and tokens along lanes: a state [8, tokens] takes eight rows of
logits at a time by elementwise operations, and only at the end are its eight sublanes merged, by `stats.merge`'s rule.
The rows kernel has tokens along sublanes, as its second product e·W wants, and states [tokens, 128]. A grid step forms
the logits of its block beside the exponentials and sums of the block before, whose rows of W are kept: a step more than
there are blocks. So the largest logits of a block are known before its exponentials. Those are relative to a reference
for each token, which moves, and rescales the sums [tokens, D], only if a logit exceeds it by more than `FAR` powers of
two: no sum depends on it but by rounding, and the exponentials wait for no maximum.
"""

import collections
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import ForwardRequest, ForwardResult, Inputs, Options
from calibjax.kernels.logit_cotangents import LOG2_E
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.exponentials import LEAST, Exponentials
from calibjax.kernels.softcap import slope_in_units, softcap_unit
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


def _with_best(state, pieces, places, start):
    """`state` with the largest of it and of `pieces` of its shape, and its place: see `_added`."""
    best, found = state["best"], {}
    if "argmax" in state:
        place = jnp.full(best.shape, common.NEVER, jnp.int32)
        for z, k in zip(pieces, places, strict=True):
            larger = z > best
            best, place = jnp.where(larger, z, best), jnp.where(larger, k, place)
        found["argmax"] = jnp.where(place > common.NEVER, place + start, state["argmax"])
    else:
        best = functools.reduce(jnp.maximum, pieces, best)
    return state | found | {"best": best}


def _moved(state, delta, scale):
    """`state` with the sums relative to another reference, and the ratio of the weights; `delta`: old − new."""
    ratio = jnp.exp2(delta * scale)
    weight, first, second = state["weight"], state.get("first"), state.get("second")
    new = {"weight": ratio * weight}
    if first is not None:
        new["first"] = ratio * (first + delta * weight)
        if second is not None:
            new["second"] = ratio * (second + delta * (2.0 * first + delta * weight))
    return state | new, ratio


def _added(state, pieces, raw, places, scale, target, reference):
    """The state after pieces of logits of its own shape, and their exponentials.

    Args:
        state: name -> array, see `_states`.
        pieces: logits, `FLOOR` where there is none.
        raw: what `total` adds for each of them.
        places: of each, the index of its first column in the block.
        scale: s·log₂e.
        target: index of the target counted from the block and from the sublane or lane.
        reference: logit relative to which exponentials are summed.
    """
    new, weights = dict(state), []
    for z, addend, k in zip(pieces, raw, places, strict=True):
        shifted = z - reference
        e = jnp.exp2(shifted * scale)
        weights.append(e)
        new["weight"] = new["weight"] + e
        if "first" in state:
            moment = e * shifted
            new["first"] = new["first"] + moment
            if "second" in state:
                new["second"] = new["second"] + moment * shifted
        if "total" in state:
            new["total"] = new["total"] + addend
        if "target" in state:
            new["target"] = jnp.where(target == k, addend, new["target"])
    return new, weights


_FIELDS = "tokens hidden unembedding moments z state bias saved references rows e kept far sums scale target"
_Refs = collections.namedtuple("_Refs", _FIELDS, defaults=[None] * 10)
"""References of the kernels; `saved` and `references` are of the statistics alone, those after them of the rows."""


def _refs(**refs: Any) -> _Refs:
    own = {name: refs.pop(name) for name in _Refs._fields if name in refs}
    return _Refs(**own, state={name.removeprefix("state_"): ref for name, ref in refs.items()})


def _statistics_kernel(refs: _Refs, *, options: Options, vocab_size: int, blocks: Blocks) -> None:
    state, save, has_bias = refs.state, refs.saved is not None, refs.bias is not None
    columns, unit = blocks.columns, blocks.unit
    width = refs.hidden.shape[0]
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    step, steps = pl.program_id(1), pl.num_programs(1)
    units = columns // unit

    @pl.when(step == 0)
    def _():
        for name, ref in state.items():
            ref[...] = _initial(name, ref.shape)

    def multiply(c: int):
        rows = pl.ds(c * unit, unit)
        z = common.product(options, axes.rows(refs.unembedding, rows), refs.hidden[...], (axes.width, 1))
        if has_bias:
            turned = jnp.broadcast_to(refs.bias[:, rows], (LANES, unit)).T
            z = z + jnp.concatenate([turned] * (width // LANES), axis=1)
        refs.z[c % 2] = z

    def absorb(slot: int, offset: int, count: int, ghost: bool = False):
        """The logits in `slot`, whose first column has the index `offset` in this block; `count` of them exist.

        `ghost`: they are the previous block's, so in the first step there are none.
        """
        sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
        for group in range(0, width, LANES):
            lanes = pl.ds(group, LANES)
            scale = jnp.broadcast_to(refs.tokens[0:1, lanes], (8, LANES))
            target = None
            if "target" in state:
                wanted = jnp.broadcast_to(refs.tokens[1:2, lanes], (8, LANES)).astype(jnp.int32)
                target = wanted - sublane - step * columns
            pieces, raw, places = [], [], []
            for k in range(0, min(count, unit), 8):
                z = common.softcapped(options, refs.z[slot, k : k + 8, lanes])
                keep = None if count - k >= 8 else sublane < count - k
                if ghost:
                    real = jnp.broadcast_to(step, (8, LANES)) > 0
                    keep = real if keep is None else keep & real
                finite = common.finite(z, has_bias)
                pieces.append(finite if keep is None else jnp.where(keep, finite, FLOOR))
                raw.append(z if keep is None else jnp.where(keep, z, 0.0))
                places.append(offset + k)
            old = {name: ref[:, lanes] for name, ref in state.items()}
            new = _with_best(old, pieces, places, step * columns)
            new, _ = _moved(new, old["best"] - new["best"], scale)
            new, weights = _added(new, pieces, raw, places, scale, target, new["best"])
            for name, ref in state.items():
                ref[:, lanes] = new[name]
            if save:
                refs.references[pl.ds(offset // unit * 8, 8), lanes] = new["best"]
                _save(options, refs.saved.at[pl.ds(offset, unit), lanes], pieces, weights)

    def absorb_last(count: int):
        """The last unit of a block with `count` columns."""
        last = -(-count // unit) - 1
        absorb(last % 2, last * unit, count - last * unit)

    def walk(count: int):
        """A block with `count` columns: each unit's product beside the arithmetic on the logits before it."""
        multiply(0)
        if not save:
            absorb((units - 1) % 2, -unit, unit, ghost=True)
        for c in range(1, -(-count // unit)):
            multiply(c)
            absorb((c - 1) % 2, (c - 1) * unit, unit)
        if save:  # in the next step its place in the result would be gone
            absorb_last(count)

    left = common.walk_blocks(vocab_size, columns, step, walk)

    @pl.when(step == steps - 1)
    def _():
        if not save:
            absorb_last(left)
        _write_statistics(refs, vocab_size)


def _save(options: Options, saved_ref, logits: list[Array], exponentials: list[Array]) -> None:
    """Writes the exponentials of a unit, sixteen columns at a time: as many as a tile of 16-bit values has."""
    if options.softcap is not None:
        exponentials = [
            jnp.where(e < LEAST, -slope_in_units(z, options.softcap), e)
            for z, e in zip(logits, exponentials, strict=True)
        ]
    if len(exponentials) % 2:
        exponentials = [*exponentials, jnp.zeros_like(exponentials[0])]
    for k in range(0, len(exponentials), 2):
        pair = jnp.concatenate(exponentials[k : k + 2], axis=0)
        saved_ref[8 * k : 8 * k + 16, :] = pair.astype(saved_ref.dtype)


def _write_statistics(refs: _Refs, vocab_size: int) -> None:
    """The moments of a token from those of its eight sublanes."""
    state = refs.state
    best = state["best"][...]
    scale = jnp.broadcast_to(refs.tokens[0:1, :], best.shape)
    top = jnp.max(best, axis=0, keepdims=True)
    delta = best - top
    ratio = jnp.exp2(delta * scale)
    weight = state["weight"][...]
    moments = {"max_logit": top, "weight": jnp.sum(ratio * weight, axis=0, keepdims=True)}
    if "first" in state:
        first = state["first"][...]
        moments["first"] = jnp.sum(ratio * (first + delta * weight), axis=0, keepdims=True)
        if "second" in state:
            second = state["second"][...] + delta * (2.0 * first + delta * weight)
            moments["second"] = jnp.sum(ratio * second, axis=0, keepdims=True)
    for name in ("total", "target"):
        if name in state:
            moments[name] = jnp.sum(state[name][...], axis=0, keepdims=True)
    if "argmax" in state:
        index = state["argmax"][...] + jax.lax.broadcasted_iota(jnp.int32, best.shape, 0)
        index = jnp.where(best == top, index.astype(jnp.float32), float(vocab_size))
        moments["argmax"] = jnp.min(index, axis=0, keepdims=True)
    _write(refs.moments, moments)


def _write(moments_ref, moments: dict[str, Array]):
    moments_ref[...] = jnp.zeros(moments_ref.shape, jnp.float32)
    for row, name in enumerate(_OUTPUTS):
        if name in moments:
            moments_ref[row : row + 1, :] = moments[name]


def _rows_kernel(refs: _Refs, *, options: Options, vocab_size: int, blocks: Blocks, has_target: bool) -> None:
    state, has_bias = refs.state, refs.bias is not None
    columns, unit = blocks.columns, blocks.unit
    step, last = pl.program_id(1), -(-vocab_size // columns) - 1
    left = vocab_size - last * columns
    tokens, width = refs.hidden.shape
    axes = common.Axes.of(vocab_size, width)
    groups = [pl.ds(start, min(64, tokens)) for start in range(0, tokens, 64)]

    def pieces_of(c: int, part: Any, count: Array | int) -> tuple[list[Array], list[Array], list[int]]:
        """`pieces`, `raw` and `places` of some tokens of unit c for `_added`; `count` columns of the block exist."""
        pieces, raw, places = [], [], []
        for k in range(c * unit, (c + 1) * unit, LANES):
            z = refs.z[c, part, pl.ds(k - c * unit, LANES)]
            keep = None
            if not isinstance(count, int) or count - k < LANES:
                keep = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) < count - k
            finite = common.finite(z, has_bias)
            pieces.append(finite if keep is None else jnp.where(keep, finite, FLOOR))
            raw.append(z if keep is None else jnp.where(keep, z, 0.0))
            places.append(k)
        return pieces, raw, places

    def multiply(c: int, count: int):
        """The logits of unit c of this block, and the best of each lane."""
        of_unit = pl.ds(c * unit, unit)
        z = common.product(options, refs.hidden[...], axes.rows(refs.unembedding, of_unit), (1, axes.width))
        refs.z[c] = common.softcapped(options, z if refs.bias is None else z + refs.bias[:, of_unit])
        for part in groups:
            pieces, _, places = pieces_of(c, part, count)
            old = {name: ref[part, :] for name, ref in state.items() if name in _OF_BEST}
            for name, x in _with_best(old, pieces, places, jnp.minimum(step, last) * columns).items():
                state[name][part, :] = x

    def absorb(c: int, count: Array | int):
        """Folds unit c of the block before, of which `count` columns exist, into the state; writes their weights."""
        for part in groups:
            target = refs.target[part, :] - (step - 1) * columns if has_target else None
            pieces, raw, places = pieces_of(c, part, count)
            old = {name: ref[part, :] for name, ref in state.items() if name not in (*_OF_BEST, "top")}
            new, weights = _added(old, pieces, raw, places, refs.scale[part, :], target, state["top"][part, :])
            for name, x in new.items():
                state[name][part, :] = x
            for i, (e, z, k) in enumerate(zip(weights, pieces, places, strict=True)):
                e = e if options.softcap is None else e * slope_in_units(z, options.softcap)
                e = e if target is None else jnp.where(target == k, 0.0, e)
                refs.e[c % 2, part, i * LANES : (i + 1) * LANES] = e.astype(refs.e.dtype)

    def accumulate(c: int):
        for part in common.slices(width):
            w = axes.rows(refs.kept, pl.ds(c * unit, unit), part)
            refs.sums[:, part] += common.product(options, refs.e[c % 2], w, (1, axes.vocab))

    def walk(before: Array | int, count: int):
        """The logits of a block with `count` columns, beside the sums of the block before it, which has `before`."""
        for c in range(columns // unit):
            absorb(c, before)
            if c * unit < count:
                multiply(c, count)
            accumulate(c)
        refs.kept[...] = common.existing(refs.unembedding[...], count, axes.vocab)
        near = (state["best"][...] - state["top"][...]) * refs.scale[...] <= FAR
        refs.far[0] = jnp.max(jnp.where(near, 0.0, 1.0))  # 1 for NaN too, which must not hide another token's

    pl.when(step == 0)(lambda: _begin_rows(refs, has_target))
    pl.when(step == 1)(lambda: _begin_sums(refs))
    pl.when((step == 1) | ((step > 1) & (refs.far[0] > 0.0)))(lambda: _rescale(refs))
    if left == columns:
        walk(columns, columns)
    else:
        pl.when(step < last)(lambda: walk(columns, columns))
        pl.when(step >= last)(lambda: walk(jnp.where(step > last, left, columns), left))
    pl.when(step > last)(lambda: _write_rows(refs, vocab_size))


_OF_BEST = ("best", "argmax")
FAR = 64.0
"""How far a logit may exceed the reference, in powers of two: sums of 2⁶⁴ and products with them are far from 2¹²⁸."""


def _tiles(refs: _Refs, walk: Any):
    """Calls `walk` for each 128 tokens in a loop: unrolled, their reductions over lanes wait for one another."""

    @pl.loop(0, refs.sums.shape[0] // LANES)
    def _(i):
        walk(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))


def _rescale(refs: _Refs):
    """Takes the largest logits so far as the references."""

    def walk(part: Any):
        old = {name: ref[part, :] for name, ref in refs.state.items()}
        top = jnp.broadcast_to(jnp.max(old["best"], axis=1, keepdims=True), old["top"].shape)
        new, ratio = _moved(old, old["top"] - top, refs.scale[part, :])
        for name, x in (new | {"top": top}).items():
            refs.state[name][part, :] = x
        refs.sums[part, :] *= ratio[:, :1]

    _tiles(refs, walk)


def _begin_rows(refs: _Refs, has_target: bool) -> None:
    """Initial values of the rows kernel, and a block of zeros ahead of the first, whose sums `_begin_sums` drops."""
    for name, ref in refs.state.items():
        ref[...] = _initial(name, ref.shape)
    for ref in (refs.z, refs.kept, refs.sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)

    def walk(part: Any):
        refs.scale[part, :] = common.column(refs.tokens.at[:, part], 0)
        if has_target:
            refs.target[part, :] = common.column(refs.tokens.at[:, part], 1).astype(jnp.int32) - lane

    _tiles(refs, walk)


def _begin_sums(refs: _Refs):
    """Initial values of what the rows kernel sums."""
    for name, ref in refs.state.items():
        if name not in _OF_BEST:
            ref[...] = _initial(name, ref.shape)
    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)


def _write_rows(refs: _Refs, vocab_size: int) -> None:
    """The moments of a token from those of its lanes, and its normalized sum of rows of the unembedding."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    diagonal = lane == jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)

    def walk(part: Any):
        state = {name: ref[part, :] for name, ref in refs.state.items()}
        best = jnp.max(state["best"], axis=1, keepdims=True)
        summed = ("weight", "first", "second", "total", "target")
        sums = {name: jnp.sum(state[name], axis=1, keepdims=True) for name in summed if name in state}
        refs.rows[part, :] = (refs.sums[part, :] / sums["weight"]).astype(refs.rows.dtype)
        moments, _ = _moved(sums, state["top"][:, :1] - best, refs.scale[part, :][:, :1])
        moments["max_logit"] = best
        if "argmax" in state:
            index = jnp.where(state["best"] == best, (state["argmax"] + lane).astype(jnp.float32), float(vocab_size))
            moments["argmax"] = jnp.min(index, axis=1, keepdims=True)
        for row, name in enumerate(_OUTPUTS):
            if name in moments:
                turned = jnp.where(diagonal, moments[name], 0.0)
                refs.moments[row : row + 1, part] = jnp.sum(turned, axis=0, keepdims=True)

    refs.moments[...] = jnp.zeros(refs.moments.shape, jnp.float32)
    _tiles(refs, walk)


def _rows_scratch(blocks: Blocks, of_block: tuple[int, int], dtype: Any) -> dict[str, Any]:
    """Memory on chip of the rows kernel, but for its states. `of_block`: the shape of a block of W."""
    block, columns, unit = blocks
    width = math.prod(of_block) // columns
    return {
        "z": pltpu.VMEM((columns // unit, block, unit), jnp.float32),
        "e": pltpu.VMEM((2, block, unit), dtype),
        "kept": pltpu.VMEM(of_block, dtype),
        "far": pltpu.SMEM((1,), jnp.float32),
        "sums": pltpu.VMEM((block, width), jnp.float32),
        "scale": pltpu.VMEM((block, LANES), jnp.float32),
        "target": pltpu.VMEM((block, LANES), jnp.int32),
    }


def moments(request: ForwardRequest, inputs: Inputs, blocks: Blocks, interpret: Any) -> ForwardResult:
    """The moments of the whole vocabulary by one kernel: with "rows" needed two products, else one.

    With `save`, which rules out "rows", also the `Exponentials` of all logits.
    """
    options, needed, save = request
    inputs = inputs.masked() if save else inputs  # NaN would be saved
    hidden, unembedding, bias, scale, targets, _ = inputs
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    with_rows, itemsize = "rows" in needed, hidden.dtype.itemsize
    columns = min(blocks.columns, -(-vocab_size // (2 * blocks.unit)) * 2 * blocks.unit)
    blocks = blocks._replace(columns=columns)
    block, in_logits = blocks.tokens, softcap_unit(options.softcap)
    values = [scale * (LOG2_E * in_logits), *([] if targets is None else [common.pack_ids(targets)])]
    count = pl.cdiv(vocab_size, columns)
    grid = (pl.cdiv(tokens, block), count + with_rows)

    def of_step(j: Any) -> Any:
        return jnp.minimum(j, count - 1) if with_rows else j

    per_token = pl.BlockSpec((8, block), lambda i, j: (0, i))
    x_spec, axes = pl.BlockSpec((block, width), lambda i, j: (i, 0)), common.Axes.of(vocab_size, width)
    operands: common.Operands = {
        "tokens": (common.pack(values), per_token),
        "hidden": (hidden, x_spec),
        "unembedding": (axes.ordered(unembedding), axes.block(columns, width, lambda i, j: of_step(j))),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, of_step(j))))
    outputs: common.Operands = {"moments": (jax.ShapeDtypeStruct((8, tokens), jnp.float32), per_token)}
    kernel: Any = _statistics_kernel
    scratch: dict[str, Any] = {"z": pltpu.VMEM((2, blocks.unit, block), jnp.float32)}
    state, names = (8, block), _states(needed)
    if with_rows:
        kernel = functools.partial(_rows_kernel, has_target=targets is not None)
        once = pl.BlockSpec(x_spec.block_shape, x_spec.index_map, pipeline_mode=pl.Buffered(1))
        operands["hidden"] = (hidden, once)
        outputs["rows"] = (jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), once)
        scratch = _rows_scratch(blocks, operands["unembedding"][1].block_shape, hidden.dtype)
        state, names = (block, LANES), (*names, "top")
    if save:
        of_all = jax.ShapeDtypeStruct((vocab_size, tokens), hidden.dtype)
        outputs["saved"] = (of_all, pl.BlockSpec((columns, block), lambda i, j: (j, i)))
        rows = 8 * columns // blocks.unit
        of_units = jax.ShapeDtypeStruct((grid[1] * rows, tokens), jnp.float32)
        outputs["references"] = (of_units, pl.BlockSpec((rows, block), lambda i, j: (j, i)))
    for name in names:
        scratch[f"state_{name}"] = pltpu.VMEM(state, jnp.int32 if name in _INTEGERS else jnp.float32)
    results = common.pallas(
        functools.partial(kernel, options=options, vocab_size=vocab_size, blocks=blocks),
        _refs,
        common.Launch(
            name="calibjax_statistics_rows" if with_rows else "calibjax_statistics",
            grid=grid,
            vmem=vmem_bytes("rows" if with_rows else "statistics", blocks, width, itemsize, saved=save),
            flops=(4 if with_rows else 2) * tokens * width * vocab_size,
            bytes_accessed=((tokens + grid[0] * vocab_size) * width + save * tokens * vocab_size) * itemsize,
            exponentials=common.exponentials(options, tokens, vocab_size),
            interpret=interpret,
        ),
        operands,
        outputs,
        scratch,
    )
    of_kernel: dict[str, Array] = dict(zip(_OUTPUTS, results["moments"], strict=False))
    optional = {
        name: of_kernel[name] * in_logits**power
        for name, power in (("first", 1), ("second", 2), ("total", 1), ("target", 1))
        if name in needed
    }
    moments = Moments(
        max_logit=of_kernel["max_logit"] * in_logits,
        argmax=of_kernel["argmax"].astype(jnp.int32) if "argmax" in needed else None,
        weight=of_kernel["weight"],
        rows=results.get("rows"),
        **optional,
    )
    if not save:
        return ForwardResult(moments)
    known = ((targets, moments.target), (moments.argmax, moments.max_logit))
    pairs = tuple((ids, z / in_logits) for ids, z in known if ids is not None and z is not None)
    return ForwardResult(moments, Exponentials(results["saved"], results["references"], pairs))
