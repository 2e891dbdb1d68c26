"""Tables of recorded predictions: confidences or logits with their outcomes, read from a file."""

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from calibjax.data.columns import Cells, ColumnReader, assign_columns, is_read, option_columns
from calibjax.data.records import flat_rows, with_truth
from calibjax.data.source import Placed, Rows, Skipped, read_source
from calibjax.data.splits import check_fraction
from calibjax.recalibrate import Predictions
from calibjax.runtime.errors import UserError, user_path

_KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".npz")
_EXPECTED = (
    "expected the columns confidence and correct, or logits (or probs; or logit_0, logit_1, ...; or p_0, p_1, ...) and "
    "label, and optionally group and category; --columns confidence=NAME names a column"
)


@dataclass(frozen=True)
class PredictionTable:
    """Predictions of a file.

    Attributes:
        predictions: numbers with the precision of the file, at least float32; its `categories` are checksums of labels.
        groups: `[N]`, numbered from 0 by first appearance, or None.
        categories: `[N]`, labels as text, or None.
        probabilities: float64 `[N, K]`, as the file has them, or None. `predictions.logits` are then their logarithms.
        rows: int `[N]`, the number of each row in the file, from 0; None after `take`.
        notes: lines that say how the file was read where that is a choice.
    """

    predictions: Predictions
    groups: np.ndarray | None
    categories: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    rows: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def take(self, rows: np.ndarray) -> "PredictionTable":
        """Returns the rows at `rows`."""
        fields = self.predictions._asdict().items()
        picked = {name: x if x is None or name == "unembedding" else np.asarray(x)[rows] for name, x in fields}
        held = (self.groups, self.categories, self.probabilities)
        groups, categories, probabilities = (None if x is None else x[rows] for x in held)
        return PredictionTable(Predictions(**picked), groups, categories, probabilities)

    def __len__(self) -> int:
        fields = (self.predictions.logits, self.predictions.confidence)
        return next(len(np.asarray(field)) for field in fields if field is not None)


class _File(NamedTuple):
    """Columns of a file that may have a role, the names of all of its columns, and the number of its rows."""

    columns: dict[str, Cells]
    names: list[str]
    rows: int
    skipped: Skipped


def read_table(
    path: str | Path,
    *,
    outcomes: bool = True,
    columns: Mapping[str, str] | None = None,
    skip_broken: bool = False,
    tokens: bool = False,
    truth: str | Path | None = None,
) -> PredictionTable:
    """Reads a table of predictions.

    Args:
        path: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json` or `.parquet` (text also with `.gz`; see `read_source`) with
            the columns `confidence` (0 to 1) and `correct` (0, 1, yes, no, or the fraction of correct attempts); or
            `logits`, lists, or `logit_0` ... `logit_{K−1}` (or probabilities that sum to 1, `probs` or `p_0` ...) and
            `label` (0 to K − 1). A logit of −inf is an option that is impossible, as are those that a list lacks.
            Optionally `group`, labels of dependent rows (questions, users, domains), and `category`, labels of kinds
            of questions (subjects, domains) that new data will have too; labels are text. Logits take precedence over
            confidences. Or `.npz` with arrays of these names, logits `[N, K]`, and optionally `features` `[N, D]` and
            `unembedding` `[K, D]`. Or responses of a server with log-probabilities, or samples of lm-eval, in `.jsonl`
            or `.json`; see `calibjax.data.records`.
        outcomes: False accepts a table without `correct` or `label`.
        columns: role, such as "confidence", -> the name of its column, or "NAME/100" to divide its numbers; a
            confidence that is named takes precedence over logits.
        skip_broken: leave out rows that cannot be read; a note counts them.
        tokens: of responses of a server with a scored text, a row for each token; see `flat_rows`.
        truth: file with further columns of the rows, such as `correct`; see `with_truth`.

    Raises:
        UserError: the file cannot be read; columns are missing; a value is not a number in its range, or a label is
            missing (the message names its row, counted from 0); or there is no row.
    """
    path = user_path(path)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    columns = dict(columns or {})
    divisors = {}
    file = _read_columns(path, tuple(columns.values()), skip_broken, tokens, truth)
    for role, column in columns.items():
        if column not in file.names and (match := re.fullmatch(r"(.+)/(\d+(?:\.\d+)?)", column)) and float(match[2]):
            columns[role], divisors[role] = match[1], float(match[2])
    names = assign_columns(path, file.names, columns)
    reader = ColumnReader(path, file.rows, skip_broken)
    cells = {role: file.columns[name] for role, name in names.items()}
    probabilities, logits = (None, None) if "confidence" in columns else _logits(reader, names, file)
    if logits is not None and ("label" in cells or not outcomes):
        right = reader.classes(names["label"], cells["label"], logits) if "label" in cells else None
        predictions = Predictions(logits=logits, labels=right)
    elif "confidence" in cells and ("correct" in cells or not outcomes):
        scale = divisors.get("confidence", 1.0)
        confidence, right = reader.fractions(names["confidence"], cells["confidence"], divisor=scale), None
        probabilities = None
        if "correct" in cells:
            scale = divisors.get("correct", 1.0)
            right = reader.fractions(names["correct"], cells["correct"], divisor=scale, words=True)
        predictions = Predictions(confidence=confidence, correct=right)
    else:
        got = ", ".join(name if name == name.strip() else repr(name) for name in file.names[:12])
        raise UserError(f"{path}: {_EXPECTED}; got: {got or 'none'}.")
    for name in {"features", "unembedding"} & set(cells):
        predictions = predictions._replace(**{name: reader.matrix(names[name], cells[name]).astype(np.float32)})
    labels = {name: reader.labels(names[name], cells[name]) for name in ("group", "category") if name in cells}
    lengths = {names[role]: len(column) for role, column in cells.items() if role != "unembedding"}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{path}: expected the same number of rows in every array, got {lengths}.")
    table, rows = PredictionTable(predictions, None, None, probabilities), np.flatnonzero(~reader.broken)
    return _with_labels(table.take(rows), rows, labels, reader, file)


