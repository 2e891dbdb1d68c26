"""Ctrl-C and SIGTERM: exit codes, the command that resumes, and what a run keeps."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ports import free_port
from tiny import ONE_DEVICE, write_model, write_text

from calibjax.runtime import signals

ROOT = Path(__file__).parents[2]


def start(*command, script=None):
    """A process of its own, with pipes."""
    run = [sys.executable, "-c", script] if script else [sys.executable, "-m", "calibjax", *map(str, command)]
    return subprocess.Popen(
        run,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_DEVICE | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )


def wait_for(process, condition, seconds=240):
    for _ in range(10 * seconds):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("timed out")


STARTED = """
import hashlib, sys, time
from calibjax import cli
from calibjax.runtime.progress import progress_bar
def work(*args):
    print("working", flush=True)
    {work}
{replaced} = work
sys.exit(cli.main(["train", "ats", "--data", "d", "--model", "a b", "--out", "c"]))
"""
SWALLOW = """while True:
        try: time.sleep(60)
        except BaseException: pass"""
IN_CALLBACK = """import gc
    gc.callbacks.append(lambda *of: time.sleep(0.05))
    while True: gc.collect(), time.sleep(0.02)"""
BAR = "bar = progress_bar(None, title='bar', unit='step', disable=False, total=9); bar.update(); time.sleep(60)"
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
LOADING, WORKING = "cli.importlib.import_module", "cli._execute"


@pytest.mark.parametrize(
    ("replaced", "work", "number"),
    [
        (LOADING, "time.sleep(60)", signal.SIGINT),
        (LOADING, IN_CALLBACK, signal.SIGTERM),
        (WORKING, BAR, signal.SIGTERM),
        (WORKING, IN_C, signal.SIGTERM),
        (WORKING, SWALLOW, signal.SIGINT),
        (WORKING, IN_C, signal.SIGINT),
        (WORKING, IN_CALLBACK, signal.SIGINT),
    ],
    ids=lambda x: {LOADING: "loading", SWALLOW: "swallowed", IN_CALLBACK: "callback", IN_C: "C", BAR: "bar"}.get(x),
)
def test_signals_before_training(replaced, work, number):
    """While the command is imported or runs, also where the signal is swallowed, C does not return or a bar ends."""
    work = re.sub("; (while|import)", r"\n    \1", f"cli.signals.PATIENCE = 0.1; {work}")
    with start(script=STARTED.format(work=work, replaced=replaced)) as process:
        assert process.stdout.readline() == "working\n"
        time.sleep(0.2)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
    assert re.fullmatch(rf"(bar: .*\n)*\nstopped by {name}; to resume: calibjax train ats .* 'a b' --out c\n", error)
    assert process.returncode == 128 + number


@pytest.mark.parametrize(("words", "action"), [("quickstart", "resume"), ("decide --table a --out b", "start again")])
def test_interrupt_while_jax_is_imported(words, action):
    """Packages that are being imported swallow exceptions or turn them into an `ImportError`; one line is printed."""
    with start(*words.split()) as process:
        loaded = Path(f"/proc/{process.pid}/maps")
        wait_for(process, lambda: "jaxlib" in loaded.read_text(), seconds=20)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert error == f"\nstopped by Ctrl-C; to {action}: calibjax {words}\n"
    assert process.returncode == 130


@pytest.mark.parametrize("code", [0, 130])
def test_interrupt_in_clean_up(code):
    """A second Ctrl-C adds no line and does not change the exit code, whatever it interrupts."""
    ended = f"calibjax.cli.main = lambda args: print('the report') or {code}"
    again = "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))"
    imports = "import atexit, os, signal, sys, time, calibjax.cli, calibjax.__main__ as command"
    with start(script=f"{imports}; {ended}; {again}; sys.exit(command.main([]))") as process:
        assert process.communicate(timeout=60) == ("the report\n", "")
    assert process.returncode == code


def train_ats(folder, epochs):
    """A command that trains so long on files that it writes."""
    write_model(folder / "model")
    write_text(folder / "data.jsonl", rows=60, words=16)
    options = f"--head-kind mlp --loss joint --no-refit-temperature --batch-size 8 --epochs {epochs} --full-sequences"
    options += f" --seq-len 13 --checkpoint-every 1000000 --quiet --model {folder}/model --data {folder}/data.jsonl"
    return ["train", "ats", *options.split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_training(tmp_path, number):
    """The line that is printed resumes the run, SIGTERM keeps the step it came in, and the head is that of one run."""
    command, log = train_ats(tmp_path, 400), tmp_path / "out" / "fit"
    with start(*command, "--out", tmp_path / "out") as process:
        wait_for(process, lambda: any(file.stat().st_size for file in log.rglob("train.jsonl")))
        process.send_signal(number)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 128 + number, error
    line = rf"\s*stopped by (Ctrl-C|SIGTERM); to resume: calibjax (train ats .* --out {tmp_path}/out.*)\n"
    resume = re.fullmatch(line, error)
    assert resume
    steps = [int(step.name) for step in log.rglob("checkpoints/*") if step.name.isdigit()]
    assert bool(steps) == (number == signal.SIGTERM)
    if number == signal.SIGTERM:
        with start(*resume[2].split()) as process:
            _, error = process.communicate(timeout=400)
        assert process.returncode == 0, error
        with start(*command, "--out", tmp_path / "whole") as process:
            assert process.wait(timeout=400) == 0
        heads = [json.loads((tmp_path / name / "metrics.json").read_text())["held_out"] for name in ("out", "whole")]
        assert heads[0] == heads[1]


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes(tmp_path):
    """Both end with a checkpoint of the same step, within seconds: a preempted TPU VM has thirty."""
    command = [*train_ats(tmp_path, 4000), "--out", tmp_path / "out"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--process-id"]
    with start(*command, 0) as first, start(*command, 1) as second:
        log = tmp_path / "out" / "fit" / "mlp-joint-1" / "train.jsonl"
        wait_for(first, lambda: log.is_file() and log.stat().st_size)
        second.send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [143, 143], errors
    assert all("stopped by SIGTERM; to resume: calibjax train ats" in error for error in errors)
    (last,) = [int(step.name) for step in log.parent.glob("checkpoints/*")]
    assert last >= json.loads(log.read_text().splitlines()[-1])["step"]


def test_sigterm_waits_for_a_step():
    def terminated_in_a_step():
        with signals.handled(lambda: None), signals.finishing_steps() as stop_requested:
            assert not stop_requested(1)
            signal.raise_signal(signal.SIGTERM)
            assert stop_requested(2)

    for _ in range(2):  # the first one is forgotten
        with pytest.raises(signals.Terminated):
            terminated_in_a_step()


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with signals.handled(lambda: None), signals.handled(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_handled_in_another_thread_does_nothing():
    seen = []

    def work():
        with signals.handled(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
