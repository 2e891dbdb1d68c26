"""The script that sets losses side by side runs, tells right from wrong, and writes what it found."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "kernels"
SMALL = ["--tokens", "32", "--width", "16", "--vocab", "131", "--repeats", "1"]
SPOIL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import bench, contenders
right = contenders._dense
contenders._dense = lambda problem, *arguments: right(problem, *arguments) + 0.1
bench.main(bench.arguments().parse_args())
"""


def run(command, file):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, *command, *SMALL, "--json", file], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("JSON:")
    return done.stdout, json.loads(file.read_text())


def test_bench_checks_times_and_records_every_contender(tmp_path):
    options = [
        "--label-smoothing",
        "0.1",
        "--softcap",
        "30",
        "--task",
        "statistics",
        "forward",
        "both",
        "hidden",
        "scale",
    ]
    table, record = run([FOLDER / "bench.py", *options], tmp_path / "bench.json")
    rows = record["results"]
    assert "label smoothing 0.1, soft-cap 30" in table
    assert len({row["task"] for row in rows}) == 5
    timed = [row for row in rows if "seconds" in row]
    assert all("note" in row for row in rows if row not in timed)
    assert {"dense jnp", "lax.scan over tokens", "vocab_stats chunked", "linear_cross_entropy chunked"} <= {
        row["contender"] for row in timed
    }
    for row in timed:
        assert row["error"] < 1e-5, row
        assert row["seconds"] > 0
        assert row["extra_bytes"] >= 0


def test_a_wrong_contender_is_marked_and_not_timed(tmp_path):
    command = ["-c", SPOIL, FOLDER, "--task", "forward", "--only", "dense", "chunked"]
    table, record = run(command, tmp_path / "bench.json")
    assert "WRONG" in table
    wrong = {row["contender"]: row for row in record["results"] if row.get("note") == "WRONG"}
    assert list(wrong) == ["dense jnp"]
    assert "seconds" not in wrong["dense jnp"]


def test_when_the_time_is_up_what_was_left_out_is_named(tmp_path):
    options = ["--task", "forward", "--only", "dense", "--softcap", "none", "30", "--minutes", "0"]
    table, record = run([FOLDER / "bench.py", *options], tmp_path / "bench.json")
    assert table.count("not run, the time was up") == 2
    assert [row["note"] for row in record["results"]] == ["not run: the time was up"] * 2


@pytest.mark.slow
def test_losses_of_pytorch_and_train_steps_stand_beside_ours(tmp_path):
    """As on a GPU, by processes of their own."""
    options = [
        "--torch",
        "--train-steps",
        "--task",
        "both",
        "--only",
        "dense",
        "torch eager",
        "liger",
        "--softcap",
        "30",
    ]
    table, record = run([FOLDER / "bench.py", *options], tmp_path / "bench.json")
    rows = {row["contender"]: row for row in record["results"]}
    assert rows["dense jnp"]["error"] < 1e-5
    if importlib.util.find_spec("torch") is None:
        assert "torch is not installed" in record["torch"]
    else:
        assert rows["torch eager"]["error"] < 1e-5
        assert rows["torch eager"]["ratio_to"] == "dense jnp"
        assert "torch liger-kernel" in rows
    ats, sft = record["train_steps"]
    assert 0 < ats["forward_ms"] < sft["step_ms"]
    assert (ats["products_forward"], ats["products_step"]) == (1, 1)
    assert "a small model, 2 layers: sft step" in table


@pytest.mark.slow
def test_without_a_gpu_nothing_is_begun_there(tmp_path):
    command = [sys.executable, FOLDER / "bench.py", "--platform", "gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "jax finds no GPU here" in done.stderr
