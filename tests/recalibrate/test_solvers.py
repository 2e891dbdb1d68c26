"""The solvers on functions whose optimum is known: bounds, directions without curvature, steps too long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from oracle import assert_within

from calibjax.recalibrate import logistic
from calibjax.recalibrate.optimize import minimize
from calibjax.recalibrate.solvers import bfgs, lbfgs, newton


def quadratic(seed, size):
    """A convex parabola: its derivatives, its Hessian and its gradient at 0."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, size)) * 10.0 ** rng.uniform(-1, 1, size)
    hessian, linear = root.T @ root / size, rng.normal(size=size)

    def derivatives(x):
        return x @ hessian @ x / 2 + linear @ x, hessian @ x + linear, hessian

    return derivatives, hessian, linear


def least_in_box(hessian, linear, low, high):
    """The same parabola as least squares within bounds, by SciPy."""
    factor = np.linalg.cholesky(hessian).T
    return scipy.optimize.lsq_linear(factor, -np.linalg.solve(factor.T, linear), (low, high), tol=1e-14).x


@pytest.mark.parametrize("seed", range(20))
def test_newton_within_bounds(seed):
    size = 1 + seed % 4
    derivatives, hessian, linear = quadratic(seed, size)
    low, high = -np.full(size, 0.3), np.full(size, 0.2)
    want = least_in_box(hessian, linear, low, high)
    starts = (np.zeros(size), low, high, np.where(np.arange(size) % 2, low, high))
    for start in starts:
        found = newton(derivatives, start, low, high, 100)
        assert found.converged
        assert found.iterations <= 20
        assert ((found.x >= low) & (found.x <= high)).all()
        # The value is known to 1e-12: parameters to its root, over the root of the least curvature.
        assert_within(derivatives(found.x)[0], derivatives(want)[0], 1e-11, "value")
        assert_within(found.value, derivatives(found.x)[0], 1e-11, "value that is reported")
    free = newton(derivatives, np.zeros(size), -np.inf, np.inf, 100)
    assert free.iterations <= 2  # a parabola: one step
    assert_within(free.x, np.linalg.solve(hessian, -linear), 1e-6, "without bounds")


def hyperbola(x):
    """Σ √(1 + x²): from beyond 1, Newton's whole steps lead ever farther away."""
    root = np.sqrt(1 + x**2)
    return root.sum(), x / root, np.diag(root**-3.0)


def test_steps_that_are_too_long_are_halved():
    found = newton(hyperbola, np.array([3.0, -0.5]), -np.inf, np.inf, 100)
    assert found.converged
    assert_within(found.x, np.zeros(2), 1e-9, "Newton")
    found = bfgs(lambda x: hyperbola(x)[:2], lambda x: hyperbola(x)[2], np.array([3.0, -0.5]), 100)
    assert found.converged
    assert_within(found.x, np.zeros(2), 3e-6, "BFGS")


def test_the_last_step_is_made():
    """At the start the parabola promises less than the tolerance; its end is exact."""
    start = np.array([1e-6])
    found = newton(hyperbola, start, -np.inf, np.inf, 100)
    assert found.iterations == 1
    assert_within(found.x, np.zeros(1), 1e-15, "x")


def test_a_direction_without_curvature_is_left_alone():
    def derivatives(x):
        return (x[0] + x[1] - 1) ** 2 / 2, np.full(2, x[0] + x[1] - 1), np.ones((2, 2))

    found = newton(derivatives, np.array([2.0, 0.5]), -16.0, 16.0, 100)
    assert found.converged
    assert_within(found.x, [1.25, -0.25], 1e-3, "nearest of all optima")


@pytest.mark.parametrize(("factor", "most"), [(1.0, 4), (1.5, 30)])
def test_bfgs_begins_with_the_hessian(factor, most):
    """With the right one a single step leads to the optimum; with another, few."""
    rng = np.random.default_rng(40)
    vectors = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    hessian, linear = vectors @ np.diag(np.geomspace(0.1, 10, 30)) @ vectors.T, rng.normal(size=30)

    def slope(x):
        return x @ hessian @ x / 2 + linear @ x, hessian @ x + linear

    spread = np.diag(np.linspace(1.0, factor, 30))
    found = bfgs(slope, lambda x: spread @ hessian @ spread, np.zeros(30), 100)
    best = slope(np.linalg.solve(hessian, -linear))[0]
    print(f"{found.iterations} iterations, {found.value - best:.1e} from the least value")
    assert found.converged
    assert found.iterations <= most
    assert_within(found.value, best, 1e-10 * abs(best), "value")
    other = lbfgs(slope, np.zeros(30), -np.inf, np.inf, 1000)
    assert other.iterations > 2 * found.iterations
    assert_within(other.value, best, 1e-10 * abs(best), "L-BFGS")


