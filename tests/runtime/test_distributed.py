"""Several processes for real: they find what one does, each with its part; a death ends the job; a restart resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import worker
from assets import data_path, model_path
from ports import free_port
from tiny import logged, on_one_device, write_model, write_text

from calibjax.cli import main
from calibjax.models import load_model
from calibjax.runtime.distributed import DeviceOptions
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import make_mesh, param_shardings
from calibjax.train import load_head
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.sft import SftOptions
from calibjax.train.step import create_state


class Job:
    """Processes of `worker.py`, on this machine, with `devices` virtual CPU devices each.

    They are told who they are by options, or by the environment that SLURM's `srun` sets.
    """

    def __init__(self, work: str, folder: Path, out: Path, *, processes: int, devices: int, slurm: bool = False):
        out.mkdir(exist_ok=True)
        port = free_port(61440 if slurm else 0)
        coordinator = "slurm" if slurm else f"127.0.0.1:{port}"
        environment = {
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        if slurm:  # JAX takes the port from the id of the job
            environment |= {"SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "localhost"}
            environment |= {"SLURM_NTASKS": str(processes)}
        command = [sys.executable, str(Path(worker.__file__)), work, str(folder), str(out), coordinator, str(processes)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.processes = [
            subprocess.Popen(
                [*command, str(number)],
                env=environment | {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
                **pipes,
            )
            for number in range(processes)
        ]

    def finish(self, *said: str) -> None:
        """All processes succeed, and the first one alone prints each text of `said`."""
        for number, (code, out, error) in enumerate(self.ended()):
            assert code == 0, out + error
            assert [text in out for text in said] == [number == 0] * len(said), out

    def ended(self) -> list[tuple[int, str, str]]:
        """Of each process: its exit code, and what it printed."""
        try:
            printed = [process.communicate(timeout=400) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(process.returncode, *text) for process, text in zip(self.processes, printed, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    write_model(folder / "model", hidden_size=12)
    return folder


def assert_close(one, other, bound=1e-5):
    for name, value in one.items():
        error = np.abs(np.asarray(value, np.float64) - other[name]).max()
        assert error < bound * (np.abs(value).max() + 1e-30), name


@pytest.mark.slow
def test_four_processes_find_what_one_does(folder, tmp_path):
    """On a mesh whose axis tensor goes across processes: pairs of them read the same rows, and all write one model."""
    many, one = tmp_path / "many", tmp_path / "one"
    Job("sft", folder, many, processes=4, devices=1, slurm=True).finish("done, says the first")
    expected = worker.sft(folder, one, make_mesh(worker.SHAPES["sft"], jax.devices()[:4]))
    got = [np.load(many / f"process{number}.npz") for number in range(4)]
    read = expected.pop("read")
    for number, of_process in enumerate(got):
        np.testing.assert_array_equal(of_process["read"], read[:4] if number < 2 else read[4:])
        assert_close(expected, of_process)
    lm = load_model(folder / "model")
    assert bytes(expected["fingerprint"]).decode() == lm.fingerprint
    np.testing.assert_allclose(logged(many), logged(one), rtol=1e-5)

    # What four processes wrote, one reads: the model, and the checkpoint on meshes of 1, 2 and 8 devices.
    tuned = [got[0][name] for name in got[0] if name.startswith("tuned")]
    chex.assert_trees_all_equal(jax.tree.leaves(load_model(many / "model").params), tuned)
    directory = many / "checkpoints"
    step = max(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())
    run = json.loads((directory / str(step) / "run/metadata").read_text())
    optimizer = SftOptions(**worker.TUNED).optimizer_config.build(step)
    for shape in ((1, 1, 1), (1, 2, 1), (2, 2, 2)):
        mesh = make_mesh(shape, jax.devices()[: int(np.prod(shape))])
        state = create_state(lm.params, optimizer)
        state = jax.device_put(state, param_shardings(mesh, state))
        restored = Checkpoints(directory, run).restore(state)
        assert restored is not None
        assert int(restored[0].step) == step
        for leaf, like, wanted in zip(*map(jax.tree.leaves, (restored[0].params, state.params, tuned)), strict=True):
            assert leaf.sharding == like.sharding
            np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.slow
def test_a_death_ends_the_job_and_a_restart_resumes(folder, tmp_path):
    running = Job("ats", folder, tmp_path, processes=2, devices=2)
    log, deadline = tmp_path / "killed/folds/1/mlp-joint-1/train.jsonl", time.monotonic() + 400
    while not log.exists() or log.read_bytes().count(b"\n") < 2:
        assert all(process.poll() is None for process in running.processes), running.ended()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.processes[1].send_signal(signal.SIGKILL)
    (code, _, error), _ = running.ended()
    assert code != 0
    assert "stopped: process 0 of 2 failed, or lost another one" in error or "another task died" in error
    assert not (tmp_path / "killed/head").exists(), "it had finished: kill it earlier"

    Job("ats", folder, tmp_path, processes=2, devices=2).finish()
    killed, whole = (np.load(tmp_path / f"{name}0.npz") for name in ("killed", "whole"))
    for name in whole:
        assert killed[name].tobytes() == whole[name].tobytes(), name
    np.testing.assert_array_equal(logged(tmp_path / "killed/mlp-joint-1"), logged(tmp_path / "whole/mlp-joint-1"))
    one = worker.ats(folder, tmp_path / "one", make_mesh(worker.SHAPES["ats"], jax.devices()[:4]))
    assert_close(one, whole)
    np.testing.assert_allclose(logged(tmp_path / "one/mlp-joint-1"), logged(tmp_path / "whole/mlp-joint-1"), rtol=1e-5)
    head = load_head(tmp_path / "killed", load_model(folder / "model"))
    chex.assert_trees_all_equal(jax.tree.leaves(head.params), [whole[n] for n in whole if "head" in n])


def differences(one, other, path=""):
    """Of all figures of two documents: where it stands, and how far the second is from the first."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for name in one:
            yield from differences(one[name], other[name], f"{path}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif isinstance(one, float) and not path.endswith(".accuracy"):
        yield path, abs(one - other) / max(1.0, abs(one))
    else:  # counts, accuracies, words
        assert one == other, path


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(folder, tmp_path):
    """`eval tasks` and `eval layers`: one document, by the first process; what was asked before is not asked again."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    model_path("stories260K")
    for name in ("lima", "llm_foundry_eval/arc_easy.jsonl.gz", "truthfulqa", "triviaqa"):
        data_path(name)
    one, many = tmp_path / "one", tmp_path / "many"
    Job("eval", folder, one, processes=1, devices=1).finish()

    # As if killed when one task was done: what is kept of it says, of this test's doing, that all was right.
    answers = "tasks/answers/truthfulqa_mc1-truthfulqa_mc1.npz"
    (many / answers).parent.mkdir(parents=True)
    shutil.copy(one / "tasks/run.json", many / "tasks/run.json")
    with np.load(one / answers) as stored:
        np.savez(many / answers, **{**stored, "correct": np.ones_like(stored["correct"])})
    said = ("4 device(s)", "results in", "entropy neurons", "done, says the first")
    Job("eval", folder, many, processes=2, devices=2).finish(*said)
    expected, got = (
        {name: json.loads((of / name).read_text()) for name in ("tasks/metrics.json", "layers0.json")}
        for of in (one, many)
    )
    again = got["tasks/metrics.json"]["tasks"].pop("truthfulqa_mc1")["methods"]
    assert [row["accuracy"] for row in again.values()] == [1]
    expected["tasks/metrics.json"]["tasks"].pop("truthfulqa_mc1")
    for document in (expected, got):
        document["tasks/metrics.json"].pop("held_out")  # all tasks together
    for path, error in differences(expected, got):  # of bins of equal mass, rounding moves an edge past a prediction
        assert error < (1e-4 if "rmsce" in path else 1e-5), path
    expected, got = (np.load(of / "tasks/answers/arc_easy-arc_easy.npz") for of in (one, many))
    for name in expected:
        if expected[name].dtype == np.float32 and name != "correct":
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def assert_documents_agree(one, other):
    """Times aside; fractions of ranks and of resamples move by a few of theirs where rounding changes an order."""
    counted = ("p_value", "holm_p", "fraction_lower", "auroc")
    for path, error in differences(one, other):
        assert error < (1e-2 if path.endswith(counted) else 1e-4) or "seconds" in path, path


@pytest.fixture(scope="module")
def commands_alone(folder):
    """The documents of one device."""
    write_text(folder / "data.jsonl", rows=60, words=16)
    with pytest.MonkeyPatch.context() as patch:
        on_one_device(patch)
        return worker.commands(folder, folder / "commands", DeviceOptions(), lambda line: None)


@pytest.mark.slow
def test_commands_of_two_processes_find_what_one_does(folder, commands_alone, tmp_path):
    """One prints and writes; both return the same documents."""
    said = ("results in", "→", "cannot have an entropy below", "done, says the first")
    Job("commands", folder, tmp_path, processes=2, devices=2).finish(*said)
    for number in (0, 1):
        assert_documents_agree(commands_alone, json.loads((tmp_path / f"documents{number}.json").read_text()))
    for file in ("compare/metrics.json", "compare/report.html", "ats/metrics.json", "saved/checksums.json"):
        assert (tmp_path / file).stat().st_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "127.0.0.1:1", "processes": 2, "process_id": 2}, "--process-id: expected 0 to 1, got 2"),
        ({"distributed": True}, "cannot join the processes of the job"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        DeviceOptions(**options).join()


@pytest.mark.parametrize("command", ["eval tasks", "eval bounds"])
def test_commands_join_before_anything_else(command, monkeypatch, capsys, tmp_path):
    given = {}

    def initialize(*args, **kwargs):
        given["all"] = (*args, kwargs)
        raise RuntimeError("no such host")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    tasks = ["--tasks", "nowhere"] if command == "eval tasks" else []
    where = ["--model", "nowhere", *tasks, "--out", str(tmp_path / "out")]
    job = ["--coordinator", "host:1234", "--processes", "4", "--process-id", "3", "--heartbeat-timeout", "30"]
    assert main([*command.split(), *where, *job]) == 2
    assert given["all"] == ("host:1234", 4, 3, {"heartbeat_timeout_seconds": 30})
    assert "cannot join the processes of the job (no such host)" in capsys.readouterr().err
