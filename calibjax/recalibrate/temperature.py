"""Temperature scaling: one temperature for all tokens, from statistics batch by batch or from logits; and ensembles."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import IMPOSSIBLE, FitReport, at_labels
from calibjax.recalibrate.optimize import minimize
from calibjax.runtime.arrays import AnyArray, ceil_div

if TYPE_CHECKING:
    from calibjax.kernels import VocabStats

_TOLERANCE = 1e-5  # on u = log s: `fit_temperature` has converged
_PASSES = 40  # largest number of passes over the data
_FLAT = 1e-6  # curvature in nats per token: less is rounding, and the data have no optimum here
_BLOCK = 2**22  # logits: about a hundred megabytes in float64


class TemperatureFit(NamedTuple):
    """The scalar that minimises the negative log-likelihood.

    Attributes:
        log_scale: log s; temperature T = exp(−log_scale).
        standard_error: of log_scale, robust to dependence inside a group (sandwich estimator over groups).
        nll: mean negative log-likelihood at the minimum, nats per token.
        nll_before: the same at s = 1.
        iterations: passes over the data.
        converged: the last step was below the tolerance; False where the data have no finite optimum.
    """

    log_scale: float
    standard_error: float
    nll: float
    nll_before: float
    iterations: int
    converged: bool

    @property
    def temperature(self) -> float:
        """T = exp(−log_scale)."""
        return math.exp(-self.log_scale)


class LikelihoodSums(NamedTuple):
    """Sums over each group of tokens at one u: nll, ∂nll/∂u, ∂²nll/∂u², and the number of tokens; float32 `[G]`."""

    nll: AnyArray
    first: AnyArray
    second: AnyArray
    count: AnyArray


def likelihood_sums(stats: "VocabStats", *, top_label: bool = False) -> LikelihoodSums:
    """Negative log-likelihood and its derivatives in a common factor e^u of the scale, summed over the last axis.

    nll = log_normalizer − s z_y, so ∂nll/∂u = s (E_p[z] − z_y) and ∂²nll/∂u² = s (E_p[z] − z_y) + s² Var_p[z].
    With `top_label`, nll is `losses.top_label`. Let c be the confidence, y the correctness and a = s (max z − E_p[z]) =
    ∂ log c/∂u. The slope is a (c − y)/(1 − c), and the curvature its Fisher information, over y ~ c: a² c/(1 − c).

    Args:
        stats: `[G, N]`, with log_normalizer, target_logit, expected_logit and logit_variance; for `top_label` with
            log_normalizer, expected_logit, max_logit and correct.
        top_label: use the likelihood that the most likely token is the target, instead of the target's likelihood.
    """
    if top_label:
        log_confidence = jnp.minimum(stats.log_confidence(), -1e-7)
        confidence = jnp.exp(log_confidence)
        miss = -jnp.expm1(log_confidence)
        growth = stats.scale * (stats.require("max_logit") - stats.require("expected_logit"))
        nll = -jnp.where(stats.require("correct"), log_confidence, jnp.log(miss))
        slope = growth * (confidence - stats.require("correct")) / miss
        curvature = jnp.square(growth) * confidence / miss
    else:
        nll = -stats.log_prob()
        slope = stats.scale * (stats.require("expected_logit") - stats.require("target_logit"))
        curvature = slope + jnp.square(stats.scale) * stats.require("logit_variance")

    def add(value: Float[Array, "G N"]) -> Float[Array, " G"]:
        return jnp.sum(jnp.where(stats.valid, value, 0.0), axis=-1)

    count = jnp.sum(stats.valid, axis=-1).astype(jnp.float32)
    return LikelihoodSums(add(nll), add(slope), add(curvature), count)


def fit_temperature(
    sums_at: Callable[[Float[Array, ""]], Iterable[LikelihoodSums]], *, bounds: tuple[float, float] = (-6.0, 6.0)
) -> TemperatureFit:
    """Temperature scaling: the factor s on all logits with the least negative log-likelihood (Guo et al. 2017, 4.2).

    Newton's method in u = log s, which keeps T > 0. The sign of the slope brackets the minimum. A step out of the
    bracket, or at a curvature that is not positive, halves it.

    Args:
        sums_at: one pass over the data: u (float32 scalar) -> the `LikelihoodSums` of its batches.
        bounds: range of u searched. With an optimum at infinity (separable data), a bound, and `converged` False.

    Raises:
        ValueError: where no token counts or the likelihood is not finite.
    """
    low, high = bounds
    u = 0.0
    passes: list[_Pass] = []
    while len(passes) < _PASSES:
        here = _pass(sums_at, u)
        passes.append(here)
        low, high = (low, u) if here.slope > 0 else (u, high)
        if abs(here.step) < _TOLERANCE or high - low < _TOLERANCE:
            break
        newton = u + here.step
        u = newton if low < newton < high else (low + high) / 2
    first, last = passes[0], passes[-1]
    converged = abs(last.step) < _TOLERANCE
    newton = last.u + last.step
    optimum = newton if converged and low < newton < high else last.u
    return TemperatureFit(optimum, last.standard_error, last.nll, first.nll, len(passes), converged)


class _Pass(NamedTuple):
    """One pass over the data, at u = log s."""

    u: float
    nll: float  # mean
    slope: float  # of the sum
    curvature: float
    is_flat: bool  # the curvature is rounding
    slopes: Float[np.ndarray, " G"]  # of the groups' sums

    @property
    def step(self) -> float:
        """Newton's step; infinite where the likelihood is flat."""
        return math.inf if self.is_flat else -self.slope / self.curvature

    @property
    def standard_error(self) -> float:
        """Sandwich: Var(u) = Σ_g (slope of group g)² / curvature²."""
        return math.inf if self.is_flat else math.sqrt(np.square(self.slopes).sum()) / self.curvature


