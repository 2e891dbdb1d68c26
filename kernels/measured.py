"""Checks and times contenders on the attached device, and measures the device's own limits."""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contenders
import jax
import jax.numpy as jnp
from contenders import TASKS, Problem

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
ON_CPU = (2048, 2**24)  # side of the product and length of the copy that `limits` times there
SAMPLE = 48  # tokens and rows of the unembedding that are compared with float64


class Deadline:
    """A number of seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def passed(self) -> bool:
        return self.left() <= 0

    def part(self, fraction: float) -> float:
        """That fraction of all the time, or what is left of it; an hour where there is no limit."""
        return max(min(fraction * self._seconds, self.left(), 3600.0), 1.0)


def progress(text: str) -> None:
    """Prints a line to stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _seconds(function: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def limits(dtype: str) -> dict[str, float]:
    """Limits of the device: the rate of a square product of random matrices, and of a copy (bytes read and written)."""
    on_cpu = jax.default_backend() == "cpu"
    side, length = ON_CPU if on_cpu else (8192, 2**28)
    a = jax.random.normal(jax.random.key(0), (side, side), jnp.dtype(dtype))  # a GPU multiplies equal numbers faster
    precision = jax.lax.Precision.HIGHEST if dtype == "float32" else None
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=precision))
    copy, x = jax.jit(lambda x: x + 1), jnp.zeros(length, jnp.float32)
    rates = {}
    for name, function, argument, work in (("flop/s", product, a, 2 * side**3), ("copy B/s", copy, x, 2 * x.nbytes)):
        _seconds(function, argument)
        rates[name] = work / min(_seconds(function, argument) for _ in range(10))
    return rates


def limit_seconds(task: str, problem: Problem, flop_rate: float) -> float:
    """The time of the products that cannot be avoided."""
    return TASKS[task].products * problem.product_flops() / flop_rate


def _memory(field: str) -> int:
    """Of the device's allocator; 0 where it keeps no such figure."""
    return (jax.devices()[0].memory_stats() or {}).get(field, 0)


def _available_bytes() -> float:
    """Memory that may still be taken."""
    if limit := _memory("bytes_limit"):
        return limit - _memory("bytes_in_use")
    system = Path("/proc/meminfo")
    if not system.exists():
        return float("inf")
    lines = dict(line.split(":") for line in system.read_text().splitlines())
    return 1024.0 * int(lines["MemAvailable"].split()[0])


def _poison(outputs: Any) -> None:
    """Frees memory full of NaN for arrays of these shapes, so that unwritten parts of outputs are found."""
    floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in floats])


def _has_nan(outputs: Any) -> bool:
    floats = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return any(bool(jnp.isnan(x).any()) for x in floats)


@jax.jit
def _same_bits(outputs: Any, others: Any) -> jax.Array:
    """Whether two runs gave the same, to the last bit."""

    def bits(x: jax.Array) -> jax.Array:
        return x.view(f"uint{8 * x.dtype.itemsize}") if jnp.issubdtype(x.dtype, jnp.floating) else x

    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(others), strict=True)
    return jnp.all(jnp.stack([jnp.array_equal(bits(x), bits(y)) for x, y in pairs]))


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return (line if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {line}")[:80]


def rows(
    problem: Problem,
    tasks: Sequence[str],
    names: Sequence[str],
    seed: int,
    repeats: int,
    flop_rate: float,
    deadline: Deadline,
) -> list[dict[str, Any]]:
    """A row for each task and contender: checked, those with the least memory first, and timed task by task.

    Args:
        problem: sizes and options.
        tasks: keys of `TASKS`.
        names: of `contenders.contenders`.
        seed: of the inputs.
        repeats: timed calls of each.
        flop_rate: of the device, for the fraction of its limit.
        deadline: after it nothing more is compiled or checked; what was checked is timed.
    """
    inputs = contenders.random_arguments(problem, seed)
    progress("float64 values on a sample")
    oracle, transposed = contenders.Oracle(problem, inputs, SAMPLE), None
    found: dict[tuple[str, str], dict[str, Any]] = {
        (task, name): {"task": task, "contender": name} for task in tasks for name in names
    }
    compiled = {}
    for (task, name), row in found.items():
        if deadline.passed():
            row["note"] = "not run: time limit reached"
            continue
        progress(f"{TASKS[task].title}: compile {name}")
        try:
            function, shapes = contenders.program(name, task, problem)
            compiled[task, name] = jax.jit(function).lower(*shapes).compile()
        except Exception as error:  # a failure of one contender does not stop the others
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

    for task, name in sorted(compiled, key=lambda key: found[key]["extra_bytes"]):
        progress(f"{TASKS[task].title}: check {name}")
        row, own = found[task, name], own_inputs(name)
        needed = row["extra_bytes"] + 2 * row["output_bytes"]  # of two runs
        if needed > _available_bytes():
            row["note"] = f"does not fit: needs {needed / 2**30:.1f} GiB"
            continue
        if deadline.passed():
            row["note"] = "not run: time limit reached"
            continue
        peak = _memory("peak_bytes_in_use")
        try:
            _poison(compiled[task, name].out_info)
            outputs = jax.block_until_ready(compiled[task, name](*own))
            broken = _has_nan(outputs)
        except Exception as error:
            row["note"] = _first_line(error)
            continue
        if _memory("peak_bytes_in_use") > peak:  # a new peak of the process, so this program's own
            row["peak_extra_bytes"] = _memory("peak_bytes_in_use") - _memory("bytes_in_use")
        row["error"] = float("inf") if broken else oracle.error(task, outputs, own is not inputs)
        if row["error"] <= TOLERANCE[problem.dtype]:
            row["same_bits"] = bool(_same_bits(outputs, compiled[task, name](*own)))
        else:
            row["note"] = "WRONG"
        del outputs

    for task in tasks:
        ready = [name for name in names if (task, name) in compiled and "note" not in found[task, name]]
        progress(f"{TASKS[task].title}: {repeats} rounds of {len(ready)} contenders")
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(1 + repeats):
            for name in ready:
                times[name].append(_seconds(compiled[task, name], *own_inputs(name)))
        for name in ready:
            median = statistics.median(times[name][1:])  # the first round warms up
            found[task, name] |= {
                "seconds": median,
                "fastest_seconds": min(times[name][1:]),
                "fraction_of_limit": limit_seconds(task, problem, flop_rate) / median,
            }
    return list(found.values())
