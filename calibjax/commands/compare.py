"""`calibjax compare`: all recalibration methods, on a model and text or on a table of predictions."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.commands import groups, run_directory
from calibjax.data.table import PredictionTable, read_table, split_table, table_rows
from calibjax.eval.compare import Comparison, ComparisonInputs, SortKey, prediction_inputs, run_comparison
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.report.terminal import print_comparison
from calibjax.recalibrate import METHODS, Recalibrator, fit_daca
from calibjax.recalibrate.saved import check_directory, save
from calibjax.runtime.context import Log
from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import Count, flag_of, not_identity, run_identity

_FEWEST_ROWS = 10
_DACA = "daca"
"""Name of the row of `fit_daca`, which reads no labels and is therefore none of `METHODS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(
    groups.BinningOptions, groups.OutputOptions, groups.ColumnOptions, groups.TextOptions, groups.ModelOptions
):
    """Fits every recalibration method on one part of the data and compares them on the other.

    On text: --model and --data; every next token is a prediction, and ATS is fitted as by `train ats` with its
    defaults. On existing predictions: --table, a .csv, .tsv, .jsonl, .json, .parquet or .npz file with confidence and
    correct (0, 1, yes, no, or a fraction of attempts), or logits (or probs) and label, and optionally group (dependent
    rows) and category (kinds of questions that new data will have too); docs/data.md has every form. Prints which
    method has the lowest log loss, whether it beats temperature scaling (corrected for the number of methods), and a
    table with intervals. Exit code 1 where a method failed.
    Example: calibjax compare --table predictions.csv --save best

    Attributes:
        data: text for the model: file, directory or hub id, as for `train ats`.
        table: file of predictions, in place of --model and --data.
        base_table: the rows, options and --columns of --table, with logits of the model before its post-training:
            adds daca to the comparison, whose temperature needs no labels (docs/recalibration.md).
        methods: names (docs/recalibration.md), or all but those with more parameters for pairs of classes than there
            are predictions; the base model and temperature scaling are always shown.
        out: directory for metrics.json, report.html and reliability.png; without it only the table is printed.
        save: directory for the winner, or else temperature scaling, for `calibjax apply`; an earlier one is replaced.
        fit_fraction: fraction of the data to fit on; of a table, rows (or groups) drawn at random.
        max_tokens: largest number of predictions in each part of a text, whole sequences drawn at random.
        sort: figure that the rows are ordered by, best first.
    """

    model: str | None = None
    data: str | None = None
    table: Path | None = None
    base_table: Path | None = None
    methods: tuple[str, ...] = ("all",)
    out: Path | None = not_identity(None)
    max_tokens: Count = 10_000
    sort: SortKey = not_identity("log_loss")
    save: Path | None = not_identity(None)

    def check(self) -> None:
        """Raises `UserError` unless there is a model with its text, or else a table."""
        given = [name for name in ("model", "data", "table") if getattr(self, name) is not None]
        if given not in (["model", "data"], ["table"]):
            raise UserError("give either --model and --data, or --table.")
        text_only = ["split", "split_order", "max_tokens", "adapter", "dtype"]
        not_read = ["columns", "per_token", "truth"] if self.table is None else text_only
        ignored = [flag_of(name) for name in not_read if getattr(self, name) != getattr(CompareOptions, name)]
        ignored += [] if self.table is None else self.text.changed("skip_broken")
        if ignored:
            raise UserError(f"{', '.join(ignored)}: not read with --{given[0]}; leave them out.")
        if self.base_table is not None and self.table is None:
            raise UserError("--base-table: expected --table, with the rows of the post-trained model.")
        if self.save is not None:
            if self.out is not None and os.path.realpath(self.save) == os.path.realpath(self.out):
                raise UserError(f"--save {self.save}: expected another directory than --out, which holds the tables.")
            with about("--save"):
                check_directory(self.save)


def run(options: CompareOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    chosen = groups.split_names(options.methods)
    # On text the heads of `train ats` take the place of an MLP that reads one prediction at a time.
    known = ["ats" if name == "mlp_temperature" and options.table is None else name for name in METHODS]
    unknown = [name for name in chosen if name not in (*known, "all", "uncalibrated")]
    if unknown or not chosen:
        raise UserError(f"--methods: {', '.join(unknown) or 'nothing'}: expected all, or some of {', '.join(known)}.")
    named = "all" not in chosen
    names = tuple(name for name in known if not named or name in chosen)
    context = run_directory.begin("compare", options, log)
    with contextlib.ExitStack() as directory:
        if options.table is not None:
            inputs = _from_table(options, names, log, include_large=named)
        else:
            from calibjax.commands.compare_text import from_model  # imports models, which a table does not need

            fits = directory.enter_context(context.with_directory()).within("fit")
            inputs = from_model(options, names, fits, include_large=named)
        settings: dict[str, Any] = {"bins": options.bins, "closed": options.closed, "sort": options.sort}
        comparison = run_comparison(inputs, **settings, context=context)
    document: Document = {"schema": SCHEMA, "held_out": comparison.document, "run": run_identity("compare", options)}
    files = []
    if options.out is not None and is_first():
        run_directory.write_results(document, options.out)
        files.append(f"results in {options.out}: report.html, metrics.json, reliability.png")
    if options.save is not None:
        files.append(_save_winner(options.save, comparison, inputs))
    if is_first() and not options.json:
        print_comparison(document["held_out"], inputs.title, files="\n".join(files))
    elif options.save is not None:
        log(files[-1])
    return document


def _save_winner(directory: Path, comparison: Comparison, inputs: ComparisonInputs) -> str:
    """Writes the fitted state of the method that the verdict names; returns a line on it."""
    name = comparison.winner
    state = comparison.states[name]
    if state is None:
        return f"nothing saved in {directory}: no method is better than the uncalibrated predictions"
    if inputs.save_head is not None and name in ("temperature", "ats"):
        inputs.save_head(directory, state)
        return f"{name} saved in {directory}, for generate --head, eval tasks --head and calibjax.load_head"
    notes: dict[str, Any] = {"data": inputs.title, "unit": inputs.unit}
    save(directory, Recalibrator("temperature" if name == _DACA else name, state, notes))
    return f"{name} saved in {directory}, for calibjax apply and calibjax.recalibrate.load"


def _from_table(options: CompareOptions, names: tuple[str, ...], log: Log, *, include_large: bool) -> ComparisonInputs:
    assert options.table is not None
    table = options.read_table(options.table, log, skip_broken=options.text.skip_broken)
    if len(table) < _FEWEST_ROWS:
        raise UserError(f"--table: {options.table}: expected at least {_FEWEST_ROWS} rows, got {len(table)}.")
    what = "label" if table.predictions.logits is not None else "correct"
    truth = np.asarray(table.predictions.labels if what == "label" else table.predictions.correct)
    if (truth == truth[0]).all():
        raise UserError(f"--table: {options.table}: expected different values of {what}, got {truth[0]:g} in each row.")
    base_logits = None if options.base_table is None else _base_logits(options.base_table, table, options)
    parts = split_table(table, options.fit_fraction, seed=options.seed)
    calibration, held_out = (part.predictions for part in parts)
    fields = (name for name, value in table.predictions._asdict().items() if value is not None)
    groups = "" if table.groups is None else f" in {len(set(table.groups)):,} groups"
    split = f"{len(parts[0]):,} to fit on, {len(parts[1]):,} held out, drawn at random"
    log(f"table: {len(table):,} rows of {', '.join(fields)}{groups}; {split}")
    inputs = prediction_inputs(calibration, held_out, names, parts[1].groups, include_large=include_large)
    if base_logits is not None:
        logits = np.asarray(calibration.logits)
        reference = inputs.contenders[inputs.reference]
        inputs.contenders[_DACA] = reference._replace(fit=lambda: fit_daca(logits, base_logits))
    return inputs._replace(title=f"{options.table.name}, held out")


def _base_logits(path: Path, table: PredictionTable, options: CompareOptions) -> np.ndarray:
    named = options.named_columns()
    with about("--base-table"):
        present = table_rows(path).first if named else {}  # the base table may lack them, such as the label
        columns = {role: name for role, name in named.items() if name in present}
        base = read_table(path, outcomes=False, columns=columns)
    expected, got = (np.shape(np.asarray(data.predictions.logits)) for data in (table, base))
    if not expected or expected != got:
        shape = f"{list(expected)}, as --table has them"
        raise UserError(f"--base-table {path}: expected logits or probabilities {shape}, got {list(got)}.")
    labels, others = (np.asarray(data.predictions.labels) for data in (table, base))
    if base.predictions.labels is not None and not np.array_equal(labels, others):
        raise UserError(f"--base-table {path}: expected the labels of --table, row by row, got others.")
    fit, _ = split_table(PredictionTable(base.predictions, table.groups), options.fit_fraction, seed=options.seed)
    return np.asarray(fit.predictions.logits)
