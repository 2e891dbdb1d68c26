"""The error type for invalid input, and the checks that raise it."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np


class UserError(ValueError):
    """Invalid input: a path, an option or the contents of a file.

    The message states what was expected, what was found, and what to do next. The command line prints it without a
    traceback and exits with code 2.
    """


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Names an option in every `UserError` of the block that names none."""
    try:
        yield
    except UserError as error:
        if str(error).startswith("--"):
            raise
        raise UserError(f"{option}: {error}") from error


def printable(text: str) -> str:
    """A text without characters that control a terminal, or that have no encoding: they are shown as escapes.

    Example:
        >>> printable("red: \\x1b[31m")
        'red: \\\\x1b[31m'
    """
    return "".join(
        character if character.isprintable() or character in " \n" else character.encode("unicode_escape").decode()
        for character in text
    )


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


def require_finite(config: Any) -> None:
    """Raises `UserError` for the first field of a dataclass that is, or is a tuple that contains, NaN or infinity."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{field.name}: expected finite numbers, got {number}.")


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
