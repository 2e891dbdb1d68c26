"""The operator as an XLA loop over chunks of the vocabulary: runs anywhere, the default on CPU.

Memory beyond inputs and outputs: a few float32 blocks `[N, C]`, C columns at a time (two to six, by what is wanted),
and a `[C, D]` slice of the unembedding and of its gradient; with `save_logits`, the float32 logits; with
`filter_threshold`, the gradients in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.operator import Call, Gradients, Implementation, Model, Signal, closed_form_hidden
from calibjax.kernels.platforms import Platform, platform

# Columns of a chunk: with fewer a product loses speed, with more the blocks leave the cache. Rows of 1,024 would all
# start at the same places of a CPU's cache, which makes the transposed product 10% slower.
_COLUMNS = 1152
_LOGITS_BYTES = 64 * 2**20  # at most of one [N, C] float32 block
_FEW = 64  # tokens up to which copying the unembedding slice by slice would cost as much as the product
_ACCELERATOR = 8  # times as many columns and bytes: small kernels leave a GPU idle, and its cache holds no block anyway
_FILTER_TOKENS, _FILTER_COLUMNS = 128, 512  # of the blocks a filter may leave out; in smaller ones the loop is felt


def choose_chunk_size(tokens: int, vocab_size: int) -> int:
    """Columns a chunk: a multiple of 128, at least 128, or the whole vocabulary.

    On CPU 1,152 columns, fewer where their float32 logits would take more than 64 MiB; with up to 64 tokens the whole
    vocabulary if its logits take no more, so that no slice is copied. Elsewhere 8 times as many columns and bytes.
    Decided while tracing, by `platforms.platform()`.
    """
    factor = 1 if platform().name == "cpu" else _ACCELERATOR
    fitting = factor * _LOGITS_BYTES // (4 * max(tokens, 1))
    if tokens <= _FEW and vocab_size <= fitting:
        return vocab_size
    return min(max(min(factor * _COLUMNS, fitting) // 128 * 128, 128), vocab_size)


def _chunk(call: Call, tokens: int, vocab_size: int) -> int:
    if call.chunk_size is not None:
        return min(call.chunk_size, vocab_size)
    chunk = choose_chunk_size(tokens, vocab_size)
    return min(chunk, _FILTER_COLUMNS) if call.filter_threshold else chunk


def _product(call: Call, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=call.precision, preferred_element_type=jnp.float32)


def _block_logits(call: Call, hidden: Array, weights: Array, bias: Array | None) -> Array:
    """softcap(h W_cᵀ + b_c), float32 [N, C]."""
    z = _product(call, hidden, weights, (1, 1))
    if bias is not None:
        z = z + bias[None, :]
    if call.softcap is not None:
        z = call.softcap * jnp.tanh(z / call.softcap)
    return z


def _pieces(width: int, size: int) -> tuple[int, Array]:
    """Width of the first, ragged piece (0 where `width` divides `size`), and the starts of the full pieces after it.

    The ragged piece has a program of its own, so that nothing is ever padded or masked.
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


def forward(
    call: Call, model: Model, scale: Array, targets: Array | None, needed: frozenset[str], save: bool
) -> tuple[stats.Moments, "_Saved | None"]:
    """The moments of the whole vocabulary, chunk by chunk; see `Implementation`."""
    hidden, unembedding, bias, _ = model.clean()
    vocab_size = unembedding.shape[0]
    linear_mean = "total" in needed and call.softcap is None
    of_piece = needed - {"rows"} - ({"total"} if linear_mean else set())

    def piece(start: Array | int, width: int) -> tuple[stats.Moments, Array | None]:
        weights = rows(unembedding, start, width)
        z = _block_logits(call, hidden, weights, None if bias is None else rows(bias, start, width))
        found = stats.moments(z, scale, targets, start, of_piece)
        if "rows" in needed:
            e = jnp.exp(scale[:, None] * jnp.maximum(z - found.max_logit[:, None], stats.FLOOR))
            if call.softcap is not None:
                e = e * (1.0 - jnp.square(z / call.softcap))
            if targets is not None:
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                e = jnp.where(column == (targets - start)[:, None], 0.0, e)
            summed = _product(call, e.astype(hidden.dtype), weights, (1, 0))
            found = found._replace(rows=summed * stats.inverse_weight(found.weight)[:, None])
        return found, z if save else None

    def step(carry: stats.Moments, start: Array) -> tuple[stats.Moments, Array | None]:
        found, z = piece(start, chunk)
        return stats.merge(carry, found, scale), z

    chunk = _chunk(call, hidden.shape[0], vocab_size)
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
    return total, (first, chunks) if save else None


_Saved = tuple[Array | None, Array | None]  # logits of the first piece [N, C'] and of the chunks after it [K, N, C]


