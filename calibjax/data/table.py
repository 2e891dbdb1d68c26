"""Tables of recorded predictions: confidences or logits with outcomes, read from a file and checked row by row."""

import dataclasses
import decimal
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from calibjax.data.records import flat_rows, with_truth
from calibjax.data.sequences import first_groups
from calibjax.data.source import Placed, Rows, Skipped, is_text, normalised, read_source
from calibjax.recalibrate import Predictions
from calibjax.runtime.errors import UserError, first_line, quantity, shortened, user_path
from calibjax.runtime.options import Fraction, check_value

_KINDS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".npz")
_EXPECTED = (
    "expected the columns confidence and correct, or logits (or probs; or logit_0, logit_1, ...; or p_0, p_1, ...) and "
    "label, and optionally group and category; --columns confidence=NAME names a column; --truth FILE adds one; "
    "the responses of a server are read from .jsonl"
)
# What a table may hold, and the names of columns that are read as it; case, spaces and underscores do not count.
_ROLES = {
    "confidence": ("confidence",),
    "correct": ("correct", "is_correct"),
    "label": ("label", "labels"),
    "logits": ("logits",),
    "probs": ("probs", "probabilities", "p"),
    "group": ("group",),
    "category": ("category",),
    "features": ("features",),
    "unembedding": ("unembedding",),
}
_WORDS = {
    **dict.fromkeys(("true", "yes", "correct", "right", "t", "y"), 1.0),
    **dict.fromkeys(("false", "no", "incorrect", "wrong", "f", "n"), 0.0),
}
_NULLS = ("none", "nan", "null", "n/a", "na", "<na>", "nat")
_TINY = 1e-12  # lower bound of probabilities, so that logarithms are finite
_LEAST_PERCENT = 10.0  # percentages have a maximum above it, ratings of 1 to 10 do not


@dataclasses.dataclass(frozen=True)
class PredictionTable:
    """Predictions of a file.

    Attributes:
        predictions: numbers with the precision of the file, at least float32; its `categories` are checksums of labels.
        groups: `[N]`, numbered from 0 by first appearance, or None.
        categories: `[N]`, labels as text, or None.
        probabilities: float64 `[N, K]`, as the file has them, or None. `predictions.logits` are then their logarithms.
        rows: int `[N]`, the number of each row in the file, from 0; None after `take`.
        notes: lines that report how the file was read where that is a choice.
    """

    predictions: Predictions
    groups: np.ndarray | None
    categories: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    rows: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def take(self, rows: np.ndarray) -> "PredictionTable":
        unembedding = self.predictions.unembedding  # whose rows are options
        arrays = self.predictions._replace(unembedding=None), self.groups, self.categories, self.probabilities
        predictions, *others = jax.tree.map(lambda x: np.asarray(x)[rows], arrays)
        return PredictionTable(predictions._replace(unembedding=unembedding), *others)

    def __len__(self) -> int:
        logits, confidence = self.predictions.logits, self.predictions.confidence
        return len(np.asarray(confidence if logits is None else logits))


