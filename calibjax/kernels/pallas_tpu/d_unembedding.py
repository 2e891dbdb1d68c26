"""TPU kernel of the backward pass for dW and db: sums [columns, D] stay on chip while the tokens stream past.

The logits are transposed, so that per-token values lie along lanes and dz is already the left operand of dzᵀ·h.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.operator import Call, Model, Signal
from calibjax.kernels.pallas_tpu.backward import Places, derivatives, packed, pipeline, saved_bytes
from calibjax.kernels.pallas_tpu.blocks import LANES, SLICE, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.common import column, pallas, product, walk_blocks
from calibjax.kernels.slopes import apart_of


def _unembedding_kernel(*refs, call: Call, sizes: tuple[int, int], blocks: Blocks, places: Places, flags):
    token_count, vocab_size = sizes
    has_bias, want_rows, want_bias, saved = flags
    tokens_ref, x_ref, w_ref = refs[:3]  # with saved logits, they [columns, tokens] instead of w
    rest = list(refs[3:])
    bias_ref = rest.pop(0) if has_bias else None
    apart_ref = rest.pop(0) if "apart" in places and want_rows else None
    out_ref = rest.pop(0) if want_rows else None
    bias_out_ref = rest.pop(0) if want_bias else None
    z_ref = None if saved else rest.pop(0)
    dz_ref = rest.pop(0)
    sums_ref = rest.pop(0) if want_rows else None
    bias_sums_ref = rest.pop(0) if want_bias else None
    clean_ref = rest.pop(0) if "valid" in places else None
    block, unit = blocks.tokens, blocks.unit
    columns, width = blocks.columns, x_ref.shape[1]
    start = pl.program_id(0) * columns
    step, steps = pl.program_id(1), pl.num_programs(1)

    @pl.when(step == 0)
    def _():
        for ref in (sums_ref, bias_sums_ref):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if apart_ref is not None and sums_ref is not None:
            sums_ref[...] = jnp.broadcast_to(apart_ref[...], sums_ref.shape)

    if clean_ref is not None:
        # A token that does not count may hold NaN, and 0·NaN would reach every row of dW.
        counts = column(tokens_ref, places["valid"])[:, :1] > 0.0
        clean_ref[...] = jnp.where(counts, x_ref[...], jnp.zeros_like(x_ref))
    source = x_ref if clean_ref is None else clean_ref

    def multiply(c: int):
        if z_ref is None:
            return
        z = product(call, w_ref[...], source[pl.ds(c * unit, unit), :], (1, 1))
        if bias_ref is not None:
            turned = jnp.broadcast_to(bias_ref[...], (LANES, columns)).T
            z = z + jnp.concatenate([turned] * (unit // LANES), axis=1)
        z_ref[c % 2] = z

    def differentiate(c: int, count: int) -> Array | None:
        lanes = pl.ds(c * unit, unit)
        return derivatives(
            call,
            places,
            tokens_ref.at[:, lanes],
            w_ref.at[:, lanes] if z_ref is None else z_ref.at[c % 2],
            dz_ref.at[c % 2],
            bias_sums_ref,
            start=start,
            counts=(columns, count),
            vocab_size=vocab_size,
            saved=saved,
        )

    def accumulate(c: int, count: int):
        if sums_ref is None:
            return
        size = min(unit, -(-count // LANES) * LANES)
        for first in range(0, width, SLICE):
            part = pl.ds(first, min(SLICE, width - first))
            x = source[pl.ds(c * unit, size), part]
            if count < size:
                x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < count, x, jnp.zeros_like(x))
            sums_ref[:, part] += product(call, dz_ref[c % 2, :, :size], x, (1, 0))

    walk_blocks(token_count, block, step, lambda count: pipeline(count, unit, multiply, differentiate, accumulate))

    @pl.when(step == steps - 1)
    def _():
        if out_ref is not None and sums_ref is not None:
            out_ref[...] = sums_ref[...].astype(out_ref.dtype)
        if bias_out_ref is not None and bias_sums_ref is not None:
            bias_out_ref[...] = jnp.sum(bias_sums_ref[...].T, axis=0, keepdims=True)


def gradients(
    call: Call,
    model: Model,
    signal: Signal,
    saved: Array | None,
    blocks: Blocks,
    wanted: frozenset[str],
    interpret,
) -> tuple[Array | None, Array | None]:
    """(dW [V, D] in the dtype of the unembedding, db float32 [V]); None for what is not in `wanted`.

    `saved`: see `forward.moments`.
    """
    hidden, unembedding, bias, valid = model
    bias = bias if saved is None else None
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    columns = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    block = -(-blocks.tokens // blocks.unit) * blocks.unit
    blocks = blocks._replace(columns=columns, tokens=block)
    values, places = packed(call, signal, valid)
    want_rows, want_bias, dtype = "unembedding" in wanted, "bias" in wanted, unembedding.dtype
    grid = (pl.cdiv(vocab_size, columns), pl.cdiv(tokens, block))
    w_spec = pl.BlockSpec((columns, width), lambda j, i: (j, 0))
    bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    out_specs, out_shape = [], []
    scratch = [] if saved is not None else [pltpu.VMEM((2, columns, blocks.unit), jnp.float32)]
    scratch.append(pltpu.VMEM((2, columns, blocks.unit), dtype))
    if want_rows:
        out_specs.append(w_spec)
        out_shape.append(jax.ShapeDtypeStruct(unembedding.shape, dtype))
        scratch.append(pltpu.VMEM((columns, width), jnp.float32))
    if want_bias:
        out_specs.append(bias_spec)
        out_shape.append(jax.ShapeDtypeStruct((1, vocab_size), jnp.float32))
        scratch.append(pltpu.VMEM((columns, LANES), jnp.float32))
    if valid is not None:
        scratch.append(pltpu.VMEM((block, width), dtype))
    more = [] if bias is None else [(bias[None, :], bias_spec)]
    apart = apart_of(call, signal)
    if apart is not None and want_rows:
        row = jnp.matmul(apart, model.clean().hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        more.append((row[None, :], pl.BlockSpec((1, width), lambda j, i: (0, 0))))
    out = list(
        pallas(
            functools.partial(
                _unembedding_kernel,
                call=call,
                sizes=(tokens, vocab_size),
                blocks=blocks,
                places=places,
                flags=(bias is not None, want_rows, want_bias, saved is not None),
            ),
            name="calibjax_d_unembedding",
            grid=grid,
            in_specs=[
                pl.BlockSpec((len(values), block), lambda j, i: (0, i)),
                pl.BlockSpec((block, width), lambda j, i: (i, 0)),
                w_spec if saved is None else pl.BlockSpec((columns, block), lambda j, i: (j, i)),
                *(spec for _, spec in more),
            ],
            out_specs=out_specs,
            out_shape=out_shape,
            scratch=scratch,
            vmem=vmem_bytes("unembedding", blocks, width, dtype.itemsize, saved=saved is not None),
            flops=(4 if saved is None else 2) * tokens * width * vocab_size,
            bytes_accessed=(2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize + saved_bytes(saved),
            transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
            interpret=interpret,
        )(values, hidden, unembedding if saved is None else saved, *(array for array, _ in more))
    )
    d_rows = out.pop(0) if want_rows else None
    d_bias = out.pop(0)[0] if want_bias else None
    if d_bias is not None and apart is not None:
        d_bias = d_bias + jnp.sum(apart)
    return d_rows, d_bias
