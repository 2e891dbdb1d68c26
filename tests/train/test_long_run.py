"""A short run of `tests/campaigns/long_run.py`: flat memory, one program, the last two checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "long_run.py"


@pytest.mark.slow
def test_a_long_run():
    done = subprocess.run([sys.executable, CAMPAIGN, "--steps", "200"], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
