"""The forward pass: launches the kernel of the statistics alone, with the expected row for dh, or at K scales.

They walk the grid (token blocks, vocabulary blocks), the vocabulary fastest, with all of D on chip. A vocabulary block
is cut into units: while the matrix unit multiplies one, the vector unit processes the logits of the previous one, in
the same straight-line code, so that neither waits for the other.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import LOG2_E, Inputs, Options
from calibjax.kernels.pallas_tpu import common, expected_row, statistics
from calibjax.kernels.pallas_tpu.backward import Exponentials
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.statistics import OUTPUTS, SUMS
from calibjax.kernels.stats import Moments, octaves, softcap_unit
from calibjax.runtime.arrays import round_up


def moments(
    options: Options, needed: frozenset[str], save: bool, inputs: Inputs, kind: str, blocks: Blocks, interpret: Any
) -> tuple[Moments, Exponentials | None]:
    """The moments of the whole vocabulary by the kernel `kind`, a key of `blocks.PREFERENCES`.

    With `save`, for "statistics" only, the second result has the `Exponentials` of all logits.
    """
    inputs = inputs.masked() if save else inputs  # NaN would be saved
    hidden, unembedding, bias, scale, targets, _ = inputs
    tokens, width = hidden.shape
    vocab_size = unembedding.shape[0]
    columns = min(blocks.columns, round_up(vocab_size, 2 * blocks.unit))
    blocks = blocks._replace(columns=columns)
    block = blocks.tokens
    in_logits = softcap_unit(options.softcap)
    powers = tuple(s * (LOG2_E * in_logits) for s in options.scales or ())
    values = [scale * (LOG2_E * in_logits), *([] if targets is None else [common.pack_ids(targets)])]
    count = pl.cdiv(vocab_size, columns)
    grid = (pl.cdiv(tokens, block), count + (kind != "statistics"))

    def vocab_block(j: Any) -> Any:
        return j if kind == "statistics" else jnp.minimum(j, count - 1)

    per_token = pl.BlockSpec((8, block), lambda i, j: (0, i))
    axes = common.Axes.of(vocab_size, width)
    buffers = {"pipeline_mode": pl.Buffered(1)} if kind == "expected_row" else {}
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0), **buffers)
    w_spec = axes.block(columns, width, lambda i, j: vocab_block(j))
    operands: common.Operands = {
        "tokens": (common.pack(values), per_token),
        "hidden": (hidden, x_spec),
        "unembedding": (axes.ordered(unembedding), w_spec),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, vocab_block(j))))
    outputs: common.Operands = {"moments": (jax.ShapeDtypeStruct((8, tokens), jnp.float32), per_token)}
    if kind == "expected_row":
        outputs["expected_row"] = (jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), x_spec)
    if kind == "curves":
        height = round_up(len(SUMS) * len(powers), 8)
        at_scales = jax.ShapeDtypeStruct((height, tokens), jnp.float32)
        outputs["at_scales"] = (at_scales, pl.BlockSpec((height, block), lambda i, j: (0, i)))
    if save:
        values_shape = jax.ShapeDtypeStruct((vocab_size, tokens), hidden.dtype)
        outputs["saved"] = (values_shape, pl.BlockSpec((columns, block), lambda i, j: (j, i)))
        height = 8 * columns // blocks.unit
        references_shape = jax.ShapeDtypeStruct((grid[1] * height, tokens), jnp.float32)
        outputs["references"] = (references_shape, pl.BlockSpec((height, block), lambda i, j: (j, i)))
    kernels = {"statistics": statistics.kernel, "expected_row": expected_row.kernel, "curves": statistics.at_scales}
    kernel: Any = kernels[kind]
    sizes: dict[str, Any] = {"powers": powers} if kind == "curves" else {"blocks": blocks}
    results = common.pallas(
        functools.partial(kernel, options=options, vocab_size=vocab_size, **sizes),
        operands,
        outputs,
        _scratch(kind, needed, blocks, w_spec.block_shape, hidden.dtype, targets is not None, len(powers)),
        vmem_bytes(kind, blocks, width, hidden.dtype.itemsize, saved=save, count=max(len(powers), 1)),
        name=f"calibjax_{kind}",
        grid=grid,
        interpret=interpret,
        cost_estimate=common.cost(
            options,
            inputs,
            products=2 if kind == "expected_row" else 1,
            rows=tokens + grid[0] * vocab_size,
            saved=save,
            exponentials=max(len(powers), 1) // octaves(powers),
        ),
    )
    moments = _unpacked(results, needed, in_logits, len(powers))
    if not save:
        return moments, None
    known = ((targets, moments.target), (moments.argmax, moments.max_logit))
    pairs = tuple((ids, z / in_logits) for ids, z in known if ids is not None and z is not None)
    return moments, Exponentials(results["saved"], results["references"], pairs)


def _scratch(
    kind: str, needed: frozenset[str], blocks: Blocks, w_block: tuple[int, int], dtype: Any, target: bool, nodes: int
) -> dict[str, Any]:
    block, columns, unit = blocks
    names = statistics.running(needed)
    state = (block, LANES) if kind == "expected_row" else (8, block)
    if kind == "statistics":
        scratch = {"z": pltpu.VMEM((2, unit, block), jnp.float32)}
    elif kind == "curves":
        names = tuple(name for name in names if name not in SUMS)
        scratch = {
            "z": pltpu.VMEM((2, columns, block), jnp.float32),  # of this block and of the one before
            "sums": pltpu.VMEM((len(SUMS), nodes, 8, block), jnp.float32),
        }
    else:
        names = (*names, "top")
        scratch = {
            "z": pltpu.VMEM((columns // unit, block, unit), jnp.float32),
            "e": pltpu.VMEM((2, block, unit), dtype),
            "previous": pltpu.VMEM(w_block, dtype),
            "far": pltpu.SMEM((1,), jnp.float32),
            "sums": pltpu.VMEM((block, math.prod(w_block) // columns), jnp.float32),
            "scale": pltpu.VMEM((block, LANES), jnp.float32),
        }
        scratch |= {"target": pltpu.VMEM((block, LANES), jnp.int32)} if target else {}
    dtypes = {"argmax": jnp.int32}
    return scratch | {f"state_{name}": pltpu.VMEM(state, dtypes.get(name, jnp.float32)) for name in names}


def _unpacked(results: dict[str, Array], needed: frozenset[str], in_logits: float, nodes: int) -> Moments:
    """The moments from the results of a kernel, which are in units of the soft-cap."""
    named: dict[str, Array] = dict(zip(OUTPUTS, results["moments"], strict=False))
    if nodes:
        at_scales = results["at_scales"][: len(SUMS) * nodes].reshape(len(SUMS), nodes, -1)
        named |= {name: x.T for name, x in zip(SUMS, at_scales, strict=True)}
    powers = {"first": 1, "second": 2, "total": 1, "target": 1}
    return Moments(
        max_logit=named["max_logit"] * in_logits,
        argmax=named["argmax"].astype(jnp.int32) if "argmax" in needed else None,
        weight=named["weight"],
        expected_row=results.get("expected_row"),
        **{name: named[name] * in_logits**power for name, power in powers.items() if name in needed},
    )
