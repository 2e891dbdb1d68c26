"""Cells of a file as arrays: numbers, fractions, labels and lists of options, each checked, row by row."""

import contextlib
import decimal
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.data.source import is_text
from calibjax.runtime.errors import UserError

Cells = np.ndarray | list[Any]
"""A column: an array where the file has numbers of one type, otherwise the cells as they were read."""

ROLES: dict[str, tuple[str, ...]] = {
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
"""What a table may hold, and the names of columns that are read as it; case, spaces and underscores do not count."""

_RIGHT = ("true", "yes", "correct", "right", "t", "y")
_WRONG = ("false", "no", "incorrect", "wrong", "f", "n")
_WORDS: dict[str, float] = {**dict.fromkeys(_RIGHT, 1.0), **dict.fromkeys(_WRONG, 0.0)}
_NULLS = ("none", "nan", "null", "n/a", "na", "<na>", "nat")
_LARGEST = float(np.finfo(np.float32).max)
_TINY = 1e-12  # lower bound of probabilities, so that logarithms are finite
_LEAST_PERCENT = 10.0  # percentages have a maximum above it, ratings of 1 to 10 do not


class ColumnReader:
    """Turns columns of the file `path` into arrays, and remembers which rows cannot be read.

    Attributes:
        broken: bool `[N]`, the rows that cannot be read; they are left out if `skip_broken`.
        first_broken: what is wrong with the first of them.
        notes: lines that say how cells were read where that is a choice.
    """

    def __init__(self, path: Path, rows: int, skip_broken: bool) -> None:
        self.path, self.skip_broken = path, skip_broken
        self.broken, self.first_broken = np.zeros(rows, bool), ""
        self.notes: list[str] = []

    def refuse(self, name: str, bad: np.ndarray, cells: Any, expected: str) -> None:
        """Raises `UserError` for the first row that is `bad`, or marks these rows as broken."""
        if not bad.any():
            return
        row = int(np.argmax(bad))
        message = f"{self.path}: {name}: row {row} holds {_shown(cells[row])}, expected {expected}"
        if not self.skip_broken:
            raise UserError(f"{message}. Correct or remove the row.")
        self.first_broken = self.first_broken or message
        self.broken |= bad

    def numbers(self, name: str, cells: Cells, words: Mapping[str, float] | None = None) -> np.ndarray:
        """Real numbers `[N]`, NaN where a row has none: of the file's dtype, or float64 of text and JSON.

        Text may be a percentage (87%), one of `words`, or have a decimal comma, unless it could be thousands (1,234).
        """
        if isinstance(cells, np.ndarray):
            if cells.dtype.kind in "biuf":
                if cells.ndim != 1:
                    raise UserError(f"{self.path}: {name}: expected one number for each row, got {cells.shape}.")
                return cells
            if cells.dtype.kind == "c":
                raise UserError(f"{self.path}: {name}: expected real numbers, got {cells.dtype}.")
            cells = cells.tolist()
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            values = np.array(cells, np.float64)
            if values.ndim == 1 and not any(isinstance(cell, str) and "_" in cell for cell in cells):
                return values
        commas = [cell for cell in cells if isinstance(cell, str) and "," in cell]
        points = any(isinstance(cell, str) and "." in cell for cell in cells)
        thousands = all(re.fullmatch(r"\s*[+-]?[1-9]\d{0,2},\d{3}%?\s*", cell) for cell in commas)
        decimal_comma = bool(commas) and not points and not thousands
        values, bad = np.full(len(cells), np.nan), np.zeros(len(cells), bool)
        for row, cell in enumerate(cells):
            try:
                values[row] = _number(cell, decimal_comma, words or {})
            except (ValueError, TypeError, OverflowError):
                bad[row] = True
        self.refuse(name, bad, cells, "a number" + (", yes or no, or true or false" if words else ""))
        return values

    def fractions(self, name: str, cells: Cells, *, divisor: float = 1.0, words: bool = False) -> np.ndarray:
        """Numbers from 0 to 1, float64 `[N]`, divided by `divisor`; with `words` also yes and no, true and false.

        A column of numbers from 0 to 100 without any between 0 and 1 holds percentages.
        """
        values = self.numbers(name, cells, _WORDS if words else None).astype(np.float64)
        known = values[~self.broken]
        within = known.size > 0 and known.min() >= 0 and _LEAST_PERCENT < known.max() <= 100
        if divisor != 1:
            values = values / divisor
        elif not words and within and not ((known > 0) & (known < 1)).any():
            values = values / 100
            self.notes.append(f"{name}: numbers from 0 to 100 are divided by 100")
        bad = np.asarray(~((values >= 0) & (values <= 1)) & ~self.broken)
        hint = "" if words else " (of another range, such as 1 to 10? --columns confidence=NAME/10 divides by 10)"
        self.refuse(name, bad, cells, "0 to 1" + (hint if np.nanmax(values, initial=0) > 1 else ""))
        return values

    def labels(self, name: str, cells: Cells) -> np.ndarray:
        """Text `[N]`: a cell that is text as it is; a whole number, also as a float, in digits; true and false.

        A row without a label is refused: several of them would be taken for one group.
        """
        if isinstance(cells, np.ndarray):
            if cells.ndim != 1:
                raise UserError(f"{self.path}: {name}: expected one label for each row, got shape {cells.shape}.")
            if cells.dtype.kind == "f":  # with the digits of their dtype: .1, not .10000000149
                cells = cells.astype(str).astype(np.float64)
        texts = [_label(cell) for cell in cells]
        self.refuse(name, np.array([text is None for text in texts], bool), cells, "a label: Unicode text or a number")
        if words := {text for text in texts if text and text.casefold() in _NULLS}:
            self.notes.append(
                f"{name}: {', '.join(sorted(words))} is read as a label as any other, not as a missing one"
            )
        return np.array([text or "" for text in texts], str)

    def classes(self, name: str, cells: Cells, logits: np.ndarray) -> np.ndarray:
        """The right option of each row, int32 `[N]`: a whole number from 0 to K − 1, of an option that is possible."""
        values = self.numbers(name, cells)
        options = logits.shape[1]
        with np.errstate(invalid="ignore"):
            bad = np.asarray(~((values >= 0) & (values < options)) | (values != np.round(values)))
        self.refuse(name, bad & ~self.broken, cells, f"a whole number from 0 to {options - 1}")
        labels = np.where(bad, 0, values).astype(np.int32)
        impossible = ~np.isfinite(logits[np.arange(len(labels)), labels])
        self.refuse(name, impossible & ~self.broken, cells, "an option whose logit is finite")
        return labels

    def matrix(self, name: str, cells: Cells) -> np.ndarray:
        """Finite numbers `[N, D]`, of the file's dtype."""
        values = self.lists(name, cells)
        self.refuse(name, np.asarray(~_finite(values).all(axis=1)), cells, "finite numbers of float32")
        return values

    def lists(self, name: str, cells: Cells) -> np.ndarray:
        """Numbers `[N, K]` of cells that are lists; −inf at the end of lists that are shorter than the longest."""
        if isinstance(cells, np.ndarray):
            if cells.dtype.kind not in "biuf" or cells.ndim != 2:
                raise UserError(
                    f"{self.path}: {name}: expected real numbers with two axes, got {cells.dtype} {cells.shape}."
                )
            return cells if cells.dtype.kind == "f" else cells.astype(np.float64)
        rows = [_list(cell) for cell in cells]
        self.refuse(name, np.array([row is None for row in rows], bool), cells, "a list of numbers")
        lengths = np.array([len(row or ()) for row in rows])
        values = np.full((len(rows), lengths.max(initial=0)), -np.inf)
        for place, row in enumerate(rows):
            values[place, : lengths[place]] = row or ()
        if lengths[~self.broken].size and (least := lengths[~self.broken].min()) < values.shape[1]:
            self.notes.append(f"{name}: rows have {least} to {values.shape[1]} options; those that lack are impossible")
        return values

    def logits(self, name: str, values: np.ndarray, cells: Any) -> np.ndarray:
        """Logits `[N, K]`, K at least 2, at least float32: finite, or −inf for an option that is impossible."""
        if values.shape[1] < 2:
            raise UserError(f"{self.path}: {name}: expected at least two classes, got shape {values.shape}.")
        impossible = np.isneginf(values)
        self.refuse(
            name, np.asarray(~(_finite(values) | impossible).all(axis=1)), cells, "finite numbers of float32, or -inf"
        )
        self.refuse(name, impossible.all(axis=1) & ~self.broken, cells, "at least one logit that is finite")
        return values.astype(np.result_type(values.dtype, np.float32))

    def log_probabilities(self, name: str, values: np.ndarray, cells: Any) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities that sum to 1, float64 `[N, K]`, and their logarithms; 0 and −inf where a list has ended."""
        there = ~np.isneginf(values)
        p = np.where(there, values, 0.0).astype(np.float64)
        with np.errstate(invalid="ignore"):
            good = (p >= 0).all(axis=1) & (abs(p.sum(axis=1) - 1) <= 1e-3)
        bad = np.asarray(~good)
        self.refuse(name, bad & ~self.broken, cells, "probabilities that sum to 1")
        logs = np.log(np.maximum(np.where(bad[:, None], 1.0, p), _TINY))
        return p, self.logits(name, np.where(there, logs, -np.inf), cells)


def assign_columns(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Role -> column of the file, for the roles that it has; `columns` are those that the user named.

    Raises:
        UserError: an unknown role, a column that the file lacks, or several columns for one role.
    """
    assigned = {}
    shown = ", ".join(name if name == name.strip() else repr(name) for name in names[:12]) or "none"
    for role, column in columns.items():
        if role not in ROLES:
            raise UserError(f"--columns {role}={column}: expected one of {', '.join(ROLES)} before the equals sign.")
        if column not in names:
            raise UserError(f"{path}: there is no column {column}; got: {shown}.")
        assigned[role] = column
    for role, spellings in ROLES.items():
        if role in assigned:
            continue
        exact = [name for name in names if name in spellings]
        similar = [name for name in names if _plain(name) in map(_plain, spellings)]
        # Columns of one name in a CSV file have their numbers after it.
        numbered = [name for name in names if re.sub(r" \(\d+\)$", "", name) in spellings]
        candidates = exact or similar or (numbered if len(numbered) > 1 else [])
        if len(candidates) > 1:
            raise UserError(
                f"{path}: several columns could be {role}: {', '.join(candidates)}. Choose one: --columns {role}=NAME."
            )
        if candidates:
            assigned[role] = candidates[0]
    return assigned


def option_columns(path: Path, names: Sequence[str], prefix: str) -> list[str]:
    """The columns prefix_0, prefix_1, ..., in their order, if there are any."""
    pattern = re.compile(rf"{prefix}_(\d+)", re.IGNORECASE)
    by_number = {int(match[1]): name for name in names if (match := pattern.fullmatch(name.strip()))}
    if by_number and (sorted(by_number) != list(range(len(by_number))) or len(by_number) < 2):
        raise UserError(
            f"{path}: expected {prefix}_0, {prefix}_1 and so on without a gap, got {', '.join(by_number.values())}."
        )
    return [by_number[k] for k in range(len(by_number))]


def is_read(name: str, named: Collection[str]) -> bool:
    """Whether a column may have a role; `named` are the columns that the user gave, "NAME" or "NAME/100"."""
    return (
        _plain(name) in map(_plain, itertools.chain(*ROLES.values()))
        or re.fullmatch(r"(logit|p)_\d+", name.strip(), re.IGNORECASE) is not None
        or any(re.fullmatch(re.escape(name) + r"(/[\d.]+)?", column) for column in named)
    )


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def _shown(cell: Any) -> str:
    cell = cell.tolist() if isinstance(cell, np.ndarray | np.generic) else cell
    if cell is None or cell == "":
        return "nothing"
    plain = isinstance(cell, str) and re.fullmatch(r"[-+.,\w]*\d[-+.,\w]*%?|nan", cell, re.ASCII)
    text = cell if plain else repr(cell)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _number(cell: Any, decimal_comma: bool, words: Mapping[str, float]) -> float:
    if cell is None:
        return np.nan
    if not isinstance(cell, str):
        return float(cell)
    text = cell.strip()
    if not text:
        return np.nan
    if text.casefold() in words:
        return words[text.casefold()]
    number = text.removesuffix("%").rstrip()
    if "_" in number:  # Python's float reads 0_5 as 5
        raise ValueError(number)
    value = float(number.replace(",", ".") if decimal_comma else number)
    return value if number == text else value / 100


def _label(cell: Any) -> str | None:
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", "surrogateescape")
    if isinstance(cell, bool | np.bool_):
        return str(cell).lower()
    if isinstance(cell, float):
        return None if np.isnan(cell) else str(int(cell)) if cell.is_integer() else repr(float(cell))
    if not isinstance(cell, str | int | np.integer | decimal.Decimal):  # nothing, a list, a time of day
        return None
    text = str(cell)
    return text if text.strip() and is_text(text) else None


def _list(cell: Any) -> list[float] | None:
    """The numbers of a list, which may be written as text; None if it is none."""
    try:
        values = json.loads(cell) if isinstance(cell, str) else cell
        return [float(value) for value in values] or None
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _finite(values: np.ndarray) -> np.ndarray:
    """Whether each value is a finite float32, before any cast."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(values.astype(np.float64, copy=False)) <= _LARGEST)
