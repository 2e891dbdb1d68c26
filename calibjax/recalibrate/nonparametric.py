"""Maps of the confidence without a formula: isotonic regression, Venn-Abers, histogram binning, scaling-binning."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize

from calibjax.recalibrate.contract import FitReport
from calibjax.recalibrate.logistic import PlattState, apply_platt, fit_platt


class IsotonicState(NamedTuple):
    """Knots of a non-decreasing, piecewise-linear curve: float32 `[M]` each, x ascending."""

    x: np.ndarray
    y: np.ndarray
    report: FitReport


class VennAbersState(NamedTuple):
    """Distinct confidences x ascending, float32 `[M]`; p₀ and p₁ between and beyond them, float32 `[M + 1]` each."""

    x: np.ndarray
    p0: np.ndarray
    p1: np.ndarray
    report: FitReport


class BinState(NamedTuple):
    """Inner edges, float32 `[B − 1]`, of bins (lo, hi], and the value of each bin, float32 `[B]`."""

    edges: np.ndarray
    values: np.ndarray
    report: FitReport


class ScalingBinningState(NamedTuple):
    """The bins of the confidences that Platt scaling gives."""

    platt: PlattState
    bins: BinState
    report: FitReport


def fit_isotonic(confidence: np.ndarray, correct: np.ndarray) -> IsotonicState:
    """Isotonic regression: the non-decreasing curve with the least squared error (Zadrozny and Elkan 2002).

    Equal confidences are merged into one point. The curve is linear between points and constant beyond them, as that of
    `sklearn.isotonic.IsotonicRegression(out_of_bounds="clip")`. Points inside a constant piece are left out.
    """
    x, point, weight = np.unique(confidence, return_inverse=True, return_counts=True)
    target = np.bincount(point, weights=correct) / weight
    y = np.clip(optimize.isotonic_regression(target, weights=weight).x, 0.0, 1.0)
    error = float(np.mean((y[point] - correct) ** 2))
    inside = np.zeros(len(x), bool)
    inside[1:-1] = y[:-2] == y[2:]  # y is sorted
    return IsotonicState(x[~inside], y[~inside].astype(np.float32), FitReport.of(error))


def apply_isotonic(state: IsotonicState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """The curve at every confidence."""
    return jnp.interp(confidence, jnp.asarray(state.x), jnp.asarray(state.y))


def fit_venn_abers(confidence: np.ndarray, correct: np.ndarray) -> VennAbersState:
    """Inductive Venn-Abers prediction (Vovk and Petej 2014, arXiv 1211.0025): p₁/(1 − p₀ + p₁).

    p₀ and p₁ are what isotonic regression gives for a new confidence after it is added to the data, once as a wrong and
    once as a right prediction. The algorithm is that of Vovk et al. 2015 (arXiv 1511.00213), section 4.
    """
    x, point_of_row, weight = np.unique(confidence, return_inverse=True, return_counts=True)
    right = np.bincount(point_of_row, weights=correct)
    wrong = weight - right
    p1 = np.append(_with_one_right(weight, right), 1.0)
    one_minus_p0 = np.append(_with_one_right(weight[::-1], wrong[::-1]), 1.0)[::-1]
    p0 = 1 - one_minus_p0
    return VennAbersState(x, p0.astype(np.float32), p1.astype(np.float32), FitReport.of())


def _with_one_right(weight: np.ndarray, right: np.ndarray) -> np.ndarray:
    """For each group, the value of isotonic regression at that group if it had one more right prediction; `[G]`.

    Isotonic regression gives the slopes of the lower convex hull of the cumulative sums (Σ weight, Σ right), which are
    complex numbers here. The added prediction is a step (1, 1) ahead of each group in turn; its slope is the value.
    """

    def turn(a: complex, b: complex, c: complex) -> float:  # positive where the path over a, b, c turns to the left
        return ((b - a).conjugate() * (c - a)).imag

    steps = [complex(*step) for step in zip(weight, right, strict=True)]
    start = -1 - 1j  # of the added step, which ends at 0
    hull: list[complex] = []
    for point in (start, *itertools.accumulate(steps, initial=0j)):
        while len(hull) > 1 and turn(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    hull.reverse()  # a stack: the leftmost point is at its end
    values = []
    for step in steps:
        edge = hull[-2] - hull[-1]
        values.append(edge.imag / edge.real)
        start += step  # the added step moves past this group
        if turn(hull[-1], hull[-2], start) < 0:
            hull.pop()
            while len(hull) > 1 and turn(start, hull[-1], hull[-2]) <= 0:
                hull.pop()
            hull.append(start)
    return np.array(values)


def apply_venn_abers(state: VennAbersState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """p₁/(1 − p₀ + p₁)."""
    x = jnp.asarray(state.x)
    p0 = jnp.asarray(state.p0)[jnp.searchsorted(x, confidence, side="right")]
    p1 = jnp.asarray(state.p1)[jnp.searchsorted(x, confidence)]
    return jnp.where(jnp.isnan(confidence), confidence, p1 / (1 - p0 + p1))  # searchsorted sorts NaN behind the numbers


def fit_histogram(confidence: np.ndarray, correct: np.ndarray, *, bins: int = 15) -> BinState:
    """Histogram binning: the fraction of right predictions in each of `bins` bins of equal counts.

    Zadrozny and Elkan 2001, section 3; Guo et al. 2017, section 4.1. Not monotone. An edge lies half-way between the
    confidences on its two sides. There are fewer bins where there are few distinct confidences.
    """
    order = np.argsort(confidence)
    x = confidence[order]
    y = correct[order].astype(np.float64)
    n = len(x)
    bins = min(bins, n)
    cuts = np.arange(1, bins) * n // bins
    ends = np.unique(np.searchsorted(x, x[cuts - 1], side="right"))  # of bins, after the last of equal confidences
    ends = ends[ends < n]
    # An edge equal to a confidence could separate points of that confidence after `apply` has rounded scaled ones.
    middle = (x[ends - 1].astype(np.float64) + x[ends]) / 2
    below_next = np.nextafter(x[ends], np.float32(0))
    edges = np.minimum(middle.astype(np.float32), below_next)  # [bins − 1]
    ends = np.append(ends, n)
    counts = np.diff(ends, prepend=0)  # [bins]
    values = np.add.reduceat(y, ends - counts) / counts
    error = np.mean((np.repeat(values, counts) - y) ** 2)
    return BinState(edges, values.astype(np.float32), FitReport.of(float(error)))


def apply_histogram(state: BinState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """The value of the bin of every confidence."""
    values = jnp.asarray(state.values)[jnp.searchsorted(jnp.asarray(state.edges), confidence)]
    return jnp.where(jnp.isnan(confidence), confidence, values)  # searchsorted sorts NaN behind the numbers


def fit_scaling_binning(confidence: np.ndarray, correct: np.ndarray, *, bins: int = 15) -> ScalingBinningState:
    """The scaling-binning calibrator: Platt scaling, then the mean of *its* values in each bin (Kumar et al. 2019).

    The calibration error of a map with few output values can be measured, and the mean of the smooth fit needs fewer
    examples than the mean of the labels, as in histogram binning (section 4). All rows are used in all three steps, as
    in the authors' package. `bins`: largest number of bins, which have equal counts.
    """
    platt = fit_platt(confidence, correct)
    scaled = np.asarray(apply_platt(platt, jnp.asarray(confidence)))
    return ScalingBinningState(platt, fit_histogram(scaled, scaled, bins=bins), platt.report)


def apply_scaling_binning(state: ScalingBinningState, confidence: Float[Array, " N"]) -> Float[Array, " N"]:
    """The value of the bin that the scaled confidence falls in."""
    return apply_histogram(state.bins, apply_platt(state.platt, confidence))
