"""The operator with its derivative, written once for all implementations (`calibjax.kernels.contract`).

With z = softcap(h Wᵀ + b), p = softmax(s·z), c_v = 1 − (z_v/cap)² (1 without a soft-cap) and cotangents g,

    dz_v = p_v (s g_lse + g_expected (1 + s (z_v − E_p[z]))) + [v=y] g_target + [v=argmax] g_max + g_mean/V,
    dh = Σ_v c_v dz_v W_v,   dW_v = c_v dz_v h,   db_v = c_v dz_v,
    ds = g_lse E_p[z] + g_expected Var_p[z].

What is differentiated decides which passes over the vocabulary run. Each product takes 2 N·D·V flop: `explain` lists
the products of a call, and `forward_gives_d_hidden` decides whether dh comes out of the forward pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options
from calibjax.kernels.stats import times_slope


class Call(NamedTuple):
    """Static part of a call: `statistics` are fields of `VocabStats`."""

    implementation: Implementation
    statistics: frozenset[str]
    options: Options


class Residuals(NamedTuple):
    """Residuals of the forward pass for the gradients in hidden, unembedding and bias.

    `outputs` are statistics by name; `expected_row` and `saved` are as `Implementation.forward` returns them.
    `differentiated` has () for each of hidden, unembedding and bias that is differentiated, else None: an empty tuple
    is a pytree without leaves, and so is None, so that both are static under jit.
    """

    inputs: Inputs
    outputs: dict[str, Array]
    expected_row: Array | None
    saved: Any
    differentiated: tuple[tuple[()] | None, ...]


def compute(call: Call, inputs: Inputs) -> dict[str, Array]:
    """The statistics in `call.statistics` in float32; see `VocabStats`. Any value for invalid tokens.

    With `Options.scales` log_normalizer and expected_logit are relative to the largest logit, as in `VocabCurves`.
    """
    if call.implementation.is_dense:
        return call.implementation.compute(call.options, call.statistics, inputs)
    return _statistics(call, with_dtypes(inputs))


def with_dtypes(inputs: Inputs) -> Inputs:
    """The same in the dtypes of `contract.Inputs`."""
    hidden, unembedding, bias, scale, _, _ = inputs
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    return inputs._replace(
        hidden=hidden.astype(dtype),
        unembedding=unembedding.astype(dtype),
        bias=None if bias is None else bias.astype(jnp.float32),
        scale=scale.astype(jnp.float32),
    )


_NEEDED = {
    "target_logit": {"target"},
    "mean_logit": {"total"},
    "argmax": {"argmax"},
    "expected_logit": {"first"},
    "logit_variance": {"first", "second"},
}
"""Statistic -> the optional fields of `Moments` that it is made of."""


def forward_gives_d_hidden(call: Call, hidden_alone: bool) -> bool:
    """Whether the gradient in hidden comes out of the forward pass, as a multiple of `Moments.expected_row`.

    It does if hidden is differentiated alone (`hidden_alone`: unembedding and bias are frozen), or if the
    implementation needs a pass for each gradient and saves no logits. It cannot if a second statistic
    (`expected_logit`, or `mean_logit` under a soft-cap) weights the rows of W differently.
    """
    implementation, options = call.implementation, call.options
    if not implementation.gives_expected_row or "expected_logit" in call.statistics:
        return False
    if options.softcap is not None and "mean_logit" in call.statistics:
        return False
    return hidden_alone or (implementation.gradients_are_separate and not options.save_logits)


def masked(valid: Array, x: Array, filler: Any = 0) -> Array:
    """`x` [..., K] or [...] where `valid` [...], else `filler`."""
    return jnp.where(jax.lax.expand_dims(valid, range(valid.ndim, x.ndim)), x, jnp.asarray(filler, x.dtype))


def masked_statistics(values: dict[str, Array], valid: Bool[Array, "..."]) -> dict[str, Array]:
    """Statistics by name with what `VocabStats` holds for tokens that do not count."""
    filler = {"argmax": -1, "correct": False}
    return {name: masked(valid, value, filler.get(name, 0)) for name, value in values.items()}


def forward(
    call: Call, inputs: Inputs, statistics: frozenset[str], expected_row: bool = False, save: bool = False
) -> tuple[dict[str, Array], Array | None, Any]:
    """These statistics by name, `Moments.expected_row` if wanted, and what is saved for the backward pass."""
    needed = frozenset().union(*(_NEEDED.get(name, ()) for name in statistics))
    if expected_row:
        needed |= {"expected_row"}
    moments, saved = call.implementation.forward(call.options, needed, save, inputs)
    log_weight, shift, variance = moments.cumulants()
    log_normalizer, expected_logit = log_weight, shift  # relative to the largest logit
    if call.options.scales is None:
        log_normalizer = inputs.scale * moments.max_logit + log_weight
        expected_logit = None if shift is None else moments.max_logit + shift
    outputs = {
        "log_normalizer": log_normalizer,
        "target_logit": moments.target,
        "mean_logit": None if moments.total is None else moments.total / inputs.unembedding.shape[0],
        "max_logit": moments.max_logit,
        "argmax": moments.argmax,
        "expected_logit": expected_logit,
        "logit_variance": variance,
    }
    outputs = {name: x for name, x in outputs.items() if x is not None and name in statistics}
    if inputs.valid is not None:
        outputs = {name: masked(inputs.valid, x) for name, x in outputs.items()}
    return outputs, moments.expected_row, saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(call: Call, inputs: Inputs) -> dict[str, Array]:
    return forward(call, inputs, call.statistics)[0]


def _statistics_fwd(call: Call, primals: Any) -> tuple[dict[str, Array], tuple[Any, Residuals | None]]:
    # symbolic_zeros marks what is differentiated: what is frozen is neither stored nor computed.
    perturbed = [x is not None and x.perturbed for x in (primals.hidden, primals.unembedding, primals.bias)]
    inputs = Inputs._make(None if x is None else x.value for x in primals)
    closed_form = perturbed[0] and forward_gives_d_hidden(call, hidden_alone=not any(perturbed[1:]))
    statistics = set(call.statistics)
    if primals.scale.perturbed:
        statistics.add("expected_logit")
        if "expected_logit" in call.statistics:
            statistics.add("logit_variance")
    if any(perturbed):
        statistics |= {"log_normalizer", "max_logit"}
        if "max_logit" in call.statistics:
            statistics.add("argmax")
        if closed_form and inputs.targets is not None:
            statistics.add("target_logit")
    second_pass = any(perturbed[1:]) or (perturbed[0] and not closed_form)
    save = call.options.save_logits and second_pass
    outputs, expected_row, saved = forward(call, inputs, frozenset(statistics), closed_form, save)
    residuals = None
    if any(perturbed):
        differentiated = tuple(() if x else None for x in perturbed)
        residuals = Residuals(inputs, outputs, expected_row, saved, differentiated)
    d_scale = (None, None)  # ∂ log_normalizer/∂s and ∂ expected_logit/∂s
    if primals.scale.perturbed:
        d_scale = (outputs.get("expected_logit"), outputs.get("logit_variance"))
    return {name: x for name, x in outputs.items() if name in call.statistics}, (d_scale, residuals)


def _statistics_bwd(call: Call, residuals: tuple[Any, Residuals | None], cotangents: dict[str, Any]) -> tuple[Inputs]:
    zero = jax.custom_derivatives.SymbolicZero
    g = {name: cotangent for name, cotangent in cotangents.items() if not isinstance(cotangent, zero)}
    derivatives_in_scale, input_residuals = residuals
    pairs = zip(("log_normalizer", "expected_logit"), derivatives_in_scale, strict=True)
    terms = [g[name] * derivative for name, derivative in pairs if name in g and derivative is not None]
    d_scale = functools.reduce(jnp.add, terms) if terms else None
    gradients = Gradients()
    if input_residuals is not None:
        pairs = zip(input_gradients(call, input_residuals, g), input_residuals.inputs[:3], strict=True)
        gradients = Gradients(*(None if d is None or x is None else d.astype(x.dtype) for d, x in pairs))
    return (Inputs(*gradients, d_scale, None, None),)  # pyright: ignore[reportArgumentType]


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


def input_gradients(call: Call, residuals: Residuals, g: dict[str, Array], into: Gradients | None = None) -> Gradients:
    """The gradients in hidden, unembedding and bias, by the module's dz, for cotangents g [N] of the statistics."""
    inputs, outputs = residuals.inputs, residuals.outputs
    scale = inputs.scale
    log_normalizer = outputs["log_normalizer"]
    if inputs.valid is not None:
        log_normalizer = jnp.where(inputs.valid, log_normalizer, jnp.inf)  # p = 0
    softmax = scale * g["log_normalizer"] if "log_normalizer" in g else None
    centred = None
    if "expected_logit" in g:
        softmax = g["expected_logit"] if softmax is None else softmax + g["expected_logit"]
        centred = scale * g["expected_logit"]
        centred = jnp.where(jnp.isinf(centred), 0.0, centred)  # at such a scale p is 0 or 1, and p (z − E) is 0
    uniform = g["mean_logit"] / inputs.unembedding.shape[0] if "mean_logit" in g else None
    flags = zip(Gradients._fields, residuals.differentiated, strict=True)
    wanted = frozenset(name for name, flag in flags if flag is not None)

    def backward(d_target: Array | None, wanted: frozenset[str], expected_row: Array | None) -> Gradients:
        one_hots = []
        for ids, d_logit, z in (
            (inputs.targets, d_target, outputs.get("target_logit")),
            (outputs.get("argmax"), g.get("max_logit"), outputs.get("max_logit")),
        ):
            if ids is not None and d_logit is not None and z is not None:
                one_hots.append((ids, times_slope(d_logit, z, call.options.softcap)))
        cotangents = Cotangents(
            log_normalizer=log_normalizer,
            softmax=softmax,
            centred=centred,
            expected_logit=None if centred is None else outputs["expected_logit"],
            uniform=uniform,
            one_hots=tuple(one_hots),
            expected_row=expected_row,
            saved=residuals.saved,
        )
        return call.implementation.backward(call.options, wanted, inputs, cotangents, into)

    d_target = g.get("target_logit")
    if residuals.expected_row is None:
        return backward(d_target, wanted, None)
    d_target_of_hidden = d_target
    if inputs.targets is not None and softmax is not None:
        # `expected_row` leaves out the target: if the model is nearly certain, it would cancel against its one-hot.
        p = jnp.exp(jnp.minimum(scale * outputs["target_logit"] - log_normalizer, 0.0))
        d_target_of_hidden = softmax * p if d_target is None else softmax * p + d_target
    d_hidden = backward(d_target_of_hidden, frozenset({"hidden"}), residuals.expected_row).hidden
    rest = wanted - {"hidden"}
    gradients = backward(d_target, rest, None) if rest else Gradients()
    return gradients._replace(hidden=d_hidden)


