"""Calibration across layers against float64 over the dense logits; the exact oracle of an edit in the null space."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax
from tiny import make_lm, make_sequences, ragged, silent

from calibjax import metrics, models
from calibjax.eval.layers import analysis
from calibjax.eval.layers import directions as edits
from calibjax.eval.layers.analysis import LayersOptions, evaluate_layers
from calibjax.eval.layers.layers import correction_phase, correction_test, layer_outputs, layers_json, make_readout
from calibjax.kernels import vocab_stats
from calibjax.models import LanguageModel
from calibjax.nn.experts import Mixture
from calibjax.runtime.errors import UserError

LM = make_lm(num_layers=3)
SEQUENCES = ragged(make_sequences(21))
LETTERS = (7, 2, 11)
run_hidden = jax.jit(models.hidden_states, static_argnames=("config", "layers"))


def states(lm, sequences=SEQUENCES, **options):
    packed = {"segment_ids": sequences.segment_ids, "positions": sequences.positions}
    return run_hidden(lm.config, lm.params, sequences.tokens, **packed, **options)


def dense_states(lm, sequences=SEQUENCES, edit=None):
    """Residual streams `[M, S, T, D]`, float64."""
    return np.asarray(states(lm, sequences, layers="residual", edit=edit), np.float64)


def dense_log_p(lm, residual, rows=slice(None)):
    """log p of residual streams, by the final norm and the rows of the unembedding, float64."""
    scale = np.asarray(lm.params["final_norm"]["scale"], np.float64)
    rms = np.sqrt((residual**2).mean(axis=-1, keepdims=True) + lm.config.norm_eps)
    return log_softmax(residual / rms * scale @ np.asarray(lm.unembedding, np.float64)[rows].T, axis=-1)


def with_letters(sequences):
    return sequences._replace(targets=np.asarray(LETTERS, np.int32)[sequences.targets % 3])


@pytest.mark.parametrize("letters", [None, LETTERS])
def test_layers_equal_the_dense_formula(letters):
    sequences = SEQUENCES if letters is None else with_letters(SEQUENCES)
    outputs = layer_outputs(LM, sequences, make_readout(LM, letters), batch_size=8, context=silent())
    rows = slice(None) if letters is None else list(letters)
    log_p = dense_log_p(LM, dense_states(LM, sequences), rows)[:, sequences.where]
    targets = sequences.targets[sequences.where]
    places = targets if letters is None else np.array([letters.index(t) for t in targets])
    p = np.exp(log_p)
    expected = {
        "confidence": p.max(-1),
        "argmax": p.argmax(-1),
        "correct": p.argmax(-1) == places[None],
        "log_prob": log_p[:, np.arange(len(places)), places],
        "entropy": -(p * log_p).sum(-1),
        "kl": (p[-1:] * (log_p[-1:] - log_p)).sum(-1),
    }
    assert outputs.confidence.shape == (LM.config.num_layers + 1, sequences.where.sum())
    for name, value in expected.items():
        got = getattr(outputs, name)
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=2e-5, err_msg=name)
    np.testing.assert_array_equal(outputs.group, np.nonzero(sequences.where)[0])


def test_targets_that_count(monkeypatch):
    """Not those of -100, as in `evaluate`; letters are all that is answered, and one sequence has no interval."""
    drawn = np.random.default_rng(0).random(SEQUENCES.where.shape) < 0.4
    ignored = SEQUENCES._replace(targets=np.where(SEQUENCES.where & drawn, -100, SEQUENCES.targets))
    masked = SEQUENCES._replace(where=SEQUENCES.where & ~drawn)
    options = LayersOptions(direction="confident", strengths=(0.5,), sweep_layers=(1,))
    documents = [
        evaluate_layers(LM, both.take(np.arange(10)), both.take(np.arange(10, 21)), options, silent())
        for both in (ignored, masked)
    ]
    assert documents[0] == documents[1]
    for given, message in (({"letters": LETTERS}, "^letters"), ({}, "two sequences")):
        with pytest.raises(UserError, match=message):
            evaluate_layers(LM, SEQUENCES, SEQUENCES.take(np.arange(1 + len(given))), options, silent(), **given)
    monkeypatch.setattr(analysis, "layer_outputs", None)  # nothing is read before a mixture of experts is refused
    with pytest.raises(UserError, match="mixture of experts"):
        evaluate_layers(make_lm(mixture=Mixture(experts=4, per_token=2)), SEQUENCES, SEQUENCES, context=silent())


def test_questions_of_any_length_are_read_as_they_are_alone():
    lm, questions = make_lm(num_layers=3, max_positions=160), with_letters(make_sequences(7, length=150))
    where = np.arange(150) == np.array([9, 140, 63, 64, 30, 127, 5])[:, None]  # one scored position each
    questions = questions._replace(where=where)
    read = make_readout(lm, LETTERS)
    outputs = layer_outputs(lm, questions, read, batch_size=4, context=silent())
    edit = np.full((3, lm.config.hidden_size), 0.1, np.float32)
    sums, entropy = edits.evaluate_edit(lm, questions, read, edit, batch_size=4)
    for row, column in zip(*np.nonzero(where), strict=True):
        alone = questions.take(slice(row, row + 1))
        one = layer_outputs(lm, alone, read, batch_size=1, context=silent())
        np.testing.assert_allclose(outputs.log_prob[:, row], one.log_prob[:, 0], rtol=1e-5, err_msg=f"{row} {column}")
        sums_alone, entropy_alone = edits.evaluate_edit(lm, alone, read, edit, batch_size=1)
        np.testing.assert_allclose(sums.nll[row], sums_alone.nll[0], rtol=1e-5)
        # The difference of two larger numbers.
        np.testing.assert_allclose(entropy[row], entropy_alone[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs.group, np.arange(7))


def null_space_model():
    """The first channel is written by nothing and read by nothing; the final norm has unit gain and eps 0."""
    lm = make_lm(num_layers=2)
    params = jax.tree.map(np.array, lm.params)
    params["embedding"][:, 0] = 0
    params["unembedding"][:, 0] = 0
    params["layers"]["attention"]["o"]["kernel"][..., 0] = 0
    params["layers"]["mlp"]["down"]["kernel"][..., 0] = 0
    config = dataclasses.replace(lm.config, norm_eps=0.0)
    return LanguageModel.from_params(config, jax.tree.map(jnp.asarray, params))


def test_an_edit_in_the_null_space_is_a_temperature():
    """RMSNorm of gain 1 and eps 0, W v = 0, |v| = 1, v orthogonal to h: h + c v divides logits by sqrt(1 + c²/|h|²)."""
    lm, c = null_space_model(), 40.0
    edit = np.zeros((2, lm.config.hidden_size), np.float32)
    edit[1, 0] = c
    residual = dense_states(lm)
    assert not residual[..., 0].any()
    length = np.linalg.norm(residual[-1], axis=-1)
    temperature = np.sqrt(1 + c**2 / length**2)
    assert temperature[SEQUENCES.where].max() > 1.5
    log_p = log_softmax(dense_log_p(lm, residual[-1]) / temperature[..., None], axis=-1)

    hidden = states(lm, edit=jnp.asarray(edit))
    stats = jax.device_get(jax.jit(vocab_stats)(hidden, lm.unembedding, SEQUENCES.targets))
    for name, got, value in (
        ("confidence", stats.confidence(), np.exp(log_p.max(-1))),
        ("log_prob", stats.log_prob(), np.take_along_axis(log_p, SEQUENCES.targets[..., None], -1)[..., 0]),
        ("entropy", stats.entropy(), -(np.exp(log_p) * log_p).sum(-1)),
    ):
        error = np.abs(np.asarray(got, np.float64) - value)[SEQUENCES.where].max()
        assert error < 5e-6, name
    # And through the sweep's own path.
    sums = metrics.total_sums(edits.evaluate_edit(lm, SEQUENCES, make_readout(lm), edit, batch_size=8)[0])
    expected = np.exp(log_p.max(-1))[SEQUENCES.where].sum()
    np.testing.assert_allclose(sums.confidence.sum(), expected, rtol=1e-6)
    # The null space finds it: the first channel, and nothing else of the hidden states.
    space = edits.null_space(lm, energy=1e-9)
    assert space.expected == 1 / lm.config.hidden_size
    np.testing.assert_allclose(space.fraction(np.eye(lm.config.hidden_size)[:3]), [1, 0, 0], atol=1e-6)


def test_no_edit_costs_nothing_and_zeros_change_nothing():
    tokens, zeros = SEQUENCES.tokens[:2], jnp.zeros((3, LM.config.hidden_size))

    def program(edit):
        return run_hidden.lower(LM.config, LM.params, tokens, edit=edit).as_text()

    adds = [text.count("stablehlo.add") for text in (program(None), program(zeros))]
    assert adds[1] == adds[0] + 1, "one addition in the loop over layers, and none without an edit"
    one, other = (run_hidden(LM.config, LM.params, tokens, edit=edit) for edit in (None, zeros))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(UserError, match=r"edit: expected one row for each block, \[3, 16\], got \[2, 16\]"):
        run_hidden(LM.config, LM.params, tokens, edit=zeros[:2])


def found_directions(recipe):
    """The two sets of predictions, and the directions between them."""
    read = make_readout(LM)
    outputs = layer_outputs(LM, SEQUENCES, read, batch_size=8, context=silent())
    sets = edits.choose_sets(recipe, outputs.confidence[-1], outputs.correct[-1])
    return sets, edits.find_directions(LM, SEQUENCES, read, sets, batch_size=8, context=silent())


def test_direction_is_the_difference_of_means():
    (first, second), directions = found_directions("wrong")
    residual = dense_states(LM)[1:, SEQUENCES.where]
    difference = residual[:, first].mean(axis=1) - residual[:, second].mean(axis=1)
    gap = np.linalg.norm(difference, axis=-1)
    np.testing.assert_allclose(directions.vectors, difference / gap[:, None], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(directions.gap, gap, rtol=1e-4)
    np.testing.assert_allclose(directions.length, np.linalg.norm(residual, axis=-1).mean(axis=1), rtol=1e-5)
    assert directions.counts == (first.sum(), second.sum())
    edit = edits.edit_array(directions, edits.Edit(2, -0.5))
    np.testing.assert_allclose(edit[1], -0.5 * directions.length[1] * directions.vectors[1])
    assert not edit[[0, 2]].any()


def test_sets():
    confidence, correct = np.array([0.9, 0.2, 0.8, 0.4]), np.array([False, False, True, True])
    expected = {
        "overconfident": ([1, 0, 0, 0], [0, 0, 1, 1]),  # accuracy 0.5
        "wrong": ([1, 1, 0, 0], [0, 0, 1, 1]),
        "confident": ([1, 0, 1, 0], [0, 1, 0, 1]),
    }
    for recipe, (first, second) in expected.items():
        got = edits.choose_sets(recipe, confidence, correct)
        np.testing.assert_array_equal(got, np.array([first, second], bool), err_msg=recipe)
    with pytest.raises(UserError, match=r"^direction: none of 2 predictions is in the first set of wrong"):
        edits.choose_sets("wrong", confidence[2:], correct[2:])


def test_sweep_is_one_program_and_chooses_without_losing_accuracy():
    directions = found_directions("confident")[1]
    options = {"batch_size": 8, "bins": 5, "context": silent()}
    done = edits.sweep(LM, SEQUENCES, make_readout(LM), directions, (1, 3), (-0.5, 0.0, 0.5), **options)
    assert list(done) == [(0, 0.0), (1, -0.5), (1, 0.5), (3, -0.5), (3, 0.5)]
    # Dense, for one of them.
    residual = dense_states(LM, edit=jnp.asarray(edits.edit_array(directions, edits.Edit(1, 0.5))))[-1]
    p = np.exp(dense_log_p(LM, residual))[SEQUENCES.where]
    whole = metrics.total_sums(done[edits.Edit(1, 0.5)])
    np.testing.assert_allclose(whole.confidence.sum(), p.max(-1).sum(), rtol=1e-5)
    assert whole.correct.sum() == (p.argmax(-1) == SEQUENCES.targets[SEQUENCES.where]).sum()

    rows = {edit: metrics.summarise(sums) for edit, sums in done.items()}
    chosen = edits.choose_edit(done)
    fine = {edit for edit, row in rows.items() if row["accuracy"] >= rows[edits.Edit(0, 0.0)]["accuracy"] - 0.01}
    assert chosen in fine
    assert rows[chosen]["ece"] == min(rows[edit]["ece"] for edit in fine)


def made_sums(confidence, accuracy, count=400):
    """Points of one confidence, some right: the calibration error is the difference."""
    right = (np.arange(count) % 100 < round(100 * accuracy)).astype(np.float32)
    return metrics.pooled_sums(np.full(count, confidence, np.float32), right)


def test_phase_of_correction():
    agreement = np.array([0.1, 0.95, 0.95, 0.95, 1.0])
    sums = [made_sums(c, 0.5) for c in (0.99, 0.6, 0.9, 0.8, 0.55)]
    phase = correction_phase(sums, agreement)
    assert (phase.settled, phase.peak, phase.found) == (1, 2, True)  # not layer 0, before the decision
    np.testing.assert_allclose(phase.correction.difference, 0.4 - 0.05, atol=1e-6)
    assert 0 < phase.correction.low <= phase.correction.high
    assert phase.p_value < 0.05
    none = correction_phase(sums, np.array([0.1, 0.95, 0.95, 0.2, 1.0]))
    assert (none.settled, none.peak, none.found) == (4, 4, False)
    growing = correction_phase([made_sums(c, 0.5) for c in (0.5, 0.6, 0.7, 0.8, 0.9)], agreement)
    assert (growing.peak, growing.found) == (4, False)


def drawn_layers(rng, gaps, groups=80, tokens=10):
    """Sums of layers with equal answers: each has a confidence too high by its gap, and noise of its own."""
    p = np.clip(rng.uniform(0.3, 0.6, (groups, 1)) + rng.normal(0, 0.05, (groups, tokens)), 0, 1).ravel()
    right, group = (rng.random(p.size) < p).astype(np.float32), np.repeat(np.arange(groups), tokens)
    noisy = (np.clip(p + gap + rng.normal(0, 0.15, p.size), 0, 1).astype(np.float32) for gap in gaps)
    return [metrics.pooled_sums(confidence, right, groups=group) for confidence in noisy]


def test_level_and_power_of_the_correction_test():
    """Of layers with one calibration error about 5% reject, however many there are; a drop of 0.1 is found."""
    rng, draws = np.random.default_rng(0), 30
    for gaps in ((0.1,) * 8, (0.0,) * 8):
        rejected = np.mean([correction_test(drawn_layers(rng, gaps), resamples=200) < 0.05 for _ in range(draws)])
        assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    assert all(correction_test(drawn_layers(rng, (0.1, 0.2, 0.1)), resamples=200) < 0.05 for _ in range(10))
    same = drawn_layers(rng, (0.1,))
    assert correction_test(same * 3, resamples=200) == correction_test(same, resamples=200) == 1.0


def test_curves_as_json():
    outputs = layer_outputs(LM, SEQUENCES, make_readout(LM), batch_size=8, context=silent())
    document = layers_json(outputs, bins=10)
    fields = {"accuracy": outputs.correct, "confidence": outputs.confidence, "nll": -outputs.log_prob}
    fields |= {"entropy": outputs.entropy, "kl": outputs.kl}
    for layer, row in enumerate(document["curves"]):
        expected = {name: x[layer].mean(dtype=np.float64) for name, x in fields.items()}
        confidence, correct = outputs.confidence[layer], outputs.correct[layer]
        expected["ece"] = float(metrics.expected_calibration_error(confidence, correct, bins=10))
        for name, value in expected.items():
            assert math.isclose(row[name]["value"], value, rel_tol=1e-5, abs_tol=1e-7), (layer, name)
            assert row[name]["low"] <= row[name]["high"]
        assert row["agreement"] == (outputs.argmax[layer] == outputs.argmax[-1]).mean()
    assert document["curves"][-1]["agreement"] == 1


def writing_only(lm, *place):
    """The model with one output weight of its last MLP, 1 at (neuron, channel); without a place none."""
    params = jax.tree.map(np.array, lm.params)
    params["layers"]["mlp"]["down"]["kernel"][-1] = 0
    if place:
        params["layers"]["mlp"]["down"]["kernel"][(-1, *place)] = 1
    return dataclasses.replace(lm, params=jax.tree.map(jnp.asarray, params))


def test_ablation_equals_the_dense_formula():
    """The last residual minus (a_j − mean a_j) w_j of each neuron; a_j is read off a model that writes only it."""
    fit, held_out = SEQUENCES.take(np.arange(9)), SEQUENCES.take(np.arange(9, 21))
    space = edits.null_space(LM, energy=0.2)
    neurons = edits.entropy_neurons(LM, space, count=2, largest=0.5)
    ablation = edits.ablate(LM, (fit, held_out), make_readout(LM), neurons, space, batch_size=8, context=silent())
    rows = {row["name"]: row for row in ablation}
    assert list(rows) == ["none", "mean-ablated", "rotated", *(f"equal norm {k + 1}" for k in range(edits.CONTROLS))]

    weights = np.asarray(LM.params["layers"]["mlp"]["down"]["kernel"][-1], np.float64)
    own = [neuron.index for neuron in neurons]

    def activations(sequences):
        written = [dense_states(writing_only(LM, index, 0), sequences) for index in own]
        none = dense_states(writing_only(LM), sequences)
        return np.stack([(each - none)[-1, ..., 0] for each in written], axis=-1)

    mean = activations(fit)[fit.where].mean(axis=0)
    outside = np.eye(16) - space.basis @ space.basis.T
    turned = weights[own] @ outside
    turned *= np.linalg.norm(weights[own], axis=1, keepdims=True) / np.linalg.norm(turned, axis=1, keepdims=True)
    a, residual = activations(held_out), dense_states(LM, held_out)[-1]
    changes = {"none": 0.0, "mean-ablated": (mean - a) @ weights[own], "rotated": a @ (turned - weights[own])}
    for name, written in changes.items():
        log_p = dense_log_p(LM, residual + written)[held_out.where]
        p, targets = np.exp(log_p), held_out.targets[held_out.where]
        expected = {
            "entropy": -(p * log_p).sum(-1).mean(),
            "confidence": p.max(-1).mean(),
            "accuracy": (p.argmax(-1) == targets).mean(),
            "ece": float(metrics.expected_calibration_error(p.max(-1), p.argmax(-1) == targets)),
            "nll": -log_p[np.arange(len(targets)), targets].mean(),
        }
        for key, value in expected.items():
            np.testing.assert_allclose(rows[name][key], value, rtol=2e-5, atol=2e-6, err_msg=f"{name}, {key}")
    assert rows["mean-ablated"]["nll"] != rows["none"]["nll"]


def test_neurons_of_equal_norm():
    norms = np.random.default_rng(0).uniform(1, 2, 20)
    sets = edits.equal_norm(norms, np.array([3, 7]))
    assert len({3, 7, *np.concatenate(sets).tolist()}) == 2 + 2 * edits.CONTROLS
    others = np.delete(norms, [3, 7])
    assert np.abs(norms[sets[0][0]] - norms[3]) == np.abs(others - norms[3]).min()
    assert edits.equal_norm(norms[:2], np.array([0, 1])) == []


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_entropy_neurons(norm):
    lm = make_lm(num_layers=2, norm=norm, vocab_size=37)
    rng = np.random.default_rng(3)
    params = jax.tree.map(np.array, lm.params)
    params["final_norm"]["scale"] = rng.uniform(0.5, 2, lm.config.hidden_size).astype(np.float32)
    lm = LanguageModel.from_params(lm.config, jax.tree.map(jnp.asarray, params))
    space = edits.null_space(lm, energy=0.2)
    got = edits.entropy_neurons(lm, space, layers=2, count=3, largest=0.5)
    assert [neuron.layer for neuron in got] == [1, 1, 1, 2, 2, 2]
    rows = np.asarray(lm.unembedding, np.float64)
    for neuron in got:
        written = np.asarray(params["layers"]["mlp"]["down"]["kernel"][neuron.layer - 1], np.float64)
        written = written - written.mean(axis=1, keepdims=True) if norm == "layer" else written
        effect = written * params["final_norm"]["scale"].astype(np.float64)
        cosines = rows @ effect.T / np.linalg.norm(rows, axis=1)[:, None] / np.linalg.norm(effect, axis=1)
        variance, lengths = cosines.var(axis=0), np.linalg.norm(written, axis=1)
        np.testing.assert_allclose(neuron.norm, lengths[neuron.index], rtol=1e-6)
        np.testing.assert_allclose(neuron.logit_variance, variance[neuron.index], rtol=1e-5)
        assert neuron.norm >= np.median(lengths)
        large = np.argsort(-lengths)[: len(lengths) // 2]
        assert neuron.logit_variance <= np.sort(variance[large])[2] * (1 + 1e-6)
    # The null space, by the singular values of the matrix itself.
    matrix = (rows - rows.mean(axis=0)) * params["final_norm"]["scale"].astype(np.float64)
    matrix = matrix - matrix.mean(axis=1, keepdims=True) if norm == "layer" else matrix
    _, singular, right = np.linalg.svd(matrix)
    inside = np.cumsum(singular[::-1] ** 2) <= 0.2 * (singular**2).sum()
    assert space.basis.shape[1] == inside.sum()
    vector = rng.normal(size=lm.config.hidden_size)
    expected = np.square(right[::-1][inside] @ vector).sum() / np.square(vector).sum()
    np.testing.assert_allclose(space.fraction(vector), expected, rtol=1e-4)
