"""Ranking metrics: how well confidence separates right from wrong answers. AUROC and risk-coverage curves.

They depend on the order of the confidences only, not on calibration. Points of equal confidence form a block; a metric
is its expectation over random orders within blocks. A point that counts w times equals w points. Each sorts once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.metrics._points import Points, metric, points


class _Blocks(NamedTuple):
    """Sums over blocks of equal score, best first, at the last point of a block; `weight` and `value` else hold 0."""

    weight: Float[Array, " N"]  # Σ weight over the block
    value: Float[Array, " N"]  # Σ weight·value over the block
    weight_before: Float[Array, " N"]  # the same two over all better blocks
    value_before: Float[Array, " N"]


def _blocks(score: Float[Array, " N"], value: Float[Array, " N"], weight: Float[Array, " N"]) -> _Blocks:
    order = jnp.argsort(-score)
    score, weight = score[order], weight[order]
    is_last = jnp.append(score[1:] != score[:-1], True)  # [N], the last point of its block

    def block_sums(cumulative):
        so_far = jax.lax.cummax(jnp.where(is_last, cumulative, 0.0))  # up to the latest end: sums never decrease
        before = jnp.concatenate([jnp.zeros(1, jnp.float32), so_far[:-1]])
        return jnp.where(is_last, cumulative - before, 0.0), before

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
    blocks = _blocks(data.confidence, data.correct, data.weight)
    wrong_in_block = blocks.weight - blocks.value
    right, wrong = jnp.sum(blocks.value), jnp.sum(wrong_in_block)
    right_above = blocks.value_before + blocks.value / 2  # right answers above each wrong one, ties as one half
    area = jnp.sum(wrong_in_block / wrong * right_above / right)
    return data.nan_unless_usable(area)


def _harmonic_difference(start: Float[Array, " N"], length: Float[Array, " N"]) -> Float[Array, " N"]:
    """H(start + length) − H(start) = Σ_{k >= 1} [1/(start + k) − 1/(start + length + k)], with harmonic numbers H.

    To avoid cancellation, eight terms are summed directly. The rest uses the asymptotic series
    H(x − ½) = log x + γ + 1/(24 x²) − ..., whose next term is below 2e-6 of the sum there.
    """
    k = jnp.arange(1, 9, dtype=jnp.float32)
    n = start[:, None] + k[None, :]  # [N, 8]
    first_terms = jnp.sum(length[:, None] / (n * (n + length[:, None])), axis=-1)
    low, high = start + 8.5, start + length + 8.5
    correction = length * (low + high) / (24 * jnp.square(low * high))
    rest = jnp.log1p(length / low) - correction
    return first_terms + rest


def _area(data: Points, score: Float[Array, " N"], loss: Float[Array, " N"]) -> Array:
    """Area under the risk-coverage curve: (1/n) Σ_k (mean loss of the k points of highest score).

    Take a block of W points with mean loss e that follows a points with total loss E. After j of its points, the
    expected risk is (E + j e)/(a + j) = e + (E − a e)/(a + j), so the block adds W e + (E − a e) (H(a + W) − H(a)).
    """
    blocks = _blocks(score, loss, data.weight)
    mean = blocks.value / jnp.maximum(blocks.weight, 1.0)
    excess_before = blocks.value_before - blocks.weight_before * mean  # E − a e
    added = blocks.value + excess_before * _harmonic_difference(blocks.weight_before, blocks.weight)
    return jnp.sum(added) / jnp.sum(blocks.weight)


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
    area = _area(data, data.confidence, loss)
    least_area = _area(data, -loss, loss)
    return data.nan_unless_usable(area - least_area)
