"""Small networks on frozen predictions, fitted by `optimize.descend`.

g-layers read the logits, a temperature head (ATS) the hidden states, few-shot recalibration the confidences of a slice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import FitReport, log_probs_of, nll_of
from calibjax.recalibrate.optimize import descend
from calibjax.recalibrate.temperature import log_softmax_at
from calibjax.runtime.arrays import AnyArray

_UNITS = 32
_KNOTS = np.linspace(0.0, 1.0, 11, dtype=np.float32)
_SETS = 16  # few-shot sets drawn of every slice
_FEWEST = 5


def _identity_start(inner: np.ndarray) -> tuple[np.ndarray, ...]:
    """Weights and biases of a network with these weights `[inputs, units]` of its hidden layer; its output is 0."""
    inputs, units = inner.shape
    outer = np.zeros((units, inputs), np.float32)
    return inner.astype(np.float32), np.zeros(units, np.float32), outer, np.zeros(inputs, np.float32)


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
    return nll_of(jax.nn.log_softmax(_corrected(params, rows[0], *extra)), rows[1])


def fit_g_layers(logits: Float[np.ndarray, "N K"], labels: Int[np.ndarray, " N"], *, seed: int = 0) -> GLayersState:
    """g-layers: a network after the logits, trained by negative log-likelihood (Rahimi et al. 2020, arXiv 2006.12807).

    One hidden layer of 32 units with a residual connection, which starts as the identity; stopped where the likelihood
    of a fifth of the rows, kept from training, is best. 65 K + 32 parameters: for K beyond some thousands the fit
    needs as many examples, or stays the identity. `seed`: of the start, the split and the batches.
    """
    classes = logits.shape[1]
    mean = np.float32(logits.mean(dtype=np.float64))
    deviation = np.float32(max(logits.std(dtype=np.float64), 1e-6))
    start = _identity_start(np.random.default_rng(seed).normal(size=(classes, _UNITS)) * np.sqrt(2 / classes))
    params, report = descend(_g_layers_loss, start, (logits, labels), (mean, deviation), seed=seed)
    return GLayersState._make((*params, np.asarray(mean), np.asarray(deviation), report))


def apply_g_layers(state: GLayersState, logits: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax of the logits and the network's correction."""
    *params, mean, deviation, _ = state
    return log_probs_of(_corrected(tuple(params), logits, mean, deviation))


class HeadState(NamedTuple):
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


def _ats_loss(params, rows, extra):
    logits, features, labels = rows
    return nll_of(_tempered(params, logits, features), labels)


def fit_mlp(
    logits: Float[np.ndarray, "N K"],
    features: Float[np.ndarray, "N D"],
    labels: Int[np.ndarray, " N"],
    *,
    units: int = 64,
    seed: int = 0,
) -> HeadState:
    """Adaptive temperature scaling of given predictions: softmax(s(h) z) (arXiv 2409.19817).

    s(h) = exp of an `MLPHead` of `units` on the hidden state of each prediction, by cross-entropy, stopped as g-layers
    are. It is the row of a comparison in which every method has the same inputs; heads that see a sequence, the losses
    and the recipe of the paper, and training without the logits, are `calibjax.train`. `seed`: as of `fit_g_layers`.
    """
    start = _head(units).init(jax.random.key(seed), jnp.asarray(features[None, :1]))
    params, report = descend(_ats_loss, start, (logits, features, labels), seed=seed)
    return HeadState(params, report)


def apply_mlp(state: HeadState, logits: Float[Array, "N K"], features: Float[Array, "N D"]) -> Float[Array, "N K"]:
    """log softmax(s(h) z)."""
    return _tempered(state.params, logits, features)


class FewShotState(NamedTuple):
    """A network from a set of confidences to the offsets of a curve at 11 knots; float32 weights."""

    inner: np.ndarray
    inner_bias: np.ndarray
    outer: np.ndarray
    outer_bias: np.ndarray
    report: FitReport


