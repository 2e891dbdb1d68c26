"""Compares losses of an unembedding and its targets in one run: time, extra memory, correctness.

    python kernels/bench.py --json cpu.json
    python kernels/bench.py --platform gpu --json gpu.json
    python kernels/bench.py --static v6e --preset gemma2-2b --label-smoothing 0 0.1 --softcap none 30 --json v6e.json
    python kernels/bench.py --static v6e --preset gemma2-2b --softcap 30 --task both --save-logits --only vocab_stats
    python kernels/bench.py --static v7x --against measured --minutes 30

On a device each contender's result is compared with float64 on a sample before it is timed; inputs are new in each run,
and outputs are written over NaN. The timed calls alternate. On a GPU, PyTorch losses and whole train steps are timed
too, in separate processes (`torch_losses.py`, `train/bench.py`); what does not fit into `--minutes` is listed and
skipped. `--static` compiles for a TPU that need not be attached and gives the static estimate of `static_profile.py`,
with `--against measured` beside times that others measured on that TPU (`against.py`). tokamax is included where it is
installed.
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
import sys
from collections.abc import Iterator
from typing import Any

import against
import beside
import contenders
import jax
import measured
import static_profile
from contenders import TASKS, Problem
from rich.console import Console
from rich.table import Table
from static_profile import CHIPS

from calibjax import kernels
from calibjax.kernels import pallas_gpu
from calibjax.kernels.pallas_gpu import schedule
from calibjax.runtime.errors import UserError
from calibjax.runtime.tpu_compiler import DoesNotCompile

PRESETS = {
    "cpu": Problem(2048, 512, 32_000, "float32"),
    "gemma2-2b": Problem(8192, 2304, 256_000, "bfloat16"),
    "llama31-8b": Problem(8192, 4096, 128_256, "bfloat16"),
    "qwen25-7b": Problem(8192, 3584, 152_064, "bfloat16"),
    "llama31-8b-4k": Problem(4096, 4096, 128_256, "bfloat16"),
    "tokens-32k": Problem(32_768, 2560, 128_256, "bfloat16"),
}
DEFAULT_PRESETS = {"tpu": ("gemma2-2b",), "gpu": ("gemma2-2b", "llama31-8b-4k", "tokens-32k")}
TIMED = {"cpu": ("forward", "both", "hidden", "scale"), "gpu": ("statistics", "both", "forward", "scale", "hidden")}
# On a GPU both values of each, those without first; all other defaults are those of the options.
DEFAULT_OPTIONS = {"gpu": {"label_smoothing": [0.0, 0.1], "softcap": [None, 30.0]}}
# Contenders on a GPU, where a compilation takes seconds.
SHOWN = {"gpu": ("optax", "dense jnp", "tokamax", "vocab_stats chunked", "pallas_gpu", "linear_cross_entropy chunked")}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="where to run; default: the machine's")
    parser.add_argument("--static", choices=CHIPS, help="compile for this TPU instead, and estimate the time")
    parser.add_argument(
        "--against", metavar="FILE", help="with --static: ours beside times measured by others; measured: tokamax's"
    )
    parser.add_argument(
        "--profiles", type=pathlib.Path, default=pathlib.Path("profiles.json"), help="of --against: kept there"
    )
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="sizes; default: cpu, on a GPU those of its table")
    parser.add_argument("--tokens", type=int, help="N instead of the preset's")
    parser.add_argument("--width", type=int, help="D instead of the preset's")
    parser.add_argument("--vocab", type=int, help="V instead of the preset's")
    parser.add_argument(
        "--dtype", choices=measured.TOLERANCE, help="of hidden states and unembedding, instead of the preset's"
    )
    parser.add_argument(
        "--label-smoothing", type=float, nargs="+", help="one table for each; default: 0, on a GPU 0 0.1"
    )
    parser.add_argument(
        "--softcap", type=_softcap, nargs="+", help="one table for each; default: none, on a GPU none 30"
    )
    parser.add_argument("--save-logits", action="store_true", help="ours keep the logits for the backward pass")
    parser.add_argument("--task", nargs="+", choices=TASKS, help="default: all; statistics in --static only")
    parser.add_argument("--only", nargs="+", help="contenders whose names contain one of these; on a GPU the main ones")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each")
    parser.add_argument("--seed", type=int, help="of the inputs; default: another each time")
    parser.add_argument("--minutes", type=float, help="start nothing after this time; default: no limit, on a GPU 9")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--torch", action=flag, help="time the losses of torch_losses.py too; default: on a GPU")
    parser.add_argument("--train-steps", action=flag, help="run train/bench.py too; default: on a GPU")
    parser.add_argument(
        "--pairs", action="store_true", help="also pallas_gpu with each block of W copied to pairs of programs"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write everything there")
    return parser


def _softcap(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _problems(options: argparse.Namespace, where: str) -> Iterator[Problem]:
    """One per table: those with neither option or with both come before those with one."""
    sizes = {name: getattr(options, name) for name in ("tokens", "width", "vocab", "dtype")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    defaults = DEFAULT_OPTIONS.get(where, {"label_smoothing": [0.0], "softcap": [None]})
    label_smoothings = options.label_smoothing or defaults["label_smoothing"]
    softcaps = options.softcap or defaults["softcap"]
    presets = options.preset or DEFAULT_PRESETS.get(where, ("cpu",))
    pairs = itertools.product(enumerate(label_smoothings), enumerate(softcaps))
    pairs = sorted(pairs, key=lambda pair: pair[0][0] != pair[1][0])
    for ((_, label_smoothing), (_, softcap)), preset in itertools.product(pairs, presets):
        given = {"label_smoothing": label_smoothing, "softcap": softcap, "save_logits": options.save_logits}
        yield dataclasses.replace(PRESETS[preset], **sizes, **given)


def _tasks(options: argparse.Namespace, where: str | None) -> tuple[str, ...]:
    return tuple(options.task or TIMED["gpu" if where == "gpu" else "cpu"])


def _names(options: argparse.Namespace, problem: Problem, ahead_of_time: bool = False) -> list[str]:
    found = contenders.contenders(problem, ahead_of_time)
    shown = options.only or ([] if ahead_of_time else SHOWN.get(options.platform))
    return [name for name in found if not shown or any(part in name for part in shown)]


def main(options: argparse.Namespace) -> None:
    """Measure, print and record."""
    if options.static is None and options.platform is not None:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[options.platform])
    console = Console(width=None if sys.stdout.isatty() else 150)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "kernels/bench.py", *sys.argv[1:]]),
        "versions": _versions(),
        "results": [],
    }
    rows = record["results"]
    if options.static is not None:
        chip = CHIPS[options.static]
        record |= {"device": options.static, "kind": "static estimate", "trust": chip.trust}
        console.print(f"Static estimates for {options.static}, not measurements: {chip.trust}.")
        if options.against is not None:
            against.main(console, options, record)
        else:
            for problem in _problems(options, "tpu"):
                rows += _print(console, problem, _estimated(options, problem), STATIC_COLUMNS)
    else:
        _run(console, options, record)
    if options.json is not None:
        _write(options, record)
        console.print(f"JSON: {options.json}")


def _write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _run(console: Console, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """The tables of the device; `record` is complete and written after each table."""
    on_gpu = options.platform == "gpu"
    minutes = (9.0 if on_gpu else float("inf")) if options.minutes is None else options.minutes
    deadline = measured.Deadline(60 * minutes)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    record |= {"seed": seed, "kind": "measured"}
    # Other processes come first: this one reserves the GPU's memory as soon as jax initialises it.
    if on_gpu and not beside.finds_gpu():
        sys.exit("--platform gpu: jax finds no GPU here. It needs one of NVIDIA's, and the packages of jax[cuda13].")
    planned, tasks = list(_problems(options, options.platform or "cpu")), _tasks(options, options.platform)
    others: list[dict[str, Any]] = []
    if on_gpu if options.torch is None else options.torch:
        alone = not any(_names(options, problem) for problem in planned)
        others = beside.torch_rows(options, planned, tasks, seed, deadline.part(0.9 if alone else 0.2), record)
    if on_gpu if options.train_steps is None else options.train_steps:
        record["train_steps"] = beside.train_steps(console, options.platform, deadline)
    device = jax.devices()[0]
    record["device"] = _device_name(device)
    if options.pairs:
        implementation = pallas_gpu.make(blocks=schedule.Blocks(cluster=2))
        kernels.IMPLEMENTATIONS["pallas_gpu_pairs"] = implementation
    limits = record["limits"] = {}
    for problem in _problems(options, device.platform):
        if problem.dtype not in limits:
            limits[problem.dtype] = measured.limits(problem.dtype)
            product, copy = (limits[problem.dtype][name] for name in ("flop/s", "copy B/s"))
            console.print(
                f"{record['device']}, measured: {problem.dtype} product {product / 1e12:.4g} TFLOP/s, "
                f"copy {copy / 1e9:.4g} GB/s"
            )
        if deadline.passed():
            console.print(f"{problem}: not run, time limit reached")
            record["results"].append({**dataclasses.asdict(problem), "note": "not run: time limit reached"})
            continue
        tasks = _tasks(options, device.platform)
        names, flop_rate = _names(options, problem), limits[problem.dtype]["flop/s"]
        rows = measured.rows(problem, tasks, names, seed, options.repeats, flop_rate, deadline) if names else []
        shown = _task_by_task(rows, others, problem, tasks, flop_rate)
        record["results"] += _print(console, problem, shown, MEASURED_COLUMNS)
        _write(options, record)


def _task_by_task(
    rows: list[dict[str, Any]],
    others: list[dict[str, Any]],
    problem: Problem,
    tasks: tuple[str, ...],
    flop_rate: float,
) -> Iterator[dict[str, Any]]:
    """The rows task by task, each followed by those that another process timed for the same problem."""
    key = json.loads(json.dumps(dataclasses.asdict(problem)))
    for task in tasks:
        of_task = [row for row in rows if row["task"] == task]
        more = [row for row in others if row["problem"] == key and row["task"] == task]
        more = [{name: value for name, value in row.items() if name != "problem"} for row in more]
        for row in more:
            if "seconds" in row:
                row["fraction_of_limit"] = measured.limit_seconds(task, problem, flop_rate) / row["seconds"]
        yield from _with_ratio([*of_task, *more], ("optax", "dense jnp"))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("calibjax", "jax", "jaxlib", "libtpu", "tokamax", "optax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _device_name(device: Any) -> str:
    return f"{device.platform} ({device.device_kind})"


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
    plain = dataclasses.replace(problem, label_smoothing=0.0, softcap=None, save_logits=False)
    for task in options.task or TASKS:
        rows = []
        for name in _names(options, problem, ahead_of_time=True):
            if name == "tokamax":
                label = name if problem == plain else "tokamax (plain loss)"
                rows.append({**_estimate(options.static, name, task, plain), "contender": label})
            elif "reference" not in name:  # the dense jnp loss
                rows.append(_estimate(options.static, name, task, problem))
        yield from _with_ratio(rows, ("tokamax", "tokamax (plain loss)"))


@functools.cache
def _estimate(chip: str, name: str, task: str, problem: Problem) -> dict[str, Any]:
    """A row: temporaries from the compilation at the full size, time from the profiles of smaller sizes.

    XLA code is not profiled: its loops would count once, and so they do in XLA's own cost model.
    """
    measured.progress(f"{TASKS[task].title}: compile {name} for {chip}")
    kernel = contenders.contenders(problem, ahead_of_time=True)[name].kernel
    saves = problem.save_logits or name.startswith("linear_cross_entropy")
    products = TASKS[task].recomputing if kernel and not saves else TASKS[task].products
    row: dict[str, Any] = {"task": task, "contender": name, "products": products}
    build = contenders.program_of_sizes
    try:
        whole = static_profile.compile_for(
            chip, build, name, task, problem, problem.tokens, problem.vocab, profile=False
        )
        row |= {"extra_bytes": whole.temporaries, "compile_seconds": whole.compile_seconds}
        if not kernel:
            return row if whole.optimal_seconds is None else row | {"xla_cost_model_seconds": whole.optimal_seconds}
        found = static_profile.estimate(
            chip,
            build,
            name,
            task,
            problem,
            sizes=(problem.tokens, problem.vocab),
            points=contenders.profiled(name, chip, task, problem),
            flops=products * problem.product_flops(),
        )
    except DoesNotCompile as error:
        return row | {"note": str(error).removeprefix("NotImplementedError: ")[:120]}
    return row | {"cycles": found.cycles, "seconds": found.seconds, "matrix_units": found.utilization}


def _scaled(key: str, factor: float, digits: int) -> Any:
    return lambda row: f"{row[key] * factor:,.{digits}f}" if key in row else ""


MEASURED_COLUMNS = {
    "ms": lambda row: row.get("note") or _scaled("seconds", 1e3, 2)(row),
    "x": lambda row: f"{row['ratio']:.2f} of {row['ratio_to']}" if "ratio" in row else "",
    "fraction of limit": lambda row: f"{row['fraction_of_limit']:.0%}" if "fraction_of_limit" in row else "",
    "extra MiB": _scaled("extra_bytes", 2**-20, 1),
    "peak extra MiB": _scaled("peak_extra_bytes", 2**-20, 1),
    "error": lambda row: f"{row['error']:.1e}" if "error" in row else "",
    "same again": lambda row: {True: "yes", False: "NO"}.get(row.get("same_bits"), ""),
}
STATIC_COLUMNS = {
    "static estimate, ms": lambda row: row.get("note") or _scaled("seconds", 1e3, 2)(row),
    "x": lambda row: f"{row['ratio']:.2f} of {row['ratio_to']}" if "ratio" in row else "",
    "matrix units": lambda row: f"{row['matrix_units']:.1%}" if "matrix_units" in row else "",
    "products": lambda row: str(row["products"]),
    "temporaries MiB": _scaled("extra_bytes", 2**-20, 1),
    "XLA's cost model, ms": _scaled("xla_cost_model_seconds", 1e3, 2),
}


def _print(console: Console, problem: Problem, rows: Iterator[dict[str, Any]], columns: dict[str, Any]) -> list[Any]:
    """One table; returns its rows with the problem in each."""
    table = Table(title=str(problem), title_justify="left", show_lines=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    kept, task = [], None
    for row in rows:
        if row["task"] != task:
            task = row["task"]
            if kept:
                table.add_section()
            table.add_row(f"[bold]{TASKS[task].title}[/bold]")
        table.add_row(row["contender"], *(text(row) for text in columns.values()))
        kept.append({**dataclasses.asdict(problem), **row})
    used = [i for i, text in enumerate(columns.values(), 1) if any(text(row) for row in kept)]
    table.columns[:] = [table.columns[i] for i in (0, *used)]
    console.print(table)
    return kept


if __name__ == "__main__":
    try:
        main(arguments().parse_args())
    except UserError as error:
        sys.exit(f"error: {error}")
