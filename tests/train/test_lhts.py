"""Training for the long horizon: its loss, its state, its meshes, its resuming, its samples and its conditions."""

import dataclasses
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import at_targets, dense_log_probs, logged, make_lm, make_sequences, ragged, silent

from calibjax.losses.long_horizon import MODES, LhtsConfig, RunningMean, sequence_weights, token_weights
from calibjax.models import LanguageModel, decoder
from calibjax.models.generate import log_probs, mix_samples, sample_sequences
from calibjax.runtime.errors import UserError
from calibjax.train import OptimizerConfig, create_state, make_train_step
from calibjax.train.lhts import LhtsObjective, LhtsOptions, conditioned, fit_lhts, likelihood_quantiles

SETTINGS = {"batch_size": 8, "learning_rate": 1e-2, "remat": "none", "epochs": 2, "validation_fraction": 0.2}


def fit(directory, *, sequences=None, method="lhts", **options):
    sequences = ragged(make_sequences(40)) if sequences is None else sequences
    lm = make_lm()
    chosen = LhtsOptions(**{**SETTINGS, **options})
    return fit_lhts(lm, sequences, chosen, context=silent(directory), method=method)


def student_of(lm):
    """Another model than the scorer, with two conditions."""
    rng = np.random.default_rng(3)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), jax.device_get(dict(lm.params)))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), moved)
    return {**params, "condition": jnp.asarray(rng.normal(0, 0.3, (2, lm.config.hidden_size)), jnp.float32)}


def batch_of(lm, count=8):
    sequences = ragged(make_sequences(count))
    more = {
        "temperature": np.where(np.arange(count) % 2, 0.5, 0.9).astype(np.float32),
        "condition": (np.arange(count) % 2).astype(np.int32),
    }
    return sequences, {name: jnp.asarray(array) for name, array in (sequences.arrays() | more).items()}


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_loss_is_the_dense_formula(monkeypatch, average):
    """The objective of the authors' code from the whole logits: its conditions, and the KL term block by block.

    `losses/test_long_horizon.py` has the weights of tokens and of sequences by their definitions.
    """
    from calibjax.train import lhts

    monkeypatch.setattr(lhts, "_BLOCK_LOGITS", 8 * 24 * 4)  # three blocks of columns, the last with two of padding
    lm = make_lm()
    sequences, batch = batch_of(lm)
    params, objective = student_of(lm), MODES["authors"]
    if average == "token":
        objective = dataclasses.replace(objective, average="token")
    of_batch = LhtsObjective(model=lm.config, objective=objective, condition_scale=0.5)
    before = RunningMean(jnp.full(10, -3.0), jnp.full(10, 2.0))
    loss, (divisor, after) = jax.jit(of_batch)(params, lm.params, batch, {}, before)

    at = (np.arange(8)[:, None], np.arange(10), sequences.targets)
    all_p = dense_log_probs(lm, sequences)
    log_p = np.where(sequences.where, all_p[at], 0)
    all_q = np.empty_like(all_p)
    for k in range(2):
        plain = LanguageModel.from_params(lm.config, conditioned(params, k, 0.5))
        all_q[k::2] = dense_log_probs(plain, sequences.take(slice(k, None, 2)))
    count = 2 + sequences.where.sum(axis=0)
    baseline = (-3.0 + log_p.sum(axis=0)) / count
    np.testing.assert_allclose(after.baseline("position"), baseline, rtol=1e-5)
    counted = {"where": sequences.where, "segment_ids": sequences.segment_ids}
    weights = token_weights(log_p, batch["temperature"], objective, baseline=jnp.asarray(baseline), **counted)
    kl = (np.exp(all_q) * (all_q - all_p)).sum(axis=-1)
    each = -weights * all_q[at] + objective.kl_weight * kl
    averaged = sequences.where if average == "token" else sequence_weights(**counted)
    expected = np.average(each, weights=averaged)
    print(f"loss {float(loss / divisor):.5f}, dense {expected:.5f}")
    np.testing.assert_allclose(loss / divisor, expected, rtol=2e-5)


def test_nothing_reaches_the_scorer_or_the_weights():
    """The gradient is that of a likelihood with constant weights."""
    lm = make_lm(num_layers=1)
    _, batch = batch_of(lm)
    params = student_of(lm)
    objective = LhtsObjective(model=lm.config, objective=LhtsConfig(kl_weight=0.1))

    def value(params, scorer):
        return objective(params, scorer, batch, {}, RunningMean.empty(10))[0]

    of_student, of_scorer = jax.device_get(jax.jit(jax.grad(value, argnums=(0, 1)))(params, lm.params))
    assert all(np.abs(g).max() == 0 for g in jax.tree.leaves(of_scorer))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(of_student))


def test_the_second_step_compiles_nothing_and_micro_batches_carry_on():
    lm = make_lm(num_layers=1)
    sequences, batch = batch_of(lm)
    del batch["condition"]
    optimizer = OptimizerConfig().build(4)
    objective = LhtsObjective(model=lm.config, objective=MODES["authors"])
    step = make_train_step(objective, optimizer, accumulate=2)
    state = create_state(jax.tree.map(jnp.copy, lm.params), optimizer, RunningMean.empty(10))
    for _ in range(3):
        state, _ = step(state, lm.params, batch, {})
    assert step._cache_size() == 1
    np.testing.assert_array_equal(state.carry.count, 3 * sequences.where.sum(axis=0))


