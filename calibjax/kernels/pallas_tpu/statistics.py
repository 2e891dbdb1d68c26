"""TPU kernel of the statistics alone: logits [columns, tokens] of a block of the vocabulary.

The vocabulary lies along sublanes, tokens along lanes. A running value [8, tokens] takes eight rows of logits at a time
by elementwise operations, and only at the end are its eight sublanes merged, by `stats.merge`'s rule.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels.contract import Options, Refs
from calibjax.kernels.pallas_tpu import common, running
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks
from calibjax.kernels.stats import FLOOR, slope_in_units


def kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks) -> None:
    """A grid step: the logits of a block of the vocabulary, unit by unit, into the running values."""
    state, save, has_bias = refs.state, refs.saved is not None, refs.bias is not None
    columns, unit = blocks.columns, blocks.unit
    width = refs.hidden.shape[0]
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    step, steps = pl.program_id(1), pl.num_programs(1)
    units = columns // unit

    @pl.when(step == 0)
    def _():
        for name, ref in state.items():
            ref[...] = running.initial(name, ref.shape)

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
            new = running.with_best(old, pieces, places, step * columns)
            new, _ = running.moved(new, old["best"] - new["best"], scale)
            new, weights = running.added(new, pieces, raw, places, scale, target, new["best"])
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
        scale = jnp.broadcast_to(refs.tokens[0:1, :], state["best"].shape)
        running.write(refs.moments, state, scale, vocab_size)


def _save(options: Options, saved_ref, logits: list[Array], exponentials: list[Array]) -> None:
    """Writes the exponentials of a unit, sixteen columns at a time: as many as a tile of 16-bit values has."""
    if options.softcap is not None:
        exponentials = [
            jnp.where(e < common.LEAST, -slope_in_units(z, options.softcap), e)
            for z, e in zip(logits, exponentials, strict=True)
        ]
    if len(exponentials) % 2:
        exponentials = [*exponentials, jnp.zeros_like(exponentials[0])]
    for k in range(0, len(exponentials), 2):
        pair = jnp.concatenate(exponentials[k : k + 2], axis=0)
        saved_ref[8 * k : 8 * k + 16, :] = pair.astype(saved_ref.dtype)
