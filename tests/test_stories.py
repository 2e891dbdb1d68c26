"""The scripts to copy (`train/ats.py`, `eval/compare.py`, …) run, and their figures are those of the library."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from assets import require_asset as asset

import calibjax

ROOT = Path(__file__).parents[1]
MODEL, ALPACA, STORIES = "models/stories260K", "data/alpaca_en_demo", "data/tinystories_sample"


def run(script, **options):
    """Its `main` with these options; a script has at most 150 lines."""
    file = ROOT / script
    assert len(file.read_text().splitlines()) <= 150, script
    names = runpy.run_path(str(file))
    return names["main"](names["Options"](**options))


@pytest.mark.slow
def test_ats(tmp_path):
    """The base model's figures are exact; its temperature is that of `fit_ats`, and the head no worse than it."""
    model, data = str(asset(MODEL)), str(asset(ALPACA))
    figures = run("train/ats.py", model=model, data=data, out=tmp_path, rows=150, epochs=10).figures
    lm = calibjax.load_model(model)
    fit, held_out = calibjax.split_sequences(calibjax.load_text(data, lm, seq_len=256, max_sequences=150), 0.7)
    fitted = calibjax.fit_ats(lm, fit, calibjax.AtsOptions(head="linear", features="logit_statistics"))
    expected = calibjax.evaluate(lm, held_out, fitted.heads).figures
    assert figures["uncalibrated"] == expected["uncalibrated"]
    for name, by in (("temperature", 5e-3), ("ats", 2e-2)):
        assert abs(figures[name]["nll"].value - expected[name]["nll"].value) < by, name
    assert calibjax.load_head(tmp_path / "head", lm).config.kind == "mlp"


@pytest.mark.slow
def test_sft(tmp_path):
    model, data = str(asset(MODEL)), str(asset(ALPACA))
    options = {"rows": 100, "steps": 30, "seq_len": 128, "learning_rate": 1e-3}
    figures = run("train/sft.py", model=model, data=data, out=tmp_path, **options)
    nll = {name: evaluation.figures["uncalibrated"]["nll"].value for name, evaluation in figures.items()}
    assert nll["fine-tuned"] < nll["base"]
    assert calibjax.load_model(tmp_path / "model").config.vocab_size


@pytest.mark.slow
def test_lhts(tmp_path, monkeypatch):
    """Below temperature 1 the student's text is likelier, under the scorer, than the scorer's own.

    A run that was stopped after its first checkpoint resumes to the same bits.
    """
    options = {"model": str(asset(MODEL)), "data": str(asset(STORIES)), "rows": 100}
    options |= {"steps": 20, "save_every": 5, "temperature": 0.8, "learning_rate": 1e-4}
    likelihood = run("train/lhts.py", out=tmp_path / "whole", **options)
    assert likelihood["student"] > likelihood["scorer"] - 0.2

    def stop(line):
        if line.startswith("step 10"):
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop)
    with pytest.raises(KeyboardInterrupt):
        run("train/lhts.py", out=tmp_path / "stopped", **options)
    monkeypatch.undo()
    assert run("train/lhts.py", out=tmp_path / "stopped", **options) == likelihood


@pytest.mark.slow
def test_layers(tmp_path):
    """The last layer's figures are those of `evaluate`."""
    model, data = str(asset(MODEL)), str(asset(STORIES))
    rows = run("eval/layers.py", model=model, data=data, out=tmp_path / "layers.png", rows=16)
    lm = calibjax.load_model(model)
    expected = calibjax.evaluate(lm, calibjax.load_text(data, lm, seq_len=128, max_sequences=16))
    np.testing.assert_allclose(rows[-1]["ece"], expected.figures["uncalibrated"]["ece"].value, atol=2e-5)
    assert (tmp_path / "layers.png").stat().st_size > 0


def test_compare(tmp_path):
    """On overconfident logits temperature scaling finds the temperature, and the file reads back."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 4)).astype(np.float32)
    np.savez(tmp_path / "table.npz", logits=3 * logits, labels=(logits + rng.gumbel(size=logits.shape)).argmax(axis=1))
    run("eval/compare.py", table=tmp_path / "table.npz", out=tmp_path / "out", methods=("temperature", "vector"))
    fitted = calibjax.recalibrate.load(tmp_path / "out" / "method")
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    np.testing.assert_allclose(fitted(logits=3 * logits[:1])[0], expected, atol=0.15)


@pytest.mark.slow
def test_tasks(tmp_path):
    rows = [
        {"question": f"After {i}?", "options": [str(i + k) for k in range(3 + i % 2)], "answer": i % 3}
        for i in range(40)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    comparison = run("eval/tasks.py", model=str(asset(MODEL)), questions=tmp_path / "questions.jsonl")
    assert set(comparison.states) == {"uncalibrated", "temperature"}
