"""Several processes for real: what one process finds, each with its part of the data; a death ends the job; restarts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import worker
from tiny import write_model

from calibjax._checks import UserError
from calibjax.cli import main
from calibjax.distributed import DeviceOptions
from calibjax.models import load_model
from calibjax.sharding import make_mesh, param_shardings
from calibjax.train import load_head
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.sft import SftOptions
from calibjax.train.state import create_state


class Job:
    """Processes of `worker.py`, on this machine, with `devices` virtual CPU devices each."""

    def __init__(self, work: str, folder: Path, out: Path, *, processes: int, devices: int):
        out.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, str(Path(worker.__file__)), work, str(folder), str(out), coordinator, str(processes)]
        self.processes = [
            subprocess.Popen(
                [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for number in range(processes)
        ]

    def finish(self) -> list[tuple[int, str, str]]:
        """Of each process: its exit code, and what it printed."""
        try:
            printed = [process.communicate(timeout=400) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, *text) for process, text in zip(self.processes, printed, strict=True)]

    def succeed(self) -> None:
        for code, out, error in self.finish():
            assert code == 0, out + error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    write_model(folder / "model", hidden_size=12)
    return folder


def assert_close(one, other, bound=1e-5):
    for name, value in one.items():
        scale = np.abs(value).max() + 1e-30
        error = np.abs(np.asarray(value, np.float64) - other[name]).max() / scale
        print(f"{name}: {error:.1e}")
        assert error < bound, name


@pytest.mark.slow
def test_four_processes_find_what_one_does(folder, tmp_path):
    """A head and a model, on a mesh whose axis tensor goes across processes: pairs of them read the same rows."""
    many, one = tmp_path / "many", tmp_path / "one"
    Job("both", folder, many, processes=4, devices=1).succeed()
    mesh = make_mesh(worker.SHAPES["both"], jax.devices()[:4])
    expected = worker.both(folder, one, mesh)
    found = [np.load(many / f"process{number}.npz") for number in range(4)]
    read = expected.pop("read")
    for number, of_process in enumerate(found):
        np.testing.assert_array_equal(of_process["read"], read[:4] if number < 2 else read[4:])
        assert_close(expected, of_process)
    assert bytes(expected["fingerprint"]).hex() == load_model(folder / "model").fingerprint
    losses = [
        [row.get("loss", row.get("validation_nll")) for row in map(json.loads, lines)]
        for lines in ((out / "sft/train.jsonl").read_text().splitlines() for out in (many, one))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)

    # What the processes wrote, one reads: the head, the model, and the checkpoint on meshes of 1, 2 and 8 devices.
    lm = load_model(folder / "model")
    head = load_head(many, lm)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(head.params), _leaves(found[0], "head"))
    saved = load_model(many / "model")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(saved.params), _leaves(found[0], "tuned"))
    directory = many / "sft/checkpoints"
    step = max(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
    run = json.loads((directory / str(step) / "run/metadata").read_text())
    optimizer = SftOptions(**worker.TUNED).optimizer_config.build(step)
    for shape in ((1, 1, 1), (1, 2, 1), (2, 2, 2)):
        other = make_mesh(shape, jax.devices()[: int(np.prod(shape))])
        blank = jax.eval_shape(lambda params: create_state(params, optimizer), lm.params)
        shardings = param_shardings(other, blank)
        state = jax.jit(
            lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), blank), out_shardings=shardings
        )()
        restored = Checkpoints(directory, run).restore(state)
        assert restored is not None
        assert int(restored[0].step) == step
        for leaf, wanted, sharding in zip(
            jax.tree.leaves(restored[0].params),
            _leaves(found[0], "tuned"),
            jax.tree.leaves(shardings.params),
            strict=True,
        ):
            assert leaf.sharding == sharding
            np.testing.assert_array_equal(leaf, wanted)


def _leaves(found, name):
    return [found[f"{name}{i}"] for i in range(sum(key.startswith(name) for key in found))]


@pytest.mark.slow
def test_a_death_ends_the_job_and_a_restart_goes_on(folder, tmp_path):
    def job(out):
        return Job("tune", folder, out, processes=2, devices=2)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    job(whole).succeed()
    log, running = killed / "train.jsonl", job(killed)
    deadline = time.monotonic() + 240
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert all(process.poll() is None for process in running.processes), running.finish()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    (code, _, error), _ = running.finish()
    print(f"ended {time.monotonic() - began:.1f} s after the death, with {code}:\n{error}")
    assert code != 0
    assert "stopped: process 0 of 2 failed, or lost another one" in error or "another task died" in error
    done = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert 0 < max(done) < 100, "killed in the middle"

    job(killed).succeed()
    steps = [
        [(row["step"], row.get("loss"), row.get("validation_nll")) for row in map(json.loads, lines)]
        for lines in ((out / "train.jsonl").read_text().splitlines() for out in (killed, whole))
    ]
    assert steps[0] == steps[1]
    one, other = (np.load(out / "process0.npz") for out in (killed, whole))
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name
    expected = worker.tune(folder, tmp_path / "one", make_mesh(worker.SHAPES["tune"], jax.devices()[:4]))
    assert_close(expected, one, 1e-4)  # a hundred steps of Adam


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "127.0.0.1:1"}, "--processes, --process-id: not given"),
        ({"processes": 2, "process_id": 0}, "--coordinator: not given"),
        ({"coordinator": "127.0.0.1:1", "processes": 2, "process_id": 2}, "--process-id: expected 0 to 1, got 2"),
        ({"heartbeat_timeout": 0}, "--heartbeat-timeout: expected at least 1 second, got 0"),
        ({"distributed": True}, "cannot join the processes of the job"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        DeviceOptions(**options).join()


def test_alone_nothing_is_joined(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: pytest.fail("joined"))
    DeviceOptions().join()


@pytest.mark.parametrize("command", ["ats", "sft", "lhts"])
def test_every_command_joins_before_anything_else(command, monkeypatch, capsys, tmp_path):
    given = {}

    def initialize(*args, **kwargs):
        given["all"] = (*args, kwargs)
        raise RuntimeError("no such host")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    where = ["--model", "nowhere", "--data", "nowhere", "--out", str(tmp_path / "out")]
    job = ["--coordinator", "host:1234", "--processes", "4", "--process-id", "3", "--heartbeat-timeout", "30"]
    assert main(["train", command, *where, *job]) == 2
    assert given["all"] == ("host:1234", 4, 3, {"heartbeat_timeout_seconds": 30})
    assert "cannot join the processes of the job (no such host)" in capsys.readouterr().err