def read_table(
    path: str | Path,
    *,
    outcomes: bool = True,
    columns: Mapping[str, str] | None = None,
    skip_broken: bool = False,
    per_token: bool = False,
    truth: str | Path | None = None,
) -> PredictionTable:
    """Reads a table of predictions.

    Args:
        path: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json` or `.parquet` (see `read_source`) with the columns
            `confidence` (0 to 1) and `correct` (0, 1, yes, no, or the fraction of correct attempts); or `logits`, or
            `logit_0` ... `logit_{K−1}` (or probabilities that sum to 1, `probs` or `p_0` ...) and `label` (0 to K − 1).
            Optionally `group`, labels of dependent rows, and `category`, kinds of questions that new data will have as
            well. Or `.npz` with arrays of these names, and optionally `features` `[N, D]` and `unembedding` `[K, D]`.
            Or records of servers and of lm-eval; see `calibjax.data.records`.
        outcomes: False accepts a table without `correct` or `label`.
        columns: role, such as "confidence", -> the name of its column, or "NAME/100" to divide its numbers. Logits take
            precedence over a confidence that is not named. "confidences" -> names, separated by commas; the first is
            the confidence where the table has no other.
        skip_broken: leave out rows that cannot be read; a note counts them.
        per_token: of responses of a server with a scored text, a row for each token; see `flat_rows`.
        truth: file with further columns of the rows, such as `correct`; see `with_truth`.

    Raises:
        UserError: the file cannot be read; columns or rows are missing; or a value is not a number in its range, or a
            label is missing (the message names its row, counted from 0).
    """
    path = user_path(path)
    if not path.is_file():
        found = "expected a file, found a directory, a pipe or a device" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {found}.")
    columns = dict(columns or {})
    several = [name.strip() for name in columns.pop("confidences", "").split(",") if name.strip()]
    without_divisors = [column.rpartition("/")[0] for column in columns.values()]
    named = {*several, *columns.values(), *without_divisors}
    raw = _read_columns(path, named, skip_broken, per_token, truth)
    divided = {role: _split_divisor(role, column, raw.names) for role, column in columns.items()}
    names = _assign_roles(path, raw.names, {role: name for role, (name, _) in divided.items()})
    for name in (*several, *names.values()):
        if name not in raw.names:
            raise UserError(f"{path}: there is no column {name}; got: {_listed(raw.names)}.")
    if several:
        names.setdefault("confidence", several[0])
    reader = _Columns(path, raw, dict(divided.values()), skip_broken)
    confidence_first = "confidence" in columns  # one that the caller named, over logits
    predictions, probabilities = reader.predictions(names, confidence_first, outcomes)
    if several:
        predictions = predictions._replace(confidences=np.stack(list(map(reader.fractions, several)), axis=1))
    for role in {"features", "unembedding"} & names.keys():
        predictions = predictions._replace(**{role: reader.matrix(names[role], per_row=role == "features")})
    groups = reader.labels(names["group"]) if "group" in names else None
    categories = reader.labels(names["category"]) if "category" in names else None
    rows = reader.readable_rows()
    table = PredictionTable(predictions, groups, categories, probabilities).take(rows)
    predictions, groups = table.predictions, table.groups
    if table.categories is not None:
        labels = table.categories.tolist()
        numbers = [zlib.crc32(label.encode()) & 0x7FFFFFFF for label in labels]  # the same in every file
        if len(set(numbers)) < len(set(labels)):
            raise UserError(f"{path}: category: two labels have one checksum; change a letter of one of them.")
        predictions = predictions._replace(categories=np.array(numbers, np.int32))
    if groups is not None:  # by first appearance, so that labels as numbers and as text give the same result
        number_of = {label: number for number, label in enumerate(dict.fromkeys(groups.tolist()))}
        groups = np.array([number_of[label] for label in groups.tolist()])
    return dataclasses.replace(table, predictions=predictions, groups=groups, rows=rows, notes=tuple(reader.notes))


def _split_divisor(role: str, column: str, names: Sequence[str]) -> tuple[str, float]:
    """The name and the divisor of a column given as "NAME/100"; 1 if a column has this name or no number follows."""
    match = re.fullmatch(r"(.+)/(\d+(?:\.\d+)?)", column, re.DOTALL)
    if match is None or role not in ("confidence", "correct") or column in names or not float(match[2]):
        return column, 1.0
    return match[1], float(match[2])


def split_table(table: PredictionTable, fit_fraction: float, *, seed: int) -> tuple[PredictionTable, PredictionTable]:
    """Splits a table at random by `seed` into (fit, held out), neither empty. Rows of one group stay on one side."""
    check_value("fit_fraction", Fraction, fit_fraction)
    rows = len(table)
    if not 1 <= fit_fraction * rows <= rows - 1:
        expected = f"expected {1 / rows:.3g} to {1 - 1 / rows:.3g}"
        raise UserError(f"fit_fraction: {fit_fraction} of {rows:,} rows leaves one part empty: {expected}.")
    group = np.arange(rows) if table.groups is None else table.groups
    if not group.any():
        raise UserError("all rows are of one group: groups are not split, so expected at least two.")
    order = np.random.default_rng(seed).permutation(int(group.max()) + 1)
    fit = first_groups(group, order, fit_fraction * rows)
    return table.take(np.flatnonzero(fit)), table.take(np.flatnonzero(~fit))


# --- columns of a file ---


def table_rows(
    path: str | Path, *, skip_broken: bool = False, per_token: bool = False, truth: str | Path | None = None
) -> Rows:
    """Rows of a table as `read_table` numbers them, with all of their columns; see `flat_rows` and `with_truth`."""
    path = user_path(path)
    if path.suffix != ".npz":
        rows = read_source(path, skip_broken=skip_broken)
        return flat_rows(rows if truth is None else with_truth(rows, read_source(truth)), per_token=per_token)
    loaded = _load_npz(path, lambda name: name != "unembedding")
    arrays = {name: array for name, array in loaded.cells.items() if array.ndim}

    def read() -> Iterator[Placed]:
        for number, row in enumerate(zip(*arrays.values(), strict=True)):
            yield f"row {number}", {name: cell.tolist() for name, cell in zip(arrays, row, strict=True)}

    return Rows(read, name=str(path))


