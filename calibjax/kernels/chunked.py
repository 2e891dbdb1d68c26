"""The operator as an XLA loop over chunks of the vocabulary: runs anywhere, the default on CPU.

Memory beyond inputs and outputs: a few float32 blocks `[N, C]`, C columns at a time (two to six, by what is wanted),
and one `[C, D]` slice of the unembedding; with `save_logits`, the float32 logits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.operator import Call, Gradients, Implementation, Model, Signal, closed_form_hidden

_LOGITS_BYTES = 8 * 2**20  # of one [N, C] float32 block: it stays in a CPU's last cache from one pass to the next
_NARROW = 1024  # columns under which a product loses speed; kept as long as a block takes at most 8 times the above


def choose_chunk_size(tokens: int, vocab_size: int) -> int:
    """Columns a chunk: 8 MiB of float32 logits, or 1,024 columns in up to 64 MiB; a multiple of 128, at least 128."""
    column = 4 * max(tokens, 1)
    chunk = max(_LOGITS_BYTES // column, min(_NARROW, 8 * _LOGITS_BYTES // column))
    return min(max(chunk // 128 * 128, 128), vocab_size)


def _chunk(call: Call, tokens: int, vocab_size: int) -> int:
    return choose_chunk_size(tokens, vocab_size) if call.chunk_size is None else min(call.chunk_size, vocab_size)


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


def _pieces(chunk: int, vocab_size: int) -> tuple[int, Array]:
    """Width of the first, ragged piece (0 where the chunks divide V), and the starts of the full chunks after it.

    The ragged piece has a program of its own, so that no column is ever padded or masked.
    """
    ragged = vocab_size % chunk
    return ragged, jnp.arange(ragged, vocab_size, chunk, dtype=jnp.int32)


def _slice(array: Array, start: Array | int, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, width, axis=0)


def forward(
    call: Call, model: Model, scale: Array, targets: Array | None, needed: frozenset[str], save: bool
) -> tuple[stats.Moments, "_Saved | None"]:
    """The moments of the whole vocabulary, chunk by chunk; see `Implementation`."""
    hidden, unembedding, bias, _ = model.clean()
    vocab_size = unembedding.shape[0]
    linear_mean = "total" in needed and call.softcap is None
    of_piece = needed - {"rows"} - ({"total"} if linear_mean else set())

    def piece(start: Array | int, width: int) -> tuple[stats.Moments, Array | None]:
        weights = _slice(unembedding, start, width)
        z = _block_logits(call, hidden, weights, None if bias is None else _slice(bias, start, width))
        found = stats.moments(z, scale, targets, start, of_piece)
        if "rows" in needed:
            e = jnp.exp(scale[:, None] * jnp.maximum(z - found.max_logit[:, None], stats.FLOOR))
            if call.softcap is not None:
                e = e * (1.0 - jnp.square(z / call.softcap))
            if targets is not None:
                column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
                e = jnp.where(column == (targets - start)[:, None], 0.0, e)
            found = found._replace(rows=_product(call, e.astype(hidden.dtype), weights, (1, 0)))
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


def backward(call: Call, model: Model, signal: Signal, saved: _Saved | None, wanted: frozenset[str]) -> Gradients:
    """Gradients by one more pass over the vocabulary; see `Implementation` and `Signal`.

    The logits of a chunk are computed anew, or taken from `saved`. Every term is added in the same pass over them,
    but with `filter_threshold` the closed forms of the uniform part and the one-hots stand outside, so that a chunk
    whose largest p is below the threshold costs its logits only.
    """
    hidden, unembedding, bias, _ = model.clean()
    if wanted == {"hidden"} and signal.weight is None and (signal.uniform is None or call.softcap is None):
        return Gradients(hidden=closed_form_hidden(unembedding, signal))
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]

    def gradients(start: Array | int, width: int, z: Array | None) -> Gradients:
        weights = _slice(unembedding, start, width)
        if z is None:
            z = _block_logits(call, hidden, weights, None if bias is None else _slice(bias, start, width))
        dz = jnp.zeros_like(z)
        if signal.weight is not None:
            factor = signal.weight[:, None]
            if signal.tilt is not None:
                assert signal.expected is not None
                # The floor keeps 0·(z − E) = 0 where a bias of −inf removes an entry.
                centred = jnp.maximum(z - signal.expected[:, None], stats.FLOOR)
                factor = factor + signal.tilt[:, None] * centred
            dz = dz + factor * jnp.exp(signal.scale[:, None] * z - signal.log_normalizer[:, None])
        if signal.uniform is not None:
            dz = dz + signal.uniform[:, None]
        if call.softcap is not None:
            dz = dz * (1.0 - jnp.square(z / call.softcap))
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        for ids, g in signal.one_hots:
            dz = dz + jnp.where(column == (ids - start)[:, None], g[:, None], 0.0)
        narrow = dz.astype(hidden.dtype)
        return Gradients(
            hidden=_product(call, narrow, weights, (1, 0)) if "hidden" in wanted else None,
            unembedding=(
                _product(call, narrow, hidden, (0, 0)).astype(unembedding.dtype) if "unembedding" in wanted else None
            ),
            bias=jnp.sum(dz, axis=0) if "bias" in wanted else None,
        )

    def put(whole: Array | None, rows: Array | None, start: Array | int) -> Array | None:
        if whole is None or rows is None:
            return None
        return jax.lax.dynamic_update_slice_in_dim(whole, rows, start, axis=0)

    def accumulate(carry: Gradients, start: Array | int, width: int, z: Array | None) -> Gradients:
        block = gradients(start, width, z)
        return Gradients(
            hidden=None if block.hidden is None else carry.hidden + block.hidden,
            unembedding=put(carry.unembedding, block.unembedding, start),
            bias=put(carry.bias, block.bias, start),
        )

    chunk = _chunk(call, tokens, vocab_size)
    ragged, starts = _pieces(chunk, vocab_size)
    carry = Gradients(
        hidden=jnp.zeros(hidden.shape, jnp.float32) if "hidden" in wanted else None,
        unembedding=jnp.zeros(unembedding.shape, unembedding.dtype) if "unembedding" in wanted else None,
        bias=jnp.zeros((vocab_size,), jnp.float32) if "bias" in wanted else None,
    )
    first, chunks = (None, None) if saved is None else saved
    if ragged or saved is not None:
        carry = accumulate(carry, 0, ragged or chunk, first)
        starts = starts if ragged else starts[1:]
    if starts.size:
        carry, _ = jax.lax.scan(lambda c, x: (accumulate(c, x[0], chunk, x[1]), None), carry, (starts, chunks))
    return carry


IMPLEMENTATION = Implementation(forward=forward, backward=backward)
