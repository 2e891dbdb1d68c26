"""Studies of answers, samples of a head's distribution, and a run of samples that is killed."""

import csv
import dataclasses
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")

from rich.cells import cell_len
from tiny import ONE_DEVICE, WORDS, write_model, write_text

from calibjax.cli import main
from calibjax.commands import eval_tasks
from calibjax.commands.common import DataOptions
from calibjax.commands.eval_tasks import EvalTasksOptions, temperature_head
from calibjax.eval.answers.judges import plain_text
from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import load_model
from calibjax.models.generate import generate
from calibjax.train import load_head, save_head
from calibjax.train.ats import fit_temperature_head

pytestmark = pytest.mark.slow
K, COUNT, TEMPERATURE = 4, 300, 0.4


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, a head of one temperature, and questions of which the model may answer half."""
    folder = tmp_path_factory.mktemp("material")
    lm = load_model(write_model(folder / "model"))
    rng = np.random.default_rng(0)
    contexts = [f"Question: {' '.join(rng.choice(WORDS, rng.integers(1, 6)))}\nAnswer:" for _ in range(COUNT)]
    texts = generate(lm, contexts, max_new_tokens=2).texts(lm.tokenizer)
    (folder / "data" / "triviaqa").mkdir(parents=True)
    with gzip.open(folder / "data" / "triviaqa" / "triviaqa_sm_sub.jsonl.gz", "wt") as out:
        for n, (context, text) in enumerate(zip(contexts, texts, strict=True)):
            out.write(json.dumps({"context": context, "answer": "w0", "aliases": [text if n % 2 else "w1"]}) + "\n")
    config = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
    head = FittedHead(config, {"log_scale": jnp.float32(-np.log(TEMPERATURE))}, 0.0, lm.fingerprint)
    save_head(folder / "head", head, notes={"temperature": TEMPERATURE})
    return folder, lm, head


def arguments(folder, *more):
    given = ["--model", folder / "model", "--tasks", "triviaqa", "--assets", folder, "--max-new-tokens", "2", "--quiet"]
    return [*map(str, given), "--samples", str(K), *map(str, more)]


def read_samples(folder):
    """Number of the first question of a file -> samples, in the order of the questions."""
    files = sorted(folder.glob("**/*.json"), key=lambda file: int(file.stem.rpartition("-")[2]))
    return [[plain_text(text) for text, _ in row] for file in files for row in json.loads(file.read_text())["samples"]]


def fits_a_pipe(lines, out, verdict):
    """What follows the log: the verdict, lines of 80 columns, and where the results are."""
    start = next(number for number, line in enumerate(lines) if line.startswith(verdict))
    assert max(map(cell_len, lines[start:-1])) <= 80
    assert lines[-1].startswith(f"results in {out}: report.html")


def test_samples_of_a_head(material, tmp_path):
    """Those of a head of one temperature are those of the base model at that temperature, with the same keys."""
    folder, lm, head = material
    shared = {"model": str(folder / "model"), "tasks": ("triviaqa",), "assets": folder, "max_new_tokens": 2}
    base = EvalTasksOptions(**shared, quiet=True, confidence=("consistency",), samples=K, limit=40, out=tmp_path / "a")
    eval_tasks.run(dataclasses.replace(base, sampling_temperature=TEMPERATURE), log=lambda _: None)
    of_head = dataclasses.replace(base, head=folder / "head", sample_calibrated=True, out=tmp_path / "b")
    eval_tasks.run(of_head, log=lambda _: None)
    a, b = (read_samples(tmp_path / name / "answers" / "samples") for name in "ab")
    assert np.mean([x == y for x, y in zip(a, b, strict=True)]) > 0.95  # but where rounding decides
    np.testing.assert_array_equal(temperature_head(lm, TEMPERATURE).params["log_scale"], head.params["log_scale"])


def test_temperature_against_a_head(material, tmp_path, capsys):
    """A head that is one temperature gives temperature scaling's figures, to the last digit; and resumes."""
    folder = material[0]
    given = arguments(folder, "--head", folder / "head", "--limit", "60", "--confidence", "consistency", "minimum")
    assert main(["study", "confidence", *given, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    fits_a_pipe(lines, tmp_path / "out", "ATS and temperature scaling do not differ beyond noise")
    assert sum(line.startswith(("  length_normalised  ", "  consistency  ", "  minimum  ")) for line in lines) == 3
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert list(document["tasks"]) == [f"triviaqa, {name}" for name in ("length_normalised", "consistency", "minimum")]
    for title, of_set in document["tasks"].items():
        rows = of_set["methods"]
        assert rows["ats"]["ece"] == rows["temperature"]["ece"]
        assert rows["ats"]["against"]["brier"]["difference"] == 0
        assert rows["uncalibrated"]["accuracy"] == rows["temperature"]["accuracy"]
        assert rows["uncalibrated"]["brier"] != rows["temperature"]["brier"], title
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "answers").glob("**/*.json")}
    assert len(times) == 3
    assert main(["study", "confidence", *given, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert all(file.stat().st_mtime_ns == when for file, when in times.items())


def test_losses_and_clipping(material, tmp_path, capsys):
    """Heads fitted to text, one for each loss: rows, paired differences, the same answers; resumes, but not for
    other text."""
    folder, lm, _ = material
    data = tmp_path / "data.jsonl"
    write_text(data, rows=40, words=16)
    given = ["--data", data, "--seq-len", "13", "--losses", "cross-entropy,focal", "--confidence", "consistency"]
    given = arguments(folder, *given, "--limit", "60", "--out", tmp_path / "out")
    assert main(["study", "confidence", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    fits_a_pipe(lines, tmp_path / "out", ("WARNING: no correction beats", "cross-entropy is", "focal is", "feature_"))
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    rows = document["tasks"]["triviaqa, length_normalised"]["methods"]
    assert {*rows} == {"uncalibrated", "temperature", "feature_clipping", "cross-entropy", "focal"}
    assert len({row["brier"] for name, row in rows.items() if name != "feature_clipping"}) == 4
    assert len({row["accuracy"] for name, row in rows.items() if name != "feature_clipping"}) == 1
    assert "against" not in rows["temperature"] or not rows["temperature"]["against"]
    for name in ("cross-entropy", "focal"):
        against = rows[name]["against"]["auroc"]
        assert against["difference"] == pytest.approx(rows[name]["auroc"] - rows["temperature"]["auroc"], abs=1e-6)
        assert against["low"] <= against["difference"] <= against["high"]
    (kept,) = (tmp_path / "out" / "heads").iterdir()
    fitted = load_head(kept / "temperature" / "0", lm)
    sequences = DataOptions(seq_len=13).read(str(data), lm, lambda _: None)
    alone = fit_temperature_head(lm, sequences, 16)
    np.testing.assert_allclose(fitted.params["log_scale"], alone.params["log_scale"], atol=1e-5)
    assert main(["study", "confidence", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    write_text(data, rows=40, words=16, seed=1)
    assert main(["study", "confidence", *given]) == 2
    assert "its answers are of a model or head with other weights" in capsys.readouterr().err


def test_more_samples(material, tmp_path, capsys):
    """Accuracy and confidence of the majority of the first k samples, by hand."""
    folder = material[0]
    assert main(["study", "samples", *arguments(folder, "--limit", "60", "--out", tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    fits_a_pipe(lines, tmp_path / "out", ("More samples are better calibrated: 4 samples", "WARNING: "))
    rows = [found[1] for line in lines if (found := re.match(r"(greedy answer|\d samples) +[\d.]", line))]
    assert rows == ["greedy answer", "2 samples", "4 samples"]
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    (of_set,) = document["tasks"].values()
    assert sorted(of_set["methods"]) == ["2 samples", "4 samples", "greedy"]
    assert of_set["reference"] == "2 samples"
    drawn = read_samples(tmp_path / "out" / "answers")
    assert len(drawn) == 60
    for k in (2, 4):
        most = [max(row[:k].count(text) for text in row[:k]) / k for row in drawn]
        assert of_set["methods"][f"{k} samples"]["confidence"] == pytest.approx(np.mean(most), abs=1e-6)
    assert main(["study", "samples", *arguments(folder, "--tasks", "truthfulqa_mc1", "--out", tmp_path / "no")]) == 2


def test_a_killed_run_of_samples(material, tmp_path):
    """SIGKILL after the first 256 of 300 questions have their samples; the same table as without."""
    folder = material[0]

    def command(out):
        given = arguments(folder, "--confidence", "consistency", "semantic_entropy", "--out", out, "--batch-size", "64")
        return [sys.executable, "-m", "calibjax", "eval", "tasks", *given]

    environment = {**os.environ, **ONE_DEVICE}
    subprocess.run(command(tmp_path / "whole"), check=True, env=environment, capture_output=True)
    killed = subprocess.Popen(command(tmp_path / "killed"), env=environment, stdout=subprocess.DEVNULL)
    samples, deadline = tmp_path / "killed" / "answers" / "samples", time.monotonic() + 300
    while not list(samples.glob("*.json")) and time.monotonic() < deadline:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "metrics.json").exists()
    (first,) = samples.glob("*.json")
    before = first.read_bytes()
    subprocess.run(command(tmp_path / "killed"), check=True, env=environment, capture_output=True)
    assert first.read_bytes() == before
    tables = [(tmp_path / name / "answers" / "triviaqa.csv").read_bytes() for name in ("whole", "killed")]
    assert tables[0] == tables[1]
    assert len(list(csv.reader(tables[0].decode().splitlines()))) == COUNT + 1
