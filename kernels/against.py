"""Ours beside the times that tokamax's authors measured on TPUs: `bench.py --static CHIP --against measured`.

The static profile of a program (`static_profile.py`) is not its time. Their programs were measured, so they are
profiled too: profile over measured time is the chip's factor, and our profile over that factor our predicted time, with
a range from the largest and the smallest factor. Their programs are those of the installed tokamax, the kernel with the
recorded blocks.

Cycles are affine in V in whole blocks: each program is profiled at two short vocabularies. Ours are affine in N too and
profiled at few blocks of tokens; theirs, and ours that hold exponentials of 4,096 tokens at a time, at no more tokens
than that, beyond which they are taken in proportion. Each profile is written to `--profiles` at once, from which an
interrupted run resumes. A profile of ours holds for the sources of `calibjax/kernels` that it was made from.
"""

import argparse
import collections
import functools
import hashlib
import importlib
import importlib.metadata
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import static_profile
from contenders import Problem
from rich.console import Console
from rich.table import Table
from static_profile import CHIPS, Program

from calibjax import kernels
from calibjax.runtime.compilers import DoesNotCompile, compiler_version
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json, write_file

MEASURED = Path(__file__).parents[2] / "shared" / "measure" / "measured_by_tokamax.json"
NAMES = {"v6e": "tpu_v6_lite", "v7x": "tpu7x"}
"""Chip -> its name in the measurements, which have no other of `CHIPS`."""
PALLAS, XLA = "pallas_mosaic_tpu", "xla"
TASKS = {
    "forward": ("loss", "vocab_stats pallas_tpu", "forward", ("forward",)),
    "both": ("loss, dh and dW; no logits held", "vocab_stats pallas_tpu", "both", ("forward", "backward")),
    "saved": (
        "loss, dh and dW; exponentials of a block of tokens held",
        "linear_cross_entropy pallas_tpu",
        "both",
        ("forward", "backward"),
    ),
}
"""Our programs: title of the table, contender and task of `contenders`, their passes that add up to it."""
MOST_TOKENS = 4096
_THEIRS = "tokamax._src.ops.linear_softmax_cross_entropy_loss"


class Shape(NamedTuple):
    """Sizes of a program."""

    tokens: int
    width: int
    vocab: int


class Time(NamedTuple):
    """One time that tokamax's authors measured."""

    program: str  # "xla", "chunked_xla" or "pallas_mosaic_tpu"
    passes: str  # "forward", or "backward" alone
    dtype: str  # of the hidden states; the unembedding is in bfloat16
    blocks: tuple[tuple[str, int], ...]  # the kernel's, (name, size)
    milliseconds: float
    extra_bytes: float  # peak memory beyond inputs and results


def measurements(file: Path, chip: str) -> dict[Shape, list[Time]]:
    """The times measured on a chip, those of 4,096 tokens first, because longer ones use their profiles."""
    by_shape = collections.defaultdict(list)
    for row in read_json(file)["rows"]:
        if row["chip"] != NAMES.get(chip):
            continue
        shape, dtype = Shape(row["N"], row["D"], row["V"]), {"bf16": "bfloat16", "f32": "float32"}[row["x_dtype"]]
        size = jnp.dtype(dtype).itemsize
        known = shape.tokens * shape.width * size + 2 * shape.vocab * shape.width
        if row["passes"] == "backward":  # gradients: the kernel's in float32, XLA's in the dtype of its product
            known += (4 if row["implementation"] == PALLAS else size) * shape.width * (shape.tokens + shape.vocab)
        extra = max(row["peak_memory_mb"] * 2**20 - known, 0.0)
        blocks = tuple(sorted(json.loads(row["blocks"]).items()))
        by_shape[shape].append(Time(row["implementation"], row["passes"], dtype, blocks, row["ms"], extra))
    if not by_shape:
        raise UserError(f"{file}: no times measured on {chip}; expected one of {', '.join(NAMES)}.")
    return dict(sorted(by_shape.items(), key=lambda item: (item[0].tokens != MOST_TOKENS, item[0])))