def test_bfgs_scales_what_it_begins_with():
    """A Hessian that is right but for a factor, and a tenth, costs few iterations."""
    eigenvalues = np.geomspace(0.1, 10, 30)
    almost = eigenvalues * np.random.default_rng(0).uniform(1, 1.1, 30)

    def slope(x):
        return (eigenvalues * x**2).sum() / 2 - x.sum(), eigenvalues * x - 1

    for factor in (0.2, 5.0):
        found = bfgs(slope, lambda x, factor=factor: np.diag(factor * almost), np.zeros(30), 100)
        print(factor, found.iterations)
        assert found.converged
        assert found.iterations <= 6
        assert_within(found.value, -(1 / eigenvalues).sum() / 2, 1e-10, "value")


def test_bfgs_takes_parameters_of_any_units():
    """Of a Hessian whose diagonal spans twelve orders of magnitude the small entries count as the large ones do."""
    rng = np.random.default_rng(42)
    units = 10.0 ** np.linspace(-3, 3, 30)
    vectors = np.linalg.qr(rng.normal(size=(30, 30)))[0]
    hessian = vectors @ np.diag(np.geomspace(0.1, 10, 30)) @ vectors.T
    linear = rng.normal(size=30)

    def slope(x):
        moved = units * x
        return moved @ hessian @ moved / 2 + linear @ moved, units * (hessian @ moved + linear)

    found = bfgs(slope, lambda x: units[:, None] * hessian * units, np.zeros(30), 100)
    best = linear @ np.linalg.solve(hessian, -linear) / 2
    print(f"{found.iterations} iterations, {found.value - best:.1e} from the least value")
    assert found.converged
    assert found.iterations <= 4
    assert_within(found.value, best, 1e-10 * abs(best), "value")


def test_the_iterations_are_bounded():
    """Where the optimum is at infinity."""

    def decay(x):
        return np.exp(-x).sum(), -np.exp(-x), np.diag(np.exp(-x))

    for most in (3, 7):
        found = newton(decay, np.zeros(2), -np.inf, np.inf, most)
        assert (found.converged, found.iterations) == (False, most)
        found = bfgs(lambda x: decay(x)[:2], lambda x: decay(x)[2], np.zeros(2), most)
        assert (found.converged, found.iterations) == (False, most)
    found = newton(decay, np.zeros(2), -16.0, 16.0, 100)
    assert found.converged


def test_derivatives_of_the_logistic_maps():
    """Those of JAX, in float64, of the mean over blocks of different sizes; scores to thousands, the lowest right."""
    rng = np.random.default_rng(41)
    sizes, x = (300, 500), np.array([2.0, 9.0, -0.5])
    blocks = [
        (rng.normal(size=(3, n)) * rng.choice([1e-3, 1.0, 20.0, 200.0], n), rng.random(n).round(1)) for n in sizes
    ]
    for z, y in blocks:
        y[x @ z < -700] = 0.0
    z, y = (np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True))
    with jax.enable_x64(True):
        mean = jax.jit(lambda x: jnp.mean(jax.nn.softplus(x @ z) - y * (x @ z)))
        want = [np.asarray(f(x)) for f in (mean, jax.grad(mean), jax.hessian(mean))]
    for got, exact in zip(logistic._derivatives(blocks, x), want, strict=True):
        assert_within(got, exact, 1e-13 * max(1.0, np.abs(exact).max()))


def rosenbrock(params, rows, extra):
    return rows[0] * jnp.sum(100 * (params[1:] - params[:-1] ** 2) ** 2 + (1 - params[:-1]) ** 2)


@pytest.mark.parametrize("size", [5, 100])
def test_the_iterations_of_all_solvers_together(size):
    """Newton's method, or BFGS and then L-BFGS, on a function that is not convex."""
    for most in (4, 95):
        params, report = minimize(rosenbrock, np.zeros(size), (np.ones(4 * size),), max_iterations=most)
        print(params[:3], report)
        assert int(report.iterations) <= most
        assert report.loss < size - 1  # the start's
        if size > 5 or most == 4:
            assert (bool(report.converged), int(report.iterations)) == (False, most)
        else:
            assert_within(params, np.ones(size), 1e-5, "optimum")
