"""Locks of output paths: one process at a time, and what a killed one leaves is cleared up by the next."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from calibjax.cli import main
from calibjax.commands.run_directory import claim_directory
from calibjax.runtime import files, locks
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import new_directory

OWNER = """
import fcntl, json, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(json.dumps({"host": "there", "pid": os.getpid(), "record": ""}))
file.flush()
print("locked", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def held_elsewhere(file):
    """Another process holds the lock; it is killed at the end."""
    with subprocess.Popen([sys.executable, "-S", "-c", OWNER, file], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "locked\n"
        yield owner.pid
        owner.kill()


@pytest.fixture(autouse=True)
def _released():
    yield
    locks.release()


def killed_in(folder, rename=None, clear_up=False, **options):
    """A process that kills itself while it writes a directory, after a rename to its place, or before it clears up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork beside threads: the child does nothing but files
        child = os.fork()
    if not child:

        def once(path, target):
            rename(path, target)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            Path.rename = once if rename else Path.rename
            if clear_up:
                files._clear_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            with new_directory(folder, **options) as fresh:
                (fresh / "half").write_text("2")
                if not rename:
                    os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_run_is_refused_while_another_process_holds_it(tmp_path):
    claim_directory(tmp_path / "out", {"seed": 1})
    locks.release()
    assert names(tmp_path / "out") == ["run.json"]
    with held_elsewhere(tmp_path / "out/run.lock") as pid, pytest.raises(UserError) as refused:
        claim_directory(tmp_path / "out", {"seed": 1})
    assert str(refused.value).startswith(f"{tmp_path}/out: in use by process {pid} on there. Wait until it ends")
    assert names(tmp_path / "out") == ["run.json", "run.lock"]  # what a kill leaves
    claim_directory(tmp_path / "out", {"seed": 1})
    claim_directory(tmp_path / "out", {"seed": 1})  # this process holds it
    locks.release()
    assert names(tmp_path / "out") == ["run.json"]


@pytest.mark.parametrize("command", ["eval layers --model m --data d", "quickstart"])
def test_commands_are_refused_in_one_line(tmp_path, capsys, command):
    with held_elsewhere(tmp_path / "run.lock"):
        assert main([*command.split(), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "in use by process" in error
    assert names(tmp_path) == ["run.lock"]


def test_a_file_that_the_holder_removed_is_no_lock(tmp_path, monkeypatch):
    """Between open and flock the holder may end and remove the file: the lock is then taken on a new one."""
    flock, calls = fcntl.flock, []

    def removed_meanwhile(descriptor, operation):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with locks.locked(tmp_path / "lock", tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on {socket.gethostname()}"):
            locks.locked(tmp_path / "lock", tmp_path).__enter__()
    assert names(tmp_path) == []


def test_file_systems_without_locks(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    owner = {"host": socket.gethostname(), "pid": 1, "record": "ab"}
    (tmp_path / "lock").write_text(json.dumps(owner))
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locks.locked(tmp_path / "lock", tmp_path) as left:
        assert left == ""  # whether its owner lives is not known
    assert "has no locks" in caplog.text


def test_what_a_killed_process_left_is_cleared_up(tmp_path):
    """Its directory by the name that it recorded, and nothing else, however alike."""
    alike = tmp_path / "model.0123456789abcdef.new"
    alike.mkdir()
    (alike / "mine").write_text("")

    killed_in(tmp_path / "model")
    killed_in(tmp_path / "model", clear_up=True)
    left = names(tmp_path)
    assert len(left) == 3
    assert ".model.calibjax.lock" in left
    with new_directory(tmp_path / "model") as fresh:
        assert names(tmp_path) == sorted([".model.calibjax.lock", fresh.name, alike.name])
        (fresh / "whole").write_text("")
    assert names(tmp_path) == sorted(["model", alike.name])
    assert names(alike) == ["mine"]


def test_what_another_host_left_is_kept(tmp_path, monkeypatch):
    killed_in(tmp_path / "model")
    left = [name for name in names(tmp_path) if name.endswith(".new")]
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with new_directory(tmp_path / "model"):
        pass
    assert names(tmp_path) == sorted(["model", *left])


def test_killed_between_two_renames(tmp_path):
    """The earlier result, which had been moved aside, is there again."""
    (tmp_path / "head").mkdir()
    (tmp_path / "head/half").write_text("1")
    killed_in(tmp_path / "head", Path.rename, replace=True)
    killed_in(tmp_path / "head", clear_up=True, replace=True)
    assert "head" not in names(tmp_path)

    def fails():
        with new_directory(tmp_path / "head", replace=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert names(tmp_path) == ["head"]
    assert (tmp_path / "head/half").read_text() == "1"


def test_two_processes_that_write_one_directory(tmp_path):
    with held_elsewhere(tmp_path / ".model.calibjax.lock"), pytest.raises(UserError, match="in use by process"):
        new_directory(tmp_path / "model").__enter__()
    assert names(tmp_path) == [".model.calibjax.lock"]
