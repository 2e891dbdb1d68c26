"""TPU kernels of the backward pass: dh, and dW with db. Each computes the logits anew: two products. `fused` has both.

Both form dz_v = c_v (exp(s z_v − lse)(weight + tilt (z_v − E)) + uniform) + Σ_k [v = ids_k] g_k (see `Signal`) block by
block in float32, round it to the inputs' dtype, and multiply at once. dh keeps [tokens, D] of sums on chip while the
vocabulary streams past; dW keeps [columns, D] while the tokens do, with the logits transposed, so that per-token values
lie along lanes and dz is already the left operand of dzᵀ·h. No sum is split between grid steps that could run in
another order: results are the same from run to run.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.operator import Call, Model, Signal
from calibjax.kernels.pallas_tpu.blocks import LANES, SLICE, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.common import (
    LOG2_E,
    column,
    pack,
    pack_ids,
    pallas,
    product,
    slope,
    softcapped,
    unit_of_logits,
    walk_blocks,
)
from calibjax.kernels.stats import FLOOR

Places = dict[str, int]  # name of a per-token value -> its row in the packed array


def packed(call: Call, signal: Signal, valid: Array | None) -> tuple[Array, Places]:
    in_logits = unit_of_logits(call)
    values = {
        "scale": signal.scale * (LOG2_E * in_logits),
        "log_normalizer": signal.log_normalizer * LOG2_E,
        "weight": signal.weight,
        "tilt": None if signal.tilt is None else signal.tilt * in_logits,
        "expected": None if signal.expected is None else signal.expected / in_logits,
        "uniform": signal.uniform,
        "valid": valid,
    }
    for k, (ids, g) in enumerate(signal.one_hots):
        values |= {f"ids{k}": pack_ids(ids), f"g{k}": g}
    present = {name: value for name, value in values.items() if value is not None}
    return pack(list(present.values())), {name: row for row, name in enumerate(present)}


def _slope_of_logits(call: Call, z: Array, value, place: int, start) -> Array:
    """dz of one piece of logits whose first column has the index `start + place`.

    `value(name)` gives a per-token value of the piece's shape, or None; ids are counted from its sublane or lane.
    """
    dz = None
    weight, tilt = value("weight"), value("tilt")
    if weight is not None:
        if tilt is not None:
            weight = weight + tilt * jnp.maximum(z - value("expected"), FLOOR)
        dz = jnp.exp2(z * value("scale") - value("log_normalizer")) * weight
    uniform = value("uniform")
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    dz = jnp.zeros_like(z) if dz is None else dz * slope(call, z)
    k = 0
    while (ids := value(f"ids{k}")) is not None:
        dz = dz + jnp.where(ids - start == place, value(f"g{k}"), 0.0)
        k += 1
    return dz


def _hidden_kernel(*refs, call: Call, vocab_size: int, blocks: Blocks, places: Places, has_bias: bool):
    tokens_ref, x_ref, w_ref = refs[:3]
    bias_ref = refs[3] if has_bias else None
    out_ref, z_ref, dz_ref, sums_ref, columns_ref = refs[3 + has_bias :]
    columns, unit = blocks.columns, blocks.unit
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens, width = x_ref.shape
    group = min(64, tokens)

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)
        for row in places.values():
            columns_ref[row] = column(tokens_ref, row)

    def multiply(c: int):
        z = product(call, x_ref[...], w_ref[pl.ds(c * unit, unit), :], (1, 1))
        z_ref[c % 2] = z if bias_ref is None else z + bias_ref[:, pl.ds(c * unit, unit)]

    def differentiate(c: int, count: int):
        lane = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 1)
        for start in range(0, tokens, group):
            part = pl.ds(start, group)

            def value(name: str, part=part) -> Array | None:
                if name not in places:
                    return None
                x = columns_ref[places[name], part, :]
                return x.astype(jnp.int32) - lane if name.startswith("ids") else x

            for i, k in enumerate(range(0, min(count, unit), LANES)):
                z = softcapped(call, z_ref[c % 2, part, k : k + LANES])
                dz = _slope_of_logits(call, z, value, c * unit + k, step * columns)
                if count - k < LANES:
                    dz = jnp.where(lane < count - k, dz, 0.0)
                dz_ref[c % 2, part, i * LANES : (i + 1) * LANES] = dz.astype(dz_ref.dtype)

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


def pipeline(count: int, unit: int, multiply, differentiate, accumulate):
    """Three stages at a time: the logits of unit c + 1, the derivatives of unit c, the sums of unit c − 1."""
    units = -(-count // unit)
    counts = [min(unit, count - c * unit) for c in range(units)]
    multiply(0)
    for c in range(units):
        if c + 1 < units:
            multiply(c + 1)
        differentiate(c, counts[c])
        if c:
            accumulate(c - 1, counts[c - 1])
    accumulate(units - 1, counts[-1])


def derivatives(
    call: Call, places: Places, tokens_ref, z_ref, dz_ref, bias_sums_ref, *, start: Array | int, counts: tuple[int, int]
):
    """Writes dz [columns, tokens] of transposed logits, and adds it to `bias_sums_ref` [columns, 128] where given.

    The first column has the index `start`; `counts` of columns and of tokens exist, and dz is 0 beyond them.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size = z_ref.shape[0]
    height = 16 if size % 16 == 0 else 8
    for group in range(0, min(tokens, z_ref.shape[1]), LANES):
        lanes = pl.ds(group, LANES)

        def value(name: str, lanes=lanes) -> Array | None:
            row = places[name]
            x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
            return x.astype(jnp.int32) - sublane if name.startswith("ids") else x

        per_token = {name: value(name) for name in places if name != "valid"}
        for k in range(0, size, height):
            pieces = []
            for half in range(k, k + height, 8):
                z = softcapped(call, z_ref[half : half + 8, lanes])
                dz = _slope_of_logits(call, z, per_token.get, half, start)
                dz = dz if tokens - group >= LANES else jnp.where(lane < tokens - group, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)


