"""Reading metrics.json and tokens.json: plain dictionaries, one small check, and one `UserError` for a damaged file.

The functions that make a document describe its entries: `evaluate_tokens.results_json`, `comparison_json`,
`answers_json`, `layers_json` and `token_sample`.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json

SCHEMA = 1
"""Version of metrics.json."""

Document = dict[str, Any]
"""The contents of a metrics.json."""

_TEXTS = {
    *("unit", "clusters", "title", "confidence", "reference", "sort", "closed", "source", "subject", "readout"),
    *("recipe", "name", "candidate", "text", "first"),
}
"""Names of the entries that may be text; all others are numbers, true or false, or null."""
_FREE = ("run", "failed", "left_out", "not_converged")
"""Entries whose contents nothing computes with."""
_LARGEST = 1e100
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)


def read_metrics(file: Path) -> Document:
    """Reads and checks the metrics.json of a run; raises `UserError` if there is none, or it is damaged."""
    if not file.is_file():
        raise UserError(f"{file.parent}: expected the directory of a finished run, with metrics.json; found none.")
    document = _load(file)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "held_out" not in document:
        raise UserError(f"{file}: expected metrics of schema {SCHEMA} with held-out figures. Run the command again.")
    if (problem := next(_problems(document, ""), None)) is not None:
        raise UserError(f"{file}: {problem}. Restore the file from a copy, or run the command again.")
    return document


def read_tokens(directory: Path) -> dict[str, Any] | None:
    """Reads and checks the `token_sample` in a run's tokens.json, None without one; `UserError` if it is damaged."""
    file = directory / "tokens.json"
    if not file.is_file():
        return None
    sample = _load(file)
    with as_user_error(file):
        for token in (token for sequence in sample["sequences"] for token in sequence):
            rows = [(token["text"], 0, 0)]
            if token["scored"]:
                rows += [("", *token[name]) for name in ("confidence", "probability", "entropy")]
                rows += [("", token["temperature"], 0), *token["top"]]
            for text, *pair in rows:
                if not (isinstance(text, str) and len(pair) == 2 and all(map(_is_number, pair))):
                    raise ValueError("expected a text, and two numbers, before and after")
    return sample


@contextlib.contextmanager
def as_user_error(file: Path | str) -> Iterator[None]:
    """Turns an error that a damaged file causes where it is drawn into one `UserError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGED as error:
        reason = f"the entry {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: {reason}. Restore the file from a copy, or run the command again.") from error


def _load(file: Path) -> Any:
    try:
        return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not readable ({error}).") from error


def _problems(value: Any, path: str, is_text: bool = False) -> Iterator[str]:
    """Where a value is text and its entry is not among `_TEXTS`, or where a number is not finite or too large."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in _FREE:
                yield from _problems(entry, f"{path}.{name}" if path else name, name in _TEXTS)
    elif isinstance(value, list):
        for place, entry in enumerate(value):
            yield from _problems(entry, f"{path}.{place}")
    elif not (value is None or _is_number(value) or (is_text and isinstance(value, str))):
        yield f"{path}: expected a finite number, found {json.dumps(value)[:40]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not abs(value) > _LARGEST  # NaN is the figure of no points
