"""What the TPU kernels of the backward pass share: `d_hidden`, `d_unembedding`, and `fused`, which is both in one.

Each computes the logits anew, or reads those that were saved, forms dz (see `slopes`) block by block in float32, rounds
it to the inputs' dtype, and multiplies at once. No sum is split between grid steps that could run in
another order: results are the same from run to run.

With `filter_threshold` the second product of a unit, one block of dh's or dW's rows by `Blocks.unit` of what streams
past, runs only where a p of the unit is not below it or a one-hot lies in it: one-hots stay exact. So does the uniform
part without a soft-cap, of rank one: the sums start from it. db is a sum over all dz, exact too. `fused` takes neither
a filter nor saved logits.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from calibjax.kernels.operator import Call, Signal
from calibjax.kernels.pallas_tpu.blocks import LANES
from calibjax.kernels.pallas_tpu.common import pack, pack_ids, softcapped
from calibjax.kernels.slopes import slope_of_logits, values_of_tokens

Places = dict[str, int]  # name of a per-token value -> its row in the packed array


def packed(call: Call, signal: Signal, valid: Array | None) -> tuple[Array, Places]:
    values = values_of_tokens(call, signal)
    values |= {f"ids{k}": pack_ids(ids) for k, (ids, _) in enumerate(signal.one_hots)}
    if valid is not None:
        values["valid"] = valid
    return pack(list(values.values())), {name: row for row, name in enumerate(values)}


def note(seen: list[Array], counts: Array | None, *masks: Array | None):
    """Appends `counts`, 0 where a mask is False: what lies beyond the edge of an array is not to be looked at."""
    if counts is not None:
        for mask in masks:
            counts = counts if mask is None else jnp.where(mask, counts, 0.0)
        seen.append(counts)


def any_of(seen: list[Array]) -> Array | None:
    """Whether any of some pieces of one shape must be added; None without a filter."""
    return jnp.max(functools.reduce(jnp.maximum, seen)) > 0.0 if seen else None


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

                def hit(index: int, place=half, per_token=per_token) -> Array:
                    return per_token[f"ids{index}"] - start == place

                dz, matters = slope_of_logits(call, z, per_token.get, hit)
                dz = dz if keep is None else jnp.where(keep, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if call.filter_threshold and vocab_size % size:
                    exist = sublane < vocab_size - start - half
                note(seen, matters, keep, exist)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)
    return any_of(seen)


def saved_bytes(saved: Array | None) -> int:
    return 0 if saved is None else saved.size * saved.dtype.itemsize
