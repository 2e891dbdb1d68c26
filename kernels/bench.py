"""Compares losses of an unembedding and its targets in one run: time, extra memory, correctness.

    python kernels/bench.py --json cpu.json
    python kernels/bench.py --platform gpu --json gpu.json
    python kernels/bench.py --static v6e --preset gemma2-2b --label-smoothing 0 0.1 --softcap none 30 --json v6e.json

On a device each contender's result is compared with float64 on a sample before it is timed; inputs are new in each run,
and the timed calls alternate. `--static` compiles for a TPU that need not be attached and gives the static estimate of
`static_profile.py`. tokamax is included where it is installed. PyTorch's losses are timed by `torch_losses.py`.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import pathlib
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import contenders
import jax
import jax.numpy as jnp
import static_profile
from contenders import PRESETS, TASKS, Problem
from rich.console import Console
from rich.table import Table
from static_profile import CHIPS

from calibjax.runtime.compilers import DoesNotCompile

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
SAMPLE = 48  # tokens and rows of the unembedding that are compared with float64
DEFAULT_PRESETS = {"tpu": ("gemma2-2b",), "gpu": ("gemma2-2b", "llama31-8b-4k", "tokens-32k")}
TIMED = {"cpu": ("forward", "both", "hidden", "scale"), "gpu": ("statistics", "both", "forward", "scale", "hidden")}
# Contenders on a GPU, where a compilation takes seconds.
SHOWN = {"gpu": ("optax", "dense jnp", "tokamax", "vocab_stats chunked", "pallas_gpu", "linear_cross_entropy chunked")}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--platform", choices=["cpu", "gpu"], help="where to run; default: the machine's")
    add("--static", choices=CHIPS, help="compile for this TPU instead, and estimate the time")
    add("--preset", nargs="+", choices=PRESETS, help="sizes; default: cpu, on a GPU those of its table")
    for name, what in (("tokens", "N"), ("width", "D"), ("vocab", "V")):
        add(f"--{name}", type=at_least_one, help=f"{what} instead of the preset's")
    add("--dtype", choices=TOLERANCE, help="of hidden states and unembedding, instead of the preset's")
    add("--label-smoothing", type=float, nargs="+", help="one table for each; default: 0, on a GPU 0 0.1")
    add("--softcap", type=softcap, nargs="+", help="one table for each; default: none, on a GPU none 30")
    add("--task", nargs="+", choices=TASKS, help="default: all; statistics in --static only")
    add("--only", nargs="+", help="contenders whose names contain one of these; on a GPU the main ones")
    add("--repeats", type=at_least_one, default=7, help="timed calls of each")
    add("--seed", type=int, help="of the inputs; default: another each time")
    add("--minutes", type=float, help="start nothing after this time; default: no limit, on a GPU 9")
    add("--json", type=pathlib.Path, help="write everything there")
    return parser


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def softcap(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _problems(options: argparse.Namespace, where: str) -> Iterator[Problem]:
    sizes = {name: getattr(options, name) for name in ("tokens", "width", "vocab", "dtype")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    smoothings = options.label_smoothing or ([0.0, 0.1] if where == "gpu" else [0.0])
    caps = options.softcap or ([None, 30.0] if where == "gpu" else [None])
    presets = options.preset or DEFAULT_PRESETS.get(where, ("cpu",))
    for smoothing, cap, preset in itertools.product(smoothings, caps, presets):
        yield dataclasses.replace(PRESETS[preset], label_smoothing=smoothing, softcap=cap, **sizes)


def _names(options: argparse.Namespace, problem: Problem, ahead_of_time: bool = False) -> list[str]:
    shown = options.only or ([] if ahead_of_time else SHOWN.get(options.platform))
    names = contenders.contenders(problem, ahead_of_time)
    return [name for name in names if not shown or any(part in name for part in shown)]


def main(options: argparse.Namespace) -> None:
    """Measure, print and record."""
    if options.static is None and options.platform is not None:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[options.platform])
    console = Console(width=None if sys.stdout.isatty() else 150)
    command = " ".join(["python", "kernels/bench.py", *sys.argv[1:]])
    record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "command": command, "versions": _versions()}
    rows = record["results"] = []
    if options.static is not None:
        chip = CHIPS[options.static]
        record |= {"device": options.static, "kind": "static estimate", "trust": chip.trust}
        console.print(f"Static estimates for {options.static}, not measurements: {chip.trust}.")
        for problem in _problems(options, "tpu"):
            rows += _print(console, problem, _estimated(options, problem), STATIC_COLUMNS)
    else:
        device, seed = jax.devices()[0], secrets.randbits(31) if options.seed is None else options.seed
        record |= {"device": f"{device.platform} ({device.device_kind})", "seed": seed, "kind": "measured"}
        minutes = (9.0 if options.platform == "gpu" else float("inf")) if options.minutes is None else options.minutes
        end = time.monotonic() + 60 * minutes
        tasks = options.task or TIMED["gpu" if device.platform == "gpu" else "cpu"]
        for problem in _problems(options, device.platform):
            measured = _measured(problem, tasks, _names(options, problem), seed, options.repeats, end)
            rows += _print(console, problem, measured, MEASURED_COLUMNS)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"JSON: {options.json}")


def _versions() -> dict[str, str]:
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    packages = ("calibjax", "jax", "jaxlib", "libtpu", "tokamax", "optax")
    return {"python": platform.python_version()} | {name: installed.get(name, "not installed") for name in packages}


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _measured(
    problem: Problem, tasks: list[str], names: list[str], seed: int, repeats: int, end: float
) -> Iterator[dict[str, Any]]:
    """A row for each task and contender, checked and timed task by task; nothing is compiled after `end`."""
    inputs = contenders.random_arguments(problem, seed)
    oracle, transposed = contenders.Oracle(problem, inputs, SAMPLE), jnp.array(inputs[1].T)
    for task in tasks:
        rows: list[dict[str, Any]] = [{"task": task, "contender": name} for name in names]
        ready = {}
        for row, name in zip(rows, names, strict=True):
            if time.monotonic() >= end:
                row["note"] = "not run: time limit reached"
                continue
            _progress(f"{TASKS[task].title}: compile and check {name}")
            turned = contenders.contenders(problem)[name].transposed
            own = (inputs[0], transposed, *inputs[2:]) if turned else inputs
            try:
                function, shapes = contenders.program(name, task, problem)
                compiled = jax.jit(function).lower(*shapes).compile()
                memory: Any = compiled.memory_analysis()
                row["extra_bytes"] = memory.temp_size_in_bytes
                outputs = jax.block_until_ready(compiled(*own))
            except Exception as error:  # a failure of one contender does not stop the others
                row["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                continue
            row["error"] = oracle.error(task, outputs, turned)
            if row["error"] <= TOLERANCE[problem.dtype]:  # not so with NaN
                ready[name] = (row, functools.partial(compiled, *own), [])
            else:
                row["note"] = "WRONG"
        _progress(f"{TASKS[task].title}: {repeats} rounds of {len(ready)} contenders")
        for _ in range(1 + repeats):
            for _, run, times in ready.values():
                start = time.perf_counter()
                jax.block_until_ready(run())
                times.append(time.perf_counter() - start)
        for row, _, times in ready.values():  # the first round warms up
            row["seconds"] = statistics.median(times[1:])
        yield from _with_ratio(rows, ("optax", "dense jnp"))


def _with_ratio(rows: list[dict[str, Any]], baselines: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows with their time over that of the first baseline that has one."""
    by_name = {row["contender"]: row["seconds"] for row in rows if "seconds" in row}
    base = next((name for name in baselines if name in by_name), None)
    for row in rows:
        if base is not None and "seconds" in row:
            row |= {"ratio": row["seconds"] / by_name[base], "ratio_to": base}
    return rows


