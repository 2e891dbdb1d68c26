"""TPU kernel of the statistics with the expected row of W, Σ p·W, that dh needs.

Tokens lie along sublanes, as the second product e·W wants; running values are [tokens, 128].

A grid step forms the logits of one block of the vocabulary, and in the same code the exponentials and sums of the block
before, whose rows of W stay on the chip; there is one step more than there are blocks. So the largest logits of a block
are known before its exponentials.

Exponentials are relative to a reference logit per token. It moves, and rescales the sums [tokens, D], only where a
logit exceeds it by more than `FAR` powers of two: only rounding depends on it, and no exponential waits for a maximum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels.contract import Options, Refs
from calibjax.kernels.pallas_tpu import common, statistics
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks
from calibjax.kernels.stats import FLOOR, slope_in_units


def _pieces(refs: Refs, unit: int, c: int, part: Any, count: Array | int) -> tuple[list[Array], list[Array], range]:
    """`pieces`, `raw`, `places` of some tokens of unit c for `add_pieces`; `count` columns of the block exist."""
    pieces, raw = [], []
    places = range(c * unit, (c + 1) * unit, LANES)
    for k in places:
        z = refs.z[c, part, pl.ds(k - c * unit, LANES)]
        keep = None
        if not isinstance(count, int) or count - k < LANES:
            keep = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) < count - k
        finite = common.without_infinities(z, refs.bias is not None)
        pieces.append(finite if keep is None else jnp.where(keep, finite, FLOOR))
        raw.append(z if keep is None else jnp.where(keep, z, 0.0))
    return pieces, raw, places


def kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks) -> None:
    """A grid step: the logits of a block of the vocabulary, and the exponentials and sums of the one before."""
    state, columns, unit = refs.state, blocks.columns, blocks.unit
    step = pl.program_id(1)
    last = pl.cdiv(vocab_size, columns) - 1
    left = vocab_size - last * columns
    tokens, width = refs.hidden.shape
    axes = common.Axes.of(vocab_size, width)
    groups = [pl.ds(start, min(64, tokens)) for start in range(0, tokens, 64)]

    def multiply(c: int, count: int):
        """The logits of unit c of this block, and the best of each lane."""
        unit_columns = pl.ds(c * unit, unit)
        z = options.matmul(refs.hidden[...], axes.rows(refs.unembedding, unit_columns), (1, axes.width))
        if refs.bias is not None:
            z = z + refs.bias[:, unit_columns]
        refs.z[c] = common.softcap_in_units(options, z)
        for part in groups:
            pieces, _, places = _pieces(refs, unit, c, part, count)
            old = {name: ref[part, :] for name, ref in state.items() if name in _BEST}
            first_column = jnp.minimum(step, last) * columns
            new = statistics.with_best(old, pieces, places, first_column)
            for name, x in new.items():
                state[name][part, :] = x

    def absorb(c: int, count: Array | int):
        """Folds unit c of the block before, of which `count` columns exist, into the state; writes their weights."""
        for part in groups:
            target = None if refs.target is None else refs.target[part, :] - (step - 1) * columns
            pieces, raw, places = _pieces(refs, unit, c, part, count)
            old = {name: ref[part, :] for name, ref in state.items() if name not in (*_BEST, "top")}
            scale, reference = refs.scale[part, :], state["top"][part, :]
            new, weights = statistics.add_pieces(old, pieces, raw, places, scale, target, reference)
            for name, x in new.items():
                state[name][part, :] = x
            for i, (e, z, k) in enumerate(zip(weights, pieces, places, strict=True)):
                if options.softcap is not None:
                    e = e * slope_in_units(z, options.softcap)
                if target is not None:
                    e = jnp.where(target == k, 0.0, e)
                refs.e[c % 2, part, i * LANES : (i + 1) * LANES] = e.astype(refs.e.dtype)

    def accumulate(c: int):
        for part in common.slices(width):
            w = axes.rows(refs.previous, pl.ds(c * unit, unit), part)
            refs.sums[:, part] += options.matmul(refs.e[c % 2], w, (1, axes.vocab))

    def walk(before: Array | int, count: int):
        """The logits of a block with `count` columns, and the sums of the block before it, which has `before`."""
        for c in range(columns // unit):
            absorb(c, before)
            if c * unit < count:
                multiply(c, count)
            accumulate(c)
        refs.previous[...] = common.existing(refs.unembedding[...], count, axes.vocab)
        near = (state["best"][...] - state["top"][...]) * refs.scale[...] <= FAR
        refs.far[0] = jnp.max(jnp.where(near, 0.0, 1.0))  # 1 for NaN, which must not hide another token's

    pl.when(step == 0)(lambda: _begin(refs))
    pl.when(step == 1)(lambda: _begin_sums(refs))
    pl.when((step == 1) | ((step > 1) & (refs.far[0] > 0.0)))(lambda: _rescale(refs))
    if left == columns:
        walk(columns, columns)
    else:
        pl.when(step < last)(lambda: walk(columns, columns))
        pl.when(step >= last)(lambda: walk(jnp.where(step > last, left, columns), left))
    pl.when(step > last)(lambda: _write(refs, vocab_size))


_BEST = ("best", "argmax")
FAR = 64.0
"""How far a logit may exceed the reference, in powers of two: sums of 2⁶⁴ and products with them are far from 2¹²⁸."""


def _tiles(refs: Refs, walk: Any):
    """Calls `walk` for each 128 tokens in a loop: unrolled, their reductions over lanes wait for one another."""

    @pl.loop(0, refs.sums.shape[0] // LANES)
    def _(i):
        walk(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))


def _rescale(refs: Refs):
    """Takes the largest logits so far as the references."""

    def walk(part: Any):
        old = {name: ref[part, :] for name, ref in refs.state.items()}
        top = jnp.broadcast_to(jnp.max(old["best"], axis=1, keepdims=True), old["top"].shape)
        new, ratio = statistics.rebase(old, old["top"] - top, refs.scale[part, :])
        for name, x in (new | {"top": top}).items():
            refs.state[name][part, :] = x
        refs.sums[part, :] *= ratio[:, :1]

    _tiles(refs, walk)


def _begin(refs: Refs) -> None:
    """Initial values, and a block of zeros ahead of the first, whose sums `_begin_sums` drops."""
    statistics.begin(refs.state)
    for ref in (refs.z, refs.previous, refs.sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)

    def walk(part: Any):
        refs.scale[part, :] = common.column(refs.tokens.at[:, part], 0)
        if refs.target is not None:
            refs.target[part, :] = common.column(refs.tokens.at[:, part], 1).astype(jnp.int32) - lane

    _tiles(refs, walk)


def _begin_sums(refs: Refs):
    statistics.begin({name: ref for name, ref in refs.state.items() if name not in _BEST})
    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)


def _write(refs: Refs, vocab_size: int) -> None:
    """The moments of a token from those of its lanes, and its normalized sum of rows of the unembedding."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    diagonal = lane == jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)

    def walk(part: Any):
        state = {name: ref[part, :] for name, ref in refs.state.items()}
        best = jnp.max(state["best"], axis=1, keepdims=True)
        summed = ("weight", "first", "second", "total", "target")
        sums = {name: jnp.sum(state[name], axis=1, keepdims=True) for name in summed if name in state}
        refs.expected_row[part, :] = (refs.sums[part, :] / sums["weight"]).astype(refs.expected_row.dtype)
        moments, _ = statistics.rebase(sums, state["top"][:, :1] - best, refs.scale[part, :][:, :1])
        moments["max_logit"] = best
        if "argmax" in state:  # the lowest among the lanes whose maximum is the best
            is_best = state["best"] == best
            index = (state["argmax"] + lane).astype(jnp.float32)
            moments["argmax"] = jnp.min(jnp.where(is_best, index, float(vocab_size)), axis=1, keepdims=True)
        for row, name in enumerate(statistics.OUTPUTS):
            if name in moments:
                on_diagonal = jnp.where(diagonal, moments[name], 0.0)  # its column sums turn [128, 1] to [1, 128]
                refs.moments[row : row + 1, part] = jnp.sum(on_diagonal, axis=0, keepdims=True)

    refs.moments[...] = jnp.zeros(refs.moments.shape, jnp.float32)
    _tiles(refs, walk)
