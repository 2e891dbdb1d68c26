"""Losses of a linear layer and a vocabulary side by side in one run: time, extra memory, and whether they are right.

    python kernels/bench.py --json cpu.json
    python kernels/bench.py --platform gpu --json gpu.json
    python kernels/bench.py --static v6e --preset gemma2-2b --label-smoothing 0 0.1 --softcap none 30 --json v6e.json
    python kernels/bench.py --static v6e --preset gemma2-2b --softcap 30 --task both --save-logits --only vocab_stats

On a device each contender's result is held against float64 on a sample before it is timed; the timed calls take turns.
`--static` compiles for a TPU that need not be there and gives the static estimate of `static_profile.py`. tokamax is
shown where it is installed.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import contenders
import jax
import jax.numpy as jnp
import static_profile
from contenders import TASKS, Problem
from rich.console import Console
from rich.table import Table
from static_profile import CHIPS

from calibjax._tpu_compiler import DoesNotCompile

PRESETS = {
    "cpu": Problem(2048, 512, 32_000, "float32"),
    "gemma2-2b": Problem(8192, 2304, 256_000, "bfloat16"),
    "llama31-8b": Problem(8192, 4096, 128_256, "bfloat16"),
    "qwen25-7b": Problem(8192, 3584, 152_064, "bfloat16"),
    "llama31-8b-4k": Problem(4096, 4096, 128_256, "bfloat16"),
    "tokens-32k": Problem(32_768, 2560, 128_256, "bfloat16"),
}
DEFAULT_PRESETS = {"tpu": ("gemma2-2b",), "gpu": ("gemma2-2b", "llama31-8b-4k", "tokens-32k")}
TIMED = ("forward", "both", "hidden", "scale")
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


def arguments() -> argparse.ArgumentParser:
    """The options. By argparse: tyro and tokamax need different versions of typeguard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="where to run; default: the machine's")
    parser.add_argument("--static", choices=CHIPS, help="compile for this TPU instead, and estimate")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, help="sizes; default: cpu, on a GPU those of its table")
    parser.add_argument("--tokens", type=int, help="N instead of the preset's")
    parser.add_argument("--width", type=int, help="D instead of the preset's")
    parser.add_argument("--vocab", type=int, help="V instead of the preset's")
    parser.add_argument("--dtype", choices=TOLERANCE, help="of hidden states and unembedding, instead of the preset's")
    parser.add_argument("--label-smoothing", type=float, nargs="+", default=[0.0], help="one table for each")
    parser.add_argument("--softcap", type=_softcap, nargs="+", default=[None], help="one table for each; or none")
    parser.add_argument("--save-logits", action="store_true", help="ours keep the logits for the backward pass")
    parser.add_argument("--task", nargs="+", choices=TASKS, help="default: all; statistics in --static only")
    parser.add_argument("--only", nargs="+", help="contenders with one of these in their names")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--json", type=pathlib.Path, help="write everything there")
    return parser