# --- samples, quantiles, conditions ---


def test_samples_are_the_models_own():
    lm, sequences = make_lm(), make_sequences(30)
    drawn = sample_sequences(lm, sequences, prompt_tokens=3, batch_size=16, context=silent(seed=1))
    np.testing.assert_array_equal(drawn.tokens[:, :3], sequences.tokens[:, :3])
    np.testing.assert_array_equal(drawn.tokens[:, 1:], drawn.targets[:, :-1])
    assert not drawn.where[:, :2].any()
    assert drawn.where[:, 2:].all()
    greedy = sample_sequences(lm, sequences, prompt_tokens=3, temperature=0.0, batch_size=16, context=silent())
    best = dense_log_probs(lm, greedy).argmax(axis=-1)
    np.testing.assert_array_equal(best[greedy.where], greedy.targets[greedy.where])
    likely = [log_probs(lm, w, batch_size=7)[drawn.where].mean() for w in (greedy, drawn)]
    assert likely[0] > likely[1]
    np.testing.assert_allclose(
        log_probs(lm, drawn, batch_size=7)[drawn.where], at_targets(dense_log_probs(lm, drawn), drawn), atol=2e-5
    )


@pytest.mark.slow
def test_the_partition_trains_on_the_text_of_its_last_student(tmp_path):
    """And a run whose last round is lost ends as one that was not."""
    lm, sequences = make_lm(), ragged(make_sequences(40))
    options = {"method": "partition", "sequences": sequences, "learning_rate": 1e-3}
    one = fit(tmp_path / "one", **options)
    two = fit(tmp_path / "two", partition_rounds=2, **options)
    np.testing.assert_array_equal(logged(tmp_path / "two"), logged(tmp_path / "one"))
    student = LanguageModel.from_params(lm.config, one.params["partition"])
    written = mix_samples(student, sequences, 1.0, directory=tmp_path, batch_size=8, context=silent())
    for text, mean in zip((sequences, written), two.report["mean_log_prob"], strict=True):
        each = log_probs(lm, text, batch_size=8).sum(axis=1) / np.maximum(text.where.sum(axis=1), 1)
        np.testing.assert_allclose(mean, each.mean(), rtol=1e-5)
    assert two.report["sequences"]["train"] == 2 * one.report["sequences"]["train"]
    shutil.rmtree(tmp_path / "two/round-2/checkpoints")
    chex.assert_trees_all_equal(fit(tmp_path / "two", partition_rounds=2, **options).params, two.params)


def test_mixed_samples_replace_their_share(tmp_path):
    lm, sequences = make_lm(), make_sequences(30)
    mixed = mix_samples(lm, sequences, 0.4, directory=tmp_path, context=silent(seed=2))
    changed = (mixed.targets != sequences.targets).any(axis=1)
    assert changed.sum() == 12
    np.testing.assert_array_equal(mixed.tokens[:, 0], sequences.tokens[:, 0])
    written = (tmp_path / "samples.npz").stat().st_mtime_ns
    again = mix_samples(lm, sequences, 0.4, directory=tmp_path, context=silent(seed=2))
    assert (tmp_path / "samples.npz").stat().st_mtime_ns == written
    np.testing.assert_array_equal(again.targets, mixed.targets)
    other = make_sequences(30, seed=7)
    of_other = mix_samples(lm, other, 0.4, directory=tmp_path, context=silent(seed=2))
    np.testing.assert_array_equal(of_other.tokens[:, 0], other.tokens[:, 0])


def test_quantiles():
    """Groups of equal size, from least to most likely."""
    np.testing.assert_array_equal(likelihood_quantiles(np.array([-1.0, -5, -2, -4, -3, 0]), 3), [2, 0, 1, 0, 1, 2])
    sizes = np.bincount(likelihood_quantiles(np.random.default_rng(0).normal(size=103), 5))
    assert sorted(sizes) == [20, 20, 21, 21, 21]


@pytest.mark.parametrize("tied", [False, True])
def test_a_condition_is_a_plain_decoder(tied):
    lm = make_lm(tie_embeddings=tied)
    params, tokens = student_of(lm), jnp.asarray(make_sequences(6).tokens)
    condition = params["condition"][1]

    @jax.jit
    def log_q(params, condition):
        hidden = decoder.hidden_states(lm.config, params, tokens, condition=condition)
        return jax.nn.log_softmax(decoder.unembed(lm.config, params, hidden))

    got = log_q(params, jnp.broadcast_to(condition, (6, 16)))
    expected, without = (log_q(each, None) for each in (conditioned(params, 1), params))
    np.testing.assert_allclose(got, expected, atol=5e-5)
    assert float(jnp.abs(got - without).max()) > 0.1


def test_nothing_to_merge(tmp_path):
    lm = make_lm(tie_embeddings=True, logit_softcap=5.0)
    with pytest.raises(UserError, match="without a soft-cap or with untied embeddings"):
        fit_lhts(lm, make_sequences(16), LhtsOptions(temperatures=(0.5, 0.9)), context=silent(tmp_path))