def _pass(sums_at: Callable[[Float[Array, ""]], Iterable[LikelihoodSums]], u: float) -> _Pass:
    """Sums the batches in float64, and checks them."""
    batches = [jax.device_get(batch) for batch in sums_at(jnp.float32(u))]
    nll, slopes, curvature, count = (np.hstack(field).astype(np.float64) for field in zip(*batches, strict=True))
    nll, curvature, count = float(nll.sum()), float(curvature.sum()), float(count.sum())
    if not count:
        raise ValueError("fit_temperature: no token counts; check the masks.")
    if not math.isfinite(nll):
        raise ValueError(f"fit_temperature: the likelihood at log_scale {u:.3g} is {nll}; check the logits.")
    return _Pass(u, nll / count, float(slopes.sum()), curvature, not curvature > _FLAT * count, slopes)


class TemperatureState(NamedTuple):
    """log s of softmax(s z), float32 scalar; T = exp(−log_scale)."""

    log_scale: np.ndarray
    report: FitReport


def fit(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"]) -> TemperatureState:
    """`fit_temperature` of logits and labels, in float64, for any K.

    On separable or constant logits log s is an end of its range, −6 to 6, and `report.converged` is False.
    """
    return fit_to_target(logits, at_labels(logits, labels))


def fit_to_target(logits: Float[np.ndarray, "N K"], target_logit: Float[np.ndarray, " N"]) -> TemperatureState:
    """The s > 0 that minimises the mean of log Σ exp(s z) − s t.

    t = `target_logit` is the logit of the label, or the mean logit under a target distribution.
    """
    pieces = ceil_div(logits.size, _BLOCK)
    split = zip(np.array_split(logits, pieces), np.array_split(target_logit, pieces), strict=True)
    blocks = [(z, target, jnp.max(z, axis=1)) for z, target in split]

    def sums_at(u: Float[Array, ""]) -> Iterable[LikelihoodSums]:
        with jax.enable_x64(True):
            return [jax.device_get(_dense_sums(np.float64(u), *block)) for block in blocks]

    fitted = fit_temperature(sums_at)
    report = FitReport.of(fitted.nll, fitted.converged, fitted.iterations)
    return TemperatureState(np.asarray(fitted.log_scale, np.float32), report)


@jax.jit
def _dense_sums(u: Array, logits: Array, target: Array, most: Array) -> LikelihoodSums:
    """`likelihood_sums` of dense logits at the scale e^u, in one reduction for CPUs. `most`: each row's largest."""
    logits, target, most = (x.astype(u.dtype) for x in (logits, target, most))
    z, target, s = logits - most[:, None], target - most, jnp.exp(u)
    e = jnp.exp(s * z)
    moments = (e, e * z, e * jnp.square(z))
    zeros = tuple(jnp.zeros((), u.dtype) for _ in moments)
    total, *sums = jax.lax.reduce(moments, zeros, lambda a, b: tuple(map(operator.add, a, b)), (1,))
    expected, square = (x / total for x in sums)
    slope = s * (expected - target)
    nll = jnp.log(total) - s * target
    curvature = slope + s * s * (square - jnp.square(expected))
    return LikelihoodSums(nll.sum(), slope.sum(), curvature.sum(), jnp.ones_like(nll).sum())


def log_softmax_at(scale: Array, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(s z); subtracts the largest logit before the product, because s z may be rounded by whole nats."""
    differences = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jax.nn.log_softmax(scale * differences, axis=-1)


def apply(state: TemperatureState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(s z)."""
    return log_softmax_at(jnp.exp(state.log_scale), logits)


class EnsembleState(NamedTuple):
    """log s of the tempered part, float32 scalar, and the weights w >= 0, float32 `[3]` with sum 1."""

    log_scale: np.ndarray
    weights: np.ndarray
    report: FitReport


def _log_mixture(weights: Array, parts: Float[Array, "3 ..."]) -> Array:
    log_weights = jax.lax.expand_dims(jnp.log(weights), range(1, parts.ndim))
    return jax.nn.logsumexp(parts + log_weights, axis=0)


def _parts(log_scale: AnyArray, logits: Array) -> Float[Array, "3 N K"]:
    tempered = log_softmax_at(jnp.exp(log_scale), logits)
    possible = logits > IMPOSSIBLE
    count = jnp.sum(possible, axis=-1, keepdims=True).astype(logits.dtype)
    uniform = jnp.where(possible, -jnp.log(count), -jnp.inf)
    return jnp.stack([tempered, jax.nn.log_softmax(logits, axis=-1), uniform])


def _ensemble_loss(weights, rows, extra):
    # Over u >= 0, the mean of log(u·p) minus Σu is largest at a point with Σu = 1: the simplex needs no constraint.
    return -_log_mixture(weights, rows[0].T) + jnp.sum(weights) - 1.0


def fit_ensemble(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"]) -> EnsembleState:
    """q = w₁ softmax(z/T) + w₂ softmax(z) + w₃/K, w on the simplex (Zhang et al. 2020, section 3.2, "ETS").

    K counts the options that are possible, whose logit is not −inf. T is fitted first, alone, by negative
    log-likelihood; then w, in which the log-likelihood is concave.
    """
    single = fit(logits, labels)
    pieces = ceil_div(logits.size, _BLOCK)
    label_parts = []
    for z, y in zip(np.array_split(logits, pieces), np.array_split(labels, pieces), strict=True):
        parts = _parts(single.log_scale, jnp.asarray(z))
        label_parts.append(np.asarray(jnp.take_along_axis(parts, y[None, :, None], axis=2))[..., 0])
    rows = np.concatenate(label_parts, axis=1).T
    bounds = np.full(3, 1e-9), np.full(3, 2.0)
    weights, report = minimize(_ensemble_loss, np.full(3, 1 / 3), (rows,), bounds=bounds)
    converged = report.converged & single.report.converged
    return EnsembleState(single.log_scale, weights / weights.sum(), report._replace(converged=np.asarray(converged)))


def apply_ensemble(state: EnsembleState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log(w₁ softmax(z/T) + w₂ softmax(z) + w₃/K)."""
    parts = _parts(state.log_scale, logits)
    return jnp.minimum(_log_mixture(jnp.asarray(state.weights), parts), 0.0)  # rounding may exceed log 1
