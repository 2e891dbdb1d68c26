"""Affine maps of the logits, or of the log-probabilities, before a softmax or a sigmoid."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate import temperature
from calibjax.recalibrate.contract import FitReport, log_probs_of
from calibjax.recalibrate.logistic import LIMIT, regression
from calibjax.recalibrate.optimize import Minimum, minimize
from calibjax.runtime.options import NonNegative


class VectorState(NamedTuple):
    """a, b of a ⊙ x + b, float32 `[K]`."""

    slope: np.ndarray
    intercept: np.ndarray
    report: FitReport


class MatrixState(NamedTuple):
    """W, b of W x + b, float32 `[K, K]` and `[K]`."""

    matrix: np.ndarray
    intercept: np.ndarray
    report: FitReport


class StructuredState(NamedTuple):
    """W, b of W log q + b, float32 `[K, K]` and `[K]`; q = (1 − u) softmax(s z) + u/K, log s and u scalars."""

    matrix: np.ndarray
    intercept: np.ndarray
    log_scale: np.ndarray
    uniform: np.ndarray
    report: FitReport


def _per_class(params: Any, x: Array) -> Array:
    slope, intercept = params
    return slope[None, :] * x + intercept[None, :]


def _nll(scores: Array, labels: Array) -> Array:
    """−log softmax of the label's score, selected by comparison: the gradient of an index is a slow scatter."""
    is_label = jnp.arange(scores.shape[1])[None, :] == labels[:, None]
    return jax.nn.logsumexp(scores, axis=1) - jnp.sum(jnp.where(is_label, scores, 0.0), axis=1)


def _vector_loss(params, rows, extra):
    return _nll(_per_class(params, rows[0]), rows[1])


