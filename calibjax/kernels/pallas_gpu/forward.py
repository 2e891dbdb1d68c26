"""Hopper kernel of the forward pass: the statistics of the logits, each tile of logits born and consumed in registers.

Each warpgroup folds its tiles (`tiles`) into the running statistics of its tokens: maximum, sums of exponentials in
base 2, Σz, argmax. Only a few floats for each token and piece of the vocabulary leave the chip; the pieces are merged
by `stats.merge`. Columns beyond V are logits of 0, which add nothing to Σz and which a select removes from all else.

The exponentials can be kept, as they were formed, in 16 bits, for products of which the logits are then not needed anew
(`exponentials`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats
from calibjax.kernels.operator import Call, Model
from calibjax.kernels.pallas_gpu.exponentials import Exponentials
from calibjax.kernels.pallas_gpu.schedule import ROWS, SLICE, WARPGROUPS, Schedule
from calibjax.kernels.pallas_gpu.tiles import TRANSFORMS, biased, over_tiles, softcapped
from calibjax.kernels.slopes import LOG2_E, unit_of_logits
from calibjax.kernels.stats import FLOOR, Moments

_SAFE = 100.0  # power of 2 up to which exponentials of soft-capped logits, and their sum, need no maximum
_LEAST = 2.0**-120  # of the exponentials that are kept as such: of smaller ones, under a soft-cap, its slope is
_NO_COLUMN = 2**30


def _states(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a token; `best` is its largest logit."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "argmax") if name in needed))


def _initial(name: str) -> Array:
    if name == "argmax":
        return jnp.zeros((ROWS,), jnp.int32)
    return jnp.full((ROWS,), FLOOR if name == "best" else 0.0, jnp.float32)


def _fold(
    state: dict[str, Array], z: Array, raw: Array, scale: Array, start: Array, fixed: bool
) -> tuple[dict[str, Array], Array]:
    """The state after more logits, and their exponentials: exp(s (z − best)) with the `best` of that state.

    Args:
        state: name -> [64], see `_states`.
        z: [64, columns], `FLOOR` where there is no column.
        raw: what `total` adds for each of them.
        scale: [64], s·log₂e.
        start: index of the first column.
        fixed: the exponentials are exp(s z), not exp(s (z − best)).
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
    return new, e


class _Found(NamedTuple):
    """What the kernel leaves."""

    pieces: dict[str, Float[Array, "P N"] | Int[Array, "P N"]]  # of every piece of the vocabulary, see `_states`
    exponentials: Float[Array, "M C"] | None  # bfloat16, N and V padded to whole tiles; see `Exponentials`
    references: Float[Array, "S M"] | None  # `best` of each slice of them


