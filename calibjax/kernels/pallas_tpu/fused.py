"""TPU kernel of the backward pass for dh and dW together: three products, where one kernel for each takes four.

The vocabulary is the outer axis of the grid, tokens the inner one. dW [columns, D] is summed on chip while all tokens
stream past; dz is formed once, as `backward` says, with the logits transposed: it is the left operand of dz·h as it is,
and of dzᵀ·W after a transposition in registers.

dh is a sum over the vocabulary, the outer axis: float32 [N, D] in HBM, of which each step reads the block of its tokens
and writes it back with its share added, 8·N·D bytes for each block of the vocabulary. So a block of the vocabulary has
as many columns as fit on the chip, in pieces whose logits are formed one after the other. Block after block of the
vocabulary adds to it in order: results are the same from run to run. It also means that one core does it all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.operator import Call, Gradients, Model, Signal
from calibjax.kernels.pallas_tpu.backward import Places, derivatives, packed, pipeline
from calibjax.kernels.pallas_tpu.blocks import LANES, RESIDENT, SLICE, Blocks, pieces, vmem_bytes
from calibjax.kernels.pallas_tpu.common import column, pallas, product, walk_blocks


def _kernel(*refs, call: Call, vocab_size: int, blocks: Blocks, places: Places, flags):
    has_bias, want_bias, resident = flags
    tokens_ref, x_ref, w_ref = refs[:3]
    rest = list(refs[3:])
    bias_ref = rest.pop(0) if has_bias else None
    before_ref = None if resident else rest.pop(0)
    hidden_ref, out_ref = rest.pop(0), rest.pop(0)
    bias_out_ref = rest.pop(0) if want_bias else None
    z_ref, dz_ref, sums_ref = rest.pop(0), rest.pop(0), rest.pop(0)
    turned_ref = rest.pop(0) if has_bias else None
    bias_sums_ref = rest.pop(0) if want_bias else None
    clean_ref = rest.pop(0) if "valid" in places else None
    block, piece, unit = blocks
    columns, width = w_ref.shape
    count = columns // piece
    j, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _():
        for ref in (sums_ref, bias_sums_ref):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if bias_ref is not None and turned_ref is not None:
            turned_ref[...] = jnp.broadcast_to(bias_ref[...], (LANES, columns)).T

    if resident:

        @pl.when((i == 0) & (j == 0))
        def _():
            hidden_ref[...] = jnp.zeros(hidden_ref.shape, jnp.float32)

    if clean_ref is not None:
        # A token that does not count may hold NaN, and 0·NaN would reach every row of dW.
        counts = column(tokens_ref, places["valid"])[:, :1] > 0.0
        clean_ref[...] = jnp.where(counts, x_ref[...], jnp.zeros_like(x_ref))
    source = x_ref if clean_ref is None else clean_ref

    def walk(p: int | Array, limit: int):
        """Piece p of the columns, of which `limit` exist."""
        rows = pl.ds(p * piece, piece)

        def multiply(c: int):
            z = product(call, w_ref[rows, :], source[pl.ds(c * unit, unit), :], (1, 1))
            if turned_ref is not None:
                z = z + jnp.concatenate([turned_ref[rows, :]] * (unit // LANES), axis=1)
            z_ref[c % 2] = z

        def differentiate(c: int, _):
            derivatives(
                call,
                places,
                tokens_ref.at[:, pl.ds(c * unit, unit)],
                z_ref.at[c % 2],
                dz_ref.at[c % 2],
                None if bias_sums_ref is None else bias_sums_ref.at[rows, :],
                start=j * columns + p * piece,
                counts=(limit, unit),
                vocab_size=vocab_size,
            )

        def accumulate(c: int, _):
            tokens = pl.ds(c * unit, unit)
            dz = dz_ref[c % 2]
            for first in range(0, width, SLICE):
                part = pl.ds(first, min(SLICE, width - first))
                sums_ref[rows, part] += product(call, dz, source[tokens, part], (1, 0))
            turned = dz.T
            for first in range(0, width, SLICE):
                part = pl.ds(first, min(SLICE, width - first))
                w = w_ref[rows, part]
                if limit < piece:
                    w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < limit, w, jnp.zeros_like(w))
                share = product(call, turned, w, (1, 0))
                if before_ref is None:
                    hidden_ref[pl.ds(i * block + c * unit, unit), part] += share
                else:
                    before = before_ref[tokens, part]
                    before = before if count == 1 else jnp.where(p == 0, before, hidden_ref[tokens, part])
                    hidden_ref[tokens, part] = before + share

        pipeline(block, unit, multiply, differentiate, accumulate)

    if count == 1:
        walk_blocks(vocab_size, piece, j, functools.partial(walk, 0))
    else:

        @pl.loop(0, jnp.minimum(count, pl.cdiv(vocab_size, piece) - j * count))
        def _(p):
            walk_blocks(vocab_size, piece, j * count + p, functools.partial(walk, p))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sums_ref[...].astype(out_ref.dtype)
        if bias_out_ref is not None and bias_sums_ref is not None:
            bias_out_ref[...] = jnp.sum(bias_sums_ref[...].T, axis=0, keepdims=True)


def gradients(
    call: Call, model: Model, signal: Signal, blocks: Blocks, wanted: frozenset[str], device_kind: str, interpret
) -> Gradients:
    """dh float32 [N, D], dW [V, D] in the dtype of the unembedding, db float32 [V] where "bias" is in `wanted`.

    `blocks.columns` is the size of a piece of the vocabulary, of which a block holds as many as fit on the chip.
    """
    hidden, unembedding, bias, valid = model
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    piece = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    count = pieces(blocks, width, hidden.dtype.itemsize, device_kind)
    columns = piece * min(count, pl.cdiv(vocab_size, piece))
    block = -(-blocks.tokens // blocks.unit) * blocks.unit
    blocks = blocks._replace(columns=piece, tokens=block)
    grid = (pl.cdiv(vocab_size, columns), pl.cdiv(tokens, block))
    padding = grid[1] * block - tokens
    if padding and valid is None:
        valid = jnp.ones(tokens, bool)
    values, places = packed(call, signal, valid)
    # The tokens beyond the last: they do not count, and p = 0.
    beyond = jnp.zeros((len(values), 1), jnp.float32).at[places["scale"]].set(1.0)
    beyond = beyond.at[places["log_normalizer"]].set(jnp.inf)
    values = jnp.concatenate([values, jnp.broadcast_to(beyond, (len(values), padding))], axis=1)
    # A block of dh is read when at the earliest the step two before has ended, and was written when at the latest the
    # step two after its own began, as both have two buffers: with four blocks the one comes after the other. Fewer
    # blocks stay on the chip.
    resident = grid[1] <= RESIDENT
    want_bias, dtype, size = "bias" in wanted, unembedding.dtype, grid[1] * block
    x_spec = pl.BlockSpec((block, width), lambda j, i: (i, 0))
    w_spec = pl.BlockSpec((columns, width), lambda j, i: (j, 0))
    bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    sums_spec = pl.BlockSpec((size, width), lambda j, i: (0, 0)) if resident else x_spec
    inputs = [values, hidden, unembedding]
    in_specs = [pl.BlockSpec((len(values), block), lambda j, i: (0, i)), x_spec, w_spec]
    out_specs = [sums_spec, w_spec]
    out_shape = [jax.ShapeDtypeStruct((size, width), jnp.float32), jax.ShapeDtypeStruct(unembedding.shape, dtype)]
    scratch = [
        pltpu.VMEM((2, piece, blocks.unit), jnp.float32),
        pltpu.VMEM((2, piece, blocks.unit), dtype),
        pltpu.VMEM((columns, width), jnp.float32),
    ]
    if bias is not None:
        inputs.append(bias[None, :])
        in_specs.append(bias_spec)
        scratch.append(pltpu.VMEM((columns, LANES), jnp.float32))
    aliases = {}
    if not resident:
        aliases = {len(inputs): 0}
        inputs.append(jnp.zeros((size, width), jnp.float32))
        in_specs.append(sums_spec)
    if want_bias:
        out_specs.append(bias_spec)
        out_shape.append(jax.ShapeDtypeStruct((1, vocab_size), jnp.float32))
        scratch.append(pltpu.VMEM((columns, LANES), jnp.float32))
    if valid is not None:
        scratch.append(pltpu.VMEM((block, width), dtype))
    d_hidden, rows, *d_bias = pallas(
        functools.partial(
            _kernel,
            call=call,
            vocab_size=vocab_size,
            blocks=blocks,
            places=places,
            flags=(bias is not None, want_bias, resident),
        ),
        name="calibjax_d_hidden_d_unembedding",
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch=scratch,
        vmem=vmem_bytes("fused", blocks, width, dtype.itemsize, pieces=count),
        flops=6 * tokens * width * vocab_size,
        bytes_accessed=(2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize + 8 * grid[0] * tokens * width,
        transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
        interpret=interpret,
        split=False,
        aliases=aliases,
    )(*inputs)
    d_hidden = d_hidden[:tokens]
    if model.valid is not None:
        d_hidden = jnp.where(model.valid[:, None], d_hidden, 0.0)
    return Gradients(d_hidden, rows, d_bias[0][0] if d_bias else None)