def fit_vector(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"]) -> VectorState:
    """Vector scaling: softmax(a ⊙ z + b), least negative log-likelihood (Guo et al. 2017, section 4.2).

    The code of Adaptive Temperature Scaling (arXiv 2409.19817) calls this method element-wise Platt scaling: a
    factor and an offset for every entry of the vocabulary. A class that the labels never show is pushed to probability
    0, so with more classes than examples it needs a token's logits of many texts. With such classes the optimum lies at
    infinity, and the fit ends after 100 iterations at the latest.
    """
    classes = logits.shape[1]
    start = np.ones(classes), np.zeros(classes)
    iterations = 1000 if len(np.unique(labels)) == classes else 100
    (slope, intercept), report = minimize(_vector_loss, start, (logits, labels), max_iterations=iterations)
    return VectorState(slope, intercept, report)


def apply_vector(state: VectorState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(a ⊙ z + b)."""
    return log_probs_of(_per_class((state.slope, state.intercept), logits))


def _log_odds(logits: Array) -> Array:
    """log p/(1 − p), p kept within float32's reach of 0 and 1."""
    log_p = jnp.clip(jax.nn.log_softmax(logits), -87.0, -1e-7)
    return log_p - jnp.log(-jnp.expm1(log_p))


def fit_one_vs_rest(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"]) -> VectorState:
    """Platt scaling of every class against the rest, normalised (Zadrozny and Elkan 2002, section 4).

    q_k ∝ σ(a_k log(p_k/(1 − p_k)) + b_k), p = softmax(z): K logistic regressions, each on "the label is k", then
    divided by their sum. Slopes and intercepts are kept within ±16, where a class is never (or always) the label.
    """

    def columns(log_odds: np.ndarray) -> np.ndarray:
        return np.stack([log_odds.astype(np.float64), np.ones(len(log_odds))])

    log_odds = np.asarray(_log_odds(jnp.asarray(logits)).T)
    fits = [regression(columns, (z, labels == k), (1.0, 0.0), -LIMIT, LIMIT) for k, z in enumerate(log_odds)]
    params, values, converged, iterations = zip(*fits, strict=True)
    slope, intercept = np.array(params, np.float32).T
    return VectorState(slope, intercept, Minimum(slope, sum(values), all(converged), max(iterations)).report())


def apply_one_vs_rest(state: VectorState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log of the normalised σ(a_k log(p_k/(1 − p_k)) + b_k)."""
    scores = _per_class((state.slope, state.intercept), _log_odds(logits))
    return log_probs_of(jax.nn.log_sigmoid(scores))


def _dense(params: Any, x: Array) -> Array:
    matrix, intercept = params
    return jnp.matmul(x, matrix.T, precision="highest") + intercept[None, :]


def _matrix_loss(params, rows, extra):
    """NLL plus ODIR, λ/(K(K−1)) Σ_{i≠j} W_ij² + μ/K Σ b_j², added to every prediction: the mean adds it once.

    The parameters are W and c = b + W x̄, the intercept of centred inputs, which is better conditioned.
    """
    x, labels = rows
    matrix, centred = params
    classes = len(centred)
    off_diagonal = jnp.where(jnp.eye(classes, dtype=bool), 0.0, matrix)
    intercept = centred - matrix @ extra["mean"]
    entries = classes * max(classes - 1, 1)
    penalty = extra["off_diagonal"] * jnp.sum(jnp.square(off_diagonal)) / entries
    penalty = penalty + extra["intercept"] * jnp.mean(jnp.square(intercept))
    return _nll(_dense((matrix, intercept), x.astype(matrix.dtype)), labels) + penalty


def fit_matrix(
    logits: Float[np.ndarray, "N K"],
    labels: Int[np.ndarray, " N"],
    *,
    off_diagonal: NonNegative = 1e-3,
    intercept: NonNegative = 1e-3,
) -> MatrixState:
    """Matrix scaling: softmax(W z + b) (Guo et al. 2017, section 4.2), regularised as in Kull et al. 2019, section 3.

    K² + K parameters: without the penalty (both weights 0) it is multinomial logistic regression on the logits, which
    overfits unless K² is small compared with N. `off_diagonal`: λ of λ/(K(K−1)) Σ_{i≠j} W_ij²; `intercept`: μ of
    μ/K Σ b_j². (The paper chooses both by cross-validation, in 10^−7 to 10^3.)
    """
    mean = logits.mean(axis=0, dtype=np.float64)
    extra = {"off_diagonal": off_diagonal, "intercept": intercept, "mean": mean}
    (matrix, centred), report = minimize(_matrix_loss, (np.eye(len(mean)), mean), (logits, labels), extra)
    return MatrixState(matrix, np.asarray(centred - matrix @ mean, np.float32), report)


def apply_matrix(state: MatrixState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(W z + b)."""
    return log_probs_of(_dense((state.matrix, state.intercept), logits))


def fit_dirichlet(
    logits: Float[np.ndarray, "N K"],
    labels: Int[np.ndarray, " N"],
    *,
    off_diagonal: NonNegative = 1e-3,
    intercept: NonNegative = 1e-3,
) -> MatrixState:
    """Dirichlet calibration with ODIR: softmax(W log p + b), p = softmax(z) (Kull et al. 2019, section 3).

    The linear form of a generative model in which p is Dirichlet-distributed in every class. It is matrix scaling of
    log p, which does not depend on a constant added to the logits of a prediction. For the options see `fit_matrix`.
    """
    log_p = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
    return fit_matrix(log_p, labels, off_diagonal=off_diagonal, intercept=intercept)


def apply_dirichlet(state: MatrixState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(W log p + b)."""
    return apply_matrix(state, jax.nn.log_softmax(logits))


def _smoothed_log_probs(log_scale: Any, uniform: Any, logits: Array) -> Array:
    """log((1 − u) softmax(s z) + u/K)."""
    p = jnp.exp(temperature.log_softmax_at(jnp.exp(log_scale), logits))
    return jnp.log((1 - uniform) * p + uniform / logits.shape[1])


def _structured_loss(params, rows, extra):
    """NLL of softmax((I + C) x + b) plus (λ/N) K (Σ b_i² + Σ C_ii² + (K − 1) Σ_{i≠j} C_ij²); `extra`: λ/N."""
    x, labels = rows
    change, intercept = params
    classes = len(intercept)
    diagonal = jnp.sum(jnp.square(jnp.diagonal(change)))
    off_diagonal = (classes - 1) * (jnp.sum(jnp.square(change)) - diagonal)
    penalty = extra * classes * (jnp.sum(jnp.square(intercept)) + diagonal + off_diagonal)
    return _nll(x + _dense(params, x), labels) + penalty


def fit_structured(
    logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"], *, ridge: NonNegative = 1.0
) -> StructuredState:
    """Structured matrix scaling: softmax(W log q + b), q the prediction after temperature scaling (SMS).

    Its penalty grows with K and falls with N, so that with few predictions it is temperature scaling:
    λK/N (Σ (W_ii − 1)² + Σ b_i² + (K − 1) Σ_{i≠j} W_ij²) (Berta et al. 2025, arXiv 2511.03685, as in probmetrics). q is
    mixed with the uniform distribution, by 1/(N + 1). `ridge`: λ.
    """
    count, classes = logits.shape
    scaling = temperature.fit(logits, labels)
    uniform = np.asarray(1 / (count + 1), np.float32)
    x = np.asarray(_smoothed_log_probs(scaling.log_scale, uniform, jnp.asarray(logits)))
    start = np.zeros((classes, classes)), np.zeros(classes)
    (change, intercept), report = minimize(_structured_loss, start, (x, labels), ridge / count)
    matrix = np.eye(classes, dtype=np.float32) + change
    return StructuredState(matrix, intercept, scaling.log_scale, uniform, report)


def apply_structured(state: StructuredState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax(W log q + b)."""
    log_q = _smoothed_log_probs(state.log_scale, state.uniform, logits)
    return log_probs_of(_dense((state.matrix, state.intercept), log_q))
