"""The exponentials of all logits, saved by the kernel of the statistics in the inputs' dtype for later products.

bfloat16 has the range of float32, and rounds by up to 2⁻⁸, as dz in bfloat16 is rounded for its products once more.
At a one-hot that is not enough: in p − 1 all digits of p can cancel. There dz is computed from the exact logit.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from calibjax.kernels.contract import Options
from calibjax.kernels.logit_cotangents import LOG2_E, dz_of_logits
from calibjax.kernels.softcap import slope_in_units

LEAST = 2.0**-120
"""Of smaller exponentials, under a soft-cap, the slope of the logit is saved instead."""


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: in the inputs' dtype, transposed. Under a soft-cap, where a logit's slope is needed but its exponential
            is below `LEAST`, the negative slope is stored instead: (z/cap)² − 1.
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


class Unit(NamedTuple):
    """What dz needs beside the saved exponentials of a unit of columns; all arrays have the shape of its pieces.

    Attributes:
        reference: see `Exponentials`.
        factor: exp(s reference − lse), and where p has no other use, times the cotangent `softmax`.
        inverse: 1/s in units of the soft-cap, or None where neither z nor its slope is needed.
        values: name -> per-token value, see `token_values`; "dz{k}" is dz at the k-th of the known columns.
    """

    reference: Array
    factor: Array
    inverse: Array | None
    values: Mapping[str, Array]

    @classmethod
    def of(cls, options: Options, reference: Array, values: Mapping[str, Array]) -> "Unit":
        """From the references and the values of the tokens."""
        factor = jnp.exp2(reference * values["scale"] - values["log_normalizer"])
        needs_logits = options.softcap is not None or "centred" in values
        if "softmax" in values and "centred" not in values and not options.filter_threshold:
            factor, values = factor * values["softmax"], {**values, "softmax": jnp.ones_like(factor)}
        return cls(reference, factor, LOG2_E / values["scale"] if needs_logits else None, values)

    def dz(
        self, options: Options, saved: Array, hit: Callable[[int], Array]
    ) -> tuple[Float[Array, "8 128"], Float[Array, "8 128"] | None]:
        """As `dz_of_logits`, from `Exponentials.values` in float32; `hit`: whether a column is the k-th known one."""
        p, slope = saved * self.factor, None
        z = p
        if self.inverse is not None:
            # Off by up to 2⁻⁸/s, and any number where p is 0.
            size = jnp.abs(saved)
            z = jnp.log(size) * self.inverse + self.reference
            if options.softcap is not None:
                z = jnp.maximum(z, -1.0)
                slope = jnp.where(saved < 0.0, size, slope_in_units(z, options.softcap))
                p = jnp.maximum(saved, 0.0) * self.factor
        dz, added = dz_of_logits(options, z, self.values.get, hit, p, slope)
        k = 0
        while (exact := self.values.get(f"dz{k}")) is not None:
            dz = jnp.where(hit(k), exact, dz)
            added = None if added is None else jnp.where(hit(k) & (exact != 0.0), 1.0, added)
            k += 1
        return dz, added
