"""Calibration without bins: smooth ECE, the Kolmogorov-Smirnov error, and accuracy by confidence as a smooth curve.

The curve is computed from sums on a fixed grid of confidences, which add up over batches as `CalibrationSums` do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.metrics._points import array_namespace, check, metric, nonzero, points, weights_of
from calibjax.runtime.arrays import AnyArray, as_array, ceil_div, label_numbers, plain_array

NODES = 256  # grid intervals of the reliability curve on [0, 1]; its smallest bandwidth spans five of them
GROUPS = 200  # largest number of groups that the band resamples: its width has a relative error of (2 GROUPS)^-½, 5%
_BANDWIDTHS = (0.02, 0.05)  # smallest and largest bandwidth of the reliability curve
_RESAMPLES = 200  # bootstrap samples of the band
_MIN_POINTS = 10.0  # effective number of points under the kernel, Σ K/max K, below which accuracy is NaN
_FINE = 2**13  # grid intervals of smooth ECE; the smallest bandwidth of the search spans 16 of them
_CHUNK = 2**11  # points added one by one for smooth ECE: in longer sums of equal terms the rounding errors add up


def _nodes(confidence: AnyArray, intervals: int) -> tuple[Any, Any]:
    """The grid node below each confidence in [0, 1], int32, and the weight in [0, 1] of the node above it."""
    xp = array_namespace(confidence)
    position = confidence * intervals
    below = xp.clip(xp.floor(position), 0, intervals - 1)
    return below.astype(np.int32), position - below


def _smoothed_error(cosines: Float[Array, " M"], bandwidth: Array) -> Array:
    """∫ |r_σ(t)| dt, where r_σ is the residual smoothed by the reflected Gaussian kernel of standard deviation σ.

    The kernel's eigenfunctions on [0, 1] are cos(π k t), with eigenvalues exp(−(π k σ)²/2). `cosines` holds the cosine
    transform of the residual at M = `_FINE` + 1 frequencies k.
    """
    k = jnp.arange(_FINE + 1, dtype=jnp.float32)
    eigenvalues = jnp.exp(-jnp.square(jnp.pi * k * bandwidth) / 2)
    smoothed = jnp.fft.irfft(cosines * eigenvalues, n=2 * _FINE)[: _FINE + 1]  # r_σ / (2 _FINE) at the nodes
    size = jnp.abs(smoothed) * (2 * _FINE)
    return (jnp.sum(size) - (size[0] + size[-1]) / 2) / _FINE  # the trapezoidal rule


@metric()
def smooth_ece(confidence, correct, *, bandwidth: float | Array | None = None, where=None):
    """Smooth ECE (Błasiok and Nakkiran 2024, "Smooth ECE: principled reliability diagrams via kernel smoothing").

    smECE_σ = ∫ |(1/n) Σ_i K_σ(t, confidence_i) (confidence_i − correctness_i)| dt over [0, 1], where K_σ is the
    Gaussian kernel reflected at 0 and 1. The automatic bandwidth is the fixed point σ = smECE_σ. As in the authors'
    code, ten bisections give the smallest multiple of 1/1024 that is not below its own error, and at least 2/1024.

    Args:
        confidence, correct, where: as in `expected_calibration_error`.
        bandwidth: σ > 0, in units of the confidence; None chooses it as above.

    Returns:
        float32 scalar in [0, 1]; NaN where no point counts.
    """
    data = points(confidence, correct, where)
    # Σ (confidence − correctness)/n at the nodes of a grid; a point is split linearly between the two nodes beside it.
    node, weight_above = _nodes(data.confidence, _FINE)
    residual = data.weight * (data.confidence - data.correct) / nonzero(jnp.sum(data.weight))
    chunk = jnp.arange(len(node)) // _CHUNK
    grids = jnp.zeros((ceil_div(len(node), _CHUNK), _FINE + 1), jnp.float32)
    grids = grids.at[chunk, node].add(residual * (1 - weight_above))
    grids = grids.at[chunk, node + 1].add(residual * weight_above)
    grid = jnp.sum(grids, axis=0)  # [_FINE + 1]
    # The cosine transform of the grid is the Fourier transform of its even extension.
    doubled_ends = grid.at[jnp.array([0, -1])].multiply(2)
    cosines = jnp.fft.rfft(jnp.concatenate([doubled_ends, grid[-2:0:-1]])).real / 2  # [_FINE + 1]

    def bisect(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        too_small = (middle < 0.001) | (middle < _smoothed_error(cosines, middle))
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    if bandwidth is None:
        _, bandwidth = jax.lax.fori_loop(0, 10, bisect, (jnp.float32(0), jnp.float32(1)))
    finite_bandwidth = jnp.minimum(jnp.asarray(bandwidth), 8.0)  # from 8 on only k = 0 is left, and 0 · inf is NaN
    return data.nan_unless_usable(_smoothed_error(cosines, finite_bandwidth))


@metric()
def ks_calibration_error(confidence, correct, *, where=None):
    """Kolmogorov-Smirnov calibration error, max_t |(1/n) Σ_{i: confidence_i <= t} (confidence_i − correctness_i)|.

    Gupta et al. 2021. Points of equal confidence enter together. Arguments: as `expected_calibration_error`.
    """
    data = points(confidence, correct, where)
    order = jnp.argsort(data.confidence)
    ascending = data.confidence[order]
    residual = data.weight * (data.confidence - data.correct)
    cumulative = jnp.cumsum(residual[order])
    is_last = jnp.append(ascending[1:] != ascending[:-1], True)  # the last of the points of equal confidence
    largest = jnp.max(jnp.where(is_last, jnp.abs(cumulative), 0.0))
    return data.nan_unless_usable(largest / nonzero(jnp.sum(data.weight)))


class ReliabilityCurve(NamedTuple):
    """Accuracy by confidence at 101 confidences from 0 to 1, float64 `[101]`.

    Attributes:
        confidence: 0, 0.01, ..., 1.
        accuracy: NaN where fewer than ten points are within reach of the kernel.
        low, high: ends of the pointwise 95% band; NaN where accuracy is.
        density: density of the confidences; its integral is 1.
        bandwidth: standard deviation of the kernel.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    low: np.ndarray
    high: np.ndarray
    density: np.ndarray
    bandwidth: float


