"""Tables of recorded predictions: confidences or logits with their outcomes, read from a file."""

import csv
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibjax.data.source import read_source
from calibjax.data.splits import check_fraction
from calibjax.recalibrate import Predictions
from calibjax.runtime.errors import UserError, user_path

FEWEST_ROWS = 10
_KINDS = ".csv, .parquet, .jsonl or .npz"
_EXPECTED = (
    "expected the columns confidence and correct, or logit_0, logit_1, ... (or p_0, p_1, ...) and label, and "
    "optionally group and category"
)
_EXPECTED_ARRAYS = (
    "expected the arrays confidence and correct [N], or logits [N, K] and labels [N]; optionally features [N, D], "
    "unembedding [K, D], group [N], category [N]"
)
_TINY = 1e-12  # lower bound of probabilities, so that logarithms are finite


class PredictionTable(NamedTuple):
    """Predictions of a file.

    Attributes:
        predictions: numbers with the precision of the file, at least float32. With `categories` where the file has
            them: a checksum of each label, the same in every file.
        groups: `[N]`, numbered from 0 by first appearance, or None.
        categories: `[N]`, labels as text, or None.
        probabilities: float64 `[N, K]`, the columns p_0, p_1, ... as the file has them, or None. `predictions.logits`
            are then their logarithms.
    """

    predictions: Predictions
    groups: np.ndarray | None
    categories: np.ndarray | None = None
    probabilities: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> "PredictionTable":
        """Returns the rows at `rows`."""
        fields = self.predictions._asdict().items()
        picked = {name: x if x is None or name == "unembedding" else np.asarray(x)[rows] for name, x in fields}
        columns = (None if x is None else x[rows] for x in self[1:])
        return PredictionTable(Predictions(**picked), *columns)

    def __len__(self) -> int:
        fields = (self.predictions.logits, self.predictions.confidence)
        return next(len(np.asarray(field)) for field in fields if field is not None)


def read_table(path: str | Path, *, outcomes: bool = True, column: str = "confidence") -> PredictionTable:
    """Reads a table of predictions.

    Args:
        path: `.csv`, `.parquet` or `.jsonl` (text also with `.gz`) with the columns `confidence` (0 to 1) and `correct`
            (0, 1, or the fraction of correct attempts); or `logit_0` ... `logit_{K−1}` (or `p_0` ..., which sum to
            1) and `label` (0 to K − 1); optionally `group`, labels of dependent rows (questions, users, domains), and
            `category`, labels of kinds of questions (subjects, domains) that new data will have too. Or `.npz` with
            arrays `confidence` and `correct`, or `logits` `[N, K]` and `labels`, and optionally `features` `[N, D]`,
            `unembedding` `[K, D]`, `group`, `category`. Logits take precedence over confidences.
        column: name of the confidences; one other than "confidence" takes precedence over logits.
        outcomes: False accepts a table without `correct` or `label`.

    Returns:
        `PredictionTable`.

    Raises:
        UserError: if the file cannot be read; columns are missing; a value is not a number in its range (the message
            names its row, counted from 0); or there is no row.
    """
    path = user_path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    arrays, names = (_read_npz if path.suffix == ".npz" else _read_columns)(path, column)
    if column != "confidence":
        if "confidence" not in arrays:
            raise UserError(f"{path}: there is no column {column}; got: {', '.join(names[:12]) or 'none'}.")
        arrays.pop("logits", None)
    probabilities = None
    if "logits" in arrays and ("labels" in arrays or not outcomes):
        probabilities = arrays.pop("p", None)
        logits = _logits(path, arrays["logits"])
        labels = _labels(path, arrays["labels"], logits.shape[1]) if "labels" in arrays else None
        predictions = Predictions(logits=logits, labels=labels)
    elif "confidence" in arrays and ("correct" in arrays or not outcomes):
        columns = {name: _fraction(path, name, arrays[name]) for name in ("confidence", "correct") if name in arrays}
        predictions = Predictions(**columns)
    else:
        known = _EXPECTED_ARRAYS if path.suffix == ".npz" else _EXPECTED
        got = ", ".join(name if name == name.strip() else repr(name) for name in names[:12])
        raise UserError(f"{path}: {known}; got: {got or 'none'}.")
    for name in ("features", "unembedding"):
        if name in arrays:
            matrix = _finite(path, name, arrays[name], axes=2).astype(np.float32)
            predictions = predictions._replace(**{name: matrix})
    if "group" in arrays and np.ndim(arrays["group"]) != 1:
        raise UserError(f"{path}: group: expected one label per row, got shape {np.shape(arrays['group'])}.")
    groups = _numbered(np.asarray(arrays["group"])) if "group" in arrays else None
    categories = None
    if "category" in arrays:
        if np.ndim(arrays["category"]) != 1:
            raise UserError(f"{path}: category: expected one label per row, got shape {np.shape(arrays['category'])}.")
        categories = np.asarray(arrays["category"]).astype(str)
        predictions = predictions._replace(categories=_category_numbers(path, categories))
    lengths = {name: np.shape(x)[:1] for name, x in arrays.items() if name != "unembedding"}
    if len(set(lengths.values())) != 1:
        raise UserError(f"{path}: expected the same number of rows in every array, got {lengths}.")
    table = PredictionTable(predictions, groups, categories, probabilities)
    if not len(table):
        raise UserError(f"{path}: expected at least one row, got none.")
    return table


