"""TPU kernel of the backward pass for dh: sums [tokens, D] stay on chip while the vocabulary streams past."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.operator import Call, Model, Signal
from calibjax.kernels.pallas_tpu.backward import Places, any_of, note, packed, pipeline, saved_bytes
from calibjax.kernels.pallas_tpu.blocks import LANES, SLICE, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.common import column, pallas, product, softcapped, walk_blocks
from calibjax.kernels.slopes import slope_of_logits


def _hidden_kernel(*refs, call: Call, sizes: tuple[int, int], blocks: Blocks, places: Places, flags):
    token_count, vocab_size = sizes
    has_bias, saved = flags
    tokens_ref, x_ref, w_ref = refs[:3]  # with saved logits, they [columns, tokens] instead of x
    rest = list(refs[3:])
    bias_ref = rest.pop(0) if has_bias else None
    apart_ref = rest.pop(0) if "apart" in places else None
    out_ref, z_ref, dz_ref, sums_ref, columns_ref = rest
    columns, unit = blocks.columns, blocks.unit
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens, width = sums_ref.shape
    group = min(64, tokens)

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)
        for row in places.values():
            columns_ref[row] = column(tokens_ref, row)
        if apart_ref is not None:
            sums_ref[...] = columns_ref[places["apart"]][:, :1] * apart_ref[...]

    def multiply(c: int):
        if saved:
            z_ref[c % 2] = x_ref[pl.ds(c * unit, unit), :].T
            return
        z = product(call, x_ref[...], w_ref[pl.ds(c * unit, unit), :], (1, 1))
        z_ref[c % 2] = z if bias_ref is None else z + bias_ref[:, pl.ds(c * unit, unit)]

    def differentiate(c: int, count: int) -> Array | None:
        lane = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 1)
        seen, exist = [], None
        for start in range(0, tokens, group):
            part = pl.ds(start, group)
            if call.filter_threshold and token_count % tokens:
                row = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 0)
                exist = row < token_count - pl.program_id(0) * tokens - start

            def value(name: str, part=part) -> Array | None:
                return columns_ref[places[name], part, :] if name in places else None

            for i, k in enumerate(range(0, min(count, unit), LANES)):
                z = z_ref[c % 2, part, k : k + LANES]
                z = z if saved else softcapped(call, z)

                def hit(index: int, place=c * unit + k, part=part) -> Array:
                    ids = columns_ref[places[f"ids{index}"], part, :].astype(jnp.int32) - lane
                    return ids - step * columns == place

                dz, counts = slope_of_logits(call, z, value, hit)
                keep = None if count - k >= LANES else lane < count - k
                dz = dz if keep is None else jnp.where(keep, dz, 0.0)
                note(seen, counts, keep, exist)
                dz_ref[c % 2, part, i * LANES : (i + 1) * LANES] = dz.astype(dz_ref.dtype)
        return any_of(seen)

    def accumulate(c: int, count: int):
        size = min(unit, -(-count // LANES) * LANES)
        for start in range(0, width, SLICE):
            part = pl.ds(start, min(SLICE, width - start))
            w = w_ref[pl.ds(c * unit, size), part]
            if count < size:
                w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < count, w, jnp.zeros_like(w))
            sums_ref[:, part] += product(call, dz_ref[c % 2, :, :size], w, (1, 0))

    walk_blocks(vocab_size, columns, step, lambda count: pipeline(count, unit, multiply, differentiate, accumulate))

    @pl.when(step == steps - 1)
    def _():
        sums = sums_ref[...]
        if "valid" in places:
            sums = jnp.where(columns_ref[places["valid"]][:, :1] > 0.0, sums, 0.0)
        out_ref[...] = sums.astype(out_ref.dtype)


def gradient(call: Call, model: Model, signal: Signal, saved: Array | None, blocks: Blocks, interpret) -> Array:
    """dh [N, D] in the dtype of the hidden states; 0 where a token is not valid. `saved`: see `forward.moments`."""
    hidden, unembedding, bias, valid = model
    bias = bias if saved is None else None
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    blocks = blocks._replace(columns=min(blocks.columns, -(-vocab_size // blocks.unit) * blocks.unit))
    values, places = packed(call, signal, valid)
    block, columns, dtype = blocks.tokens, blocks.columns, hidden.dtype
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    more = [] if bias is None else [(bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, j)))]
    if "apart" in places:
        everything = jnp.sum(unembedding, axis=0, dtype=jnp.float32)
        more.append((everything[None, :], pl.BlockSpec((1, width), lambda i, j: (0, 0))))
    return pallas(
        functools.partial(
            _hidden_kernel,
            call=call,
            sizes=(tokens, vocab_size),
            blocks=blocks,
            places=places,
            flags=(bias is not None, saved is not None),
        ),
        name="calibjax_d_hidden",
        grid=grid,
        in_specs=[
            pl.BlockSpec((len(values), block), lambda i, j: (0, i)),
            x_spec if saved is None else pl.BlockSpec((columns, block), lambda i, j: (j, i)),
            pl.BlockSpec((columns, width), lambda i, j: (j, 0)),
            *(spec for _, spec in more),
        ],
        out_specs=[x_spec],
        out_shape=[jax.ShapeDtypeStruct(hidden.shape, dtype)],
        scratch=[
            pltpu.VMEM((2, block, blocks.unit), jnp.float32),
            pltpu.VMEM((2, block, blocks.unit), dtype),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((len(values), block, LANES), jnp.float32),
        ],
        vmem=vmem_bytes("rows", blocks, width, dtype.itemsize, saved=saved is not None),
        flops=(4 if saved is None else 2) * tokens * width * vocab_size,
        bytes_accessed=(2 * tokens + grid[0] * vocab_size) * width * dtype.itemsize + saved_bytes(saved),
        transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
        interpret=interpret,
    )(values, hidden if saved is None else saved, unembedding, *(array for array, _ in more))[0]
