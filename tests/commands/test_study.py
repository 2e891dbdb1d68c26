"""Studies: figures of several seeds against float64 over the dense logits, every variant, each command end to end."""

import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    WORDS,
    answered,
    at_targets,
    dense_log_probs,
    make_lm,
    make_sequences,
    on_one_device,
    ragged,
    silent,
    write_model,
    write_text,
)

from calibjax import fit_ats
from calibjax.cli import main
from calibjax.commands.study import fits
from calibjax.commands.study.ablations import ABLATIONS
from calibjax.commands.study.transfer import SUBJECTS, answered_questions
from calibjax.data import Rows
from calibjax.eval.compare.repeats import FIGURES, evaluate_repeats
from calibjax.eval.report.studies import compared_with
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead, HeadConfig
from calibjax.train import AtsOptions
from calibjax.train.options import make_plan

LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(30)))
BINS = 5


def constant(log_scale):
    config = HeadConfig(kind="constant", hidden_size=LM.config.hidden_size)
    return FittedHead(config, {"log_scale": jnp.float32(log_scale)}, 0.0, LM.fingerprint)


def figures_of(log_scale, rows):
    """`FIGURES` of the sequences `rows` in float64, from the dense logits."""
    chosen = SEQUENCES.take(rows)
    log_p = dense_log_probs(LM, SEQUENCES, log_scale)[rows]
    right = (log_p.argmax(axis=-1) == chosen.targets)[chosen.where]
    c = np.exp(log_p.max(axis=-1))[chosen.where]
    bins = np.ceil(c * BINS).astype(int)
    ece = sum(abs((c - right)[bins == b].sum()) for b in range(BINS + 1)) / len(c)
    scores = -at_targets(log_p, chosen).mean(), ((c - right) ** 2).mean(), ece
    return np.array([*scores, right.mean(), c.mean(), c[right].mean(), c[~right].mean()])


def test_figures_are_means_over_seeds_with_paired_intervals():
    scales = {"one": (-0.4, -0.9), "other": (0.0,)}
    heads = {"one": [constant(s) for s in scales["one"]], "other": [identity_head(LM)]}
    found = evaluate_repeats(LM, SEQUENCES, heads, against={"one": "other"}, batch_size=8, bins=BINS, context=silent())
    assert (found["tokens"], found["windows"]) == (int(SEQUENCES.where.sum()), 30)
    every = np.arange(30)
    expected = {name: np.array([figures_of(s, every) for s in of_name]) for name, of_name in scales.items()}
    for name, of_name in expected.items():
        row = found["methods"][name]
        for figure, seeds in zip(FIGURES, of_name.T, strict=True):
            np.testing.assert_allclose(row[figure]["seeds"], seeds, rtol=2e-5, err_msg=f"{name} {figure}")
            np.testing.assert_allclose(row[figure]["value"], seeds.mean(), rtol=2e-5)
    # Another bootstrap, of the sequences by hand: its intervals agree to what 400 resamples know.
    rng = np.random.default_rng(7)
    drawn = rng.integers(0, 30, (400, 30))
    one, other = (np.array([[figures_of(s, rows) for rows in drawn] for s in scales[n]]).mean(axis=0) for n in scales)
    assert "against" not in found["methods"]["other"]
    against = found["methods"]["one"]["against"]
    assert against["name"] == "other"
    for index, figure in enumerate(("nll", "brier", "ece")):
        of_one, apart = found["methods"]["one"][figure], against[figure]
        difference = expected["one"].mean(axis=0)[index] - expected["other"][0, index]
        np.testing.assert_allclose(apart["difference"], difference, atol=3e-6)
        assert of_one["low"] <= of_one["value"] <= of_one["high"]
        assert apart["low"] <= apart["difference"] <= apart["high"]
        if figure == "ece":  # its percentiles are biased: tests/metrics/test_intervals.py has its laws
            assert of_one["low"] <= of_one["debiased"] <= of_one["high"]
            continue
        for interval, values in ((of_one, one[:, index]), (apart, (one - other)[:, index])):
            low, high = np.quantile(values, [0.025, 0.975])
            error = max(abs(interval["low"] - low), abs(interval["high"] - high)) / (high - low)
            print(f"{figure}: ends of the interval are off by {error:.3f} of its width")
            assert error < 0.2