def build(what: Time | str, tokens: int, width: int, vocab: int) -> Program:
    """Our program for a task, or theirs of a measurement: the mean loss, or its gradients for a cotangent."""
    if isinstance(what, str):
        _, contender, task, _ = TASKS[what]
        return contenders.program(contender, task, Problem(tokens, width, vocab, "bfloat16"), ahead_of_time=True)
    module, name = ("reference", "reference") if what.program == XLA else (f"{PALLAS}_kernel", PALLAS)
    name = f"linear_softmax_cross_entropy_loss_{ {'forward': 'fwd', 'backward': 'bwd'}[what.passes] }_{name}"
    function = getattr(importlib.import_module(f"{_THEIRS}.{module}"), name)
    function = functools.partial(function, reduction="mean", **dict(what.blocks))
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.dtype(what.dtype))
    unembedding = jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16)
    arguments = [hidden, jax.ShapeDtypeStruct((tokens,), jnp.int32), unembedding]
    if what.passes == "forward":
        return Program(lambda *args: function(*args)[0], arguments)
    cotangent, log_normalizer = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (tokens,)))
    return Program(function, [cotangent, log_normalizer, *arguments])


class Profiles:
    """What a chip's compiler finds for programs, stored in a file; nothing is compiled after `end`."""

    def __init__(self, file: Path, chip: str, end: float = math.inf) -> None:
        self.file, self.chip, self.end = file, chip, end
        sources = sorted(Path(kernels.__file__).parent.rglob("*.py"))
        self.ours = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
        self.theirs = next((each.version for each in importlib.metadata.distributions(name="tokamax")), None)
        self.stored: dict[str, dict[str, Any]] = read_json(file) if file.exists() else {}

    def entry(self, what: Time | str, shape: Shape, profile: bool) -> dict[str, Any]:
        """Temporaries and, with `profile`, cycles of a program; a note where it does not compile; or nothing."""
        if isinstance(what, str):
            name, source = what, f"calibjax {self.ours}"
        else:
            name = " ".join(map(str, (*what[:3], dict(what.blocks))))
            source = f"tokamax {self.theirs}"
        compiler = f"jax {jax.__version__}, {compiler_version()}"
        sizes = f"N={shape.tokens} D={shape.width} V={shape.vocab}, {'profile' if profile else 'whole'}"
        key = f"{self.chip}, {compiler}, {source}: {name}, {sizes}"
        if key not in self.stored and time.monotonic() < self.end:
            try:
                found = static_profile.compile_for(self.chip, build, what, *shape, profile=profile)
                self.stored[key] = {"temporaries": found.temporaries, "cycles": sum(found.cycles.values())}
            except DoesNotCompile as error:
                self.stored[key] = {"note": str(error)[:300]}
            write_file(self.file, json.dumps(self.stored, indent=1) + "\n")
        return self.stored.get(key, {})

    def milliseconds(self, what: Time | str, shape: Shape) -> float | None:
        """Static estimate; None where the compiler refuses the program, or it is not known yet."""
        tokens, width, vocab = shape
        if isinstance(what, str):
            problem = Problem(min(tokens, MOST_TOKENS) if what == "saved" else tokens, width, vocab, "bfloat16")
            points = contenders.profiled(TASKS[what][1], self.chip, TASKS[what][2], problem)
        else:
            block = dict(what.blocks).get("v_block_size", 4096)
            points = (min(tokens, MOST_TOKENS),), (2 * block, 4 * block)

        def cycles(n: int, v: int) -> float:
            return self.entry(what, Shape(n, width, v), True).get("cycles", math.nan)

        total = static_profile.at_full_size(cycles, (tokens, vocab), points)
        if len(points[0]) == 1:
            total *= tokens / points[0][0]
        return None if math.isnan(total) else 1e3 * total / CHIPS[self.chip].clock


def parts_of(task: str, times: list[Time]) -> dict[str, list[Time]]:
    """Program -> the measurements of one shape that make up a task of ours, of the dtype that is fastest."""
    passes, fastest = TASKS[task][3], {}
    for program, dtype in sorted({(x.program, x.dtype) for x in times}):
        parts = [x for x in times if (x.program, x.dtype) == (program, dtype) and x.passes in passes]
        if len(parts) == len(passes) and (program not in fastest or _total(parts) < _total(fastest[program])):
            fastest[program] = parts
    return fastest