def _hats(confidence: AnyArray) -> Float[Array, "N 11"] | np.ndarray:
    """Weights of the two knots around a confidence: curve(c) = hats(c) · values. Of numpy arrays in numpy."""
    distance = abs(confidence[:, None] - _KNOTS[None, :]) * (len(_KNOTS) - 1)
    return (1.0 - distance).clip(0.0)


def _recalibrated(params: Any, confidence: Array, embedding: Float[Array, "N 11"]) -> Array:
    """The curve of the set that each row's embedding describes, at its confidence. Without offsets c itself."""
    inner, inner_bias, outer, outer_bias = params
    unit = jnp.tanh(jnp.matmul(embedding, inner) + inner_bias[None, :])
    offset = jnp.matmul(unit, outer) + outer_bias[None, :]
    # In log-odds, so that a value never leaves (0, 1); the knots 0 and 1 stand for 0.005 and 0.995.
    knots = np.clip(_KNOTS, 0.005, 0.995)
    curve = jax.nn.sigmoid(np.log(knots / (1 - knots))[None, :] + offset)
    return jnp.sum(_hats(confidence) * curve, axis=1)


def _few_shot_loss(params, rows, extra):
    confidence, correct, embedding = rows
    q = jnp.clip(_recalibrated(params, confidence, embedding), 1e-6, 1 - 1e-6)
    return -(correct * jnp.log(q) + (1 - correct) * jnp.log1p(-q))


def fit_few_shot(confidence: np.ndarray, correct: np.ndarray, slices: np.ndarray, *, seed: int = 0) -> FewShotState:
    """A recalibrator that reads a few unlabeled confidences of a slice (after Li et al. 2024, arXiv 2403.18286).

    A set of confidences is described by its histogram (11 hat functions), which does not depend on their order or
    number; a network of 32 units turns it into a piecewise-linear curve from confidence to the probability of being
    right. It is trained over many slices, of the kind that new ones will be, on sets of 5 or more of their confidences,
    drawn at random, by the log loss of that slice's correctness; its expectation is least at the slice's own curve.
    The parameters that do best on slices that training never saw are returned. In the paper a language model reads the
    questions too, and precision curves are the targets. `seed`: of the start, the sets, the split and the batches.
    """
    rng = np.random.default_rng(seed)
    names, slice_of = np.unique(slices, return_inverse=True)
    members = np.split(np.argsort(slice_of, kind="stable"), np.cumsum(np.bincount(slice_of))[:-1])
    embeddings = np.zeros((len(names), _SETS, len(_KNOTS)), np.float32)
    for own, sets in zip(members, embeddings, strict=True):
        for one in sets:
            size = int(min(len(own), np.exp(rng.uniform(np.log(_FEWEST), np.log(max(len(own), _FEWEST) + 1)))))
            one[:] = _hats(confidence[rng.choice(own, size, replace=False)]).mean(axis=0)
    shown = embeddings[slice_of, rng.integers(0, _SETS, len(slice_of))]
    start = _identity_start(rng.normal(size=(len(_KNOTS), _UNITS)) * 2)
    params, report = descend(_few_shot_loss, start, (confidence, correct, shown), seed=seed, groups=slice_of)
    return FewShotState._make((*params, report))


def apply_few_shot(
    state: FewShotState, confidence: Float[Array, " N"], slices: Int[AnyArray, " N"]
) -> Float[Array, " N"]:
    """Every confidence through the curve of its own slice; the slice's confidences in the data are the few shots."""
    if not isinstance(slices, jax.Array):  # numbers beyond int32 stay apart
        slices = jnp.asarray(np.unique(np.asarray(slices), return_inverse=True)[1])
    hats = _hats(confidence)
    total = jax.ops.segment_sum(hats, slices, num_segments=len(slices))
    count = jax.ops.segment_sum(jnp.ones_like(confidence), slices, num_segments=len(slices))
    embedding = (total / jnp.maximum(count, 1.0)[:, None])[slices]
    return _recalibrated(tuple(state[:4]), confidence, embedding)