def test_every_variant_is_a_head_of_one_loss():
    run = fits.StudyOptions(model="", out=None)  # type: ignore[arg-type]
    for name, study in ABLATIONS.items():
        plans = {v: make_plan(run.variant(**changes), 64) for v, changes in study.variants.items()}
        assert len({(plan.head, plan.trials) for plan in plans.values()}) == len(plans), f"{name}: two alike"
        for variant, plan in plans.items():
            assert len(plan.trials) == 1, variant
            assert not plan.refit_temperature
            jax.eval_shape(plan.head.init, jax.random.key(0))
        assert set(study.against) | set(study.against.values()) <= set(plans)


def test_a_head_of_a_study_is_that_of_train_ats(tmp_path):
    options = AtsOptions(loss="label-smoothing", alpha=0.2, refit_temperature=False, epochs=2, batch_size=8, head="mlp")
    heads = fits.fit_heads(LM, SEQUENCES, {"v": options}, seeds=2, context=silent(tmp_path / "a"))
    assert [len(repeats) for repeats in heads.values()] == [1, 2]
    alone = fit_ats(LM, SEQUENCES, options, silent(tmp_path / "b", seed=1))
    for got, expected in ((heads["v"][1], alone.head), (heads[fits.SINGLE][0], alone.temperature)):
        chex.assert_trees_all_equal(got.params, expected.params)
    assert any(np.any(a != b) for a, b in zip(*(jax.tree.leaves(h.params) for h in heads["v"]), strict=True))


# --- the commands ---


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    on_one_device(monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_model(folder / "model")
    write_text(folder / "one.jsonl")
    write_text(folder / "two.jsonl", seed=1)
    rng = np.random.default_rng(0)
    subjects = [subject for of_domain in SUBJECTS.values() for subject in of_domain] + ["philosophy"]
    with (folder / "mmlu.jsonl").open("w") as file:
        for number in range(220):
            words = [WORDS[i] for i in rng.integers(0, 40, 14)]
            row = {"question": " ".join(words[:10]), "choices": words[10:], "answer": int(rng.integers(4))}
            file.write(json.dumps(row | {"subject": subjects[number % len(subjects)]}) + "\n")
    return folder


def study(files, out, name, *options):
    shared = ("--seq-len", "16", "--epochs", "1", "--seeds", "2", "--batch-size", "8", "--quiet", "--out", out)
    return main(["study", name, "--model", str(files / "model"), *map(str, (*shared, *options))])


def test_a_line_names_the_rows_that_differences_are_from():
    of = {"a": "temperature", "b": "a", "c": "a", "temperature": None}
    rows = {name: {"against": {"name": other}} if other else {} for name, other in of.items()}
    assert compared_with({"methods": rows}) == "Δ: of a from temperature scaling; of the others from a."
    assert compared_with({"methods": {"b": rows["b"]}}) == "Δ: from a."
    assert compared_with({"methods": {"temperature": {}}}) == ""


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("pooling", ("linear, token", "linear, sequence")),
        pytest.param("alpha", ("label-smoothing, 0.1", "label-smoothing, 0.5"), marks=pytest.mark.slow),
    ],
)
def test_an_ablation(files, tmp_path, monkeypatch, capsys, name, kept):
    whole = ABLATIONS[name]
    variants = {variant: {**whole.variants[variant], "head": "linear"} for variant in kept}
    against = {one: other for one, other in whole.against.items() if one in variants}
    monkeypatch.setitem(ABLATIONS, name, whole._replace(variants=variants, against=against))
    options = ("--data", files / "one.jsonl", "--eval-data", files / "two.jsonl")
    assert study(files, tmp_path / "out", name, *options) == 0
    printed = capsys.readouterr().out
    for text in (whole.question, *kept, "held out: ", "two: ", "±"):
        assert text in printed, text
    written = (tmp_path / "out" / "metrics.json").read_text()
    document = json.loads(written)
    assert list(document["sets"]) == ["held out", "two"]
    rows = document["sets"]["two"]["methods"]
    assert list(rows) == ["uncalibrated", "temperature", *kept]
    assert {len(rows[variant]["nll"]["seeds"]) for variant in kept} == {2}
    assert len({row["accuracy"]["value"] for row in rows.values()}) == 1
    assert [row["parameters"] for row in rows.values()] == [0, 1, 13, 13]
    assert rows[kept[1]]["against"]["name"] == (kept[0] if name == "pooling" else "temperature")
    for file in (f"{name}.png", f"{name}-1.png"):
        assert (tmp_path / "out" / file).read_bytes().startswith(b"\x89PNG")

    # Again: every head is there, none is fitted; other options are refused. The report is drawn again.
    monkeypatch.setattr(fits, "train_head", None)
    assert study(files, tmp_path / "out", name, *options) == 0
    assert (tmp_path / "out" / "metrics.json").read_text() == written
    assert study(files, tmp_path / "out", name, *options, "--learning-rate", "1e-3") == 2
    assert "learning_rate" in capsys.readouterr().err
    if name == "pooling":
        return  # once is enough of what follows
    page = (tmp_path / "out" / "report.html").read_text()
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.html").read_text().count("<svg") == page.count("<svg") > 0
    assert "report in" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "out"), str(tmp_path / "out"), "--out", str(tmp_path / "both")]) == 2
    assert "give its directory alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", ".", "/tmp/x", "a/b", ".hidden", "a\nb", "a\\b", "x" * 5000, "uncalibrated", "$\\frac$"],
)
def test_domains_are_named_after_directories_in_out(tmp_path, capsys, name):
    """The model is not there: names are checked before it is looked for."""
    out = tmp_path / "a" / "b"
    arguments = ["study", "transfer", "--model", str(tmp_path / "model"), "--out", str(out)]
    assert main([*arguments, "--domains", f"{name}=one.jsonl", "x=two.jsonl"]) == 2
    error = capsys.readouterr().err
    assert re.search("--domains: expected (names|a name (without|of at most))", error)
    assert len(error) < 400
    assert list(tmp_path.iterdir()) == []
    assert main([*arguments, "--domains", "Médecine 2.0_b+c-d=one.jsonl", "x=two.jsonl"]) == 2
    assert "--domains: one.jsonl does not exist" in capsys.readouterr().err, "the name is accepted"


