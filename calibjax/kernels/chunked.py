"""The operator as an XLA loop over chunks of the vocabulary: runs anywhere, the default on CPU.

Memory beyond inputs and outputs: a few float32 blocks `[N, C]`, C columns at a time (two to six, by what is wanted),
and one `[C, D]` slice of the unembedding. Products: 2·N·D·V forward; backward 2·N·D·V to recompute the logits and
2·N·D·V for each of dh and dW that is asked for. A gradient in the scale alone needs no backward product at all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.kernels import stats

_LOGITS_BYTES = 8 * 2**20  # of one [N, C] float32 block: it stays in a CPU's last cache from one pass to the next
_NARROW = 1024  # columns under which a product loses speed; kept as long as a block takes at most 8 times the above


def choose_chunk_size(tokens: int, vocab_size: int) -> int:
    """Columns a chunk: 8 MiB of float32 logits, or 1,024 columns in up to 64 MiB; a multiple of 128, at least 128."""
    column = 4 * max(tokens, 1)
    chunk = max(_LOGITS_BYTES // column, min(_NARROW, 8 * _LOGITS_BYTES // column))
    return min(max(chunk // 128 * 128, 128), vocab_size)


class _Spec(NamedTuple):
    """What is static in a call."""

    wanted: frozenset[str]
    softcap: float | None
    precision: jax.lax.PrecisionLike
    chunk_size: int


class _Outputs(NamedTuple):
    """The statistics that the loop itself computes; those not wanted are None."""

    log_normalizer: Array | None
    target_logit: Array | None
    mean_logit: Array | None
    max_logit: Array | None
    argmax: Array | None
    expected_logit: Array | None
    logit_variance: Array | None


class _Residuals(NamedTuple):
    """Kept from the forward pass. `model` is None where only the scale is differentiated: then no product is needed."""

    scale: Array
    expected_logit: Array | None
    logit_variance: Array | None
    model: "_ModelResiduals | None"


class _ModelResiduals(NamedTuple):
    hidden: Array
    unembedding: Array
    bias: Array | None
    targets: Array | None
    argmax: Array | None
    log_normalizer: Array
    expected_logit: Array | None
    differentiated: tuple[tuple[()] | None, ...]  # (hidden, unembedding, bias): () where differentiated


def statistics(
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    scale: Float[Array, " N"],
    targets: Int[Array, " N"] | None,
    *,
    wanted: frozenset[str],
    softcap: float | None,
    precision: jax.lax.PrecisionLike,
    chunk_size: int | None = None,
) -> dict[str, Array]:
    """All wanted statistics of N tokens, in float32; see `VocabStats`. `chunk_size` None chooses by memory."""
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    tokens, vocab_size = hidden.shape[0], unembedding.shape[0]
    chunk = choose_chunk_size(tokens, vocab_size) if chunk_size is None else min(chunk_size, vocab_size)
    spec = _Spec(wanted, softcap, precision, chunk)
    outputs: _Outputs = _statistics(
        spec,
        hidden.astype(dtype),
        unembedding.astype(dtype),
        None if bias is None else bias.astype(jnp.float32),
        scale.astype(jnp.float32),
        targets,
    )
    return {name: value for name, value in outputs._asdict().items() if value is not None}


def _block_logits(spec: _Spec, hidden: Array, weights: Array, bias: Array | None) -> Array:
    """softcap(h W_cᵀ + b_c), float32 [N, C]."""
    z = jax.lax.dot_general(
        hidden, weights, (((1,), (1,)), ((), ())), precision=spec.precision, preferred_element_type=jnp.float32
    )
    if bias is not None:
        z = z + bias[None, :]
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    return z


def _pieces(spec: _Spec, vocab_size: int) -> tuple[int, jax.Array]:
    """Width of the first, ragged piece (0 where the chunks divide V), and the starts of the full chunks after it.

    The ragged piece has a program of its own, so that no column is ever padded or masked.
    """
    ragged = vocab_size % spec.chunk_size
    return ragged, jnp.arange(ragged, vocab_size, spec.chunk_size, dtype=jnp.int32)


def _rows(array: Array, start: Array | int, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, start, width, axis=0)


def _forward(
    spec: _Spec,
    hidden: Array,
    unembedding: Array,
    bias: Array | None,
    scale: Array,
    targets: Array | None,
    wanted: frozenset[str],
) -> _Outputs:
    vocab_size = unembedding.shape[0]
    moments_wanted = set()
    if wanted & {"expected_logit", "logit_variance"}:
        moments_wanted.add("first")
    if "logit_variance" in wanted:
        moments_wanted.add("second")
    if "target_logit" in wanted:
        moments_wanted.add("target")
    if "argmax" in wanted:
        moments_wanted.add("argmax")
    linear_mean = "mean_logit" in wanted and spec.softcap is None
    if "mean_logit" in wanted and not linear_mean:
        moments_wanted.add("total")

    def piece(start: Array | int, width: int) -> stats.Moments:
        weights = _rows(unembedding, start, width)
        z = _block_logits(spec, hidden, weights, None if bias is None else _rows(bias, start, width))
        return stats.moments(z, scale, targets, start, frozenset(moments_wanted))

    ragged, starts = _pieces(spec, vocab_size)
    total = piece(0, ragged) if ragged else piece(starts[0], spec.chunk_size)
    starts = starts if ragged else starts[1:]
    if starts.size:
        total, _ = jax.lax.scan(
            lambda carry, start: (stats.merge(carry, piece(start, spec.chunk_size), scale), None), total, starts
        )

    mean = total.total / vocab_size if total.total is not None else None
    if linear_mean:
        # Without a soft-cap the mean over v commutes with the product: one row instead of V.
        mean_row = jnp.mean(unembedding, axis=0, dtype=jnp.float32)
        mean = jnp.matmul(hidden.astype(jnp.float32), mean_row, precision=jax.lax.Precision.HIGHEST)
        mean = mean if bias is None else mean + jnp.mean(bias)
    shift = None if total.first is None else total.first / total.weight
    variance = None
    if total.second is not None and shift is not None:
        variance = jnp.maximum(total.second / total.weight - shift * shift, 0.0)
    return _Outputs(
        log_normalizer=scale * total.max_logit + jnp.log(total.weight),
        target_logit=total.target,
        mean_logit=mean,
        max_logit=total.max_logit,
        argmax=total.argmax,
        expected_logit=None if shift is None else total.max_logit + shift,
        logit_variance=variance,
    )


def _only(outputs: _Outputs, wanted: frozenset[str]) -> _Outputs:
    return _Outputs(**{name: value if name in wanted else None for name, value in outputs._asdict().items()})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(spec, hidden, unembedding, bias, scale, targets) -> _Outputs:
    return _only(_forward(spec, hidden, unembedding, bias, scale, targets, spec.wanted), spec.wanted)


def _statistics_fwd(spec, hidden, unembedding, bias, scale, targets):
    # With symbolic_zeros each argument says whether it is differentiated: what is frozen is neither kept nor computed.
    def value(x):
        return None if x is None else x.value

    wanted = set(spec.wanted)
    model_perturbed = any(x is not None and x.perturbed for x in (hidden, unembedding, bias))
    if scale.perturbed:
        wanted.add("expected_logit")
        if "expected_logit" in spec.wanted:
            wanted.add("logit_variance")
    if model_perturbed:
        wanted.add("log_normalizer")
        if "expected_logit" in spec.wanted:
            wanted.add("expected_logit")
        if "max_logit" in spec.wanted:
            wanted.add("argmax")
    arrays = hidden.value, unembedding.value, value(bias), scale.value, value(targets)
    outputs = _only(_forward(spec, *arrays, frozenset(wanted)), frozenset(wanted))
    model = None
    if model_perturbed:
        assert outputs.log_normalizer is not None
        model = _ModelResiduals(
            hidden=arrays[0],
            unembedding=arrays[1],
            bias=arrays[2],
            targets=arrays[4] if "target_logit" in spec.wanted else None,
            argmax=outputs.argmax if "max_logit" in spec.wanted else None,
            log_normalizer=outputs.log_normalizer,
            expected_logit=outputs.expected_logit,
            differentiated=tuple(() if x is not None and x.perturbed else None for x in (hidden, unembedding, bias)),
        )
    residuals = _Residuals(
        scale=arrays[3],
        expected_logit=outputs.expected_logit if scale.perturbed else None,
        logit_variance=outputs.logit_variance if scale.perturbed else None,
        model=model,
    )
    return _only(outputs, spec.wanted), residuals


def _statistics_bwd(spec, residuals: _Residuals, cotangents: _Outputs):
    def given(cotangent):
        """The cotangent, or None where it is known to be zero."""
        symbolic = cotangent is None or isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        return None if symbolic else cotangent

    g_lse, g_expected = given(cotangents.log_normalizer), given(cotangents.expected_logit)
    d_scale = None
    for g, derivative in ((g_lse, residuals.expected_logit), (g_expected, residuals.logit_variance)):
        if g is not None and derivative is not None:
            d_scale = g * derivative if d_scale is None else d_scale + g * derivative
    if residuals.model is None:
        return None, None, None, d_scale, None
    d_hidden, d_unembedding, d_bias = _model_gradients(
        spec,
        residuals.model,
        residuals.scale,
        _Outputs(
            log_normalizer=g_lse,
            target_logit=given(cotangents.target_logit),
            mean_logit=given(cotangents.mean_logit),
            max_logit=given(cotangents.max_logit),
            argmax=None,
            expected_logit=g_expected,
            logit_variance=None,
        ),
    )
    return d_hidden, d_unembedding, d_bias, d_scale, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


def _model_gradients(
    spec: _Spec, model: _ModelResiduals, scale: Array, g: _Outputs
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients in hidden, unembedding and bias; None for those not differentiated.

    For the cotangents g of the outputs, with p = softmax(s z) and c_v = 1 − (z_v/cap)² (1 without a soft-cap):
    dz_v = c_v [ p_v (s g_lse + g_expected (1 + s (z_v − E_p[z]))) + [v=y] g_target + [v=argmax] g_max + g_mean/V ].
    The logits of a chunk are computed anew, so every term is added in the same pass over them.
    """
    hidden, unembedding = model.hidden, model.unembedding
    (tokens, width_d), vocab_size = hidden.shape, unembedding.shape[0]
    want_hidden, want_unembedding, want_bias = (flag is not None for flag in model.differentiated)

    def gradients(start: Array | int, width: int) -> tuple[Array | None, Array | None, Array | None]:
        weights = _rows(unembedding, start, width)
        z = _block_logits(spec, hidden, weights, None if model.bias is None else _rows(model.bias, start, width))
        dz = jnp.zeros_like(z)
        if g.log_normalizer is not None or g.expected_logit is not None:
            factor = jnp.zeros((tokens, 1), jnp.float32)
            if g.log_normalizer is not None:
                factor = factor + (scale * g.log_normalizer)[:, None]
            if g.expected_logit is not None:
                assert model.expected_logit is not None
                # The floor keeps 0·(z − E) = 0 where a bias of −inf removes an entry.
                centred = jnp.maximum(z - model.expected_logit[:, None], stats.FLOOR)
                factor = factor + g.expected_logit[:, None] * (1.0 + scale[:, None] * centred)
            dz = dz + factor * jnp.exp(scale[:, None] * z - model.log_normalizer[:, None])
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
        for one_hot, cotangent in ((model.targets, g.target_logit), (model.argmax, g.max_logit)):
            if one_hot is not None and cotangent is not None:
                dz = dz + jnp.where(column == (one_hot - start)[:, None], cotangent[:, None], 0.0)
        if g.mean_logit is not None:
            dz = dz + (g.mean_logit / vocab_size)[:, None]
        if spec.softcap is not None:
            dz = dz * (1.0 - jnp.square(z / spec.softcap))

        def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
            dimensions = (((contract[0],), (contract[1],)), ((), ()))
            return jax.lax.dot_general(a, b, dimensions, precision=spec.precision, preferred_element_type=jnp.float32)

        narrow = dz.astype(hidden.dtype)
        return (
            product(narrow, weights, (1, 0)) if want_hidden else None,
            product(narrow, hidden, (0, 0)).astype(unembedding.dtype) if want_unembedding else None,
            jnp.sum(dz, axis=0) if want_bias else None,
        )

    def put(whole: Array | None, rows: Array | None, start: Array | int) -> Array | None:
        return (
            None if whole is None or rows is None else jax.lax.dynamic_update_slice_in_dim(whole, rows, start, axis=0)
        )

    def accumulate(carry, start: Array | int, width: int):
        d_hidden, d_unembedding, d_bias = carry
        block_hidden, block_unembedding, block_bias = gradients(start, width)
        return (
            None if block_hidden is None else d_hidden + block_hidden,
            put(d_unembedding, block_unembedding, start),
            put(d_bias, block_bias, start),
        )

    ragged, starts = _pieces(spec, vocab_size)
    carry = (
        jnp.zeros((tokens, width_d), jnp.float32) if want_hidden else None,
        jnp.zeros(unembedding.shape, unembedding.dtype) if want_unembedding else None,
        jnp.zeros((vocab_size,), jnp.float32) if want_bias else None,
    )
    if ragged:
        carry = accumulate(carry, 0, ragged)
    if starts.size:
        carry, _ = jax.lax.scan(lambda c, start: (accumulate(c, start, spec.chunk_size), None), carry, starts)
    d_hidden, d_unembedding, d_bias = carry
    return None if d_hidden is None else d_hidden.astype(hidden.dtype), d_unembedding, d_bias
