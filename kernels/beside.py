"""What `bench.py` times in separate processes: PyTorch losses, and train steps."""

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import measured
from contenders import Problem
from rich.console import Console

# Models of `train/bench.py` that are trained, and its options.
_MODELS = {
    "cpu": {"a small model": "--hidden-size 64 --heads 2 --layers 2 --vocab-size 500 --batch 2 --seq-len 16"},
    "gpu": {
        name: f"--shape {name} --fit-layers --dtype bfloat16 --batch 4 --seq-len 1024"
        for name in ("gemma-2-2b", "llama-3.1-8b")
    },
}


def finds_gpu() -> bool:
    """Whether jax finds a GPU, in a separate process: this one would reserve the GPU's memory."""
    program = "import jax; jax.devices('cuda')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def _child(script: pathlib.Path, arguments: list[str], seconds: float) -> Any:
    """The JSON at the end of a script's output, or one line with the reason why there is none."""
    measured.progress(f"{script.name} {' '.join(arguments)[:100]}")
    try:
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{script.name} was stopped after {seconds:.0f} s"
    if done.returncode:
        return f"{script.name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}"
    return json.loads(done.stdout[done.stdout.index("{") :])


def torch_rows(
    options: argparse.Namespace,
    problems: list[Problem],
    tasks: Sequence[str],
    seed: int,
    seconds: float,
    record: dict[str, Any],
) -> list[dict[str, Any]]:
    """The rows of `torch_losses.py` within `seconds`; adds its versions, or why there are none, to `record`."""
    tasks = [task for task in tasks if task in ("forward", "both", "hidden")]
    given = {
        "problems": [dataclasses.asdict(problem) for problem in problems],
        "tasks": tasks,
        "device": "cuda" if options.platform == "gpu" else "cpu",
        "seed": seed,
        "repeats": options.repeats,
        "only": options.only,
        "seconds": 0.8 * seconds,
    }
    found = _child(pathlib.Path(__file__).with_name("torch_losses.py"), [json.dumps(given)], seconds)
    if isinstance(found, str):
        record["torch"] = found
        note = {"contender": "PyTorch's losses", "note": found[:60]}
        return [{**note, "problem": x, "task": task} for x, task in itertools.product(given["problems"], tasks)]
    record["torch"] = found["versions"]
    return found["rows"]


def train_steps(console: Console, where: str | None, deadline: measured.Deadline) -> list[dict[str, Any] | str]:
    """Times of an ATS and an SFT step of `_MODELS` relative to the forward pass, by `train/bench.py`."""
    script = pathlib.Path(__file__).parents[1] / "train" / "bench.py"
    found: list[dict[str, Any] | str] = []
    for (model, size), objective in itertools.product(
        _MODELS["gpu" if where == "gpu" else "cpu"].items(), ("ats", "sft")
    ):
        arguments = [*size.split(), "--objective", objective, "--repeats", "5", "--json"]
        result = _child(script, arguments, deadline.part(0.1))
        found.append(result)
        if isinstance(result, str):
            console.print(f"{model}, {objective}: {result}")
        else:
            console.print(
                f"{model}, {result['layers']} layers: {objective} step {result['step_ms']:.1f} ms, "
                f"{result['ratio']:.3f} of the forward pass"
            )
    return found
