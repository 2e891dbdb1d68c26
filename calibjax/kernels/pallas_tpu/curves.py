"""TPU kernel of the statistics at K scales that all tokens have: three sums per scale, of one logit each.

The layout is that of `statistics`. The vector unit is the limit: six operations for a logit and scale, 97% of its slots
on v6e. A loop over groups of tokens forms the logits of one block of the vocabulary beside the sums of the block
before.

With scales in octaves (`stats.octaves`) an exponential is the square of the one an octave below, and the sums of one
chain of octaves stay in registers while the columns of the block pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels.contract import Options, Refs
from calibjax.kernels.pallas_tpu import common, running
from calibjax.kernels.pallas_tpu.blocks import LANES
from calibjax.kernels.stats import FLOOR, octaves

SUMS = ("weight", "first", "second")


def kernel(refs: Refs, *, options: Options, powers: tuple[float, ...], vocab_size: int) -> None:
    """A grid step: the logits of a block of the vocabulary, and the sums of the one before. `powers`: s·log₂e."""
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    _, columns, tokens = refs.z.shape
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    group = 2 * LANES if tokens % (2 * LANES) == 0 else LANES

    @pl.when(step == 0)
    def _():
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
        for name, ref in refs.state.items():
            ref[...] = running.initial(name, ref.shape)

    @pl.loop(0, tokens // group)
    def _(i):
        start = pl.multiple_of(i * group, group)
        rows = axes.rows(refs.unembedding, slice(None))
        z = common.product(options, rows, refs.hidden[pl.ds(start, group), :], (axes.width, 1))
        if refs.bias is not None:
            turned = jnp.broadcast_to(refs.bias[...], (LANES, columns)).T
            z = z + jnp.concatenate([turned] * (group // LANES), axis=1)
        for offset in range(0, group, LANES):
            _absorb(refs, powers, pl.ds(start + offset, LANES), step - 1, vocab_size)
        refs.z[step % 2, :, pl.ds(start, group)] = common.softcapped(options, z)

    pl.when(step == last)(lambda: _write(refs, powers, vocab_size))


def _absorb(refs: Refs, powers: tuple[float, ...], lanes: Any, block: Array, vocab_size: int) -> None:
    """Adds the logits of 128 tokens and a block of the vocabulary; of block −1, before the first, none exist."""
    columns = refs.z.shape[1]
    z = refs.z.at[(block + 2) % 2, :, lanes]
    start = block * columns
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    count = jnp.where(block < 0, 0, vocab_size - start) - sublane
    state = {name: ref[:, lanes] for name, ref in refs.state.items()}
    places = range(0, columns, 8)
    pieces = [jnp.where(count > k, common.finite(z[k : k + 8, :], refs.bias is not None), FLOOR) for k in places]
    new = running.with_best(state, pieces, places, start)
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
        moved = [_moved(refs, lanes, node, state["best"] - new["best"], powers[node]) for node in nodes]
        added = [[jnp.zeros((8, LANES), jnp.float32)] * len(SUMS)] * levels
        for k in places:
            u = z[k : k + 8, :]
            e = jnp.exp2(u * powers[first])
            for level in range(levels):
                moment = e * u
                added[level] = [x + y for x, y in zip(added[level], (e, moment, moment * u), strict=True)]
                e = e * e
        for node, old, more in zip(nodes, moved, added, strict=True):
            for i, name in enumerate(SUMS):
                refs.sums[i, node, :, lanes] = old[name] + more[i]


def _moved(refs: Refs, lanes: Any, node: int, delta: Array, power: float) -> dict[str, Array]:
    """The running sums at a scale, relative to another reference; `delta`: old − new."""
    return running.moved({name: refs.sums[i, node, :, lanes] for i, name in enumerate(SUMS)}, delta, power)[0]


def _write(refs: Refs, powers: tuple[float, ...], vocab_size: int) -> None:
    """The moments of a token from those of its eight sublanes."""
    best = refs.state["best"][...]
    top = jnp.max(best, axis=0, keepdims=True)
    for node, power in enumerate(powers):
        moved = _moved(refs, slice(None), node, best - top, power)
        for i, name in enumerate(SUMS):
            row = i * len(powers) + node
            refs.at_scales[row : row + 1, :] = jnp.sum(moved[name], axis=0, keepdims=True)
    running.write(refs.moments, refs.state, best, vocab_size)
