"""The one error type for mistakes that the user can mend, and the checks that raise it."""

import os
from pathlib import Path


class UserError(ValueError):
    """A mistake in what the caller gave: a path, an option, a file's contents.

    The message says what was expected, what came, and what to do next. The command line prints it alone, without a
    traceback, and exits with code 2.
    """


def require_directory(path: str | Path, what: str) -> Path:
    """Returns `path` as a `Path`; raises `UserError` where it is not an existing directory. `what` names its role."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{what}: {path} does not exist.")
    if not path.is_dir():
        raise UserError(f"{what}: expected a directory, but {path} is a file.")
    return path


def user_path(path: str | Path) -> Path:
    """Returns `path` as a `Path`: as it is where it exists, else with a leading `~` or `~user` expanded."""
    return Path(path) if os.path.exists(path) else Path(os.path.expanduser(path))
