"""Parametric maps from confidence to the probability of being correct: temperature, Platt scaling, beta, stacking.

All use the log-odds of the confidence c. These are infinite at 0 and 1, so c is clipped to [ε, 1 − ε]. With ε = 2⁻²⁴,
half a float32 spacing below 1, the log-odds of c = 1 are 16.6. That suits a token's probability that was rounded to 1.
In verbalised confidences 1 is the next value after 0.95, and such an outlier would dominate the fit. So where the data
hold an exact 0 or 1, ε is chosen by likelihood among 2⁻²⁴, 2⁻²², ... 2⁻⁴; otherwise it is 2⁻²⁴. For stacking ε = .01.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport
from calibjax.recalibrate.optimize import Minimum, lbfgs
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.errors import UserError

_CLIPS = tuple(2.0**-k for k in range(24, 3, -2))
_BLOCK = 2**13  # rows processed at a time, so that intermediate arrays stay in the cache
LIMIT = 16.0  # largest absolute slope and intercept: σ(16) is the float32 next to 1
_STACKING_CLIP = 0.01
_RIDGES = (0.0, 1e-3, 1e-2, 1e-1)  # penalties that stacking chooses from
_FOLDS = 5  # of the cross-validation of stacking
_Columns = Callable[[np.ndarray], np.ndarray]


class ConfidenceTemperatureState(NamedTuple):
    """σ(scale · log(c/(1 − c))), c clipped to [clip, 1 − clip]; float32 scalars, scale = 1/T > 0."""

    scale: np.ndarray
    clip: np.ndarray
    report: FitReport


class PlattState(NamedTuple):
    """σ(slope · log(c/(1 − c)) + intercept), c clipped to [clip, 1 − clip]; float32 scalars."""

    slope: np.ndarray
    intercept: np.ndarray
    clip: np.ndarray
    report: FitReport


class BetaState(NamedTuple):
    """σ(a log c − b log(1 − c) + m), c clipped to [clip, 1 − clip]; float32 scalars."""

    a: np.ndarray
    b: np.ndarray
    m: np.ndarray
    clip: np.ndarray
    report: FitReport


def _value_and_grad(blocks: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[Any]:
    """Mean log loss of σ(Σ_p x_p z_p) and its gradient `[P]`; a block is z `[P, n]` and y `[n]`.

    In NumPy: with so few parameters, calling a program of JAX takes as long as the sums.
    """

    def sums(z: np.ndarray, y: np.ndarray) -> tuple[Any, ...]:
        score = np.maximum(np.einsum("p,pn->n", x, z), -700.0)  # below, the exponential overflows
        e = np.exp(-score)
        loss = np.log1p(e).sum() + np.einsum("n,n->", 1 - y, score)
        return loss, np.einsum("pn,n->p", z, 1 / (1 + e) - y)

    count = sum(len(y) for _, y in blocks)
    losses, gradients = zip(*(sums(*block) for block in blocks), strict=True)
    return [sum(losses) / count, sum(gradients) / count]


def regression(
    columns: _Columns, data: tuple[np.ndarray, np.ndarray], start: Any, low: Any, high: Any, ridge: float = 0.0
) -> Minimum:
    """The x `[P]` in [low, high] with the least mean log loss of σ(Σ_p x_p z_p), plus ridge Σ_{p<P} x_p².

    `columns` maps n of the predictors, `[N]` or `[N, C]`, to z `[P, n]`, float64. The targets `[N]` are in [0, 1].
    """
    predictors, targets = data
    pieces = ceil_div(len(targets), _BLOCK)
    split = zip(np.array_split(predictors, pieces), np.array_split(targets, pieces), strict=True)
    blocks = [(columns(predictor), target.astype(np.float64)) for predictor, target in split]
    penalty = np.append(np.full(len(start) - 1, ridge), 0.0)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = _value_and_grad(blocks, x)
        return loss + penalty @ np.square(x), gradient + 2 * penalty * x

    best = lbfgs(objective, np.array(start), low, high)
    if not best.converged:
        # The line search failed, because saturated scores have no curvature. Scores of 0 have the largest.
        best = lbfgs(objective, np.clip(np.zeros(len(start)), low, high), low, high)
    return best


def _fit(
    terms: Callable[..., tuple[Any, ...]],
    start: tuple[float, ...],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
    confidence: np.ndarray,
    correct: np.ndarray,
    clip: float | None,
) -> tuple[Any, ...]:
    """Fits σ(Σ_p x_p terms_p(log c, log(1 − c))); returns the fields of a state: every x_p, ε, and the report."""
    if clip is not None and not _CLIPS[0] <= clip < 0.5:
        raise UserError(f"clip: expected 2^-24 (6e-8) or more and less than 0.5, got {clip}.")
    clips = _CLIPS[:1]
    if clip is not None:
        clips = (clip,)
    elif ((confidence == 0) | (confidence == 1)).any():
        clips = _CLIPS

    def fit_with(epsilon: float) -> Minimum:
        def columns(confidence: np.ndarray) -> np.ndarray:
            c = np.clip(confidence.astype(np.float64), epsilon, 1 - epsilon)
            return np.stack(np.broadcast_arrays(*terms(np.log(c), np.log1p(-c))))

        low, high = map(np.array, bounds)
        return regression(columns, (confidence, correct), start, low, high)

    fits = {epsilon: fit_with(epsilon) for epsilon in clips}
    epsilon = min(fits, key=lambda epsilon: np.float32(fits[epsilon].value))  # the smallest where several are equal
    best = fits[epsilon]
    params = map(np.asarray, best.x.astype(np.float32))
    return *params, np.asarray(epsilon, np.float32), best.report()


def _apply(terms: Callable[..., tuple[Any, ...]], state: Any, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """σ of the sum of the terms, each times its parameter."""
    *params, clip, _ = state
    c = jnp.clip(confidence, clip, 1 - clip)
    terms_of_c = terms(jnp.log(c), jnp.log1p(-c))
    return jax.nn.sigmoid(sum(param * term for param, term in zip(params, terms_of_c, strict=True)))


def _odds(log_c: Any, log_one_minus_c: Any) -> tuple[Any, ...]:
    return (log_c - log_one_minus_c,)


def fit_confidence_temperature(
    confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None
) -> ConfidenceTemperatureState:
    """Temperature scaling where only the confidence is known: σ(log(c/(1 − c))/T).

    Temperature scaling (Guo et al. 2017, section 4.2) of the two logits 0 and log(c/(1 − c)): Platt scaling with a
    positive slope and no intercept. A confidence of one half is unchanged. 1/T is kept within e⁻⁶ and 16.

    Args:
        confidence: `[N]`, in [0, 1].
        correct: `[N]`, in [0, 1]: right (1) or wrong (0), or a fraction of attempts.
        clip: ε in [2⁻²⁴, 0.5): confidences are clipped to [ε, 1 − ε]. Default: 2⁻²⁴; where a confidence is exactly 0
            or 1, the ε among 2⁻²⁴, 2⁻²², ... 2⁻⁴ with the highest likelihood.

    Raises:
        UserError: for `clip` out of range.
    """
    bounds = (float(np.exp(-6.0)),), (LIMIT,)
    return ConfidenceTemperatureState(*_fit(_odds, (1.0,), bounds, confidence, correct, clip))


apply_confidence_temperature = functools.partial(_apply, _odds)


def _platt(log_c: Any, log_one_minus_c: Any) -> tuple[Any, ...]:
    return log_c - log_one_minus_c, 1.0


def fit_platt(confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None) -> PlattState:
    """Platt scaling: logistic regression of correctness on log(c/(1 − c)) (Platt 1999, section 2, without his prior).

    No penalty, as `sklearn.linear_model.LogisticRegression(penalty=None)`. Slope and intercept are bounded by ±16, and
    reach a bound only where one threshold separates right from wrong. The slope is negative, and the ranking reversed,
    where a larger confidence means more mistakes. For the arguments see `fit_confidence_temperature`.
    """
    bounds = ((-LIMIT, -LIMIT), (LIMIT, LIMIT))
    return PlattState(*_fit(_platt, (1.0, 0.0), bounds, confidence, correct, clip))


apply_platt = functools.partial(_apply, _platt)


def _beta(log_c: Any, log_one_minus_c: Any) -> tuple[Any, ...]:
    return log_c, -log_one_minus_c, 1.0


def fit_beta(confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None) -> BetaState:
    """Beta calibration: σ(a log c − b log(1 − c) + m), a, b >= 0 (Kull et al. 2017, section 4, "abm").

    The likelihood ratio of two beta distributions; a = b = 1, m = 0 is the identity, a = b is Platt scaling. Always
    monotone. a and b are at most 16, m is within ±16. For the arguments see `fit_confidence_temperature`.
    """
    bounds = ((0.0, 0.0, -LIMIT), (LIMIT, LIMIT, LIMIT))
    return BetaState(*_fit(_beta, (1.0, 1.0, 0.0), bounds, confidence, correct, clip))


apply_beta = functools.partial(_apply, _beta)


class StackingState(NamedTuple):
    """σ(w · log(c/(1 − c)) + b), c clipped to [0.01, 0.99]: w float32 `[C]`, b a scalar, and the ridge of the fit."""

    weights: np.ndarray
    intercept: np.ndarray
    ridge: np.ndarray
    report: FitReport


def fit_stacking(confidences: Float[np.ndarray, "N C"], correct: Float[np.ndarray, " N"]) -> StackingState:
    """Stacking of C confidences in one answer (Wolpert 1992): logistic regression of correctness on their log-odds.

    It is a tuned ensemble, as in uqlm (arXiv 2504.19254), whose result is calibrated. The penalty is λ‖w‖². λ is the
    one of 0, .001, .01 and .1 with the least log loss in five-fold cross-validation over the rows.
    Confidences are clipped to [.01, .99], so that consistencies of exactly 0 and 1 do not dominate.
    """
    fold = np.random.default_rng(0).permutation(len(correct)) % _FOLDS
    folds = range(min(_FOLDS, len(correct))) if len(correct) > 1 else ()

    def fit(rows: np.ndarray, ridge: float) -> Minimum:
        data = (confidences[rows], correct[rows])
        start = np.zeros(confidences.shape[1] + 1)
        return regression(_stacking_columns, data, start, -LIMIT, LIMIT, ridge)

    def held_out_loss(ridge: float) -> float:
        total = 0.0
        for k in folds:
            score = fit(fold != k, ridge).x @ _stacking_columns(confidences[fold == k])
            total += (np.logaddexp(0.0, score) - correct[fold == k] * score).sum()
        return total

    ridge = min(_RIDGES, key=held_out_loss)
    best = fit(np.full(len(correct), True), ridge)
    *weights, intercept = best.x.astype(np.float32)
    return StackingState(np.array(weights), np.asarray(intercept), np.asarray(ridge, np.float32), best.report())


def _stacking_columns(confidences: Float[np.ndarray, "n C"]) -> Float[np.ndarray, "C+1 n"]:
    """The log-odds of each confidence, clipped, and 1; float64."""
    c = np.clip(confidences.astype(np.float64), _STACKING_CLIP, 1 - _STACKING_CLIP)
    return np.vstack([(np.log(c) - np.log1p(-c)).T, np.ones(len(c))])


def apply_stacking(state: StackingState, confidences: Float[Array, "N C"]) -> Float[Array, " N"]:
    """σ(w · log(c/(1 − c)) + b)."""
    c = jnp.clip(confidences, _STACKING_CLIP, 1 - _STACKING_CLIP)
    log_odds = jnp.log(c) - jnp.log1p(-c)
    score = jnp.matmul(log_odds, state.weights, precision="highest")  # C as in the fit
    return jax.nn.sigmoid(score + state.intercept)
