"""TPU kernel of the backward pass for dW and db: sums [columns, D] stay on chip while the tokens stream past.

The logits are transposed, so that per-token values lie along lanes and dz is already the left operand of dzᵀ·h.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from calibjax.kernels.contract import Cotangents, Gradients, Inputs, Options, Refs
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.backward import Exponentials, Places, clear, masking, packed, pipeline, write_dz
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes


def _kernel(
    refs: Refs, *, options: Options, lengths: tuple[int, int], blocks: Blocks, unit_saved: int, places: Places
) -> None:
    # With `saved` [columns, tokens] there are no `unembedding` and `z`. Without `sums`, `d_unembedding` is float32 and
    # starts as `before`. `lengths`: N and V.
    block, unit = blocks.tokens, blocks.unit
    columns, width = blocks.columns, refs.hidden.shape[1]
    start = pl.program_id(0) * columns
    step, steps = pl.program_id(1), pl.num_programs(1)
    sums = refs.d_unembedding if refs.sums is None else refs.sums
    axes = common.Axes.of(lengths[1], width)

    @pl.when(step == 0)
    def _():
        for ref in (refs.sums, refs.bias_sums):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if refs.before is not None:
            sums[...] = refs.before[...]

    clear(places, refs)

    def multiply(c: int):
        if refs.saved is not None:
            return
        z = common.product(options, refs.unembedding[...], refs.hidden[pl.ds(c * unit, unit), :], (axes.width, 1))
        if refs.bias is not None:
            turned = jnp.broadcast_to(refs.bias[...], (LANES, columns)).T
            z = z + jnp.concatenate([turned] * (unit // LANES), axis=1)
        refs.z[c % 2] = z

    def differentiate(c: int, count: int):
        lanes = pl.ds(c * unit, unit)
        write_dz(
            options,
            places,
            refs.tokens.at[:, lanes],
            refs.z.at[c % 2] if refs.saved is None else refs.saved.at[:, lanes],
            refs.dz.at[c % 2],
            refs.bias_sums,
            start=start,
            counts=(columns, count),
            references=refs.references,
            unit=unit_saved,
        )

    def accumulate(c: int, count: int):
        if sums is None:
            return
        size = min(unit, -(-count // LANES) * LANES)
        for part in common.slices(width):
            x = common.existing(refs.hidden[pl.ds(c * unit, size), part], count)
            axes.add(options, sums, part, refs.dz[c % 2, :, :size], x)

    stages = functools.partial(pipeline, unit, multiply, differentiate, accumulate)
    common.walk_blocks(lengths[0], block, step, stages)

    @pl.when(step == steps - 1)
    def _():
        if refs.sums is not None:
            refs.d_unembedding[...] = refs.sums[...].astype(refs.d_unembedding.dtype)
        if refs.d_bias is not None:
            refs.d_bias[...] = jnp.sum(refs.bias_sums[...].T, axis=0, keepdims=True)


def gradients(
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Exponentials | None,
    into: Gradients | None,
    sizes: tuple[Blocks, int, int],
    interpret: Any,
) -> Gradients:
    """dW [V, D] in the dtype of the unembedding and db float32 [V], where wanted; added to `into`, dW in float32.

    `saved`: see `forward.moments`. `sizes`: the blocks, how many columns share one reference of `saved`, and how often
    a block of `into` is on the chip.
    """
    blocks, unit_saved, buffers = sizes
    hidden, unembedding, bias = inputs[:3]
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    columns = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    block = -(-blocks.tokens // blocks.unit) * blocks.unit
    blocks = blocks._replace(columns=columns, tokens=block)
    values, places = packed(options, inputs, cotangents, saved)
    read_bytes = 0 if saved is None else saved.values.size * hidden.dtype.itemsize
    want_rows, want_bias, dtype = "unembedding" in wanted, "bias" in wanted, unembedding.dtype
    before = None if into is None else into.unembedding
    grid = (pl.cdiv(vocab_size, columns), pl.cdiv(tokens, block))
    axes = common.Axes.of(vocab_size, width)
    w_spec = axes.block(columns, width, lambda j, i: j)
    before_spec = axes.block(columns, width, lambda j, i: j, pipeline_mode=pl.Buffered(buffers))
    bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    operands: common.Operands = {
        "tokens": (values, pl.BlockSpec((len(values), block), lambda j, i: (0, i))),
        "hidden": (hidden, pl.BlockSpec((block, width), lambda j, i: (i, 0))),
        **masking(inputs.valid, block),
    }
    outputs: common.Operands = {}
    scratch: dict[str, Any] = {}
    if saved is None:
        operands["unembedding"] = (axes.ordered(unembedding), w_spec)
        scratch["z"] = pltpu.VMEM((2, columns, blocks.unit), jnp.float32)
    else:
        operands |= saved.operands(columns, block, unit_saved, lambda j, i: (j, i))
    if bias is not None and saved is None:
        operands["bias"] = (bias[None, :], bias_spec)
    scratch["dz"] = pltpu.VMEM((2, columns, blocks.unit), dtype)
    if want_rows:
        outputs["d_unembedding"] = (jax.eval_shape(axes.ordered, unembedding if before is None else before), w_spec)
        if before is None:
            scratch["sums"] = pltpu.VMEM(w_spec.block_shape, jnp.float32)
        else:
            operands["before"] = (axes.ordered(before), before_spec)
    if want_bias:
        outputs["d_bias"] = (jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), bias_spec)
        scratch["bias_sums"] = pltpu.VMEM((columns, LANES), jnp.float32)
    static = {"options": options, "lengths": (tokens, vocab_size), "blocks": blocks, "places": places}
    # The interpreter returns an aliased result with the padding of its last block.
    in_place = "before" in operands and not (interpret and vocab_size % columns)
    results = common.pallas(
        functools.partial(_kernel, **static, unit_saved=unit_saved),
        common.Launch(
            name="calibjax_d_unembedding",
            grid=grid,
            vmem=vmem_bytes("unembedding", blocks, width, dtype.itemsize, saved=saved is not None, before=buffers),
            flops=(4 if saved is None else 2) * tokens * width * vocab_size,
            bytes_accessed=(2 * vocab_size + grid[0] * tokens) * width * dtype.itemsize + read_bytes,
            exponentials=common.exponentials(options, tokens, vocab_size),
            interpret=interpret,
        ),
        operands,
        outputs,
        scratch,
        aliases={"before": "d_unembedding"} if in_place else {},
    )
    d_bias = None
    if want_bias:
        d_bias = results["d_bias"][0]
        d_bias = d_bias if into is None or into.bias is None else d_bias + into.bias
    return Gradients(None, axes.ordered(results["d_unembedding"]) if want_rows else None, d_bias)
