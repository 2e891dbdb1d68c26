"""The n-th fault of the storage, n = 1, 2, ...: see `tests/campaigns/faults.py`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "faults.py"
pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) for tests/campaigns/faults.c"),
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
]


def faults(*arguments):
    done = subprocess.run([sys.executable, CAMPAIGN, *arguments], capture_output=True, text=True, timeout=550)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return {row.pop("case"): row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_every_fault_of_the_helpers_that_write():
    (row,) = faults("files").values()
    assert row["exit code 1"] > 2 * 15
    assert row["succeeded"] >= 1  # a call that nothing hangs on


@pytest.mark.slow
@pytest.mark.parametrize(("case", "stride"), [("convert", "41"), ("train ats", "83")])
def test_some_faults_of_commands(case, stride):
    (row,) = faults(case, "--stride", stride).values()
    assert row["exit code 1"] >= 4
