"""Confidence in answers where the distribution of the answers is known: every method against its true value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from known_answers import MEANINGS, answer_meanings, answer_probabilities, judged_answers
from tiny import make_lm

from calibjax.commands.quickstart import LanguageModelObjective
from calibjax.data import batches
from calibjax.data.synthetic import as_sequences, make_language, sample
from calibjax.eval.answers.methods import METHODS, Evidence
from calibjax.models import DecoderConfig, LanguageModel, init_params
from calibjax.models.generate import Sampling, generate
from calibjax.runtime.context import RunContext
from calibjax.train.loop import train
from calibjax.train.step import OptimizerConfig, create_state, make_train_step

N, LENGTH, K = 2000, 8, 16
MEANING = answer_meanings(2)


@pytest.fixture(scope="module")
def known():
    """(questions, P(answer) `[N, A]`, P(meaning) `[N, M]`): float64, of answers of two tokens."""
    language = make_language(jax.random.key(5))
    questions = sample(language, jax.random.key(6), N, LENGTH)
    p = np.asarray(answer_probabilities(language, questions, 2), np.float64)
    meanings = np.stack([p[:, m == MEANING].sum(axis=1) for m in range(MEANINGS)], axis=1)
    return questions, p, meanings / meanings.sum(axis=1, keepdims=True)


def drawn(p, count, seed):
    """`count` answers to each question by its row of p: int `[N, count]`."""
    uniform = np.random.default_rng(seed).random((len(p), count))
    ends = (p / p.sum(axis=1, keepdims=True)).cumsum(axis=1)
    return np.stack([np.searchsorted(*pair) for pair in zip(ends, uniform, strict=True)]).clip(0, p.shape[1] - 1)


def method(name, **fields):
    return np.asarray(METHODS[name].function(Evidence(**fields)), np.float64)


@pytest.mark.slow
def test_semantic_entropy_tends_to_the_entropy_of_the_meanings(known):
    """With 2,000 samples of each of 50 questions; without the bias -(m - 1)/(2K) of the plug-in estimate (Miller)."""
    _, p, meanings = known
    count, few = 2000, slice(50)
    got = method("discrete_semantic_entropy", clusters=MEANING[drawn(p[few], count, 2)])
    want = scipy.stats.entropy(meanings[few], axis=1)
    entropy = (1 - got) * np.log(count)
    found = (meanings[few] > 1 / count).sum(axis=1)
    log_p = np.log(np.maximum(meanings[few], 1e-300))
    deviation = np.sqrt(((meanings[few] * log_p**2).sum(axis=1) - want**2).clip(0) / count)
    error = entropy + (found - 1) / (2 * count) - want
    print(f"largest error {np.abs(error).max():.4f} nats of up to {want.max():.2f}")
    assert (np.abs(error) < 4.5 * deviation + 3 / count).all()


@pytest.mark.slow
def test_samples_of_a_model_follow_its_distribution():
    """Consistency and entropy of what `generate` draws, against the enumeration of every answer of two tokens."""
    lm = make_lm()
    rng, count, v = np.random.default_rng(0), 512, lm.config.vocab_size
    questions = rng.integers(0, v, (4, 6))
    first = jax.nn.log_softmax(lm.logits(questions)[:, -1])
    extended = np.concatenate([questions.repeat(v, axis=0), np.tile(np.arange(v), 4)[:, None]], axis=1)
    second = jax.nn.log_softmax(lm.logits(extended)[:, -1]).reshape(4, v, v)
    p = np.exp(np.asarray(first[:, :, None] + second, np.float64))
    meaning = np.arange(v) % 3
    meanings = np.stack([p[:, :, meaning == m].sum(axis=(1, 2)) for m in range(3)], axis=1)
    sampling = Sampling(temperature=1.0, key=jax.random.key(3), count=count)
    out = generate(lm, questions.tolist(), max_new_tokens=2, sampling=sampling, stop_tokens=())
    clusters = meaning[np.asarray(out.tokens)[:, -1]].reshape(4, count)
    for m in range(3):
        got = method("consistency", clusters=clusters, answer=np.full(4, m))
        assert (np.abs(got - meanings[:, m]) < 4 * np.sqrt(meanings[:, m] * (1 - meanings[:, m]) / count)).all()
    want = scipy.stats.entropy(meanings, axis=1)
    entropy = (1 - method("discrete_semantic_entropy", clusters=clusters)) * np.log(count)
    np.testing.assert_allclose(entropy, want, atol=0.12)


@pytest.mark.slow
def test_p_true_of_a_model_that_was_taught_it(tmp_path):
    """A decoder of judged answers: its P(True) against the probability that the answer is right."""
    language = make_language(jax.random.key(5))
    config = DecoderConfig(
        family="llama",
        vocab_size=34,
        hidden_size=64,
        intermediate_size=256,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=16,
    )
    length, batch, steps, adamw = 2, 256, 1000, OptimizerConfig(learning_rate=3e-3)
    sets = ((8, batch * steps // 2), (9, 2_000))
    rows, new = (judged_answers(language, jax.random.key(seed), count, length) for seed, count in sets)
    sequences = as_sequences(rows)
    sequences.where[:, :-1] = False  # the judgement is all that it learns
    optimizer, start = adamw.build(steps), init_params(config, jax.random.key(0))
    start["embedding"] *= 20  # learnt sooner, with so few steps
    state = train(
        make_train_step(LanguageModelObjective(config), optimizer),
        create_state(start, optimizer),
        *(None, {}, batches(sequences._asdict(), batch, seed=0, steps=steps)),
        steps=steps,
        context=dataclasses.replace(RunContext(directory=tmp_path), progress=False),
        identity={},
    )
    lm = LanguageModel.from_params(config, state.params)
    log_probs = jax.nn.log_softmax(lm.logits(new[:, :-1])[:, -1])
    got = method("p_true", two_way=log_probs[:, 32:])
    p = np.asarray(answer_probabilities(language, jnp.asarray(new[:, :length])), np.float64)
    truth = np.where(answer_meanings()[new[:, length]][:, None] == answer_meanings(), p, 0).sum(axis=1)
    error, prior = np.abs(got - truth).mean(), np.abs(truth.mean() - truth).mean()
    print(f"mean error of P(True) {error:.4f}; of the base rate {prior:.4f}; r {np.corrcoef(got, truth)[0, 1]:.3f}")
    assert error < 0.65 * prior  # after 1,000 steps; it still falls
    assert np.corrcoef(got, truth)[0, 1] > 0.7
    for part in (got < 0.3, (got >= 0.3) & (got < 0.7), got >= 0.7):  # and it is calibrated
        assert abs((got - truth)[part].mean()) < 0.06
    assert np.asarray(log_probs)[:, :32].max() < np.log(0.05)  # it judges, and writes nothing else
