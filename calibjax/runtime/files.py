"""Files and directories that appear as a whole or not at all, and that replace nothing but themselves."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from calibjax.runtime.distributed import from_first, is_first, on_first
from calibjax.runtime.errors import UserError

_TOKEN = 8  # bytes of a temporary name that are random


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole (text in UTF-8), as `new_file` does."""
    with new_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file of a unique name in the same directory, which becomes `path` when the block ends without an error.

    A file that is there is replaced. Where a symbolic link is there, the link is replaced and its target stays as it
    is.

    Raises:
        UserError: `path` is a directory, a device or a pipe.
        OSError: it cannot be written; nothing is left behind, and a file that was there is unchanged.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: expected a file, new or to be replaced, but this is a directory or a device.")
    fresh = _beside(path, secrets.token_bytes(_TOKEN), "new")
    with fresh.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty directory of a unique name beside `path`, which becomes `path` when the block ends without error.

    All processes of a job enter the block together, with the same path; the first one makes, renames and removes.
    Between the two renames of a replacement there is a moment without `path`, but never one with a part of it.

    Args:
        path: new or an empty directory; its parents are made.
        replace: an earlier result may be there too. It is removed after the new one is complete, and only where the
            new one has every one of its entries: what is not ours is not removed.

    Raises:
        UserError: `path` is a file, a symbolic link, or a directory that is not to be replaced; or nothing can be
            written beside it.
    """
    path = path.absolute()
    token = from_first(lambda: _begin(path, replace), np.zeros(_TOKEN, np.uint8)).tobytes()
    fresh = _beside(path, token, "new")
    try:
        yield fresh
        on_first(lambda: _finish(path, token, replace))
    except BaseException:
        if is_first():
            shutil.rmtree(fresh, ignore_errors=True)
        raise


def check_new_directory(path: Path) -> None:
    """Raises `UserError` where `new_directory(path)` would not write to it."""
    _entries(path, replace=False)


def is_temporary(name: str, of: str) -> bool:
    """Whether a name is one that `new_file` or `new_directory` gives what is to become `of`."""
    return re.fullmatch(rf"{re.escape(of[:50])}\.[0-9a-f]{{{2 * _TOKEN}}}\.(new|old)", name) is not None


def check_orbax_path(path: Path) -> None:
    """Raises `UserError` where Orbax would lose what it writes below a path.

    It finds the parts of a checkpoint by a pattern that begins with the path, in which [ opens a set of characters, and
    TensorStore takes a backslash for a slash.
    """
    if found := [character for character in "[\\" if character in str(path.absolute())]:
        raise UserError(f"{path}: Orbax cannot write below a path with {found[0]}: choose another directory.")


def _begin(path: Path, replace: bool) -> np.ndarray:
    _entries(path, replace)
    token = secrets.token_bytes(_TOKEN)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _beside(path, token, "new").mkdir()
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error}).") from error
    return np.frombuffer(token, np.uint8)


def _finish(path: Path, token: bytes, replace: bool) -> None:
    fresh, old = (_beside(path, token, kind) for kind in ("new", "old"))
    foreign = _entries(path, replace) - {entry.name for entry in fresh.iterdir()}
    if foreign:
        raise UserError(
            f"{path} holds files that are no part of what replaces it ({', '.join(sorted(foreign)[:5])}). Move them, "
            "or choose another directory."
        )
    try:
        if not path.exists() or not replace:
            fresh.rename(path)  # replaces an empty directory, and fails on any other
            return
        path.rename(old)
        try:
            fresh.rename(path)
        except BaseException:
            old.rename(path)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error}).") from error
    shutil.rmtree(old)


def _entries(path: Path, replace: bool) -> set[str]:
    """Names of what a directory that may be written holds; none where it is not there."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            kind = "a symbolic link" if path.is_symlink() else "a file"
            raise UserError(f"{path}: expected a new or an empty directory, but this is {kind}.")
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error}).") from error
    if names and not replace:
        raise UserError(f"{path}: expected a new or an empty directory, but it holds {min(names)}.")
    return names


def _beside(path: Path, token: bytes, kind: str) -> Path:
    return path.with_name(f"{path.name[:50]}.{token.hex()}.{kind}")