class _RawColumns(NamedTuple):
    """Cells of the columns that may have a role, names of all columns, and the numbers of rows read and left out."""

    cells: dict[str, Any]
    names: list[str]
    rows: int
    skipped: Skipped


def _read_columns(
    path: Path, named: Set[str], skip_broken: bool, per_token: bool, truth: str | Path | None
) -> _RawColumns:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _KINDS:
        raise UserError(f"{path}: expected a file ending in {', '.join(_KINDS)}.")
    if suffix == ".npz":
        if truth is not None or per_token:
            raise UserError(f"truth, per_token: {path} holds arrays, not responses of a server; leave them out.")
        return _load_npz(path, lambda name: _may_have_role(name, named))
    if suffix == ".parquet" and truth is None and not per_token:
        return _read_parquet(path, named)
    columns: dict[str, list[Any] | None] = {}
    skipped = Skipped()
    count = 0
    for _, row in table_rows(path, skip_broken=skip_broken, per_token=per_token, truth=truth).placed(skipped):
        for name in row:
            if name not in columns:
                columns[name] = [None] * count if _may_have_role(name, named) else None
        for name, column in columns.items():
            if column is not None:
                column.append(row.get(name))
        count += 1
    cells = {name: column for name, column in columns.items() if column is not None}
    return _RawColumns(cells, list(columns), count, skipped)


def _load_npz(path: Path, is_read: Callable[[str], bool]) -> _RawColumns:
    """Arrays whose names `is_read` selects, with one number of rows but for the unembedding and scalars; all names."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if is_read(name)}
            lengths = {name: len(array) for name, array in arrays.items() if array.ndim and name != "unembedding"}
    except Exception as error:  # of zipfile, zlib, tokenize and numpy; or of a member that is no array
        raise UserError(f"{path} cannot be read as an .npz file that holds arrays only ({error}).") from error
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{path}: expected arrays with the same number of rows, got {counts}.")
    return _RawColumns(arrays, file.files, max(lengths.values(), default=0), Skipped())


def _read_parquet(path: Path, named: Set[str]) -> _RawColumns:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path.absolute()) as file:
            names = file.schema_arrow.names
            table = file.read([name for name in names if _may_have_role(name, named)])
            columns = {name: _arrow_cells(table.column(name)) for name in table.column_names}
            return _RawColumns(columns, names, file.metadata.num_rows, Skipped())
    except (pyarrow.ArrowException, OSError, LookupError, OverflowError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as a table of Parquet: {first_line(error)}.") from error


def _arrow_cells(column: Any) -> np.ndarray | list[Any]:
    """A column of numbers, or of lists of equally many, as an array; any other, or one with nulls, cell by cell."""
    import pyarrow
    import pyarrow.compute

    types, compute, flat = pyarrow.types, cast(Any, pyarrow.compute), column
    is_list = isinstance(column.type, (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType))
    if is_list and len(compute.list_value_length(column).unique()) == 1:
        flat = compute.list_flatten(column)
    are_numbers = types.is_integer(flat.type) or types.is_floating(flat.type)
    if column.null_count or flat.null_count or not are_numbers:
        return column.to_pylist()
    values = np.from_dlpack(flat.combine_chunks())  # `to_numpy` would import pandas
    return values.reshape(len(column), -1) if is_list else values


def _may_have_role(name: str, named: Set[str]) -> bool:
    """Whether a column may have a role; `named` are the columns that the user gave."""
    known = map(normalised, itertools.chain(*_ROLES.values()))
    is_numbered = re.fullmatch(r"(logit|p)_\d+", name.strip(), re.IGNORECASE)
    is_named = {name, name.removeprefix("correct_")} & named
    return bool(is_named or is_numbered or normalised(name) in known)


def _assign_roles(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Role -> column of the file, for the roles that it has; `columns` are those that the user named."""
    for role, column in columns.items():
        if role not in _ROLES:
            raise UserError(f"columns: {role}={column}: expected confidences, {', '.join(_ROLES)} before the =.")
    assigned = dict(columns)
    outcome = f"correct_{assigned.get('confidence')}"  # of the method whose confidence it is, as `eval tasks` names it
    if "correct" not in assigned and outcome in names:
        assigned["correct"] = outcome
    for role, spellings in _ROLES.items():
        if role in assigned:
            continue
        exact = [name for name in names if name in spellings]
        similar = [name for name in names if normalised(name) in map(normalised, spellings)]
        # Columns of one name in a CSV file have their numbers after it.
        numbered = [name for name in names if re.sub(r" \(\d+\)$", "", name) in spellings]
        candidates = exact or similar or (numbered if len(numbered) > 1 else [])
        if len(candidates) > 1:
            several = f"several columns could be {role}: {', '.join(candidates)}"
            raise UserError(f"{path}: {several}. Choose one: columns {role}=NAME.")
        if candidates:
            assigned[role] = candidates[0]
    return assigned


