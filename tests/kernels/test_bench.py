"""The script that compares losses: it runs, marks wrong results, and records everything."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "kernels"
SMALL = ["--tokens", "32", "--width", "16", "--vocab", "131", "--repeats", "1"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("bench")


@pytest.fixture
def run(bench, tmp_path, capsys):
    """What the script prints and writes for some options."""

    def run(*options):
        file = tmp_path / "bench.json"
        bench.main(bench.arguments().parse_args([*SMALL, *options, "--json", str(file)]))
        printed = capsys.readouterr().out
        assert printed.splitlines()[-1].startswith("JSON:")
        return printed, json.loads(file.read_text())

    return run


@pytest.mark.slow
def test_bench_checks_times_and_records_every_contender(run):
    tasks = ["statistics", "both", "scale"]
    table, record = run("--label-smoothing", "0.1", "--softcap", "30", "--task", *tasks)
    rows = record["results"]
    assert "label smoothing 0.1, soft-cap 30" in table
    assert {row["task"] for row in rows} == set(tasks)
    timed = [row for row in rows if "seconds" in row]
    assert all("note" in row for row in rows if row not in timed)
    contenders = {row["contender"] for row in timed}
    assert {"dense jnp", "lax.scan over tokens", "vocab_stats chunked", "linear_cross_entropy chunked"} <= contenders
    for row in timed:
        assert row["error"] < 1e-5, row
        assert row["seconds"] > 0
        assert row["extra_bytes"] >= 0


def test_a_wrong_contender_is_marked_and_not_timed(bench, run, monkeypatch):
    right = bench.contenders._optax
    monkeypatch.setattr(bench.contenders, "_optax", lambda problem, *arguments: right(problem, *arguments) + 0.1)
    table, record = run("--task", "forward", "--only", "optax", "chunked")
    assert "WRONG" in table
    wrong = {row["contender"]: row for row in record["results"] if row.get("note") == "WRONG"}
    assert list(wrong) == ["optax"]
    assert "seconds" not in wrong["optax"]


def test_what_the_time_limit_skips_is_listed(run):
    table, record = run("--task", "forward", "--only", "dense", "--softcap", "none", "30", "--minutes", "0")
    assert table.count("not run: time limit reached") == 2
    assert [row["note"] for row in record["results"]] == ["not run: time limit reached"] * 2


@pytest.mark.slow
def test_a_wrong_loss_of_pytorch_is_marked(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(FOLDER)
    torch_losses = importlib.import_module("torch_losses")
    plain = torch_losses._plain

    def nan_in_one_gradient(torch, problem):
        return lambda h, w, y: plain(torch, problem)(h, w, y) + (w[0, 0] - w[0, 0]).sqrt()

    losses = {
        "right": plain,
        "no label smoothing": lambda torch, problem: plain(torch, problem | {"label_smoothing": 0.0}),
        "no soft-cap": lambda torch, problem: plain(torch, problem | {"softcap": None}),
        "NaN": nan_in_one_gradient,
    }
    monkeypatch.setattr(torch_losses, "LOSSES", losses)
    small = {"tokens": 64, "width": 32, "vocab": 300, "label_smoothing": 0.1, "softcap": 30.0}
    problems = [{**small, "dtype": dtype} for dtype in torch_losses.TOLERANCE]
    options = {"device": "cpu", "seed": 0, "repeats": 1, "tasks": ["forward", "both"], "only": None}
    for row in torch_losses.main(problems, **options):
        right = row["contender"] == "right" or (row["contender"], row["task"]) == ("NaN", "forward")
        assert row.get("note") == (None if right else "WRONG"), row
        assert ("seconds" in row) == right, row
