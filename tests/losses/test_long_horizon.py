"""The long-horizon objective against p_T itself: a Markov source of which all 46,656 sequences are enumerated."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from calibjax.losses.long_horizon import (
    MODES,
    LhtsConfig,
    RunningMean,
    long_horizon_loss,
    reverse_kl,
    sequence_weights,
    token_weights,
)
from calibjax.runtime.errors import UserError

weights_of = jax.jit(token_weights, static_argnums=2)
updated, baseline_of = jax.jit(RunningMean.update), jax.jit(RunningMean.baseline, static_argnums=1)
SYMBOLS, LENGTH, TEMPERATURE = 6, 6, 0.5


class Source:
    """Everything about the source in float64: its sequences, log p of every token, p, and p_T by brute force."""

    def __init__(self, temperature=TEMPERATURE):
        rng = np.random.default_rng(0)
        self.first, self.chain = rng.dirichlet(np.ones(SYMBOLS)), rng.dirichlet(np.ones(SYMBOLS), SYMBOLS)
        self.x = np.array(list(itertools.product(range(SYMBOLS), repeat=LENGTH)))
        self.before = np.pad(self.x[:, :-1], ((0, 0), (1, 0)))  # the first symbol has none before it: 0
        self.log_p = self.myopic(1.0)
        self.p = np.exp(self.log_p.sum(axis=1))
        scaled = self.p ** (1 / temperature)
        self.scaled = scaled / scaled.sum()
        self.mean = self.p @ self.log_p  # of each position

    @functools.cached_property
    def best_myopic(self):
        """The least KL of a temperature for all next tokens."""
        return min(self.kl(self.myopic(t)) for t in np.geomspace(0.2, 1.2, 60))

    def myopic(self, temperature):
        """log-probability of every token where each next token's distribution has the temperature."""
        first, chain = self.first ** (1 / temperature), self.chain ** (1 / temperature)
        log_p = np.log(chain / chain.sum(axis=1, keepdims=True))[self.before, self.x]
        log_p[:, 0] = np.log(first / first.sum())[self.x[:, 0]]
        return log_p

    def kl(self, log_q):
        """KL(p_T ‖ q), q given by the log-probability of every token."""
        return float(self.scaled @ (np.log(self.scaled) - np.asarray(log_q, np.float64).sum(axis=1)))

    def weights(self, form, kind):
        baseline = {"none": np.zeros(LENGTH), "scalar": np.full(LENGTH, self.mean.mean()), "position": self.mean}[kind]
        objective = LhtsConfig(form=form, baseline="none")  # one program for all baselines: this field is not read
        return weights_of(self.log_p.astype("f"), TEMPERATURE, objective, baseline=baseline.astype("f"))

    def table(self, mass):
        """Next-symbol distributions [position, symbol before, symbol] of tokens with a mass each, `[S, LENGTH]`."""
        table = np.zeros((LENGTH, SYMBOLS, SYMBOLS))
        np.add.at(table, (np.broadcast_to(np.arange(LENGTH), self.x.shape), self.before, self.x), mass)
        return table / np.maximum(table.sum(axis=-1, keepdims=True), 1e-300)

    def at(self, table):
        """The entries of such a table that belong to the sequences' tokens."""
        return table[np.arange(LENGTH), self.before, self.x]


@pytest.fixture(scope="module")
def source():
    return Source()


@jax.jit
@jax.grad
def expected_gradient(table, source_p, before, x, weights):
    """Of the loss of a student that is a table of logits [position, symbol before, symbol]."""
    log_q = jax.nn.log_softmax(table)[jnp.broadcast_to(jnp.arange(LENGTH)[None, :], x.shape), before, x]
    return source_p @ long_horizon_loss(log_q, weights).sum(axis=1)


def by_loops(log_p, temperature, objective, baseline, where, segments):
    """The definition, one token at a time, in float64."""
    rows, length = log_p.shape
    weights = np.zeros(log_p.shape)
    for r, i in itertools.product(range(rows), range(length)):
        reach = range(i, min(length, i + (objective.horizon or length)))
        reached = [j for j in reach if segments[r, j] == segments[r, i]]
        log_w = (1 / temperature[r] - 1) * sum(log_p[r, j] - baseline[j] for j in reached if where[r, j])
        w = np.exp(min(log_w, np.inf if objective.clip is None else objective.clip)) * where[r, i]
        for j in reached if objective.form == "suffix" else [i]:
            weights[r, j] += w * where[r, j]
    return weights


@pytest.mark.parametrize("form", ["suffix", "next_token"])
@pytest.mark.parametrize("horizon", [None, 1, 3])
def test_weights_are_those_of_the_definition(form, horizon):
    rng = np.random.default_rng(0)
    log_p, baseline = -rng.exponential(4.0, (4, 12)), -rng.exponential(4.0, 12)  # sums from -40 to 10
    where, segments = rng.random((4, 12)) < 0.8, np.sort(rng.integers(1, 4, (4, 12)), axis=1)
    temperature = np.array([0.5, 0.9, 1.0, 1.5])
    objective = LhtsConfig(horizon=horizon, clip=0.5, form=form)
    held = np.where(where, log_p, np.nan).astype("f")  # what does not count may hold anything
    options = {"baseline": baseline.astype("f"), "where": where, "segment_ids": segments}
    got = weights_of(held, temperature.astype("f"), objective, **options)
    expected = by_loops(log_p, temperature, objective, baseline, where, segments)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert (expected[where] > 0).all()