def check_can_be_fitted(table: PredictionTable, path: Path) -> None:
    """Raises `UserError` if a table has fewer than ten rows, or correctness, or the label, is the same in all rows."""
    if len(table) < FEWEST_ROWS:
        raise UserError(f"{path}: {len(table)} rows are too few to fit and evaluate: expected at least {FEWEST_ROWS}.")
    what = "label" if table.predictions.logits is not None else "correct"
    truth = np.asarray(table.predictions.labels if what == "label" else table.predictions.correct)
    if (truth == truth[0]).all():
        raise UserError(f"{path}: {what} is {truth[0]:g} in every row: expected at least two different values.")


def split_table(table: PredictionTable, fit_fraction: float, seed: int) -> tuple[PredictionTable, PredictionTable]:
    """Splits a table at random by `seed` into (fit, held out). Rows of one group stay on one side.

    Raises:
        UserError: if the fraction is not between 0 and 1 or leaves a part empty.
    """
    check_fraction(fit_fraction, "--fit-fraction")
    rows = len(table)
    if not 1 <= fit_fraction * rows <= rows - 1:
        raise UserError(
            f"--fit-fraction: {fit_fraction} of {rows:,} rows leaves one part empty: expected {1 / rows:.3g} to "
            f"{1 - 1 / rows:.3g}."
        )
    group = np.arange(len(table)) if table.groups is None else table.groups
    sizes = np.bincount(group)
    if len(sizes) < 2:
        raise UserError("all rows are of one group: groups are not split, so expected at least two.")
    order = np.random.default_rng(seed).permutation(len(sizes))
    ends = np.cumsum(sizes[order])
    number = int(np.clip(np.argmin(np.abs(ends - fit_fraction * rows)) + 1, 1, len(sizes) - 1))
    fit = np.isin(group, order[:number])
    return table.take(np.flatnonzero(fit)), table.take(np.flatnonzero(~fit))


