"""Atomic writes of files and directories, which replace only earlier results; and reading of JSON files."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from calibjax.runtime.distributed import from_first, is_first, on_first
from calibjax.runtime.errors import UserError, storage_failure
from calibjax.runtime.locks import locked

_TOKEN = 8  # random bytes in a temporary name


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8; raises `ValueError` whatever is wrong with the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (MemoryError, OSError, RecursionError) as error:
        raise ValueError(str(error) or "too large") from error


def json_text(value: Any) -> str:
    """The text of a JSON file that people may read."""
    return json.dumps(value, indent=2) + "\n"


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raises an `OSError` of the block as a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write there ({error}).") from error


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically (text in UTF-8), see `new_file`."""
    with new_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file with a unique name in the same directory, which is renamed to `path` if the block succeeds.

    If it does not, an existing file is unchanged. A symbolic link is replaced itself, and its target does not change.
    """
    fresh = _new_file_path(path)
    try:
        file = fresh.open("xb")
    except OSError as error:
        if storage_failure(error) is not None:
            raise
        raise UserError(f"{path}: cannot write there ({error}).") from error
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            fresh.replace(path)
        except BaseException as error:
            fresh.unlink(missing_ok=True)
            _name(error, fresh, path)
            raise


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty directory with a unique name beside `path`, which is renamed to `path` if the block succeeds.

    All processes of a job enter the block together with the same path; the first one creates, renames and removes. It
    locks `path`, and clears up after a process of this host that was killed in such a block: the lock's file holds the
    names, which it takes over, so that they are known until all is done. With `replace`, an earlier result is removed
    after the new one is complete, and only if the new one has all of its entries. Raises `UserError` for anything else
    at `path`.
    """
    path = path.absolute()
    with contextlib.ExitStack() as lock:
        token = from_first(lambda: _begin(path, replace, lock), np.zeros(_TOKEN, np.uint8)).tobytes()
        fresh = _beside(path, token, "new")
        try:
            yield fresh
            on_first(lambda: _finish(path, token, replace))
        except BaseException as error:
            if is_first():
                shutil.rmtree(fresh, ignore_errors=True)
            _name(error, fresh, path)
            raise


def check_new_file(path: Path) -> None:
    """Raises `UserError` if `new_file(path)` would: it makes the temporary file and removes it again."""
    fresh = _new_file_path(path)
    with writing(path):
        fresh.touch(exist_ok=False)
        fresh.unlink()


def check_new_directory(path: Path, *, replace: bool = False) -> None:
    """Raises `UserError` if `new_directory` would: it makes the temporary directory and removes it again."""
    _entries(path, replace)
    path = path.absolute()
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = _beside(path, secrets.token_bytes(_TOKEN), "new")
            fresh.mkdir()
            fresh.rmdir()
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def is_temporary(name: str, of: str) -> bool:
    """Whether a name is a temporary name of `new_file` or `new_directory` for the name `of`."""
    return re.fullmatch(rf"{re.escape(of[:50])}\.[0-9a-f]{{{2 * _TOKEN}}}\.(new|old)", name) is not None


def check_orbax_path(path: Path) -> None:
    """Raises `UserError` if Orbax would lose data that it writes below a path.

    Orbax puts the path into a glob pattern, where [ is special, and TensorStore takes a backslash for a slash.
    """
    for character in "[\\":
        if character in str(path.absolute()):
            raise UserError(f"{path}: Orbax cannot write below a path with {character}: choose another directory.")


def check_plain_files(directory: Path) -> None:
    """Raises `UserError` if anything below a directory is neither a file nor a directory.

    Orbax reads whatever a link names: from a device, without end.
    """
    for entry in directory.rglob("*"):
        if not (entry.is_file() or entry.is_dir()) and os.path.lexists(entry):  # others may remove some meanwhile
            raise UserError(f"{entry}: expected a file or a directory, found a device, a pipe or a broken link.")


def _begin(path: Path, replace: bool, lock: contextlib.ExitStack) -> np.ndarray:
    _entries(path, replace)

    def token_after(left: str) -> str:
        return left if re.fullmatch(rf"[0-9a-f]{{{2 * _TOKEN}}}", left) else secrets.token_hex(_TOKEN)

    def is_needed(token: str) -> bool:
        return _beside(path, bytes.fromhex(token), "old").exists()

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name[:50]}.calibjax.lock")
        token = bytes.fromhex(lock.enter_context(locked(file, path, record=token_after, is_needed=is_needed)))
        _clear_up(path, token)
        _beside(path, token, "new").mkdir()
    return np.frombuffer(token, np.uint8)


def _clear_up(path: Path, token: bytes) -> None:
    """Removes the directories of a block of `new_directory` whose process was killed, or could not do so."""
    fresh, old = (_beside(path, token, kind) for kind in ("new", "old"))
    if old.is_dir() and not path.exists():
        old.rename(path)  # killed between the two renames
    for directory in (fresh, old):
        if directory.is_dir() and not directory.is_symlink():
            shutil.rmtree(directory)


def _finish(path: Path, token: bytes, replace: bool) -> None:
    fresh, old = (_beside(path, token, kind) for kind in ("new", "old"))
    foreign = _entries(path, replace) - {entry.name for entry in fresh.iterdir()}
    if foreign:
        others = ", ".join(sorted(foreign)[:5])
        raise UserError(f"{path} holds what is not part of the new result ({others}). Move it, or choose another path.")
    with writing(path):
        if not path.exists() or not replace:
            fresh.rename(path)  # replaces an empty directory, and fails on any other
            return
        path.rename(old)
        try:
            fresh.rename(path)
        except BaseException:
            old.rename(path)
            raise
    shutil.rmtree(old)


def _entries(path: Path, replace: bool) -> set[str]:
    """Names of the entries of a directory that may be written; empty if it does not exist."""
    with writing(path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            kind = "a symbolic link" if path.is_symlink() else "a file"
            raise UserError(f"{path}: expected a new or an empty directory, but this is {kind}.")
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if names and not replace:
        raise UserError(f"{path}: expected a new or an empty directory, but it holds {min(names)}.")
    return names


def _name(error: BaseException, fresh: Path, path: Path) -> None:
    """Names `path` in an `OSError` that names its temporary file, or none, as that of a write to a full disk."""
    if not isinstance(error, OSError) or error.errno is None:  # such an error is a message alone
        return
    if str(error.filename or fresh).startswith(str(fresh)):
        error.filename = str(path)


def _new_file_path(path: Path) -> Path:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: expected a file or a new path, but this is a directory or a device.")
    return _beside(path, secrets.token_bytes(_TOKEN), "new")


def _beside(path: Path, token: bytes, kind: str) -> Path:
    return path.with_name(f"{path.name[:50]}.{token.hex()}.{kind}")
