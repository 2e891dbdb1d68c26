"""Ours beside the times that tokamax's authors measured on TPUs: `bench.py --static CHIP --against measured`.

The static profile of a program (`static_profile.py`) is not its time. Their programs were measured, so they are
profiled too: profile over measured time is the chip's factor, and our profile over that factor our predicted time, with
a range from the largest and the smallest factor. Their programs are those of the installed tokamax, the kernel with the
recorded blocks; the times of TPU7x that tokamax 0.0.12 ships with it are the same as those of the file.

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
import os
import resource
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import measured
import static_profile
from contenders import Problem
from rich.console import Console
from rich.table import Table
from static_profile import CHIPS, Program

from calibjax import kernels
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json, write_file
from calibjax.runtime.tpu_compiler import DoesNotCompile, compiler_version, with_compiler

MEASURED = Path(__file__).parents[2] / "shared" / "measure" / "measured_by_tokamax.json"
NAMES = {"v6e": "tpu_v6_lite", "v7x": "tpu7x"}
"""Chip -> its name in the measurements, which have no other of `CHIPS`."""
PALLAS, XLA = "pallas_mosaic_tpu", "xla"


class Task(NamedTuple):
    """One of our programs: title of its table, contender and task of `contenders`, their passes that add up to it."""

    title: str
    contender: str
    task: str
    passes: tuple[str, ...]


TASKS = {
    "forward": Task("loss", "vocab_stats pallas_tpu", "forward", ("forward",)),
    "both": Task("loss, dh and dW; no logits held", "vocab_stats pallas_tpu", "both", ("forward", "backward")),
    "saved": Task(
        "loss, dh and dW; exponentials of a block of tokens held",
        "linear_cross_entropy pallas_tpu",
        "both",
        ("forward", "backward"),
    ),
}
MOST_TOKENS = 4096
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
_THEIRS = "tokamax._src.ops.linear_softmax_cross_entropy_loss"


class Shape(NamedTuple):
    """Sizes of a program."""

    tokens: int
    width: int
    vocab: int


class Time(NamedTuple):
    """One time that tokamax's authors measured.

    Attributes:
        program: "xla", "chunked_xla" or "pallas_mosaic_tpu".
        passes: "forward", or "backward" alone.
        dtype: of the hidden states. The unembedding is in bfloat16.
        blocks: the kernel's, (name, size).
        milliseconds: of a call.
        extra_bytes: peak memory beyond inputs and results.
    """

    program: str
    passes: str
    dtype: str
    blocks: tuple[tuple[str, int], ...]
    milliseconds: float
    extra_bytes: float


class Row(NamedTuple):
    """Our task at one shape; None is what is not known.

    Attributes:
        static: our static estimate in milliseconds.
        temporaries: of our compiled program, in bytes.
        times: milliseconds measured, by program; of both passes their sum.
        extra_bytes: measured beyond inputs and results, by program; of both passes the larger.
        factors: profile over measured time of each of their programs that was profiled.
    """

    shape: Shape
    task: str
    static: float | None
    temporaries: int | None
    times: dict[str, float]
    extra_bytes: dict[str, float]
    factors: dict[str, float]


def measurements(file: Path, chip: str) -> dict[Shape, list[Time]]:
    """The times measured on a chip, those of 4,096 tokens first, because longer ones use their profiles.

    Raises:
        UserError: if the file cannot be read, or has no times of the chip.
    """
    found = collections.defaultdict(list)
    try:
        for row in read_json(file)["rows"]:
            if row["chip"] == NAMES.get(chip):
                found[Shape(row["N"], row["D"], row["V"])].append(_time(row))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: expected the times that tokamax's authors measured, got {error!r}.") from None
    if not found:
        raise UserError(f"{file}: no times measured on {chip}; expected one of {', '.join(NAMES)}.")
    return dict(sorted(found.items(), key=lambda item: (item[0].tokens != MOST_TOKENS, item[0])))


def _time(row: dict[str, Any]) -> Time:
    tokens, width, vocab, dtype = row["N"], row["D"], row["V"], _DTYPES[row["x_dtype"]]
    size = jnp.dtype(dtype).itemsize
    known = tokens * width * size + 2 * vocab * width
    if row["passes"] == "backward":  # gradients: the kernel's in float32, XLA's in the dtype of its product
        known += (4 if row["implementation"] == PALLAS else size) * width * (tokens + vocab)
    extra = max(row["peak_memory_mb"] * 2**20 - known, 0.0)
    blocks = tuple(sorted(json.loads(row["blocks"]).items()))
    return Time(row["implementation"], row["passes"], dtype, blocks, row["ms"], extra)


def build(what: Time | str, tokens: int, width: int, vocab: int) -> Program:
    """Our program for a task, or theirs of a measurement: the mean loss, or its gradients for a cotangent."""
    if isinstance(what, str):
        ours, problem = TASKS[what], Problem(tokens, width, vocab, "bfloat16")
        return contenders.program(ours.contender, ours.task, problem, ahead_of_time=True)
    module, name = ("reference", "reference") if what.program == XLA else (f"{PALLAS}_kernel", PALLAS)
    passes = {"forward": "fwd", "backward": "bwd"}[what.passes]
    function = getattr(
        importlib.import_module(f"{_THEIRS}.{module}"), f"linear_softmax_cross_entropy_loss_{passes}_{name}"
    )
    function = functools.partial(function, reduction="mean", **dict(what.blocks))
    hidden = jax.ShapeDtypeStruct((tokens, width), jnp.dtype(what.dtype))
    unembedding = jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    arguments = [hidden, targets, unembedding]
    if what.passes == "forward":
        return Program(lambda *args: function(*args)[0], arguments)
    cotangent, log_normalizer = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (tokens,)))
    return Program(function, [cotangent, log_normalizer, *arguments])


class Request(NamedTuple):
    """A program to compile: a task of ours or a measurement of theirs; for its cycles, or at its full size."""

    what: Time | str
    shape: Shape
    profile: bool


class Profiles:
    """What the compiler of a chip says of programs, kept in a file."""

    def __init__(self, file: Path, chip: str) -> None:
        self.file, self.chip = file, chip
        sources = sorted(Path(kernels.__file__).parent.rglob("*.py"))
        ours = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
        self._sources = {True: f"calibjax {ours}", False: f"tokamax {_version('tokamax')}"}
        self._compiler = f"jax {jax.__version__}, libtpu {compiler_version()}"
        self.kept = _read(file)

    def compile(self, requests: Iterable[Request], deadline: measured.Deadline) -> None:
        """Compile what is not kept yet, until the deadline. Many in one process, which costs less than one for each."""
        wanted = [(request, size) for request in requests for size in self.sizes(request)]
        for profile in (True, False):  # the flags are of a process
            todo = {self._key(x, size): (x.what, size) for x, size in wanted if x.profile == profile}
            while todo := {key: args for key, args in todo.items() if key not in self.kept}:
                if deadline.passed():
                    return
                if _version("tokamax") is None and any(isinstance(what, Time) for what, _ in todo.values()):
                    raise UserError("--against profiles the programs of tokamax, which is not installed.")
                with tempfile.TemporaryDirectory(prefix="against_") as directory:
                    flags = static_profile.profile_flags(directory) if profile else []
                    work = (self.chip, self.file, todo, directory if profile else None, deadline.left())
                    try:
                        with_compiler(_compile, *work, flags=flags)
                    except DoesNotCompile as error:  # its process died of the first one that is not kept
                        self.kept = _read(self.file)
                        if died := next((key for key in todo if key not in self.kept), None):
                            _keep(self.file, died, {"note": str(error)})
                self.kept = _read(self.file)

    def milliseconds(self, request: Request) -> float | None:
        """Static estimate; None where the compiler refuses the program, or it is not known yet."""
        points, (tokens, width, vocab) = self._points(request), request.shape

        def cycles(n: int, v: int) -> float:
            found = self.kept.get(self._key(request, Shape(n, width, v)), {}).get("cycles")
            return math.nan if found is None else found

        found = static_profile.at_full_size(cycles, (tokens, vocab), points)
        if len(points[0]) == 1:
            found *= tokens / points[0][0]
        return None if math.isnan(found) else 1e3 * found / CHIPS[self.chip].clock

    def sizes(self, request: Request) -> list[Shape]:
        """What is compiled."""
        if not request.profile:
            return [request.shape]
        tokens, vocab = self._points(request)
        return [Shape(n, request.shape.width, v) for n in tokens for v in vocab]

    def _points(self, request: Request) -> static_profile.Points:
        what, (tokens, width, vocab) = request.what, request.shape
        if isinstance(what, str):
            ours = TASKS[what]
            problem = Problem(min(tokens, MOST_TOKENS) if what == "saved" else tokens, width, vocab, "bfloat16")
            return contenders.profiled(ours.contender, self.chip, ours.task, problem)
        block = dict(what.blocks).get("v_block_size", 4096)
        return (min(tokens, MOST_TOKENS),), (2 * block, 4 * block)

    def temporaries(self, request: Request) -> int | None:
        """Bytes of the program at its full size."""
        return self.kept.get(self._key(request, request.shape), {}).get("temporaries")

    def _key(self, request: Request, size: Shape) -> str:
        what = request.what
        name = what if isinstance(what, str) else " ".join(map(str, (*what[:3], dict(what.blocks))))
        sizes = f"N={size.tokens} D={size.width} V={size.vocab}"
        source, kind = self._sources[isinstance(what, str)], "profile" if request.profile else "whole"
        return f"{self.chip}, {self._compiler}, {source}: {name}, {sizes}, {kind}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(file: Path) -> dict[str, dict[str, Any]]:
    return read_json(file) if file.exists() else {}


def _keep(file: Path, key: str, entry: dict[str, Any]) -> None:
    write_file(file, json.dumps(_read(file) | {key: entry}, indent=1) + "\n")


def _compile(
    chip: str, file: Path, todo: dict[str, tuple[Time | str, Shape]], directory: str | None, seconds: float
) -> None:
    """Compile each until too much memory is held, and keep what comes of it; called in the compiler's process."""
    deadline = measured.Deadline(seconds)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3
    for key, (what, size) in todo.items():
        # The compiler keeps some 0.5 GB of each profile: a new process goes on.
        if deadline.passed() or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > most:
            return
        try:
            found = static_profile.compile_here(CHIPS[chip], build, (what, *size), directory)
            entry: dict[str, Any] = {"temporaries": found.temporaries, "seconds": round(found.compile_seconds, 1)}
            entry |= {} if directory is None else {"cycles": sum(found.cycles.values())}
        except Exception as error:
            entry = {"note": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        _keep(file, key, entry)


def calibrating(times: Iterable[Time]) -> str:
    """The program whose profiles calibrate a chip: the kernel where it was measured, else XLA's."""
    return PALLAS if any(time.program == PALLAS for time in times) else XLA


def parts_of(task: str, times: list[Time]) -> dict[str, list[Time]]:
    """Program -> the measurements of one shape that make up a task of ours, of the dtype that is fastest."""
    passes = TASKS[task].passes
    found: dict[str, list[Time]] = {}
    for program, dtype in sorted({(time.program, time.dtype) for time in times}):
        parts = [time for time in times if (time.program, time.dtype) == (program, dtype) and time.passes in passes]
        if len(parts) == len(passes) and (program not in found or _total(parts) < _total(found[program])):
            found[program] = parts
    return found


def _total(parts: list[Time]) -> float:
    return sum(time.milliseconds for time in parts)


def requests(by_shape: dict[Shape, list[Time]], calibration: str) -> list[Request]:
    """Everything to compile, shape by shape."""
    found = []
    for shape, times in by_shape.items():
        for task in TASKS:
            if parts := parts_of(task, times):
                found += [Request(task, shape, True), Request(task, shape, False)]
                found += [Request(time, shape, True) for time in parts.get(calibration, [])]
    return found


def row(profiles: Profiles, shape: Shape, task: str, parts: dict[str, list[Time]], calibration: str) -> Row:
    """Our task beside theirs at one shape."""
    factors = {}
    for time in parts.get(calibration, []):
        if (static := profiles.milliseconds(Request(time, shape, True))) is not None:
            factors[time.passes] = static / time.milliseconds
    return Row(
        shape,
        task,
        profiles.milliseconds(Request(task, shape, True)),
        profiles.temporaries(Request(task, shape, False)),
        {program: _total(times) for program, times in parts.items()},
        {program: max(time.extra_bytes for time in times) for program, times in parts.items()},
        factors,
    )


def main(console: Console, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Profile what is not in the file yet, and print the factors of the chip and a table for each task."""
    chip, file = options.static, MEASURED if options.against == "measured" else Path(options.against)
    by_shape = measurements(file, chip)
    minutes = float("inf") if options.minutes is None else options.minutes
    calibration = calibrating(time for times in by_shape.values() for time in times)
    profiles = Profiles(options.profiles, chip)
    profiles.compile(requests(by_shape, calibration), measured.Deadline(60 * minutes))
    rows = [
        row(profiles, shape, task, parts, calibration)
        for shape, times in sorted(by_shape.items())
        for task in TASKS
        if (parts := parts_of(task, times))
    ]
    record["against"] = {"measurements": json.loads(file.read_text())["source"], "calibrated by": calibration}
    for task in TASKS:
        of_task = [x for x in rows if x.task == task]
        factors = [factor for x in of_task for factor in x.factors.values()]
        if factors:
            record["results"] += _print(console, chip, calibration, of_task, factors)
        elif of_task:
            console.print(f"{task}: no profile of {calibration} yet, and so no factor of {chip}.")
    notes = sorted({entry["note"] for entry in profiles.kept.values() if "note" in entry})
    record["against"] |= {"refused by the compiler": notes}
    for note in notes:
        console.print(f"Refused by the compiler: {note}", soft_wrap=True)


def _print(
    console: Console, chip: str, calibration: str, rows: list[Row], factors: list[float]
) -> list[dict[str, Any]]:
    """The factor of the chip and the table of one task; returns what it shows."""
    low, middle, high = min(factors), statistics.median(factors), max(factors)
    console.print(
        f"{chip}: profile over measured time of {calibration}, {len(factors)} programs: median {middle:.3f}, "
        f"from {low:.3f} to {high:.3f}"
    )
    programs = sorted({program for x in rows for program in x.times})
    table = Table(title=TASKS[rows[0].task].title, title_justify="left")
    columns = [
        "ours, static estimate, ms",
        "ours, predicted, ms",
        *(f"{program}, measured, ms" for program in programs),
    ]
    memory = ["ours, compiled, MiB", *(f"{program}, measured, MiB" for program in programs)]
    for column in ["N, D, V", *columns, "predicted / fastest measured", *memory]:
        table.add_column(column, justify="right")
    shown = []
    for x in rows:
        entry: dict[str, Any] = x._asdict() | {"shape": x.shape._asdict()}
        fastest, predicted, ratio = min(x.times.values()), "", ""
        if x.static is not None:
            entry["predicted"] = {"ms": x.static / middle, "from": x.static / high, "to": x.static / low}
            predicted = f"{x.static / middle:.2f} ({x.static / high:.2f} to {x.static / low:.2f})"
            ratio = (
                f"{x.static / middle / fastest:.2f} ({x.static / high / fastest:.2f} to {x.static / low / fastest:.2f})"
            )
        table.add_row(
            ", ".join(f"{size:,}" for size in x.shape),
            _figure(x.static, 1.0, 2),
            predicted,
            *(_figure(x.times.get(program), 1.0, 2) for program in programs),
            ratio,
            _figure(x.temporaries, 2**-20, 1),
            *(_figure(x.extra_bytes.get(program), 2**-20, 0) for program in programs),
        )
        shown.append(entry)
    console.print(table)
    return shown


def _figure(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"
