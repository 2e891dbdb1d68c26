"""The forward pass: launches the kernel of the statistics alone, or that of the statistics with the rows for dh.

Both walk the grid (token blocks, vocabulary blocks), the vocabulary fastest, with all of D on chip. A vocabulary block
is cut into units: while the matrix unit multiplies one, the vector unit processes the logits of the previous one, in
the same straight-line code, so that neither waits for the other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import ForwardRequest, ForwardResult, Inputs
from calibjax.kernels.logit_cotangents import LOG2_E
from calibjax.kernels.pallas_tpu import common, rows, running, statistics
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.pallas_tpu.exponentials import Exponentials
from calibjax.kernels.softcap import softcap_unit
from calibjax.kernels.stats import Moments


def moments(request: ForwardRequest, inputs: Inputs, blocks: Blocks, interpret: Any) -> ForwardResult:
    """The moments of the whole vocabulary by one kernel: with "rows" needed two products, else one.

    With `save`, which rules out "rows", also the `Exponentials` of all logits.
    """
    options, needed, save = request
    inputs = inputs.masked() if save else inputs  # NaN would be saved
    hidden, unembedding, bias, scale, targets, _ = inputs
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    with_rows, itemsize = "rows" in needed, hidden.dtype.itemsize
    columns = min(blocks.columns, -(-vocab_size // (2 * blocks.unit)) * 2 * blocks.unit)
    blocks = blocks._replace(columns=columns)
    block, in_logits = blocks.tokens, softcap_unit(options.softcap)
    values = [scale * (LOG2_E * in_logits), *([] if targets is None else [common.pack_ids(targets)])]
    count = pl.cdiv(vocab_size, columns)
    grid = (pl.cdiv(tokens, block), count + with_rows)

    def of_step(j: Any) -> Any:
        return jnp.minimum(j, count - 1) if with_rows else j

    per_token = pl.BlockSpec((8, block), lambda i, j: (0, i))
    x_spec, axes = pl.BlockSpec((block, width), lambda i, j: (i, 0)), common.Axes.of(vocab_size, width)
    operands: common.Operands = {
        "tokens": (common.pack(values), per_token),
        "hidden": (hidden, x_spec),
        "unembedding": (axes.ordered(unembedding), axes.block(columns, width, lambda i, j: of_step(j))),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, of_step(j))))
    outputs: common.Operands = {"moments": (jax.ShapeDtypeStruct((8, tokens), jnp.float32), per_token)}
    kernel, kind = statistics.kernel, statistics.Refs
    scratch: dict[str, Any] = {"z": pltpu.VMEM((2, blocks.unit, block), jnp.float32)}
    state, names = (8, block), running.states(needed)
    if with_rows:
        kernel, kind = functools.partial(rows.kernel, has_target=targets is not None), rows.Refs
        once = pl.BlockSpec(x_spec.block_shape, x_spec.index_map, pipeline_mode=pl.Buffered(1))
        operands["hidden"] = (hidden, once)
        outputs["rows"] = (jax.ShapeDtypeStruct(hidden.shape, hidden.dtype), once)
        scratch = rows.scratch(blocks, operands["unembedding"][1].block_shape, hidden.dtype)
        state, names = (block, LANES), (*names, "top")
    if save:
        of_all = jax.ShapeDtypeStruct((vocab_size, tokens), hidden.dtype)
        outputs["saved"] = (of_all, pl.BlockSpec((columns, block), lambda i, j: (j, i)))
        height = 8 * columns // blocks.unit
        of_units = jax.ShapeDtypeStruct((grid[1] * height, tokens), jnp.float32)
        outputs["references"] = (of_units, pl.BlockSpec((height, block), lambda i, j: (j, i)))
    for name in names:
        scratch[f"state_{name}"] = pltpu.VMEM(state, running.dtype(name))
    results = common.pallas(
        functools.partial(kernel, options=options, vocab_size=vocab_size, blocks=blocks),
        functools.partial(running.named, kind),
        common.Launch(
            name="calibjax_statistics_rows" if with_rows else "calibjax_statistics",
            grid=grid,
            vmem=vmem_bytes("rows" if with_rows else "statistics", blocks, width, itemsize, saved=save),
            flops=(4 if with_rows else 2) * tokens * width * vocab_size,
            bytes_accessed=((tokens + grid[0] * vocab_size) * width + save * tokens * vocab_size) * itemsize,
            exponentials=common.exponentials(options, tokens, vocab_size),
            interpret=interpret,
        ),
        operands,
        outputs,
        scratch,
    )
    of_kernel: dict[str, Array] = dict(zip(running.OUTPUTS, results["moments"], strict=False))
    optional = {
        name: of_kernel[name] * in_logits**power
        for name, power in (("first", 1), ("second", 2), ("total", 1), ("target", 1))
        if name in needed
    }
    moments = Moments(
        max_logit=of_kernel["max_logit"] * in_logits,
        argmax=of_kernel["argmax"].astype(jnp.int32) if "argmax" in needed else None,
        weight=of_kernel["weight"],
        rows=results.get("rows"),
        **optional,
    )
    if not save:
        return ForwardResult(moments)
    known = ((targets, moments.target), (moments.argmax, moments.max_logit))
    pairs = tuple((ids, z / in_logits) for ids, z in known if ids is not None and z is not None)
    return ForwardResult(moments, Exponentials(results["saved"], results["references"], pairs))
