"""`calibjax report`: draws the report of a run again, or one of several runs, from their metrics.json."""

import dataclasses
import datetime
import os
from pathlib import Path
from typing import Annotated

from calibjax.commands.groups import JsonOptions
from calibjax.commands.parser import made_by
from calibjax.eval.report.page import Run, save_report
from calibjax.eval.report.schema import Document, as_user_error, read_metrics, read_tokens
from calibjax.eval.report.terminal import print_comparison, print_report
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import writing
from calibjax.runtime.locks import lock_run
from calibjax.runtime.options import Positional


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions(JsonOptions):
    """Draws tables, figures (PNG and SVG) and report.html from the metrics.json of a run or of several.

    The page is self-contained and loads nothing from the network; it shows several runs side by side.
    Example: calibjax report runs/first runs/second --out runs/both

    Attributes:
        runs: directories with a metrics.json.
        out: where to write; by default the run's own directory, where there is one run.
        subjects: print the table of subjects as well, where a run has one.
        json: print the list of the files written as JSON, and no tables.
    """

    runs: Annotated[tuple[Path, ...], Positional()]
    out: Path | None = None
    subjects: bool = False


def run(options: ReportOptions, log: Log = print) -> Document:
    """Runs the command; returns the names of the files written."""
    if not options.runs:
        raise UserError("report: expected the directory of at least one run.")
    if options.out is None and len(options.runs) > 1:
        raise UserError("--out: expected a directory to write the report of several runs to.")
    names = [Path(os.path.abspath(directory)).name for directory in options.runs]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in options.runs]
    out = next(iter(options.runs)) if options.out is None else options.out
    runs = [_read(directory, name) for directory, name in zip(options.runs, names, strict=True)]
    with as_user_error(", ".join(str(directory / "metrics.json") for directory in options.runs)):
        with writing(f"--out {out}"):
            lock_run(out)
            files = save_report(runs, out)
        done = f"report in {out}: report.html and its plots"
        if not options.json:
            for number, loaded in enumerate(runs, 1):
                if len(runs) > 1:
                    print(f"\n{loaded.name}")
                held_out = loaded.document["held_out"]
                line = done if number == len(runs) else ""
                if "sort" in held_out:
                    print_comparison(held_out, f"{loaded.name}, held out", files=line)
                else:
                    print_report(loaded.document, files=line, subjects=options.subjects)
    return {"out": str(out), "files": files}


def _read(directory: Path, name: str) -> Run:
    file = directory / "metrics.json"
    document = read_metrics(file)
    date = datetime.date.fromtimestamp(file.stat().st_mtime).isoformat()
    return Run(name, document, read_tokens(directory), date, made_by(directory), directory)
