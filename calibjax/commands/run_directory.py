"""The life of a run: its checks, its directory, and what is written and printed at its end."""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from calibjax.commands.groups import check_sources
from calibjax.commands.parser import CONFIG, write_config
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.report.terminal import print_report
from calibjax.runtime.context import Log, RunContext
from calibjax.runtime.distributed import is_first, on_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import check_orbax_path, is_temporary, json_text, read_json, write_file, writing
from calibjax.runtime.locks import RUN_LOCK, lock_run
from calibjax.runtime.options import check_options, run_identity
from calibjax.runtime.sharding import make_mesh
from calibjax.runtime.tracking import TrackerName, check_tracker

if TYPE_CHECKING:
    from calibjax.eval.tokens import MethodResult


def begin(command: str, options: Any, log: Log) -> RunContext:
    """Checks the options of a command, makes its mesh, opens its data and claims its output directory.

    It reads the first row of local data, so that a wrong path or column is found before the model is loaded.
    """
    check_options(options)
    options.check()
    track: TrackerName = getattr(options, "track", "tensorboard")
    check_tracker(track)
    mesh = options.devices.make_mesh() if hasattr(options, "devices") else make_mesh(devices=jax.devices()[:1])
    for group in vars(options).values():
        if hasattr(group, "check"):  # of training: whether batches divide among the devices
            group.check(mesh)
    check_sources(options)
    if options.out is not None:
        claim_directory(options.out, run_identity(command, options))
        on_first(functools.partial(write_config, options.out, command, options))
    return RunContext(
        directory=options.out, mesh=mesh, seed=options.seed, log=log, progress=not options.quiet, track=track
    )


@contextlib.contextmanager
def removing_empty_out(out: Path | None) -> Iterator[None]:
    """If a run ends by a `UserError` before it has results, removes the directories, run.json and run.yaml it made."""
    if out is None:
        yield
        return
    made = [path for path in (out, *out.parents) if not path.exists()]
    is_new = bool(made) or (out.is_dir() and not any(out.iterdir()))
    try:
        yield
    except UserError:
        if is_new and is_first():
            with contextlib.suppress(OSError):  # of a directory that is not empty, or was not made
                if {entry.name for entry in out.iterdir()} <= {"run.json", CONFIG}:
                    for entry in out.iterdir():
                        entry.unlink()
                for path in made:
                    path.rmdir()
        raise


def claim_directory(out: Path, identity: dict[str, Any]) -> None:
    """Makes `out` the directory of the run that `identity` describes, unless it already is, and locks it."""

    def claim() -> None:
        content = json.loads(json.dumps(identity))
        check_orbax_path(out)
        _holds_run(out, content)  # before anything is made
        with writing(f"--out {out}"):
            lock_run(out)
            if not _holds_run(out, content):
                write_file(out / "run.json", json_text(content))

    on_first(claim)


def _holds_run(out: Path, identity: dict[str, Any]) -> bool:
    """Whether `out` is the directory of this run; if not, a run can begin in it."""
    file = out / "run.json"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: expected a directory, but this is a file.")
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    names = {name for name in names if name != RUN_LOCK and not is_temporary(name, file.name)}  # a kill may leave them
    if names <= {file.name, CONFIG} and names != {CONFIG}:
        return False  # at most a run that ended before any work, by an invalid option
    if file.name not in names:
        raise UserError(f"--out {out} is not empty and holds no run of calibjax: choose another directory.")
    try:
        stored = read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not readable ({error}): choose another --out, or remove this one.") from error
    if stored != identity:
        different = ", ".join(itertools.islice(_differences(stored, identity), 8))
        hint = "Choose another directory, remove this one, or give the same options to resume it."
        raise UserError(f"--out {out} holds another run (different: {different}). {hint}")
    return True


def _differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        has_same_options = a.get("command") == b.get("command")
        keys = sorted(a.keys() | b.keys()) if has_same_options else ["command"]
        for key in keys:
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}")
    elif a != b:
        yield f"{path.lstrip('.')} {a!r} there, {b!r} now"


def make_document(results: "Mapping[str, dict[str, MethodResult]]", run: Mapping[str, Any], **options: Any) -> Document:
    """The contents of metrics.json: the figures of the set `held_out` and of others; options as `results_json`'s."""
    from calibjax.eval.tokens import results_json

    figures = {name: results_json(methods, **options) for name, methods in results.items()}
    document: Document = {"schema": SCHEMA, "held_out": figures.pop("held_out"), "run": dict(run)}
    if figures:
        document["transfer"] = figures
    return document


def write_results(document: Document, out: Path) -> None:
    """Writes metrics.json, with the curves of every train.jsonl but the folds', and what is drawn from it."""
    from calibjax.eval.report.page import write_report

    curves = {}
    for file in sorted(out.glob("**/train.jsonl")):
        if "folds" in file.relative_to(out).parts:
            continue
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        curve: dict[str, list[Any]] = {}
        for step, value in (("step", "loss"), ("validation_step", "validation_nll")):
            logged = [row for row in rows if value in row]
            curve |= {step: [row["step"] for row in logged], value: [row[value] for row in logged]}
        curves[file.parent.relative_to(out).as_posix().removeprefix("fit/")] = curve
    if curves:
        document["training"] = curves
    write_file(out / "metrics.json", json_text(document))
    write_report(document, out)


def finish(document: Document, options: Any, *, holds: str = "head/ (for calibjax.load_head)") -> None:
    """In the first process, writes the results to --out, if it is given, and prints verdict, table and names of files.

    `holds` names the further files that the run left in --out.
    """
    if not is_first():
        return
    files = ""
    if options.out is not None:
        write_results(document, options.out)
        files = f"results in {options.out}: report.html, metrics.json, reliability.png, {holds}"
    if not options.json:
        print_report(document, files=files, subjects=getattr(options, "subjects", False))
