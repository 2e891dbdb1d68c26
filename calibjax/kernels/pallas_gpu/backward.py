"""The backward pass on Hopper GPUs.

For each chunk of C columns of the vocabulary a kernel computes the logits again, tile by tile in registers, and dz from
them (`contract.dz_of_logits`), rounded to the inputs' dtype and written [N, C]; then XLA forms dh += dz·W_c and dW_c =
dzᵀ·h. dz serves both, no logit leaves the chip in float32, and nothing is added by atomics. Where a loss has saved
exponentials relative to one logit of each token, the two products take these, and no dz is formed (`_of_exponentials`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from calibjax.kernels import chunked
from calibjax.kernels.contract import Cotangents, Gradients, Inputs, Options, Refs, dz_of_logits, padded, token_values
from calibjax.kernels.pallas_gpu.forward import Exponentials
from calibjax.kernels.pallas_gpu.schedule import ROWS, TOKENS, WARPGROUPS, Blocks, choose, chunk_size
from calibjax.kernels.pallas_gpu.tiles import biased, over_tiles, softcap_in_units
from calibjax.kernels.platforms import platform
from calibjax.runtime.arrays import round_up

_SLICE = 32  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_HIGHEST = 2.0**80  # one-hot over c: their sum with an exponential is far from overflow in bfloat16
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

    `values`: `contract.token_values` of the tokens; `ids`: columns of the one-hots, from the chunk's first column on.
    """
    schedule = choose(hidden.shape[0], weights.shape[0], blocks, platform().device_kind)
    columns, count = schedule.blocks.columns, weights.shape[0]
    size = schedule.vocab_tiles * columns
    if bias is not None or size > count:
        # Beyond the last column p = 0; the rest of dz is finite there and meets rows of 0.
        bias = jnp.zeros((count,), jnp.float32) if bias is None else bias
        bias = jnp.pad(bias, (0, size - count), constant_values=-jnp.inf)

    def dz(refs: Refs, rows, tiles, **_):
        staging = refs.staging.at[jax.lax.axis_index("warpgroup")]

        def fold(first, whole, state):
            # Loaded again for each tile: kept while the next is multiplied, they would make other values spill.
            per_token = {key: plgpu.load(refs.token_values, (i, rows), optimized=False) for i, key in enumerate(values)}
            per_token |= {f"ids{k}": plgpu.load(refs.ids, (k, rows), optimized=False) for k in range(len(ids))}
            for offset in range(0, columns, _SLICE):
                logits = biased(whole[:, offset : offset + _SLICE], refs.bias, first + offset)
                z = softcap_in_units(options, logits)
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


def _put_one_hots(
    saved: Exponentials, values: dict[str, Array], ids: list[Array], vocab_size: int
) -> tuple[Exponentials, Float[Array, " M"], Bool[Array, ""]]:
    """E and c such that dz = c E + uniform, and whether they are: c = softmax·exp(s·reference − lse).

    A one-hot adds its g over c to the exponential of its column. Not so where a token has several references, or where
    g is too large; then c is 0. The rows after the tokens become one of 1 and others of 0, for `_of_exponentials`.
    """
    assert saved.common is not None
    exponentials, length = saved.values, saved.references.shape[1]
    common = padded(saved.common * saved.power, length)
    c = values["softmax"] * jnp.exp2(common - values["log_normalizer"])
    holds = (c == 0.0) | jnp.all(saved.references == padded(saved.common, length)[None, :], axis=0)
    tokens = jnp.arange(length)
    for k, column in enumerate(ids):
        inside = (column >= 0) & (column < vocab_size)
        g = jnp.where(inside, values[f"g{k}"], 0.0)
        ratio = jnp.where(g == 0.0, 0.0, g / c)
        holds = holds & (jnp.abs(ratio) <= _HIGHEST)
        at = exponentials.at[tokens, jnp.where(inside, column, exponentials.shape[1])]
        height = at.get(mode="fill", fill_value=0.0).astype(jnp.float32) + jnp.clip(ratio, -_HIGHEST, _HIGHEST)
        exponentials = at.set(height.astype(exponentials.dtype), mode="drop", unique_indices=True)
    more = jnp.zeros((exponentials.shape[0] - length, exponentials.shape[1]), exponentials.dtype).at[0].set(1.0)
    exponentials = jax.lax.dynamic_update_slice_in_dim(exponentials, more, length, axis=0)
    holds = jnp.all(holds)
    return saved._replace(values=exponentials), jnp.where(holds, c, 0.0), holds


