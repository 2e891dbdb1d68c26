"""The scripts to copy (`train/ats.py`, `eval/compare.py`, …) run, and their figures are those of the library."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from assets import require_asset as asset
from tiny import make_lm

import calibjax

ROOT = Path(__file__).parents[1]
MODEL, ALPACA, STORIES = "models/stories260K", "data/alpaca_en_demo", "data/tinystories_sample"


def read(script):
    """Its names; a script has at most 150 lines."""
    file = ROOT / script
    assert len(file.read_text().splitlines()) <= 150, script
    return runpy.run_path(str(file))


def run(script, **options):
    """Its `main` with these options."""
    names = read(script)
    return names["main"](names["Options"](**options))


@pytest.mark.slow
def test_ats(tmp_path):
    """The base model's figures are exact; its temperature is that of `fit_ats`, and the head no worse than it."""
    model, data = str(asset(MODEL)), str(asset(ALPACA))
    figures = run("train/ats.py", model=model, data=data, out=tmp_path, max_sequences=150, epochs=10).results
    lm = calibjax.load_model(model)
    fit, held_out = calibjax.split_sequences(calibjax.load_text(data, lm, seq_len=256, max_sequences=150), 0.7)
    fitted = calibjax.fit_ats(lm, fit, calibjax.AtsOptions(head_kind="linear", features=("logit_statistics",)))
    expected = calibjax.evaluate(lm, held_out, fitted.heads).results
    assert figures["uncalibrated"] == expected["uncalibrated"]
    for name, by in (("temperature", 5e-3), ("ats", 2e-2)):
        assert abs(figures[name]["nll"].value - expected[name]["nll"].value) < by, name
    assert calibjax.load_head(tmp_path / "head", lm).config.kind == "mlp"


@pytest.mark.slow
def test_sft(tmp_path):
    model, data = str(asset(MODEL)), str(asset(ALPACA))
    options = {"max_sequences": 100, "steps": 30, "seq_len": 128, "learning_rate": 1e-3}
    figures = run("train/sft.py", model=model, data=data, out=tmp_path, **options)
    nll = {name: evaluation.results["uncalibrated"]["nll"].value for name, evaluation in figures.items()}
    assert nll["fine-tuned"] < nll["base"]
    assert calibjax.load_model(tmp_path / "model").config.vocab_size


@pytest.mark.slow
def test_lhts(tmp_path, monkeypatch):
    """Below temperature 1 the student's text is likelier, under the scorer, than the scorer's own.

    A run that was stopped after its first checkpoint resumes to the same bits.
    """
    options = {"model": str(asset(MODEL)), "data": str(asset(STORIES)), "max_sequences": 100}
    options |= {"steps": 20, "save_every": 5, "temperature": 0.8, "learning_rate": 1e-4}
    likelihood = run("train/lhts.py", out=tmp_path / "whole", **options)
    assert likelihood["student"] > likelihood["scorer"]

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
    """Every layer's figures are those of the norm and the unembedding of transformers at its hidden states."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, data = str(asset(MODEL)), str(asset(STORIES))
    rows = run("eval/layers.py", model=directory, data=data, out=tmp_path / "figures" / "layers.png", max_sequences=16)
    assert (tmp_path / "figures" / "layers.png").stat().st_size > 0
    sequences = calibjax.load_text(data, calibjax.load_model(directory), seq_len=128, max_sequences=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    confidences, rights = [], []
    for row, segments in enumerate(sequences.segment_ids):
        for segment in range(1, segments.max() + 1):
            text = segments == segment
            with torch.no_grad():
                tokens = torch.from_numpy(sequences.tokens[row, text]).long()
                states = model(tokens[None], output_hidden_states=True).hidden_states
                normed = torch.cat([*map(model.model.norm, states[:-1]), states[-1]])  # [L + 1, T, D]
                confidence, token = model.lm_head(normed).softmax(-1).max(-1)
            where = sequences.where[row, text]
            confidences.append(confidence.numpy()[:, where])
            rights.append((token.numpy() == sequences.targets[row, text])[:, where])
    for name, values in (("confidence", confidences), ("accuracy", rights)):
        expected = np.concatenate(values, axis=1).mean(axis=1)
        atol = 1e-4 if name == "confidence" else 1e-3  # the largest of two nearly equal logits may be either
        np.testing.assert_allclose([row[name] for row in rows], expected, atol=atol, err_msg=name)


def test_compare(tmp_path):
    """On overconfident logits temperature scaling finds the temperature, and the file reads back."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 4)).astype(np.float32)
    np.savez(tmp_path / "table.npz", logits=3 * logits, labels=(logits + rng.gumbel(size=logits.shape)).argmax(axis=1))
    run("eval/compare.py", table=tmp_path / "table.npz", out=tmp_path / "out", methods=("temperature", "vector"))
    fitted = calibjax.recalibrate.load(tmp_path / "out" / "method")
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    np.testing.assert_allclose(fitted(logits=3 * logits[:1])[0], expected, atol=0.15)


def test_a_missing_file_is_reported_in_one_line():
    command = [sys.executable, "eval/compare.py", "--table", "missing.npz", "--out", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert done.stderr == "error: missing.npz: there is no such file.\n"


def test_the_figure_of_compare_is_of_the_predictions_of_the_winner(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(600, 4))
    labels = (logits + np.array([3, 0, 0, -1]) + rng.gumbel(size=logits.shape)).argmax(axis=1)
    np.savez(tmp_path / "table.npz", logits=logits, labels=labels)
    drawn = []
    monkeypatch.setattr("calibjax.plot.reliability", lambda confidence, correct, ax: drawn.append(correct.mean()))
    got = run("eval/compare.py", table=tmp_path / "table.npz", out=tmp_path / "out", methods=("vector",))
    assert got.winner == "vector"
    np.testing.assert_allclose(drawn, got.document["methods"]["vector"]["accuracy"])


@pytest.mark.slow
def test_tasks(tmp_path):
    rows = [
        {"question": f"After {i}?", "options": [str(i + k) for k in range(3 + i % 2)], "answer": i % 3}
        for i in range(40)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    comparison = run("eval/tasks.py", model=str(asset(MODEL)), questions=tmp_path / "questions.jsonl")
    assert set(comparison.states) == {"uncalibrated", "temperature"}


def test_letters_of_a_capped_model():
    """The logits of letters have the bias and the soft-cap of the model's own logits."""
    tokenizer = calibjax.load_model(str(asset(MODEL))).tokenizer
    capped = make_lm(vocab_size=512, logit_softcap=5.0, unembedding_bias=True, max_positions=128)
    bias = jnp.linspace(-2, 2, 512)
    lm = calibjax.LanguageModel.from_params(capped.config, {**capped.params, "unembedding_bias": bias}, tokenizer)
    rows = [{"question": "After 1?", "options": ["2", "3", "4"]}, {"question": "After 2 and 3?", "options": ["5", "4"]}]
    names = read("eval/tasks.py")
    logits = names["letter_logits"](lm, rows, 2)
    letters = [tokenizer.encode(f" {letter}", add_special_tokens=False)[-1] for letter in "ABC"]
    for row, got in zip(rows, logits, strict=True):
        count = len(row["options"])
        expected = lm.logits([tokenizer.encode(names["prompt"](row))])[0, -1, np.array(letters[:count])]
        np.testing.assert_allclose(got[:count], expected, rtol=1e-5)
        assert np.all(got[count:] == -np.inf)
