"""Parts that the TPU kernels of the backward pass share: `d_hidden`, `d_unembedding`, and `fused`, which is both.

Each computes the logits again, or reads their saved exponentials, forms dz (`logit_cotangents`) block by block in
float32, rounds it to the inputs' dtype, and multiplies at once. No sum is split between grid steps that could run in
another order: results are the same from run to run.

Saved exponentials (`Exponentials`) have the inputs' dtype. bfloat16 has the range of float32, and rounds by up to 2⁻⁸,
as dz is rounded for its products once more. At a one-hot that is not enough: in p − 1 all digits of p can cancel. There
dz is computed from the exact logit.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from calibjax.kernels.contract import Cotangents, Inputs, Options, Refs
from calibjax.kernels.logit_cotangents import LOG2_E, dz_of_logits, token_values
from calibjax.kernels.pallas_tpu.blocks import LANES
from calibjax.kernels.pallas_tpu.common import column, pack, pack_ids, softcapped
from calibjax.kernels.stats import slope_in_units

Places = dict[str, int]  # name of a per-token value -> its row in the packed array


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: in the inputs' dtype, transposed. Under a soft-cap, where a logit's slope is needed but its exponential
            is below `common.LEAST`, the negative slope is stored instead: (z/cap)² − 1.
        references: float32, eight rows for each unit of columns: row v mod 8 is that of column v. There may be more
            rows than V needs.
        known: pairs of ids int32 [N] and z float32 [N], of columns that may have a one-hot; ids outside [0, V) match
            nothing.
    """

    values: Float[Array, "V N"]
    references: Float[Array, "R N"]
    known: tuple[tuple[Int[Array, " N"], Float[Array, " N"]], ...]

    def operands(
        self, columns: int, tokens: int, unit: int, index: Callable[..., tuple[Any, Any]]
    ) -> dict[str, tuple[Array, Any]]:
        """ "saved" and "references" of a kernel, by blocks of `columns` by `tokens` with that `index`, and references
        of `unit` columns each.

        Where a block has fewer columns than a unit, several have the same references.
        """

        def of_unit(*step: Any) -> tuple[Any, Any]:
            column, token = index(*step)
            return column // max(unit // columns, 1), token

        rows = 8 * -(-columns // unit)
        return {
            "saved": (self.values, pl.BlockSpec((columns, tokens), index)),
            "references": (self.references, pl.BlockSpec((rows, tokens), of_unit)),
        }


def dz_of_unit(
    options: Options, reference: Array, values: Mapping[str, Array]
) -> Callable[[Array, Callable[[int], Array]], Array]:
    """`(saved, hit) -> dz` for a unit of columns, all of the shape of its pieces.

    `saved` are `Exponentials.values` in float32, `hit` says whether a column is the k-th known one. `values` are the
    per-token values, see `token_values`; "dz{k}" is dz at the k-th of the known columns.
    """
    # exp(s reference − lse), and where p has no other use, times the cotangent `softmax`.
    factor = jnp.exp2(reference * values["scale"] - values["log_normalizer"])
    if "softmax" in values and "centred" not in values:
        factor, values = factor * values["softmax"], {**values, "softmax": jnp.ones_like(factor)}
    needs_logits = options.softcap is not None or "centred" in values
    inverse = LOG2_E / values["scale"] if needs_logits else None

    def dz_of(saved: Array, hit: Callable[[int], Array]) -> Array:
        p, slope = saved * factor, None
        z = p
        if inverse is not None:
            # Off by up to 2⁻⁸/s, and any number where p is 0.
            size = jnp.abs(saved)
            z = jnp.log(size) * inverse + reference
            if options.softcap is not None:
                z = jnp.maximum(z, -1.0)
                slope = jnp.where(saved < 0.0, size, slope_in_units(z, options.softcap))
                p = jnp.maximum(saved, 0.0) * factor
        dz, k = dz_of_logits(options, z, values.get, hit, p, slope), 0
        while (exact := values.get(f"dz{k}")) is not None:
            dz = jnp.where(hit(k), exact, dz)
            k += 1
        return dz

    return dz_of


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
            dz = dz_of_logits(options, z, values.get, lambda _: jnp.array(False))
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


def clear(places: Places, refs: Refs) -> None:
    """Writes zeros over the hidden states, on the chip, of tokens that do not count, in the blocks that have some.

    Such a token may hold NaN, and 0·NaN would reach every row of dW.
    """
    if refs.clears is None:
        return

    @pl.when(refs.clears[pl.program_id(1)] > 0)
    def _():
        counts = column(refs.tokens, places["valid"])[:, :1] > 0.0
        refs.hidden[...] = jnp.where(counts, refs.hidden[...], jnp.zeros_like(refs.hidden))


def pipeline(unit: int, multiply: Callable, differentiate: Callable, accumulate: Callable, count: int) -> None:
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


def write_dz(
    options: Options,
    places: Places,
    tokens_ref: Any,
    z_ref: Any,
    dz_ref: Any,
    bias_sums_ref: Any,
    *,
    start: Array | int,
    counts: tuple[int, int],
    references: Any = None,
    unit: int = 0,
) -> None:
    """Writes dz [columns, tokens] of transposed logits, and adds it to `bias_sums_ref` [columns, 128] where given.

    The first column has the index `start`; `counts` of columns and of tokens exist, and dz is 0 beyond them. With
    `references`, of `unit` columns each, `z_ref` has `Exponentials.values`.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size, width = z_ref.shape
    height = 16 if size % 16 == 0 else 8
    for group in range(0, min(tokens, width), LANES):
        lanes = pl.ds(group, LANES)

        def value(name: str, lanes=lanes) -> Array:
            row = places[name]
            x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
            return x.astype(jnp.int32) - sublane if name.startswith("ids") else x

        per_token = {name: value(name) for name in places if name != "valid"}
        dz_of = None
        for k in range(0, size, height):
            pieces = []
            if references is not None and k % unit == 0:
                dz_of = dz_of_unit(options, references[k // unit * 8 : k // unit * 8 + 8, lanes], per_token)
            rows = z_ref[k : k + height, lanes].astype(jnp.float32)
            for half in range(k, k + height, 8):

                def hit(index: int, place=half, per_token=per_token) -> Array:
                    return per_token[f"ids{index}"] - start == place

                z = rows[half - k : half - k + 8]
                if dz_of is None:
                    dz = dz_of_logits(options, softcapped(options, z), per_token.get, hit)
                else:
                    dz = dz_of(z, hit)
                dz = dz if tokens - group >= LANES else jnp.where(lane < tokens - group, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)