def grid_sums(
    confidence: Float[AnyArray, "*G N"], correct: AnyArray, *, where: AnyArray | None = None
) -> Float[Array, "*G {NODES+1} 2"]:
    """Number of points and Σ correctness at the nodes k / `NODES`, summed over the last axis.

    A point is split linearly between the nodes beside it, which preserves Σ confidence. Sums of parts add up. Jittable.
    Raises ValueError as `expected_calibration_error` does.

    Args:
        confidence, correct: `[..., N]`, in [0, 1].
        where: `[..., N]`, False for points that do not count.

    Returns:
        float32 `[..., NODES + 1, 2]`: at each node the number of points, and Σ correctness.
    """
    confidence, correct, where = map(plain_array, (confidence, correct, where))
    counts = weights_of(where, np.shape(confidence)) > 0
    check({"confidence": confidence, "correct": correct}, counts, rank=None)
    confidence = jnp.asarray(confidence).astype(jnp.float32)
    correct = jnp.asarray(correct).astype(jnp.float32)
    node, weight_above = _nodes(jnp.where(counts, jnp.clip(confidence, 0.0, 1.0), 0.0), NODES)
    values = jnp.stack([jnp.ones_like(confidence), correct], axis=-1)  # [..., N, 2]
    values = jnp.where(counts[..., None], values, 0.0)

    def add(node: Array, weight_above: Array, values: Array) -> Array:
        sums = jnp.zeros((NODES + 1, 2))
        sums = sums.at[node].add(values * (1 - weight_above)[:, None])
        return sums.at[node + 1].add(values * weight_above[:, None])

    return jnp.vectorize(add, signature="(n),(n),(n,k)->(m,k)")(node, weight_above, values)


