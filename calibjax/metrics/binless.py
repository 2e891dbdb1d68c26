"""Calibration without bins: smooth ECE, the Kolmogorov-Smirnov error, and accuracy by confidence as a smooth curve.

The curve follows from sums at a fixed grid of confidences, which are added up batch by batch as `CalibrationSums` are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.metrics._points import Points, check, divisor, metric, points
from calibjax.runtime.arrays import AnyArray

NODES = 256  # grid intervals of the curve on [0, 1]; its smallest bandwidth spans five of them
GROUPS = 200  # that the band is resampled from: its ends have a relative error of (2 GROUPS)^-½, 5%
_BANDWIDTHS = (0.02, 0.05)  # of the curve
_RESAMPLES = 200  # of the band
_LEAST = 10.0  # points, weighted by the kernel over its largest value, below which the curve is not drawn
_FINE = 2**13  # grid intervals of smooth ECE; the smallest bandwidth of the search spans 16 of them


def _residual_grid(data: Points) -> Float[Array, " M"]:
    """Σ (confidence − correctness)/n at grid nodes on [0, 1]; a point is split linearly between two nodes."""
    at = data.confidence * _FINE
    node = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, _FINE - 1)
    residual = data.weight * (data.confidence - data.correct) / divisor(jnp.sum(data.weight))
    upper = residual * (at - node)
    return jnp.zeros(_FINE + 1).at[node].add(residual - upper).at[node + 1].add(upper)


def _smoothed_error(waves: Float[Array, " M"], bandwidth: Array) -> Array:
    """∫ |r_σ(t)| dt, where r_σ is the residual smoothed by the reflected Gaussian kernel of standard deviation σ.

    The kernel's eigenfunctions on [0, 1] are cos(π k t), with eigenvalues exp(−(π k σ)²/2).
    """
    k = jnp.arange(_FINE + 1)
    decayed = waves * jnp.exp(-jnp.square(jnp.pi * k * bandwidth) / 2)
    size = jnp.abs(jnp.fft.irfft(decayed, n=2 * _FINE)[: _FINE + 1]) * (2 * _FINE)
    return (jnp.sum(size) - (size[0] + size[-1]) / 2) / _FINE


@metric()
def smooth_ece(confidence, correct, *, bandwidth: float | Array | None = None, where=None):
    """Smooth ECE (Błasiok and Nakkiran 2024, "Smooth ECE: principled reliability diagrams via kernel smoothing").

    smECE_σ = ∫ |(1/n) Σ_i K_σ(t, confidence_i) (confidence_i − correctness_i)| dt over [0, 1], K_σ the Gaussian kernel
    reflected at 0 and 1. The automatic bandwidth is the fixed point σ = smECE_σ. As in the authors' code, ten
    bisections give the smallest multiple of 1/1024 that is not below its own error, and at least 2/1024.

    `bandwidth`: σ > 0, or None for the automatic one. For the other arguments see `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    grid = _residual_grid(data)
    ends = jnp.array([grid[0], grid[-1]])
    even = jnp.concatenate([2 * ends[:1], grid[1:-1], 2 * ends[1:], grid[-2:0:-1]])
    waves = jnp.fft.rfft(even).real / 2

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        too_small = (middle < 0.001) | (middle < _smoothed_error(waves, middle))
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    if bandwidth is None:
        bandwidth = jax.lax.fori_loop(0, 10, halve, (jnp.float32(0), jnp.float32(1)))[1]
    return data.answer(_smoothed_error(waves, jnp.asarray(bandwidth)))


@metric()
def ks_calibration_error(confidence, correct, *, where=None):
    """Kolmogorov-Smirnov calibration error, max_t |(1/n) Σ_{i: confidence_i <= t} (confidence_i − correctness_i)|.

    Gupta et al. 2021. Points of equal confidence enter the sum together. For the arguments see
    `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    order = jnp.argsort(data.confidence)
    key = data.confidence[order]
    reached = jnp.cumsum((data.weight * (data.confidence - data.correct))[order])
    ends = jnp.append(key[1:] != key[:-1], True)
    return data.answer(jnp.max(jnp.where(ends, jnp.abs(reached), 0.0)) / divisor(jnp.sum(data.weight)))


