"""`calibjax compare`: all recalibration methods, on a model and text or on a table of predictions."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibjax.commands.common import (
    SCHEMA,
    begin,
    on_devices,
    split_names,
    write_results,
)
from calibjax.commands.compare.material import CompareOptions
from calibjax.data.table import PredictionTable, read_table, split_table
from calibjax.eval.compare.compare import Comparison, Material, prediction_material, run_material
from calibjax.eval.report import print_comparison
from calibjax.eval.report.schema import Document
from calibjax.recalibrate import METHODS, Predictions, fit_daca
from calibjax.recalibrate.saved import save
from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import run_identity

_FEWEST_ROWS = 10
_DACA = "daca"
"""Name of the row of `fit_daca`, which reads no labels and is therefore none of `METHODS`."""


@on_devices
def run(options: CompareOptions, log: Callable[[str], None] = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    names = _method_names(options.methods)
    context = begin("compare", options, log)
    with tempfile.TemporaryDirectory() as scratch:
        if options.table is not None:
            material = _from_table(options, names, log)
        else:
            from calibjax.commands.compare.text import from_model  # imports models, which a table does not need

            if options.out is None and jax.process_count() > 1:
                raise UserError("--out: several processes need a directory that they share.")
            fits = Path(scratch) if options.out is None else options.out / "fit"
            of_model = dataclasses.replace(context, directory=fits)
            material = from_model(options, names, of_model, however_large=not _all(options.methods))
        options_of_figures: dict[str, Any] = {"bins": options.bins, "closed": options.closed, "sort": options.sort}
        found = run_material(material, **options_of_figures, context=context)
    document: Document = {
        "schema": SCHEMA,
        "held_out": found.document,
        "run": run_identity("compare", options),
    }
    files = []
    if options.out is not None and is_first():
        write_results(document, options.out)
        files.append(f"results in {options.out}: report.html, metrics.json, reliability.png")
    if options.save is not None:
        files.append(_save_winner(options.save, found, material))
    if not is_first():
        return document
    if not options.json:
        print_comparison(document["held_out"], material.title, files="\n".join(files))
    elif options.save is not None:
        log(files[-1])
    return document


def _save_winner(directory: Path, found: Comparison, material: Material) -> str:
    """Writes the fitted state of the method that the verdict names; returns a line on it."""
    name = found.winner
    state = found.states[name]
    if state is None:
        return f"nothing saved in {directory}: no method is better than the uncalibrated predictions"
    if material.save_head is not None and name in ("temperature", "ats"):
        material.save_head(directory, state)
        return f"{name} saved in {directory}, for generate --head, eval tasks --head and calibjax.load_head"
    notes: dict[str, Any] = {"data": material.title, "unit": material.unit}
    save(directory, "temperature" if name == _DACA else name, state, notes=notes)
    return f"{name} saved in {directory}, for calibjax apply and calibjax.recalibrate.load"


def _method_names(asked: tuple[str, ...]) -> tuple[str, ...]:
    names = split_names(asked)
    unknown = [name for name in names if name not in (*METHODS, "all", "uncalibrated")]
    if unknown or not names:
        raise UserError(f"--methods: {', '.join(unknown) or 'nothing'}: expected all, or some of {', '.join(METHODS)}.")
    return tuple(name for name in METHODS if _all(asked) or name in names)


def _all(asked: tuple[str, ...]) -> bool:
    return "all" in split_names(asked)


# --- a table of predictions ---


def _from_table(options: CompareOptions, names: tuple[str, ...], log: Callable[[str], None]) -> Material:
    assert options.table is not None
    with about("--table"):
        table = read_table(options.table, **options.reading(), skip_broken=options.text.skip_broken)
        _check_can_be_fitted(table, options.table)
    for note in table.notes:
        log(note)
    base_logits = None if options.base_table is None else _base_logits(options.base_table, table, options)
    parts = split_table(table, options.fit_fraction, options.seed)
    calibration, held_out = (_with_slices(part.predictions, part.groups) for part in parts)
    read = (name for name, value in table.predictions._asdict().items() if value is not None)
    log(
        f"table: {len(table):,} rows of {', '.join(read)}"
        + (f" in {len(set(table.groups)):,} groups" if table.groups is not None else "")
        + f"; {len(parts[0]):,} to fit on, {len(parts[1]):,} held out, drawn at random"
    )
    material = prediction_material(
        calibration, held_out, names, parts[1].groups, however_large=not _all(options.methods)
    )
    if base_logits is not None:
        fit_to_base = material.rows[material.reference]._replace(
            fit=lambda: fit_daca(np.asarray(calibration.logits), base_logits)
        )
        material.rows[_DACA] = fit_to_base
    return material._replace(title=f"{options.table.name}, held out")


def _base_logits(path: Path, table: PredictionTable, options: CompareOptions) -> np.ndarray:
    """The logits of the base model on the rows that are fitted on."""
    with about("--base-table"):
        base = read_table(path, outcomes=False)
    expected, got = (np.shape(np.asarray(data.predictions.logits)) for data in (table, base))
    if not expected or expected != got:
        raise UserError(
            f"--base-table {path}: expected logits (or probabilities) of the same rows and options as those of "
            f"--table, {list(expected)}, got {list(got)}."
        )
    fit, _ = split_table(PredictionTable(base.predictions, table.groups), options.fit_fraction, options.seed)
    return np.asarray(fit.predictions.logits)


def _check_can_be_fitted(table: PredictionTable, path: Path) -> None:
    """Raises `UserError` if a table has fewer than ten rows, or correctness, or the label, is the same in all rows."""
    if len(table) < _FEWEST_ROWS:
        raise UserError(f"{path}: {len(table)} rows are too few to fit and evaluate: expected at least {_FEWEST_ROWS}.")
    what = "label" if table.predictions.logits is not None else "correct"
    truth = np.asarray(table.predictions.labels if what == "label" else table.predictions.correct)
    if (truth == truth[0]).all():
        raise UserError(f"{path}: {what} is {truth[0]:g} in every row: expected at least two different values.")


def _with_slices(data: Predictions, groups: np.ndarray | None) -> Predictions:
    if groups is None:
        return data
    return data._replace(slices=np.unique(groups, return_inverse=True)[1].astype(np.int32))
