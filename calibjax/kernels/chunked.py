"""The operator as an XLA loop over chunks of the vocabulary: runs anywhere, the default on CPU.

Memory beyond inputs and outputs: a few float32 blocks `[N, C]`, C columns at a time (two to six, by what is wanted),
and a `[C, D]` slice of the unembedding and of its gradient; with `save_logits`, the float32 logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.kernels import stats
from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments, softcapped, times_slope
from calibjax.runtime.arrays import ceil_div

# Columns of a chunk: with fewer the products are slower, with more the blocks do not fit into the cache. Rows of 1,024
# would all start at the same cache sets of a CPU, which makes the transposed product 10% slower.
_COLUMNS = 1152
_HELD_COLUMNS = 8192  # of a chunk of logits that are at hand, enough for XLA's CPU compiler to divide it among cores
_LOGITS_BYTES = 64 * 2**20  # at most of one [N, C] float32 block
_FEW_TOKENS = 64  # tokens up to which copying the unembedding slice by slice would cost as much as the product
_ACCELERATOR_FACTOR = 8  # of columns and bytes: small kernels leave a GPU idle, and no block fits into its cache


def choose_chunk_size(tokens: int, vocab_size: int) -> int:
    """Columns per chunk: a multiple of 128, at least 128, or the whole vocabulary.

    On CPU 1,152 columns, fewer where their float32 logits would take more than 64 MiB; with up to 64 tokens the whole
    vocabulary if its logits take no more, which saves copies. Elsewhere 8 times as much (see `platforms.platform`).
    """
    factor = 1 if platform().name == "cpu" else _ACCELERATOR_FACTOR
    fitting = factor * _LOGITS_BYTES // (4 * max(tokens, 1))
    if tokens <= _FEW_TOKENS and vocab_size <= fitting:
        return vocab_size
    columns = min(factor * _COLUMNS, fitting)
    whole_lanes = max(columns // 128 * 128, 128)
    return min(whole_lanes, vocab_size)


_Saved = tuple[Array | None, Array | None]  # logits of the first piece [N, C'] and of the chunks after it [K, N, C]


def _chunk_size(options: Options, tokens: int, vocab_size: int) -> int:
    return min(options.chunk_size or choose_chunk_size(tokens, vocab_size), vocab_size)


def block_logits(options: Options, inputs: Inputs, start: Array | int, width: int) -> tuple[Array, Array]:
    """Rows `start` to `start + width` of W, and softcap(h W_cᵀ + b_c), float32 [N, C]."""
    weights = take_rows(inputs.unembedding, start, width)
    z = options.matmul(inputs.hidden, weights, (1, 1))
    if inputs.bias is not None:
        z = z + take_rows(inputs.bias, start, width)[None, :]
    return weights, softcapped(z, options.softcap)


def fold(step: Callable, carry: Any, size: int, width: int, saved: _Saved | None = None) -> tuple[Any, _Saved]:
    """The carry after `step(carry, start, width, z) -> (carry, z)` for all pieces of `size`, and the z of each piece.

    A step receives the z that `saved` holds for its piece, or None. The first step runs outside the scan in three
    cases: its piece is ragged, so that nothing is padded or masked; there is no `carry` yet; or logits are `saved`.
    """
    first, others = (None, None) if saved is None else saved
    ragged = size % width
    scan_from = 0
    if ragged or carry is None or saved is not None:
        scan_from = ragged or width
        carry, first = step(carry, 0, scan_from, first)
    starts = jnp.arange(scan_from, size, width, dtype=jnp.int32)
    if starts.size:
        carry, others = jax.lax.scan(lambda carry, x: step(carry, x[0], width, x[1]), carry, (starts, others))
    return carry, (first, others)


def take_rows(array: Array, start: Array | int, width: int) -> Array:
    """array[start : start + width], for a start that may be traced."""
    return jax.lax.dynamic_slice_in_dim(array, start, width, axis=0)


def update_rows(whole: Array | None, block: Array | None, start: Array | int, add: bool = False) -> Array | None:
    """`whole` with `block` in place of its rows from `start` on, or added to them; None stays None."""
    if whole is None or block is None:
        return None
    if add:
        block = take_rows(whole, start, block.shape[0]) + block
    return jax.lax.dynamic_update_slice_in_dim(whole, block.astype(whole.dtype), start, axis=0)


def first_gradients(inputs: Inputs, wanted: frozenset[str], into: Gradients | None) -> Gradients:
    """What `add_gradients` adds the first chunk to."""
    hidden, unembedding = inputs.hidden, inputs.unembedding
    carry = into or Gradients(
        unembedding=jnp.zeros(unembedding.shape, unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((len(unembedding),), jnp.float32) if "bias" in wanted else None,
    )
    return carry._replace(hidden=jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None)


def add_gradients(
    options: Options, carry: Gradients, dz: Array, factor: Any, weights: Array, hidden: Array, start: Any, add: bool
) -> Gradients:
    """Adds a chunk of the vocabulary to the gradients, from its dz [N, C] and its rows of W, which begin at `start`.

    `factor`: that of dz, see `Cotangents.in_range_of`. `add`: add to the gradients in unembedding and bias.
    """
    narrow = dz.astype(hidden.dtype)
    d_hidden = None if carry.hidden is None else options.matmul(narrow, weights, (1, 0))
    d_weights = None if carry.unembedding is None else options.matmul(narrow, hidden, (0, 0))
    d_bias = None if carry.bias is None else jnp.sum(dz, axis=0, dtype=jnp.float32)
    if factor is not None:
        d_hidden, d_weights, d_bias = jax.tree.map(lambda d: d / factor, (d_hidden, d_weights, d_bias))
    return Gradients(
        hidden=update_rows(carry.hidden, d_hidden, 0, add=True),
        unembedding=update_rows(carry.unembedding, d_weights, start, add=add),
        bias=update_rows(carry.bias, d_bias, start, add=add),
    )


class Chunked(Implementation):
    """Runs anywhere, with any options; `logits` are those of the forward pass, computed chunk by chunk if None."""

    accumulates = True

    def __init__(self, logits: Float[Array, "N V"] | None = None):
        self._logits = logits

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        vocab_size = inputs.unembedding.shape[0]
        chunk = _chunk_size(options, inputs.hidden.shape[0], vocab_size)
        return f"{chunk} columns at a time, {ceil_div(vocab_size, chunk)} chunks"

    def forward(
        self, options: Options, needed: frozenset[str], save: bool, inputs: Inputs
    ) -> tuple[Moments, _Saved | None]:
        inputs = inputs.masked()
        hidden, unembedding, bias, _, targets, _ = inputs
        scale = options.scales_of_sums(inputs)
        vocab_size = unembedding.shape[0]
        linear_mean = "total" in needed and options.softcap is None
        computed_apart = {"expected_row", "total"} if linear_mean else {"expected_row"}

        def step(total: Moments | None, start: Array | int, width: int, _: None) -> tuple[Moments, Array | None]:
            weights = None
            if self._logits is None:
                weights, z = block_logits(options, inputs, start, width)
            else:
                z = jax.lax.dynamic_slice_in_dim(self._logits, start, width, axis=1)
            moments = stats.moments(z, options.scales or scale, targets, start, needed - computed_apart)
            if "expected_row" in needed:
                assert weights is not None
                difference = jnp.maximum(z - moments.max_logit[:, None], stats.FLOOR)
                e = times_slope(jnp.exp(scale[:, None] * difference), z, options.softcap)
                if targets is not None:
                    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                    e = jnp.where(column == (targets - start)[:, None], 0.0, e)
                summed = options.matmul(e.astype(hidden.dtype), weights, (1, 0))
                moments = moments._replace(expected_row=summed * stats.inverse_weight(moments.weight)[:, None])
            total = moments if total is None else stats.merge(total, moments, scale)
            return total, z if save else None

        width = _HELD_COLUMNS if self._logits is not None else _chunk_size(options, len(hidden), vocab_size)
        total, saved = fold(step, None, vocab_size, min(width, vocab_size))
        if linear_mean:
            # Without a soft-cap the sum over v commutes with the product: one row instead of V.
            row = jnp.mean(unembedding, axis=0, dtype=jnp.float32)
            mean = jnp.matmul(hidden.astype(jnp.float32), row, precision="highest")
            mean = mean if bias is None else mean + jnp.mean(bias)
            total = total._replace(total=vocab_size * mean)
        return total, saved if save else None

    def backward(
        self, options: Options, wanted: frozenset[str], inputs: Inputs, cotangents: Cotangents, into: Gradients | None
    ) -> Gradients:
        """By one more pass over the vocabulary; a chunk's logits are computed again, or taken from what was saved."""
        inputs = inputs.masked()
        hidden, unembedding = inputs.hidden, inputs.unembedding
        if wanted == {"hidden"} and cotangents.hidden_is_closed(options):
            return Gradients(hidden=closed_form_hidden(inputs, cotangents))
        cotangents, factor = cotangents.in_range_of(hidden.dtype)

        def step(carry: Gradients, start: Array | int, width: int, z: Array | None) -> tuple[Gradients, None]:
            if z is None:
                weights, z = block_logits(options, inputs, start, width)
            else:
                weights = take_rows(unembedding, start, width)
            # At most 1: with logits or scales of 1e30 the rounding of s·z is large.
            log_p = inputs.scale[:, None] * z - cotangents.log_normalizer[:, None]
            p = jnp.exp(jnp.minimum(log_p, 0.0))
            dz = jnp.zeros_like(z)
            if cotangents.softmax is not None:
                coefficient = cotangents.softmax[:, None]
                if cotangents.centred is not None:
                    assert cotangents.expected_logit is not None
                    # The floor keeps 0·(z − E) = 0 where a bias of −inf removes an entry.
                    centred = jnp.maximum(z - cotangents.expected_logit[:, None], stats.FLOOR)
                    coefficient = stats.clip_infinities(coefficient + cotangents.centred[:, None] * centred)
                dz = dz + coefficient * p
            if cotangents.uniform is not None:
                dz = dz + cotangents.uniform[:, None]
            dz = times_slope(dz, z, options.softcap)
            column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
            for ids, g in cotangents.one_hots:
                dz = dz + jnp.where(column == (ids - start)[:, None], g[:, None], 0.0)
            return add_gradients(options, carry, dz, factor, weights, hidden, start, into is not None), None

        carry = first_gradients(inputs, wanted, into)
        chunk = _chunk_size(options, len(hidden), len(unembedding))
        return fold(step, carry, len(unembedding), chunk, cotangents.saved)[0]
