"""Parametric maps from confidence to the probability of being correct: temperature, Platt scaling, beta.

All of them read the log-odds of the confidence, of which an exact 0 or 1 has none. They read clip(c, ε, 1 − ε) in its
place. With ε = 2⁻²⁴, half a float32 spacing below 1, the log-odds of a 1 are 16.6: right for the probability of a token
that was rounded to 1, but in verbalised confidences, where 1 is the next value after 0.95, its leverage on a straight
line spoils the fit of everything else. What an exact 1 stands for is a matter of the data. So where they hold an exact
0 or 1, ε is chosen by the same likelihood as the parameters, among 2⁻²⁴, 2⁻²², ... 2⁻⁴; otherwise it is 2⁻²⁴.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Method, Predictions, select
from calibjax.recalibrate.optimize import report_of
from calibjax.recalibrate.solvers import Found, finished, newton
from calibjax.runtime.errors import UserError

_CLIPS = tuple(2.0**-k for k in range(24, 3, -2))  # the first: half a float32 spacing below 1
_BLOCK = 2**13  # rows at a time: what is computed of them stays in the cache
_LIMIT = 16.0  # |intercept|: σ(16) is the float32 next to 1. Reached only where all are right, or all wrong


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


def _logs(confidence: Any, clip: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """log c, log(1 − c)."""
    c = numpy.clip(confidence, clip, 1 - clip)
    return numpy.log(c), numpy.log1p(-c)


def _derivatives(blocks: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[Any]:
    """Mean log loss of σ(Σ_p x_p z_p), its gradient `[P]` and Hessian `[P, P]`; a block is z `[P, n]` and y `[n]`.

    In NumPy: with so few parameters, to call a program of JAX takes as long as the sums, and to compile it much longer.
    """

    def sums(z: np.ndarray, y: np.ndarray) -> tuple[Any, ...]:
        score = np.einsum("p,pn->n", x, z)
        if score.min() < -700.0:  # the exponential overflows
            score = np.maximum(score, -700.0)
        e = np.exp(-score)
        p = 1 / (1 + e)
        loss = np.log1p(e).sum() + np.einsum("n,n->", 1 - y, score)
        return loss, np.einsum("pn,n->p", z, p - y), np.einsum("pn,qn->pq", z * (p - p * p), z)

    count = sum(len(y) for _, y in blocks)
    return [sum(parts) / count for parts in zip(*(sums(*block) for block in blocks), strict=True)]


def regression(
    columns: Callable[..., np.ndarray], data: tuple[np.ndarray, ...], start: Any, low: Any, high: Any
) -> Found:
    """The x `[P]` within bounds with the least mean log loss of σ(Σ_p x_p z_p).

    Args:
        columns: z `[P, n]`, float64, of n of the predictors.
        data: predictor and target, `[N]` each.
        start: x.
        low: of x, `[P]` or a number.
        high: of x.

    Returns:
        `Found`.
    """
    pieces = -(-len(data[1]) // _BLOCK)
    parts = zip(*(np.array_split(part, pieces) for part in data), strict=True)
    blocks = [(columns(predictor), target.astype(np.float64)) for predictor, target in parts]
    found = newton(functools.partial(_derivatives, blocks), np.array(start), low, high, 1000)
    return finished(found, lambda x: _derivatives(blocks, x)[:2], low, high, 1000)


def _fit(
    terms: Callable[..., tuple[Any, ...]],
    start: tuple[float, ...],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
    data: Predictions,
    where: np.ndarray | None,
    clip: float | None,
) -> tuple[tuple[np.ndarray, ...], np.ndarray, FitReport]:
    """The parameters of the terms, ε, and the report."""
    confidence, correct = select(data, ("confidence", "correct"), where)
    if clip is not None and not _CLIPS[0] <= clip < 0.5:
        raise UserError(f"clip: expected 2^-24 (6e-8) or more and less than 0.5, got {clip}.")
    exact = bool(((confidence == 0) | (confidence == 1)).any())
    tried = (clip,) if clip is not None else _CLIPS if exact else _CLIPS[:1]
    low, high = np.array(bounds)

    def search(at: float) -> Found:
        def columns(confidence: np.ndarray) -> np.ndarray:
            return np.stack(np.broadcast_arrays(*terms(*_logs(confidence.astype(np.float64), at, np))))

        return regression(columns, (confidence, correct), start, low, high)

    fits = [(search(at), at) for at in tried]
    found, best = min(fits, key=lambda fit: np.float32(fit[0].value))  # of equal ones the smallest ε
    params = tuple(map(np.asarray, found.x.astype(np.float32)))
    return params, np.asarray(best, np.float32), report_of(found)


def _map(terms: Callable[..., tuple[Any, ...]], params: Any, clip: Any, data: Predictions) -> Float[Array, " N"]:
    """σ of the sum of the terms, each times its parameter."""
    of_data = terms(*_logs(jnp.asarray(data.confidence, jnp.float32), clip))
    return jax.nn.sigmoid(sum(param * term for param, term in zip(params, of_data, strict=True)))


def _odds(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return (log_c - log_miss,)


def fit_odds(data: Predictions, where: np.ndarray | None = None, *, clip: float | None = None) -> OddsState:
    """Temperature scaling where only the confidence is known: σ(log(c/(1 − c))/T).

    Temperature scaling (Guo et al. 2017, section 4.2) of the two logits 0 and log(c/(1 − c)): Platt scaling with a
    positive slope and no intercept. A confidence of one half is unchanged. 1/T is kept within e⁻⁶ and 16.

    Args:
        data: with `confidence`, `correct` (a fraction of attempts counts as that many right and wrong ones).
        clip: ε in [2⁻²⁴, 0.5): a confidence below ε is read as ε, one above 1 − ε as 1 − ε. None: 2⁻²⁴, or where there
            is an exact 0 or 1 the one of 2⁻²⁴, 2⁻²², ... 2⁻⁴ under which the calibration data are most likely.

    Returns:
        `OddsState`; `report.converged` is False on separable data.

    Raises:
        UserError: `clip` out of range; see `select`.

    Example:
        >>> data = Predictions(confidence=np.array([0.9] * 4), correct=np.array([1, 1, 1, 0]))
        >>> np.asarray(apply_odds(fit_odds(data), data)).round(3).tolist()
        [0.75, 0.75, 0.75, 0.75]
    """
    (scale,), clipped, report = _fit(_odds, (1.0,), ((float(np.exp(-6.0)),), (_LIMIT,)), data, where, clip)
    return OddsState(scale, clipped, report)


def apply_odds(state: OddsState, data: Predictions) -> Float[Array, " N"]:
    """σ(scale · log(c/(1 − c)))."""
    return _map(_odds, state[:1], state.clip, data)


def _platt(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return log_c - log_miss, 1.0


def fit_platt(data: Predictions, where: np.ndarray | None = None, *, clip: float | None = None) -> PlattState:
    """Platt scaling: logistic regression of correctness on log(c/(1 − c)) (Platt 1999, section 2, without his prior).

    No penalty, as `sklearn.linear_model.LogisticRegression(penalty=None)`; slope and intercept are kept within ±16,
    which only data do reach that one threshold separates. The slope may be negative, where a larger confidence means
    more mistakes: then the ranking is turned round.

    Args:
        data: with `confidence`, `correct` (a fraction of attempts counts as that many right and wrong ones).
        clip: see `fit_odds`.

    Returns:
        `PlattState`; `report.converged` is False on separable data.

    Raises:
        UserError: `clip` out of range; see `select`.

    Example:
        >>> data = Predictions(confidence=np.array([0.9] * 4), correct=np.array([1, 1, 1, 0]))
        >>> np.asarray(apply_platt(fit_platt(data), data)).round(3).tolist()
        [0.75, 0.75, 0.75, 0.75]
    """
    bounds = ((-_LIMIT, -_LIMIT), (_LIMIT, _LIMIT))
    (slope, intercept), clipped, report = _fit(_platt, (1.0, 0.0), bounds, data, where, clip)
    return PlattState(slope, intercept, clipped, report)


def apply_platt(state: PlattState, data: Predictions) -> Float[Array, " N"]:
    """σ(slope · log(c/(1 − c)) + intercept)."""
    return _map(_platt, state[:2], state.clip, data)


def _beta(log_c: Any, log_miss: Any) -> tuple[Any, ...]:
    return log_c, -log_miss, 1.0


def fit_beta(data: Predictions, where: np.ndarray | None = None, *, clip: float | None = None) -> BetaState:
    """Beta calibration: σ(a log c − b log(1 − c) + m), a, b >= 0 (Kull et al. 2017, section 4, "abm").

    The likelihood ratio of two beta distributions; a = b = 1, m = 0 is the identity, a = b is Platt scaling. Always
    monotone. a and b are kept below 16, m within ±16.

    Args:
        data: with `confidence`, `correct` (a fraction of attempts counts as that many right and wrong ones).
        clip: see `fit_odds`.

    Returns:
        `BetaState`; `report.converged` is False on separable data.

    Raises:
        UserError: `clip` out of range; see `select`.

    Example:
        >>> data = Predictions(confidence=np.array([0.9] * 4), correct=np.array([1, 1, 1, 0]))
        >>> np.asarray(apply_beta(fit_beta(data), data)).round(3).tolist()
        [0.75, 0.75, 0.75, 0.75]
    """
    bounds = ((0.0, 0.0, -_LIMIT), (_LIMIT, _LIMIT, _LIMIT))
    (a, b, m), clipped, report = _fit(_beta, (1.0, 1.0, 0.0), bounds, data, where, clip)
    return BetaState(a, b, m, clipped, report)


def apply_beta(state: BetaState, data: Predictions) -> Float[Array, " N"]:
    """σ(a log c − b log(1 − c) + m)."""
    return _map(_beta, state[:3], state.clip, data)


METHODS = {
    "confidence_temperature": Method(fit_odds, apply_odds, ("confidence", "correct"), "Guo et al. 2017", monotone=True),
    "platt": Method(fit_platt, apply_platt, ("confidence", "correct"), "Platt 1999", monotone=True),
    "beta": Method(fit_beta, apply_beta, ("confidence", "correct"), "Kull et al. 2017", monotone=True),
}
