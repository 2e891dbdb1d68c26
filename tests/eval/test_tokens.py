"""Token-level figures against float64 over the dense logits, and what is drawn from them."""

import copy
import dataclasses
import json

import chex
import jax.numpy as jnp
import metric_oracle
import numpy as np
import pytest
import scipy.stats
import tiny

from calibjax.eval import tokens as eval_tokens
from calibjax.eval.report.notes import choice_verdict, final_candidate
from calibjax.eval.report.notes import set_verdict as verdict
from calibjax.eval.report.notes import verdict as run_verdict
from calibjax.eval.tokens import evaluate_tokens, results_json
from calibjax.heads import FittedHead

BINS, LM = 10, tiny.make_lm()
SEQUENCES = tiny.answered(LM, tiny.ragged(tiny.make_sequences(21)))  # 21: the last batch of 8 is not full
HEADS = {
    "uncalibrated": FittedHead.constant(LM),
    "temperature": FittedHead.constant(LM, np.log(0.4)),
    "ats": tiny.random_head(LM, log_factor=-0.7),
}


def evaluate(heads=HEADS, *, lm=LM, **options):
    return evaluate_tokens(lm, SEQUENCES, heads, **{"batch_size": 8, "bins": BINS, **options}, context=tiny.silent())


@pytest.fixture(scope="module")
def results():
    return {closed: evaluate(closed=closed, keep_tokens=True) for closed in ("right", "left")}


