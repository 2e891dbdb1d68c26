"""The synthetic language: its truth against a sum over every path of topics, and its samples against its truth."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.commands.quickstart import true_probabilities
from calibjax.data.synthetic import TopicLanguage, make_language, sample


def small_language(vocab_size, topics, drift):
    rows = np.random.default_rng(topics).dirichlet(np.full(vocab_size, 0.5), (topics, vocab_size))
    moves = np.full((topics, topics), drift / (topics - 1))
    np.fill_diagonal(moves, 1 - drift)
    return TopicLanguage(jnp.asarray(rows, jnp.float32), jnp.asarray(moves, jnp.float32))


def brute_force(language, row):
    """P(next | row) after each position, by summing P(path of topics, tokens) over all paths; float64."""
    transitions = np.asarray(language.transitions, np.float64)
    topics = np.asarray(language.topic_transitions, np.float64)
    count, out = len(topics), []
    for end in range(1, len(row) + 1):
        joint = np.zeros(transitions.shape[-1])  # over the next token, together with the tokens so far
        for path in itertools.product(range(count), repeat=end):  # path[t] draws the token after row[t]
            p = 1.0 / count
            for t in range(end - 1):
                p *= transitions[path[t], row[t], row[t + 1]] * topics[path[t], path[t + 1]]
            joint += p * transitions[path[-1], row[end - 1]]
        out.append(joint / joint.sum())
    return np.array(out)


@pytest.mark.parametrize(("vocab_size", "topics", "drift"), [(4, 2, 0.02), (3, 3, 0.3)])
def test_truth_equals_the_sum_over_paths(vocab_size, topics, drift):
    language = small_language(vocab_size, topics, drift)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab_size, (3, 5)), jnp.int32)
    got = np.asarray(jax.jit(true_probabilities)(language, tokens), np.float64)
    expected = np.stack([brute_force(language, row) for row in np.asarray(tokens)])
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_language_is_a_language():
    language = make_language(jax.random.key(3))
    assert language.vocab_size == 32
    for table in map(np.asarray, (language.transitions, language.topic_transitions)):
        assert table.min() >= 0
        np.testing.assert_allclose(table.sum(axis=-1), 1.0, atol=2e-6)
    low, high = np.quantile(np.asarray(language.transitions).max(axis=-1), [0.05, 0.95])
    assert low < 0.3 < 0.9 < high, "contexts differ in how predictable they are: one temperature does not do for all"


def test_samples_follow_the_truth():
    language = small_language(6, 2, 0.1)
    tokens = np.asarray(sample(language, jax.random.key(6), 4000, 6))
    assert (tokens.shape, tokens.dtype) == ((4000, 6), np.int32)
    truth = np.asarray(true_probabilities(language, jnp.asarray(tokens)), np.float64)
    # Frequency of each token against the mean of its true probability, given the topic's belief of every prefix: the
    # difference is a martingale with variance Σ p (1 − p), per position and token.
    for t in range(5):
        following = np.eye(6)[tokens[:, t + 1]]
        excess = (following - truth[:, t]).sum(axis=0)
        deviation = np.sqrt((truth[:, t] * (1 - truth[:, t])).sum(axis=0))
        assert np.abs(excess / deviation).max() < 4, (t, excess / deviation)
    starts = np.bincount(tokens[:, 0], minlength=6)
    assert np.abs(starts - 4000 / 6).max() < 4 * np.sqrt(4000 / 6)
