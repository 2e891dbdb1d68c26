"""Parts that the TPU kernels of the backward pass share: `d_hidden`, `d_unembedding`, and `fused`, which is both.

Each computes the logits again, or reads their saved exponentials, forms dz (`logit_cotangents`) block by block in
float32, rounds it to the inputs' dtype, and multiplies at once. No sum is split between grid steps that could run in
another order: results are the same from run to run.

With `filter_threshold` the second product of a unit, one block of dh's or dW's rows by `Blocks.unit` of what streams
past, runs only where a p of the unit is not below it or a one-hot lies in it: one-hots stay exact. So does the uniform
part without a soft-cap, of rank one: the sums start from it. db is a sum over all dz, exact too. `fused` takes neither
a filter nor saved exponentials.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import Cotangents, Inputs, Options
from calibjax.kernels.logit_cotangents import dz_of_logits, token_values
from calibjax.kernels.pallas_tpu.blocks import LANES
from calibjax.kernels.pallas_tpu.common import column, pack, pack_ids, softcapped
from calibjax.kernels.pallas_tpu.exponentials import Exponentials, Unit

Places = dict[str, int]  # name of a per-token value -> its row in the packed array


class Lengths(NamedTuple):
    """N, V, and how many columns share one reference of saved exponentials."""

    tokens: int
    vocab: int
    unit_saved: int


def packed(
    options: Options, inputs: Inputs, cotangents: Cotangents, saved: Exponentials | None = None
) -> tuple[Array, Places]:
    """`token_values` as rows of one array, and the row of each name.

    With `saved` "dz{k}", dz at the k-th of its known columns, takes the place of "g{k}".
    """
    values, one_hots = token_values(options, inputs, cotangents), cotangents.one_hots
    if saved is not None:
        values = {name: x for name, x in values.items() if not name.startswith("g")}
        for k, (ids, z) in enumerate(saved.known):
            dz, _ = dz_of_logits(options, z, values.get, lambda _: jnp.array(False))
            values[f"dz{k}"] = sum((jnp.where(other == ids, g, 0.0) for other, g in one_hots), dz)
        one_hots = saved.known
    values |= {f"ids{k}": pack_ids(ids) for k, (ids, _) in enumerate(one_hots)}
    if inputs.valid is not None:
        values["valid"] = inputs.valid
    return pack(list(values.values())), {name: row for row, name in enumerate(values)}


def masking(valid: Array | None, block: int) -> dict[str, Any]:
    """The operand `clears` of a kernel that calls `clear`: for each block of tokens, whether some do not count."""
    if valid is None:
        return {}
    blocks = jnp.pad(valid, (0, -valid.shape[0] % block)).reshape(-1, block)
    return {"clears": (jnp.any(~blocks, axis=1).astype(jnp.int32), pl.BlockSpec(memory_space=pltpu.SMEM))}


def clear(places: Places, refs) -> None:
    """Writes zeros over the hidden states, on the chip, of tokens that do not count, in the blocks that have some.

    Such a token may hold NaN, and 0·NaN would reach every row of dW.
    """
    if refs.clears is None:
        return

    @pl.when(refs.clears[pl.program_id(1)] > 0)
    def _():
        counts = column(refs.tokens, places["valid"])[:, :1] > 0.0
        refs.hidden[...] = jnp.where(counts, refs.hidden[...], jnp.zeros_like(refs.hidden))


def note(seen: list[Array], counts: Array | None, *masks: Array | None):
    """Appends `counts`, 0 where a mask is False: columns and tokens beyond the edge of an array are ignored."""
    if counts is not None:
        for mask in masks:
            counts = counts if mask is None else jnp.where(mask, counts, 0.0)
        seen.append(counts)


def any_of(seen: list[Array]) -> Array | None:
    """Whether any of some pieces of one shape must be added; None without a filter."""
    return jnp.max(functools.reduce(jnp.maximum, seen)) > 0.0 if seen else None


def pipeline(unit: int, multiply, differentiate, accumulate, count: int):
    """Three stages at a time: the logits of unit c + 1, the derivatives of unit c, the sums of unit c − 1.

    `differentiate` may return whether the unit's sums are needed.
    """
    units = -(-count // unit)
    counts = [min(unit, count - c * unit) for c in range(units)]
    needed: list[Array | None] = []

    def add(c: int):
        if (condition := needed[c]) is None:
            accumulate(c, counts[c])
        else:
            pl.when(condition)(lambda: accumulate(c, counts[c]))

    multiply(0)
    for c in range(units):
        if c + 1 < units:
            multiply(c + 1)
        needed.append(differentiate(c, counts[c]))
        if c:
            add(c - 1)
    add(units - 1)


def write_dz(
    options: Options,
    places: Places,
    tokens_ref,
    z_ref,
    dz_ref,
    bias_sums_ref,
    *,
    start: Array | int,
    counts: tuple[int, Array | int],
    vocab_size: int,
    references: Any = None,
    unit: int = 0,
) -> Array | None:
    """Writes dz [columns, tokens] of transposed logits, and adds it to `bias_sums_ref` [columns, 128] where given.

    The first column has the index `start`; `counts` of columns and of tokens exist, and dz is 0 beyond them. With
    `references`, of `unit` columns each, `z_ref` has `Exponentials.values`. Returns whether any of it must be
    multiplied; None without a filter.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size, width = z_ref.shape
    height = 16 if size % 16 == 0 else 8
    seen, exist = [], None
    for group in range(0, min(tokens, width) if isinstance(tokens, int) else width, LANES):
        lanes = pl.ds(group, LANES)

        def value(name: str, lanes=lanes) -> Array:
            row = places[name]
            x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
            return x.astype(jnp.int32) - sublane if name.startswith("ids") else x

        per_token = {name: value(name) for name in places if name != "valid"}
        keep = None if isinstance(tokens, int) and tokens - group >= LANES else lane < tokens - group
        of_unit = None
        for k in range(0, size, height):
            pieces = []
            if references is not None and k % unit == 0:
                of_unit = Unit.of(options, references[k // unit * 8 : k // unit * 8 + 8, lanes], per_token)
            rows = z_ref[k : k + height, lanes].astype(jnp.float32)
            for half in range(k, k + height, 8):

                def hit(index: int, place=half, per_token=per_token) -> Array:
                    return per_token[f"ids{index}"] - start == place

                z = rows[half - k : half - k + 8]
                if of_unit is None:
                    dz, added = dz_of_logits(options, softcapped(options, z), per_token.get, hit)
                else:
                    dz, added = of_unit.dz(options, z, hit)
                dz = dz if keep is None else jnp.where(keep, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if options.filter_threshold and vocab_size % size:
                    exist = sublane < vocab_size - start - half
                note(seen, added, keep, exist)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)
    return any_of(seen)