@pytest.mark.slow
def test_transfer(files, tmp_path, capsys):
    domains = ("--domains", f"one={files / 'one.jsonl'}", "--mmlu", files / "mmlu.jsonl")
    assert study(files, tmp_path / "out", "transfer", "--json", *domains) == 0
    document = json.loads(capsys.readouterr().out)
    names = ["one", *SUBJECTS]
    assert list(document["sets"]) == names
    sizes = {of_set["windows"] for of_set in document["sets"].values()}
    assert max(sizes) - min(sizes) <= 1, "domains of one size"
    for target, of_set in document["sets"].items():
        rows = of_set["methods"]
        assert len(rows) == 1 + 2 * len(names)
        for source in names:
            row = rows[f"ats from {source}"]
            own = rows[f"{'temperature' if source == target else 'ats'} from {target}"]
            gap = row["nll"]["value"] - own["nll"]["value"]
            np.testing.assert_allclose(row["against"]["nll"]["difference"], gap, atol=1e-12)
    assert (tmp_path / "out" / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert study(files, tmp_path / "again", "transfer", "--domains", f"one={files / 'one.jsonl'}") == 2
    assert "at least two domains" in capsys.readouterr().err


def test_questions_become_text_with_the_right_answer():
    rows = [{"question": f"Q{i}?", "choices": ["no", f"yes {i}"], "answer": 1, "subject": "law"} for i in range(5)]
    rows += [{"question": "Other?", "choices": ["a", "b"], "answer": 0, "subject": "art"}]
    texts = answered_questions(Rows(rows, "x"), ("law",))
    assert sorted(row["text"] for row in texts) == [f"Q{i}?\nyes {i}" for i in range(5)]
