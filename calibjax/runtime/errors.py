"""The error type for invalid input, and the checks that raise it."""

import dataclasses
import os
import typing
from pathlib import Path
from typing import Any

import jax
import numpy as np


class UserError(ValueError):
    """Invalid input: a path, an option or the contents of a file.

    The message states what was expected, what was found, and what to do next. The command line prints it without a
    traceback and exits with code 2.
    """


def require_directory(path: str | Path, what: str) -> Path:
    """Returns `path` as a `Path`; raises `UserError` if it is not an existing directory. `what` names its role."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{what}: {path} does not exist.")
    if not path.is_dir():
        raise UserError(f"{what}: expected a directory, but {path} is a file.")
    return path


def user_path(path: str | Path) -> Path:
    """Returns `path` as a `Path`, with a leading `~` or `~user` expanded unless the literal path exists."""
    return Path(path) if os.path.exists(path) else Path(os.path.expanduser(path))


LARGEST_SIZE = 2**31 - 1
"""Largest size in a configuration: JAX indexes with int32."""


def check_fields(config: Any) -> None:
    """Checks the numbers of a configuration, a dataclass, against the annotations of its fields.

    Every `int` is a size, from 1 to `LARGEST_SIZE`; every `float` is finite; `bool` is no number. Tuples are checked
    entry by entry, and `None` is valid where the annotation has it. Other types are not checked.

    Raises:
        UserError: names the first field that is invalid.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kinds = set(typing.get_args(field.type) or (field.type,))
        if kinds & {int, float, bool} and not (value is None and type(None) in kinds):
            if typing.get_origin(field.type) is not tuple:
                entries = (value,)
            elif isinstance(value, tuple):
                entries = value
            else:
                raise UserError(f"{field.name}: expected a tuple, got {value!r}.")
            for entry in entries:
                if problem := _problem(entry, kinds):
                    raise UserError(f"{field.name}: expected {problem}, got {str(entry)[:60]}.")


def _problem(value: Any, kinds: set[Any]) -> str | None:
    if bool in kinds:
        return None if isinstance(value, bool | np.bool_) else "true or false"
    if int in kinds:
        fits = isinstance(value, int | np.integer) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE
        return None if fits else f"a whole number from 1 to {LARGEST_SIZE}"
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool) and abs(value) <= 1e300
    return None if fits else "a finite number"


def host_indices(values: Any) -> Any:
    """Clips host integers to the range of int32, because JAX would wrap 2³² + 1 to 1.

    An index out of range therefore stays out of range. JAX arrays are returned unchanged.
    """
    if isinstance(values, jax.Array):
        return values
    values = np.asarray(values)
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 4:
        return values
    limits = np.iinfo(np.int32)
    return np.clip(values, max(limits.min, np.iinfo(values.dtype).min), limits.max).astype(np.int32)
