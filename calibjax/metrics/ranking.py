"""Ranking metrics: how well confidence separates right from wrong answers. AUROC and risk-coverage curves.

They do not depend on calibration. Each sorts once. Points of equal confidence form a block, and a metric is the
expectation over orders within blocks, whatever the order of the points. A point that counts w times equals w points.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.metrics._points import Points, metric, points


class _Blocks(NamedTuple):
    """Blocks of equal score, best first. Entries that do not end a block have `weight` and `value` 0."""

    weight: Float[Array, " N"]  # in the block
    value: Float[Array, " N"]  # Σ value in the block
    weight_before: Float[Array, " N"]  # in all better blocks
    value_before: Float[Array, " N"]


def _blocks(score: Float[Array, " N"], value: Float[Array, " N"], weight: Float[Array, " N"]) -> _Blocks:
    order = jnp.argsort(-score)
    score, weight = score[order], weight[order]
    ends = jnp.append(score[1:] != score[:-1], True)

    def block_sums(sums):
        latest = jax.lax.cummax(jnp.where(ends, sums, 0.0))  # the sum at the last end so far: sums never decrease
        before = jnp.concatenate([jnp.zeros(1, jnp.float32), latest[:-1]])
        return jnp.where(ends, sums - before, 0.0), before

    weights, weights_before = block_sums(jnp.cumsum(weight))
    values, values_before = block_sums(jnp.cumsum(weight * value[order]))
    return _Blocks(weights, values, weights_before, values_before)


@metric()
def auroc(confidence, correct, *, where=None):
    """Area under the ROC curve: P(a right answer has higher confidence than a wrong one); ties count as one half.

    A point whose `correct` is a fraction counts as right by that fraction and as wrong by the rest. NaN if all answers
    are right, or none. For the arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    b = _blocks(data.confidence, data.correct, data.weight)
    wrong_in_block = b.weight - b.value
    right, wrong = jnp.sum(b.value), jnp.sum(wrong_in_block)
    right_above = b.value_before + b.value / 2
    area = jnp.sum(wrong_in_block / wrong * right_above / right)
    return data.nan_unless_usable(area)


def _harmonic(start: Float[Array, " N"], length: Float[Array, " N"]) -> Float[Array, " N"]:
    """H(start + length) − H(start) of the harmonic numbers, without the cancellation of a difference.

    Eight terms are summed directly. The rest uses the asymptotic series H(x − ½) = log x + γ + 1/(24 x²) − ..., whose
    next term is below 2e-6 of the sum there.
    """
    near = start[:, None] + jnp.arange(1, 9, dtype=jnp.float32)[None, :]
    direct = jnp.sum(length[:, None] / (near * (near + length[:, None])), axis=-1)
    low, high = start + 8.5, start + length + 8.5
    second_term = length * (low + high) / (24 * jnp.square(low * high))
    return direct + (jnp.log1p(length / low) - second_term)


def _area(data: Points, score: Float[Array, " N"], loss: Float[Array, " N"]) -> Array:
    """(1/n) Σ_k (mean loss of the k points of highest score), in expectation over the order within blocks.

    Take a block of W points with mean loss e that follows a points with total loss E. After j of its points, the risk
    is (E + j e)/(a + j) = e + (E − a e)/(a + j), so the block adds W e + (E − a e) (H(a + W) − H(a)).
    """
    b = _blocks(score, loss, data.weight)
    mean = b.value / jnp.maximum(b.weight, 1.0)
    added = b.value + (b.value_before - b.weight_before * mean) * _harmonic(b.weight_before, b.weight)
    return jnp.sum(added) / jnp.sum(b.weight)


@metric(counts=True)
def aurc(confidence, correct, *, where=None):
    """Area under the risk-coverage curve (Geifman and El-Yaniv 2017; Geifman et al. 2019).

    (1/n) Σ_k (fraction of wrong answers among the k of highest confidence); lower is better.

    `where`: whole numbers, how often a point counts (else ValueError, NaN under jit), because the sum is over points.
    For the other arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where, counts=True)
    return data.nan_unless_usable(_area(data, data.confidence, 1 - data.correct))


@metric(counts=True)
def excess_aurc(confidence, correct, *, where=None):
    """AURC minus the AURC of the best order, in which all right answers come first (E-AURC, Geifman et al. 2019).

    For the arguments see `aurc`.
    """
    data = points(confidence, correct, where, counts=True)
    loss = 1 - data.correct
    return data.nan_unless_usable(_area(data, data.confidence, loss) - _area(data, -loss, loss))