def _run(
    call: Call,
    model: Model,
    power: Float[Array, " N"],
    names: tuple[str, ...],
    save: bool,
    fixed: bool,
    schedule: Schedule,
    interpret,
) -> _Found:
    """By the kernel, the values `names`, in units of the soft-cap; with `save` also the exponentials."""
    hidden, unembedding, bias, _ = model
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    columns, padded = schedule.blocks.columns, schedule.padded_tokens
    arguments = [jnp.pad(power, (0, padded - tokens))]
    if bias is not None:
        arguments.append(jnp.pad(bias, (0, -vocab_size % columns)))
    floats = tuple(name for name in names if name != "argmax")
    results = [jax.ShapeDtypeStruct((schedule.pieces, len(floats), padded), jnp.float32)]
    if "argmax" in names:
        results.append(jax.ShapeDtypeStruct((schedule.pieces, padded), jnp.int32))
    scratch, staged = [], 2 - columns // SLICE % 2  # blocks that the slices of all tiles take in turns
    if save:
        width = schedule.vocab_tiles * columns
        results.append(jax.ShapeDtypeStruct((width // SLICE, padded), jnp.float32))
        results.append(jax.ShapeDtypeStruct((padded, width), jnp.bfloat16))
        scratch.append(plgpu.SMEM((WARPGROUPS, staged, ROWS, SLICE), jnp.bfloat16, transforms=TRANSFORMS))

    def body(*refs, rows, piece, tiles):
        scale_ref, *refs = refs
        bias_ref = None if bias is None else refs.pop(0)
        scale = plgpu.load(scale_ref, rows, optimized=False)

        def keep(e: Array, best: Array, first: Array, offset: int) -> None:
            *_, references_ref, values_ref, staging = refs
            references_ref[jax.lax.div(first, SLICE) + offset // SLICE, rows] = best
            block = staging.at[jax.lax.axis_index("warpgroup"), offset // SLICE % staged]
            plgpu.wait_smem_to_gmem(staged - 1, wait_read_only=True)  # the copy that last took this block has read it
            block[...] = e.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(block, values_ref.at[rows, pl.ds(first + offset, SLICE)])

        def fold(first, whole, values):
            state = dict(zip(names, values, strict=True))
            for offset in range(0, columns, SLICE):
                raw = softcapped(call, biased(whole[:, offset : offset + SLICE], bias_ref, first + offset))
                z = raw if bias is None else jnp.maximum(raw, FLOOR)  # it may be −inf
                if vocab_size % columns:
                    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                    z = jnp.where(column < vocab_size - first - offset, z, FLOOR)
                state, e = _fold(state, z, raw, scale, first + offset, fixed)
                if save:
                    kept = e if call.softcap is None or fixed else jnp.where(e >= _LEAST, e, raw * raw - 1.0)
                    keep(kept, state["best"], first, offset)
            return [state[name] for name in names]

        found = dict(zip(names, tiles(fold, [_initial(name) for name in names]), strict=True))
        if save:
            plgpu.wait_smem_to_gmem(0)
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
        scratch=scratch,
    )
    pieces = {name: found[0][:, i, :tokens] for i, name in enumerate(floats)}
    pieces |= {"argmax": found[1][:, :tokens]} if "argmax" in names else {}
    references, values = found[-2:] if save else (None, None)
    return _Found(pieces, values, references)


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
) -> tuple[Moments, Exponentials | None]:
    """The moments of the whole vocabulary, but for `rows`; with `save` the exponentials of all logits.

    Under a soft-cap logits are bounded, and the sums need no running maximum while s·cap is at most 69 for every token:
    a second program of the same kernel, chosen as the scales are known. Not with `second`, which would cancel.
    """
    unit = unit_of_logits(call)
    power = scale * (LOG2_E * unit)
    names = _states(needed)
    model = model.clean() if save else model  # NaN would be kept

    def run(fixed: bool) -> tuple[Moments, tuple[Array, Array] | None]:
        found = _run(call, model, power, names, save, fixed, schedule, interpret)
        best, weight, first, second = (found.pieces.get(name) for name in ("best", "weight", "first", "second"))
        assert best is not None
        assert weight is not None
        if fixed:  # from exp(s z) to exp(s (z − best))
            ratio = jnp.exp2(-best * power[None, :])
            first = None if first is None else ratio * (first - best * weight)
            weight = ratio * weight
        pieces = Moments(
            max_logit=best * unit,
            argmax=found.pieces.get("argmax"),
            weight=weight,
            first=None if first is None else first * unit,
            second=None if second is None else second * unit**2,
            total=None if (total := found.pieces.get("total")) is None else total * unit,
        )
        merged = _merged(pieces, scale)
        if found.exponentials is None or found.references is None:
            return merged, None
        return merged, (found.exponentials, jnp.zeros_like(found.references) if fixed else found.references)

    if call.softcap is None or "second" in needed:
        merged, saved = run(False)
    else:
        merged, saved = jax.lax.cond(jnp.all(power <= _SAFE), lambda: run(True), lambda: run(False))
    if targets is not None and (save or "target" in needed):
        merged = merged._replace(target=_target_logits(call, model, targets))
    if saved is None:
        return merged, None
    known = ((targets, merged.target), (merged.argmax, merged.max_logit))
    pairs = tuple((ids, z / unit) for ids, z in known if ids is not None and z is not None)
    return merged, Exponentials(saved[0], saved[1], power, pairs)
