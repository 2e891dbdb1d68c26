"""One fitted temperature: derivatives against float64 differences, its standard error, data without an optimum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.optimize
import scipy.special
from oracle import EPS, assert_within

from calibjax.kernels import vocab_stats
from calibjax.recalibrate import LikelihoodSums, fit_daca, fit_temperature, likelihood_sums
from calibjax.runtime.errors import UserError


def issue_problem():
    rng = np.random.default_rng(7)
    n, k = 1500, 10
    labels = rng.integers(0, k, n)
    z = rng.normal(size=(n, k))
    z[np.arange(n), labels] += 1.6
    return z * 2.5, labels


@functools.partial(jax.jit, static_argnames="top_label")
def sums_at(u, z, labels, scale=1.0, top_label=False):
    """`likelihood_sums` of given logits `[G, N, K]` and labels `[G, N]`."""
    eye = jnp.eye(z.shape[-1], dtype=jnp.float32)
    scale = jnp.broadcast_to(scale, labels.shape) * jnp.exp(u)
    needed = ("log_normalizer", "target_logit", "expected_logit", "logit_variance", "max_logit", "correct")
    return likelihood_sums(vocab_stats(z, eye, labels, scale=scale, statistics=needed), top_label=top_label)


def fit(z, labels):
    z, labels = np.asarray(z, np.float32), np.asarray(labels, np.int32)
    return fit_temperature(lambda u: [sums_at(u, z, labels)])


def nll_of(u, z, labels, scale, top_label):
    """Σ nll, of the target or of whether the most likely one is it, in float64 at the common factor e^u."""
    q = oracle.probabilities(z, scale * np.exp(u))
    top, right = q.max(axis=1), z.argmax(axis=1) == labels
    if top_label:
        return np.where(right, -np.log(top), -np.log1p(-top)).sum()
    return -np.log(q[np.arange(len(z)), labels]).sum()


@pytest.mark.parametrize("top_label", [False, True])
def test_derivatives(top_label):
    z, labels = issue_problem()
    z, labels = z[:40] / 2, labels[:40]
    scale = np.random.default_rng(8).uniform(0.4, 1.6, 40).astype(np.float32)
    # float32 logits are the problem; the oracle gets the same rounded ones.
    z = z.astype(np.float32)
    marked = np.where(np.arange(40) % 7 == 3, -100, labels).astype(np.int32)
    groups = [marked.reshape(4, 10), scale.reshape(4, 10)]
    for u in (-0.5, 0.0, 0.8):
        got = sums_at(jnp.float32(u), z.reshape(4, 10, 10), groups[0], scale=groups[1], top_label=top_label)
        for group in range(4):
            rows = [i for i in range(10 * group, 10 * group + 10) if marked[i] >= 0]
            exact = {"z": z[rows].astype(np.float64), "scale": scale[rows].astype(np.float64)}
            f = functools.partial(nll_of, labels=labels[rows], top_label=top_label, **exact)
            h = 1e-4
            first = (f(u + h) - f(u - h)) / (2 * h)
            second = (f(u + h) - 2 * f(u) + f(u - h)) / h**2
            # Float32 sums of ten terms up to some tens; 1/(1 − c) in the top-label part makes it some times more.
            tolerance = 2e-4 if top_label else 2e-5
            assert got.count[group] == len(rows)
            assert_within(got.nll[group], f(u), tolerance, f"nll at {u}")
            assert_within(got.first[group], first, 2 * tolerance, f"slope at {u}")
            if not top_label:
                assert_within(got.second[group], second, 4 * tolerance + 2e-5, f"curvature at {u}")


def test_the_curvature_of_the_top_label_is_fishers():
    """Its expectation over y ~ c: minus the slope's derivative where correctness is replaced by c (two logits)."""
    z = np.array([[[1.0, 0.0]], [[0.4, 0.0]]], np.float32)
    labels = np.zeros((2, 1), np.int32)
    got = sums_at(jnp.float32(0.0), z, labels, top_label=True)
    c = 1 / (1 + np.exp(-z[:, 0, 0].astype(np.float64)))
    a = z[:, 0, 0] * (1 - c)
    assert_within(got.second, a**2 * c / (1 - c), 10 * EPS)


