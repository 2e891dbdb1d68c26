"""Small networks on frozen predictions, fitted by `optimize.descend`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import FitReport, at_labels, log_probs_of
from calibjax.recalibrate.optimize import descend
from calibjax.recalibrate.temperature import log_softmax_at
from calibjax.runtime.options import Seed

_UNITS = 32


class GLayersState(NamedTuple):
    """z + relu((z − m)/d A + a) B + b: float32 A `[K, units]`, a `[units]`, B `[units, K]`, b `[K]`; scalars m, d."""

    inner: np.ndarray
    inner_bias: np.ndarray
    outer: np.ndarray
    outer_bias: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    report: FitReport


def _corrected(params: Any, logits: Array, mean: Any, deviation: Any) -> Array:
    inner, inner_bias, outer, outer_bias = params
    unit = jax.nn.relu(jnp.matmul((logits - mean) / deviation, inner) + inner_bias[None, :])
    return logits + jnp.matmul(unit, outer) + outer_bias[None, :]


def _g_layers_loss(params, rows, extra):
    logits, labels = rows
    return -at_labels(jax.nn.log_softmax(_corrected(params, logits, *extra)), labels)


def fit_g_layers(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"], *, seed: Seed = 0) -> GLayersState:
    """g-layers: a network after the logits, trained by negative log-likelihood (Rahimi et al. 2020, arXiv 2006.12807).

    One hidden layer of 32 units with a residual connection, which starts as the identity; stopped where the likelihood
    of a fifth of the rows, kept from training, is best. 65 K + 32 parameters: for K beyond some thousands the fit
    needs as many examples, or stays the identity. `seed`: of the start, the split and the batches.
    """
    classes = logits.shape[1]
    mean = np.float32(logits.mean(dtype=np.float64))
    deviation = np.float32(max(logits.std(dtype=np.float64), 1e-6))
    inner = np.random.default_rng(seed).normal(size=(classes, _UNITS)) * np.sqrt(2 / classes)
    shapes = (_UNITS,), (_UNITS, classes), (classes,)  # all 0: the start is the identity
    start = inner.astype(np.float32), *(np.zeros(shape, np.float32) for shape in shapes)
    params, report = descend(_g_layers_loss, start, (logits, labels), (mean, deviation), seed=seed)
    return GLayersState._make((*params, np.asarray(mean), np.asarray(deviation), report))


def apply_g_layers(state: GLayersState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax of the logits and the network's correction."""
    *params, mean, deviation, _ = state
    return log_probs_of(_corrected(tuple(params), logits, mean, deviation))


class MlpTemperatureState(NamedTuple):
    """The parameters of an `MLPHead`, float32."""

    params: Any
    report: FitReport


def _head(width: int) -> Any:
    from calibjax.heads import MLPHead  # flax is imported where a head is fitted or applied

    return MLPHead(intermediate_size=width)


def _tempered(params: Any, logits: Array, features: Array) -> Array:
    # The width is in the parameters; the head is a pure function of both.
    width = params["params"]["gate_up"]["kernel"].shape[1] // 2
    log_scale = _head(width).apply(params, features[None])
    return log_softmax_at(jnp.exp(jnp.asarray(log_scale)[0])[:, None], logits)


def _mlp_temperature_loss(params, rows, extra):
    logits, features, labels = rows
    return -at_labels(_tempered(params, logits, features), labels)


def fit_mlp_temperature(
    logits: Float[np.ndarray, "N K"],
    features: Float[np.ndarray, "N D"],
    labels: Int[np.ndarray, " N"],
    *,
    units: int = 64,
    seed: Seed = 0,
) -> MlpTemperatureState:
    """A temperature for each prediction, from its hidden state h: softmax(s(h) z).

    log s(h) is an `MLPHead` of `units` on h, trained by cross-entropy and stopped as g-layers are. It has the inputs of
    every other method of a comparison; `calibjax.fit_ats` fits the heads of arXiv 2409.19817, which read sequences.
    `seed`: of the start, the split and the batches.
    """
    start = _head(units).init(jax.random.key(seed), jnp.asarray(features[None, :1]))
    params, report = descend(_mlp_temperature_loss, start, (logits, features, labels), seed=seed)
    return MlpTemperatureState(params, report)


def apply_mlp_temperature(
    state: MlpTemperatureState, logits: Float[Array, "N K"], features: Float[Array, "N D"]
) -> Float[Array, "N K"]:
    """log softmax(s(h) z)."""
    return _tempered(state.params, logits, features)
