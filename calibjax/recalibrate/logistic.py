"""From confidence to the probability of being right by one to three parameters: temperature, Platt scaling, beta."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Predictions, select
from calibjax.recalibrate.optimize import minimize

_EDGE = 2.0**-24  # confidences of 0 and 1 are read as this far from them: half a float32 spacing below 1
_LIMIT = 16.0  # |intercept|: σ(16) is the float32 next to 1. Reached only where all are right, or all wrong


class OddsState(NamedTuple):
    """σ(scale · log(c/(1 − c))), float32 scalar, scale = 1/T > 0."""

    scale: np.ndarray
    report: FitReport


class PlattState(NamedTuple):
    """σ(slope · log(c/(1 − c)) + intercept), float32 scalars."""

    slope: np.ndarray
    intercept: np.ndarray
    report: FitReport


class BetaState(NamedTuple):
    """σ(a log c − b log(1 − c) + m), float32 scalars."""

    a: np.ndarray
    b: np.ndarray
    m: np.ndarray
    report: FitReport


def _logs(confidence: Array) -> tuple[Array, Array]:
    """log c, log(1 − c)."""
    c = jnp.clip(confidence, _EDGE, 1 - _EDGE)
    return jnp.log(c), jnp.log1p(-c)


def _log_loss(score: Array, correct: Array) -> Array:
    return -(correct * jax.nn.log_sigmoid(score) + (1 - correct) * jax.nn.log_sigmoid(-score))


def _odds(scale: Any, confidence: Array) -> Array:
    return _platt((scale, 0.0), confidence)


def _odds_loss(params, rows, extra):
    confidence, correct = (row.astype(params[0].dtype) for row in rows)
    return _log_loss(_odds(params[0], confidence), correct)


def fit_odds(data: Predictions, where: np.ndarray | None = None) -> OddsState:
    """A single temperature where only the confidence is known: σ(log(c/(1 − c))/T).

    Temperature scaling (Guo et al. 2017, section 4.2) of the two logits 0 and log(c/(1 − c)): Platt scaling with a
    positive slope and no intercept. A confidence of one half stays as it is. 1/T is kept within e⁻⁶ and 16.

    Args:
        data: with `confidence`, `correct` (a share of attempts counts as that many right and wrong ones).
        where: bool `[N]`, False for rows that do not count.

    Returns:
        `OddsState`; `report.converged` is False on separable data.

    Raises:
        UserError: see `select`.
    """
    confidence, correct = select(data, ("confidence", "correct"), where)
    (scale,), report = minimize(_odds_loss, (1.0,), (confidence, correct), bounds=((np.exp(-6.0),), (_LIMIT,)))
    return OddsState(scale, report)


def apply_odds(state: OddsState, data: Predictions) -> Float[Array, " N"]:
    """σ(scale · log(c/(1 − c)))."""
    return jax.nn.sigmoid(_odds(state.scale, jnp.asarray(data.confidence, jnp.float32)))


def _platt(params: Any, confidence: Array) -> Array:
    log_c, log_miss = _logs(confidence)
    return params[0] * (log_c - log_miss) + params[1]


def _platt_loss(params, rows, extra):
    confidence, correct = (row.astype(params[0].dtype) for row in rows)
    return _log_loss(_platt(params, confidence), correct)


def fit_platt(data: Predictions, where: np.ndarray | None = None) -> PlattState:
    """Platt scaling: logistic regression of correctness on log(c/(1 − c)) (Platt 1999, section 2, without his prior).

    No penalty, as `sklearn.linear_model.LogisticRegression(penalty=None)`; slope and intercept are kept within ±16,
    which only data do reach that one threshold separates. The slope may be negative, where a larger confidence means
    more mistakes: then the ranking is turned round.

    Args:
        data: with `confidence`, `correct` (a share of attempts counts as that many right and wrong ones).
        where: bool `[N]`, False for rows that do not count.

    Returns:
        `PlattState`; `report.converged` is False on separable data.

    Raises:
        UserError: see `select`.
    """
    confidence, correct = select(data, ("confidence", "correct"), where)
    bounds = ((-_LIMIT, -_LIMIT), (_LIMIT, _LIMIT))
    (slope, intercept), report = minimize(_platt_loss, (1.0, 0.0), (confidence, correct), bounds=bounds)
    return PlattState(slope, intercept, report)


def apply_platt(state: PlattState, data: Predictions) -> Float[Array, " N"]:
    """σ(slope · log(c/(1 − c)) + intercept)."""
    return jax.nn.sigmoid(_platt((state.slope, state.intercept), jnp.asarray(data.confidence, jnp.float32)))


def _beta(params: Any, confidence: Array) -> Array:
    log_c, log_miss = _logs(confidence)
    return params[0] * log_c - params[1] * log_miss + params[2]


def _beta_loss(params, rows, extra):
    confidence, correct = (row.astype(params[0].dtype) for row in rows)
    return _log_loss(_beta(params, confidence), correct)


def fit_beta(data: Predictions, where: np.ndarray | None = None) -> BetaState:
    """Beta calibration: σ(a log c − b log(1 − c) + m), a, b >= 0 (Kull et al. 2017, section 4, "abm").

    The likelihood ratio of two beta distributions; a = b = 1, m = 0 is the identity, a = b is Platt scaling. Always
    monotone. a and b are kept below 16, m within ±16.

    Args:
        data: with `confidence`, `correct` (a share of attempts counts as that many right and wrong ones).
        where: bool `[N]`, False for rows that do not count.

    Returns:
        `BetaState`; `report.converged` is False on separable data.

    Raises:
        UserError: see `select`.
    """
    confidence, correct = select(data, ("confidence", "correct"), where)
    bounds = ((0.0, 0.0, -_LIMIT), (_LIMIT, _LIMIT, _LIMIT))
    (a, b, m), report = minimize(_beta_loss, (1.0, 1.0, 0.0), (confidence, correct), bounds=bounds)
    return BetaState(a, b, m, report)


def apply_beta(state: BetaState, data: Predictions) -> Float[Array, " N"]:
    """σ(a log c − b log(1 − c) + m)."""
    return jax.nn.sigmoid(_beta((state.a, state.b, state.m), jnp.asarray(data.confidence, jnp.float32)))
