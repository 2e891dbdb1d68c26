"""Some runs of `tests/campaigns/kills.py`: killed with SIGKILL and started again, a run ends with the same files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "kills.py"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train ats", "train sft", "train lhts"])
def test_killed(command):
    arguments = ["--commands", command, "--processes", "1", "--kills", "3", "--per-run", "3"]
    run = subprocess.run([sys.executable, CAMPAIGN, *arguments], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    totals = next(row for row in rows if "lost" in row)
    assert totals["kills"] >= 1
    assert totals["lost"] == 0
