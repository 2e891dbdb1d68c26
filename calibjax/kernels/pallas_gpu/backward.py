"""Not run on a GPU yet: the backward pass on Hopper GPUs.

A kernel computes dz of a chunk of the vocabulary, and XLA multiplies it.

For each chunk of C columns: the logits again, tile by tile in registers, dz from them (`logit_cotangents`), rounded to
the inputs' dtype and written [N, C]; then dh += dz·W_c and dW_c = dzᵀ·h, plain products with float32 sums, by XLA. dz
serves both, and no logit leaves the chip in float32. Nothing is added by atomics.

A logit costs 2 bytes written and 4 read. The chunked form writes it in float32 too and reads that again, 8 bytes more:
at D = 2,304 some 1.7 ps of H200's 4.8 TB/s for the 17.5 ps that the three products take at 790 TFLOP/s.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from calibjax.kernels import chunked
from calibjax.kernels.contract import BackwardRequest, Cotangents, Gradients, Inputs, Options
from calibjax.kernels.logit_cotangents import dz_of_logits, exact_uniform, token_values
from calibjax.kernels.pallas_gpu import products
from calibjax.kernels.pallas_gpu.exponentials import Exponentials
from calibjax.kernels.pallas_gpu.schedule import ROWS, TOKENS, WARPGROUPS, Launch, choose, chunk_size, over_chunks
from calibjax.kernels.pallas_gpu.tiles import biased, over_tiles, softcapped

_SLICE = 32  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_STAGED = (plgpu.TilingTransform((8, _SLICE)), plgpu.SwizzleTransform(2 * _SLICE))


class _Chunk(NamedTuple):
    """A chunk of the vocabulary, and all tokens, padded to whole tiles.

    Attributes:
        hidden: [N, D].
        weights: [C, D].
        bias: float32 [C] or None.
        values: of the tokens, see `logit_cotangents.token_values`.
        ids: of the one-hots, counted from the first column of the chunk.
        start: index of that column.
    """

    hidden: Array
    weights: Array
    bias: Array | None
    values: dict[str, Array]
    ids: list[Array]
    start: Array | int


class _Refs(NamedTuple):
    """References of the kernel; None where there is none."""

    values: Any
    dz: Any
    staging: Any
    bias: Any = None
    ids: Any = None
    seen: Any = None


def _dz(options: Options, chunk: _Chunk, launch: Launch) -> tuple[Float[Array, "N C"], Float[Array, "c N"] | None]:
    """dz by the kernel, C padded to whole tiles.

    With a filter also a mask [tiles of the vocabulary, N]: 1 where some dz of the tile must be multiplied, else 0.
    """
    hidden, weights, bias, values, ids, _ = chunk
    schedule = choose(hidden.shape[0], weights.shape[0], launch.blocks, launch.device_kind)
    columns, count = schedule.blocks.columns, weights.shape[0]
    size = schedule.vocab_tiles * columns
    names = list(values)
    if bias is not None or size > count or options.filter_threshold:  # with a filter, without a bias, registers spill
        # Beyond the last column p = 0, and what else dz holds is finite and meets rows of 0.
        bias = jnp.zeros((count,), jnp.float32) if bias is None else bias
        bias = jnp.pad(bias, (0, size - count), constant_values=-jnp.inf)

    def dz(refs: _Refs, rows, tiles, **_):
        staging = refs.staging.at[jax.lax.axis_index("warpgroup")]

        def fold(first, whole, state):
            # Loaded again for each tile: kept while the next is multiplied, they would make other values spill.
            of_tokens = {name: plgpu.load(refs.values, (i, rows), optimized=False) for i, name in enumerate(names)}
            if ids:
                of_tokens |= {f"ids{k}": plgpu.load(refs.ids, (k, rows), optimized=False) for k in range(len(ids))}
            seen = jnp.zeros((ROWS,), jnp.float32)
            for offset in range(0, columns, _SLICE):
                z = softcapped(options, biased(whole[:, offset : offset + _SLICE], refs.bias, first + offset))
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

                def value(name: str, of_tokens=of_tokens, shape=z.shape) -> Array | None:
                    return jax.lax.broadcast_in_dim(of_tokens[name], shape, (0,)) if name in of_tokens else None

                def hit(k: int, of_tokens=of_tokens, column=column, start=first + offset) -> Array:
                    return column == jax.lax.broadcast_in_dim(of_tokens[f"ids{k}"] - start, column.shape, (0,))

                dz, counts = dz_of_logits(options, z, value, hit)
                seen = seen if counts is None else jnp.maximum(seen, jnp.max(counts, axis=1))
                block = staging.at[offset // _SLICE % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has read this block
                block[...] = dz.astype(hidden.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(block, refs.dz.at[rows, pl.ds(first + offset, _SLICE)])
            if refs.seen is not None:
                refs.seen[jax.lax.div(first, columns), rows] = seen
            return state

        tiles(fold, [])
        plgpu.wait_smem_to_gmem(0)

    arguments = {"values": jnp.stack(list(values.values()))}
    if bias is not None:
        arguments["bias"] = bias
    results = {"dz": jax.ShapeDtypeStruct((hidden.shape[0], size), hidden.dtype)}
    if ids:
        arguments["ids"] = jnp.stack(ids)
    if options.filter_threshold:
        results["seen"] = jax.ShapeDtypeStruct((schedule.vocab_tiles, hidden.shape[0]), jnp.float32)
    scratch = {"staging": plgpu.SMEM((WARPGROUPS, 2, ROWS, _SLICE), hidden.dtype, transforms=_STAGED)}
    outputs = over_tiles(dz, _Refs, hidden, weights, arguments, results, scratch, schedule, launch.interpret)
    return outputs["dz"], outputs.get("seen")


def _dz_of_saved(
    options: Options, chunk: _Chunk, saved: Exponentials, launch: Launch
) -> tuple[Float[Array, "N C"], Float[Array, "c N"] | None]:
    """The same from saved exponentials."""
    values, columns = chunk.values, launch.blocks.columns
    count = -(-chunk.weights.shape[0] // columns) * columns
    z, p = saved.read(options, values["log_normalizer"], chunk.start, count)
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

    def value(name: str) -> Array | None:
        return values[name][:, None] if name in values else None

    dz, seen = dz_of_logits(options, z, value, lambda k: column == chunk.ids[k][:, None], p)
    if seen is not None:
        seen = jnp.max(seen.reshape(len(dz), -1, columns), axis=2).T
    return dz.astype(chunk.hidden.dtype), seen


def gradients(
    request: BackwardRequest,
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Exponentials | None,
    into: Gradients | None,
    launch: Launch,
) -> Gradients:
    """Computes the wanted gradients: float32 dh [N, D] and db [V], dW [V, D] in the dtype of the unembedding.

    With `saved`, of `forward.moments`, no logits are computed again. db is the sum of dz as it was rounded for the
    products.
    """
    (options, wanted), blocks = request, launch.blocks
    hidden, unembedding, bias = inputs.masked()[:3]
    tokens, (vocab_size, width) = hidden.shape[0], unembedding.shape
    exact = exact_uniform(options, cotangents)

    def padded(x: Array, value: float = 0) -> Array:
        padding = ((0, -tokens % (TOKENS * blocks.cluster)), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x, padding, constant_values=value)

    hidden = padded(hidden)
    of_padding = {"scale": 1.0, "log_normalizer": jnp.inf}  # p = 0
    values = token_values(options, inputs, cotangents)
    values = {name: padded(x, of_padding.get(name, 0.0)) for name, x in values.items()}
    values.pop("exact", None)
    ids = [padded(ids) for ids, _ in cotangents.one_hots]

    def product(dz: Array, factor: Array, seen: Array | None, of_columns: bool) -> Array:
        """dz·factor, or `of_columns` dzᵀ·factor."""
        if seen is None:
            dimensions = (((0 if of_columns else 1,), (0,)), ((), ()))
            return jax.lax.dot_general(dz, factor, dimensions, preferred_element_type=jnp.float32)
        keep = jnp.max(seen.reshape(len(seen), -1, TOKENS), axis=2).T > 0.0
        return products.sparse_product(dz, factor, keep, of_columns, launch)

    of_hidden = jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None
    exact_row = exact_sum = None
    if exact is not None:
        exact_row = jnp.matmul(padded(exact), hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        exact_sum = jnp.sum(exact)
        if of_hidden is not None:
            of_hidden = padded(exact)[:, None] * jnp.sum(unembedding, axis=0, dtype=jnp.float32)[None, :]

    def add(whole: Array, part: Array, start: Array | int) -> Array:
        return chunked.put(whole, part, start, add=into is not None)  # pyright: ignore[reportReturnType]

    def step(carry: Gradients, start: Array | int, count: int) -> Gradients:
        weights = chunked.rows(unembedding, start, count)
        bias_of_chunk = None if bias is None else chunked.rows(bias, start, count)
        chunk = _Chunk(hidden, weights, bias_of_chunk, values, [x - start for x in ids], start)
        dz, seen = _dz(options, chunk, launch) if saved is None else _dz_of_saved(options, chunk, saved, launch)
        of_hidden, of_weights, of_bias = carry
        if of_hidden is not None:
            weights = jnp.pad(weights, ((0, dz.shape[1] - count), (0, 0)))
            of_hidden = of_hidden + product(dz, weights, seen, of_columns=False)
        if of_weights is not None:
            rows = product(dz, hidden, seen, of_columns=True)[:count]
            of_weights = add(of_weights, rows if exact_row is None else rows + exact_row[None, :], start)
        if of_bias is not None:
            sums = jnp.sum(dz, axis=0, dtype=jnp.float32)[:count]
            of_bias = add(of_bias, sums if exact_sum is None else sums + exact_sum, start)
        return Gradients(of_hidden, of_weights, of_bias)

    others = into or Gradients(
        unembedding=jnp.zeros((vocab_size, width), unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    start = others._replace(hidden=of_hidden)
    total = over_chunks(step, start, vocab_size, chunk_size(tokens, vocab_size, blocks))
    return total if total.hidden is None else total._replace(hidden=total.hidden[:tokens])
