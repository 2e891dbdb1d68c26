"""Options as a YAML file: `--config run.yaml` reads one, and every run leaves the one that reproduces it."""

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from calibjax.commands.parser import list_options
from calibjax.runtime.command_line import command_line
from calibjax.runtime.errors import UserError, user_path
from calibjax.runtime.files import write_file

NAME = "run.yaml"
_FLAG = "--config"
_LEFT_OUT = ("json", "quiet")
_MADE_BY = "# Made by: "


def with_config(command: str, options_type: Any, args: Sequence[str]) -> list[str]:
    """The arguments, with those of the file of `--config` before them, so that the command line takes precedence.

    Args:
        command: name of the command; a file that names another one is refused.
        options_type: of the command. If its `planned` reads the files of other commands, `PLANNED` names them.
        args: the arguments after it; `--config FILE` may occur once.

    Raises:
        UserError: the file is missing, is no YAML mapping of options to values, or is of another command.
    """
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{_FLAG}=") else [arg])]
    if _FLAG not in args:
        return args
    at = args.index(_FLAG)
    if args.count(_FLAG) > 1 or at + 1 == len(args):
        raise UserError(f"{_FLAG}: expected one file.")
    return [*_read(command, options_type, user_path(args[at + 1])), *args[:at], *args[at + 2 :]]


def _read(command: str, options_type: Any, file: Path) -> Iterable[str]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{_FLAG} {file}: cannot be read ({str(error).splitlines()[0]}).") from error
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{_FLAG} {file}: expected a mapping of options to values, such as `batch-size: 32`.")
    content = dict(content)
    of = content.pop("command", command)
    if of in getattr(options_type, "PLANNED", ()):
        content = options_type.planned(of, content)
    elif of != command:
        raise UserError(f"{_FLAG} {file}: is of `calibjax {of}`, not of `calibjax {command}`.")
    for name, value in content.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            raise UserError(f"{_FLAG} {file}: {name}: expected a value or a list of values, got a mapping.")
        if value is True or value is False:
            yield flag if value else f"--no-{flag[2:]}"
        elif isinstance(value, list):
            if value:
                yield from (flag, *map(str, value))
        elif value is not None:
            yield from (flag, str(value))


def write_config(directory: Path, command: str, options: Any) -> None:
    """Writes run.yaml with every option of a run but those that have no value by default and none here."""
    values = dict(_values(options))
    head = (
        f"# To run it again: calibjax {command} --config {shlex.quote(str(directory / NAME))}\n"
        "# Options on the command line take precedence over these.\n"
        f"{_MADE_BY}{' '.join((command_line.get() or f'calibjax {command}').split())}\n"
    )
    listed = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000) if values else ""
    write_file(directory / NAME, f"{head}command: {command}\n{listed}")


def made_by(directory: Path) -> str:
    """The command that made the run of a directory, as typed; "" where that is not known."""
    try:
        lines = (directory / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return next((line.removeprefix(_MADE_BY) for line in lines if line.startswith(_MADE_BY)), "")


def _values(options: Any) -> Iterable[tuple[str, Any]]:
    for option in list_options(type(options)):
        value = functools.reduce(getattr, option.path, options)
        if option.path[-1] in _LEFT_OUT or value == () or (value is None and option.default is None):
            continue
        yield option.flag[2:], [_plain(item) for item in value] if isinstance(value, tuple) else _plain(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float) else str(value)
