"""Minimisers of a smooth function of a vector, on the host: Newton's method, BFGS and L-BFGS."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

TOLERANCE = 1e-12  # of the objective
_FLAT = 1e-12  # a curvature that is rounding
_RIDGES, _ROUND = (1e-6, 1e-4, 1e-2), 30  # see `bfgs`


class Found(NamedTuple):
    """Where a search ended.

    Attributes:
        x: float64 `[P]`.
        value: the function there.
        converged: a further step would gain less than `TOLERANCE`, relative where the value exceeds 1.
        iterations: steps.
    """

    x: np.ndarray
    value: float
    converged: bool
    iterations: int


def _newton_step(x: np.ndarray, slope: np.ndarray, curvature: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """−H⁻¹ g, a descent direction whatever the signs of H; parameters at a bound that it would leave are held."""

    def leaves(step: np.ndarray) -> np.ndarray:
        return ((x <= low + TOLERANCE) & (step < 0)) | ((x >= high - TOLERANCE) & (step > 0))

    free = ~leaves(-slope)  # these first: together with what the slope holds, others would seem to leave
    step = np.zeros_like(x)
    while free.any():
        values, vectors = np.linalg.eigh(curvature[np.ix_(free, free)])
        values = np.maximum(np.abs(values), _FLAT * max(1.0, np.abs(values).max()))
        step = np.zeros_like(x)
        step[free] = -vectors @ ((vectors.T @ slope[free]) / values)
        if not leaves(step).any():
            break
        free &= ~leaves(step)
    return np.where(free, step, 0.0)


def _place(x: np.ndarray, step: np.ndarray, length: float, sides: Any) -> tuple[np.ndarray, float]:
    """x + length · step, or where that line first meets a bound; and the length of the way."""
    side = np.where(step > 0, sides[1], sides[0])
    room = np.divide(side - x, step, out=np.full_like(x, np.inf), where=step != 0)  # in steps
    length = min(length, room.min())
    return np.where(room <= length, side, x + length * step), length


def _search(derivatives: Callable, x: np.ndarray, value: float, step: np.ndarray, gain: float, sides: Any) -> Any:
    """The first of x + step, x + step/2, ... within bounds at which the value falls, and the derivatives; or None.

    Where it rises by no more than its rounding, the gradient knows better.
    """
    there, length = _place(x, step, 1.0, sides)
    least = TOLERANCE * length  # without curvature a step is long, and bounds cut it to a small part
    while length >= least:
        found = derivatives(there)
        if found[0] <= value - 1e-4 * length * gain + TOLERANCE * max(abs(value), 1.0):
            return there, found
        there, length = _place(x, step, length / 2, sides)
    return None


def newton(
    derivatives: Callable[[np.ndarray], Any], x: np.ndarray, low: Any, high: Any, most: int, done: int = 0
) -> Found:
    """Newton's method within bounds; a step is halved until the value falls.

    Args:
        derivatives: x -> value, gradient `[P]`, Hessian `[P, P]` or a function that returns it.
        x: the start.
        low: of x, `[P]` or a number.
        high: of x.
        most: iterations.
        done: of them, in a search before.

    Returns:
        `Found`.
    """
    value, slope, curvature = derivatives(x)
    for iteration in range(done + 1, most + 1):
        here: Any = curvature() if callable(curvature) else curvature
        step = _newton_step(x, slope, here, low, high)
        gain = -(slope @ step) / 2
        if gain <= TOLERANCE * max(abs(value), 1.0):  # so near, the parabola is exact: its end is the optimum
            return Found(_place(x, step, 1.0, (low, high))[0], value - gain, True, iteration)
        found = _search(derivatives, x, value, step, gain, (low, high))
        if found is None:
            return Found(x, value, False, iteration)
        x, (value, slope, curvature) = found
    return Found(x, value, False, most)


def bfgs(slope: Callable, hessian: Callable[[np.ndarray], np.ndarray], x: np.ndarray, most: int) -> Found:
    """BFGS that begins with the inverse of the Hessian at x, or of that of a sample, not of the identity.

    Where such a beginning is of no use (data that are separable, or nearly so for the sample), the fit does not end
    within 30 iterations: then it begins again where it is, with a larger ridge, three times in all.

    Args:
        slope: x -> value, gradient `[P]`.
        hessian: x -> `[P, P]`, positive semidefinite.
        x: the start.
        most: iterations.

    Returns:
        `Found`.
    """
    value, gradient = slope(x)
    for iteration in range(min(most, _ROUND * len(_RIDGES))):
        if iteration % _ROUND == 0:
            curvature = hessian(x)
            ridge = _RIDGES[iteration // _ROUND] * np.diag(curvature) + _FLAT
            inverse = np.linalg.inv(curvature + np.diag(ridge))
        step = -_times(inverse, gradient)
        gain = -(gradient @ step) / 2
        if gain <= TOLERANCE * max(abs(value), 1.0):  # below 0: H has a negative curvature, and this is no descent
            return Found(x, value, bool(gain >= 0), iteration + 1)
        found = _search(slope, x, value, step, gain, (-np.inf, np.inf))
        if found is None:
            return Found(x, value, False, iteration + 1)
        there, (value, new) = found
        inverse = _updated(inverse, there - x, new - gradient)
        x, gradient = there, new
    return Found(x, value, False, min(most, _ROUND * len(_RIDGES)))


def _times(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return np.einsum("ij,j->i", matrix, vector)  # BLAS would wake its threads, which takes longer than the product


def _updated(inverse: np.ndarray, step: np.ndarray, change: np.ndarray) -> np.ndarray:
    """BFGS: the inverse Hessian nearest to the old one that takes the change of the gradient to the step.

    The old one is first scaled to agree with the two: on the way from overconfidence all curvatures grow together.
    """
    along = step @ change
    if along <= 0:  # no positive curvature
        return inverse
    moved = _times(inverse, change)
    scale = along / (change @ moved)
    inverse, moved = scale * inverse, scale * moved
    mixed = np.multiply.outer(moved, step)
    return inverse + ((along + change @ moved) / along * np.multiply.outer(step, step) - mixed - mixed.T) / along


def lbfgs(
    slope: Callable[[np.ndarray], Any],
    x: np.ndarray,
    low: Any,
    high: Any,
    most: int,
    tolerances: tuple[float, float] = (TOLERANCE, 1e-8),
) -> Found:
    """L-BFGS-B (SciPy). As `newton`, of value and gradient alone.

    `tolerances`: relative, of the value between two iterations; and of the largest component of the gradient.
    """
    from scipy import optimize

    relative, largest = tolerances
    options = {"maxiter": most, "maxfun": 2 * most, "maxcor": 20, "ftol": relative, "gtol": largest}
    bounds = optimize.Bounds(low, high)
    found = optimize.minimize(slope, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Found(found.x, found.fun, bool(found.success), found.nit)


def finished(found: Found, slope: Callable[[np.ndarray], Any], low: Any, high: Any, most: int) -> Found:
    """`found`, continued by L-BFGS-B where it did not converge; `most`: iterations of both."""
    left = most - found.iterations
    if found.converged or left <= 0:
        return found
    last = lbfgs(slope, found.x, low, high, left)
    return last._replace(iterations=found.iterations + last.iterations)
