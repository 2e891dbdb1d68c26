"""Short runs of two campaigns: kills (a run that is killed ends with the same files), and a long run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train ats", "train sft", "train lhts"])
def test_killed(command):
    arguments = ["--commands", command, "--processes", "1", "--kills", "3", "--per-run", "3"]
    run = subprocess.run(
        [sys.executable, CAMPAIGNS / "kills.py", *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    totals = next(row for row in rows if "lost" in row)
    assert totals["kills"] >= 1
    assert totals["lost"] == 0


@pytest.mark.slow
def test_a_long_run():
    """Flat memory, one program, the last two checkpoints."""
    command = [sys.executable, CAMPAIGNS / "long_run.py", "--steps", "200"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
