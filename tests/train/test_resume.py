"""Killed with SIGKILL at any step and started again, a run ends with the same head or model, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
from tiny import ONE_DEVICE, write_model, write_text

from calibjax.train import load_head

STEPS = 40  # 108 sequences in 4 folds of 27, 3 epochs, batches of 6
SHARED = ("--seq-len", "13", "--full-sequences", "--batch-size", "6", "--epochs", "3", "--checkpoint-every", "3")
OPTIONS = {
    "ats": [*SHARED, "--loss", "auto", "--alpha", "0.1", "--head-kind", "mlp", "--learning-rate", "0.01"],
    "sft": [*SHARED, "--learning-rate", "0.01", "--mesh", "data=1"],
    "lhts": [
        *(*SHARED, "--learning-rate", "0.01", "--mesh", "data=1", "--temperatures", "0.9", "0.5", "--samples", "0.5"),
        *("--no-partition", "--texts", "6", "--text-prompt-tokens", "2", "--myopic", "1"),
    ],
}


class Run:
    """`calibjax train ats`, or `sft`, in a process of its own, on one device."""

    def __init__(self, folder, out, command="ats"):
        arguments = ["train", command, "--model", str(folder / "model"), "--data", str(folder / "data.jsonl")]
        self.out = out
        self.command = [
            sys.executable,
            "-m",
            "calibjax",
            *arguments,
            "--out",
            str(out),
            "--quiet",
            *OPTIONS[command],
        ]
        # The second start need not compile again what the first has compiled.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.environment = os.environ | cache | ONE_DEVICE

    def finish(self):
        done = subprocess.run(self.command, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_when(self, condition):
        """Starts the run and kills it without warning once the condition holds; returns what it then had done."""
        with subprocess.Popen(
            self.command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as run:
            deadline = time.monotonic() + 240
            while not condition():
                assert run.poll() is None, f"ended before it was killed: {run.stdout.read().decode()}"
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(run.pid, signal.SIGKILL)
            run.communicate()
            assert run.returncode == -signal.SIGKILL
        assert not (self.out / "metrics.json").exists(), "it had finished: kill it earlier"

    def log(self, trial):
        return self.out / "fit" / trial / "train.jsonl"

    def logged(self, trial):
        return [json.loads(line) for line in self.log(trial).read_text().splitlines()]


def lines_in(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def assert_same(run, whole, trials):
    one, other = load_head(run.out), load_head(whole.out)
    chex.assert_trees_all_equal(one.params, other.params, strict=True)
    assert one.log_factor == other.log_factor
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one.params)) > 1e-3
    first, second = (json.loads((r.out / "metrics.json").read_text()) for r in (run, whole))
    assert first == second
    for trial in trials:
        rows = [[(row["step"], row["loss"], row["grad_norm"]) for row in r.logged(trial)] for r in (run, whole)]
        assert rows[0] == rows[1]


@pytest.mark.slow
def test_killed(tmp_path):
    """With `--loss auto`, while the second of the losses is tried: the first is finished, this one is in the middle."""
    write_model(tmp_path / "model")
    write_text(tmp_path / "data.jsonl", rows=180, words=16)
    whole, run = Run(tmp_path, tmp_path / "whole"), Run(tmp_path, tmp_path / "killed")
    whole.finish()
    first, trial = "folds/3/mlp-cross-entropy", "folds/0/mlp-joint-0.1"
    assert whole.logged(first)[-1]["step"] == STEPS
    run.kill_when(lambda: lines_in(run.log(trial)) >= 3)
    last = max(int(entry.name) for entry in (run.log(trial).parent / "checkpoints").iterdir() if entry.name.isdigit())
    print(f"killed after step {run.logged(trial)[-1]['step']}, with a checkpoint of step {last}")
    assert not (run.out / "fit/folds/1/mlp-joint-0.1").exists()
    run.finish()
    assert_same(run, whole, [first, trial])


TUNED = {
    "sft": ("fit", ("model/model.safetensors", "metrics.json")),
    "lhts": ("fit/lhts", ("models/lhts-T0.9/model.safetensors", "models/lhts-T0.5/model.safetensors", "metrics.json")),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", TUNED)
def test_killed_while_fine_tuning(tmp_path, command):
    write_model(tmp_path / "model")
    write_text(tmp_path / "data.jsonl", rows=180, words=16)
    whole, run = Run(tmp_path, tmp_path / "whole", command), Run(tmp_path, tmp_path / "killed", command)
    whole.finish()
    fit, files = TUNED[command]
    log = run.out / fit / "train.jsonl"
    run.kill_when(lambda: lines_in(log) >= 3)
    checkpoints = {entry.name for entry in (log.parent / "checkpoints").iterdir()}
    print(f"killed with {lines_in(log)} lines logged and checkpoints {sorted(checkpoints)}")
    run.finish()
    for file in files:
        assert (run.out / file).read_bytes() == (whole.out / file).read_bytes(), file
    rows = [[json.loads(line) for line in (r.out / fit / "train.jsonl").read_text().splitlines()] for r in (run, whole)]
    for row in (*rows[0], *rows[1]):
        row.pop("tokens_per_second", None)
    assert rows[0] == rows[1]
    assert len(rows[0]) > 8
