"""The operator as an XLA loop over chunks of the vocabulary: runs anywhere, the default on CPU.

Memory beyond inputs and outputs: a few float32 blocks `[N, C]`, C columns at a time (two to six, by what is wanted),
and a `[C, D]` slice of the unembedding and of its gradient; with `save_logits`, the float32 logits; with
`filter_threshold`, the gradients in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.contract import (
    BackwardRequest,
    Cotangents,
    ForwardRequest,
    ForwardResult,
    Gradients,
    Implementation,
    Inputs,
    Options,
)
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.softcap import softcapped, times_slope
from calibjax.kernels.stats import Moments

# Columns of a chunk: with fewer the products are slower, with more the blocks do not fit into the cache. Rows of 1,024
# would all start at the same cache sets of a CPU, which makes the transposed product 10% slower.
_COLUMNS = 1152
_LOGITS_BYTES = 64 * 2**20  # at most of one [N, C] float32 block
_FEW = 64  # tokens up to which copying the unembedding slice by slice would cost as much as the product
_ACCELERATOR = 8  # times as many columns and bytes: small kernels leave a GPU idle, and no block fits into its cache
_FILTER_TOKENS, _FILTER_COLUMNS = 128, 512  # of the blocks a filter may leave out; smaller ones are slowed by the loop


def choose_chunk_size(tokens: int, vocab_size: int) -> int:
    """Columns per chunk: a multiple of 128, at least 128, or the whole vocabulary.

    On CPU 1,152 columns, fewer where their float32 logits would take more than 64 MiB; with up to 64 tokens the whole
    vocabulary if its logits take no more, so that no slice is copied. Elsewhere 8 times as many columns and bytes.
    Decided while tracing, by `platforms.platform()`.
    """
    factor = 1 if platform().name == "cpu" else _ACCELERATOR
    fitting = factor * _LOGITS_BYTES // (4 * max(tokens, 1))
    if tokens <= _FEW and vocab_size <= fitting:
        return vocab_size
    return min(max(min(factor * _COLUMNS, fitting) // 128 * 128, 128), vocab_size)


def _chunk(options: Options, tokens: int, vocab_size: int) -> int:
    if options.chunk_size is not None:
        return min(options.chunk_size, vocab_size)
    chunk = choose_chunk_size(tokens, vocab_size)
    return min(chunk, _FILTER_COLUMNS) if options.filter_threshold else chunk


def _product(options: Options, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=options.precision, preferred_element_type=jnp.float32)


def _block_logits(options: Options, inputs: Inputs, start: Array | int, width: int) -> tuple[Array, Array]:
    """Rows `start` to `start + width` of W, and softcap(h W_cᵀ + b_c), float32 [N, C]."""
    weights = rows(inputs.unembedding, start, width)
    z = _product(options, inputs.hidden, weights, (1, 1))
    if inputs.bias is not None:
        z = z + rows(inputs.bias, start, width)[None, :]
    return weights, softcapped(z, options.softcap)


def _pieces(width: int, size: int) -> tuple[int, Array]:
    """Width of the first, ragged piece (0 where `width` divides `size`), and the starts of the full pieces after it.

    The ragged piece has its own program, so that nothing is padded or masked.
    """
    ragged = size % width
    return ragged, jnp.arange(ragged, size, width, dtype=jnp.int32)


def fold(step: Callable, carry: Any, size: int, width: int, saved: "_Saved | None" = None) -> Any:
    """The carry after `step(carry, start, width, z)` of all pieces of `size`; z is what `saved` holds of each, or None.

    Two programs at most: of the ragged piece, and of the loop.
    """
    ragged, starts = _pieces(width, size)
    first, others = (None, None) if saved is None else saved
    if ragged or saved is not None:
        carry = step(carry, 0, ragged or width, first)
        starts = starts if ragged else starts[1:]
    if starts.size:
        carry, _ = jax.lax.scan(lambda c, x: (step(c, x[0], width, x[1]), None), carry, (starts, others))
    return carry


def rows(array: Array, start: Array | int, width: int) -> Array:
    """array[start : start + width], for a start that may be traced."""
    return jax.lax.dynamic_slice_in_dim(array, start, width, axis=0)


def put(whole: Array | None, block: Array | None, start: Array | int, add: bool = False) -> Array | None:
    """`whole` with `block` at, or added to, its rows from `start` on; None stays None."""
    if whole is None or block is None:
        return None
    if add:
        block = rows(whole, start, block.shape[0]) + block
    return jax.lax.dynamic_update_slice_in_dim(whole, block.astype(whole.dtype), start, axis=0)


def forward(request: ForwardRequest, inputs: Inputs) -> ForwardResult:
    """The moments of the whole vocabulary, chunk by chunk."""
    options, needed, save = request
    inputs = inputs.masked()
    hidden, unembedding, bias, _, targets, _ = inputs
    scale, vocab_size = options.scale(inputs), unembedding.shape[0]
    linear_mean = "total" in needed and options.softcap is None
    of_piece = needed - {"rows"} - ({"total"} if linear_mean else set())

    def piece(start: Array | int, width: int) -> tuple[Moments, Array | None]:
        weights, z = _block_logits(options, inputs, start, width)
        moments = stats.moments(z, options.scales or scale, targets, start, of_piece)
        if "rows" in needed:
            e = jnp.exp(scale[:, None] * jnp.maximum(z - moments.max_logit[:, None], stats.FLOOR))
            e = times_slope(e, z, options.softcap)
            if targets is not None:
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                e = jnp.where(column == (targets - start)[:, None], 0.0, e)
            summed = _product(options, e.astype(hidden.dtype), weights, (1, 0))
            moments = moments._replace(rows=summed * stats.inverse_weight(moments.weight)[:, None])
        return moments, z if save else None

    def step(carry: Moments, start: Array) -> tuple[Moments, Array | None]:
        moments, z = piece(start, chunk)
        return stats.merge(carry, moments, scale), z

    chunk = _chunk(options, hidden.shape[0], vocab_size)
    ragged, starts = _pieces(chunk, vocab_size)
    total, first = piece(0, ragged) if ragged else piece(starts[0], chunk)
    starts = starts if ragged else starts[1:]
    chunks = None
    if starts.size:
        total, chunks = jax.lax.scan(step, total, starts)
    if linear_mean:
        # Without a soft-cap the sum over v commutes with the product: one row instead of V.
        row = jnp.mean(unembedding, axis=0, dtype=jnp.float32)
        mean = jnp.matmul(hidden.astype(jnp.float32), row, precision=jax.lax.Precision.HIGHEST)
        total = total._replace(total=vocab_size * (mean if bias is None else mean + jnp.mean(bias)))
    return ForwardResult(total, (first, chunks) if save else None)


_Saved = tuple[Array | None, Array | None]  # logits of the first piece [N, C'] and of the chunks after it [K, N, C]


def backward(
    request: BackwardRequest, inputs: Inputs, cotangents: Cotangents, saved: _Saved | None, into: Gradients | None
) -> Gradients:
    """Gradients by one more pass over the vocabulary; a chunk's logits are computed again, or taken from `saved`."""
    options, wanted = request
    inputs = inputs.masked()
    vocab_size, width = inputs.unembedding.shape
    tokens = inputs.hidden.shape[0]
    if wanted == {"hidden"} and cotangents.hidden_is_closed(options):
        return Gradients(hidden=closed_form_hidden(inputs, cotangents))
    options = options._replace(chunk_size=_chunk(options, tokens, vocab_size))  # that of `saved`, for every block
    request = request._replace(options=options)
    if not options.filter_threshold:
        return _accumulate(request, inputs, cotangents, saved, into)

    # Blocks of tokens, too; what must not be left out with a block is added outside of them.
    linear = options.softcap is None
    exact = cotangents._replace(
        softmax=None, centred=None, expected_logit=None, uniform=cotangents.uniform if linear else None
    )
    inside = cotangents._replace(one_hots=(), uniform=None if linear else cotangents.uniform)
    if into is None:
        into = Gradients(
            unembedding=jnp.zeros((vocab_size, width), jnp.float32) if "unembedding" in wanted else None,
            bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
        )

    def step(carry: Gradients, start: Array | int, width: int, _: None) -> Gradients:
        block = inputs._replace(hidden=rows(inputs.hidden, start, width), scale=rows(inputs.scale, start, width))
        of_block = jax.tree.map(lambda x: rows(x, start, width), inside)
        logits = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 2), saved)
        gradients = _accumulate(request, block, of_block, logits, carry)
        return gradients._replace(hidden=put(carry.hidden, gradients.hidden, start, add=True))

    return fold(step, _closed_form(inputs, exact, wanted, into), tokens, max(min(_FILTER_TOKENS, tokens), 1))


