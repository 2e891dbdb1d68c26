"""Few-shot recalibration: a curve for a new slice of the data, from a few of its confidences without labels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Method, Predictions, select
from calibjax.recalibrate.optimize import descend
from calibjax.runtime.arrays import AnyArray

_KNOTS = np.linspace(0.0, 1.0, 11, dtype=np.float32)
_UNITS = 32
_SETS = 16  # few-shot sets drawn of every slice
_FEWEST = 5


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


def _curve(params: Any, embedding: Float[Array, "N 11"]) -> Float[Array, "N 11"]:
    """The values at the knots, for the set that each row's embedding describes. Without offsets c itself."""
    inner, inner_bias, outer, outer_bias = params
    unit = jnp.tanh(jnp.matmul(embedding, inner) + inner_bias[None, :])
    offset = jnp.matmul(unit, outer) + outer_bias[None, :]
    # In log-odds, so that a value never leaves (0, 1); the knots 0 and 1 stand for 0.005 and 0.995.
    knots = np.clip(_KNOTS, 0.005, 0.995)
    return jax.nn.sigmoid(np.log(knots / (1 - knots))[None, :] + offset)


def _recalibrated(params: Any, confidence: Array, embedding: Array) -> Array:
    return jnp.sum(_hats(confidence) * _curve(params, embedding), axis=1)


def _loss(params, rows, extra):
    confidence, correct, embedding = rows
    q = jnp.clip(_recalibrated(params, confidence, embedding), 1e-6, 1 - 1e-6)
    return -(correct * jnp.log(q) + (1 - correct) * jnp.log1p(-q))


def fit(data: Predictions, where: np.ndarray | None = None, *, seed: int = 0) -> FewShotState:
    """A recalibrator that reads a few unlabeled confidences of a slice (after Li et al. 2024, arXiv 2403.18286).

    A set of confidences is described by its histogram (11 hat functions), which does not depend on their order or
    number; a network of 32 units turns it into a piecewise-linear curve from confidence to the probability of being
    right. It is trained over the slices of `data` on sets of 5 or more of their confidences, drawn at random, by the
    log loss of that slice's correctness; its expectation is least at the slice's own curve. Kept is what does best on
    slices that training never saw. In the paper a language model reads the questions too, and precision curves are the
    targets; here the confidences are all there is.

    Args:
        data: with `confidence`, `correct`, `slices`: many slices, of the kind that new ones will be.
        seed: of the start, the sets, the split and the batches.
    """
    confidence, correct, slices = select(data, ("confidence", "correct", "slices"), where)
    rng = np.random.default_rng(seed)
    names, slice_of = np.unique(slices, return_inverse=True)
    members = np.split(np.argsort(slice_of, kind="stable"), np.cumsum(np.bincount(slice_of))[:-1])
    embeddings = np.zeros((len(names), _SETS, len(_KNOTS)), np.float32)
    for own, sets in zip(members, embeddings, strict=True):
        for one in sets:
            size = int(min(len(own), np.exp(rng.uniform(np.log(_FEWEST), np.log(max(len(own), _FEWEST) + 1)))))
            one[:] = _hats(confidence[rng.choice(own, size, replace=False)]).mean(axis=0)
    shown = embeddings[slice_of, rng.integers(0, _SETS, len(slice_of))]
    start = (
        (rng.normal(size=(len(_KNOTS), _UNITS)) * 2).astype(np.float32),
        np.zeros(_UNITS, np.float32),
        np.zeros((_UNITS, len(_KNOTS)), np.float32),
        np.zeros(len(_KNOTS), np.float32),
    )
    params, report = descend(_loss, start, (confidence, correct, shown), seed=seed, groups=slice_of)
    return FewShotState(params[0], params[1], params[2], params[3], report)


def apply(state: FewShotState, data: Predictions) -> Float[Array, " N"]:
    """Every confidence through the curve of its own slice; the slice's confidences in `data` are the few shots."""
    confidence, slices = jnp.asarray(data.confidence, jnp.float32), data.slices
    if not isinstance(slices, jax.Array):  # numbers beyond int32 stay apart
        slices = jnp.asarray(np.unique(np.asarray(slices), return_inverse=True)[1])
    hats = _hats(confidence)
    total = jax.ops.segment_sum(hats, slices, num_segments=len(slices))
    count = jax.ops.segment_sum(jnp.ones_like(confidence), slices, num_segments=len(slices))
    embedding = (total / jnp.maximum(count, 1.0)[:, None])[slices]
    return _recalibrated(tuple(state[:4]), confidence, embedding)


METHODS = {
    "few_shot": Method(fit, apply, ("confidence", "correct", "slices"), "Li et al. 2024, arXiv 2403.18286"),
}