def test_standard_error_is_that_of_a_bootstrap():
    z, labels = issue_problem()
    z, labels = z[:600].astype(np.float32), labels[:600].astype(np.int32)
    # Groups of 10 identical-ish tokens: dependence that only a group-wise error sees.
    z, labels = np.repeat(z[::10], 10, axis=0).reshape(60, 10, 10), np.repeat(labels[::10], 10).reshape(60, 10)
    got = fit(z, labels)
    rng = np.random.default_rng(9)
    fits = []
    for _ in range(60):
        take = rng.integers(0, 60, 60)
        fits.append(fit(z[take], labels[take]).log_scale)
    spread = np.std(fits, ddof=1)
    print(f"sandwich {got.standard_error:.4f}, bootstrap {spread:.4f}")
    # 60 resamples know a standard deviation to 1/sqrt(120) = 9 %; the sandwich leaves out terms of the order 1/60.
    assert_within(got.standard_error, spread, 0.3 * spread)
    alone = fit(z.reshape(600, 1, 10), labels.reshape(600, 1))
    assert_within(got.standard_error / alone.standard_error, 10**0.5, 0.01, "clustering")


@pytest.mark.parametrize("kind", ["separable", "always wrong", "constant", "one class"])
def test_without_an_optimum(kind):
    """T stays positive and finite, at the end of the range searched, and it is said that nothing converged."""
    rng = np.random.default_rng(10)
    z, drawn = rng.normal(size=(1, 50, 4)), rng.integers(0, 4, (1, 50))
    z[0, :, 0] += 6.0
    z, labels = {
        "separable": (z, z.argmax(-1)),
        "always wrong": (z, z.argmin(-1)),
        "constant": (np.full_like(z, 2.0), drawn),
        "one class": (z[..., :1], np.zeros_like(drawn)),
    }[kind]
    got = fit(z, labels)
    print(got)
    assert np.isfinite([got.log_scale, got.nll, got.nll_before]).all()
    assert -6 <= got.log_scale <= 6
    assert got.nll <= got.nll_before + 1e-6
    assert got.temperature < 1 or kind != "separable"
    assert got.temperature > 50 or kind != "always wrong"
    assert not got.converged
    assert got.standard_error >= (0 if kind == "always wrong" else np.inf)


def test_the_last_step_is_taken():
    """The search ends where Newton's step is below 1e-5: here 7e-6 from the optimum."""
    got = fit_temperature(lambda u: [LikelihoodSums(*np.array([[0], np.sinh([u - 0.45]), np.cosh([u - 0.45]), [1]]))])
    assert_within(got.log_scale, 0.45, 2 * EPS, "u")


def test_errors():
    z, labels = issue_problem()
    z, labels = z[None, :20], labels[None, :20]
    with pytest.raises(ValueError, match="no token counts"):
        fit(z, np.full_like(labels, -100))
    z = z.copy()
    z[0, 3, 2] = np.nan
    with pytest.raises(ValueError, match="check the logits"):
        fit(z, labels)
    with pytest.raises(ValueError, match="check the logits"):
        fit(z[:, 4:], np.full_like(labels[:, 4:], 99))


def test_daca_fits_where_the_models_agree():
    """Against SciPy's minimum of the mean divergence in float64; and a chat model that is three times as confident."""
    rng = np.random.default_rng(3)
    base = rng.normal(size=(300, 4)) * 2
    chat = 2.5 * base + rng.normal(size=base.shape) * 2
    agree = base.argmax(axis=1) == chat.argmax(axis=1)
    p = scipy.special.softmax(base[agree], axis=1)

    def divergence(u):
        return scipy.special.rel_entr(p, scipy.special.softmax(np.exp(u) * chat[agree], axis=1)).sum(axis=1).mean()

    want = scipy.optimize.minimize_scalar(divergence, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9}).x
    state = fit_daca(chat.astype(np.float32), base.astype(np.float32))
    print(f"agree on {agree.mean():.2f}: {float(state.log_scale):.6f} against {want:.6f}")
    assert 0.5 < agree.mean() < 0.95
    assert abs(float(state.log_scale) - want) < 2e-6
    assert abs(float(fit_daca(3 * base, base).log_scale) + np.log(3)) < 1e-5
    with pytest.raises(UserError, match="agree on no question"):
        fit_daca(base[:5], -base[:5])
    with pytest.raises(UserError, match=r"expected the shape \(300, 4\)"):
        fit_daca(base, base[:, :3])