def reliability_curve(
    confidence: Float[AnyArray, " N"], correct: AnyArray, *, groups: np.ndarray | None = None, seed: int = 0
) -> ReliabilityCurve:
    """Accuracy by confidence with its 95% band and the density of the confidences.

    accuracy(t) = Σ_i K_σ(t, confidence_i) correct_i / Σ_i K_σ(t, confidence_i), with the Gaussian kernel reflected at 0
    and 1 (Błasiok and Nakkiran 2024). σ is smooth ECE, their choice, but at least 0.02, and at most 0.05, since a wider
    kernel would flatten the curve of a model that is far from calibrated. Confidences lie on a grid of 1/256.

    Args:
        confidence: `[N]` in [0, 1].
        correct: `[N]`, 0/1, bool, or fractions of correct samples in [0, 1].
        groups: `[N]`, labels; points of one group are resampled together. By default each point is a group.
        seed: random seed of the band, a percentile interval of bootstrap samples.

    Raises:
        ValueError: for no point, other shapes, or values outside [0, 1].
    """
    check({"confidence": confidence, "correct": correct})
    if not len(confidence):
        raise ValueError("expected at least one point, got none.")
    c = np.clip(as_array(confidence).astype(np.float32), 0, 1)
    y = as_array(correct).astype(np.float32)
    labels = np.arange(len(c)) if groups is None else label_numbers("groups", groups, len(c))
    count = labels.max() + 1
    shuffled = np.random.default_rng((seed, 1)).permutation(count)
    pool = shuffled[labels] % GROUPS  # of each point: more than `GROUPS` groups are pooled at random
    node, weight_above = _nodes(c.astype(np.float64), NODES)
    sums = np.zeros((min(count, GROUPS), NODES + 1, 2))
    for neighbour, weight in ((node, 1 - weight_above), (node + 1, weight_above)):
        np.add.at(sums, (pool, neighbour), np.stack([weight, weight * y], axis=-1))
    return curve_from_sums(sums, seed=seed)


def curve_from_sums(sums: np.ndarray, *, seed: int = 0) -> ReliabilityCurve:
    """`reliability_curve` from `grid_sums` of independent groups, `[G, NODES + 1, 2]`; at most some hundred groups."""
    sums = np.asarray(sums, np.float64)
    count, correct = np.moveaxis(sums.sum(axis=0), -1, 0)
    nodes = np.arange(NODES + 1) / NODES
    accuracy = np.clip(np.divide(correct, count, out=np.zeros_like(count), where=count > 0), 0, 1)
    error = float(smooth_ece(jnp.asarray(nodes), jnp.asarray(accuracy), where=jnp.asarray(count)))
    bandwidth = float(np.clip(error, *_BANDWIDTHS))
    confidence = np.arange(101) / 100
    # K_σ(t, x), [101, NODES + 1], with x reflected at 0 and 1: x ± 2, −x, 2 − x; more are negligible for σ <= 1/2.
    t, x = confidence[:, None], nodes[None, :]
    distances = (t - x - 2, t - x, t - x + 2, t + x - 2, t + x)
    gaussians = [np.exp(-np.square(distance / bandwidth) / 2) for distance in distances]
    kernel = sum(gaussians) / (bandwidth * np.sqrt(2 * np.pi))
    weight = kernel @ count  # [101]
    effective_count = weight / kernel.max(axis=1)
    shown = effective_count >= _MIN_POINTS
    curve = np.where(shown, (kernel @ correct) / np.maximum(weight, 1e-30), 0.0)
    groups = len(sums)
    draws = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=_RESAMPLES)
    smoothed = np.tensordot(sums, kernel, axes=(1, 1))  # [G, 2, 101]
    drawn = np.tensordot(draws, smoothed, axes=(1, 0))  # [_RESAMPLES, 2, 101]
    drawn_count, drawn_correct = drawn[:, 0], drawn[:, 1]
    ratio = np.tile(curve, (_RESAMPLES, 1))
    np.divide(drawn_correct, drawn_count, out=ratio, where=drawn_count > 0)
    low, high = np.quantile(ratio, (0.025, 0.975), axis=0)
    return ReliabilityCurve(
        confidence=confidence,
        accuracy=np.where(shown, curve, np.nan),
        low=np.where(shown, np.minimum(low, curve), np.nan),
        high=np.where(shown, np.maximum(high, curve), np.nan),
        density=weight / count.sum(),
        bandwidth=bandwidth,
    )
