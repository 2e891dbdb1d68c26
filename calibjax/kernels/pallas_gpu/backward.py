"""The backward pass on Hopper GPUs.

For each chunk of C columns of the vocabulary a kernel computes the logits again, tile by tile in registers, and dz from
them (`contract.dz_of_logits`), rounded to the inputs' dtype and written [N, C]; then XLA forms dh += dz·W_c and dW_c =
dzᵀ·h. dz serves both, no logit leaves the chip in float32, and nothing is added by atomics.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from calibjax.kernels import chunked
from calibjax.kernels.contract import Cotangents, Gradients, Inputs, Options, Refs, dz_of_logits, padded, token_values
from calibjax.kernels.pallas_gpu.forward import Exponentials
from calibjax.kernels.pallas_gpu.schedule import ROWS, TOKENS, WARPGROUPS, Blocks, choose, chunk_size
from calibjax.kernels.pallas_gpu.tiles import biased, over_tiles, softcap_in_units
from calibjax.kernels.platforms import platform
from calibjax.runtime.arrays import round_up

_SLICE = 32  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_STAGED = (plgpu.TilingTransform((8, _SLICE)), plgpu.SwizzleTransform(2 * _SLICE))


def _dz(
    options: Options,
    hidden: Float[Array, "N D"],
    weights: Float[Array, "C D"],
    bias: Float[Array, " C"] | None,
    values: dict[str, Array],
    ids: list[Array],
    blocks: Blocks,
    interpret: Any,
) -> Float[Array, "N C"]:
    """dz of a chunk of the vocabulary by the kernel, C padded to whole tiles.

    `values` are what `contract.token_values` returns for the tokens; `ids` are the columns of the one-hots, counted
    from the first column of the chunk.
    """
    schedule = choose(hidden.shape[0], weights.shape[0], blocks, platform().device_kind)
    columns, count = schedule.blocks.columns, weights.shape[0]
    size = schedule.vocab_tiles * columns
    names = list(values)
    if bias is not None or size > count:
        # Beyond the last column p = 0; the rest of dz is finite there and meets rows of 0.
        bias = jnp.zeros((count,), jnp.float32) if bias is None else bias
        bias = jnp.pad(bias, (0, size - count), constant_values=-jnp.inf)

    def dz(refs: Refs, rows, tiles, **_):
        staging = refs.staging.at[jax.lax.axis_index("warpgroup")]

        def fold(first, whole, state):
            # Loaded again for each tile: kept while the next is multiplied, they would make other values spill.
            per_token = {
                name: plgpu.load(refs.token_values, (i, rows), optimized=False) for i, name in enumerate(names)
            }
            if ids:
                per_token |= {f"ids{k}": plgpu.load(refs.ids, (k, rows), optimized=False) for k in range(len(ids))}
            for offset in range(0, columns, _SLICE):
                z = softcap_in_units(options, biased(whole[:, offset : offset + _SLICE], refs.bias, first + offset))
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

                def value(name: str, per_token=per_token, shape=z.shape) -> Array | None:
                    return jax.lax.broadcast_in_dim(per_token[name], shape, (0,)) if name in per_token else None

                def hit(k: int, per_token=per_token, column=column, start=first + offset) -> Array:
                    return column == jax.lax.broadcast_in_dim(per_token[f"ids{k}"] - start, column.shape, (0,))

                dz = dz_of_logits(options, z, value, hit)
                block = staging.at[offset // _SLICE % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has read this block
                block[...] = dz.astype(hidden.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(block, refs.dz.at[rows, pl.ds(first + offset, _SLICE)])
            return state

        tiles(fold, [])
        plgpu.wait_smem_to_gmem(0)

    arguments = {"token_values": jnp.stack(list(values.values()))}
    if bias is not None:
        arguments["bias"] = bias
    results = {"dz": jax.ShapeDtypeStruct((hidden.shape[0], size), hidden.dtype)}
    if ids:
        arguments["ids"] = jnp.stack(ids)
    scratch = {"staging": plgpu.SMEM((WARPGROUPS, 2, ROWS, _SLICE), hidden.dtype, transforms=_STAGED)}
    return over_tiles(dz, hidden, weights, arguments, results, scratch, schedule, interpret)["dz"]


def _dz_of_saved(
    options: Options, saved: Exponentials, values: dict[str, Array], ids: list[Array], start: Array | int, count: int
) -> Float[Array, "N C"]:
    """The same from saved exponentials, of `count` columns from `start` on."""
    z, p = saved.read(options, values["log_normalizer"], start, count)
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

    def value(name: str) -> Array | None:
        return values[name][:, None] if name in values else None

    return dz_of_logits(options, z, value, lambda k: column == ids[k][:, None], p)


def gradients(
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    into: Gradients | None,
    blocks: Blocks,
    interpret: Any,
) -> Gradients:
    """Computes the wanted gradients: float32 dh [N, D] and db [V], dW [V, D] in the dtype of the unembedding.

    From saved exponentials no logits are computed again. db is the sum of dz as it was rounded for the products.
    """
    hidden, unembedding, bias = inputs.masked()[:3]
    tokens, saved = hidden.shape[0], cotangents.saved
    length = round_up(tokens, TOKENS)
    hidden = padded(hidden, length)
    padding_values = {"scale": 1.0, "log_normalizer": jnp.inf}  # p = 0
    values = token_values(options, inputs, cotangents)
    values = {name: padded(x, length, padding_values.get(name, 0.0)) for name, x in values.items()}
    ids = [padded(ids, length) for ids, _ in cotangents.one_hots]

    def step(carry: Gradients, start: Array | int, count: int) -> Gradients:
        weights = chunked.take_rows(unembedding, start, count)
        shifted = [x - start for x in ids]
        if saved is None:
            chunk_bias = None if bias is None else chunked.take_rows(bias, start, count)
            dz = _dz(options, hidden, weights, chunk_bias, values, shifted, blocks, interpret)
        else:
            whole = round_up(count, blocks.columns)
            dz = _dz_of_saved(options, saved, values, shifted, start, whole).astype(hidden.dtype)
        return chunked.add_gradients(options, carry, dz[:, :count], weights, hidden, start, add=into is not None)

    carry = chunked.first_gradients(inputs._replace(hidden=hidden), wanted, into)
    width = chunk_size(tokens, unembedding.shape[0], blocks, saved is not None)
    whole, left = divmod(unembedding.shape[0], width)
    if left:  # first: after the loop XLA would copy its result before it adds to it
        carry = step(carry, whole * width, left)
    total = jax.lax.fori_loop(0, whole, lambda i, carry: step(carry, i * width, width), carry) if whole else carry
    return total if total.hidden is None else total._replace(hidden=total.hidden[:tokens])