def _with_labels(
    table: PredictionTable, rows: np.ndarray, labels: Mapping[str, np.ndarray], reader: ColumnReader, file: _File
) -> PredictionTable:
    """A table of the rows that could be read, with their labels numbered."""
    path = reader.path
    if not len(rows):
        raise UserError(f"{path}: expected at least one row, got none.")
    count = file.skipped.count + int(reader.broken.sum())
    if count:
        first = file.skipped.first or reader.first_broken
        reader.notes.append(f"{count:,} broken rows left out, the first: {first.rstrip('.')}")
    labels = {name: texts[rows] for name, texts in labels.items()}
    categories, predictions = labels.get("category"), table.predictions
    if categories is not None:
        predictions = predictions._replace(categories=_category_numbers(path, categories))
    groups = _numbered(labels["group"]) if "group" in labels else None
    return PredictionTable(predictions, groups, categories, table.probabilities, rows, tuple(reader.notes))


def _logits(reader: ColumnReader, names: Mapping[str, str], file: _File) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Probabilities and their logarithms, or None and logits, `[N, K]`; None and None if the file has neither."""
    for role, prefix in (("logits", "logit"), ("probs", "p")):
        options = option_columns(reader.path, file.names, prefix)
        if role in names:
            name, cells = names[role], file.columns[names[role]]
            values = reader.lists(name, cells)
        elif options:
            values = np.stack([reader.numbers(name, file.columns[name]) for name in options], axis=1)
            name, cells = prefix, values
        else:
            continue
        if role == "probs":
            return reader.log_probabilities(name, values, cells)
        return None, reader.logits(name, values, cells)
    return None, None


def split_table(table: PredictionTable, fit_fraction: float, seed: int) -> tuple[PredictionTable, PredictionTable]:
    """Splits a table at random by `seed` into (fit, held out), neither empty. Rows of one group stay on one side."""
    check_fraction(fit_fraction, "--fit-fraction")
    rows = len(table)
    if not 1 <= fit_fraction * rows <= rows - 1:
        expected = f"expected {1 / rows:.3g} to {1 - 1 / rows:.3g}"
        raise UserError(f"--fit-fraction: {fit_fraction} of {rows:,} rows leaves one part empty: {expected}.")
    group = np.arange(rows) if table.groups is None else table.groups
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
    """A number of each label that is the same in every file, where a fitted method meets it again."""
    names, inverse = np.unique(labels, return_inverse=True)
    numbers = np.array([zlib.crc32(name.encode()) & 0x7FFFFFFF for name in names.tolist()], np.int32)
    if len(np.unique(numbers)) < len(numbers):
        same = next(name for name in names if (numbers == numbers[names == name][0]).sum() > 1)
        raise UserError(f"{path}: category: {same!r} has the checksum of another label; rename it.")
    return numbers[inverse]


def table_rows(
    path: str | Path, *, skip_broken: bool = False, tokens: bool = False, truth: str | Path | None = None
) -> Rows:
    """Rows of a table as `read_table` numbers them, with all of their columns; see `flat_rows` and `with_truth`."""
    path = user_path(path)
    if path.suffix != ".npz":
        rows = read_source(path, skip_broken=skip_broken)
        return flat_rows(rows if truth is None else with_truth(rows, read_source(truth)), tokens=tokens)
    arrays, _ = _load_npz(path, lambda name: name != "unembedding")

    def read() -> Iterator[Placed]:
        for number, row in enumerate(zip(*arrays.values(), strict=True)):
            cells = (cell.tolist() for cell in row)
            yield f"row {number}", dict(zip(arrays, cells, strict=True))

    return Rows(read, name=str(path))


def _read_columns(
    path: Path, named: Collection[str], skip_broken: bool, tokens: bool, truth: str | Path | None
) -> _File:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _KINDS:
        raise UserError(f"{path}: expected a file ending in {', '.join(_KINDS)}.")
    if suffix == ".npz" and truth is not None:
        raise UserError(f"{path}: arrays have no columns of another file. Leave out --truth.")
    if suffix == ".npz":
        arrays, listed = _load_npz(path, lambda name: is_read(name, named))
        lengths = [len(array) for name, array in arrays.items() if array.ndim and name != "unembedding"]
        return _File(dict(arrays), listed, max(lengths, default=0), Skipped())
    if suffix == ".parquet" and truth is None:
        return _read_parquet(path, named)
    columns: dict[str, list[Any]] = {}
    names: dict[str, bool] = {}
    skipped, count = Skipped(), 0
    for _, row in table_rows(path, skip_broken=skip_broken, tokens=tokens, truth=truth).placed(skipped):
        for name, cell in row.items():
            if name not in names:
                names[name] = is_read(name, named)
                if names[name]:
                    columns[name] = [None] * count
            if names[name]:
                columns[name].append(cell)
        count += 1
        for column in columns.values():
            if len(column) < count:
                column.append(None)
    return _File(dict(columns), list(names), count, skipped)


def _load_npz(path: Path, wanted: Callable[[str], bool]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Arrays of a file that are wanted, and the names of all."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if wanted(name)}, file.files
    except Exception as error:  # of zipfile, zlib, tokenize and numpy
        raise UserError(f"{path} cannot be read as an .npz file ({error}).") from error


def _read_parquet(path: Path, named: Collection[str]) -> _File:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path.absolute()) as file:
            names = file.schema_arrow.names
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"{path}: expected different names of columns, got several of {', '.join(repeated)}.")
            table = file.read([name for name in names if is_read(name, named)])
            columns = {name: _arrow_cells(table.column(name)) for name in table.column_names}
            return _File(columns, names, file.metadata.num_rows, Skipped())
    except (pyarrow.ArrowException, OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}.") from error


def _arrow_cells(column: Any) -> Cells:
    """A column of numbers, or of lists of equally many, as an array; any other, or one with nulls, cell by cell."""
    import pyarrow
    import pyarrow.compute

    kind, compute = column.type, cast(Any, pyarrow.compute)
    if column.null_count:
        return column.to_pylist()
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        return _values(column)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        flat, lengths = compute.list_flatten(column), compute.list_value_length(column).unique()
        number = pyarrow.types.is_integer(flat.type) or pyarrow.types.is_floating(flat.type)
        if len(lengths) == 1 and number and not flat.null_count:
            return _values(flat).reshape(len(column), -1)
    return column.to_pylist()


def _values(column: Any) -> np.ndarray:
    """The numbers of an Arrow column without nulls; `to_numpy` would import pandas."""
    return np.concatenate([np.empty(0, column.type.to_pandas_dtype()), *map(np.from_dlpack, column.chunks)])
