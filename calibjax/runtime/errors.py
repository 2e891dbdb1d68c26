"""The error type for invalid input, and the checks that raise it. It imports no JAX: the parser needs it at once."""

import contextlib
import dataclasses
import errno
import numbers
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Invalid input: a path, an option or the contents of a file. Its message has at most 4,000 characters.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str):
        super().__init__(message if len(message) <= 4000 else f"{message[:3000]} [...] {message[-900:]}")


DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Error numbers of storage that must not be written."""
_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|failed to map segment|[Cc]annot allocate memory")
_BROKEN = {getattr(errno, f"E{name}") for name in ("NOSPC", "DQUOT", "FBIG", "IO", "STALE", "MFILE", "NFILE", "NOMEM")}


def storage_failure(error: BaseException) -> OSError | None:
    """The failure of storage or memory that an exception came from, such as a full disk; None if there is none.

    This is the exception itself, one that it was raised from, or one named in its text, as in TensorStore's errors.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        failure = _os_error(current)
        if failure is not None and failure.errno in _BROKEN | DENIED:
            return failure
        current = current.__cause__ or current.__context__
    return None


def _os_error(error: BaseException) -> OSError | None:
    """The exception as an `OSError`, if it is one, names the code of one, or says that memory has run out."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    code = re.search(r"\bos[_ ]error(?:_code=')? ?(\d+)\b", text)
    if code:
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        reason = " ".join(text.split())[:200]
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM) + (f": {reason}" if reason else ""))
    return None


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
    """A text without characters that control a terminal, or that have no encoding: they are shown as escapes."""
    return "".join(
        character if character.isprintable() or character in " \n" else character.encode("unicode_escape").decode()
        for character in text
    )


class NonFiniteLossError(FloatingPointError):
    """The loss of a step of training, or its gradient, was NaN or infinite."""


def require_directory(path: str | Path, what: str) -> Path:
    """The path of an existing directory; raises `UserError` if it is none. `what` names its role in the message."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{what}: {path} does not exist.")
    if not path.is_dir():
        raise UserError(f"{what}: expected a directory, but {path} is a file.")
    return path


def user_path(path: str | Path) -> Path:
    """The path, with a leading `~` or `~user` expanded unless the literal path exists."""
    return Path(path) if os.path.exists(path) else Path(os.path.expanduser(path))


INT_MAX = 2**31 - 1
"""Largest size and largest count: JAX indexes with int32."""


def check_fields(config: Any) -> None:
    """Checks the fields of a dataclass against their annotations; raises `UserError` for the first wrong one.

    Every `int` is a size, from 1 to `INT_MAX`; every `float` is finite; `bool` is no number. Tuples are checked
    entry by entry, and `None` is valid where the annotation has it. A `Literal` is one of its choices. Others pass.
    """
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        kinds = set(typing.get_args(field.type) or (field.type,))
        for kind in (field.type, *kinds):
            if typing.get_origin(kind) is typing.Literal:
                choices = ([None] if type(None) in kinds else []) + list(typing.get_args(kind))
                if value not in choices:
                    raise UserError(f"{field.name}: expected one of {', '.join(map(str, choices))}; got {value!r}.")
        if not kinds & {int, float, bool} or (value is None and type(None) in kinds):
            continue
        several = typing.get_origin(field.type) is tuple
        if several and not isinstance(value, tuple):
            raise UserError(f"{field.name}: expected a tuple, got {value!r}.")
        entries: Any = value if several else (value,)
        for entry in entries:
            if problem := _problem(entry, kinds):
                raise UserError(f"{field.name}: expected {problem}, got {str(entry)[:60]}.")


def _problem(value: Any, kinds: set[Any]) -> str | None:
    if bool in kinds:
        return None if type(value).__name__ == "bool" else "true or false"
    if int in kinds:
        fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and 1 <= int(value) <= INT_MAX
        return None if fits else f"a whole number from 1 to {INT_MAX}"
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(float(value)) <= 1e300
    return None if fits else "a finite number"