def backward(
    call: Call,
    model: Model,
    signal: Signal,
    saved: _Saved | None,
    wanted: frozenset[str],
    into: Gradients | None = None,
) -> Gradients:
    """Gradients by one more pass over the vocabulary; see `Implementation` and `Signal`.

    The logits of a chunk are computed anew, or taken from `saved`. `into`: float32 gradients in unembedding and bias of
    other tokens, where wanted; those of these tokens are added to them.
    """
    model = model.clean()
    vocab_size, width = model.unembedding.shape
    tokens = model.hidden.shape[0]
    if wanted == {"hidden"} and signal.hidden_is_closed(call):
        return Gradients(hidden=closed_form_hidden(model, signal))
    chunk = _chunk(call, tokens, vocab_size)
    if not call.filter_threshold:
        return _accumulate(call, chunk, model, signal, saved, wanted, into)

    # Blocks of tokens, too, and outside of them what must not be left out with them.
    linear = call.softcap is None
    exact = signal._replace(weight=None, tilt=None, expected=None, uniform=signal.uniform if linear else None)
    inside = signal._replace(one_hots=(), uniform=None if linear else signal.uniform)
    if into is None:
        into = Gradients(
            unembedding=jnp.zeros((vocab_size, width), jnp.float32) if "unembedding" in wanted else None,
            bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
        )

    def step(carry: Gradients, start: Array | int, width: int, _: None) -> Gradients:
        block = model._replace(hidden=rows(model.hidden, start, width))
        of_block = jax.tree.map(lambda x: rows(x, start, width), inside)
        logits = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 2), saved)
        found = _accumulate(call, chunk, block, of_block, logits, wanted, carry)
        return found._replace(hidden=put(carry.hidden, found.hidden, start, add=True))

    return fold(step, _closed_form(model, exact, wanted, into), tokens, max(min(_FILTER_TOKENS, tokens), 1))


def _accumulate(
    call: Call,
    chunk: int,
    model: Model,
    signal: Signal,
    saved: _Saved | None,
    wanted: frozenset[str],
    into: Gradients | None,
) -> Gradients:
    """`backward` with every term added in the same pass; chunks of p < `call.filter_threshold` add nothing."""
    hidden, unembedding, bias, _ = model
    vocab_size = unembedding.shape[0]

    def step(carry: Gradients, start: Array | int, width: int, z: Array | None) -> Gradients:
        weights = rows(unembedding, start, width)
        if z is None:
            z = _block_logits(call, hidden, weights, None if bias is None else rows(bias, start, width))
        p = jnp.exp(signal.scale[:, None] * z - signal.log_normalizer[:, None])
        dz = jnp.zeros_like(z)
        if signal.weight is not None:
            factor = signal.weight[:, None]
            if signal.tilt is not None:
                assert signal.expected is not None
                # The floor keeps 0·(z − E) = 0 where a bias of −inf removes an entry.
                centred = jnp.maximum(z - signal.expected[:, None], stats.FLOOR)
                factor = factor + signal.tilt[:, None] * centred
            dz = dz + factor * p
        if signal.uniform is not None:
            dz = dz + signal.uniform[:, None]
        if call.softcap is not None:
            dz = dz * (1.0 - jnp.square(z / call.softcap))
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        for ids, g in signal.one_hots:
            dz = dz + jnp.where(column == (ids - start)[:, None], g[:, None], 0.0)

        def add(carry: Gradients) -> Gradients:
            narrow = dz.astype(hidden.dtype)
            of_hidden = _product(call, narrow, weights, (1, 0)) if "hidden" in wanted else None
            of_weights = _product(call, narrow, hidden, (0, 0)) if "unembedding" in wanted else None
            of_bias = jnp.sum(dz, axis=0) if "bias" in wanted else None
            return Gradients(
                hidden=put(carry.hidden, of_hidden, 0, add=True),
                unembedding=put(carry.unembedding, of_weights, start, add=into is not None),
                bias=put(carry.bias, of_bias, start, add=into is not None),
            )

        if not call.filter_threshold:
            return add(carry)
        # NaN is not below it, and is never left out.
        return jax.lax.cond(jnp.any(~(p < call.filter_threshold)), add, lambda carry: carry, carry)

    carry = into or Gradients(
        unembedding=jnp.zeros(unembedding.shape, unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    carry = carry._replace(hidden=jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None)
    return fold(step, carry, vocab_size, chunk, saved)


def _closed_form(model: Model, signal: Signal, wanted: frozenset[str], into: Gradients) -> Gradients:
    """`backward` of a signal without softmax part and (under a soft-cap) without uniform part: no product."""
    hidden, unembedding = model.hidden.astype(jnp.float32), into.unembedding
    bias = into.bias
    for ids, g in signal.one_hots:
        # Negative ids would count from the end.
        places = jnp.where(ids >= 0, ids, model.unembedding.shape[0])
        if unembedding is not None:
            unembedding = unembedding.at[places].add(g[:, None] * hidden, mode="drop")
        if bias is not None:
            bias = bias.at[places].add(g, mode="drop")
    if signal.uniform is not None:
        if unembedding is not None:
            row = jnp.matmul(signal.uniform, hidden, precision=jax.lax.Precision.HIGHEST)
            unembedding = unembedding + row[None, :]
        if bias is not None:
            bias = bias + jnp.sum(signal.uniform)
    return Gradients(
        hidden=closed_form_hidden(model, signal) if "hidden" in wanted else None,
        unembedding=unembedding,
        bias=bias,
    )


def check(call: Call, model: Model, platform: Platform) -> str:
    """Runs anywhere; see `Implementation`."""
    vocab_size = model.unembedding.shape[0]
    chunk = _chunk(call, model.hidden.shape[0], vocab_size)
    return f"{chunk} columns at a time, {-(-vocab_size // chunk)} chunks"


IMPLEMENTATION = Implementation(
    forward=forward,
    backward=backward,
    check=check,
    adding=lambda gradients: IMPLEMENTATION._replace(backward=functools.partial(backward, into=gradients)),
)