def _numbered(groups: np.ndarray) -> np.ndarray:
    """Numbers groups by first appearance, so that labels as numbers and as text give the same result."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _category_numbers(path: Path, labels: np.ndarray) -> np.ndarray:
    """A number of each label that does not depend on the other labels: a fitted method meets them in another file."""
    names, inverse = np.unique(labels, return_inverse=True)
    numbers = np.array([zlib.crc32(name.encode()) & 0x7FFFFFFF for name in names.tolist()], np.int32)
    if len(np.unique(numbers)) < len(numbers):
        same = next(name for name in names if (numbers == numbers[names == name][0]).sum() > 1)
        raise UserError(f"{path}: category: {same!r} has the checksum of another label; rename it.")
    return numbers[inverse]


def _read_npz(path: Path, confidence: str) -> tuple[dict[str, Any], list[str]]:
    known = ("logits", "labels", "correct", "features", "unembedding", "group", "category")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in known if name in file.files}
            if confidence in file.files:
                arrays["confidence"] = file[confidence]
            return arrays, file.files
    except Exception as error:  # of zipfile, zlib, tokenize and numpy
        raise UserError(f"{path} cannot be read as an .npz file ({error}).") from error


def _read_columns(path: Path, confidence: str) -> tuple[dict[str, Any], list[str]]:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    readers = {
        ".csv": pyarrow.csv.read_csv,
        ".jsonl": lambda _: pyarrow.Table.from_pylist([dict(row) for row in read_source(path)]),
        ".parquet": pyarrow.parquet.read_table,
    }
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in readers:
        raise UserError(f"{path}: expected a file ending in {_KINDS}.")
    try:
        table = readers[kind](str(path.absolute()))  # absolute, because pyarrow expands a leading ~
        names = table.column_names
    except (pyarrow.ArrowException, OSError, OverflowError, UnicodeError) as error:
        reason = None if kind == ".parquet" or isinstance(error, OSError) else _first_bad_row(path, kind)
        raise UserError(f"{path} cannot be read: {reason or str(error).splitlines()[0]}.") from error
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{path}: expected columns with names of their own, got several named {', '.join(repeated)}.")
    columns = {name: table.column(name) for name in names}
    wanted = {"confidence": confidence, "correct": "correct"}
    arrays: dict[str, Any] = {name: columns[column] for name, column in wanted.items() if column in columns}
    for name in {"group", "category"} & set(columns):
        arrays[name] = np.asarray([_label_of(path, name, *cell) for cell in enumerate(columns[name].to_pylist())])
    if "label" in columns:
        arrays["labels"] = columns["label"]
    for prefix in ("logit", "p"):
        found = {int(m[1]): m[0] for name in columns if (m := re.fullmatch(rf"{prefix}_(\d+)", name))}
        if not found or "logits" in arrays:
            continue
        if sorted(found) != list(range(len(found))) or len(found) < 2:
            raise UserError(
                f"{path}: expected {prefix}_0, {prefix}_1 and so on without a gap, got {', '.join(found.values())}."
            )
        values = np.stack([_numbers(path, found[k], columns[found[k]]) for k in range(len(found))], axis=1)
        if prefix == "logit":
            arrays["logits"] = values
        else:
            arrays["logits"], arrays["p"] = _log_probabilities(path, values), values.astype(np.float64)
    for name, column in (*wanted.items(), ("labels", "label")):
        if name in arrays:
            arrays[name] = _numbers(path, column, arrays[name])
    return arrays, list(columns)


def _label_of(path: Path, name: str, row: int, label: Any) -> str:
    try:
        return label.decode("utf-8") if isinstance(label, bytes) else str(label)
    except UnicodeDecodeError:
        raise UserError(f"{path}: {name}: row {row} holds {label!r}, expected text in UTF-8.") from None


def _first_bad_row(path: Path, kind: str) -> str | None:
    """Describes the first row whose types differ from those of the rows before it; None if there is none.

    Arrow's own messages count rows from the start of a block of the file.
    """
    kinds: dict[str, str] = {}
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", errors="replace") as file:
        rows = csv.DictReader(file) if kind == ".csv" else map(_json_object, filter(str.strip, file))
        for row, fields in enumerate(rows):
            if not isinstance(fields, dict):
                return f"row {row} holds {fields[:80]!r}, expected a JSON object"
            for name, value in fields.items():
                found = _kind(value)
                before = kinds.setdefault(name, found) if found else None
                if before not in (None, found) and (kind == ".jsonl" or before == "a number"):
                    return f"{name}: row {row} holds {repr(value)[:80]}, expected {before} as in the rows before"
    return None


def _json_object(line: str) -> dict[str, Any] | str:
    """Parses a JSON object; returns the line itself if it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line.strip()
    return value if isinstance(value, dict) else line.strip()


