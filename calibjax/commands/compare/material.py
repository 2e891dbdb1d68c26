"""The options of a comparison."""

import dataclasses
import os
from pathlib import Path

from calibjax.commands.common import (
    BinningOptions,
    ColumnOptions,
    ModelOptions,
    OutputOptions,
    TextOptions,
    presentation,
)
from calibjax.eval.compare.results import SortKey
from calibjax.recalibrate.saved import check_directory
from calibjax.runtime.distributed import DeviceOptions
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(BinningOptions, OutputOptions, ColumnOptions, TextOptions, ModelOptions):
    """Fits every recalibration method on one part of the data and compares them on the other.

    On text: --model and --data; every next token is a prediction, and ATS is fitted as by `train ats` with its
    defaults. On existing predictions: --table, a .csv, .tsv, .jsonl, .json, .parquet or .npz file with confidence and
    correct (0, 1, yes, no, or a fraction of attempts), or logits (lists, or logit_0, logit_1, ...; or probs, or p_0,
    ...) and label, and optionally group (dependent rows), category (kinds of questions that new data will have too),
    features and unembedding (docs/data.md has every form). Prints which method has the
    lowest log loss, whether it beats temperature scaling (corrected for the number of methods), and a table with
    intervals. Exit code 1 where a method failed.

    Attributes:
        data: text for the model: file, directory or hub id, as for `train ats`.
        table: file of predictions, in place of --model and --data.
        base_table: the same rows, and options, of the base model that the model was post-trained from: adds daca to the
            comparison, whose temperature needs no labels (docs/recalibration.md). Of --table with logits.
        methods: names (docs/recalibration.md), or all but those with more parameters for pairs of classes than there
            are predictions; the base model and temperature scaling are always shown.
        out: directory for metrics.json, report.html and reliability.png; without it only the table is printed.
        save: new directory for the fitted winner, or else temperature scaling, for `calibjax apply`.
        fit_fraction: fraction of the data to fit on; of a table, rows (or groups) drawn at random.
        max_tokens: of text, predictions in each part at most, whole sequences drawn at random.
        sort: figure that the rows are ordered by, best first.
        devices: devices that run the model; --table needs none.
    """

    model: str | None = None
    data: str | None = None
    table: Path | None = None
    base_table: Path | None = None
    methods: tuple[str, ...] = ("all",)
    out: Path | None = presentation(None)
    max_tokens: Count = 10_000
    sort: SortKey = presentation("log_loss")
    devices: DeviceOptions = presentation(DeviceOptions())
    save: Path | None = presentation(None)

    def check(self) -> None:
        """Raises `UserError` unless there is a model with its text, or else a table."""
        if (self.model is None) != (self.data is None) or (self.table is None) == (self.model is None):
            raise UserError("give either --model and --data, or --table.")
        if self.table is not None and self.split_order != "shuffled":
            raise UserError("--split-order: rows of a table are always drawn at random; leave it out.")
        if self.base_table is not None and self.table is None:
            raise UserError("--base-table: expected --table, with the rows of the post-trained model.")
        if self.save is not None:
            if self.out is not None and os.path.realpath(self.save) == os.path.realpath(self.out):
                raise UserError(f"--save {self.save}: expected another directory than --out, which holds the tables.")
            with about("--save"):
                check_directory(self.save)
