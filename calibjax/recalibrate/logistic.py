"""Parametric maps from confidence to the probability of being correct: temperature, Platt scaling, beta.

All read the log-odds of the confidence, which are infinite at 0 and 1: they read clip(c, ε, 1 − ε). With ε = 2⁻²⁴, half
a float32 spacing below 1, the log-odds of a 1 are 16.6. That is right for the probability of a token that was rounded
to 1; in verbalised confidences, where 1 is the next value after 0.95, its leverage spoils the fit of everything else.
So where the data hold an exact 0 or 1, ε is chosen by likelihood among 2⁻²⁴, 2⁻²², ... 2⁻⁴; otherwise it is 2⁻²⁴.
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
from calibjax.runtime.errors import UserError

_CLIPS = tuple(2.0**-k for k in range(24, 3, -2))
_BLOCK = 2**13  # rows at a time: what is computed of them stays in the cache
_LIMIT = 16.0  # of slopes and intercepts: σ(16) is the float32 next to 1


class OddsState(NamedTuple):
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
    return [sum(parts) / count for parts in zip(*(sums(*block) for block in blocks), strict=True)]


def regression(
    columns: Callable[[np.ndarray], np.ndarray], data: tuple[np.ndarray, np.ndarray], start: Any, low: Any, high: Any
) -> Minimum:
    """The x `[P]` in [low, high] with the least mean log loss of σ(Σ_p x_p z_p).

    `columns` maps n of the predictors to z `[P, n]`, float64; `data` are predictors and targets, `[N]` each.
    """
    pieces = -(-len(data[1]) // _BLOCK)
    parts = zip(*(np.array_split(part, pieces) for part in data), strict=True)
    blocks = [(columns(predictor), target.astype(np.float64)) for predictor, target in parts]
    search = functools.partial(lbfgs, functools.partial(_value_and_grad, blocks), low=low, high=high)
    best = search(np.array(start))
    if not best.converged:  # the line search failed: saturated scores have no curvature, scores of 0 have the most
        best = search(np.clip(np.zeros(len(start)), low, high))
    return best


def _fit(
    terms: Callable[..., tuple[Any, ...]],
    start: tuple[float, ...],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
    confidence: np.ndarray,
    correct: np.ndarray,
    clip: float | None,
) -> tuple[Any, ...]:
    """The parameters of the terms, then ε, then the report: the fields of a state."""
    if clip is not None and not _CLIPS[0] <= clip < 0.5:
        raise UserError(f"clip: expected 2^-24 (6e-8) or more and less than 0.5, got {clip}.")
    exact = bool(((confidence == 0) | (confidence == 1)).any())
    clips = (clip,) if clip is not None else _CLIPS if exact else _CLIPS[:1]

    def search(at: float) -> Minimum:
        def columns(confidence: np.ndarray) -> np.ndarray:
            c = np.clip(confidence.astype(np.float64), at, 1 - at)
            return np.stack(np.broadcast_arrays(*terms(np.log(c), np.log1p(-c))))

        return regression(columns, (confidence, correct), start, *map(np.array, bounds))

    fits = [(search(at), at) for at in clips]
    best, at = min(fits, key=lambda fit: np.float32(fit[0].value))  # of equal ones the smallest ε
    return *map(np.asarray, best.x.astype(np.float32)), np.asarray(at, np.float32), best.report()


def _apply(terms: Callable[..., tuple[Any, ...]], state: Any, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """σ of the sum of the terms, each times its parameter."""
    *params, clip, _ = state
    c = jnp.clip(confidence, clip, 1 - clip)
    terms_of_c = terms(jnp.log(c), jnp.log1p(-c))
    return jax.nn.sigmoid(sum(param * term for param, term in zip(params, terms_of_c, strict=True)))


def _odds(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return (log_c - log_miss,)


def fit_odds(confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None) -> OddsState:
    """Temperature scaling where only the confidence is known: σ(log(c/(1 − c))/T).

    Temperature scaling (Guo et al. 2017, section 4.2) of the two logits 0 and log(c/(1 − c)): Platt scaling with a
    positive slope and no intercept. A confidence of one half is unchanged. 1/T is kept within e⁻⁶ and 16.

    `clip`: ε in [2⁻²⁴, 0.5) (UserError otherwise): a confidence below ε is read as ε, one above 1 − ε as 1 − ε. None:
    2⁻²⁴, or where there is an exact 0 or 1 the one of 2⁻²⁴, 2⁻²², ... 2⁻⁴ under which the data are most likely.
    """
    bounds = (float(np.exp(-6.0)),), (_LIMIT,)
    return OddsState(*_fit(_odds, (1.0,), bounds, confidence, correct, clip))


def apply_odds(state: OddsState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """σ(scale · log(c/(1 − c)))."""
    return _apply(_odds, state, confidence)


def _platt(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return log_c - log_miss, 1.0


def fit_platt(confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None) -> PlattState:
    """Platt scaling: logistic regression of correctness on log(c/(1 − c)) (Platt 1999, section 2, without his prior).

    No penalty, as `sklearn.linear_model.LogisticRegression(penalty=None)`; slope and intercept are kept within ±16,
    which only data reach that one threshold separates. The slope may be negative, where a larger confidence means more
    mistakes: then the ranking is reversed. `clip`: see `fit_odds`.
    """
    bounds = ((-_LIMIT, -_LIMIT), (_LIMIT, _LIMIT))
    return PlattState(*_fit(_platt, (1.0, 0.0), bounds, confidence, correct, clip))


def apply_platt(state: PlattState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """σ(slope · log(c/(1 − c)) + intercept)."""
    return _apply(_platt, state, confidence)


def _beta(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return log_c, -log_miss, 1.0


def fit_beta(confidence: np.ndarray, correct: np.ndarray, *, clip: float | None = None) -> BetaState:
    """Beta calibration: σ(a log c − b log(1 − c) + m), a, b >= 0 (Kull et al. 2017, section 4, "abm").

    The likelihood ratio of two beta distributions; a = b = 1, m = 0 is the identity, a = b is Platt scaling. Always
    monotone. a and b are kept below 16, m within ±16. `clip`: see `fit_odds`.
    """
    bounds = ((0.0, 0.0, -_LIMIT), (_LIMIT, _LIMIT, _LIMIT))
    return BetaState(*_fit(_beta, (1.0, 1.0, 0.0), bounds, confidence, correct, clip))


def apply_beta(state: BetaState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """σ(a log c − b log(1 − c) + m)."""
    return _apply(_beta, state, confidence)
