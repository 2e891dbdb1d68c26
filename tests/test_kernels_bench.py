"""The script that sets losses side by side runs, tells right from wrong, and writes what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
    return done.stdout, json.loads(file.read_text())["results"]


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
    table, rows = run([FOLDER / "bench.py", *options], tmp_path / "bench.json")
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
    table, rows = run(command, tmp_path / "bench.json")
    assert "WRONG" in table
    wrong = {row["contender"]: row for row in rows if row.get("note") == "WRONG"}
    assert list(wrong) == ["dense jnp"]
    assert "seconds" not in wrong["dense jnp"]
