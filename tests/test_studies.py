"""Scripts of studies end as commands do; the laws of `eval/studies.py`."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from tiny import answered, make_lm, make_sequences, on_one_device, ragged, silent, write_model, write_text

from calibjax import fit_ats
from calibjax.eval.tokens import evaluate_tokens, results_json
from calibjax.heads import FittedHead
from calibjax.losses import LOSSES
from calibjax.train import AtsOptions, options
from calibjax.train.options import make_plan

ROOT = Path(__file__).parents[1]


NO_DATA = "error: --assets: none/data does not exist."
SCRIPTS = {
    "train/study_recipes --assets none --out out": NO_DATA,
    "train/pretrain --assets none --out out": NO_DATA,
    "kernels/bench --repeats 0": "bench.py: error: argument --repeats: expected at least 1, got 0",
    "eval/quantised model data --types F32 Q4": "quantised.py: error: argument --types: invalid choice: 'Q4'",
}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_wrong_option_ends_with_one_line(command, monkeypatch, capsys, tmp_path):
    script, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    for folder in ("train", "train/recipes", "eval", "kernels"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    assert capsys.readouterr().err.splitlines()[-1].startswith(SCRIPTS[command])
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_ats_beside_the_authors_method(monkeypatch, tmp_path, capsys):
    """It refuses to time a head that is not theirs after the same steps, such as one of another loss."""
    pytest.importorskip("torch")
    monkeypatch.setattr("calibjax.RunContext", silent)
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    bench = importlib.import_module("bench_beside")
    files = [str(write_model(tmp_path / "model")), "--data", str(write_text(tmp_path / "data.jsonl"))]
    options = ["--jobs", "ats", "--rounds", "1", "--sequences", "16", "--seq-len", "17"]
    monkeypatch.setattr(sys, "argv", ["bench_beside.py", *files, *options])
    bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ATS")]
    assert [row.split(" | ")[1] for row in rows] == ["calibjax", "PyTorch", "calibjax, default"]
    monkeypatch.setitem(LOSSES, "selective-authors", LOSSES["selective"])
    jax.clear_caches()  # programs are found by the name of the loss
    with pytest.raises(AssertionError, match="the losses differ"):
        bench.main()


LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(30)))


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    monkeypatch.delitem(sys.modules, "studies", raising=False)
    return importlib.import_module("studies")


def figures_of(log_scale):
    """`FIGURES` of the sequences, as `eval/test_tokens.py` holds them against the dense logits."""
    heads = {"uncalibrated": FittedHead.constant(LM, log_scale)}
    row = results_json(evaluate_tokens(LM, SEQUENCES, heads, bins=5, context=silent()))["methods"]["uncalibrated"]
    return np.array([row["nll"], row["brier"], row["ece"]["value"], row["accuracy"], row["confidence"]])


def test_figures_are_means_over_seeds_with_paired_intervals(studies):
    scales = {"one": (-0.4, -0.9), "other": (0.0,)}
    heads = {"one": [FittedHead.constant(LM, s) for s in scales["one"]], "other": [FittedHead.constant(LM)]}
    got = studies.evaluate_repeats(LM, SEQUENCES, heads, {"one": "other"}, bins=5, context=silent())
    assert (got["tokens"], got["sequences"]) == (int(SEQUENCES.where.sum()), 30)
    expected = {name: np.array([figures_of(s) for s in of_name]) for name, of_name in scales.items()}
    for name, of_name in expected.items():
        row = got["methods"][name]
        for figure, seeds in zip(studies.FIGURES, of_name.T, strict=True):
            np.testing.assert_allclose(row[figure]["seeds"], seeds, rtol=2e-5, err_msg=f"{name} {figure}")
            np.testing.assert_allclose(row[figure]["value"], seeds.mean(), rtol=2e-5)
    assert "against" not in got["methods"]["other"]
    against = got["methods"]["one"]["against"]
    assert against["name"] == "other"
    for index, figure in enumerate(("nll", "brier", "ece")):
        of_one, apart = got["methods"]["one"][figure], against[figure]
        difference = expected["one"].mean(axis=0)[index] - expected["other"][0, index]
        np.testing.assert_allclose(apart["difference"], difference, atol=3e-6)
        assert of_one["low"] <= of_one["value"] <= of_one["high"]
        assert apart["low"] <= apart["difference"] <= apart["high"]


@pytest.mark.parametrize("name", ["pooling", "losses", "alpha", "heads"])
def test_every_variant_is_a_head_of_one_loss(studies, name):
    study = studies.Study(name=name, model="", data=(), out=Path())
    variants, against = studies.variants_of(name)
    plans = {variant: make_plan(study.head(**changes), 64) for variant, changes in variants.items()}
    assert len({(plan.heads[-1], plan.trials) for plan in plans.values()}) == len(plans), "two are alike"
    for plan in plans.values():
        assert len(plan.trials) == 1
        assert not plan.refit_temperature
        jax.eval_shape(plan.heads[-1].init, jax.random.key(0))
    assert set(against) | set(against.values()) <= set(plans)


@pytest.mark.slow
def test_a_head_of_a_study_is_that_of_train_ats(studies, tmp_path):
    steps = {"head_kind": "mlp", "epochs": 2, "batch_size": 8}
    chosen = AtsOptions(loss="label-smoothing", alpha=0.2, refit_temperature=False, **steps)
    heads = studies.fit_heads(LM, SEQUENCES, {"v": chosen}, 2, silent(tmp_path / "a"))
    assert [len(repeats) for repeats in heads.values()] == [1, 2]
    alone = fit_ats(LM, SEQUENCES, chosen, silent(tmp_path / "b", seed=1))
    for got, expected in ((heads["v"][1], alone.head), (heads[studies.TEMPERATURE][0], alone.temperature)):
        chex.assert_trees_all_equal(got.params, expected.params)
    assert any(np.any(a != b) for a, b in zip(*(jax.tree.leaves(h.params) for h in heads["v"]), strict=True))


@pytest.mark.slow
def test_a_study_of_transfer(studies, monkeypatch, tmp_path, capsys):
    on_one_device(monkeypatch)
    monkeypatch.setattr(options, "AUTO", options.AUTO[:1])
    model, sets = write_model(tmp_path / "model"), [write_text(tmp_path / f"{n}.jsonl", seed=n) for n in range(2)]
    text = studies.DataOptions(seq_len=16)
    shared = {"model": str(model), "data": tuple(map(str, sets)), "out": tmp_path / "out", "text": text}
    study = studies.Study(name="transfer", **shared)
    studies.main(study)
    written = (tmp_path / "out" / "metrics.json").read_text()
    for of_set in json.loads(written)["sets"].values():
        rows = of_set["methods"]
        assert len(rows) == 5
        for source in "01":
            row = rows[f"ATS from {source}"]
            scaled = rows[f"temperature scaling from {source}"]
            gap = row["nll"]["value"] - scaled["nll"]["value"]
            np.testing.assert_allclose(row["against"]["nll"]["difference"], gap, atol=1e-12)
    printed = capsys.readouterr().out
    assert "| ATS from 0 |" in printed
    assert "| carried (2) | nll |" in printed
    monkeypatch.setattr(studies, "fit_ats", None)  # every head is there
    studies.main(study)
    assert (tmp_path / "out" / "metrics.json").read_text() == written
