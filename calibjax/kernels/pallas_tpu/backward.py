"""TPU kernels of the backward pass: dh, and dW with db. Each computes the logits anew, or reads those that were saved.

`fused` has both in one.

Both form dz_v = c_v (exp(s z_v − lse)(weight + tilt (z_v − E)) + uniform) + Σ_k [v = ids_k] g_k (see `Signal`) block by
block in float32, round it to the inputs' dtype, and multiply at once. dh keeps [tokens, D] of sums on chip while the
vocabulary streams past; dW keeps [columns, D] while the tokens do, with the logits transposed, so that per-token values
lie along lanes and dz is already the left operand of dzᵀ·h. No sum is split between grid steps that could run in
another order: results are the same from run to run.

With `filter_threshold` the second product of a unit, one block of dh's or dW's rows by `Blocks.unit` of what streams
past, runs only where a p of the unit is not below it or a one-hot lies in it: one-hots stay exact. So does the uniform
part without a soft-cap, of rank one: the sums start from it. db is a sum over all dz, exact too.
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


def _apart(call: Call, signal: Signal) -> Array | None:
    """The uniform part where it is added apart from the blocks, which a filter may leave out."""
    return signal.uniform if call.filter_threshold and call.softcap is None else None


def packed(call: Call, signal: Signal, valid: Array | None) -> tuple[Array, Places]:
    in_logits, apart = unit_of_logits(call), _apart(call, signal)
    values = {
        "scale": signal.scale * (LOG2_E * in_logits),
        "log_normalizer": signal.log_normalizer * LOG2_E,
        "weight": signal.weight,
        "tilt": None if signal.tilt is None else signal.tilt * in_logits,
        "expected": None if signal.expected is None else signal.expected / in_logits,
        "uniform": signal.uniform if apart is None else None,
        "apart": apart,
        "valid": valid,
    }
    for k, (ids, g) in enumerate(signal.one_hots):
        values |= {f"ids{k}": pack_ids(ids), f"g{k}": g}
    present = {name: value for name, value in values.items() if value is not None}
    return pack(list(present.values())), {name: row for row, name in enumerate(present)}


def _slope_of_logits(call: Call, z: Array, value, place: int, start) -> tuple[Array, Array | None]:
    """dz of one piece of logits whose first column has the index `start + place`; 1 where it must be added, else 0.

    The latter is None without a filter. `value(name)` gives a per-token value of the piece's shape, or None; ids are
    counted from its sublane or lane.
    """
    dz = counts = None
    weight, tilt = value("weight"), value("tilt")
    if weight is not None and tilt is not None:
        weight = weight + tilt * jnp.maximum(z - value("expected"), FLOOR)
    if weight is not None or call.filter_threshold:
        p = jnp.exp2(z * value("scale") - value("log_normalizer"))
        dz = None if weight is None else p * weight
        if call.filter_threshold:  # compared so that NaN is never left out
            counts = jnp.where(p < call.filter_threshold, 0.0, 1.0)
    uniform = value("uniform")
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    dz = jnp.zeros_like(z) if dz is None else dz * slope(call, z)
    k = 0
    while (ids := value(f"ids{k}")) is not None:
        g = jnp.where(ids - start == place, value(f"g{k}"), 0.0)
        dz = dz + g
        counts = None if counts is None else jnp.where(g == 0.0, counts, 1.0)
        k += 1
    return dz, counts


def _note(seen: list[Array], counts: Array | None, *masks: Array | None):
    """Appends `counts`, 0 where a mask is False: what lies beyond the edge of an array is not to be looked at."""
    if counts is not None:
        for mask in masks:
            counts = counts if mask is None else jnp.where(mask, counts, 0.0)
        seen.append(counts)


def _any(seen: list[Array]) -> Array | None:
    """Whether any of some pieces of one shape must be added; None without a filter."""
    return jnp.max(functools.reduce(jnp.maximum, seen)) > 0.0 if seen else None


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
                if name not in places:
                    return None
                x = columns_ref[places[name], part, :]
                return x.astype(jnp.int32) - lane if name.startswith("ids") else x

            for i, k in enumerate(range(0, min(count, unit), LANES)):
                z = z_ref[c % 2, part, k : k + LANES]
                z = z if saved else softcapped(call, z)
                dz, counts = _slope_of_logits(call, z, value, c * unit + k, step * columns)
                keep = None if count - k >= LANES else lane < count - k
                dz = dz if keep is None else jnp.where(keep, dz, 0.0)
                _note(seen, counts, keep, exist)
                dz_ref[c % 2, part, i * LANES : (i + 1) * LANES] = dz.astype(dz_ref.dtype)
        return _any(seen)

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
    """Three stages at a time: the logits of unit c + 1, the derivatives of unit c, the sums of unit c − 1.

    `differentiate` may return whether the unit's sums matter.
    """
    units = -(-count // unit)
    counts = [min(unit, count - c * unit) for c in range(units)]
    matters: list[Array | None] = []

    def add(c: int):
        if (condition := matters[c]) is None:
            accumulate(c, counts[c])
        else:
            pl.when(condition)(lambda: accumulate(c, counts[c]))

    multiply(0)
    for c in range(units):
        if c + 1 < units:
            multiply(c + 1)
        matters.append(differentiate(c, counts[c]))
        if c:
            add(c - 1)
    add(units - 1)


def derivatives(
    call: Call,
    places: Places,
    tokens_ref,
    z_ref,
    dz_ref,
    bias_sums_ref,
    *,
    start: Array | int,
    counts: tuple[int, int],
    vocab_size: int,
    saved: bool = False,
) -> Array | None:
    """Writes dz [columns, tokens] of transposed logits, and adds it to `bias_sums_ref` [columns, 128] where given.

    The first column has the index `start`; `counts` of columns and of tokens exist, and dz is 0 beyond them. `saved`:
    the logits were saved, with the soft-cap, also of tokens that are not valid. Returns whether a filter leaves any of
    it to be multiplied; None without a filter.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size = z_ref.shape[0]
    height = 16 if size % 16 == 0 else 8
    seen, exist = [], None
    for group in range(0, min(tokens, z_ref.shape[1]), LANES):
        lanes = pl.ds(group, LANES)

        def value(name: str, lanes=lanes) -> Array:
            row = places[name]
            x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
            return x.astype(jnp.int32) - sublane if name.startswith("ids") else x

        per_token = {name: value(name) for name in places if name != "valid"}
        keep = None if tokens - group >= LANES else lane < tokens - group
        if saved and "valid" in places:
            counted = value("valid") > 0.0
            keep = counted if keep is None else keep & counted
        for k in range(0, size, height):
            pieces = []
            for half in range(k, k + height, 8):
                z = z_ref[half : half + 8, lanes]
                z = z if saved else softcapped(call, z)
                dz, matters = _slope_of_logits(call, z, per_token.get, half, start)
                dz = dz if keep is None else jnp.where(keep, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if call.filter_threshold and vocab_size % size:
                    exist = sublane < vocab_size - start - half
                _note(seen, matters, keep, exist)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)
    return _any(seen)


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


def d_hidden(call: Call, model: Model, signal: Signal, saved: Array | None, blocks: Blocks, interpret) -> Array:
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
        bytes_accessed=(2 * tokens + grid[0] * vocab_size) * width * dtype.itemsize + _bytes(saved),
        transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
        interpret=interpret,
    )(values, hidden if saved is None else saved, unembedding, *(array for array, _ in more))[0]


def _bytes(saved: Array | None) -> int:
    return 0 if saved is None else saved.size * saved.dtype.itemsize


def d_unembedding(
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
    apart = _apart(call, signal)
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
            bytes_accessed=(2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize + _bytes(saved),
            transcendentals=tokens * vocab_size * (1 if call.softcap is None else 2),
            interpret=interpret,
        )(values, hidden, unembedding if saved is None else saved, *(array for array, _ in more))
    )
    d_rows = out.pop(0) if want_rows else None
    d_bias = out.pop(0)[0] if want_bias else None
    if d_bias is not None and apart is not None:
        d_bias = d_bias + jnp.sum(apart)
    return d_rows, d_bias
