"""Stacking: one confidence from several, by logistic regression on their log-odds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import expit

from calibjax.recalibrate.contract import FitReport
from calibjax.recalibrate.optimize import Minimum, lbfgs

_CLIP, _LIMIT = 0.01, 16.0  # of the confidences that log-odds are taken of; of weights and intercept
_RIDGES, _FOLDS = (0.0, 1e-3, 1e-2, 1e-1), 5


class StackingState(NamedTuple):
    """σ(w · log(c/(1 − c)) + b), c clipped to [0.01, 0.99]: w float32 `[C]`, b a scalar, and the ridge of the fit."""

    weights: np.ndarray
    intercept: np.ndarray
    ridge: np.ndarray
    report: FitReport


def fit(confidences: Float[np.ndarray, "N C"], correct: Float[np.ndarray, " N"]) -> StackingState:
    """Stacking of C confidences in one answer (Wolpert 1992): logistic regression of correctness on their log-odds.

    A tuned ensemble, as of uqlm (arXiv 2504.19254), that is calibrated too. The penalty λ‖w‖² on the weights is the one
    of 0, .001, .01, .1 that predicts best what it was not fitted on, by the log loss over five folds of the rows.
    Confidences are read as clip(c, .01, .99), so that consistencies of exactly 0 and 1 do not dominate.
    """
    c, y = np.clip(confidences.astype(np.float64), _CLIP, 1 - _CLIP), correct.astype(np.float64)
    z = np.column_stack([np.log(c) - np.log1p(-c), np.ones(len(c))])
    fold = np.random.default_rng(0).permutation(len(y)) % _FOLDS
    parts = [(fold != k, fold == k) for k in range(min(_FOLDS, len(y)))] if len(y) > 1 else []

    def held_out(ridge: float) -> float:
        return sum(_losses(_regression(z[own], y[own], ridge).x, z[new], y[new]).sum() for own, new in parts)

    ridge = min(_RIDGES, key=held_out)
    best = _regression(z, y, ridge)
    *weights, intercept = best.x.astype(np.float32)
    return StackingState(np.array(weights), np.asarray(intercept), np.asarray(ridge, np.float32), best.report())


def _losses(x: np.ndarray, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log loss of each row, `[N]`."""
    return np.logaddexp(0.0, z @ x) - y * (z @ x)


def _regression(z: np.ndarray, y: np.ndarray, ridge: float) -> Minimum:
    """The x `[C + 1]` of the least mean log loss + ridge ‖x without its last‖²."""
    penalty = np.append(np.full(z.shape[1] - 1, ridge), 0.0)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value = _losses(x, z, y).mean() + (penalty * x * x).sum()
        return value, (expit(z @ x) - y) @ z / len(y) + 2 * penalty * x

    return lbfgs(objective, np.zeros(z.shape[1]), -_LIMIT, _LIMIT)


def apply(state: StackingState, confidences: Float[Array, "N C"]) -> Float[Array, " N"]:
    """σ(w · log(c/(1 − c)) + b)."""
    c = jnp.clip(confidences, _CLIP, 1 - _CLIP)
    log_odds = jnp.log(c) - jnp.log1p(-c)
    return jax.nn.sigmoid(jnp.sum(log_odds * state.weights[None], axis=-1) + state.intercept)
