"""Ensemble temperature scaling: a mixture of the tempered, the uncalibrated and the uniform prediction."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate import temperature
from calibjax.recalibrate.contract import IMPOSSIBLE, FitReport, Method, Predictions, select
from calibjax.recalibrate.optimize import minimize
from calibjax.runtime.arrays import AnyArray


class EnsembleState(NamedTuple):
    """log s of the tempered part, float32 scalar, and the weights w >= 0, float32 `[3]` with sum 1."""

    log_scale: np.ndarray
    weights: np.ndarray
    report: FitReport


def _mixed(weights: Array, parts: Float[Array, "3 ..."]) -> Array:
    return jax.nn.logsumexp(parts + jnp.log(weights).reshape((3,) + (1,) * (parts.ndim - 1)), axis=0)


def _parts(log_scale: AnyArray, logits: Array) -> Float[Array, "3 N K"]:
    tempered = temperature.log_softmax_at(jnp.exp(log_scale), logits)
    possible = logits > IMPOSSIBLE
    count = jnp.sum(possible, axis=-1, keepdims=True).astype(logits.dtype)
    uniform = jnp.where(possible, -jnp.log(count), -jnp.inf)
    return jnp.stack([tempered, jax.nn.log_softmax(logits, axis=-1), uniform])


def _loss(weights, rows, extra):
    # Over the simplex, log(w·p) is maximal where log(u·p) − Σu is over u >= 0: there Σu = 1 by itself.
    return -_mixed(weights, rows[0].T) + jnp.sum(weights) - 1.0


def fit(data: Predictions, where: np.ndarray | None = None) -> EnsembleState:
    """q = w₁ softmax(z/T) + w₂ softmax(z) + w₃/K, w on the simplex (Zhang et al. 2020, section 3.2, "ETS").

    K counts the options that are possible, whose logit is not −inf.

    T first, alone, by negative log-likelihood; then w, in which the likelihood is concave.

    Example:
        >>> data = Predictions(logits=np.log(np.array([[0.9, 0.1]] * 4)), labels=np.array([0, 0, 0, 1]))
        >>> np.exp(np.asarray(apply(fit(data), data)[0])).round(2).tolist()
        [0.75, 0.25]
    """
    logits, labels = select(data, ("logits", "labels"), where, impossible=True)
    single = temperature.fit(Predictions(logits=logits, labels=labels))
    pieces = -(-logits.size // 2**22)
    label_parts = np.concatenate(
        [
            np.asarray(jnp.take_along_axis(_parts(single.log_scale, jnp.asarray(z)), y[None, :, None], axis=2))[..., 0]
            for z, y in zip(np.array_split(logits, pieces), np.array_split(labels, pieces), strict=True)
        ],
        axis=1,
    )
    weights, report = minimize(_loss, np.full(3, 1 / 3), (label_parts.T,), bounds=(np.full(3, 1e-9), np.full(3, 2.0)))
    converged = bool(report.converged and single.report.converged)
    return EnsembleState(single.log_scale, weights / weights.sum(), report._replace(converged=np.asarray(converged)))


def apply(state: EnsembleState, data: Predictions) -> Float[Array, "N K"]:
    """log(w₁ softmax(z/T) + w₂ softmax(z) + w₃/K)."""
    parts = _parts(state.log_scale, jnp.asarray(data.logits, jnp.float32))
    return jnp.minimum(_mixed(jnp.asarray(state.weights), parts), 0.0)  # rounding may exceed log 1


METHODS = {
    "ensemble_temperature": Method(
        fit, apply, ("logits", "labels"), "Zhang et al. 2020", keeps_argmax=True, monotone=True
    ),
}
