"""`calibjax apply`: a fitted recalibrator on new predictions."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from calibjax import metrics
from calibjax.commands.common import JsonOptions
from calibjax.data.table import PredictionTable, read_table
from calibjax.eval.compare.contenders import Outcome, uncalibrated
from calibjax.eval.report.rows import UNCONVERGED, TextTable, short
from calibjax.eval.report.terminal import print_result
from calibjax.recalibrate import Recalibrator, load
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_file, new_file, write_file

_KINDS = (".csv", ".jsonl", ".npz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyOptions(JsonOptions):
    """Recalibrates the predictions of a table with a method that `calibjax compare --save` fitted.

    The table has the columns of `compare`, without the outcome where it is not known. Where it is (correct, or label),
    the figures before and after are printed.

    Attributes:
        table: new predictions: .csv, .parquet, .jsonl or .npz.
        confidence: column of the confidence in the table.
        method: directory that `compare --save` wrote.
        out: file to write: .csv, .jsonl or .npz. For every row the calibrated confidence; of a method that recalibrates
            a distribution also the predicted class and the probability of every class.
        json: print the figures as one JSON document.
    """

    heading: ClassVar[str] = "data"
    table: Path
    confidence: str = "confidence"
    method: Path
    out: Path

    def check(self) -> None:
        """Raises `UserError` for a file of another kind, one that cannot be written, or the table itself."""
        if self.out.suffix not in _KINDS:
            raise UserError(f"--out {self.out}: expected a file ending in {', '.join(_KINDS)}.")
        with about("--out"):
            check_new_file(self.out)
        if self.out.exists() and self.table.exists() and self.out.samefile(self.table):
            raise UserError(f"--out {self.out}: expected another file than --table, whose columns would be lost.")


def run(options: ApplyOptions, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the command; returns the number of rows, and the figures where the outcomes are known."""
    options.check()
    with about("--table"):
        table = read_table(options.table, outcomes=False, column=options.confidence)
    with about("--method"):
        recalibrator = load(options.method)
    columns = _columns(recalibrator, table)
    _write(options.out, columns)
    document: dict[str, Any] = {"rows": len(table), "method": recalibrator.name, "out": str(options.out)}
    document["converged"] = bool(recalibrator.state.report.converged)
    if table.predictions.labels is not None or table.predictions.correct is not None:
        before, after = uncalibrated(table.predictions), _outcome(columns, table)
        document["figures"] = {"uncalibrated": _figures(before), recalibrator.name: _figures(after)}
    if not options.json:
        _print(document, options)
    return document


def _columns(recalibrator: Recalibrator, table: PredictionTable) -> dict[str, Any]:
    """What is written, by column: confidence; with log-probabilities also prediction and p `[N, K]`."""
    data = table.predictions
    if data.logits is not None and data.confidence is None:
        base = uncalibrated(data._replace(labels=np.zeros(len(table), np.int32)))
        data = data._replace(confidence=base.confidence)
    if table.groups is not None:
        data = data._replace(slices=table.groups.astype(np.int32))
    found = recalibrator(data)
    if recalibrator.method.gives == "confidence":
        return {"confidence": found}
    probabilities = np.exp(found)
    confidence = np.minimum(probabilities.max(axis=1), 1.0)
    return {"confidence": confidence, "prediction": found.argmax(axis=1), "p": probabilities}


def _outcome(columns: dict[str, np.ndarray], table: PredictionTable) -> Outcome:
    correct = uncalibrated(table.predictions).correct
    if "prediction" in columns:
        correct = (columns["prediction"] == table.predictions.labels).astype(np.float32)
    return Outcome(columns["confidence"], correct)


def _figures(outcome: Outcome) -> dict[str, float]:
    sums = metrics.pooled_sums(outcome.confidence, outcome.correct)
    found, ece = metrics.summarise(sums), metrics.error_interval(sums)
    return {
        "log_loss": found["nll"],
        "brier": found["brier"],
        "ece": ece.value,
        "ece_low": ece.low,
        "ece_high": ece.high,
        "accuracy": found["accuracy"],
        "confidence": found["confidence"],
    }


def _write(out: Path, columns: dict[str, Any]) -> None:
    if out.suffix == ".npz":
        with new_file(out) as file:
            np.savez_compressed(file, **columns)
        return
    names: list[str] = []
    values: list[list[float]] = []
    for name, column in columns.items():
        parts = column.T if column.ndim == 2 else [column]
        names += [f"{name}_{index}" for index in range(len(parts))] if column.ndim == 2 else [name]
        values += [part.tolist() for part in parts]
    rows = zip(*values, strict=True)
    if out.suffix == ".csv":
        lines = [",".join(names), *(",".join(f"{value:.9g}" for value in row) for row in rows)]
    else:
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    write_file(out, "\n".join(lines) + "\n")


def _print(document: dict[str, Any], options: ApplyOptions) -> None:
    name, figures = document["method"], document.get("figures")
    files = f"{document['rows']:,} rows in {options.out}"
    notes = [] if document["converged"] else [f"{name} did not converge: {UNCONVERGED}."]
    if figures is None:
        line = f"{name} recalibrated {document['rows']:,} predictions; their outcomes are not known."
        print_result(line, notes=notes, files=files)
        return
    before, after = figures["uncalibrated"], figures[name]
    better = after["log_loss"] < before["log_loss"]
    line = f"log loss {short(after['log_loss'])} with {name} against {short(before['log_loss'])} uncalibrated"
    columns = ["", "log loss", "Brier", "ECE [95% interval]", "accuracy", "confidence"]
    rows = [
        [
            row,
            *(short(of_row[key]) for key in ("log_loss", "brier")),
            f"{short(of_row['ece'])} [{short(of_row['ece_low'])}, {short(of_row['ece_high'])}]",
            *(short(of_row[key]) for key in ("accuracy", "confidence")),
        ]
        for row, of_row in figures.items()
    ]
    verdict = (
        f"The recalibrated predictions are better: {line}." if better else f"WARNING: no improvement here: {line}."
    )
    print_result(verdict, TextTable(f"{document['rows']:,} predictions", columns, rows), notes=notes, files=files)
