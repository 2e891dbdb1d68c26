"""Backward pass on Hopper GPUs: a kernel makes dz of a chunk of the vocabulary, two products of XLA's take it on.

For each chunk of C columns: logits anew, tile by tile in registers, dz from them (`slopes`), rounded to the inputs'
dtype and written [N, C]; then dh += dz·W_c and dW_c = dzᵀ·h, plain products with float32 sums, which cuBLAS does best.
dz serves both, and no logit ever leaves the chip in float32. No sum depends on an order that changes from run to run.

A logit costs 2 bytes written and 4 read. The chunked form writes it in float32 too and reads that again, 8 bytes more:
at D = 2,304 some 1.7 ps of H200's 4.8 TB/s for the 17.5 ps that the three products take at 790 TFLOP/s.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from calibjax.kernels import chunked
from calibjax.kernels.operator import Call, Gradients, Model, Signal
from calibjax.kernels.pallas_gpu import schedule
from calibjax.kernels.pallas_gpu.schedule import ROWS, WARPGROUPS, Schedule
from calibjax.kernels.pallas_gpu.tiles import biased, over_tiles, softcapped
from calibjax.kernels.slopes import slope_of_logits, values_of_tokens

_SLICE = 32  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_STAGED = (plgpu.TilingTransform((8, _SLICE)), plgpu.SwizzleTransform(2 * _SLICE))


def _slopes(
    call: Call, model: Model, values: dict[str, Array], ids: list[Array], schedule: Schedule, interpret
) -> Float[Array, "N C"]:
    """dz by the kernel, of hidden states [N, D] and a chunk [C, D] of the unembedding, C padded to whole tiles.

    Args:
        model: N is a multiple of `schedule.TOKENS`.
        values: of the tokens, see `slopes.values_of_tokens`.
        ids: of the one-hots, counted from the first column of the chunk.
    """
    hidden, weights, bias, _ = model
    columns, count = schedule.blocks.columns, weights.shape[0]
    size = schedule.vocab_tiles * columns
    names = list(values)
    # Beyond the last column p = 0, and what else dz holds is finite and meets rows of 0.
    bias = jnp.zeros((count,), jnp.float32) if bias is None else bias
    bias = jnp.pad(bias, (0, size - count), constant_values=-jnp.inf)

    def body(*refs, rows, tiles, **_):
        values_ref, bias_ref, *refs = refs
        ids_ref = refs.pop(0) if ids else None
        dz_ref, staging = refs
        staging = staging.at[jax.lax.axis_index("warpgroup")]

        def fold(first, whole, state):
            # Loaded anew for each tile: kept while the next is multiplied, they would make other values spill.
            of_tokens = {name: plgpu.load(values_ref, (i, rows), optimized=False) for i, name in enumerate(names)}
            of_tokens |= {f"ids{k}": plgpu.load(ids_ref, (k, rows), optimized=False) for k in range(len(ids))}
            for offset in range(0, columns, _SLICE):
                z = softcapped(call, biased(whole[:, offset : offset + _SLICE], bias_ref, first + offset))
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

                def value(name: str, of_tokens=of_tokens, shape=z.shape) -> Array | None:
                    return jax.lax.broadcast_in_dim(of_tokens[name], shape, (0,)) if name in of_tokens else None

                def hit(k: int, of_tokens=of_tokens, column=column, start=first + offset) -> Array:
                    return column == jax.lax.broadcast_in_dim(of_tokens[f"ids{k}"] - start, column.shape, (0,))

                dz, _ = slope_of_logits(call, z, value, hit)
                block = staging.at[offset // _SLICE % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has read this block
                block[...] = dz.astype(hidden.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(block, dz_ref.at[rows, pl.ds(first + offset, _SLICE)])
            return state

        tiles(fold, [])
        plgpu.wait_smem_to_gmem(0)

    [dz] = over_tiles(
        body,
        hidden,
        weights,
        jnp.stack(list(values.values())),
        bias,
        *([jnp.stack(ids)] if ids else []),
        results=[jax.ShapeDtypeStruct((hidden.shape[0], size), hidden.dtype)],
        schedule=schedule,
        interpret=interpret,
        name="calibjax_slopes",
        scratch=[plgpu.SMEM((WARPGROUPS, 2, ROWS, _SLICE), hidden.dtype, transforms=_STAGED)],
    )
    return dz


def _product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def gradients(
    call: Call,
    model: Model,
    signal: Signal,
    wanted: frozenset[str],
    blocks: schedule.Blocks,
    device_kind: str,
    interpret,
) -> Gradients:
    """Those in `wanted`: dh float32 [N, D], dW [V, D] in the dtype of the unembedding, db float32 [V]; see `operator`.

    db is the sum of dz as it was rounded for the products.
    """
    hidden, unembedding, bias, _ = model.clean()
    tokens, (vocab_size, width) = hidden.shape[0], unembedding.shape
    size = schedule.chunk(tokens, vocab_size, blocks)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, -tokens % schedule.TOKENS), *((0, 0),) * (x.ndim - 1)))

    hidden = padded(hidden)
    values = {name: padded(x) for name, x in values_of_tokens(call, signal).items()}
    ids = [padded(ids) for ids, _ in signal.one_hots]  # those of the padding meet a g of 0

    def step(carry: Gradients, start: Array | int, count: int, _: None) -> Gradients:
        weights = chunked.rows(unembedding, start, count)
        chunk = Model(hidden, weights, None if bias is None else chunked.rows(bias, start, count), None)
        plan = schedule.choose(hidden.shape[0], count, blocks, device_kind)
        dz = _slopes(call, chunk, values, [x - start for x in ids], plan, interpret)
        weights = jnp.pad(weights, ((0, dz.shape[1] - count), (0, 0)))
        d_hidden, rows, of_bias = carry
        if d_hidden is not None:
            d_hidden = d_hidden + _product(dz, weights, (1, 0))
        if rows is not None:
            rows = chunked.put(rows, _product(dz, hidden, (0, 0))[:count], start)
        if of_bias is not None:
            of_bias = chunked.put(of_bias, jnp.sum(dz, axis=0, dtype=jnp.float32)[:count], start)
        return Gradients(d_hidden, rows, of_bias)

    zeros = Gradients(
        jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None,
        jnp.zeros((vocab_size, width), unembedding.dtype) if "unembedding" in wanted else None,
        jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    found = chunked.fold(step, zeros, vocab_size, size)
    return found if found.hidden is None else found._replace(hidden=found.hidden[:tokens])
