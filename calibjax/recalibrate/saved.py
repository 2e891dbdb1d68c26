"""Fitted recalibrators on disk: the arrays as safetensors, a description as JSON, and checksums of both."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.errors import ScopeParamShapeError
from jaxtyping import Array

from calibjax.recalibrate.contract import Method, Predictions, checked_fields, class_count, host_field
from calibjax.recalibrate.methods import METHODS
from calibjax.runtime.arrays import plain_array
from calibjax.runtime.checksums import array_digests, different_names, read_checksums, write_directory
from calibjax.runtime.errors import UserError, user_path
from calibjax.runtime.files import check_new_directory, json_text, read_json

_SCHEMA = 1
_ARRAYS, _DESCRIPTION = "state.safetensors", "recalibrator.json"
_ROWS, _CELLS = 1024, 2**20  # of a block in which predictions are recalibrated: rows, and rows times classes, at most
_REMEDY = "Restore the directory from a copy, or fit the method again."


class Recalibrator(NamedTuple):
    """A fitted method: its name in `METHODS`, the state that its `fit` returned, and JSON-able notes on the fit."""

    name: str
    state: Any
    notes: Mapping[str, Any] = {}

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    def __call__(self, data: Predictions | None = None, **fields: Any) -> np.ndarray:
        """Recalibrates predictions: `data` or `fields` hold what the method reads (`method.apply_reads`).

        Returns:
            float32: calibrated confidences `[N]` or log-probabilities of the classes `[N, K]`, see `method.returns`.
            The result of a prediction does not depend on the other rows of the call, to the last bit.

        Raises:
            UserError: a field that the method reads is missing or has other classes, features or kinds of confidence
                than that of the fit, or the fields differ in rows or hold values that `Predictions` does not allow.
        """
        data = Predictions(**fields) if data is None else data
        names = self.method.apply_reads
        missing = [field for field in names if getattr(data, field) is None]
        if missing:
            raise UserError(f"{self.name} reads {', '.join(names)}: the predictions have no {', '.join(missing)}.")
        reads = Predictions(**{field: plain_array(getattr(data, field)) for field in names})
        divided = tuple(name for name in names if name != "unembedding")
        rows = {name: host_field(name, getattr(reads, name)) for name in divided}
        count = len(rows[divided[0]])
        if not count:
            return np.asarray(_apply(self.method, self.state, reads))
        for field in {"confidence", "confidences"} & rows.keys():
            clipped = np.clip(rows[field], 0, 1)
            is_rounding = abs(rows[field] - clipped) <= 1e-5  # a softmax may exceed 1 by its rounding
            rows[field] = np.where(is_rounding, clipped, rows[field])
        checked_fields(Predictions(**rows), divided, impossible=self.method.accepts_impossible)
        # One program, of a block of rows, for all: programs of other shapes round differently, and a threshold chosen
        # on a table could separate a confidence from that of the same prediction alone.
        fitting = _CELLS // max(class_count(reads), 1)
        size = min(max(fitting, 1), _ROWS)
        parts = []
        for start in range(0, count, size):
            block = np.minimum(np.arange(start, start + size), count - 1)
            block_reads = reads._replace(**{name: x[block] for name, x in rows.items()})
            try:
                parts.append(_apply(self.method, self.state, block_reads))
            except (TypeError, ValueError, ScopeParamShapeError) as error:
                shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in rows.items())
                expected = "as many classes, features or confidences as those of its fit"
                raise UserError(f"{self.name}: expected {expected}, got {shapes}.") from error
        return np.concatenate(parts)[:count]


@jax.jit(static_argnums=0)
def _apply(method: Method, state: Any, data: Predictions) -> Array:
    return method.apply(state, data)


def is_recalibrator(directory: Path) -> bool:
    """Whether a directory holds what `save` wrote, rather than a head."""
    return (directory / _DESCRIPTION).is_file()


def check_directory(directory: Path) -> None:
    """Raises `UserError` where `save` could not write, or would find something else than an earlier result."""
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set()
    check_new_directory(directory, replace=not names.isdisjoint({_DESCRIPTION, "head.json"}))


def save(directory: str | Path, recalibrator: Recalibrator, *, more: Mapping[str, bytes] | None = None) -> None:
    """Writes a fitted method; one that is already there is replaced as a whole. All processes of a job call it.

    The directory holds state.safetensors, recalibrator.json and checksums.json. `more`: content of other files by name.

    Raises:
        UserError: no such method, a state of another method, or a directory that holds something else.
    """
    from safetensors.numpy import save as to_bytes

    name, state, notes = recalibrator
    if name not in METHODS:
        raise UserError(f"recalibrate.save: {name!r}: expected one of {', '.join(METHODS)}.")
    arrays = named_arrays(state)
    expected = f"the NamedTuple of arrays that the fit of {name} declares as its return annotation"
    try:
        state_type = _state_type(name)
        expected = f"the state that the fit of {name} returns ({getattr(state_type, '__name__', state_type)})"
        is_readable = jax.tree.structure(_built(state_type, arrays)) == jax.tree.structure(state)
    except (KeyError, NameError, TypeError):
        is_readable = False
    if not is_readable:
        raise UserError(f"recalibrate.save: expected {expected}, got a {type(state).__name__}.")
    description = {"schema": _SCHEMA, "method": name, "notes": dict(notes)}
    files = {_ARRAYS: to_bytes(arrays), _DESCRIPTION: json_text(description)}
    write_directory(directory, {**files, **(more or {})}, arrays)


def named_arrays(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a state by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x, order="C") for path, x in leaves}


def load(directory: str | Path) -> Recalibrator:
    """Reads a fitted method that `save` or `calibjax compare --save` wrote.

    Raises:
        UserError: no such directory, a damaged or edited file, or a method that this version does not have.
    """
    from safetensors.numpy import load as from_bytes

    directory = user_path(directory)
    if not is_recalibrator(directory):
        is_head = (directory / "head.json").is_file()
        hint = " It holds a temperature head: calibjax.load_head reads it." if is_head else ""
        raise UserError(f"{directory}: expected a fitted recalibrator with {_DESCRIPTION}, found none.{hint}")
    digests = read_checksums(directory, _REMEDY)
    try:
        description = read_json(directory / _DESCRIPTION)
        name, notes = str(description["method"]), dict(description["notes"])
        if description["schema"] != _SCHEMA or name not in METHODS:
            raise ValueError(f"schema {description['schema']}, method {name}")
        arrays = from_bytes((directory / _ARRAYS).read_bytes())
        if different := different_names(array_digests(arrays), digests):
            raise ValueError(f"the checksum of {', '.join(different[:5])} differs")
        state = _built(_state_type(name), arrays)
    except Exception as error:  # safetensors raises an exception of its own
        raise UserError(f"{directory}: cannot be read ({type(error).__name__}: {error}). {_REMEDY}") from error
    return Recalibrator(name, state, notes)


def _state_type(name: str) -> Any:
    return typing.get_type_hints(METHODS[name].fit_arrays)["return"]


def _built(kind: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of this type from its arrays by dotted path: a NamedTuple, an array, or else nested dicts."""
    is_record = hasattr(kind, "_fields")
    if "" in arrays and not is_record:
        return arrays[""]
    parts: dict[str, dict[str, np.ndarray]] = {}
    for path, array in arrays.items():
        name, _, rest = path.partition(".")
        parts.setdefault(name, {})[rest] = array
    hints = typing.get_type_hints(kind) if is_record else dict.fromkeys(parts)
    built = {name: _built(hint, parts[name]) for name, hint in hints.items()}
    return kind(**built) if is_record else built
