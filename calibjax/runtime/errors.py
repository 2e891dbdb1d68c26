"""The error type for invalid input, and the checks that raise it."""

import dataclasses
import errno
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np


class UserError(ValueError):
    """Invalid input: a path, an option or the contents of a file.

    The message states what was expected, what was found, and what to do next. The command line prints it without a
    traceback and exits with code 2.
    """


DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Error numbers of storage that must not be written."""
_BROKEN = {getattr(errno, f"E{name}") for name in ("NOSPC", "DQUOT", "FBIG", "IO", "STALE", "MFILE", "NFILE", "NOMEM")}


def storage_failure(error: BaseException) -> OSError | None:
    """Returns the failure of the storage that an exception came from, such as a full disk; None if there is none.

    It is the exception itself, one that it was raised from, or named in it, as TensorStore and safetensors do.
    """
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        if isinstance(at, OSError):
            found = at
        else:
            code = re.search(r"\bos[_ ]error(?:_code=')? ?(\d+)\b", str(at))
            found = OSError(int(code[1]), os.strerror(int(code[1]))) if code else None
        if found is not None and found.errno in _BROKEN | DENIED:
            return found
        at = at.__cause__ or at.__context__
    return None


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
