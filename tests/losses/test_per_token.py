"""Every loss against its formula in float64, from dense logits; and against torch where torch has it."""

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import EPS, assert_within

from calibjax import losses
from calibjax.kernels import STATISTICS, vocab_stats

TOLERANCE = 20 * EPS * 10  # losses of logits of about 10: some twenty float32 roundings of numbers of that size
ALPHA = 0.3
Dense = namedtuple("Dense", "log_q log_q_y right normalizer brier")
"""What formulas are written with, float64: log q `[N, V]`, log q_y `[N]`, whether argmax q = y, ..."""


def dense(z, y, s):
    log_q = np.log(oracle.probabilities(z, s))
    brier = ((np.exp(log_q) - np.eye(z.shape[1])[y]) ** 2).sum(axis=1)
    return Dense(log_q, log_q[np.arange(len(z)), y], z.argmax(axis=1) == y, (s[:, None] * z - log_q)[:, 0], brier)


def focal(d, gamma):
    return -((1 - np.exp(d.log_q_y)) ** gamma) * d.log_q_y


def top_label(d):
    top = np.exp(d.log_q).max(axis=1)
    return np.where(d.right, -np.log(top), -np.log1p(-top))


def selective(d):
    return np.where(d.right, -(1 - ALPHA) * d.log_q_y, -ALPHA * d.log_q.mean(axis=1))


def balanced(d):
    """Each group is averaged by itself and weighted by the other's fraction; as a value for each token of m."""
    right, m = d.right, len(d.right)
    weights = (1 - ALPHA) * (~right).sum(), ALPHA * right.sum()
    of_right = weights[0] / sum(weights) * m / right.sum() * -d.log_q_y
    return np.where(right, of_right, weights[1] / sum(weights) * m / (~right).sum() * -d.log_q.mean(axis=1))


# Every loss of the registry, with its main weight ALPHA where it has one and defaults besides.
FORMULAS = {
    "joint": lambda d: -d.log_q_y + ALPHA * top_label(d),
    "cross-entropy": lambda d: -d.log_q_y,
    "label-smoothing": lambda d: -(1 - ALPHA) * d.log_q_y - ALPHA * d.log_q.mean(axis=1),
    "selective": selective,
    "selective-balanced": balanced,
    "selective-authors": balanced,  # without padding and ignored tokens; with them, below
    "focal": lambda d: focal(d, ALPHA),
    "sample-dependent-focal": lambda d: focal(d, np.where(np.exp(d.log_q_y) < 0.2, 5, 3)),
    "focal-calibration": lambda d: focal(d, 3) + ALPHA * d.brier,
    "brier": lambda d: d.brier,
    "top-k-smoothing": lambda d: -(1 - ALPHA) * d.log_q_y - ALPHA * np.sort(d.log_q, axis=1)[:, -5:].mean(axis=1),
    "confidence-penalty": lambda d: -d.log_q_y + ALPHA * (np.exp(d.log_q) * d.log_q).sum(axis=1),
    "z-loss": lambda d: -d.log_q_y + ALPHA * d.normalizer**2,
}


def formula(name, z, y, s):
    """The loss of every token that counts, 0 for the others, from dense float64 logits, targets and scales."""
    counts = y != -100
    value = np.zeros(len(z))
    value[counts] = FORMULAS[name](dense(z[counts], y[counts], s[counts]))
    return value


def condition(name, z, s):
    """By how much a rounding of log c grows in the loss: −log(1 − c) has the slope c/(1 − c)."""
    return 1 / (1 - oracle.probabilities(z, s).max(axis=1)) if name == "joint" else 1.0


def problem(n=12, v=7, seed=0):
    """Float32 logits, targets (three of them ignored, half of the others right) and scales."""
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=(n, v)) * 3).astype(np.float32)
    y = rng.integers(0, v, n)
    y[::2] = z[::2].argmax(axis=1)
    y[[1, 4, 9]] = -100
    return z, y.astype(np.int32), rng.uniform(0.3, 2.0, n).astype(np.float32)


@jax.jit
def stats_of(z, y, s=None):
    """The statistics of given logits: hidden = z, unembedding = identity."""
    return vocab_stats(z, np.eye(z.shape[1], dtype=np.float32), y, scale=s, statistics=STATISTICS)


