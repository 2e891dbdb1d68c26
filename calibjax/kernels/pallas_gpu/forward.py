"""Not run on a GPU yet: Hopper kernel of the statistics of the logits, which exist tile by tile in registers only.

Each warpgroup folds its tiles (`tiles`) into the running statistics of its tokens: maximum, sums of exponentials in
base 2, Σz, argmax; of 8 parts of the columns apart, so that its threads do not wait for one another. Only a few floats
per token and piece of the vocabulary leave the chip; the pieces are merged by `stats.merge`. Columns beyond V are
logits of 0, which add nothing to Σz and are masked in the other statistics.

The exponentials can be saved, as they were formed, in 16 bits, for later products that then need no logits
(`exponentials`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats
from calibjax.kernels.contract import ForwardRequest, ForwardResult, Inputs
from calibjax.kernels.logit_cotangents import LOG2_E
from calibjax.kernels.pallas_gpu.exponentials import Exponentials
from calibjax.kernels.pallas_gpu.schedule import ROWS, SLICE, WARPGROUPS, Schedule
from calibjax.kernels.pallas_gpu.tiles import TRANSFORMS, biased, over_tiles, softcapped
from calibjax.kernels.softcap import softcap_unit
from calibjax.kernels.softcap import softcapped as exactly_softcapped
from calibjax.kernels.stats import FLOOR, Moments

_SAFE = 100.0  # power of 2 up to which exponentials of soft-capped logits, and their sum, need no maximum
_LEAST = 2.0**-120  # of the exponentials that are kept as such: of smaller ones, under a soft-cap, its slope is
_NO_COLUMN = 2**30
# Of every 8 columns a thread holds the same 2 (wgmma): the statistics of such parts, put together only at the end of a
# unit, need nothing of other threads.
_PART = 8


def _states(needed: frozenset[str], shared: bool) -> tuple[str, ...]:
    """Names of the running values [64, 8], one for every 8th column; `shared` [64] is one reference for all columns."""
    optional = [name for name in ("first", "second", "total", "argmax") if name in needed]
    return ("best", "weight", *optional, *(["shared"] if shared else []))


def _initial(name: str) -> Array:
    if name == "argmax":
        return jnp.zeros((ROWS, _PART), jnp.int32)
    shape = (ROWS,) if name == "shared" else (ROWS, _PART)
    return jnp.full(shape, FLOOR if name in ("best", "shared") else 0.0, jnp.float32)


def _parts(x: Array) -> list[Array]:
    return [x[:, i : i + _PART] for i in range(0, x.shape[1], _PART)]


def _wide(x: Array, width: int = _PART) -> Array:
    """`x` [64] repeated over `width` columns; `x` [64, width] itself."""
    return x if x.ndim == 2 else jax.lax.broadcast_in_dim(x, (ROWS, width), (0,))


def _moved(state: dict[str, Array], delta: Array, scale: Array) -> dict[str, Array]:
    """The state with its sums relative to a reference that is higher by −`delta`, as in `stats.merge`."""
    ratio = jnp.exp2(delta * _wide(scale))
    weight, first, second = state["weight"], state.get("first"), state.get("second")
    moved = {"weight": ratio * weight}
    if second is not None:
        assert first is not None
        delta = jnp.maximum(delta, FLOOR)
        moved["second"] = ratio * (second + delta * (2.0 * first + delta * weight))
    if first is not None:
        moved["first"] = ratio * (first + delta * weight)
    return state | moved


def _fold(
    state: dict[str, Array], z: list[Array], raw: Array, scale: Array, start: Array, fixed: bool
) -> tuple[dict[str, Array], list[Array]]:
    """The state after more logits, and their exponentials, relative to `best` or `shared` of that state.

    Args:
        state: name -> [64, 8], "shared" [64]; see `_states`.
        z: logits of adjacent columns [64, multiple of 8], `FLOOR` where there is no column.
        raw: [64, columns], what `total` adds for all of them.
        scale: [64], s·log₂e.
        start: index of the first column.
        fixed: the exponentials are exp(s z), relative to nothing.
    """
    new = dict(state)
    for i, part in enumerate(part for x in z for part in _parts(x)):
        if "argmax" in state:
            new["argmax"] = jnp.where(part > new["best"], start + i * _PART, new["argmax"])
        new["best"] = jnp.maximum(new["best"], part)
    name = "shared" if "shared" in state else "best"
    if name == "shared":
        new[name] = jnp.max(new["best"], axis=1)
    if not fixed:
        new = _moved(new, _wide(state[name]) - _wide(new[name]), scale)
    exponentials = []
    for x in z:
        shifted = x if fixed else x - _wide(new[name], x.shape[1])
        e = jnp.exp2(shifted * _wide(scale, x.shape[1]))
        exponentials.append(e)
        terms = {"weight": e}
        if "first" in state:
            terms["first"] = e * shifted
        if "second" in state:
            terms["second"] = terms["first"] * shifted
        new |= {key: sum(_parts(term), start=new[key]) for key, term in terms.items()}
    if "total" in state:
        new["total"] = sum(_parts(raw), start=new["total"])
    return new, exponentials


def _of_tokens(state: dict[str, Array], scale: Array, fixed: bool) -> dict[str, Array]:
    """The values [64] of whole tokens from those of their parts, with sums relative to `best`."""
    best = jnp.max(state["best"], axis=1)
    if not fixed:
        state = _moved(state, _wide(state.get("shared", state["best"])) - _wide(best), scale)
    sums = [name for name in ("weight", "first", "second", "total") if name in state]
    moments = {"best": best} | {name: jnp.sum(state[name], axis=1) for name in sums}
    if "argmax" in state:
        column = state["argmax"] + jax.lax.broadcasted_iota(jnp.int32, (ROWS, _PART), 1)
        moments["argmax"] = jnp.min(jnp.where(state["best"] == _wide(best), column, _NO_COLUMN), axis=1)
    return moments


class _Results(NamedTuple):
    """Results of the kernel."""

    pieces: dict[str, Float[Array, "P N"] | Int[Array, "P N"]]  # of every piece of the vocabulary, see `_states`
    exponentials: Float[Array, "M C"] | None  # bfloat16, N and V padded to whole tiles; see `Exponentials`
    references: Float[Array, "S M"] | None  # `best` of each slice of them


class _Refs(NamedTuple):
    """References of the kernel, None where there is none; `floats` has the states in float32."""

    power: Any
    floats: Any
    bias: Any = None
    argmax: Any = None
    references: Any = None
    exponentials: Any = None
    staging: Any = None


def _run(
    request: ForwardRequest, inputs: Inputs, power: Float[Array, " N"], fixed: bool, schedule: Schedule, interpret: Any
) -> _Results:
    """Runs the kernel: the states in units of the soft-cap, and with `save` the exponentials."""
    options, needed, save = request
    hidden, unembedding, bias = inputs[:3]
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    columns, padded = schedule.blocks.columns, schedule.padded_tokens
    names = _states(needed, shared=save and not fixed)
    floats = tuple(name for name in names if name not in ("argmax", "shared"))
    arguments = {"power": jnp.pad(power, (0, padded - tokens))}
    if bias is not None:
        arguments["bias"] = jnp.pad(bias, (0, -vocab_size % columns))
    results = {"floats": jax.ShapeDtypeStruct((schedule.pieces, len(floats), padded), jnp.float32)}
    if "argmax" in names:
        results["argmax"] = jax.ShapeDtypeStruct((schedule.pieces, padded), jnp.int32)
    scratch, staged = {}, 2 - columns // SLICE % 2  # blocks that the slices of all tiles take in turns
    if save:
        width = schedule.vocab_tiles * columns
        results["references"] = jax.ShapeDtypeStruct((width // SLICE, padded), jnp.float32)
        results["exponentials"] = jax.ShapeDtypeStruct((padded, width), jnp.bfloat16)
        scratch["staging"] = plgpu.SMEM((WARPGROUPS, staged, ROWS, SLICE), jnp.bfloat16, transforms=TRANSFORMS)

    def statistics(refs: _Refs, rows, piece, tiles):
        scale = plgpu.load(refs.power, rows, optimized=False)

        def write(e: Array, reference: Array | None, first: Array, offset: int) -> None:
            if reference is not None:
                refs.references[jax.lax.div(first, SLICE) + offset // SLICE, rows] = reference
            block = refs.staging.at[jax.lax.axis_index("warpgroup"), offset // SLICE % staged]
            plgpu.wait_smem_to_gmem(staged - 1, wait_read_only=True)  # the copy that last took this block has read it
            block[...] = e.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(block, refs.exponentials.at[rows, pl.ds(first + offset, SLICE)])

        def fold(first, whole, values):
            state = dict(zip(names, values, strict=True))
            for offset in range(0, columns, SLICE):
                raw = softcapped(options, biased(whole[:, offset : offset + SLICE], refs.bias, first + offset))
                z = raw if bias is None else jnp.maximum(raw, FLOOR)  # it may be −inf
                if vocab_size % columns:
                    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                    z = jnp.where(column < vocab_size - first - offset, z, FLOOR)
                state, e = _fold(state, [z] if save else _parts(z), raw, scale, first + offset, fixed)
                if save:
                    small = options.softcap is not None and not fixed
                    e = jnp.where(e[0] >= _LEAST, e[0], raw * raw - 1.0) if small else e[0]
                    write(e, state.get("shared"), first, offset)
            return [state[name] for name in names]

        state = dict(zip(names, tiles(fold, [_initial(name) for name in names]), strict=True))
        if save:
            plgpu.wait_smem_to_gmem(0)
        state = _of_tokens(state, scale, fixed)
        if "argmax" in state:
            refs.argmax[piece, rows] = state.pop("argmax")
        for i, name in enumerate(floats):
            refs.floats[piece, i, rows] = state[name]

    outputs = over_tiles(statistics, _Refs, hidden, unembedding, arguments, results, scratch, schedule, interpret)
    pieces = {name: outputs["floats"][:, i, :tokens] for i, name in enumerate(floats)}
    pieces |= {"argmax": outputs["argmax"][:, :tokens]} if "argmax" in names else {}
    return _Results(pieces, outputs.get("exponentials"), outputs.get("references"))


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


def _target_logits(softcap: float | None, inputs: Inputs, targets: Int[Array, " N"]) -> Float[Array, " N"]:
    """z_y, by gathering the rows of the targets; 0 where they lie outside [0, V)."""
    inside = (targets >= 0) & (targets < inputs.unembedding.shape[0])
    ids = jnp.where(inside, targets, 0)
    rows = inputs.unembedding[ids].astype(jnp.float32)
    z = jnp.sum(inputs.hidden.astype(jnp.float32) * rows, axis=1)
    z = z if inputs.bias is None else z + inputs.bias[ids]
    return jnp.where(inside, exactly_softcapped(z, softcap), 0.0)


def moments(request: ForwardRequest, inputs: Inputs, schedule: Schedule, interpret: Any) -> ForwardResult:
    """The moments of the whole vocabulary, but for `rows`; with `save` the `Exponentials` of all logits.

    Under a soft-cap logits are bounded, and the sums need no running maximum while s·cap is at most 69 for every token:
    a second program of the same kernel, chosen as the scales are known. Not with `second`, which would cancel.
    """
    (options, needed, save), scale, targets = request, inputs.scale, inputs.targets
    unit = softcap_unit(options.softcap)
    power = scale * (LOG2_E * unit)
    inputs = inputs.masked() if save else inputs  # NaN would be saved

    def run(fixed: bool) -> tuple[Moments, tuple[Array, Array] | None]:
        results = _run(request, inputs, power, fixed, schedule, interpret)
        best, weight = results.pieces["best"], results.pieces["weight"]
        first, second, total = (results.pieces.get(name) for name in ("first", "second", "total"))
        if fixed:  # from exp(s z) to exp(s (z − best))
            ratio = jnp.exp2(-best * power[None, :])
            first = None if first is None else ratio * (first - best * weight)
            weight = ratio * weight
        pieces = Moments(
            max_logit=best * unit,
            argmax=results.pieces.get("argmax"),
            weight=weight,
            first=None if first is None else first * unit,
            second=None if second is None else second * unit**2,
            total=None if total is None else total * unit,
        )
        merged = _merged(pieces, scale)
        if results.exponentials is None or results.references is None:
            return merged, None
        return merged, (results.exponentials, jnp.zeros_like(results.references) if fixed else results.references)

    if options.softcap is None or "second" in needed:
        merged, saved = run(False)
    else:
        merged, saved = jax.lax.cond(jnp.all(power <= _SAFE), lambda: run(True), lambda: run(False))
    if targets is not None and (save or "target" in needed):
        merged = merged._replace(target=_target_logits(options.softcap, inputs, targets))
    if saved is None:
        return ForwardResult(merged)
    known = ((targets, merged.target), (merged.argmax, merged.max_logit))
    pairs = tuple((ids, z / unit) for ids, z in known if ids is not None and z is not None)
    return ForwardResult(merged, Exponentials(saved[0], saved[1], power, pairs))