def _total(parts: list[Time]) -> float:
    return sum(time.milliseconds for time in parts)


def _row(profiles: Profiles, shape: Shape, task: str, parts: dict[str, list[Time]], calibration: str) -> dict[str, Any]:
    """Our task beside theirs at one shape; None is what is not known."""
    static = {time: profiles.milliseconds(time, shape) for time in parts.get(calibration, [])}
    return {
        "shape": shape._asdict(),
        "task": task,
        "static": profiles.milliseconds(task, shape),
        "temporaries": profiles.entry(task, shape, False).get("temporaries"),
        "times": {program: _total(times) for program, times in parts.items()},
        "extra_bytes": {program: max(time.extra_bytes for time in times) for program, times in parts.items()},
        "factors": {time.passes: ms / time.milliseconds for time, ms in static.items() if ms is not None},
    }


def main(console: Console, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Profiles what is not in the file yet, and prints the factors of the chip and a table for each task."""
    chip, file = options.static, MEASURED if options.against == "measured" else Path(options.against)
    by_shape = measurements(file, chip)
    # The program whose profiles calibrate a chip: the kernel where it was measured, else XLA's.
    calibration = PALLAS if any(time.program == PALLAS for times in by_shape.values() for time in times) else XLA
    minutes = math.inf if options.minutes is None else options.minutes
    profiles = Profiles(options.profiles, chip, time.monotonic() + 60 * minutes)
    found = {
        (task, shape): _row(profiles, shape, task, parts, calibration)
        for shape, times in by_shape.items()
        for task in TASKS
        if (parts := parts_of(task, times))
    }
    notes = sorted({entry["note"] for entry in profiles.stored.values() if "note" in entry})
    source = json.loads(file.read_text())["source"]
    record["against"] = {"measurements": source, "calibrated by": calibration, "refused by the compiler": notes}
    for task in TASKS:
        rows = [found[key] for key in sorted(found) if key[0] == task]
        factors = [factor for row in rows for factor in row["factors"].values()]
        if factors:
            console.print(f"{chip}, profile over measured time of {calibration}, {len(factors)} programs:")
            record["results"] += _print(console, rows, factors)
        elif rows:
            console.print(f"{task}: no profile of {calibration} yet, and so no factor of {chip}.")
    for note in notes:
        console.print(f"Refused by the compiler: {note}", soft_wrap=True)


def _print(console: Console, rows: list[dict[str, Any]], factors: list[float]) -> list[dict[str, Any]]:
    """The factor of the chip and the table of one task; returns its rows with the predicted times."""
    low, middle, high = min(factors), statistics.median(factors), max(factors)
    console.print(f"median {middle:.3f}, from {low:.3f} to {high:.3f}")
    programs = sorted({program for row in rows for program in row["times"]})
    table = Table("N, D, V", title=TASKS[rows[0]["task"]][0], title_justify="left")
    times, memory = ([f"{program}, measured, {unit}" for program in programs] for unit in ("ms", "MiB"))
    ours = ("ours, static estimate, ms", "ours, predicted, ms")
    for column in (*ours, *times, "predicted / fastest measured", "ours, compiled, MiB", *memory):
        table.add_column(column, justify="right")
    for row in rows:
        predicted = ratio = ""
        if row["static"] is not None:
            ms, least, most = (row["static"] / factor for factor in (middle, high, low))
            row["predicted"], fastest = {"ms": ms, "from": least, "to": most}, min(row["times"].values())
            predicted = f"{ms:.2f} ({least:.2f} to {most:.2f})"
            ratio = f"{ms / fastest:.2f} ({least / fastest:.2f} to {most / fastest:.2f})"
        table.add_row(
            ", ".join(f"{size:,}" for size in row["shape"].values()),
            _figure(row["static"], 1.0, 2),
            predicted,
            *(_figure(row["times"].get(program), 1.0, 2) for program in programs),
            ratio,
            _figure(row["temporaries"], 2**-20, 1),
            *(_figure(row["extra_bytes"].get(program), 2**-20, 0) for program in programs),
        )
    console.print(table)
    return rows


def _figure(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"