def _estimated(options: argparse.Namespace, problem: Problem) -> Iterator[dict[str, Any]]:
    """Estimates every contender for every task; tokamax's kernel always without the options that it lacks."""
    plain = dataclasses.replace(problem, label_smoothing=0.0, softcap=None)
    for task in options.task or TASKS:
        rows = []
        for name in _names(options, problem, ahead_of_time=True):
            if name == "tokamax":
                label = name if problem == plain else "tokamax (plain loss)"
                rows.append({**_estimate(options.static, name, task, plain), "contender": label})
            else:
                rows.append(_estimate(options.static, name, task, problem))
        yield from _with_ratio(rows, ("tokamax", "tokamax (plain loss)"))


@functools.cache
def _estimate(chip: str, name: str, task: str, problem: Problem) -> dict[str, Any]:
    """A row: temporaries from the compilation at the full size, time from the profiles of smaller sizes."""
    _progress(f"{TASKS[task].title}: compile {name} for {chip}")
    products = TASKS[task].products
    if not name.startswith("linear_cross_entropy"):
        products = TASKS[task].recomputing + (problem.forms_dh_in_backward and 0 in TASKS[task].differentiated)
    row: dict[str, Any] = {"task": task, "contender": name, "products": products}
    build, sizes = contenders.program_of_sizes, (problem.tokens, problem.vocab)
    try:
        whole = static_profile.compile_for(chip, build, name, task, problem, *sizes, profile=False)
        row["extra_bytes"] = whole.temporaries
        points, flops = contenders.profiled(name, chip, task, problem), products * problem.product_flops()
        found = static_profile.estimate(chip, build, name, task, problem, sizes=sizes, points=points, flops=flops)
    except DoesNotCompile as error:
        return row | {"note": str(error).removeprefix("NotImplementedError: ")[:120]}
    return row | {"cycles": found.cycles, "seconds": found.seconds, "matrix_units": found.utilization}


def _scaled(key: str, factor: float, digits: int) -> Any:
    return lambda row: f"{row[key] * factor:,.{digits}f}" if key in row else ""


_RATIO = {"x": lambda row: f"{row['ratio']:.2f} of {row['ratio_to']}" if "ratio" in row else ""}


def _milliseconds(row: dict[str, Any]) -> str:
    return row.get("note") or _scaled("seconds", 1e3, 2)(row)


MEASURED_COLUMNS = {
    "ms": _milliseconds,
    **_RATIO,
    "extra MiB": _scaled("extra_bytes", 2**-20, 1),
    "error": lambda row: f"{row['error']:.1e}" if "error" in row else "",
}
STATIC_COLUMNS = {
    "static estimate, ms": _milliseconds,
    **_RATIO,
    "matrix units": lambda row: f"{row['matrix_units']:.1%}" if "matrix_units" in row else "",
    "products": lambda row: str(row["products"]),
    "temporaries MiB": _scaled("extra_bytes", 2**-20, 1),
}


def _print(console: Console, problem: Problem, rows: Iterator[dict[str, Any]], columns: dict[str, Any]) -> list[Any]:
    """One table; returns its rows with the problem in each."""
    table, shown, task = Table("", title=str(problem), title_justify="left"), [], None
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        if row["task"] != task:
            task = row["task"]
            table.add_section()
            table.add_row(f"[bold]{TASKS[task].title}[/bold]")
        table.add_row(row["contender"], *(text(row) for text in columns.values()))
        shown.append({**dataclasses.asdict(problem), **row})
    console.print(table)
    return shown


if __name__ == "__main__":
    main(arguments().parse_args())
