"""The tracker beside TensorBoard, offline: every scalar arrives, a resumed run is the same run, one that is missing."""

import contextlib
import importlib.util
import json
import sys

import pytest

from calibjax.runtime.errors import UserError
from calibjax.runtime.tracking import check_tracker, make_tracker


def track(name, directory, steps):
    tracker = make_tracker(name, directory)
    for step in steps:
        tracker.log({"loss": 1 / step}, step=step)
    with contextlib.redirect_stdout(sys.stderr):
        tracker.finish()


def test_a_tracker_that_is_missing(monkeypatch, tmp_path):
    """TensorBoard needs none."""
    assert make_tracker("tensorboard", tmp_path) is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--track wandb: .* not installed: pip install 'calibjax\[wandb\]'"):
        check_tracker("wandb")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.slow
def test_wandb(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", tmp_path, (1, 2))
    track("wandb", tmp_path, (3,))
    assert capfd.readouterr().out == ""
    identity = json.loads((tmp_path / "tracking.json").read_text())["run"]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{identity}"}
    assert sum(file.read_bytes().count(b"loss") for file in files) >= 3