def test_no_gradient_flows_through_the_weights():
    log_p = np.log(np.linspace(0.1, 0.9, 10, dtype=np.float32)).reshape(2, 5)
    gradient = jax.jit(jax.grad(lambda x: token_weights(x, TEMPERATURE, LhtsConfig()).sum()))(log_p)
    np.testing.assert_array_equal(gradient, 0.0)
    with pytest.raises(UserError, match="positive"):
        token_weights(log_p, float("nan"), LhtsConfig())


def test_weights_of_mode_authors_are_those_of_the_authors_formula():
    """config_gpt2.yaml and model_gpt2.py at 5c4c39d: (1/T − 1) times the sum of 8 centred scores, at most 3."""
    log_p = -np.random.default_rng(0).exponential(2.0, (3, 20))
    running = updated(RunningMean.empty(20), log_p.astype(np.float32), np.ones((3, 20), bool))
    mean = baseline_of(running, "position")
    np.testing.assert_allclose(mean, log_p.mean(axis=0), rtol=1e-5)
    got = weights_of(jnp.asarray(log_p, jnp.float32), 0.6, MODES["authors"], baseline=mean)
    padded = np.pad(log_p - log_p.mean(axis=0), ((0, 0), (0, 8)))
    sums = np.stack([padded[:, i : i + 8].sum(axis=1) for i in range(20)], axis=1)
    np.testing.assert_allclose(got, np.exp(np.minimum(sums / 0.6 - sums, 3.0)), rtol=2e-5)
    assert MODES["authors"].kl_weight == 0.05


def test_sequence_weights_average_sequences_then_the_batch():
    rng = np.random.default_rng(0)
    values, where = rng.normal(size=(5, 9)), rng.random((5, 9)) < 0.6
    segments = np.sort(rng.integers(1, 4, (5, 9)), axis=1)
    where[2, segments[2] == segments[2, 0]] = False  # a sequence of which no token counts
    for ids in (segments, None):
        own = np.ones_like(segments) if ids is None else ids
        masks = [(np.arange(5)[:, None] == r) & (own == s) & where for r in range(5) for s in np.unique(own)]
        means = [values[mask].mean() for mask in masks if mask.any()]
        got = np.asarray(jax.jit(sequence_weights)(where, ids), np.float64)
        np.testing.assert_allclose(got.sum(), len(means), rtol=1e-6)
        np.testing.assert_allclose((got * values).sum() / got.sum(), np.mean(means), rtol=1e-5)


def test_running_means_are_of_all_batches():
    rng = np.random.default_rng(0)
    log_p, where = -rng.exponential(1.0, (5, 8, 7)), rng.random((5, 8, 7)) < 0.6
    where[:, :, 6] = False
    running = RunningMean.empty(7)
    for values, mask in zip(log_p, where, strict=True):
        running = updated(running, np.where(mask, values, np.nan).astype(np.float32), mask)
    per_position = np.array([log_p[:, :, i][where[:, :, i]].mean() if i < 6 else 0.0 for i in range(7)])
    np.testing.assert_allclose(baseline_of(running, "position"), per_position, rtol=1e-5)
    np.testing.assert_allclose(baseline_of(running, "scalar"), np.full(7, log_p[where].mean()), rtol=1e-5)
    np.testing.assert_array_equal(baseline_of(running, "none"), np.zeros(7))


def test_reverse_kl_is_scipys():
    z = np.random.default_rng(0).normal(0, 2, (2, 5, 11)).astype(np.float32)
    want = rel_entr(*softmax(z.astype(np.float64), axis=-1)).sum(axis=-1)
    np.testing.assert_allclose(jax.jit(reverse_kl)(*z), want, rtol=1e-5)


@pytest.mark.parametrize("baseline", ["none", "scalar", "position"])
@pytest.mark.parametrize("form", ["suffix", "next_token"])
def test_the_minimiser_is_the_scaled_joint(source, form, baseline):
    """The expected loss is convex in the logits; its gradient vanishes at p_T, and nowhere near the best myopic one."""
    weights = source.weights(form, baseline)
    tables = [source.table(source.scaled[:, None]), source.table(np.exp(source.myopic(0.5)).prod(axis=1)[:, None])]
    sizes, p = [], jnp.asarray(source.p, jnp.float32)
    for table in tables:
        logits = jnp.log(jnp.maximum(jnp.asarray(table, jnp.float32), 1e-30))
        gradient = expected_gradient(logits, p, source.before, source.x, weights)
        sizes.append(float(jnp.abs(gradient).max()) / float(source.p @ np.asarray(weights).max(axis=1)))
    assert sizes[0] < 2e-6
    assert sizes[1] > 1e-3
    log_minimiser = np.log(source.at(source.table(source.p[:, None] * np.asarray(weights, np.float64))))
    assert source.kl(log_minimiser) < 1e-6 * source.best_myopic
