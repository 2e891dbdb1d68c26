"""`calibjax apply`: a fitted recalibrator on new predictions."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from calibjax import metrics
from calibjax.commands.groups import JsonOptions, TableOptions
from calibjax.data.table import PredictionTable, table_rows
from calibjax.data.write import WRITABLE, write_rows
from calibjax.eval.answers.decide import allocate
from calibjax.eval.compare import uncalibrated
from calibjax.eval.figures_json import draws_of, finite_or_none
from calibjax.eval.report.notes import Verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import UNCONVERGED, TextTable, interval, is_higher, is_lower, short, show
from calibjax.eval.report.terminal import print_result
from calibjax.recalibrate import Recalibrator, load
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about, quantity
from calibjax.runtime.files import check_new_file
from calibjax.runtime.options import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApplyOptions(TableOptions, JsonOptions):
    """Recalibrates the predictions of a table with a method that `calibjax compare --save` fitted.

    The table has the columns of `compare`. If it holds correct or label, the figures before and after are printed.
    Example: calibjax apply --table new.csv --method best --out calibrated.csv

    Attributes:
        table: new predictions: .csv, .tsv, .jsonl, .json, .parquet or .npz.
        method: directory that `compare --save` wrote.
        budget: number of samples to draw for all questions: adds calibrated_samples, the number for each question, such
            that for as many questions as possible at least one sample is right.
        out: file to write: .csv, .tsv, .jsonl, .parquet or .npz. All columns of the table, and calibrated_confidence;
            of a method that recalibrates a distribution also calibrated_prediction, the predicted class, and
            calibrated_p, the probability of every class (in .csv and .tsv calibrated_p_0, calibrated_p_1, ...).
    """

    method: Path
    budget: Count | None = None
    out: Path

    def check(self) -> None:
        """Raises `UserError` for a file of another kind, one that cannot be written, or the table itself."""
        if self.out.suffix not in WRITABLE:
            raise UserError(f"--out {self.out}: expected a file ending in {', '.join(WRITABLE)}.")
        with about("--out"):
            check_new_file(self.out)
        if self.out.exists() and self.table.exists() and self.out.samefile(self.table):
            raise UserError(f"--out {self.out}: expected another file than --table, whose columns would be lost.")


def run(options: ApplyOptions, log: Log = print) -> Document:
    """Runs the command; returns the number of rows, and the figures where the outcomes are known."""
    options.check()
    table = options.read_table(options.table, log, outcomes=False, skip_broken=options.skip_broken)
    with about("--method"):
        recalibrator = load(options.method)
    columns = _columns(recalibrator, table)
    if options.budget is not None:
        columns["samples"] = allocate(columns["confidence"], options.budget)
    _write(options, table, columns)
    document: Document = {"rows": len(table), "method": recalibrator.name, "out": str(options.out)}
    document["converged"] = bool(recalibrator.state.report.converged)
    outcome_known = table.predictions.correct is not None and "prediction" not in columns
    if table.predictions.labels is not None or outcome_known:
        before = uncalibrated(table.predictions)
        correct = before.correct
        if "prediction" in columns:
            correct = (columns["prediction"] == table.predictions.labels).astype(np.float32)
        pairs = (before.confidence, before.correct), (columns["confidence"], correct)
        first, second = (metrics.pooled_sums(*pair, groups=table.groups) for pair in pairs)
        document["figures"] = {"uncalibrated": _figures(first), recalibrator.name: _figures(second)}
        losses = [x for row in document["figures"].values() if (x := row["log_loss"]) is not None]
        if len(first.nll) > 1 and len(losses) == 2:  # a single row or group has no interval
            draws = draws_of(second)["nll"], draws_of(first)["nll"]
            difference = metrics.compare_resamples(losses[1] - losses[0], *draws)
            document["against_uncalibrated"] = {"log_loss": difference._asdict()}
    if not options.json:
        _print(document, options)
    return document


def _columns(recalibrator: Recalibrator, table: PredictionTable) -> dict[str, Any]:
    """Column -> values to write: confidence, and for methods that give log-probabilities prediction and p `[N, K]`."""
    data = table.predictions
    if data.logits is not None and data.confidence is None:
        base = uncalibrated(data._replace(labels=np.zeros(len(table), np.int32)))
        data = data._replace(confidence=base.confidence)
    recalibrated = recalibrator(data)
    if recalibrator.method.returns == "confidence":
        return {"confidence": recalibrated}
    p = np.exp(recalibrated)
    return {"confidence": np.minimum(p.max(axis=1), 1.0), "prediction": recalibrated.argmax(axis=1), "p": p}


def _figures(sums: metrics.CalibrationSums) -> dict[str, float | None]:
    summary, ece = metrics.summarise(sums), metrics.error_interval(sums)
    figures = {"log_loss": finite_or_none(summary["nll"]), "brier": summary["brier"]}
    figures |= {"ece": ece.value, "ece_low": ece.low, "ece_high": ece.high}
    return figures | {"accuracy": summary["accuracy"], "confidence": summary["confidence"]}


def _write(options: ApplyOptions, table: PredictionTable, columns: dict[str, np.ndarray]) -> None:
    # Every digit of the float32 numbers: what is read back in float64 is what `Recalibrator` returns.
    added = {f"calibrated_{name}": column for name, column in columns.items()}
    if options.out.suffix in (".csv", ".tsv") and "calibrated_p" in added:
        added |= {f"calibrated_p_{k}": column for k, column in enumerate(added.pop("calibrated_p").T)}
    assert table.rows is not None
    place = {row: number for number, row in enumerate(table.rows.tolist())}
    read = {name: getattr(options, name) for name in ("skip_broken", "per_token", "truth")}
    source = table_rows(options.table, **read)

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(source):
            if number not in place:
                continue
            if taken := added.keys() & row.keys():
                raise UserError(f"{options.table}: expected no column {min(taken)}, which is written here; rename it.")
            values = {name: column[place[number]].tolist() for name, column in added.items()}
            yield {**row, **values}

    write_rows(options.out, rows)


def _print(document: Document, options: ApplyOptions) -> None:
    name, figures = document["method"], document.get("figures")
    files = f"{quantity(document['rows'], 'row')} in {options.out}"
    notes = [] if document["converged"] else [f"{name} did not converge: {UNCONVERGED}."]
    if figures is None:
        line = f"{name} recalibrated {quantity(document['rows'], 'prediction')}; their outcomes are not known."
        print_result(line, notes=notes, files=files)
        return
    before, after = map(show("log_loss", leading_zero=False, absent="inf"), figures.values())
    infinite = before == "inf", after == "inf"
    better, worse = infinite == (True, False), infinite == (False, True)
    line = f"log loss {after} with {name} against {before} uncalibrated"
    difference = document.get("against_uncalibrated", {}).get("log_loss")
    if difference is not None:
        better, worse = is_lower(difference), is_higher(difference)
        line += f" ({interval(difference)})"
    columns = ["", "log loss", "Brier", "ECE [95% interval]", "accuracy", "confidence"]
    rows = []
    for (title, row), log_loss in zip(figures.items(), (before, after), strict=True):
        brier, ece, low, high, accuracy, confidence = map(short, list(row.values())[1:])
        rows.append([title, log_loss, brier, f"{ece} [{low}, {high}]", accuracy, confidence])
    start = "The recalibrated predictions are better" if better else "no improvement beyond noise"
    if worse:
        start = "the recalibrated predictions are worse"
    verdict = Verdict(f"{start}: {line}.", is_warning=not better)
    print_result(verdict, TextTable(f"{document['rows']:,} predictions", columns, rows), notes=notes, files=files)
