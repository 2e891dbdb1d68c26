"""The operator with its derivative, written once for all implementations.

An implementation gives two passes over the vocabulary, `forward` and `backward`; here it is decided which of them run,
and with what, from what is differentiated. z = softcap(h Wᵀ + b), p = softmax(s·z), c_v = 1 − (z_v/cap)² (1 without a
soft-cap). For cotangents g of the statistics,

    dz_v = p_v (s g_lse + g_expected (1 + s (z_v − E_p[z]))) + [v=y] g_target + [v=argmax] g_max + g_mean/V,
    dh = Σ_v c_v dz_v W_v,   dW_v = c_v dz_v h,   db_v = c_v dz_v,
    ds = g_lse E_p[z] + g_expected Var_p[z].

| differentiated | products N·D·V (of 2 flop), forward + backward |
|---|---|
| nothing, or the scale alone | 1 + 0 |
| hidden (and scale), W and b frozen | 2 + 0: Σ_v p_v c_v W_v comes out of the forward pass by an online softmax |
| the same, with `expected_logit`, or with `mean_logit` under a soft-cap | 1 + 2: the rows have a second weight |
| unembedding or bias alone | 1 + 2 |
| hidden and unembedding | 1 + 3, or 1 + 2 with `save_logits`; 1 + 4 without `Implementation.shares_logits` |

With `filter_threshold` those of the backward pass that follow the logits, one for each gradient, are taken only where
some p reaches it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import Moments


def _runs_anywhere(call: "Call", model: "Model", platform: Platform) -> str:
    return ""


def _shares_always(call: "Call", model: "Model", platform: Platform) -> bool:
    return True


class Implementation(NamedTuple):
    """Two passes over the vocabulary.

    Attributes:
        forward: `(call, model, scale, targets, needed, save) -> (Moments, saved)`. `needed` names the optional fields
            of `Moments` to compute. Targets outside [0, V) match nothing. Of tokens that are not valid any value may
            come back. `saved` is what `backward` may use instead of computing the logits anew (None unless `save`).
        backward: `(call, model, signal, saved, wanted) -> Gradients`, those in `wanted`, a set of "hidden",
            "unembedding", "bias". Tokens that are not valid add nothing, even where their hidden states are NaN.
        check: `(call, model, platform) -> str`: what a line of `explain` says of how the call would run (block sizes,
            say). Raises NotImplementedError with the reason where it cannot run there. Only shapes and dtypes of
            `model` are looked at (its arrays may be `jax.ShapeDtypeStruct`), and what is static in `call`.
        rows_first: where hidden and unembedding are both differentiated and no logits are saved, take the gradient in
            hidden out of the forward pass too, and leave only the unembedding to the backward pass.
        shares_logits: `(call, model, platform) -> bool`: where both gradients are left to the backward pass, whether it
            computes the logits anew once for both; for `explain`. Looks at what `check` looks at.
        saved_bytes: that `saved` takes for each logit.
        adding: `gradients -> Implementation`, with a backward pass that adds to these gradients in unembedding and
            bias, float32, of other tokens; None where there is none.
    """

    forward: Callable[..., tuple[Moments, Any]]
    backward: Callable[..., "Gradients"]
    check: Callable[["Call", "Model", Platform], str] = _runs_anywhere
    rows_first: bool = False
    shares_logits: Callable[["Call", "Model", Platform], bool] = _shares_always
    saved_bytes: float = 4
    adding: Callable[["Gradients"], "Implementation"] | None = None


class Model(NamedTuple):
    """What the logits are made of.

    Attributes:
        hidden: [N, D].
        unembedding: [V, D], of the dtype of `hidden`.
        bias: float32 [V] or None.
        valid: bool [N], False for tokens that do not count, whose hidden states may hold anything; None: all count.
    """

    hidden: Array
    unembedding: Array
    bias: Array | None
    valid: Array | None

    def clean(self) -> "Model":
        """The same with hidden states of 0 where a token does not count."""
        if self.valid is None:
            return self
        return self._replace(hidden=jnp.where(self.valid[:, None], self.hidden, 0))


class Call(NamedTuple):
    """What is static in a call."""

    implementation: Implementation | None  # None: the dense formula
    wanted: frozenset[str]
    softcap: float | None
    precision: jax.lax.PrecisionLike
    chunk_size: int | None
    filter_threshold: float | None
    save_logits: bool


class Signal(NamedTuple):
    """What the backward pass needs of each token: dz_v·c_v = c_v (exp(s z_v − lse)(weight + tilt (z_v − E)) + uniform)
    + Σ_k [v = ids_k] g_k, with the soft-cap's factor already in g_k. A field that is None is zero.

    Attributes:
        scale: float32 [N], s.
        log_normalizer: float32 [N], lse, of the whole vocabulary; inf for tokens that are not valid.
        weight: float32 [N] or None.
        tilt, expected: float32 [N] or None, E = E_p[z].
        uniform: float32 [N] or None.
        one_hots: pairs of ids int32 [N] and g float32 [N]; ids outside [0, V) match nothing.
        rows: [N, D] or None, `Moments.rows` of the whole vocabulary: then Σ_v p_v c_v W_v of dh is known but for the
            target, which stands in `one_hots`.
    """

    scale: Array
    log_normalizer: Array
    weight: Array | None
    tilt: Array | None
    expected: Array | None
    uniform: Array | None
    one_hots: tuple[tuple[Array, Array], ...]
    rows: Array | None = None

    def hidden_is_closed(self, call: Call) -> bool:
        """dh needs no logits: the part in p is absent or known, and no soft-cap ties the uniform part to them."""
        known = self.rows is not None or self.weight is None
        return known and self.tilt is None and (self.uniform is None or call.softcap is None)


class Gradients(NamedTuple):
    """Gradients in float32 or the dtype of the array they belong to; those not wanted are None."""

    hidden: Array | None = None
    unembedding: Array | None = None
    bias: Array | None = None


class Outputs(NamedTuple):
    """The statistics; those not wanted are None."""

    log_normalizer: Array | None
    target_logit: Array | None
    mean_logit: Array | None
    max_logit: Array | None
    argmax: Array | None
    expected_logit: Array | None
    logit_variance: Array | None

    def only(self, wanted: frozenset[str]) -> "Outputs":
        return Outputs(**{name: value if name in wanted else None for name, value in self._asdict().items()})


class _Residuals(NamedTuple):
    """Kept from the forward pass. `kept` is None where only the scale is differentiated: then no product is needed."""

    scale: Array
    expected_logit: Array | None
    logit_variance: Array | None
    kept: "Kept | None"


class Kept(NamedTuple):
    """What the gradients in hidden, unembedding and bias need."""

    model: Model
    targets: Array | None
    outputs: Outputs
    rows: Array | None  # Σ_{v≠y} p_v c_v W_v
    saved: Any
    differentiated: tuple[tuple[()] | None, ...]  # (hidden, unembedding, bias): () where differentiated


def statistics(
    call: Call,
    hidden: Float[Array, "N D"],
    unembedding: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    scale: Float[Array, " N"],
    targets: Int[Array, " N"] | None,
    valid: Bool[Array, " N"] | None,
) -> dict[str, Array]:
    """The statistics in `call.wanted` of N tokens, in float32; see `VocabStats`. 0 where not valid."""
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    outputs: Outputs = _statistics(
        call,
        hidden.astype(dtype),
        unembedding.astype(dtype),
        None if bias is None else bias.astype(jnp.float32),
        scale.astype(jnp.float32),
        targets,
        valid,
    )
    return {name: value for name, value in outputs._asdict().items() if value is not None}


_NEEDED = {
    "target_logit": {"target"},
    "mean_logit": {"total"},
    "argmax": {"argmax"},
    "expected_logit": {"first"},
    "logit_variance": {"first", "second"},
}


def takes_rows(call: Call, implementation: Implementation, alone: bool) -> bool:
    """Whether the gradient in hidden comes out of the forward pass; `alone`: unembedding and bias are frozen.

    With saved logits one product does as well in the backward pass, and each product has its kernel.
    """
    second_weight = "expected_logit" in call.wanted or (call.softcap is not None and "mean_logit" in call.wanted)
    return (alone or (implementation.rows_first and not call.save_logits)) and not second_weight


def _finish(total: Moments, scale: Array, vocab_size: int, valid: Array | None) -> Outputs:
    shift = None if total.first is None else total.first / total.weight
    variance = None
    if total.second is not None and shift is not None:
        variance = jnp.maximum(total.second / total.weight - shift * shift, 0.0)
    outputs = Outputs(
        log_normalizer=scale * total.max_logit + jnp.log(total.weight),
        target_logit=total.target,
        mean_logit=None if total.total is None else total.total / vocab_size,
        max_logit=total.max_logit,
        argmax=total.argmax,
        expected_logit=None if shift is None else total.max_logit + shift,
        logit_variance=variance,
    )
    if valid is None:
        return outputs
    return Outputs(*(None if x is None else jnp.where(valid, x, jnp.zeros_like(x)) for x in outputs))


def run_forward(
    call: Call, model: Model, scale: Array, targets: Array | None, wanted: frozenset[str], rows: bool, save: bool
) -> tuple[Outputs, Array | None, Any]:
    assert call.implementation is not None
    needed = frozenset().union(*(_NEEDED.get(name, ()) for name in wanted)) | ({"rows"} if rows else set())
    total, saved = call.implementation.forward(call, model, scale, targets, needed, save)
    outputs = _finish(total, scale, model.unembedding.shape[0], model.valid).only(wanted)
    return outputs, total.rows, saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(call, hidden, unembedding, bias, scale, targets, valid) -> Outputs:
    return run_forward(call, Model(hidden, unembedding, bias, valid), scale, targets, call.wanted, False, False)[0]


def _statistics_fwd(call: Call, hidden, unembedding, bias, scale, targets, valid):
    # With symbolic_zeros each argument says whether it is differentiated: what is frozen is neither kept nor computed.
    perturbed = [x is not None and x.perturbed for x in (hidden, unembedding, bias)]
    scale_perturbed = scale.perturbed
    hidden, unembedding, scale = hidden.value, unembedding.value, scale.value
    bias, targets, valid = (None if x is None else x.value for x in (bias, targets, valid))
    assert call.implementation is not None
    rows = perturbed[0] and takes_rows(call, call.implementation, alone=not any(perturbed[1:]))
    wanted = set(call.wanted)
    if scale_perturbed:
        wanted.add("expected_logit")
        if "expected_logit" in call.wanted:
            wanted.add("logit_variance")
    if any(perturbed):
        wanted |= {"log_normalizer", "max_logit"}
        if "max_logit" in call.wanted:
            wanted.add("argmax")
        if rows and targets is not None:
            wanted.add("target_logit")
    model = Model(hidden, unembedding, bias, valid)
    second_pass = any(perturbed[1:]) or (perturbed[0] and not rows)
    save = call.save_logits and second_pass
    outputs, direction, saved = run_forward(call, model, scale, targets, frozenset(wanted), rows, save)
    kept = None
    if any(perturbed):
        differentiated = tuple(() if flag else None for flag in perturbed)
        kept = Kept(model, targets, outputs, direction, saved, differentiated)
    residuals = _Residuals(
        scale=scale,
        expected_logit=outputs.expected_logit if scale_perturbed else None,
        logit_variance=outputs.logit_variance if scale_perturbed else None,
        kept=kept,
    )
    return outputs.only(call.wanted), residuals


def _statistics_bwd(call: Call, residuals: _Residuals, cotangents: Outputs):
    def given(cotangent):
        """The cotangent, or None where it is known to be zero."""
        symbolic = cotangent is None or isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        return None if symbolic else cotangent

    g = Outputs(*(given(cotangent) for cotangent in cotangents))
    d_scale = None
    for cotangent, derivative in (
        (g.log_normalizer, residuals.expected_logit),
        (g.expected_logit, residuals.logit_variance),
    ):
        if cotangent is not None and derivative is not None:
            d_scale = cotangent * derivative if d_scale is None else d_scale + cotangent * derivative
    d_model = (None, None, None)
    if residuals.kept is not None:
        gradients, arrays = model_gradients(call, residuals.kept, residuals.scale, g), residuals.kept.model[:3]
        d_model = tuple(
            None if d is None or x is None else d.astype(x.dtype) for d, x in zip(gradients, arrays, strict=True)
        )
    return *d_model, d_scale, None, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


def model_gradients(call: Call, kept: Kept, scale: Array, g: Outputs) -> Gradients:
    model, outputs = kept.model, kept.outputs
    implementation, log_normalizer = call.implementation, outputs.log_normalizer
    assert implementation is not None
    assert log_normalizer is not None
    if model.valid is not None:
        log_normalizer = jnp.where(model.valid, log_normalizer, jnp.inf)  # p = 0
    weight = None if g.log_normalizer is None else scale * g.log_normalizer
    tilt = None
    if g.expected_logit is not None:
        weight = g.expected_logit if weight is None else weight + g.expected_logit
        tilt = scale * g.expected_logit
    of_target = g.target_logit
    if kept.rows is not None and kept.targets is not None and weight is not None:
        assert outputs.target_logit is not None
        # The rows leave out the target's, which would cancel against its one-hot where the model is nearly certain.
        of_target = weight * jnp.exp(scale * outputs.target_logit - log_normalizer)
        of_target = of_target if g.target_logit is None else of_target + g.target_logit
    names = ("hidden", "unembedding", "bias")
    wanted = frozenset(name for name, flag in zip(names, kept.differentiated, strict=True) if flag is not None)

    def backward(of_target: Array | None, wanted: frozenset[str], rows: Array | None) -> Gradients:
        one_hots = (
            (kept.targets, of_target, outputs.target_logit),
            (outputs.argmax, g.max_logit, outputs.max_logit),
        )
        signal = Signal(
            scale=scale,
            log_normalizer=log_normalizer,
            weight=weight,
            tilt=tilt,
            expected=None if tilt is None else outputs.expected_logit,
            uniform=None if g.mean_logit is None else g.mean_logit / model.unembedding.shape[0],
            one_hots=tuple(
                (ids, x * _softcap_slope(call, z))
                for ids, x, z in one_hots
                if ids is not None and x is not None and z is not None
            ),
            rows=rows,
        )
        return implementation.backward(call, model, signal, kept.saved, wanted)

    if kept.rows is None:
        return backward(of_target, wanted, None)
    d_hidden = backward(of_target, frozenset({"hidden"}), kept.rows).hidden
    rest = wanted - {"hidden"}
    return (backward(g.target_logit, rest, None) if rest else Gradients())._replace(hidden=d_hidden)


def _softcap_slope(call: Call, logit: Array) -> Array | float:
    """∂ softcap(x)/∂x at the capped logit z: 1 − (z/cap)²."""
    return 1.0 if call.softcap is None else 1.0 - jnp.square(logit / call.softcap)


_GATHERED_BYTES = 4 * 2**20  # of the rows of W, in float32, that are gathered at a time


def closed_form_hidden(model: Model, signal: Signal) -> Array:
    """dh [N, D] where `signal.hidden_is_closed`: weight·rows + Σ_k g_k W[ids_k] + uniform Σ_v W_v, no product.

    In the dtype of `signal.rows`, in its place, or else in float32; a block of tokens at a time, summed in float32.
    0 where a token is not valid.
    """
    unembedding = model.unembedding
    tokens, (vocab_size, width) = signal.scale.shape[0], unembedding.shape
    d_hidden = signal.rows
    if d_hidden is None:
        d_hidden = jnp.zeros((tokens, width), jnp.float32)
    everything = None if signal.uniform is None else jnp.sum(unembedding, axis=0, dtype=jnp.float32)

    def add(start: Array | int, d_hidden: Array, size: int) -> Array:
        def rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        block = jnp.zeros((size, width), jnp.float32)
        if signal.rows is not None and signal.weight is not None:
            block = rows(signal.weight)[:, None] * rows(d_hidden).astype(jnp.float32)
        for ids, g in signal.one_hots:
            inside = (ids >= 0) & (ids < vocab_size)
            gathered = unembedding[rows(jnp.where(inside, ids, 0))].astype(jnp.float32)
            block = block + rows(jnp.where(inside, g, 0.0))[:, None] * gathered
        if signal.uniform is not None and everything is not None:
            block = block + rows(signal.uniform)[:, None] * everything[None, :]
        if model.valid is not None:
            block = jnp.where(rows(model.valid)[:, None], block, 0.0)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, block.astype(d_hidden.dtype), start, axis=0)

    # A power of two seldom leaves a ragged block, for which some versions of libtpu copy the whole of dh.
    size = 1 << max(_GATHERED_BYTES // (4 * width), 8).bit_length() - 1
    whole, left = divmod(tokens, size)
    if whole:
        d_hidden = jax.lax.fori_loop(0, whole, lambda i, d: add(i * size, d, size), d_hidden)
    return add(whole * size, d_hidden, left) if left else d_hidden
