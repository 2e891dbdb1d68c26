"""Linear heads fitted to all tokens at once: the optimum of the dense objective in float64, by SciPy."""

import functools
import math

import jax
import numpy as np
import pytest
from scipy import optimize, special
from tiny import answered, dense_log_probs, make_lm, make_sequences, ragged, silent

from calibjax.heads import FittedHead, HeadConfig
from calibjax.train import solve
from calibjax.train.curves import features_of, token_curves

LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(160)))
READS = ("logit_statistics", "hidden_states")


@pytest.fixture(scope="module")
def tokens():
    context = silent(None)
    with jax.set_mesh(context.mesh):
        head = HeadConfig(kind="linear", hidden_size=16, features=READS)
        return token_curves(LM, SEQUENCES, [head], context=context)


@functools.cache
def logits():
    return dense_log_probs(LM, SEQUENCES)[SEQUENCES.where]  # up to a constant of each token


def objective(x, features, decayed, decay, weights, alpha):
    """The mean loss at bias and weights x, and the penalty, over the dense logits; and its gradient in x."""
    z, targets = logits(), SEQUENCES.targets[SEQUENCES.where]
    u = x[0] + features @ x[1:]
    s = np.exp(np.clip(u, math.log(0.05), math.log(10)))
    log_q = special.log_softmax(s[:, None] * z, axis=1)
    row = np.arange(len(z))
    best = z.argmax(axis=1)
    expected = (np.exp(log_q) * z).sum(axis=1)
    loss, slope = -log_q[row, targets], s * (expected - z[row, targets])
    if alpha:
        right, top, growth = best == targets, log_q[row, best], s * (z[row, best] - expected)
        loss = loss - alpha * np.where(right, top, np.log(-np.expm1(top)))
        slope = slope - alpha * np.where(right, growth, -np.exp(top) / -np.expm1(top) * growth)
    penalty = np.concatenate([[0.0], np.where(decayed, decay, 1e-3)])
    total = weights.sum()
    gradient = np.concatenate([[(weights * slope).sum()], features.T @ (weights * slope)]) / total + penalty * x
    return (weights * loss).sum() / total + 0.5 * (penalty * x) @ x, gradient


@pytest.mark.parametrize(
    ("features", "loss", "alpha", "decay"),
    [(("logit_statistics",), "cross-entropy", None, 0), (READS, "cross-entropy", None, 0.1), (READS, "joint", 4, 1)],
)
def test_the_optimum(tokens, features, loss, alpha, decay):
    head = HeadConfig(kind="linear", hidden_size=16, features=features)
    design = solve.make_design(tokens, head, -0.5)
    weights = np.random.default_rng(0).integers(0, 2, design.tokens).astype(np.float32)  # the tokens of other folds
    x = solve.solve(design, solve.Trial(loss, alpha), decay, weights)
    standardised = np.asarray(design.features, np.float64)[: design.tokens]
    arguments = (standardised, design.decayed, decay, weights.astype(np.float64), alpha)
    best = optimize.minimize(objective, x, arguments, jac=True, method="BFGS", options={"gtol": 1e-8})
    print(f"gap {objective(x, *arguments)[0] - best.fun:.1e}, gradient {np.abs(objective(x, *arguments)[1]).max():.1e}")
    assert objective(x, *arguments)[0] - best.fun < 1e-6
    np.testing.assert_allclose(x, best.x, atol=5e-3)
    from_there = solve.solve(design, solve.Trial(loss, alpha), decay, weights, start=best.x)
    np.testing.assert_allclose(from_there, best.x, atol=5e-3)


def test_features_are_standardised_and_the_head_reads_them_as_they_are(tokens):
    head = HeadConfig(kind="linear", hidden_size=16, features=READS)
    design = solve.make_design(tokens, head, -0.5)
    inside = np.asarray(design.features)[: design.tokens]
    np.testing.assert_allclose(inside.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(inside.std(axis=0), 1.0, atol=1e-4)
    assert design.decayed.tolist() == [False] * 4 + [True] * 16
    x = np.random.default_rng(0).normal(size=21) * 0.1
    params = solve.head_params(design, x)
    run = jax.jit(features_of, static_argnums=(0, 2))
    features = np.asarray(run(head, tokens.flat([*tokens.arrays]), tokens.scales))
    got = head.build().apply({"params": FittedHead(head, params, "").params}, features[None])[0]
    np.testing.assert_allclose(got, solve.predict(design, x), atol=1e-5)


def test_temperature_scaling(tokens):
    """The best of a fine grid over the dense logits."""
    fit = solve.fit_token_temperature(tokens)
    ones = np.ones(SEQUENCES.where.sum())
    none = np.zeros((len(ones), 0))
    arguments = (none, np.zeros(0, bool), 0.0, ones, None)
    nll = [objective(np.array([fit.log_scale + shift]), *arguments)[0] for shift in (-1e-3, 0, 1e-3)]
    assert min(nll) == nll[1]
    assert fit.converged
    np.testing.assert_allclose(fit.nll, nll[1], rtol=1e-5)


def test_constant_features_get_no_weight(tokens):
    arrays = {**tokens.arrays, "hidden_states": np.ones_like(tokens.arrays["hidden_states"])}
    head = HeadConfig(kind="linear", hidden_size=16, features=("hidden_states",))
    design = solve.make_design(tokens._replace(arrays=arrays), head, -0.5)
    x = solve.solve(design, solve.Trial("cross-entropy", None), 0.0)
    np.testing.assert_allclose(x[1:], 0.0, atol=1e-6)
    np.testing.assert_allclose(x[0], solve.fit_token_temperature(tokens).log_scale, atol=2e-3)
