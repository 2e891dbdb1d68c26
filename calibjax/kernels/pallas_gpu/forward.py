"""Hopper kernel of the statistics of the logits, which exist tile by tile in registers only.

Each warpgroup folds its tiles (`tiles`) into the running statistics of its tokens: maximum, sums of exponentials in
base 2, Σz, argmax; each for 8 parts of the columns, so that its threads do not wait for one another. Only a few floats
per token and piece of the vocabulary leave the chip; the pieces are merged by `stats.merge`. Columns beyond V are
logits of 0, which add nothing to Σz and are masked in the other statistics.

The exponentials can be saved in 16 bits, for later products that then need no logits (`Exponentials`), as on TPUs
(`pallas_tpu.backward`). At a one-hot, p and z come from the statistics. Where a loss saves them, they are relative to
the target's logit: one reference for the whole vocabulary, so that the products can take them as they are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats
from calibjax.kernels.contract import LOG2_E, SMALLEST_SAVED, Inputs, Options, Refs, padded
from calibjax.kernels.pallas_gpu.schedule import ROWS, SLICE, WARPGROUPS, Blocks, Schedule, choose
from calibjax.kernels.pallas_gpu.tiles import TRANSFORMS, biased, over_tiles, softcap_in_units
from calibjax.kernels.platforms import platform
from calibjax.kernels.stats import FLOOR, Moments, softcap_unit, softcapped

_NO_COLUMN = 2**30
# A thread has the same 2 of every 8 columns (wgmma): statistics of such parts, which are merged only at the end of a
# unit, need nothing from other threads.
_PART = 8
_RISE = 60.0  # a given reference stays until an exponential would exceed 2^60: sums of these are far from overflow
_MORE = 8  # rows after those of the tokens, for `backward`: one, and seven for whole tiles of the products


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


def _rebase(state: dict[str, Array], delta: Array, scale: Array) -> dict[str, Array]:
    """The state with its sums relative to a reference that is higher by −`delta`.

    A piece far below the target's logit has a reference that is too high; −`delta` is negative there. The factor is
    bounded: such sums may be 0, and are nothing beside those of the target's piece.
    """
    power = jnp.minimum(delta * _wide(scale), 126.0)
    return state | stats.rebase_sums(state, jnp.maximum(delta, FLOOR), jnp.exp2(power))


def _fold(
    state: dict[str, Array], z: list[Array], raw: Array, scale: Array, start: Array, rise: float = 0.0
) -> tuple[dict[str, Array], list[Array]]:
    """The state after more logits, and their exponentials, relative to `best` or `shared` of that state.

    `state`: name -> [64, 8], "shared" [64]; see `_states`. `z`: logits of adjacent columns [64, multiple of 8] from
    `start` on, `FLOOR` where there is no column; `raw` [64, columns] is what `total` adds. `scale` [64]: s·log₂e.
    `shared` follows the largest logit where its exponential would exceed 2^`rise`.
    """
    new = dict(state)
    parts = [part for x in z for part in _parts(x)]
    for i, part in enumerate(parts):
        if "argmax" in state:
            new["argmax"] = jnp.where(part > new["best"], start + i * _PART, new["argmax"])
        new["best"] = jnp.maximum(new["best"], part)
    reference = "shared" if "shared" in state else "best"
    if reference == "shared":
        best = jnp.max(new["best"], axis=1)
        follows = (best - state["shared"]) * scale > rise
        new["shared"] = jnp.where(follows, best, state["shared"])
    new = _rebase(new, _wide(state[reference]) - _wide(new[reference]), scale)
    exponentials = []
    for x in z:
        shifted = x - _wide(new[reference], x.shape[1])
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


def _merged_parts(state: dict[str, Array], scale: Array) -> dict[str, Array]:
    """The values [64] of whole tokens from those of their parts, with sums relative to `best`."""
    best = jnp.max(state["best"], axis=1)
    state = _rebase(state, _wide(state.get("shared", state["best"])) - _wide(best), scale)
    sums = [name for name in ("weight", "first", "second", "total") if name in state]
    moments = {"best": best} | {name: jnp.sum(state[name], axis=1) for name in sums}
    if "argmax" in state:
        column = state["argmax"] + jax.lax.broadcasted_iota(jnp.int32, (ROWS, _PART), 1)
        moments["argmax"] = jnp.min(jnp.where(state["best"] == _wide(best), column, _NO_COLUMN), axis=1)
    return moments


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: bfloat16, N and V padded to whole tiles; at most 0 beyond V. Under a soft-cap, where a logit's slope is
            needed but its exponential underflows, the negative slope may be stored instead: (z/cap)² − 1.
        references: float32, one for each slice of `SLICE` columns and token.
        power: float32 [N], s·log₂e in these units.
        common: float32 [N], each token's only reference where no exponential exceeds 2^60: its target's logit; or None.
            The last rows of `values` then belong to no token, and hold anything.
        known: pairs of ids int32 [N] and z float32 [N], of columns with a one-hot; ids outside [0, V) match nothing.
    """

    values: Float[Array, "M C"]
    references: Float[Array, "S M"]
    power: Float[Array, " N"]
    common: Float[Array, " N"] | None
    known: tuple[tuple[Int[Array, " N"], Float[Array, " N"]], ...]

    def read(
        self, options: Options, log_normalizer: Float[Array, " M"], start: Array | int, count: int
    ) -> tuple[Float[Array, "M c"], Float[Array, "M c"]]:
        """z and exp(s z − lse) of `count` columns from `start` on, both multiples of `SLICE`.

        The error of z is up to 2⁻⁸/s. Where p is 0, z is −inf, or such that its slope under the soft-cap is right to
        2⁻⁸. `log_normalizer`: lse·log₂e, inf for tokens that do not count.
        """
        length = self.references.shape[1]
        values = jax.lax.dynamic_slice_in_dim(self.values, start, count, axis=1)[:length].astype(jnp.float32)
        references = jax.lax.dynamic_slice_in_dim(self.references, start // SLICE, count // SLICE).T
        power = padded(self.power, length, 1.0)[:, None]

        def wide(x: Array) -> Array:
            return jnp.broadcast_to(x[:, :, None], (*x.shape, SLICE)).reshape(values.shape)

        z = jnp.log2(values) / power + wide(references)
        if options.softcap is not None:
            z = jnp.where(values < 0.0, jnp.sqrt(1.0 + values), jnp.maximum(z, -1.0))
            values = jnp.maximum(values, 0.0)
        p = values * wide(jnp.exp2(references * power - log_normalizer[:, None]))
        column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        for ids, exact in self.known:
            exact = padded(exact, length)[:, None]
            here = column == padded(ids - start, length, -1)[:, None]
            z = jnp.where(here, exact, z)
            p = jnp.where(here, jnp.exp2(exact * power - log_normalizer[:, None]), p)
        return z, p


def _run(
    options: Options,
    needed: frozenset[str],
    save: bool,
    inputs: Inputs,
    power: Array,
    common: Array | None,
    schedule: Schedule,
    interpret: Any,
) -> tuple[dict[str, Array], Array | None, Array | None]:
    """Runs the kernel: the states of every piece of the vocabulary [P, N], in units of the soft-cap.

    With `save` follow the exponentials, bfloat16 with N and V padded to whole tiles, and references, from `common` on.
    """
    hidden, unembedding, bias = inputs[:3]
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    columns, length = schedule.blocks.columns, schedule.padded_tokens
    names = _states(needed, shared=save)
    floats = tuple(name for name in names if name not in ("argmax", "shared"))
    arguments = {"power": padded(power, length)}
    if common is not None:
        arguments["common"] = padded(common, length)
    if bias is not None:
        arguments["bias"] = jnp.pad(bias, (0, -vocab_size % columns))
    results = {"floats": jax.ShapeDtypeStruct((schedule.pieces, len(floats), length), jnp.float32)}
    if "argmax" in names:
        results["argmax"] = jax.ShapeDtypeStruct((schedule.pieces, length), jnp.int32)
    # Slices take staged blocks in turns: with an odd number, the last of a tile and the first of the next would meet.
    slices = columns // SLICE
    staged = 2 if slices % 2 == 0 else 1
    scratch = {}
    if save:
        width = schedule.vocab_tiles * columns
        results["references"] = jax.ShapeDtypeStruct((width // SLICE, length), jnp.float32)
        rows = length if common is None else length + _MORE
        results["exponentials"] = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        scratch["staging"] = plgpu.SMEM((WARPGROUPS, staged, ROWS, SLICE), jnp.bfloat16, transforms=TRANSFORMS)

    def statistics(refs: Refs, rows, piece, tiles):
        scale = plgpu.load(refs.power, rows, optimized=False)

        def write(e: Array, reference: Array, first: Array, offset: int) -> None:
            refs.references[jax.lax.div(first, SLICE) + offset // SLICE, rows] = reference
            block = refs.staging.at[jax.lax.axis_index("warpgroup"), offset // SLICE % staged]
            plgpu.wait_smem_to_gmem(staged - 1, wait_read_only=True)  # the copy that last took this block has read it
            block[...] = e.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(block, refs.exponentials.at[rows, pl.ds(first + offset, SLICE)])

        def fold(first, whole, values):
            state = dict(zip(names, values, strict=True))
            rise = 0.0 if common is None else _RISE
            for offset in range(0, columns, SLICE):
                logits = biased(whole[:, offset : offset + SLICE], refs.bias, first + offset)
                raw = softcap_in_units(options, logits)
                z = raw if bias is None else jnp.maximum(raw, FLOOR)  # it may be −inf
                if vocab_size % columns:
                    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                    z = jnp.where(column < vocab_size - first - offset, z, FLOOR)
                state, exponentials = _fold(state, [z] if save else _parts(z), raw, scale, first + offset, rise)
                if save:
                    (e,) = exponentials
                    if options.softcap is not None:
                        e = jnp.where(e >= SMALLEST_SAVED, e, raw * raw - 1.0)
                    write(e, state["shared"], first, offset)
            return [state[name] for name in names]

        initial = {name: _initial(name) for name in names}
        if common is not None:
            initial["shared"] = plgpu.load(refs.common, rows, optimized=False)
        state = dict(zip(names, tiles(fold, list(initial.values())), strict=True))
        if save:
            plgpu.wait_smem_to_gmem(0)
        state = _merged_parts(state, scale)
        if "argmax" in state:
            refs.argmax[piece, rows] = state.pop("argmax")
        for i, name in enumerate(floats):
            refs.floats[piece, i, rows] = state[name]

    outputs = over_tiles(statistics, hidden, unembedding, arguments, results, scratch, schedule, interpret)
    pieces = {name: outputs["floats"][:, i, :tokens] for i, name in enumerate(floats)}
    if "argmax" in names:
        pieces["argmax"] = outputs["argmax"][:, :tokens]
    return pieces, outputs.get("exponentials"), outputs.get("references")


def _merged(pieces: Moments, scale: Float[Array, " N"]) -> Moments:
    """The moments of the whole vocabulary, from those of its pieces [P, N]: pairs of them at a time."""
    merge = jax.vmap(stats.merge, (0, 0, None))

    def take(start: int, end: int) -> Moments:
        return jax.tree.map(lambda x: x[start:end], pieces)

    while (count := pieces.max_logit.shape[0]) > 1:
        half = count // 2
        first, second, rest = take(0, half), take(half, 2 * half), take(2 * half, count)
        pieces = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), merge(first, second, scale), rest)
    return jax.tree.map(lambda x: x[0], pieces)


def _target_logits(softcap: float | None, inputs: Inputs, targets: Int[Array, " N"]) -> Float[Array, " N"]:
    """z_y, by gathering the rows of the targets; 0 where they lie outside [0, V)."""
    inside = (targets >= 0) & (targets < inputs.unembedding.shape[0])
    ids = jnp.where(inside, targets, 0)
    rows = inputs.unembedding[ids].astype(jnp.float32)
    z = jnp.sum(inputs.hidden.astype(jnp.float32) * rows, axis=1)
    z = z if inputs.bias is None else z + inputs.bias[ids]
    return jnp.where(inside, softcapped(z, softcap), 0.0)


def moments(
    options: Options, needed: frozenset[str], save: bool, inputs: Inputs, blocks: Blocks, interpret: Any
) -> tuple[Moments, Exponentials | None]:
    """The moments of the whole vocabulary; with `save` the `Exponentials` of all logits."""
    schedule = choose(inputs.hidden.shape[0], inputs.unembedding.shape[0], blocks, platform().device_kind)
    scale, targets, unit = inputs.scale, inputs.targets, softcap_unit(options.softcap)
    power = scale * (LOG2_E * unit)
    inputs = inputs.masked() if save else inputs  # NaN would be saved
    target = common = None
    if targets is not None and (save or "target" in needed):
        target = _target_logits(options.softcap, inputs, targets)
        # Σ e (z − reference) would lose digits where the target is improbable; a soft-cap and float16 need dz.
        if save and options.softcap is None and "first" not in needed and inputs.hidden.dtype == jnp.bfloat16:
            inside = (targets >= 0) & (targets < inputs.unembedding.shape[0])
            common = jnp.where(inside, jnp.maximum(target, FLOOR), FLOOR)
    states, exponentials, references = _run(options, needed, save, inputs, power, common, schedule, interpret)
    in_logits = {"best": unit, "first": unit, "second": unit**2, "total": unit}  # the factor of each value
    pieces = {name: x * in_logits[name] if name in in_logits else x for name, x in states.items()}
    pieces["max_logit"] = pieces.pop("best")
    merged = _merged(Moments(**{"argmax": None, **pieces}), scale)._replace(target=target)
    if exponentials is None or references is None:
        return merged, None
    known = ((targets, merged.target), (merged.argmax, merged.max_logit))
    pairs = tuple((ids, z / unit) for ids, z in known if ids is not None and z is not None)
    return merged, Exponentials(exponentials, references, power, common, pairs)