def _listed(names: Sequence[str]) -> str:
    shown = [name if name == name.strip() else repr(name) for name in names[:12]]
    return ", ".join(shown) or "none"


# --- cells as arrays ---


class _Columns:
    """Columns of a file as arrays; rows that cannot be read are refused, or marked in `broken` `[N]` to be left out."""

    def __init__(self, path: Path, raw: _RawColumns, divisors: Mapping[str, float], skip_broken: bool) -> None:
        self.cells, self.names, self.skipped = raw.cells, raw.names, raw.skipped
        self.broken = np.zeros(raw.rows, bool)
        self.notes: list[str] = []
        self._path, self._divisors, self._skip_broken = path, divisors, skip_broken

    def predictions(
        self, names: Mapping[str, str], confidence_first: bool, outcomes: bool
    ) -> tuple[Predictions, np.ndarray | None]:
        """Predictions with logits or with confidences; and the probabilities `[N, K]` of a file that has no logits."""
        takes_scores = not confidence_first and ("label" in names or not outcomes)
        probabilities, logits = self.class_scores(names) if takes_scores else (None, None)
        fields = {} if logits is None else {"logits": logits}
        if logits is not None and "label" in names:
            fields["labels"] = self.classes(names["label"], logits)
        elif "confidence" in names and ("correct" in names or not (fields or outcomes)):
            fields["confidence"] = self.fractions(names["confidence"])
            if "correct" in names:
                fields["correct"] = self.fractions(names["correct"], words=True)
        if fields:
            return Predictions(**fields), probabilities
        if self.skipped.count and not len(self.broken):
            raise UserError(f"{self._path}: no row can be read; the first: {self.skipped.first}")
        raise UserError(f"{self._path}: {_EXPECTED}; got: {_listed(self.names)}.")

    def readable_rows(self) -> np.ndarray:
        """Indices of the rows that are not broken, at least one; a note counts the others."""
        rows = np.flatnonzero(~self.broken)
        if not len(rows):
            raise UserError(f"{self._path}: expected at least one row, got none.")
        count = self.skipped.count + int(self.broken.sum())
        if count:
            self.notes.append(f"{quantity(count, 'broken row')} left out, the first: {self.skipped.first.rstrip('.')}")
        return rows

    def _require(self, name: str, good: Any, expected: str) -> None:
        """Raises `UserError` for the first row that is not `good`, bool `[N]`, or marks these rows as broken."""
        bad = ~(np.asarray(good, bool) | self.broken)
        if not bad.any():
            return
        row = int(np.argmax(bad))
        message = f"{self._path}: {name}: row {row} holds {_shown_cell(self.cells[name][row])}, expected {expected}"
        if not self._skip_broken:
            raise UserError(f"{message}. Correct or remove the row.")
        self.skipped.first = self.skipped.first or message
        self.broken |= bad

    def _cells(self, name: str, axes: int) -> np.ndarray | list[Any]:
        """A column: numbers as an array, of which `axes` are required, or a list of cells."""
        cells = self.cells[name]
        if not isinstance(cells, np.ndarray):
            return cells
        if cells.ndim != axes:
            what = "a list of numbers" if axes == 2 else "one number or label"
            raise UserError(f"{self._path}: {name}: expected {what} for each row, got an array of shape {cells.shape}.")
        return cells if cells.dtype.kind in "biuf" else cells.tolist()

    def _numbers(self, name: str, words: Mapping[str, float] | None = None) -> np.ndarray:
        """Real numbers `[N]`, NaN for empty cells; in the dtype of the file, float64 for text and JSON.

        Text may be a percentage, one of `words`, or have a decimal comma, unless it could be thousands (1,234).
        """
        cells = self._cells(name, axes=1)
        if isinstance(cells, np.ndarray):
            return cells
        decimal_comma = _has_decimal_comma([cell for cell in cells if isinstance(cell, str)])
        numbers = [_number(cell, decimal_comma, words or {}) for cell in cells]
        expected = "a number, yes or no, or true or false" if words else "a number"
        self._require(name, [number is not None for number in numbers], expected)
        return np.array(numbers, np.float64)  # NaN for None

    def fractions(self, name: str, *, words: bool = False) -> np.ndarray:
        """Numbers from 0 to 1, float64 `[N]`, divided by the column's divisor, or by 100 where they are percentages."""
        divisor = self._divisors.get(name, 1.0)
        values = self._numbers(name, _WORDS if words else None).astype(np.float64)
        known = values[~self.broken & ~np.isnan(values)]
        has_signs = any(isinstance(cell, str) and "%" in cell for cell in self.cells[name])  # by which they are divided
        if has_signs and divisor != 1:
            raise UserError(f"{self._path}: {name}: numbers with percent signs are fractions; leave the divisor out.")
        is_in_range = known.size > 0 and known.min() >= 0 and _LEAST_PERCENT < known.max() <= 100
        are_percentages = is_in_range and not ((known > 0) & (known < 1)).any()
        if divisor != 1:
            values = values / divisor
        elif are_percentages and not words and not has_signs:
            values = values / 100
            self.notes.append(f"{name}: numbers from 0 to 100 are divided by 100")
        expected = "0 to 1"
        if not words and np.nanmax(values, initial=0) > 1:
            expected += " (of another range, such as 1 to 10? columns confidence=NAME/10 divides by 10)"
        self._require(name, (values >= 0) & (values <= 1), expected)
        return values

    def labels(self, name: str) -> np.ndarray:
        """Labels as text `[N]`: text unchanged, whole numbers in digits (floats as well), and true or false."""
        cells = self._cells(name, axes=1)
        if isinstance(cells, np.ndarray) and cells.dtype.kind == "f":  # with the digits of their dtype
            cells = cells.astype(str).astype(np.float64)
        texts = [_label(cell) for cell in cells]
        self._require(name, [text is not None for text in texts], "a label: Unicode text or a number")
        nulls = sorted({text for text in texts if text and text.casefold() in _NULLS})
        if nulls:
            self.notes.append(f"{name}: {', '.join(nulls)} is read as a label as any other, not as a missing one")
        return np.array([text or "" for text in texts], str)

    def classes(self, name: str, logits: np.ndarray) -> np.ndarray:
        """The right option of each row, int32 `[N]`: a whole number from 0 to K − 1, of an option that is possible."""
        values = self._numbers(name)
        options = logits.shape[1]
        is_option = np.isin(values, np.arange(options))
        self._require(name, is_option, f"a whole number from 0 to {options - 1}")
        labels = np.where(is_option, values, 0).astype(np.int32)
        self._require(name, np.isfinite(logits[np.arange(len(labels)), labels]), "an option whose logit is finite")
        return labels

    def matrix(self, name: str, *, per_row: bool) -> np.ndarray:
        """Finite numbers, float32: `[N, D]`, or, without `per_row`, `[K, D]`, of which no row is left out."""
        values = self._lists(name)
        good = _is_finite(values).all(axis=1)
        if per_row:
            self._require(name, good, "finite numbers of float32")
        elif not good.all():
            expected = f"finite numbers of float32, row {good.argmin()} has others"
            raise UserError(f"{self._path}: {name}: expected {expected}.")
        return values.astype(np.float32)

    def class_scores(self, names: Mapping[str, str]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Probabilities and their logarithms, or None and logits, `[N, K]`; None and None if the file has neither."""
        for role, prefix in (("logits", "logit"), ("probs", "p")):
            pattern = re.compile(rf"{prefix}_(\d+)", re.IGNORECASE)
            matches = ((pattern.fullmatch(name.strip()), name) for name in self.names)
            numbered = sorted((int(match[1]), name) for match, name in matches if match)
            if numbered and [number for number, _ in numbered] != [*range(max(len(numbered), 2))]:
                got = ", ".join(name for _, name in numbered)
                raise UserError(f"{self._path}: expected {prefix}_0, {prefix}_1 and so on without a gap, got {got}.")
            if numbered and role not in names:
                self.cells[prefix] = np.stack([self._numbers(column) for _, column in numbered], axis=1)
                names = {role: prefix}
            if role in names:
                name = names[role]
                values = self._lists(name)
                return self._log_probabilities(name, values) if role == "probs" else (None, self._logits(name, values))
        return None, None

    def _lists(self, name: str) -> np.ndarray:
        """Numbers `[N, K]` of cells that are lists; −inf at the end of lists that are shorter than the longest."""
        cells = self._cells(name, axes=2)
        if isinstance(cells, np.ndarray):
            return cells if cells.dtype.kind == "f" else cells.astype(np.float64)
        rows = [_list(cell) for cell in cells]
        self._require(name, [row is not None for row in rows], "a list of numbers")
        lengths = np.array([len(row or ()) for row in rows], np.int64)
        values = np.full((len(rows), lengths.max(initial=0)), -np.inf)
        for place, row in enumerate(rows):
            values[place, : lengths[place]] = row or ()
        most = values.shape[1]
        least = lengths[~self.broken].min(initial=most)
        if least < most:
            self.notes.append(f"{name}: rows have {least} to {most} options; those that lack are impossible")
        return values

    def _logits(self, name: str, values: np.ndarray) -> np.ndarray:
        """Logits `[N, K]`, K at least 2, at least float32: finite, or −inf for an option that is impossible."""
        if values.shape[1] < 2:
            raise UserError(f"{self._path}: {name}: expected at least two classes, got shape {values.shape}.")
        impossible = np.isneginf(values)
        self._require(name, (_is_finite(values) | impossible).all(axis=1), "finite numbers of float32, or -inf")
        self._require(name, ~impossible.all(axis=1), "at least one logit that is finite")
        return values.astype(np.result_type(values.dtype, np.float32))

    def _log_probabilities(self, name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities that sum to 1, float64 `[N, K]`, and their logarithms; 0 and −inf where a list has ended."""
        is_option = ~np.isneginf(values)
        p = np.where(is_option, values, 0.0).astype(np.float64)
        with np.errstate(invalid="ignore"):
            good = (p >= 0).all(axis=1) & (abs(p.sum(axis=1) - 1).round(6) <= 1e-3)
        self._require(name, good, "probabilities that sum to 1 within 0.001 (rounded? divide them by their sum)")
        logs = np.log(np.maximum(np.where(good[:, None], p, 1.0), _TINY))
        return p, self._logits(name, np.where(is_option, logs, -np.inf))


def _shown_cell(cell: Any) -> str:
    cell = cell.tolist() if isinstance(cell, np.ndarray | np.generic) else cell
    if cell is None or cell == "":
        return "nothing"
    plain = isinstance(cell, str) and re.fullmatch(r"[-+.,\w]*\d[-+.,\w]*%?|nan", cell, re.ASCII)
    return shortened(cell if plain else repr(cell))


def _has_decimal_comma(texts: Sequence[str]) -> bool:
    """Whether numbers are written 0,5: some have a comma, none has a point, and not all could be thousands (1,234)."""
    with_comma = [text for text in texts if "," in text]
    if not with_comma or any("." in text for text in texts):
        return False
    return not all(re.fullmatch(r"\s*[+-]?[1-9]\d{0,2},\d{3}%?\s*", text) for text in with_comma)


def _number(cell: Any, decimal_comma: bool, words: Mapping[str, float]) -> float | None:
    """A number, NaN where there is none, or None for what cannot be read as one."""
    try:
        if not isinstance(cell, str):
            return np.nan if cell is None else float(cell)
        text = cell.strip().casefold()
        if text in words:
            return words[text]
        number = text.removesuffix("%").rstrip().replace("_", "?")  # Python's float reads 0_5 as 5
        value = float(number.replace(",", ".") if decimal_comma else number) if text else np.nan
    except (ValueError, TypeError, OverflowError):
        return None
    return value / 100 if "%" in text else value


def _label(cell: Any) -> str | None:
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", "surrogateescape")
    if isinstance(cell, bool | np.bool_):
        return str(cell).lower()
    if isinstance(cell, float):
        if np.isnan(cell):
            return None
        return str(int(cell)) if cell.is_integer() else repr(float(cell))
    if not isinstance(cell, str | int | np.integer | decimal.Decimal):  # nothing, a list, a time of day
        return None
    text = str(cell)
    return text if text.strip() and is_text(text) else None


def _list(cell: Any) -> list[float] | None:
    """The numbers of a list, which may be written as text; None if it is none."""
    try:
        values = json.loads(cell) if isinstance(cell, str) else cell
        if not isinstance(values, list):  # an object would give its keys, text its digits
            return None
        return [float(value) for value in values] or None
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _is_finite(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.isfinite(values.astype(np.float32))
