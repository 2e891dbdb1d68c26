"""What the TPU kernels share: products, rows of per-token values, the call itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.pallas_tpu.blocks import LANES, UNPLANNED

NEVER = -(2**30)  # an index that no column of the vocabulary has


def product(call, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product over one dimension of each, in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=call.precision, preferred_element_type=jnp.float32)


def pack(rows: Sequence[Array]) -> Array:
    """Per-token values as the rows of one float32 [8k, N]: tokens along lanes, the layout that costs no padding."""
    rows = [*rows, *([jnp.zeros_like(rows[0], jnp.float32)] * (-len(rows) % 8))]
    return jnp.stack([row.astype(jnp.float32) for row in rows])


def pack_ids(ids: Array) -> Array:
    """Vocabulary indices as float32, exact below 2²⁴; negative ones as one that never matches."""
    return jnp.where(ids < 0, NEVER, ids).astype(jnp.float32)


def column(ref, row: int) -> Array:
    """A row [1, n] of per-token values as a column repeated over lanes, [n, 128]."""
    return jnp.broadcast_to(ref[row : row + 1, :], (LANES, ref.shape[1])).T


def softcapped(call, z: Array) -> Array:
    """The logits in units of the soft-cap, tanh(z/cap), so that no step multiplies by it; without one, unchanged."""
    return z if call.softcap is None else jnp.tanh(z * (1.0 / call.softcap))


def finite(z: Array, has_bias: bool) -> Array:
    """Logits with the −inf of a bias replaced by a number whose exponential is 0 too."""
    return jnp.maximum(z, stats.FLOOR) if has_bias else z


def walk_blocks(total: int, size: int, step: Array, walk: Callable[[int], None]) -> int:
    """Traces `walk(rows of this block)` for full blocks and, where they do not divide `total`, for the last.

    Returns the rows of the last block.
    """
    steps = -(-total // size)
    last = total - (steps - 1) * size
    if last == size:
        walk(size)
    elif steps == 1:
        walk(last)
    else:
        pl.when(step < steps - 1)(lambda: walk(size))
        pl.when(step == steps - 1)(lambda: walk(last))
    return last


def pallas(
    kernel,
    *,
    name: str,
    grid: tuple[int, int],
    in_specs: list[Any],
    out_specs: list[Any],
    out_shape: list[Any],
    scratch: list[Any],
    vmem: int,
    flops: int,
    bytes_accessed: int,
    transcendentals: int,
    interpret: Any,
    split: bool = True,
    aliases: Mapping[int, int] | None = None,
):
    """`pl.pallas_call`; with `split`, the first grid dimension over the cores of a chip (v5p has two).

    `aliases`: input -> output that takes its place.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        interpret=interpret,
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if split else "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem * 9 // 8 + UNPLANNED,
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=bytes_accessed, transcendentals=transcendentals),
    )
