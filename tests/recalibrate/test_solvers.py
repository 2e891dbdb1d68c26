"""The optimisers of the fits, on functions whose derivatives or optimum are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_within

from calibjax.recalibrate import logistic
from calibjax.recalibrate.optimize import descend, minimize


def test_derivatives_of_the_logistic_maps():
    """Those of JAX, in float64, of the mean over blocks of different sizes; scores to thousands, the lowest right."""
    rng = np.random.default_rng(41)
    sizes, x = (300, 500), np.array([2.0, 9.0, -0.5])
    blocks = [(rng.normal(size=(3, n)) * rng.choice([1e-3, 1.0, 20.0, 2e2], n), rng.random(n).round(1)) for n in sizes]
    for z, y in blocks:
        y[x @ z < -700] = 0.0
    z, y = (np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True))
    with jax.enable_x64(True):
        mean = jax.jit(lambda x: jnp.mean(jax.nn.softplus(x @ z) - y * (x @ z)))
        want = [np.asarray(f(x)) for f in (mean, jax.grad(mean))]
    for got, exact in zip(logistic._value_and_grad(blocks, x), want, strict=True):
        assert_within(got, exact, 1e-13 * max(1.0, np.abs(exact).max()))


def hyperbola(params, rows, extra):
    """Steep in some parameters, flat in others, and linear far from its least value, 0 at `extra`."""
    units = jnp.geomspace(1e-3, 1e3, params.size)
    return rows[0] * jnp.sum(jnp.sqrt(1 + (units * (params - extra)) ** 2) - 1) + 0 * rows[0]


@pytest.mark.parametrize("size", [5, 100])
def test_parameters_of_any_units(size):
    target = np.linspace(-3, 3, size)
    params, report = minimize(hyperbola, np.zeros(size), (np.ones(700),), target)
    print(np.abs(params - target).max(), report)
    assert_within(params, target, 1e-2, "optimum")
    assert int(report.iterations) <= 200
    params, report = minimize(hyperbola, np.zeros(size), (np.ones(700),), target, max_iterations=4)
    assert (bool(report.converged), int(report.iterations)) == (False, 4)


def test_the_held_out_loss_counts_each_row_once():
    values = np.random.default_rng(1).exponential(size=1500).astype(np.float32)
    _, report = descend(lambda params, rows, extra: rows[0] + 0 * params, np.float32(0), (values,))
    held_out = np.random.default_rng(0).permutation(1500)[:300]
    assert_within(report.loss, values[held_out].mean(), 1e-6, "loss")
