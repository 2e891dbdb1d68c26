"""TPU kernel of the backward pass for dh: sums [tokens, D] stay on chip while the vocabulary streams past."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import Cotangents, Inputs, Options, Refs
from calibjax.kernels.logit_cotangents import dz_of_logits
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.backward import Exponentials, Places, packed, pipeline, write_dz
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes


def _kernel(refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks, unit_saved: int, places: Places) -> None:
    # With `saved` [columns, tokens] there are no `hidden` and `z`, and dz is transposed.
    columns, unit = blocks.columns, blocks.unit
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens, width = refs.sums.shape
    axes = common.Axes.of(vocab_size, width)

    @pl.when(step == 0)
    def _():
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
        for row in places.values():
            refs.columns[row] = common.column(refs.tokens, row)

    def multiply(c: int):
        if refs.saved is not None:
            return
        unit_columns = pl.ds(c * unit, unit)
        z = common.product(options, refs.hidden[...], axes.rows(refs.unembedding, unit_columns), (1, axes.width))
        refs.z[c % 2] = z if refs.bias is None else z + refs.bias[:, unit_columns]

    def differentiate(c: int, count: int):
        start = step * columns + c * unit
        if refs.saved is None:
            return _write_dz(refs, options, places, c % 2, start, min(count, unit))
        return write_dz(
            options,
            places,
            refs.tokens,
            refs.saved.at[pl.ds(c * unit, unit), :],
            refs.dz.at[c % 2],
            None,
            start=start,
            counts=(count, tokens),
            references=refs.references.at[pl.ds(c * unit // unit_saved * 8, -(-unit // unit_saved) * 8), :],
            unit=unit_saved,
        )

    def accumulate(c: int, count: int):
        size = min(unit, -(-count // LANES) * LANES)
        dz = refs.dz[c % 2, :, :size] if refs.saved is None else refs.dz[c % 2, :size, :].T
        for part in common.slices(width):
            w = common.existing(axes.rows(refs.unembedding, pl.ds(c * unit, size), part), count, axes.vocab)
            refs.sums[:, part] += common.product(options, dz, w, (1, axes.vocab))

    stages = functools.partial(pipeline, unit, multiply, differentiate, accumulate)
    common.walk_blocks(vocab_size, columns, step, stages)

    @pl.when(step == steps - 1)
    def _():
        sums = refs.sums[...]
        if "valid" in places:
            sums = jnp.where(refs.columns[places["valid"]][:, :1] > 0.0, sums, 0.0)
        refs.d_hidden[...] = sums.astype(refs.d_hidden.dtype)


def _write_dz(refs: Refs, options: Options, places: Places, slot: int, start: Array, count: int) -> None:
    """Writes dz [tokens, columns] of the logits in `slot`, of which `count` columns exist, from `start` on."""
    tokens = refs.sums.shape[0]
    group = min(64, tokens)
    lane = jax.lax.broadcasted_iota(jnp.int32, (group, LANES), 1)
    for first in range(0, tokens, group):
        part = pl.ds(first, group)

        def value(name: str, part=part) -> Array | None:
            return refs.columns[places[name], part, :] if name in places else None

        for k in range(0, count, LANES):
            z = common.softcapped(options, refs.z[slot, part, k : k + LANES])

            def hit(index: int, place=k, part=part) -> Array:
                ids = refs.columns[places[f"ids{index}"], part, :].astype(jnp.int32) - lane
                return ids - start == place

            dz = dz_of_logits(options, z, value, hit)
            dz = dz if count - k >= LANES else jnp.where(lane < count - k, dz, 0.0)
            refs.dz[slot, part, k : k + LANES] = dz.astype(refs.dz.dtype)


def gradient(
    options: Options,
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Exponentials | None,
    sizes: tuple[Blocks, int],
    interpret: Any,
) -> Array:
    """dh [N, D] in the dtype of the hidden states; 0 where a token is not valid.

    `saved`: see `forward.moments`. `sizes`: the blocks, and how many columns share one reference of `saved`.
    """
    blocks, unit_saved = sizes
    hidden, unembedding, bias = inputs[:3]
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    blocks = blocks._replace(columns=min(blocks.columns, -(-vocab_size // blocks.unit) * blocks.unit))
    values, places = packed(options, inputs, cotangents, saved)
    read_bytes = 0 if saved is None else saved.values.size * hidden.dtype.itemsize
    block, columns, dtype = blocks.tokens, blocks.columns, hidden.dtype
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    operands: common.Operands = {"tokens": (values, pl.BlockSpec((len(values), block), lambda i, j: (0, i)))}
    if saved is None:
        operands["hidden"] = (hidden, x_spec)
    else:
        operands |= saved.operands(columns, block, unit_saved, lambda i, j: (j, i))
    axes = common.Axes.of(vocab_size, width)
    operands["unembedding"] = (axes.ordered(unembedding), axes.block(columns, width, lambda i, j: j))
    if bias is not None and saved is None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, j)))
    static = {"options": options, "vocab_size": vocab_size, "blocks": blocks, "places": places}
    return common.pallas(
        functools.partial(_kernel, **static, unit_saved=unit_saved),
        common.Launch(
            name="calibjax_d_hidden",
            grid=grid,
            vmem=vmem_bytes("d_hidden", blocks, width, dtype.itemsize, saved=saved is not None),
            flops=(4 if saved is None else 2) * tokens * width * vocab_size,
            bytes_accessed=(2 * tokens + grid[0] * vocab_size) * width * dtype.itemsize + read_bytes,
            exponentials=common.exponentials(options, tokens, vocab_size),
            interpret=interpret,
        ),
        operands,
        {"d_hidden": (jax.ShapeDtypeStruct(hidden.shape, dtype), x_spec)},
        {
            "dz": pltpu.VMEM((2, block, blocks.unit) if saved is None else (2, blocks.unit, block), dtype),
            "sums": pltpu.VMEM((block, width), jnp.float32),
            "columns": pltpu.VMEM((len(values), block, LANES), jnp.float32),
            **({"z": pltpu.VMEM((2, block, blocks.unit), jnp.float32)} if saved is None else {}),
        },
    )["d_hidden"]
