"""TPU kernels of the forward pass: the statistics alone, and the statistics with the rows that dh needs.

Both walk the grid (token blocks, vocabulary blocks), the vocabulary fastest, with all of D on chip. A vocabulary block
is cut into units: while the matrix unit multiplies one, the vector unit processes the logits of the previous one, in
the same straight-line code, so that neither waits for the other.

The statistics kernel has the vocabulary along sublanes and tokens along lanes: a state [8, tokens] takes eight rows of
logits at a time by elementwise operations, and only at the end are its eight sublanes merged, by `stats.merge`'s rule.
The rows kernel has tokens along sublanes, as its second product e·W wants, states [tokens, 128], and one maximum for
each token, by which the sums [tokens, D] are rescaled once a unit.
"""

import collections
import functools
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
        place = jnp.full(best.shape, common.NEVER, jnp.int32)
        for z, k in zip(pieces, places, strict=True):
            larger = z > best
            best, place = jnp.where(larger, z, best), jnp.where(larger, k, place)
        new["argmax"] = jnp.where(place > common.NEVER, place + start, state["argmax"])
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
    weights = []
    for z, addend, k in zip(pieces, raw, places, strict=True):
        shifted = z - reference
        e = jnp.exp2(shifted * scale)
        weights.append(e)
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
    return new, weights, ratio


_FIELDS = "tokens hidden unembedding moments z state bias saved references rows e sums scale target"
_Refs = collections.namedtuple("_Refs", _FIELDS, defaults=[None] * 8)
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
            new, weights, _ = _fold(
                {name: ref[:, lanes] for name, ref in state.items()}, pieces, raw, places, scale, target, step * columns
            )
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
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens, width = refs.hidden.shape
    axes = common.Axes.of(vocab_size, width)
    group = min(64, tokens)

    @pl.when(step == 0)
    def _():
        _begin_rows(refs, has_target)

    def multiply(c: int):
        of_unit = pl.ds(c * unit, unit)
        z = common.product(options, refs.hidden[...], axes.rows(refs.unembedding, of_unit), (1, axes.width))
        refs.z[c % 2] = z if refs.bias is None else z + refs.bias[:, of_unit]

    def absorb(c: int, count: int) -> Array:
        """Folds `count` columns of unit c into the state, writes their weights; returns the ratio of the old sums."""
        lane = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 1)
        ratios = []
        for start in range(0, tokens, group):
            part = pl.ds(start, group)
            target = refs.target[part, :] - step * columns if has_target else None
            pieces, raw, places = [], [], []
            for k in range(0, min(count, unit), LANES):
                z = common.softcapped(options, refs.z[c % 2, part, k : k + LANES])
                keep = None if count - k >= LANES else lane < count - k
                finite = common.finite(z, has_bias)
                pieces.append(finite if keep is None else jnp.where(keep, finite, FLOOR))
                raw.append(z if keep is None else jnp.where(keep, z, 0.0))
                places.append(c * unit + k)
            old = {name: ref[part, :] for name, ref in state.items()}
            new, weights, ratio = _fold(
                old,
                pieces,
                raw,
                places,
                refs.scale[part, :],
                target,
                step * columns,
                top=lambda best, old=old: jnp.maximum(old["top"], jnp.max(best, axis=1, keepdims=True)),
            )
            for name, ref in state.items():
                ref[part, :] = new[name]
            for i, (e, z, k) in enumerate(zip(weights, pieces, places, strict=True)):
                e = e if options.softcap is None else e * slope_in_units(z, options.softcap)
                e = e if target is None else jnp.where(target == k, 0.0, e)
                refs.e[c % 2, part, i * LANES : (i + 1) * LANES] = e.astype(refs.e.dtype)
            ratios.append(ratio[:, :1])
        return jnp.concatenate(ratios, axis=0)

    def accumulate(c: int, count: int, ratio: Array):
        size = min(unit, -(-count // LANES) * LANES)
        for part in common.slices(width):
            w = common.existing(axes.rows(refs.unembedding, pl.ds(c * unit, size), part), count, axes.vocab)
            added = common.product(options, refs.e[c % 2, :, :size], w, (1, axes.vocab))
            refs.sums[:, part] = refs.sums[:, part] * ratio + added

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

    common.walk_blocks(vocab_size, columns, step, walk)

    @pl.when(step == steps - 1)
    def _():
        _write_rows(refs, vocab_size)


def _begin_rows(refs: _Refs, has_target: bool) -> None:
    """Initial values of what the rows kernel accumulates."""
    for name, ref in refs.state.items():
        ref[...] = _initial(name, ref.shape)
    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
    refs.scale[...] = common.column(refs.tokens, 0)
    if has_target:
        lane = jax.lax.broadcasted_iota(jnp.int32, (refs.hidden.shape[0], LANES), 1)
        refs.target[...] = common.column(refs.tokens, 1).astype(jnp.int32) - lane


def _write_rows(refs: _Refs, vocab_size: int) -> None:
    """The moments of a token from those of its lanes, and its normalized sum of rows of the unembedding."""
    state = refs.state
    turned = {name: ref[...].T for name, ref in state.items() if name not in _INTEGERS}
    moments = {"max_logit": turned["top"][0:1]}
    for name in ("weight", "first", "second", "total", "target"):
        if name in state:
            moments[name] = jnp.sum(turned[name], axis=0, keepdims=True)
    if "argmax" in state:
        lane = jax.lax.broadcasted_iota(jnp.int32, state["weight"].shape, 1)
        index = (state["argmax"][...] + lane).astype(jnp.float32).T
        index = jnp.where(turned["best"] == moments["max_logit"], index, float(vocab_size))
        moments["argmax"] = jnp.min(index, axis=0, keepdims=True)
    _write(refs.moments, moments)
    weight = jnp.sum(state["weight"][...], axis=1, keepdims=True)
    refs.rows[...] = (refs.sums[...] / weight).astype(refs.rows.dtype)


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
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    per_token = pl.BlockSpec((8, block), lambda i, j: (0, i))
    x_spec, axes = pl.BlockSpec((block, width), lambda i, j: (i, 0)), common.Axes.of(vocab_size, width)
    operands: common.Operands = {
        "tokens": (common.pack(values), per_token),
        "hidden": (hidden, x_spec),
        "unembedding": (axes.ordered(unembedding), axes.block(columns, width, lambda i, j: j)),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, j)))
    outputs: common.Operands = {"moments": (jax.ShapeDtypeStruct((8, tokens), jnp.float32), per_token)}
    kernel: Any = _statistics_kernel
    scratch: dict[str, Any] = {"z": pltpu.VMEM((2, blocks.unit, block), jnp.float32)}
    state, names = (8, block), _states(needed)
    if with_rows:
        kernel = functools.partial(_rows_kernel, has_target=targets is not None)
        outputs["rows"] = (jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), x_spec)
        scratch = {
            "z": pltpu.VMEM((2, block, blocks.unit), jnp.float32),
            "e": pltpu.VMEM((2, block, blocks.unit), hidden.dtype),
            "sums": pltpu.VMEM((block, width), jnp.float32),
            "scale": pltpu.VMEM((block, LANES), jnp.float32),
            "target": pltpu.VMEM((block, LANES), jnp.int32),
        }
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