def _of_exponentials(
    options: Options,
    exponentials: Float[Array, "M+8 C"],
    c: Float[Array, " M"],
    uniform: Float[Array, " M"] | None,
    hidden: Float[Array, "M D"],
    unembedding: Float[Array, "V D"],
    wanted: frozenset[str],
    into: Gradients | None,
) -> Gradients:
    """The gradients where dz = c E + uniform: dh = c (E W) + uniform ΣW and dW = Eᵀ (c h) + Σ uniform h.

    The products have both sums, ΣW and Σ uniform h: one more row of E is 1.
    """
    length, dtype = hidden.shape[0], hidden.dtype
    d_hidden = d_weights = None
    if "hidden" in wanted:
        product = options.matmul(exponentials, padded(unembedding, exponentials.shape[1]), (1, 0))
        d_hidden = c[:, None] * product[:length]
        if uniform is not None:
            d_hidden = d_hidden + uniform[:, None] * product[length][None, :]
    if "unembedding" in wanted:
        wide = hidden.astype(jnp.float32)
        everywhere = jnp.zeros((1, hidden.shape[1]))
        if uniform is not None:
            everywhere = jnp.sum(uniform[:, None] * wide, axis=0, keepdims=True)
        more = padded(everywhere, exponentials.shape[0] - length)
        scaled = jnp.concatenate([c[:, None] * wide, more]).astype(dtype)
        # In the dtype of the result: XLA would write float32 to memory, and round it in another kernel.
        earlier = None if into is None else into.unembedding
        result = dtype if earlier is None else jnp.float32
        d_weights = jax.lax.dot_general(
            exponentials, scaled, (((0,), (0,)), ((), ())), options.precision, preferred_element_type=result
        )[: unembedding.shape[0]]
        d_weights = d_weights if earlier is None else earlier + d_weights
    return Gradients(d_hidden, d_weights)


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

    From saved exponentials no logits are computed again, and where each token has one reference dz is not formed. db is
    the sum of dz as it was rounded for the products.
    """
    hidden, unembedding, bias = inputs.masked()[:3]
    tokens, saved = hidden.shape[0], cotangents.saved
    length = round_up(tokens, TOKENS)
    hidden = padded(hidden, length)
    cotangents, factor = cotangents.in_range_of(hidden.dtype)
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
        return chunked.add_gradients(options, carry, dz[:, :count], factor, weights, hidden, start, into is not None)

    needs_dz = "softmax" not in values or "centred" in values or "bias" in wanted
    if saved is None or saved.common is None or needs_dz:
        done = False
        total = chunked.first_gradients(inputs._replace(hidden=hidden), wanted, into)
    else:
        saved, c, done = _put_one_hots(saved, values, ids, unembedding.shape[0])
        uniform = jnp.where(done, values["uniform"], 0.0) if "uniform" in values else None
        total = _of_exponentials(options, saved.values, c, uniform, hidden, unembedding, wanted, into)

    def unless_done(times: int) -> Array | int:
        return times if done is False else jnp.where(done, 0, times)

    width = chunk_size(tokens, unembedding.shape[0], blocks, saved is not None and saved.common is None)
    whole, left = divmod(unembedding.shape[0], width)
    if left:  # first: after the loop XLA would copy its result before it adds to it
        total = jax.lax.fori_loop(0, unless_done(1), lambda _, carry: step(carry, whole * width, left), total)
    if whole:
        total = jax.lax.fori_loop(0, unless_done(whole), lambda i, carry: step(carry, i * width, width), total)
    return total if total.hidden is None else total._replace(hidden=total.hidden[:tokens])