def _accumulate(
    request: BackwardRequest, inputs: Inputs, cotangents: Cotangents, saved: _Saved | None, into: Gradients | None
) -> Gradients:
    """`backward` with every term added in the same pass; chunks with all p < `filter_threshold` add nothing."""
    options, wanted = request
    hidden, unembedding = inputs.hidden, inputs.unembedding
    vocab_size = unembedding.shape[0]

    def step(carry: Gradients, start: Array | int, width: int, z: Array | None) -> Gradients:
        if z is None:
            weights, z = _block_logits(options, inputs, start, width)
        else:
            weights = rows(unembedding, start, width)
        # At most 1: with logits or scales of 1e30 the rounding of s·z is large.
        p = jnp.exp(jnp.minimum(inputs.scale[:, None] * z - cotangents.log_normalizer[:, None], 0.0))
        dz = jnp.zeros_like(z)
        if cotangents.softmax is not None:
            factor = cotangents.softmax[:, None]
            if cotangents.centred is not None:
                assert cotangents.expected_logit is not None
                # The floor keeps 0·(z − E) = 0 where a bias of −inf removes an entry.
                centred = jnp.maximum(z - cotangents.expected_logit[:, None], stats.FLOOR)
                factor = stats.finite(factor + cotangents.centred[:, None] * centred)
            dz = dz + factor * p
        if cotangents.uniform is not None:
            dz = dz + cotangents.uniform[:, None]
        dz = times_slope(dz, z, options.softcap)
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        for ids, g in cotangents.one_hots:
            dz = dz + jnp.where(column == (ids - start)[:, None], g[:, None], 0.0)

        def add(carry: Gradients) -> Gradients:
            narrow = dz.astype(hidden.dtype)
            of_hidden = _product(options, narrow, weights, (1, 0)) if "hidden" in wanted else None
            of_weights = _product(options, narrow, hidden, (0, 0)) if "unembedding" in wanted else None
            of_bias = jnp.sum(dz, axis=0) if "bias" in wanted else None
            return Gradients(
                hidden=put(carry.hidden, of_hidden, 0, add=True),
                unembedding=put(carry.unembedding, of_weights, start, add=into is not None),
                bias=put(carry.bias, of_bias, start, add=into is not None),
            )

        if not options.filter_threshold:
            return add(carry)
        # NaN is not below it, and is never left out.
        return jax.lax.cond(jnp.any(~(p < options.filter_threshold)), add, lambda carry: carry, carry)

    carry = into or Gradients(
        unembedding=jnp.zeros(unembedding.shape, unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    carry = carry._replace(hidden=jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None)
    assert options.chunk_size is not None
    return fold(step, carry, vocab_size, options.chunk_size, saved)


def _closed_form(inputs: Inputs, cotangents: Cotangents, wanted: frozenset[str], into: Gradients) -> Gradients:
    """`backward` without softmax part and (under a soft-cap) without uniform part: no product."""
    hidden, unembedding, bias = inputs.hidden.astype(jnp.float32), into.unembedding, into.bias
    for ids, g in cotangents.one_hots:
        # Negative ids would count from the end.
        places = jnp.where(ids >= 0, ids, inputs.unembedding.shape[0])
        if unembedding is not None:
            unembedding = unembedding.at[places].add(g[:, None] * hidden, mode="drop")
        if bias is not None:
            bias = bias.at[places].add(g, mode="drop")
    if cotangents.uniform is not None:
        if unembedding is not None:
            row = jnp.matmul(cotangents.uniform, hidden, precision=jax.lax.Precision.HIGHEST)
            unembedding = unembedding + row[None, :]
        if bias is not None:
            bias = bias + jnp.sum(cotangents.uniform)
    return Gradients(
        hidden=closed_form_hidden(inputs, cotangents) if "hidden" in wanted else None,
        unembedding=unembedding,
        bias=bias,
    )


def check(options: Options, inputs: Inputs, platform: Platform) -> str:
    """Runs anywhere."""
    vocab_size = inputs.unembedding.shape[0]
    chunk = _chunk(options, inputs.hidden.shape[0], vocab_size)
    return f"{chunk} columns at a time, {-(-vocab_size // chunk)} chunks"


IMPLEMENTATION = Implementation(forward=forward, backward=backward, check=check, accumulates=True)
