"""The error type for invalid input, and the checks that raise it. It imports no JAX: the parser needs it at once."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Invalid input: a path, an option or the contents of a file. Its message has at most 4,000 characters.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str):
        super().__init__(message if len(message) <= 4000 else f"{message[:3000]} [...] {message[-900:]}")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, its words up to 200 characters; the name of its type if it has none."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= 200 else f"{line[:200].rsplit(' ', 1)[0]} ..."


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
    """The exception as an `OSError`, if it is one, names the code of one, or reports that memory has run out."""
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


def shortened(value: Any) -> str:
    """A value for a message, at most 80 characters of it."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a number of about {value.bit_length() * 3 // 10} digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def quantity(count: int, noun: str) -> str:
    """A number with its noun: 1 row, 2,000 rows."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


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
