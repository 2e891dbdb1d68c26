"""TPU kernel of the backward pass for dh and dW together: three products, where one kernel for each takes four.

The vocabulary is the outer axis of the grid, tokens the inner one. dW [columns, D] is summed on chip while all tokens
stream past; dz is formed once (see `backward`) from transposed logits: it is the left operand of dz·h directly, and of
dzᵀ·W after a transposition in registers.

dh is a sum over the outer axis: float32 [N, D] in HBM. Each step reads the block of its tokens, adds its part and
writes it back, 8·N·D bytes for each block of the vocabulary. So a block of the vocabulary has as many columns as fit on
the chip, in pieces whose logits are computed one after the other. The blocks are added in order, and one core is used.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import Cotangents, Gradients, Inputs, Options, Refs
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.backward import Places, clear, masking, packed, pipeline, write_dz
from calibjax.kernels.pallas_tpu.blocks import LANES, RESIDENT, Blocks, pieces, vmem_bytes
from calibjax.kernels.platforms import platform


def _kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks, places: Places) -> None:
    block, piece, unit = blocks
    width = refs.hidden.shape[1]
    axes = common.Axes.of(vocab_size, width)
    columns = refs.sums.shape[axes.vocab]
    count = columns // piece
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _():
        for ref in (refs.sums, refs.bias_sums):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if refs.bias is not None:
            refs.turned_bias[...] = jnp.broadcast_to(refs.bias[...], (LANES, columns)).T

    if refs.before is None:  # all of dh stays on the chip

        @pl.when((i == 0) & (j == 0))
        def _():
            refs.d_hidden[...] = jnp.zeros(refs.d_hidden.shape, jnp.float32)

    clear(places, refs)

    def walk(p: int | Array, limit: int):
        """Piece p of the columns, of which `limit` exist."""
        rows = pl.ds(p * piece, piece)

        def multiply(c: int):
            x = refs.hidden[pl.ds(c * unit, unit), :]
            z = common.product(options, axes.rows(refs.unembedding, rows), x, (axes.width, 1))
            if refs.turned_bias is not None:
                z = z + jnp.concatenate([refs.turned_bias[rows, :]] * (unit // LANES), axis=1)
            refs.z[c % 2] = z

        def differentiate(c: int, _):
            write_dz(
                options,
                places,
                refs.tokens.at[:, pl.ds(c * unit, unit)],
                refs.z.at[c % 2],
                refs.dz.at[c % 2],
                None if refs.bias_sums is None else refs.bias_sums.at[rows, :],
                start=j * columns + p * piece,
                counts=(limit, unit),
            )

        def accumulate(c: int, _):
            tokens = pl.ds(c * unit, unit)
            dz = refs.dz[c % 2]
            for part in common.slices(width):
                axes.add(options, axes.rows(refs.sums.at, rows), part, dz, refs.hidden[tokens, part])
            turned = dz.T
            for part in common.slices(width):
                w = common.existing(axes.rows(refs.unembedding, rows, part), limit, axes.vocab)
                added = common.product(options, turned, w, (1, axes.vocab))
                if refs.before is None:
                    refs.d_hidden[pl.ds(i * block + c * unit, unit), part] += added
                else:
                    before = refs.before[tokens, part]
                    before = before if count == 1 else jnp.where(p == 0, before, refs.d_hidden[tokens, part])
                    refs.d_hidden[tokens, part] = before + added

        pipeline(unit, multiply, differentiate, accumulate, block)

    if count == 1:
        common.walk_blocks(vocab_size, piece, j, functools.partial(walk, 0))
    else:

        @pl.loop(0, jnp.minimum(count, pl.cdiv(vocab_size, piece) - j * count))
        def _(p):
            common.walk_blocks(vocab_size, piece, j * count + p, functools.partial(walk, p))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        refs.d_unembedding[...] = refs.sums[...].astype(refs.d_unembedding.dtype)
        if refs.d_bias is not None:
            refs.d_bias[...] = jnp.sum(refs.bias_sums[...].T, axis=0, keepdims=True)


def gradients(
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    blocks: Blocks,
    interpret: Any,
) -> Gradients:
    """dh float32 [N, D], dW [V, D] in the dtype of the unembedding, db float32 [V] where it is wanted.

    `blocks.columns` is the size of a piece of the vocabulary, of which a block holds as many as fit on the chip.
    """
    hidden, unembedding, bias, _, _, valid = inputs
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    piece = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    count = pieces(blocks, width, hidden.dtype.itemsize, platform().device_kind)
    columns = piece * min(count, pl.cdiv(vocab_size, piece))
    block = -(-blocks.tokens // blocks.unit) * blocks.unit
    blocks = blocks._replace(columns=piece, tokens=block)
    grid = (pl.cdiv(vocab_size, columns), pl.cdiv(tokens, block))
    padding = grid[1] * block - tokens
    if padding and valid is None:
        inputs = inputs._replace(valid=jnp.ones(tokens, bool))
    values, places = packed(options, inputs, cotangents)
    # The tokens beyond the last: they do not count, and p = 0.
    beyond = jnp.zeros((len(values), 1), jnp.float32).at[places["scale"]].set(1.0)
    beyond = beyond.at[places["log_normalizer"]].set(jnp.inf)
    values = jnp.concatenate([values, jnp.broadcast_to(beyond, (len(values), padding))], axis=1)
    # A block of dh is read when at the earliest the step two before has ended, and was written when at the latest the
    # step two after its own began, as both have two buffers: with four blocks the one comes after the other. Fewer
    # blocks stay on the chip.
    resident = grid[1] <= RESIDENT
    dtype, size = unembedding.dtype, grid[1] * block
    x_spec = pl.BlockSpec((block, width), lambda j, i: (i, 0))
    axes = common.Axes.of(vocab_size, width)
    w_spec = axes.block(columns, width, lambda j, i: j)
    bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    sums_spec = pl.BlockSpec((size, width), lambda j, i: (0, 0)) if resident else x_spec
    operands: common.Operands = {
        "tokens": (values, pl.BlockSpec((len(values), block), lambda j, i: (0, i))),
        "hidden": (hidden, x_spec),
        "unembedding": (axes.ordered(unembedding), w_spec),
        **masking(inputs.valid, block),
    }
    outputs: common.Operands = {
        "d_hidden": (jax.ShapeDtypeStruct((size, width), jnp.float32), sums_spec),
        "d_unembedding": (jax.eval_shape(axes.ordered, unembedding), w_spec),
    }
    scratch: dict[str, Any] = {
        "z": pltpu.VMEM((2, piece, blocks.unit), jnp.float32),
        "dz": pltpu.VMEM((2, piece, blocks.unit), dtype),
        "sums": pltpu.VMEM(w_spec.block_shape, jnp.float32),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], bias_spec)
        scratch["turned_bias"] = pltpu.VMEM((columns, LANES), jnp.float32)
    if not resident:
        operands["before"] = (jnp.zeros((size, width), jnp.float32), sums_spec)
    if "bias" in wanted:
        outputs["d_bias"] = (jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), bias_spec)
        scratch["bias_sums"] = pltpu.VMEM((columns, LANES), jnp.float32)
    traffic = (2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize + 8 * grid[0] * tokens * width
    results = common.pallas(
        functools.partial(_kernel, options=options, vocab_size=vocab_size, blocks=blocks, places=places),
        common.Launch(
            name="calibjax_d_hidden_d_unembedding",
            grid=grid,
            vmem=vmem_bytes("fused", blocks, width, dtype.itemsize, count=count),
            flops=6 * tokens * width * vocab_size,
            bytes_accessed=traffic,
            exponentials=common.exponentials(options, tokens, vocab_size),
            interpret=interpret,
            split=False,
        ),
        operands,
        outputs,
        scratch,
        aliases={} if resident else {"before": "d_hidden"},
    )
    d_hidden = results["d_hidden"][:tokens]
    if valid is not None:
        d_hidden = jnp.where(valid[:, None], d_hidden, 0.0)
    d_bias = results["d_bias"][0] if "bias" in wanted else None
    return Gradients(d_hidden, axes.ordered(results["d_unembedding"]), d_bias)