def _kind(value: Any) -> str | None:
    """Kind of a cell in words; None for null."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float) or (isinstance(value, str) and _as_number(value) is not None):
        return "a number"
    return {str: "text", list: "a list"}.get(type(value), "an object")


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(path: Path, name: str, column: Any) -> np.ndarray:
    """Column as integers if it holds only integers, else as float64 with NaN for nulls."""
    import pyarrow

    if pyarrow.types.is_integer(column.type) and not column.null_count:
        return _values(column)
    try:
        values = column.cast(pyarrow.float64(), safe=False)
        return _values(values.fill_null(float("nan")) if values.null_count else values)
    except (pyarrow.ArrowException, TypeError):
        cells = column.to_pylist()
    row = next((row for row, cell in enumerate(cells) if cell is not None and _kind(cell) != "a number"), None)
    if row is None:
        raise UserError(f"{path}: {name}: expected numbers, got {column.type}.")
    raise UserError(f"{path}: {name}: row {row} holds {cells[row]!r}, expected a number.")


def _values(column: Any) -> np.ndarray:
    """The numbers of an Arrow column without nulls; `to_numpy` would import pandas."""
    return np.concatenate([np.empty(0, column.type.to_pandas_dtype()), *map(np.from_dlpack, column.chunks)])


def _finite(path: Path, name: str, values: Any, axes: int) -> np.ndarray:
    """Checks dtype, number of axes, and that every value is a finite float32, before any cast."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise UserError(f"{path}: {name}: expected real numbers, got {values.dtype}.")
    if values.ndim != axes:
        raise UserError(f"{path}: {name}: expected {axes} axes, got shape {values.shape}.")
    bad = ~(np.abs(values.astype(np.float64)) <= np.finfo(np.float32).max)
    if bad.any():
        row = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
        value = np.ravel(values[row])[np.argmax(np.ravel(bad[row]))]
        raise UserError(
            f"{path}: {name}: row {row} holds {value}, expected a finite float32; correct or remove the row."
        )
    return values


def _fraction(path: Path, name: str, values: Any) -> np.ndarray:
    values = _finite(path, name, values, axes=1)
    bad = (values < 0) | (values > 1)
    if bad.any():
        row = int(np.argmax(bad))
        hint = " (percent? divide by 100)" if name == "confidence" and values.max() > 1 else ""
        raise UserError(f"{path}: {name}: row {row} holds {values[row]:g}, expected 0 to 1{hint}.")
    return values.astype(np.float64)


def _logits(path: Path, values: Any) -> np.ndarray:
    values = _finite(path, "logits", values, axes=2)
    if values.shape[1] < 2:
        raise UserError(f"{path}: logits: expected [N, K] with at least two classes, got shape {values.shape}.")
    return values.astype(np.result_type(values.dtype, np.float32))


def _log_probabilities(path: Path, values: np.ndarray) -> np.ndarray:
    _finite(path, "p", values, axes=2)
    bad = (values < 0).any(axis=1) | (abs(values.sum(axis=1) - 1) > 1e-3)
    if bad.any():
        row = int(np.argmax(bad))
        raise UserError(f"{path}: p: row {row} sums to {values[row].sum():g}, expected probabilities that sum to 1.")
    return np.log(np.maximum(values, _TINY))


def _labels(path: Path, values: Any, classes: int) -> np.ndarray:
    values = _finite(path, "label", values, axes=1)
    bad = (values < 0) | (values >= classes) | (values != np.round(values))
    if bad.any():
        row = int(np.argmax(bad))
        raise UserError(
            f"{path}: label: row {row} holds {values[row]}, expected a whole number from 0 to {classes - 1}."
        )
    return values.astype(np.int32)
