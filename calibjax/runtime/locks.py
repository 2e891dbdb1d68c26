"""Locks of output paths: files that one process at a time holds with flock, which ends with the process."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from calibjax.runtime.errors import UserError

RUN_LOCK = "run.lock"

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held = contextlib.ExitStack()
_held_files: set[Path] = set()
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(
    file: Path,
    target: Path,
    record: Callable[[str], str] = str,
    is_needed: Callable[[str], bool] = lambda record: False,
) -> Iterator[str]:
    """Holds the lock of `target` and removes its `file` at the end. A process that is killed leaves the file unlocked.

    Yields what the file then holds: the `record` that follows from the one that a killed process of this host left in
    it, or from "". The file stays at the end where the next process still needs the record (`is_needed`). Where the
    file system has no locks, a warning is logged.
    """
    descriptor, kept = _acquire(file, target), ""
    try:
        left, host = _read(descriptor), socket.gethostname()
        kept = record(left["record"] if left.get("host") == host else "")
        owner = json.dumps({"host": host, "pid": os.getpid(), "record": kept}).encode()
        # In one write, so that the file is never without a record. JSON ignores the spaces over a longer one.
        os.pwrite(descriptor, owner.ljust(os.fstat(descriptor).st_size), 0)
        yield kept
    finally:
        with contextlib.suppress(OSError):
            if not is_needed(kept):
                file.unlink()  # before the lock is given up, so that no other process can hold a file without a name
        os.close(descriptor)


def lock_run(directory: Path) -> None:
    """Makes a directory of results and locks it until `release` or the end of the process, unless it holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    file = Path(os.path.realpath(directory)) / RUN_LOCK
    if file not in _held_files:
        _held.enter_context(locked(file, directory))
        _held_files.add(file)


def release() -> None:
    """Gives up every lock of `lock_run`."""
    _held_files.clear()
    _held.close()


def _acquire(file: Path, target: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(descriptor)
            os.close(descriptor)
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            raise UserError(f"{target}: in use by {who}. Wait until it ends, or choose another directory.") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                raise
            _log.warning("%s: this file system has no locks (%s); do not write there twice at once.", target, error)
            os.ftruncate(descriptor, 0)  # without locks, nothing is known of an earlier owner
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(file)):
                return descriptor
        os.close(descriptor)  # the holder has removed the file in between


def _read(descriptor: int) -> dict[str, Any]:
    """The owner that a lock names; empty if the file is new or incomplete."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return {"host": str(owner["host"]), "pid": int(owner["pid"]), "record": str(owner["record"])}
    except (ValueError, KeyError, TypeError):
        return {}
