"""TPU kernel of the statistics with the expected row of W, Σ p·W, that dh needs.

Tokens lie along sublanes, as the second product e·W requires. Running values are [tokens, 128]: lane l has those of the
columns v of the vocabulary with v mod 128 = l, and only `_write` merges the lanes.

A grid step forms the logits of one block of the vocabulary, and in the same code the exponentials and sums of the
previous block, whose rows of W stay on the chip: its largest logits are known by then. The last step has no new block.

Exponentials are relative to a reference logit per token, "top", which moves, with the sums [tokens, D], only where a
logit exceeds it by more than `FAR` powers of two: only rounding depends on it, and no exponential waits for a maximum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels.contract import Options, Refs
from calibjax.kernels.pallas_tpu import common, statistics
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks
from calibjax.kernels.stats import FLOOR, slope_in_units

FAR = 64.0
"""How far a logit may exceed the reference, in powers of two: sums of 2⁶⁴ and products with them are far from 2¹²⁸."""
_BEST = ("best", "argmax")  # running values that are ahead of the sums by one block


def _pieces(refs: Refs, unit: int, c: int, part: Any, count: Array | int) -> tuple[list[Array], list[Array], range]:
    """`pieces`, `raw` and `places` of `add_pieces` for the tokens `part` and unit c of a block with `count` columns."""
    pieces, raw = [], []
    places = range(c * unit, (c + 1) * unit, LANES)
    for k in places:
        z = refs.z[c, part, pl.ds(k - c * unit, LANES)]  # [tokens, 128]
        finite = common.without_infinities(z, refs.bias is not None)
        if not isinstance(count, int) or count - k < LANES:
            exists = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) < count - k
            finite = jnp.where(exists, finite, FLOOR)
            z = jnp.where(exists, z, 0.0)
        pieces.append(finite)
        raw.append(z)
    return pieces, raw, places


def kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks) -> None:
    """A grid step: the logits of a block of the vocabulary, and the exponentials and sums of the previous one."""
    state, columns, unit = refs.state, blocks.columns, blocks.unit
    step = pl.program_id(1)
    last = pl.cdiv(vocab_size, columns) - 1  # the last block
    last_columns = vocab_size - last * columns
    tokens, width = refs.hidden.shape
    axes = common.Axes.of(vocab_size, width)
    groups = [pl.ds(start, min(64, tokens)) for start in range(0, tokens, 64)]

    def multiply(c: int, count: int):
        """Writes the logits of unit c of this block, and updates the largest logit of each lane."""
        unit_columns = pl.ds(c * unit, unit)
        w = axes.rows(refs.unembedding, unit_columns)
        z = options.matmul(refs.hidden[...], w, (1, axes.width))  # [tokens, unit]
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
        """Adds unit c of the previous block, which has `count` columns, to the state; writes e·c_v for `accumulate`."""
        for part in groups:
            target = None if refs.target is None else refs.target[part, :] - (step - 1) * columns
            pieces, raw, places = _pieces(refs, unit, c, part, count)
            old = {name: ref[part, :] for name, ref in state.items() if name not in (*_BEST, "top")}
            scale, reference = refs.scale[part, :], state["top"][part, :]
            new, exponentials = statistics.add_pieces(old, pieces, raw, places, scale, target, reference)
            for name, x in new.items():
                state[name][part, :] = x
            for i, (e, z, k) in enumerate(zip(exponentials, pieces, places, strict=True)):
                if options.softcap is not None:
                    e = e * slope_in_units(z, options.softcap)
                if target is not None:  # `Moments.expected_row` leaves out the target's row
                    e = jnp.where(target == k, 0.0, e)
                refs.e[c % 2, part, i * LANES : (i + 1) * LANES] = e.astype(refs.e.dtype)

    def accumulate(c: int):
        for part in common.slices(width):
            w = axes.rows(refs.previous, pl.ds(c * unit, unit), part)
            refs.sums[:, part] += options.matmul(refs.e[c % 2], w, (1, axes.vocab))

    def walk(previous_count: Array | int, count: int):
        """The logits of this block, which has `count` columns, and the sums of the previous one."""
        for c in range(columns // unit):
            absorb(c, previous_count)
            if c * unit < count:
                multiply(c, count)
            accumulate(c)
        refs.previous[...] = common.existing(refs.unembedding[...], count, axes.vocab)
        near = (state["best"][...] - state["top"][...]) * refs.scale[...] <= FAR
        refs.far[0] = jnp.max(jnp.where(near, 0.0, 1.0))  # 1 for NaN, which must not hide another token's

    pl.when(step == 0)(lambda: _begin(refs))
    pl.when(step == 1)(lambda: _begin_sums(refs))
    pl.when((step == 1) | ((step > 1) & (refs.far[0] > 0.0)))(lambda: _rescale(refs))
    if last_columns == columns:
        walk(columns, columns)
    else:
        pl.when(step < last)(lambda: walk(columns, columns))
        pl.when(step >= last)(lambda: walk(jnp.where(step > last, last_columns, columns), last_columns))
    pl.when(step > last)(lambda: _write(refs, vocab_size))


def _for_tiles(refs: Refs, visit: Callable[[Any], None]) -> None:
    """Calls `visit` for each 128 tokens in a loop: unrolled, their reductions over lanes wait for one another."""

    @pl.loop(0, refs.sums.shape[0] // LANES)
    def _(i):
        visit(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))


def _rescale(refs: Refs) -> None:
    """Makes the largest logits so far the references, and rescales all sums to them."""

    def visit(part: Any):
        old = {name: ref[part, :] for name, ref in refs.state.items()}
        largest = jnp.max(old["best"], axis=1, keepdims=True)  # [128, 1]
        top = jnp.broadcast_to(largest, old["top"].shape)
        new, ratio = statistics.rebase(old, old["top"] - top, refs.scale[part, :])
        for name, x in (new | {"top": top}).items():
            refs.state[name][part, :] = x
        refs.sums[part, :] *= ratio[:, :1]

    _for_tiles(refs, visit)


def _begin(refs: Refs) -> None:
    """Initial values, and a block of zeros ahead of the first, whose sums `_begin_sums` drops."""
    statistics.begin(refs.state)
    for ref in (refs.z, refs.previous, refs.sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)

    def visit(part: Any):
        refs.scale[part, :] = common.column(refs.tokens.at[:, part], 0)
        if refs.target is not None:
            refs.target[part, :] = common.column(refs.tokens.at[:, part], 1).astype(jnp.int32) - lane

    _for_tiles(refs, visit)


def _begin_sums(refs: Refs) -> None:
    statistics.begin({name: ref for name, ref in refs.state.items() if name not in _BEST})
    refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)


def _write(refs: Refs, vocab_size: int) -> None:
    """Merges the lanes of every token: writes its moments, and its sum of rows of W divided by `weight`."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    diagonal = lane == jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)

    def visit(part: Any):
        state = {name: ref[part, :] for name, ref in refs.state.items()}  # [128 tokens, 128 lanes] each
        best = jnp.max(state["best"], axis=1, keepdims=True)
        summed = [name for name in (*statistics.SUMS, "total", "target") if name in state]
        sums = {name: jnp.sum(state[name], axis=1, keepdims=True) for name in summed}  # [128, 1] each
        expected_row = refs.sums[part, :] / sums["weight"]
        refs.expected_row[part, :] = expected_row.astype(refs.expected_row.dtype)
        moments, _ = statistics.rebase(sums, state["top"][:, :1] - best, refs.scale[part, :][:, :1])
        moments["max_logit"] = best
        if "argmax" in state:  # the lowest among the lanes whose maximum is the best
            index = (state["argmax"] + lane).astype(jnp.float32)
            index = jnp.where(state["best"] == best, index, float(vocab_size))
            moments["argmax"] = jnp.min(index, axis=1, keepdims=True)
        for row, name in enumerate(statistics.OUTPUTS):
            if name in moments:
                on_diagonal = jnp.where(diagonal, moments[name], 0.0)  # its column sums turn [128, 1] to [1, 128]
                refs.moments[row : row + 1, part] = jnp.sum(on_diagonal, axis=0, keepdims=True)

    refs.moments[...] = jnp.zeros(refs.moments.shape, jnp.float32)
    _for_tiles(refs, visit)