class ReliabilityCurve(NamedTuple):
    """Accuracy by confidence at 101 confidences from 0 to 1.

    Attributes:
        confidence: 0, 0.01, ..., 1.
        accuracy: NaN where fewer than ten points are within reach of the kernel.
        low, high: ends of the pointwise 95% band; NaN where accuracy is.
        density: of the confidences; its integral is 1.
        bandwidth: standard deviation of the kernel.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    low: np.ndarray
    high: np.ndarray
    density: np.ndarray
    bandwidth: float


def grid_sums(
    confidence: Float[AnyArray, "*G N"], correct: AnyArray, where: AnyArray | None = None
) -> Float[Array, "*G {NODES+1} 2"]:
    """Number of points and Σ correctness at the nodes k / `NODES`, over the last axis: float32 `[..., NODES + 1, 2]`.

    A point is split linearly between the two nodes beside it, so that Σ confidence is kept. Sums of disjoint points add
    up. Pure and jittable; `confidence` and `correct` in [0, 1], `where` False for points that do not count.
    """
    confidence = jnp.clip(jnp.asarray(confidence).astype(jnp.float32), 0.0, 1.0)
    counts = jnp.ones(confidence.shape, bool) if where is None else jnp.asarray(where) > 0
    at = jnp.where(counts, confidence, 0.0) * NODES
    node = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, NODES - 1)
    upper = at - node
    values = jnp.stack([jnp.ones_like(at), jnp.where(counts, jnp.asarray(correct).astype(jnp.float32), 0.0)], axis=-1)
    values = jnp.where(counts[..., None], values, 0.0)

    def add(node: Array, upper: Array, values: Array) -> Array:
        lower = jnp.zeros((NODES + 1, 2)).at[node].add(values * (1 - upper)[:, None])
        return lower.at[node + 1].add(values * upper[:, None])

    return jnp.vectorize(add, signature="(n),(n),(n,k)->(m,k)")(node, upper, values)


def reliability_curve(
    confidence: Float[AnyArray, " N"],
    correct: AnyArray,
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> ReliabilityCurve:
    """Accuracy by confidence with its 95% band and the density of the confidences.

    accuracy(t) = Σ_i K_σ(t, confidence_i) correct_i / Σ_i K_σ(t, confidence_i), with the Gaussian kernel reflected at 0
    and 1 (Błasiok and Nakkiran 2024). σ is smooth ECE, their choice, but at least 0.02, and at most 0.05, since a wider
    kernel would flatten the curve of a model that is far from calibrated. Confidences lie on a grid of 1/256.

    `groups`: labels `[N]`; points of one group are resampled together. `seed`: of the band, a percentile interval. For
    the other arguments see `expected_calibration_error`. ValueError for invalid points.
    """
    check({"confidence": confidence, "correct": correct})
    if not len(confidence):
        raise ValueError("expected at least one point, got none.")
    c, y = np.asarray(confidence, np.float32), np.asarray(correct, np.float32)
    labels = np.arange(len(c)) if groups is None else np.unique(groups, return_inverse=True)[1]
    pool = np.random.default_rng((seed, 1)).permutation(labels.max() + 1)[labels] % GROUPS
    at = np.clip(c, 0, 1).astype(np.float64) * NODES
    node = np.clip(np.floor(at).astype(int), 0, NODES - 1)
    sums = np.zeros((min(labels.max() + 1, GROUPS), NODES + 1, 2))
    for step, weight in ((0, 1 - (at - node)), (1, at - node)):
        np.add.at(sums, (pool, node + step), np.stack([weight, weight * y], axis=-1))
    return curve_from_sums(sums, seed=seed)


def curve_from_sums(sums: np.ndarray, *, seed: int = 0) -> ReliabilityCurve:
    """`reliability_curve` from `grid_sums` of independent groups, `[G, NODES + 1, 2]`; at most some hundred groups."""
    sums = np.asarray(sums, np.float64)
    count, correct = np.moveaxis(sums.sum(axis=0), -1, 0)
    nodes = np.arange(NODES + 1) / NODES
    accuracy = np.divide(correct, count, out=np.zeros_like(count), where=count > 0)
    error = float(smooth_ece(jnp.asarray(nodes), jnp.asarray(np.clip(accuracy, 0, 1)), where=jnp.asarray(count)))
    bandwidth = float(np.clip(error, *_BANDWIDTHS))
    confidence = np.arange(101) / 100
    kernel = _kernel(confidence[:, None], nodes[None, :], bandwidth)
    weight = kernel @ count
    draws = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=_RESAMPLES)
    drawn = np.tensordot(draws, np.tensordot(sums, kernel, axes=(1, 1)), axes=(1, 0))  # [_RESAMPLES, 2, 101]
    shown = weight * bandwidth * np.sqrt(2 * np.pi) >= _LEAST
    curve = np.where(shown, (kernel @ correct) / np.maximum(weight, 1e-30), 0.0)
    ratio = np.divide(drawn[:, 1], drawn[:, 0], out=np.tile(curve, (_RESAMPLES, 1)), where=drawn[:, 0] > 0)
    low, high = np.quantile(ratio, (0.025, 0.975), axis=0)
    bounds = (np.minimum(low, curve), np.maximum(high, curve))
    accuracy, low, high = (np.where(shown, x, np.nan) for x in (curve, *bounds))
    return ReliabilityCurve(confidence, accuracy, low, high, weight / count.sum(), bandwidth)


def _kernel(t: np.ndarray, x: np.ndarray, bandwidth: float) -> np.ndarray:
    """The Gaussian kernel reflected at 0 and 1; images further than one interval away weigh nothing for σ <= 1/2."""
    images = [t - x + shift for shift in (-2, 0, 2)] + [t + x + shift for shift in (-2, 0)]
    return sum(np.exp(-np.square(z / bandwidth) / 2) for z in images) / (bandwidth * np.sqrt(2 * np.pi))
