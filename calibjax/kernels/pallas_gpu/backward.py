"""Backward pass on Hopper GPUs: a kernel makes dz of a chunk of the vocabulary, two products of XLA's take it on.

For each chunk of C columns: logits anew, tile by tile in registers, dz from them (`slopes`), rounded to the inputs'
dtype and written [N, C]; then dh += dz·W_c and dW_c = dzᵀ·h, plain products with float32 sums, which XLA does.
dz serves both, and no logit ever leaves the chip in float32. Nothing is added by atomics.

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
from calibjax.kernels.pallas_gpu import products
from calibjax.kernels.pallas_gpu.exponentials import Exponentials
from calibjax.kernels.pallas_gpu.schedule import (
    ROWS,
    TOKENS,
    WARPGROUPS,
    Blocks,
    Schedule,
    choose,
    chunk_size,
    over_chunks,
)
from calibjax.kernels.pallas_gpu.tiles import biased, over_tiles, softcapped
from calibjax.kernels.slopes import apart_of, slope_of_logits, values_of_tokens

_SLICE = 32  # columns of a tile of logits that the arithmetic takes at a time: with more, registers spill
_STAGED = (plgpu.TilingTransform((8, _SLICE)), plgpu.SwizzleTransform(2 * _SLICE))


def _slopes(
    call: Call, model: Model, values: dict[str, Array], ids: list[Array], schedule: Schedule, interpret
) -> tuple[Float[Array, "N C"], Float[Array, "c N"] | None]:
    """dz by the kernel, of hidden states [N, D] and a chunk [C, D] of the unembedding, C padded to whole tiles.

    With a filter also, of each tile and token, whether any of it must be multiplied (1) or not (0).

    Args:
        model: N is `schedule.padded_tokens`.
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
        dz_ref, *seen_ref, staging = refs
        staging = staging.at[jax.lax.axis_index("warpgroup")]

        def fold(first, whole, state):
            # Loaded anew for each tile: kept while the next is multiplied, they would make other values spill.
            of_tokens = {name: plgpu.load(values_ref, (i, rows), optimized=False) for i, name in enumerate(names)}
            if ids_ref is not None:
                of_tokens |= {f"ids{k}": plgpu.load(ids_ref, (k, rows), optimized=False) for k in range(len(ids))}
            seen = jnp.zeros((ROWS,), jnp.float32)
            for offset in range(0, columns, _SLICE):
                z = softcapped(call, biased(whole[:, offset : offset + _SLICE], bias_ref, first + offset))
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

                def value(name: str, of_tokens=of_tokens, shape=z.shape) -> Array | None:
                    return jax.lax.broadcast_in_dim(of_tokens[name], shape, (0,)) if name in of_tokens else None

                def hit(k: int, of_tokens=of_tokens, column=column, start=first + offset) -> Array:
                    return column == jax.lax.broadcast_in_dim(of_tokens[f"ids{k}"] - start, column.shape, (0,))

                dz, counts = slope_of_logits(call, z, value, hit)
                seen = seen if counts is None else jnp.maximum(seen, jnp.max(counts, axis=1))
                block = staging.at[offset // _SLICE % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last has read this block
                block[...] = dz.astype(hidden.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(block, dz_ref.at[rows, pl.ds(first + offset, _SLICE)])
            if seen_ref:
                seen_ref[0][jax.lax.div(first, columns), rows] = seen
            return state

        tiles(fold, [])
        plgpu.wait_smem_to_gmem(0)

    results = [jax.ShapeDtypeStruct((hidden.shape[0], size), hidden.dtype)]
    if call.filter_threshold:
        results.append(jax.ShapeDtypeStruct((schedule.vocab_tiles, hidden.shape[0]), jnp.float32))
    dz, *seen = over_tiles(
        body,
        hidden,
        weights,
        jnp.stack(list(values.values())),
        bias,
        *([jnp.stack(ids)] if ids else []),
        results=results,
        schedule=schedule,
        interpret=interpret,
        name="calibjax_slopes",
        scratch=[plgpu.SMEM((WARPGROUPS, 2, ROWS, _SLICE), hidden.dtype, transforms=_STAGED)],
    )
    return dz, seen[0] if seen else None


def _slopes_of_saved(
    call: Call, saved: Exponentials, start: Array | int, count: int, values: dict[str, Array], ids: list[Array]
) -> tuple[Float[Array, "N C"], Float[Array, "N C"] | None]:
    """The same of `count` saved columns from `start` on; what must be multiplied stands there for each of them."""
    z, p = saved.read(call, values["log_normalizer"], start, count)
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)

    def value(name: str) -> Array | None:
        return values[name][:, None] if name in values else None

    return slope_of_logits(call, z, value, lambda k: column == ids[k][:, None], p)


def gradients(
    call: Call,
    model: Model,
    signal: Signal,
    saved: Exponentials | None,
    wanted: frozenset[str],
    into: Gradients | None,
    blocks: Blocks,
    device_kind: str,
    interpret,
) -> Gradients:
    """Those in `wanted`: dh float32 [N, D], dW [V, D] in the dtype of the unembedding, db float32 [V]; see `operator`.

    `saved`: of `forward.moments`; then no logits are computed anew. `into`: float32 gradients in unembedding and bias
    of other tokens, where wanted; those of these tokens are added to them. db is the sum of dz as it was rounded for
    the products.
    """
    hidden, unembedding, bias, _ = model.clean()
    tokens, (vocab_size, width) = hidden.shape[0], unembedding.shape
    apart = apart_of(call, signal)

    def padded(x: Array, value: float = 0) -> Array:
        padding = ((0, -tokens % (TOKENS * blocks.cluster)), *((0, 0),) * (x.ndim - 1))
        return jnp.pad(x, padding, constant_values=value)

    hidden = padded(hidden)
    of_padding = {"scale": 1.0, "log_normalizer": jnp.inf}  # p = 0
    values = {name: padded(x, of_padding.get(name, 0.0)) for name, x in values_of_tokens(call, signal).items()}
    values.pop("apart", None)
    ids = [padded(ids) for ids, _ in signal.one_hots]

    def slopes(weights: Array, start: Array | int) -> tuple[Array, Array | None]:
        count, places = weights.shape[0], [x - start for x in ids]
        if saved is None:
            chunk = Model(hidden, weights, None if bias is None else chunked.rows(bias, start, count), None)
            plan = choose(hidden.shape[0], count, blocks, device_kind)
            return _slopes(call, chunk, values, places, plan, interpret)
        whole = -(-count // blocks.columns) * blocks.columns
        dz, seen = _slopes_of_saved(call, saved, start, whole, values, places)
        if seen is not None:
            seen = jnp.max(seen.reshape(len(dz), -1, blocks.columns), axis=2).T
        return dz.astype(hidden.dtype), seen

    def product(dz: Array, factor: Array, seen: Array | None, of_columns: bool) -> Array:
        """dz·factor, or `of_columns` dzᵀ·factor."""
        if seen is None:
            dimensions = (((0 if of_columns else 1,), (0,)), ((), ()))
            return jax.lax.dot_general(dz, factor, dimensions, preferred_element_type=jnp.float32)
        keep = jnp.max(seen.reshape(len(seen), -1, TOKENS), axis=2).T > 0.0
        return products.over_kept(dz, factor, keep, of_columns, blocks, device_kind, interpret)

    of_hidden = jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None
    of_rows = of_columns = None
    if apart is not None:
        of_rows = jnp.matmul(padded(apart), hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        of_columns = jnp.sum(apart)
        if of_hidden is not None:
            of_hidden = padded(apart)[:, None] * jnp.sum(unembedding, axis=0, dtype=jnp.float32)[None, :]

    def add(whole: Array, found: Array, start: Array | int) -> Array:
        return chunked.put(whole, found, start, add=into is not None)  # pyright: ignore[reportReturnType]

    def step(carry: Gradients, start: Array | int, count: int) -> Gradients:
        weights = chunked.rows(unembedding, start, count)
        dz, seen = slopes(weights, start)
        of_hidden, of_weights, of_bias = carry
        if of_hidden is not None:
            weights = jnp.pad(weights, ((0, dz.shape[1] - count), (0, 0)))
            of_hidden = of_hidden + product(dz, weights, seen, of_columns=False)
        if of_weights is not None:
            found = product(dz, hidden, seen, of_columns=True)[:count]
            of_weights = add(of_weights, found if of_rows is None else found + of_rows[None, :], start)
        if of_bias is not None:
            found = jnp.sum(dz, axis=0, dtype=jnp.float32)[:count]
            of_bias = add(of_bias, found if of_columns is None else found + of_columns, start)
        return Gradients(of_hidden, of_weights, of_bias)

    others = into or Gradients(
        unembedding=jnp.zeros((vocab_size, width), unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    start = others._replace(hidden=of_hidden)
    found = over_chunks(step, start, vocab_size, chunk_size(tokens, vocab_size, blocks))
    return found if found.hidden is None else found._replace(hidden=found.hidden[:tokens])