def loss_of(name, z, y, s, **options):
    """A loss of the registry on given logits: (value, which tokens count)."""
    eye = jnp.eye(z.shape[1])
    return losses.linear_loss(losses.LOSSES[name], z, eye, y, hyper={"alpha": ALPHA}, scale=s, **options)


def test_the_table_is_complete():
    assert set(FORMULAS) == set(losses.LOSSES)
    for name, loss in losses.LOSSES.items():
        assert all(each.limits.holds(each.default) and each.meaning for each in loss.hyperparameters.values()), name
    with pytest.raises(ValueError, match="hyper: expected names among"):
        losses.LOSSES["focal"].arguments({"gama": 2.0})


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_gradients(name):
    """With the statistics that the entry names: value, mask, gradient in the scale, and in the logits (fine-tuning)."""
    z, y, s = problem()
    if name == "selective-authors":  # ignored tokens count as wrong in it: a test of their own
        y = np.where(y == -100, z.argmin(axis=1), y).astype(np.int32)
    where = np.arange(len(y)) % 5 != 0

    @jax.jit
    def run(z, scale, where):
        def total(z, scale):
            value, counts = loss_of(name, z, y, scale, where=where, real=where)
            return value.sum(), (value, counts)

        return jax.grad(total, argnums=(0, 1), has_aux=True)(z, scale)

    (of_logits, of_scale), (value, counts) = run(z, s, np.ones(len(y), bool))
    masked = run(z, s, where)[1][0]
    z, s = z.astype(np.float64), s.astype(np.float64)
    want = formula(name, z, y, s)
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(counts, y != -100)
    tolerance = TOLERANCE * max(1.0, np.abs(want).max() / 10) * condition(name, z, s)
    assert_within(value, want, tolerance, name)
    np.testing.assert_array_equal(np.asarray(value)[y == -100], 0.0)
    assert_within(masked, formula(name, z, np.where(where, y, -100), s), tolerance, f"{name}, masked")
    np.testing.assert_array_equal(np.asarray(masked)[~where], 0.0)

    # Each token's loss depends on its own scale alone, so one difference serves all.
    numeric = (formula(name, z, y, s + 1e-6) - formula(name, z, y, s - 1e-6)) / 2e-6
    assert_within(of_scale, numeric, 10 * tolerance * (1 + np.abs(numeric)), f"{name}, in the scale")
    np.testing.assert_array_equal(np.asarray(of_scale)[y == -100], 0.0)
    numeric = oracle.difference(lambda z: formula(name, z, y, s).sum(), z)
    assert_within(of_logits, numeric, 2 * TOLERANCE * np.max(condition(name, z, s)), f"{name}, in the logits")
    np.testing.assert_array_equal(np.asarray(of_logits)[y == -100], 0.0)
    assert np.abs(numeric).max() > 0.05


def test_limits_of_two_losses():
    """Of fewer than k tokens top-k smoothing is label smoothing; one group has nothing to balance, and is 0."""
    z, y, s = problem(v=3)
    got, _ = jax.jit(lambda s: loss_of("top-k-smoothing", z, y, s))(s)
    assert_within(got, jax.jit(losses.label_smoothing)(stats_of(z, y, s), ALPHA), TOLERANCE)
    run = jax.jit(lambda w: losses.selective_smoothing(stats_of(z, y, s), 0.2, balanced=True, where=w))
    right = z.argmax(axis=1) == y
    for one_group in (right, ~right, np.zeros(len(y), bool)):
        np.testing.assert_array_equal(run(one_group), 0.0)


def authors_balanced(z, y, s, alpha, real):
    """The authors' class, from its formula: -100 is no token's argmax, so an ignored token is wrong, at a loss of 0."""
    z, y, s = z[real].astype(np.float64), y[real], s[real].astype(np.float64)
    log_q = np.log(oracle.probabilities(z, s))
    right, ignored = z.argmax(axis=1) == y, y == -100
    fraction = right.mean()
    smooth = np.where(ignored, 0.0, -log_q.mean(axis=1))[~right].mean()
    hard = -log_q[right, y[right]].mean()
    weights = np.array([alpha * fraction, (1 - alpha) * (1 - fraction)])
    return weights @ [smooth, hard] / weights.sum()


