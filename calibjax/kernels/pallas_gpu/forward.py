"""Hopper kernel of the forward pass: the statistics of the logits, each tile of logits born and consumed in registers.

Each warpgroup folds its tiles (`tiles`) into the running statistics of its tokens: maximum, sums of exponentials in
base 2, Σz, argmax. Only a few floats for each token and piece of the vocabulary leave the chip; the pieces are merged
by `stats.merge`. Columns beyond V are logits of 0, which add nothing to Σz and which a select removes from all else.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats
from calibjax.kernels.operator import Call, Model
from calibjax.kernels.pallas_gpu.schedule import ROWS, Schedule
from calibjax.kernels.pallas_gpu.tiles import SLICE, biased, over_tiles, softcapped
from calibjax.kernels.slopes import LOG2_E, unit_of_logits
from calibjax.kernels.stats import FLOOR, Moments

_SAFE = 100.0  # power of 2 up to which exponentials of soft-capped logits, and their sum, need no maximum
_NO_COLUMN = 2**30


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


def _pieces(
    call: Call,
    model: Model,
    scale: Array,
    names: tuple[str, ...],
    save: bool,
    fixed: bool,
    schedule: Schedule,
    interpret,
) -> tuple[dict[str, Float[Array, "P N"] | Int[Array, "P N"]], Array | None]:
    """By the kernel, the values `names` of every piece of the vocabulary, and the logits to `save`, or None.

    Both in units of the soft-cap. The saved logits are padded to whole tiles.
    """
    hidden, unembedding, bias, _ = model
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    columns, padded = schedule.blocks.columns, schedule.padded_tokens
    arguments = [jnp.pad(scale, (0, padded - tokens))]
    if bias is not None:
        arguments.append(jnp.pad(bias, (0, -vocab_size % columns)))
    floats = tuple(name for name in names if name != "argmax")
    results = [jax.ShapeDtypeStruct((schedule.pieces, len(floats), padded), jnp.float32)]
    if "argmax" in names:
        results.append(jax.ShapeDtypeStruct((schedule.pieces, padded), jnp.int32))
    if save:
        results.append(jax.ShapeDtypeStruct((padded, schedule.vocab_tiles * columns), jnp.float32))

    def body(*refs, rows, piece, tiles):
        scale_ref, *refs = refs
        bias_ref = None if bias is None else refs.pop(0)
        scale = plgpu.load(scale_ref, rows, optimized=False)

        def fold(first, whole, values):
            state = dict(zip(names, values, strict=True))
            for offset in range(0, columns, SLICE):
                raw = softcapped(call, biased(whole[:, offset : offset + SLICE], bias_ref, first + offset))
                if save:
                    refs[-1][rows, pl.ds(first + offset, SLICE)] = raw
                z = raw if bias is None else jnp.maximum(raw, FLOOR)  # it may be −inf
                if vocab_size % columns:
                    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                    z = jnp.where(column < vocab_size - first - offset, z, FLOOR)
                state = _fold(state, z, raw, scale, first + offset, fixed)
            return [state[name] for name in names]

        found = dict(zip(names, tiles(fold, [_initial(name) for name in names]), strict=True))
        if "argmax" in found:
            refs[1][piece, rows] = found.pop("argmax")
        for i, value in enumerate(found.values()):
            refs[0][piece, i, rows] = value

    found = over_tiles(
        body,
        hidden,
        unembedding,
        *arguments,
        results=results,
        schedule=schedule,
        interpret=interpret,
        name="calibjax_statistics",
    )
    pieces = {name: found[0][:, i, :tokens] for i, name in enumerate(floats)}
    pieces |= {"argmax": found[1][:, :tokens]} if "argmax" in names else {}
    return pieces, found[-1] if save else None


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
    save: bool,
    schedule: Schedule,
    interpret,
) -> tuple[Moments, Array | None]:
    """The moments of the whole vocabulary, but for `rows`; with `save` the logits, as `backward.gradients` takes them.

    Under a soft-cap logits are bounded, and the sums need no running maximum while s·cap is at most 69 for every token:
    a second program of the same kernel, chosen as the scales are known. Not with `second`, which would cancel.
    """
    unit = unit_of_logits(call)
    power = scale * (LOG2_E * unit)
    names = _states(needed)

    def run(fixed: bool) -> tuple[Moments, Array | None]:
        found, saved = _pieces(call, model, power, names, save, fixed, schedule, interpret)
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
        return _merged(pieces, scale), saved

    if call.softcap is None or "second" in needed:
        merged, saved = run(False)
    else:
        merged, saved = jax.lax.cond(jnp.all(power <= _SAFE), lambda: run(True), lambda: run(False))
    if targets is None or "target" not in needed:
        return merged, saved
    return merged._replace(target=_target_logits(call, model, targets)), saved