def _unembedding_kernel(*refs, call: Call, token_count: int, blocks: Blocks, places: Places, flags):
    has_bias, want_rows, want_bias = flags
    tokens_ref, x_ref, w_ref = refs[:3]
    rest = list(refs[3:])
    bias_ref = rest.pop(0) if has_bias else None
    out_ref = rest.pop(0) if want_rows else None
    bias_out_ref = rest.pop(0) if want_bias else None
    z_ref, dz_ref = rest.pop(0), rest.pop(0)
    sums_ref = rest.pop(0) if want_rows else None
    bias_sums_ref = rest.pop(0) if want_bias else None
    clean_ref = rest.pop(0) if "valid" in places else None
    block, unit = blocks.tokens, blocks.unit
    columns, width = w_ref.shape
    start = pl.program_id(0) * columns
    step, steps = pl.program_id(1), pl.num_programs(1)

    @pl.when(step == 0)
    def _():
        for ref in (sums_ref, bias_sums_ref):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)

    if clean_ref is not None:
        # A token that does not count may hold NaN, and 0·NaN would reach every row of dW.
        counts = column(tokens_ref, places["valid"])[:, :1] > 0.0
        clean_ref[...] = jnp.where(counts, x_ref[...], jnp.zeros_like(x_ref))
    source = x_ref if clean_ref is None else clean_ref

    def multiply(c: int):
        z = product(call, w_ref[...], source[pl.ds(c * unit, unit), :], (1, 1))
        if bias_ref is not None:
            turned = jnp.broadcast_to(bias_ref[...], (LANES, columns)).T
            z = z + jnp.concatenate([turned] * (unit // LANES), axis=1)
        z_ref[c % 2] = z

    def differentiate(c: int, count: int):
        derivatives(
            call,
            places,
            tokens_ref.at[:, pl.ds(c * unit, unit)],
            z_ref.at[c % 2],
            dz_ref.at[c % 2],
            bias_sums_ref,
            start=start,
            counts=(columns, count),
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


def d_hidden(call: Call, model: Model, signal: Signal, blocks: Blocks, interpret) -> Array:
    """dh [N, D] in the dtype of the hidden states; 0 where a token is not valid."""
    hidden, unembedding, bias, valid = model
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    blocks = blocks._replace(columns=min(blocks.columns, -(-vocab_size // blocks.unit) * blocks.unit))
    values, places = packed(call, signal, valid)
    block, columns, dtype = blocks.tokens, blocks.columns, hidden.dtype
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    return pallas(
        functools.partial(
            _hidden_kernel,
            call=call,
            vocab_size=vocab_size,
            blocks=blocks,
            places=places,
            has_bias=bias is not None,
        ),
        name="calibjax_d_hidden",
        grid=grid,
        in_specs=[
            pl.BlockSpec((len(values), block), lambda i, j: (0, i)),
            x_spec,
            pl.BlockSpec((columns, width), lambda i, j: (j, 0)),
        ]
        + ([] if bias is None else [pl.BlockSpec((1, columns), lambda i, j: (0, j))]),
        out_specs=[x_spec],
        out_shape=[jax.ShapeDtypeStruct(hidden.shape, dtype)],
        scratch=[
            pltpu.VMEM((2, block, blocks.unit), jnp.float32),
            pltpu.VMEM((2, block, blocks.unit), dtype),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((len(values), block, LANES), jnp.float32),
        ],
        vmem=vmem_bytes("rows", blocks, width, dtype.itemsize),
        flops=4 * tokens * width * vocab_size,
        bytes_accessed=(2 * tokens + grid[0] * vocab_size) * width * dtype.itemsize,
        transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
        interpret=interpret,
    )(values, hidden, unembedding, *([] if bias is None else [bias[None, :]]))[0]


def d_unembedding(
    call: Call, model: Model, signal: Signal, blocks: Blocks, wanted: frozenset[str], interpret
) -> tuple[Array | None, Array | None]:
    """(dW [V, D] in the dtype of the unembedding, db float32 [V]); None for what is not in `wanted`."""
    hidden, unembedding, bias, valid = model
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
    scratch = [pltpu.VMEM((2, columns, blocks.unit), jnp.float32), pltpu.VMEM((2, columns, blocks.unit), dtype)]
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
    out = list(
        pallas(
            functools.partial(
                _unembedding_kernel,
                call=call,
                token_count=tokens,
                blocks=blocks,
                places=places,
                flags=(bias is not None, want_rows, want_bias),
            ),
            name="calibjax_d_unembedding",
            grid=grid,
            in_specs=[
                pl.BlockSpec((len(values), block), lambda j, i: (0, i)),
                pl.BlockSpec((block, width), lambda j, i: (i, 0)),
                w_spec,
            ]
            + ([] if bias is None else [bias_spec]),
            out_specs=out_specs,
            out_shape=out_shape,
            scratch=scratch,
            vmem=vmem_bytes("unembedding", blocks, width, dtype.itemsize),
            flops=4 * tokens * width * vocab_size,
            bytes_accessed=(2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize,
            transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
            interpret=interpret,
        )(values, hidden, unembedding, *([] if bias is None else [bias[None, :]]))
    )
    return out.pop(0) if want_rows else None, out.pop(0)[0] if want_bias else None