def test_tokens_that_do_not_count_are_not_multiplied_by_the_vocabulary(monkeypatch):
    """The figures of all positions and of the counted ones alone, for heads that read statistics; also shared ones."""
    features = ("logit_statistics", "argmax_embedding")
    heads = {kind: tiny.random_head(LM, kind, features) for kind in ("linear", "transformer")}
    heads["uncalibrated"] = FittedHead.constant(LM)
    every = evaluate(heads, keep_tokens=True)
    monkeypatch.setattr(eval_tokens, "_BLOCK", 1)
    counted = evaluate(heads, keep_tokens=True)
    for name in heads:
        chex.assert_trees_all_close(counted[name].tokens, every[name].tokens, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("closed", ["right", "left"])
@pytest.mark.parametrize("name", ["uncalibrated", "temperature", "ats"])
def test_figures_equal_the_dense_ones(results, name, closed):
    log_scale = tiny.log_scale_of(LM, HEADS[name], SEQUENCES)
    log_q = tiny.dense_log_probs(LM, SEQUENCES, log_scale)
    where = SEQUENCES.where
    right = (log_q.argmax(-1) == SEQUENCES.targets)[where]
    confidence = np.exp(log_q.max(-1))[where]
    document = results_json(results[closed], closed=closed)
    row = document["methods"][name]
    assert document["tokens"] == where.sum()
    means = {"accuracy": right, "confidence": confidence, "brier": np.square(confidence - right)}
    for key, value in {"nll": -tiny.at_targets(log_q, SEQUENCES), **means}.items():
        np.testing.assert_allclose(row[key], value.mean(), rtol=3e-6, err_msg=key)

    tokens = results[closed][name].tokens
    np.testing.assert_array_equal(tokens.argmax[where], log_q.argmax(-1)[where])
    np.testing.assert_allclose(tokens.confidence[where], confidence, rtol=1e-5)
    np.testing.assert_allclose(tokens.temperature[where], np.exp(-log_scale)[where], rtol=1e-5)
    assert not tokens.confidence[~where].any()
    assert not tokens.temperature[~where].any()
    # Bins of the float32 confidences, as rounding can move one across an edge.
    index = metric_oracle.bins_of(tokens.confidence[where], BINS, closed)
    count = np.bincount(index, minlength=BINS)
    for figure, norm in ((row["ece"]["value"], "l1"), (row["rmsce"], "l2"), (row["mce"], "max")):
        np.testing.assert_allclose(figure, metric_oracle.binned(confidence, right, index, norm), rtol=1e-5)
    for b in range(BINS):
        accuracy = row["reliability"]["accuracy"][b]
        assert accuracy is None if count[b] == 0 else abs(accuracy - right[index == b].mean()) < 1e-6
    edges = np.array(row["temperatures"]["edges"])
    temperature = np.clip(np.exp(-log_scale)[where], edges[0] * 1.0001, edges[-1] * 0.9999)
    assert sum(row["temperatures"]["count"]) == where.sum()
    assert np.abs(np.histogram(temperature, edges)[0] - row["temperatures"]["count"]).sum() <= 2


def test_batch_size_changes_nothing():
    heads = {**HEADS, "hot": dataclasses.replace(FittedHead.constant(LM), log_factor=-4.0)}  # a temperature of 55
    one, other = (evaluate(heads, batch_size=size) for size in (8, 21))
    assert other["hot"].temperatures[-1] == SEQUENCES.where.sum(), "beyond the last edge is in the last bin"
    for name in HEADS:
        assert one[name].sums.nll.dtype == np.float64
        assert other[name].tokens is None
        np.testing.assert_array_equal(one[name].sums.count, other[name].sums.count)
        np.testing.assert_allclose(one[name].sums.nll, other[name].sums.nll, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_model(results):
    lm = tiny.make_lm(dtype=jnp.bfloat16)
    got = evaluate({"ats": tiny.random_head(lm, log_factor=-0.7)}, lm=lm)
    full, half = (results_json(outcome)["methods"]["ats"] for outcome in (results["right"], got))
    assert abs(full["nll"] - half["nll"]) < 0.05 * full["nll"]


@pytest.fixture(scope="module")
def figures(results):
    return results_json(results["right"])


@pytest.fixture
def document(figures):
    return {"schema": 1, "held_out": copy.deepcopy(figures), "run": {"model": "a model", "fit": {}}}


def test_schema(document):
    stored = json.loads(json.dumps(document, allow_nan=False))
    assert stored == document
    assert list(stored["held_out"]["methods"]) == ["uncalibrated", "temperature", "ats"]
    for row in stored["held_out"]["methods"].values():
        assert (row["ece"]["bins"], row["ece"]["closed"]) == (BINS, "right")
        for value in (row["ece"]["value"], row["debiased_ece"]):
            assert 0 <= row["ece"]["low"] <= value <= row["ece"]["high"] <= 1
        bins = row["reliability"]
        for low, accuracy, high in zip(bins["low"], bins["accuracy"], bins["high"], strict=True):
            assert (low is None) == (accuracy is None)
            assert accuracy is None or 0 <= low <= accuracy + 1e-9 <= high + 2e-9 <= 1 + 1e-6


def test_interval_is_of_the_seed(results, figures):
    same, other = (results_json(results["right"], seed=seed) for seed in (0, 1))
    assert figures == same
    assert figures["methods"]["ats"]["ece"]["high"] != other["methods"]["ats"]["ece"]["high"]


def test_intervals_of_means(figures):
    """Against SciPy's bootstrap of sequences: NLL, Brier score and accuracy."""
    row = figures["methods"]["ats"]
    log_q = tiny.dense_log_probs(LM, SEQUENCES, tiny.log_scale_of(LM, HEADS["ats"], SEQUENCES))
    right = log_q.argmax(-1) == SEQUENCES.targets
    brier = np.square(np.exp(log_q.max(-1)) - right)
    targets = np.take_along_axis(log_q, SEQUENCES.targets[..., None], axis=-1)[..., 0]
    values = {"nll": -targets, "brier": brier, "accuracy": right}
    where = SEQUENCES.where
    for name, value in values.items():
        sums = (np.where(where, value, 0).sum(1), where.sum(1))
        ratio = {"statistic": lambda a, n, axis: a.sum(axis) / n.sum(axis), "paired": True, "rng": 0}
        oracle = scipy.stats.bootstrap(sums, method="percentile", n_resamples=4000, **ratio).confidence_interval
        ends = row["intervals"][name]
        assert ends["low"] <= row[name] <= ends["high"]
        width = oracle.high - oracle.low
        assert max(abs(ends["low"] - oracle.low), abs(ends["high"] - oracle.high)) < 0.1 * width


def worse(document, against=None, *, ece=0.99, nll=0.99):
    """The document with ATS's figures set from another row's, times a factor, and these tested differences."""
    changed = copy.deepcopy(document)
    for row in changed["held_out"]["methods"].values():
        row.update(against={}, against_uncalibrated={})
    ats, other = changed["held_out"]["methods"]["ats"], changed["held_out"]["methods"]["temperature"]
    ats["nll"], ats["ece"]["value"] = other["nll"] * nll, other["ece"]["value"] * ece
    if against is not None:
        ats["against"] = dict(zip(("ece", "nll"), against, strict=True))
    return changed


@pytest.mark.parametrize("names", [("temperature", "ats"), ("base", "fine_tuned"), ("uncalibrated", "temperature")])
def test_verdict(document, names):
    for ece, nll, words in (
        (0.9, 0.9, "is better calibrated than "),
        (1.1, 0.9, "in NLL only: NLL "),
        (0.9, 1.1, "in ECE only: ECE "),
        (1.1, 1.1, "is worse than "),
        (1 - 1e-7, 1 - 1e-7, "does not differ from "),
    ):
        got = worse(document, ece=ece, nll=nll)["held_out"]
        rows = got["methods"]
        if "ats" not in names:
            got = {"methods": dict(zip(names, (rows["temperature"], rows["ats"]), strict=True))}
        assert words in verdict(got).text
        same = words.startswith("does not") and names[0] != "uncalibrated"
        assert verdict(got).is_warning == (same or max(ece, nll) > 1)


NOISE, LESS, MORE = {"low": -0.1, "high": 0.1}, {"low": -0.2, "high": -0.1}, {"low": 0.1, "high": 0.2}


@pytest.mark.parametrize(
    ("against", "start"),
    [
        ((NOISE, NOISE), "WARNING: ATS does not differ from temperature scaling beyond noise"),
        ((NOISE, LESS), "ATS has a lower NLL than temperature scaling: NLL"),
        ((NOISE, MORE), "WARNING: ATS has a higher NLL than temperature scaling: NLL"),
        ((LESS, NOISE), "ATS has a lower ECE than temperature scaling: ECE"),
        ((MORE, NOISE), "WARNING: ATS has a higher ECE than temperature scaling: ECE"),
    ],
)
def test_paired_differences_decide(document, against, start):
    """One whose interval excludes 0 is enough; so for fine-tuning, whose verdict was of the figures alone."""
    rows = worse(document, against=against, ece=1.01)["held_out"]["methods"]
    assert str(verdict({"methods": rows})).startswith(start)
    base, tuned = rows["temperature"], rows["ats"] | {"against_uncalibrated": rows["ats"]["against"]}
    line = str(verdict({"methods": {"base": base, "fine_tuned": tuned, "base_temperature": base}})).lower()
    start = start.lower().replace("ats", "the fine-tuned model").replace("temperature scaling", "the base model")
    assert line.startswith(start)
    assert line.endswith(f"with temperature scaling is {base['ece']['value']:.4f}.")


def test_verdict_of_a_given_loss(document):
    bad = worse(document, ece=1.9)
    for auto, sentence in ((False, " The head is kept because the loss is fixed (joint): "), (True, "")):
        bad["run"]["fit"] = {"plan": {"trials": [["joint", 1.0]], "may_keep_temperature": auto}}
        assert sentence in run_verdict(bad).text
        assert str(run_verdict(bad)).startswith(str(verdict(bad["held_out"])))
    same = document["held_out"]["methods"]
    same["ats"] = same["temperature"]
    assert str(verdict(document["held_out"])).startswith("WARNING: ATS is temperature scaling here, which no head beat")


def test_verdict_of_a_choice():
    def compared(name, beats=False):
        return {"candidate": name, "calibration_error": 0.01, "beats_temperature": beats}

    scaling = compared("temperature scaling")
    for final, chosen, expected in (
        ("joint-4", [scaling, compared("joint-4", beats=True)], "Chosen: joint-4"),
        ("joint-4", [scaling, compared("joint-4")], "Kept, as the loss is fixed: joint-4"),
        ("temperature scaling", [], "No candidate beats temperature scaling beyond noise"),
    ):
        comparison = {"candidates": [scaling, compared("joint-4")], "chosen": chosen}
        assert final_candidate(comparison) == final
        assert choice_verdict(comparison).startswith(expected)
