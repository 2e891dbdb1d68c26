"""Maps of the confidence without a formula: isotonic regression, histogram binning, scaling-binning."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Method, Predictions, select
from calibjax.recalibrate.logistic import PlattState, apply_platt, fit_platt


class IsotonicState(NamedTuple):
    """Knots of a non-decreasing, piecewise-linear curve: float32 `[M]` each, x ascending."""

    x: np.ndarray
    y: np.ndarray
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


def fit_isotonic(data: Predictions, where: np.ndarray | None = None) -> IsotonicState:
    """Isotonic regression: the non-decreasing curve nearest to correctness in squares (Zadrozny and Elkan 2002).

    Pool adjacent violators (`scipy.optimize.isotonic_regression`), equal confidences as one point, linear between the
    points and constant beyond them: the curve of `sklearn.isotonic.IsotonicRegression(out_of_bounds="clip")`.

    Returns:
        `IsotonicState`; points inside a constant piece are left out.

    Example:
        >>> data = Predictions(confidence=np.array([0.6, 0.7, 0.8, 0.9]), correct=np.array([0, 1, 0, 1]))
        >>> apply_isotonic(fit_isotonic(data), data).tolist()
        [0.0, 0.5, 0.5, 1.0]
    """
    from scipy import optimize

    confidence, correct = select(data, ("confidence", "correct"), where)
    x, point, weight = np.unique(confidence, return_inverse=True, return_counts=True)
    target = np.bincount(point, weights=correct) / weight
    y = np.clip(optimize.isotonic_regression(target, weights=weight).x, 0.0, 1.0)
    error = float(np.mean((y[point] - correct) ** 2))
    inside = np.zeros(len(x), bool)
    inside[1:-1] = (y[1:-1] == y[:-2]) & (y[1:-1] == y[2:])
    return IsotonicState(x[~inside], y[~inside].astype(np.float32), FitReport.of(error))


def apply_isotonic(state: IsotonicState, data: Predictions) -> Float[Array, " N"]:
    """The curve at every confidence."""
    return jnp.interp(jnp.asarray(data.confidence, jnp.float32), jnp.asarray(state.x), jnp.asarray(state.y))


def _equal_mass(x: np.ndarray, target: np.ndarray, bins: int) -> BinState:
    """Bins (lo, hi] of equal counts; an edge lies half-way between the neighbours that it parts."""
    order = np.argsort(x)
    x, target, n = x[order], target[order].astype(np.float64), len(x)
    cuts = np.arange(1, min(bins, n)) * n // min(bins, n)
    edges = ((x[cuts - 1].astype(np.float64) + x[cuts]) / 2).astype(np.float32)
    ends = np.searchsorted(x, edges, side="right")
    last = np.diff(ends, append=n) > 0  # of edges that part the points alike: no bin is empty
    edges, ends = edges[last], np.append(ends[last], n)
    counts = np.diff(ends, prepend=0)
    values = np.add.reduceat(target, ends - counts) / counts
    error = np.mean((np.repeat(values, counts) - target) ** 2)
    return BinState(edges, values.astype(np.float32), FitReport.of(float(error)))


def _look_up(state: BinState, confidence: Array) -> Array:
    values = jnp.asarray(state.values)[jnp.searchsorted(jnp.asarray(state.edges), confidence)]
    return jnp.where(jnp.isnan(confidence), confidence, values)  # the search takes NaN for the largest


def fit_histogram(data: Predictions, where: np.ndarray | None = None, *, bins: int = 15) -> BinState:
    """Histogram binning: the fraction of right predictions in each of `bins` bins of equal counts.

    Zadrozny and Elkan 2001, section 3; Guo et al. 2017, section 4.1. Not monotone.

    Args:
        data: with `confidence`, `correct`.
        bins: at most; fewer where confidences are equal or few.

    Example:
        >>> data = Predictions(confidence=np.array([0.6, 0.7, 0.8, 0.9]), correct=np.array([0, 1, 0, 1]))
        >>> apply_histogram(fit_histogram(data, bins=2), data).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    confidence, correct = select(data, ("confidence", "correct"), where)
    return _equal_mass(confidence, correct, bins)


def apply_histogram(state: BinState, data: Predictions) -> Float[Array, " N"]:
    """The value of the bin of every confidence."""
    return _look_up(state, jnp.asarray(data.confidence, jnp.float32))


def fit_scaling_binning(data: Predictions, where: np.ndarray | None = None, *, bins: int = 15) -> ScalingBinningState:
    """The scaling-binning calibrator: Platt scaling, then the mean of *its* values in each bin (Kumar et al. 2019).

    Section 4: the bins make the calibration error measurable, and averaging the smooth fit rather than the labels costs
    fewer examples than histogram binning. Here all rows serve all three steps, as in the authors' package.

    Args:
        data: with `confidence`, `correct`.
        bins: of equal counts, at most.

    Example:
        >>> data = Predictions(confidence=np.array([0.6, 0.7, 0.8, 0.9]), correct=np.array([0, 1, 0, 1]))
        >>> apply_scaling_binning(fit_scaling_binning(data, bins=2), data).shape
        (4,)
    """
    confidence, correct = select(data, ("confidence", "correct"), where)
    own = Predictions(confidence=confidence, correct=correct)
    platt = fit_platt(own)
    scaled = np.asarray(apply_platt(platt, own))
    return ScalingBinningState(platt, _equal_mass(scaled, scaled, bins), platt.report)


def apply_scaling_binning(state: ScalingBinningState, data: Predictions) -> Float[Array, " N"]:
    """The value of the bin that the scaled confidence falls in."""
    return _look_up(state.bins, apply_platt(state.platt, data))


METHODS = {
    "isotonic": Method(
        fit_isotonic, apply_isotonic, ("confidence", "correct"), "Zadrozny and Elkan 2002", monotone=True
    ),
    "histogram": Method(fit_histogram, apply_histogram, ("confidence", "correct"), "Zadrozny and Elkan 2001"),
    "scaling_binning": Method(
        fit_scaling_binning, apply_scaling_binning, ("confidence", "correct"), "Kumar et al. 2019", monotone=True
    ),
}
