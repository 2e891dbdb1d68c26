"""TPU kernels of the statistics with the vocabulary along sublanes and tokens along lanes.

A running value [8, tokens] takes eight rows of logits [columns, tokens] at a time by elementwise operations, and only
at the end are its eight sublanes merged, as by `stats.merge`. `expected_row` shares `running` to `add_pieces`.

`at_scales` sums at K scales that all tokens have: three sums per scale, of one logit each. The vector unit is the
limit: six operations for a logit and scale, 97% of its slots on v6e. A loop over groups of tokens forms the logits of
one block of the vocabulary and, in the same code, the sums of the block before. With scales in octaves
(`stats.octaves`) an exponential is the square of the one an octave below, and the sums of a chain stay in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.contract import SMALLEST_SAVED, Options, Refs
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks
from calibjax.kernels.stats import FLOOR, octaves, slope_in_units

SUMS = ("weight", "first", "second")
OUTPUTS = ("max_logit", *SUMS, "total", "target", "argmax")  # rows of the result


def running(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a kernel; `best` is the largest logit that a sublane or lane has seen."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "target", "argmax") if name in needed))


def begin(state: dict[str, Any]) -> None:
    """Writes the running values before the first logit."""
    for name, ref in state.items():
        ref[...] = jnp.full(ref.shape, FLOOR if name in ("best", "top") else 0, ref.dtype)


def with_best(state, pieces, places, start):
    """`state` after the maximum of `pieces` of logits, and its index; arguments as in `add_pieces`."""
    best = state["best"]
    updated = {}
    if "argmax" in state:
        place = jnp.full(best.shape, common.NEVER, jnp.int32)
        for z, k in zip(pieces, places, strict=True):
            larger = z > best
            best, place = jnp.where(larger, z, best), jnp.where(larger, k, place)
        updated["argmax"] = jnp.where(place > common.NEVER, place + start, state["argmax"])
    else:
        best = functools.reduce(jnp.maximum, pieces, best)
    return state | updated | {"best": best}


def rebase(state, delta, scale):
    """`state` with its sums moved to another reference by `stats.rebase_sums`, and the factor exp(s·delta) of `weight`.

    `delta` is the old reference less the new one, at most 0 where the reference is a maximum; `scale` s·log₂e.
    """
    ratio = jnp.exp2(delta * scale)
    return state | stats.rebase_sums(state, delta, ratio), ratio


def add_pieces(state, pieces, raw, places, scale, target, reference):
    """`state` after adding pieces of logits, and their exponentials.

    Args:
        state: running values, [8, tokens] or [tokens, 128] each.
        pieces: logits in this shape, `FLOOR` beyond the vocabulary.
        raw: the same logits as `total` adds them, 0 beyond the vocabulary.
        places: index in the block of each piece's first column.
        scale: s·log₂e.
        target: index of the target's logit, relative to the block's first column and to the sublane or lane.
        reference: logit that is subtracted before the exponential.
    """
    new = dict(state)
    weights = []
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


def _write(moments_ref: Any, state: dict[str, Any], scale: Array | None, vocab_size: int) -> None:
    """The result [8, tokens] of a kernel: in each row a moment, merged from the references [8, tokens] in `state`."""
    state = {name: ref[...] for name, ref in state.items()}
    best = state["best"]
    moments = {"max_logit": jnp.max(best, axis=0, keepdims=True)}
    if "weight" in state:
        state, _ = rebase(state, best - moments["max_logit"], scale)
    sums = [name for name in (*SUMS, "total", "target") if name in state]
    moments |= {name: jnp.sum(state[name], axis=0, keepdims=True) for name in sums}
    if "argmax" in state:  # the lowest among the sublanes whose maximum is the best
        index = (state["argmax"] + jax.lax.broadcasted_iota(jnp.int32, best.shape, 0)).astype(jnp.float32)
        index = jnp.where(best == moments["max_logit"], index, float(vocab_size))
        moments["argmax"] = jnp.min(index, axis=0, keepdims=True)
    moments_ref[...] = jnp.zeros(moments_ref.shape, jnp.float32)
    for row, name in enumerate(OUTPUTS):
        if name in moments:
            moments_ref[row : row + 1, :] = moments[name]


def kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks) -> None:
    """A grid step: the logits of a block of the vocabulary, unit by unit, into the running values."""
    state, save, has_bias = refs.state, refs.saved is not None, refs.bias is not None
    columns, unit = blocks.columns, blocks.unit
    width = refs.hidden.shape[0]
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    step, steps = pl.program_id(1), pl.num_programs(1)
    units = columns // unit

    pl.when(step == 0)(lambda: begin(state))

    def multiply(c: int):
        rows = pl.ds(c * unit, unit)
        z = options.matmul(axes.rows(refs.unembedding, rows), refs.hidden[...], (axes.width, 1))
        refs.z[c % 2] = z + common.turned_bias(refs.bias[:, rows], width) if has_bias else z

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
                ids = jnp.broadcast_to(refs.tokens[1:2, lanes], (8, LANES)).astype(jnp.int32)
                target = ids - sublane - step * columns
            pieces, raw = [], []
            places = range(offset, offset + min(count, unit), 8)
            for k in range(0, min(count, unit), 8):
                z = common.softcap_in_units(options, refs.z[slot, k : k + 8, lanes])
                keep = None if count - k >= 8 else sublane < count - k
                if ghost:  # its unit is full
                    keep = jnp.broadcast_to(step, (8, LANES)) > 0
                finite = common.without_infinities(z, has_bias)
                pieces.append(finite if keep is None else jnp.where(keep, finite, FLOOR))
                raw.append(z if keep is None else jnp.where(keep, z, 0.0))
            old = {name: ref[:, lanes] for name, ref in state.items()}
            new = with_best(old, pieces, places, step * columns)
            new, _ = rebase(new, old["best"] - new["best"], scale)
            new, weights = add_pieces(new, pieces, raw, places, scale, target, new["best"])
            for name, ref in state.items():
                ref[:, lanes] = new[name]
            if save:
                refs.references[pl.ds(offset // unit * 8, 8), lanes] = new["best"]
                _save(options, refs.saved.at[pl.ds(offset, unit), lanes], pieces, weights)

    def absorb_last(count: int):
        last = pl.cdiv(count, unit) - 1
        absorb(last % 2, last * unit, count - last * unit)

    def walk(count: int):
        """A block with `count` columns: the product of each unit together with the arithmetic on the unit before."""
        multiply(0)
        if not save:
            absorb((units - 1) % 2, -unit, unit, ghost=True)
        for c in range(1, pl.cdiv(count, unit)):
            multiply(c)
            absorb((c - 1) % 2, (c - 1) * unit, unit)
        if save:  # in the next step its place in the result would be gone
            absorb_last(count)

    left = common.walk_blocks(vocab_size, columns, step, walk)

    @pl.when(step == steps - 1)
    def _():
        if not save:
            absorb_last(left)
        scale = jnp.broadcast_to(refs.tokens[0:1, :], state["best"].shape)
        _write(refs.moments, state, scale, vocab_size)


def _save(options: Options, saved_ref, logits: list[Array], exponentials: list[Array]) -> None:
    """Writes the exponentials of a unit, sixteen columns at a time: as many as a tile of 16-bit values has."""
    if options.softcap is not None:
        exponentials = [
            jnp.where(e < SMALLEST_SAVED, -slope_in_units(z, options.softcap), e)
            for z, e in zip(logits, exponentials, strict=True)
        ]
    if len(exponentials) % 2:
        exponentials = [*exponentials, jnp.zeros_like(exponentials[0])]
    for k in range(0, len(exponentials), 2):
        pair = jnp.concatenate(exponentials[k : k + 2], axis=0)
        saved_ref[8 * k : 8 * k + 16, :] = pair.astype(saved_ref.dtype)


def at_scales(refs: Refs, *, options: Options, powers: tuple[float, ...], vocab_size: int) -> None:
    """A grid step: the logits of a block of the vocabulary, and the sums of the one before. `powers`: s·log₂e."""
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    tokens = refs.z.shape[2]
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    group = 2 * LANES if tokens % (2 * LANES) == 0 else LANES

    @pl.when(step == 0)
    def _():
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
        begin(refs.state)

    @pl.loop(0, tokens // group)
    def _(i):
        start = pl.multiple_of(i * group, group)
        rows = axes.rows(refs.unembedding, slice(None))
        z = options.matmul(rows, refs.hidden[pl.ds(start, group), :], (axes.width, 1))
        if refs.bias is not None:
            z = z + common.turned_bias(refs.bias[...], group)
        for offset in range(0, group, LANES):
            _absorb(refs, powers, pl.ds(start + offset, LANES), step - 1, vocab_size)
        refs.z[step % 2, :, pl.ds(start, group)] = common.softcap_in_units(options, z)

    @pl.when(step == last)
    def _():
        best = refs.state["best"][...]
        top = jnp.max(best, axis=0, keepdims=True)
        for node, power in enumerate(powers):
            at_top = _rebase_at(refs, slice(None), node, best - top, power)
            for i, name in enumerate(SUMS):
                row = i * len(powers) + node
                refs.at_scales[row : row + 1, :] = jnp.sum(at_top[name], axis=0, keepdims=True)
        _write(refs.moments, refs.state, None, vocab_size)


def _absorb(refs: Refs, powers: tuple[float, ...], lanes: Any, block: Array, vocab_size: int) -> None:
    """Adds the logits of 128 tokens and a block of the vocabulary; of block −1, before the first, none exist."""
    columns = refs.z.shape[1]
    z = refs.z.at[(block + 2) % 2, :, lanes]
    start = block * columns
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    count = jnp.where(block < 0, 0, vocab_size - start) - sublane
    state = {name: ref[:, lanes] for name, ref in refs.state.items()}
    places = range(0, columns, 8)
    has_bias = refs.bias is not None
    slices = [common.without_infinities(z[k : k + 8, :], has_bias) for k in places]
    pieces = [jnp.where(count > k, x, FLOOR) for k, x in zip(places, slices, strict=True)]
    new = with_best(state, pieces, places, start)
    if "target" in state:
        target = jnp.broadcast_to(refs.tokens[1:2, lanes], (8, LANES)).astype(jnp.int32) - sublane - start
    for k in places:
        raw = jnp.where(count > k, z[k : k + 8, :], 0.0)
        if "total" in state:
            new["total"] = new["total"] + raw
        if "target" in state:
            new["target"] = jnp.where(target == k, raw, new["target"])
    for name, ref in refs.state.items():
        ref[:, lanes] = new[name]
    for k, piece in zip(places, pieces, strict=True):
        z[k : k + 8, :] = piece - new["best"]
    levels = octaves(powers)
    chains = len(powers) // levels
    for first in range(chains):
        nodes = range(first, len(powers), chains)
        sums = [_rebase_at(refs, lanes, node, state["best"] - new["best"], powers[node]) for node in nodes]
        terms = [[jnp.zeros((8, LANES), jnp.float32)] * len(SUMS)] * levels
        for k in places:
            u = z[k : k + 8, :]
            e = jnp.exp2(u * powers[first])
            for level in range(levels):
                moment = e * u
                terms[level] = [x + y for x, y in zip(terms[level], (e, moment, moment * u), strict=True)]
                e = e * e
        for node, old, more in zip(nodes, sums, terms, strict=True):
            for i, name in enumerate(SUMS):
                refs.sums[i, node, :, lanes] = old[name] + more[i]


def _rebase_at(refs: Refs, lanes: Any, node: int, delta: Array, power: float) -> dict[str, Array]:
    """The running sums at a scale, relative to another reference; `delta`: old − new."""
    return rebase({name: refs.sums[i, node, :, lanes] for i, name in enumerate(SUMS)}, delta, power)[0]