_GATHERED_BYTES = 8 * 2**20  # of the rows of W, in float32, that are gathered at a time


def closed_form_hidden(inputs: Inputs, cotangents: Cotangents) -> Array:
    """dh = softmax·expected_row + Σ_k g_k W[ids_k] + uniform Σ_v W_v, [N, D], where `cotangents.hidden_is_closed`.

    It replaces `cotangents.expected_row`, in its dtype; without one, dh is float32. Blocks of tokens are summed in
    float32 one after another. 0 where a token is not valid.
    """
    unembedding, valid = inputs.unembedding, inputs.valid
    tokens, (vocab_size, width) = inputs.scale.shape[0], unembedding.shape
    d_hidden = cotangents.expected_row
    if d_hidden is None:
        d_hidden = jnp.zeros((tokens, width), jnp.float32)
    sum_of_rows = None if cotangents.uniform is None else jnp.sum(unembedding, axis=0, dtype=jnp.float32)
    one_hots = []
    for ids, g in cotangents.one_hots:
        inside = (ids >= 0) & (ids < vocab_size)
        one_hots.append((jnp.where(inside, g, 0.0), jnp.where(inside, ids, 0)))

    def add(start: Array | int, d_hidden: Array, size: int) -> Array:
        def take(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        block = jnp.zeros((size, width), jnp.float32)
        if cotangents.expected_row is not None and cotangents.softmax is not None:
            block = take(cotangents.softmax)[:, None] * take(d_hidden).astype(jnp.float32)
        for g, ids in one_hots:
            block = block + take(g)[:, None] * unembedding[take(ids)].astype(jnp.float32)
        if cotangents.uniform is not None and sum_of_rows is not None:
            block = block + take(cotangents.uniform)[:, None] * sum_of_rows[None, :]
        if valid is not None:
            block = jnp.where(take(valid)[:, None], block, 0.0)
        return jax.lax.dynamic_update_slice_in_dim(d_hidden, block.astype(d_hidden.dtype), start, axis=0)

    # A power of two seldom leaves a ragged block, for which some versions of libtpu copy the whole of dh.
    most = max(_GATHERED_BYTES // (4 * width), 8)
    size = 2 ** (most.bit_length() - 1)  # the largest power of two up to `most`
    whole, left = divmod(tokens, size)
    if whole:
        d_hidden = jax.lax.fori_loop(0, whole, lambda i, d: add(i * size, d, size), d_hidden)
    return add(whole * size, d_hidden, left) if left else d_hidden