def _softcap(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _problems(options: argparse.Namespace, where: str) -> Iterator[Problem]:
    """One for each table."""
    sizes = {name: getattr(options, name) for name in ("tokens", "width", "vocab", "dtype")}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    for preset in options.preset or DEFAULT_PRESETS.get(where, ("cpu",)):
        for label_smoothing in options.label_smoothing:
            for softcap in options.softcap:
                given = {"label_smoothing": label_smoothing, "softcap": softcap, "save_logits": options.save_logits}
                yield dataclasses.replace(PRESETS[preset], **sizes, **given)


def _names(options: argparse.Namespace, problem: Problem, ahead_of_time: bool = False) -> list[str]:
    found = contenders.contenders(problem, ahead_of_time)
    return [name for name in found if not options.only or any(part in name for part in options.only)]


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
        for problem in _problems(options, "tpu"):
            rows += _print(console, problem, _estimated(options, problem), STATIC_COLUMNS)
    else:
        device = jax.devices()[0]
        record |= {"device": _device_name(device), "kind": "measured"}
        limits: dict[str, Any] = {}
        for problem in _problems(options, device.platform):
            if problem.dtype not in limits:
                limits[problem.dtype] = _limits(problem.dtype)
                product, copy = (limits[problem.dtype][name] for name in ("flop/s", "copy B/s"))
                console.print(
                    f"{record['device']}, measured: {problem.dtype} product {product / 1e12:.4g} TFLOP/s, "
                    f"copy {copy / 1e9:.4g} GB/s"
                )
            rows += _print(
                console, problem, _measured(options, problem, limits[problem.dtype]["flop/s"]), MEASURED_COLUMNS
            )
        record["limits"] = limits
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"JSON: {options.json}")


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


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _seconds(function: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def _limits(dtype: str) -> dict[str, float]:
    """What the device can do: rate of a square product, and of a copy (bytes read and written)."""
    on_cpu = jax.default_backend() == "cpu"
    side, length = (2048, 2**24) if on_cpu else (8192, 2**28)
    a = jnp.ones((side, side), dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    copy, x = jax.jit(lambda x: x + 1), jnp.zeros(length, jnp.float32)
    rates = {}
    for name, function, argument, work in (("flop/s", product, a, 2 * side**3), ("copy B/s", copy, x, 2 * x.nbytes)):
        _seconds(function, argument)
        rates[name] = work / min(_seconds(function, argument) for _ in range(10))
    return rates


def _available_bytes() -> float:
    """Memory that may still be taken."""
    if limit := _memory("bytes_limit"):
        return limit - _memory("bytes_in_use")
    system = pathlib.Path("/proc/meminfo")
    if not system.exists():
        return float("inf")
    lines = dict(line.split(":") for line in system.read_text().splitlines())
    return 1024.0 * int(lines["MemAvailable"].split()[0])


def _measured(options: argparse.Namespace, problem: Problem, flop_rate: float) -> Iterator[dict[str, Any]]:
    """Checks every contender on every task, those with the least memory first, and times them task by task."""
    inputs = contenders.random_arguments(problem, options.seed)
    _progress("float64 values on a sample")
    oracle, transposed = contenders.Oracle(problem, inputs), None
    tasks, names = options.task or TIMED, _names(options, problem)
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (task, name): {"task": task, "contender": name} for task in tasks for name in names
    }
    compiled = {}
    for (task, name), row in rows.items():
        _progress(f"{TASKS[task].title}: compile {name}")
        try:
            function, shapes = contenders.program(name, task, problem)
            compiled[task, name] = jax.jit(function).lower(*shapes).compile()
        except Exception as error:  # whatever fails in one contender, the others have their table
            row["note"] = _first_line(error)
            continue
        memory = compiled[task, name].memory_analysis()
        row |= {"extra_bytes": memory.temp_size_in_bytes, "output_bytes": memory.output_size_in_bytes}

    def own_inputs(name: str) -> tuple[jax.Array, ...]:
        nonlocal transposed
        if not contenders.contenders(problem)[name].transposed:
            return inputs
        transposed = jnp.array(inputs[1].T) if transposed is None else transposed
        return inputs[0], transposed, *inputs[2:]

    for task, name in sorted(compiled, key=lambda key: rows[key]["extra_bytes"]):
        _progress(f"{TASKS[task].title}: check {name}")
        row, own = rows[task, name], own_inputs(name)
        if (needed := row["extra_bytes"] + row["output_bytes"]) > _available_bytes():
            row["note"] = f"does not fit: needs {needed / 2**30:.1f} GiB"
            continue
        peak = _memory("peak_bytes_in_use")
        try:
            outputs = jax.block_until_ready(compiled[task, name](*own))
        except Exception as error:
            row["note"] = _first_line(error)
            continue
        if _memory("peak_bytes_in_use") > peak:  # a new peak of the process, so this program's own
            row["peak_extra_bytes"] = _memory("peak_bytes_in_use") - _memory("bytes_in_use")
        row["error"] = oracle.error(task, outputs, own is not inputs)
        if not row["error"] <= TOLERANCE[problem.dtype]:
            row["note"] = "WRONG"
        del outputs

    for task in tasks:
        ready = [name for name in names if (task, name) in compiled and "note" not in rows[task, name]]
        _progress(f"{TASKS[task].title}: {options.repeats} rounds of {len(ready)} contenders")
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(options.repeats):
            for name in ready:
                times[name].append(_seconds(compiled[task, name], *own_inputs(name)))
        for name in ready:
            median = statistics.median(times[name])
            limit = TASKS[task].products * problem.product_flops() / flop_rate
            rows[task, name] |= {
                "seconds": median,
                "fastest_seconds": min(times[name]),
                "share_of_limit": limit / median,
            }
        yield from _with_ratio([rows[task, name] for name in names], ("optax", "dense jnp"))


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return (line if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {line}")[:80]


def _memory(field: str) -> int:
    """Of the device's allocator; 0 where it keeps no such figure."""
    return (jax.devices()[0].memory_stats() or {}).get(field, 0)


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
    """A row: temporaries from the compilation at the full size, time from the profiles of smaller vocabularies.

    XLA code is not profiled: its loops would count once, and so they do in XLA's own cost model.
    """
    _progress(f"{TASKS[task].title}: compile {name} for {chip}")
    kernel = contenders.contenders(problem, ahead_of_time=True)[name].kernel
    products = TASKS[task].recomputing if kernel and not problem.save_logits else TASKS[task].products
    row: dict[str, Any] = {"task": task, "contender": name, "products": products}
    build = contenders.program_of_vocab
    try:
        whole = static_profile.compile_for(chip, build, name, task, problem, problem.vocab, profile=False)
        row |= {"extra_bytes": whole.temporaries, "compile_seconds": whole.compile_seconds}
        if not kernel:
            return row if whole.optimal_seconds is None else row | {"xla_cost_model_seconds": whole.optimal_seconds}
        found = static_profile.estimate(
            chip,
            build,
            name,
            task,
            problem,
            size=problem.vocab,
            points=contenders.profiled_vocab(name, chip, problem.width),
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
    "share of limit": lambda row: f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else "",
    "extra MiB": _scaled("extra_bytes", 2**-20, 1),
    "peak extra MiB": _scaled("peak_extra_bytes", 2**-20, 1),
    "error": lambda row: f"{row['error']:.1e}" if "error" in row else "",
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
    main(arguments().parse_args())
