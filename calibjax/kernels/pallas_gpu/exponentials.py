"""Not run on a GPU yet: the exponentials of all logits, saved in 16 bits by the kernel of the statistics.

bfloat16 has the range of float32, and rounds by up to 2⁻⁸, as dz in bfloat16 is rounded for its products once more.
At a one-hot that is not enough: in p − 1 all digits of p can cancel. There p and z are those of the statistics.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.kernels.contract import Options
from calibjax.kernels.pallas_gpu.schedule import SLICE


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: bfloat16, N and V padded to whole tiles; at most 0 beyond V. Under a soft-cap, where a logit's slope is
            needed but its exponential underflows, the negative slope may be stored instead: (z/cap)² − 1.
        references: float32, one for each slice of `SLICE` columns and token.
        power: float32 [N], s·log₂e in these units.
        known: pairs of ids int32 [N] and z float32 [N], of columns with a one-hot; ids outside [0, V) match nothing.
    """

    values: Float[Array, "M C"]
    references: Float[Array, "S M"]
    power: Float[Array, " N"]
    known: tuple[tuple[Int[Array, " N"], Float[Array, " N"]], ...]

    def read(
        self, options: Options, log_normalizer: Float[Array, " M"], start: Array | int, count: int
    ) -> tuple[Float[Array, "M c"], Float[Array, "M c"]]:
        """z and exp(s z − lse) of `count` columns from `start` on, both multiples of `SLICE`.

        The error of z is up to 2⁻⁸/s. Where p is 0, z is −inf, or such that its slope under the soft-cap is right to
        2⁻⁸.

        Args:
            options: of the call.
            log_normalizer: lse·log₂e, inf for tokens that do not count.
        """

        def padded(x: Array, value: float = 0) -> Array:
            return jnp.pad(x, (0, self.values.shape[0] - x.size), constant_values=value)

        values = jax.lax.dynamic_slice_in_dim(self.values, start, count, axis=1).astype(jnp.float32)
        references = jax.lax.dynamic_slice_in_dim(self.references, start // SLICE, count // SLICE).T
        power = padded(self.power, 1.0)[:, None]

        def wide(x: Array) -> Array:
            return jnp.broadcast_to(x[:, :, None], (*x.shape, SLICE)).reshape(values.shape)

        z = jnp.log2(values) / power + wide(references)
        if options.softcap is not None:
            z = jnp.where(values < 0.0, jnp.sqrt(1.0 + values), jnp.maximum(z, -1.0))
            values = jnp.maximum(values, 0.0)
        p = values * wide(jnp.exp2(references * power - log_normalizer[:, None]))
        column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        for ids, exact in self.known:
            exact = padded(exact)[:, None]
            here = column == padded(ids - start, -1)[:, None]
            z = jnp.where(here, exact, z)
            p = jnp.where(here, jnp.exp2(exact * power - log_normalizer[:, None]), p)
        return z, p
