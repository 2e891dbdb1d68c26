"""Trackers beside TensorBoard, offline: every scalar arrives, a resumed run is the same run, one that is missing."""

import contextlib
import importlib.util
import json
import sqlite3
import sys

import pytest

from calibjax.runtime.errors import UserError
from calibjax.runtime.tracking import check_tracker, make_tracker


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


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
    for name in ("wandb", "trackio"):
        with pytest.raises(UserError, match=rf"--track {name}: .* not installed: pip install 'calibjax\[{name}\]'"):
            check_tracker(name)


@needs("trackio")
@pytest.mark.slow
def test_trackio(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio.utils  # the directory is read when it is imported

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    (tmp_path / "run").mkdir()
    track("trackio", tmp_path / "run", (1, 2))
    track("trackio", tmp_path / "run", (3,))  # resumed
    assert capfd.readouterr().out == "", "standard output is the command's"
    with sqlite3.connect(tmp_path / "trackio" / "calibjax.db") as held:
        rows = held.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(metrics)["loss"]) for _, step, metrics in rows] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert len({name for name, *_ in rows}) == 1


@needs("wandb")
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