# Of the class itself, run in float64 with label_smoothing 1 on `problem(n=30)`.
@pytest.mark.parametrize(("alpha", "mean"), [(0.2, 1.3600927876), (0.5, 2.6548514823), (0.8, 3.7577942635)])
def test_ignored_tokens_count_as_in_the_authors_code(alpha, mean):
    z, y, s = problem(n=30)
    y[[11, 12]] = -100
    real = np.ones(30, bool)

    @functools.partial(jax.jit, static_argnames="count_ignored")
    def run(y, count_ignored=True, where=None):
        stats = stats_of(z, y, s)
        loss = losses.selective_smoothing(stats, alpha, balanced=True, count_ignored=count_ignored, where=where)
        return loss.astype(jnp.float32).sum() / (stats.valid & (where is None or where)).sum()

    _, fewer_ignored, _ = problem(n=30)
    # Its weights are float32, as torch divides counts.
    assert_within(authors_balanced(z, fewer_ignored, s, alpha, real), mean, 1e-6, "the formula of the test")
    assert_within(run(fewer_ignored), mean, TOLERANCE, "the class")
    assert_within(run(y), authors_balanced(z, y, s, alpha, real), TOLERANCE, "more of them ignored")
    assert run(y) < run(y, count_ignored=False) - 0.1
    real = np.arange(30) % 4 != 3  # padding is none of their tokens: their micro-batch is one sequence
    assert_within(run(y, where=real), authors_balanced(z, y, s, alpha, real), TOLERANCE, "padding")
    everything_counts = np.where(y == -100, 0, y)
    assert run(everything_counts) == run(everything_counts, count_ignored=False)
    with pytest.raises(ValueError, match="count_ignored: expected"):
        losses.selective_smoothing(stats_of(z, y, s), count_ignored=True)


def test_focal_at_certainty():
    z = np.array([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0], [3.0, 1.0, 2.0]], np.float32)
    y = np.array([0, 0, 0], np.int32)
    run = jax.jit(jax.value_and_grad(lambda s, gamma: losses.focal(stats_of(z, y, s), gamma).sum()))
    for gamma in (0.5, 5.0):
        value, grad = run(np.ones(3, np.float32), gamma)
        assert np.isfinite(float(value))
        assert np.isfinite(grad).all(), (gamma, grad)
        assert_within(grad[:2], [0.0, 200.0], 1e-3, f"gamma {gamma}")  # q = 1: flat; q = 0: that of cross-entropy
    zero, want = jax.jit(lambda stats: (losses.focal(stats, 0.0), losses.cross_entropy(stats)))(stats_of(z, y))
    assert_within(zero, want, TOLERANCE * 20)


def test_top_label_and_brier_at_certainty():
    """Confidence 1 in float32: right costs nothing, wrong costs much, but both are finite with finite gradients."""
    z = np.array([[200.0, 0.0], [200.0, 0.0], [0.0, 0.0]], np.float32)
    y = np.array([0, 1, 1], np.int32)

    @jax.jit
    def run(s):
        value, pull = jax.vjp(lambda s: losses.top_label(stats_of(z, y, s)), s)
        return value, pull(jnp.ones(3))[0], losses.brier(stats_of(z, y, s), stats_of(z, y, 2 * s))

    value, grad, brier = run(np.ones(3, np.float32))
    assert_within(value, [1e-7, -np.log(1e-7), np.log(2)], [1e-8, 0.01, 1e-6], "loss")
    assert np.isfinite(grad).all(), grad
    assert value.max() < 16.5
    assert_within(brier, [0.0, 2.0, 0.5], 4 * EPS, "Brier")


def test_selective_smoothing_with_removed_entries_is_differentiable_in_the_scale():
    """A bias of −inf on all but the target: the token is right, and its loss 0 at every scale."""
    bias = np.where(np.arange(6) == 2, 0.0, -np.inf).astype(np.float32)
    hidden, unembedding = (np.ones(shape, np.float32) for shape in ((1, 4), (6, 4)))

    @jax.jit
    @jax.value_and_grad
    def loss(scale):
        stats = vocab_stats(hidden, unembedding, np.array([2]), scale=scale, bias=bias)
        return jnp.sum(losses.selective_smoothing(stats, 0.5))

    assert loss(np.ones(1, np.float32)) == (0.0, 0.0)
