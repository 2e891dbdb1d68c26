"""Options of commands: dataclasses as flags of `argparse`, and as a YAML file."""

import argparse
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shlex
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union

import yaml

from calibjax.runtime.errors import UserError, first_line, printable, shortened, user_path
from calibjax.runtime.files import write_file
from calibjax.runtime.options import OneOf, Positional, command_line, expected_value, flag_of, marks, mismatch, to_json

Options = TypeVar("Options")
Fields = tuple[str, ...]

HEADINGS = {
    "model": ("ModelOptions", "ChatOptions"),
    "data": ("ColumnOptions", "TableOptions", "SourceOptions", "TextOptions", "EvalDataOptions", "DataOptions"),
    "method": (),
    "evaluation": ("BinningOptions", "TrainLhtsOptions"),
    "output": ("JsonOptions", "OutputOptions", "TrainingOutputOptions"),
    "device": ("DeviceOptions",),
}
"""Heading of the help -> the classes that declare its options; all other options are of the method."""
CONFIG = "run.yaml"

_CONFIG = "--config"
_CONFIG_HELP = "--config FILE reads options from a YAML file, such as the run.yaml that every run leaves in --out."
_HELP_ALL = "--help-all"


class Option(NamedTuple):
    """One flag, such as "--max-rows" of the field at `path` ("text", "max_rows")."""

    path: Fields
    flag: str
    heading: str
    annotation: Any
    default: Any  # `dataclasses.MISSING` where the option is required
    unset: Any  # the value that a default of None stands for, where it is known
    help: str

    @property
    def kind(self) -> Any:
        """The type of each value: int, float, bool, str, pathlib.Path or a `Literal`."""
        kind = _without_none(self.annotation)
        return _without_none(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind

    @property
    def is_several(self) -> bool:
        return typing.get_origin(_without_none(self.annotation)) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        names = typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()
        for mark in marks(self.annotation, OneOf):
            names = mark.names
        return tuple(map(str, names))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.flag, f"--no-{self.flag[2:]}") if self.kind is bool else (self.flag,)

    @property
    def is_positional(self) -> bool:
        return any(marks(self.annotation, Positional))

    def read(self, text: str) -> Any:
        """The value that a text gives; raises `ArgumentTypeError` where it is not one or is out of range."""
        if text == "None" and self.default is not None and type(None) in typing.get_args(self.annotation):
            return None
        convert = str if self.choices else self.kind
        try:
            value = convert(text)
        except ValueError as error:
            expected = "a whole number" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(mismatch(expected, text)) from error
        checked = value if self.kind in (int, float) else text
        if expected := expected_value(self.annotation, (checked,) if self.is_several else checked):
            raise argparse.ArgumentTypeError(mismatch(expected, checked))
        return value

    def described(self) -> str:
        """The help: what it is, its choices where they are many, and its default."""
        value = self.unset if self.default is None else self.default
        text = self.help
        if _is_long(self.choices):
            text += f" One of: {', '.join(self.choices)}."
        if isinstance(value, tuple):
            value = " ".join(map(str, value)) or None
        if not any(value is nothing for nothing in (None, False, dataclasses.MISSING)):
            text += f" (default: {'yes' if value is True else value})"
        return text.replace("%", "%%")


def list_options(options_type: type, default: Any = None, path: Fields = ()) -> Iterator[Option]:
    """The options of a dataclass and of the dataclasses in it; `default` is an instance with other defaults."""
    hints, documented = typing.get_type_hints(options_type, include_extras=True), _documented(options_type)
    for field in dataclasses.fields(options_type):
        value = field.default if default is None else getattr(default, field.name)
        if default is None and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        hint, at = hints[field.name], (*path, field.name)
        if dataclasses.is_dataclass(hint):
            yield from list_options(typing.cast(type, hint), None if value is dataclasses.MISSING else value, at)
            continue
        declared = [cls for cls in options_type.__mro__ if field.name in inspect.get_annotations(cls)][-1]
        heading = next((name for name, classes in HEADINGS.items() if declared.__name__ in classes), "method")
        if value is dataclasses.MISSING:
            heading = "required"
        unset = getattr(options_type, "unset_value", lambda name: None)(field.name) if value is None else None
        yield Option(at, flag_of(field.name), heading, hint, value, unset, documented.get(field.name, ""))


def _documented(options_type: type) -> dict[str, str]:
    """Name -> what the nearest class that lists it under `Attributes:` writes of it."""
    texts: dict[str, str] = {}
    for cls in reversed(options_type.__mro__):
        _, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?= {4}\S)", "\n" + listed):
            name, _, text = entry.partition(": ")
            texts[name.strip()] = " ".join(text.split())
    return texts


def _without_none(annotation: Any) -> Any:
    """The one type, other than None, that an annotation allows, without its marks."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _without_none(parts[0])
    if origin in (Union, types.UnionType):
        (kind,) = (part for part in parts if part is not type(None))
        return _without_none(kind)
    return annotation


# --- the command line ---


def parse(
    options_type: type[Options], args: Sequence[str], *, prog: str, default: Options | None = None, config: bool = True
) -> Options:
    """The options that command-line arguments give; with `config` the help describes --config, which was read before.

    `default` holds values of options that are not given, in place of the fields' own.
    """
    options = list(list_options(options_type, default))
    args = [re.sub(r"^--\w[^=]*", lambda match: match[0].replace("_", "-"), arg) for arg in args]
    doc = inspect.cleandoc(options_type.__doc__ or "").partition("Attributes:")[0].strip()
    doc, _, example = doc.partition("Example: ")
    parser = _parser(options, prog, f"{doc}\n\n{_CONFIG_HELP}" if config else doc, example, fold=_HELP_ALL not in args)
    known = {name: name for option in options if not option.is_positional for name in option.names}
    if config:
        known[_CONFIG] = _CONFIG
        parser.add_argument(_CONFIG, help=argparse.SUPPRESS)
    for arg in args[: args.index("--")] if "--" in args else args:
        name = arg.partition("=")[0]
        if arg.startswith("--") and name not in (*known, "--help", _HELP_ALL):
            fail(f"{name}: {prog} has no such option", name, known, f"{prog} --help lists them")
    values = vars(parser.parse_args(args))
    value_at: dict[Fields, Any] = {}
    for option in options:
        value = values[option.flag[2:]]
        value_at[option.path] = tuple(value) if option.is_several and value is not None else value
    return _assemble(options_type, value_at, ())


def parse_script(
    options_type: type[Options], args: Sequence[str] | None = None, *, default: Options | None = None
) -> Options:
    """The options of a script from its command line; an invalid one ends the process with one line.

    Args:
        options_type: a dataclass, whose fields are the flags; `--help` prints the `Attributes` of its docstring.
        args: the arguments; None takes those of the process, which then ends with one line for any later `UserError`.
        default: an instance whose values replace the defaults of the fields.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Options:
        ...     model: str
        ...     steps: int = 100
        >>> parse_script(Options, ["--model", "path/to/model"])
        Options(model='path/to/model', steps=100)
    """
    if args is None:
        sys.excepthook = in_one_line
        args = sys.argv[1:]
    try:
        return parse(options_type, args, prog=f"python {sys.argv[0]}", config=False, default=default)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from error


def in_one_line(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
    """`sys.excepthook` of a script: prints a `UserError` without its traceback."""
    if isinstance(error, UserError):
        print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def fail(message: str, given: str, known: Mapping[str, str], otherwise: str) -> NoReturn:
    """Raises `UserError` with a message that suggests the value of the nearest of the `known` names."""
    initials = [name for name in known if "".join(re.findall(r"\b\w", name)) == given.strip("-")]  # --lr
    bare = {name.lstrip("-"): name for name in known}
    near = [bare[name] for name in difflib.get_close_matches(given.lstrip("-"), bare)]
    near.sort(key=lambda name: sorted(name) != sorted(given))  # anagrams first: "ast" suggests "ats"
    near = initials + near
    hint = f"did you mean {known[near[0]]}?" if near else f"{otherwise}."
    raise UserError(f"{message}; {hint}")


def _assemble(options_type: type, values: dict[Fields, Any], path: Fields) -> Any:
    hints = typing.get_type_hints(options_type)
    fields = {}
    for field in dataclasses.fields(options_type):
        at = (*path, field.name)
        fields[field.name] = values[at] if at in values else _assemble(hints[field.name], values, at)
    return options_type(**fields)


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if missing := message.partition("the following arguments are required: ")[2]:
            message = f"{missing}: missing; {self.prog} needs {'them' if ',' in missing else 'it'}"
        if extra := message.partition("unrecognized arguments: ")[2]:
            extra = shortened(ascii(extra))
            message = f"{extra}: {self.prog} takes no such argument; {self.prog} --help lists its options"
        message = re.sub(r"^(--[\w-]+)/[^:]+", r"\1", message)
        raise UserError(" ".join(message.split()).removesuffix(".") + ".")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line at a hyphen, as names have them."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Switch(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def _parser(options: Sequence[Option], prog: str, doc: str, example: str, *, fold: bool) -> _Parser:
    """`fold` lists the options on devices by name alone."""
    width = shutil.get_terminal_size().columns
    form = {"width": width, "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}

    def wrapped(text: str) -> str:
        return "\n".join(textwrap.fill(" ".join(part.split()), **form) for part in text.split("\n\n"))

    positional = "".join(f" {option.path[-1].upper()}" for option in options if option.is_positional)
    pairs = re.sub(r"(--\S+) (?!--)", "\\1\0", example)  # an option and its value stay in one line
    lines = textwrap.wrap(pairs, **form | {"width": width - 2, "subsequent_indent": "    "})
    shown = " \\\n".join(lines).replace("\0", " ")
    parser = _Parser(
        prog=prog,
        usage=f"{prog}{positional} [OPTIONS]",
        description=wrapped(doc),
        epilog=f"example:\n{shown}" if example else None,
        formatter_class=lambda prog: _Formatter(prog, max_help_position=26, width=width),
        allow_abbrev=False,
        add_help=False,
    )
    parser._negative_number_matcher = re.compile(r"-[^-]")  # values such as -1e-3 and -inf: no option has one dash
    for heading in ("required", *HEADINGS):
        chosen = [option for option in options if option.heading == heading]
        folded = fold and heading == "device"
        names = wrapped(f"{', '.join(o.flag for o in chosen)}: {prog} {_HELP_ALL}") if folded and chosen else None
        group = parser.add_argument_group(f"{heading} options", names)
        for option in chosen:
            _add(group, option, hidden=folded)
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", _HELP_ALL, action="help", help=f"print this, and exit; {_HELP_ALL}: all options")
    return parser


def _add(group: Any, option: Option, *, hidden: bool) -> None:
    name = option.flag[2:]
    shown: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else option.described()}
    if option.is_several:
        shown["nargs"] = "+" if option.is_positional else "*"
    if option.is_positional:
        group.add_argument(name, type=option.read, metavar=option.path[-1].upper(), **shown)
        return
    is_required = option.default is dataclasses.MISSING
    shown |= {"dest": name, "default": None if is_required else option.default, "required": is_required}
    if option.kind is not bool:
        metavar = "TEXT" if option.kind is str else getattr(option.kind, "__name__", "").upper()
        if option.choices:
            metavar = "NAME" if _is_long(option.choices) else "{" + ",".join(option.choices) + "}"
        group.add_argument(option.flag, type=option.read, metavar=metavar, **shown)
    elif option.default is False:
        group.add_argument(option.flag, action="store_true", **shown)
        group.add_argument(option.names[1], action="store_false", **shown | {"help": argparse.SUPPRESS})
    else:
        group.add_argument(*option.names, action=_Switch, nargs=0, **shown)


def _is_long(choices: Sequence[str]) -> bool:
    return sum(map(len, choices)) > 40


def with_config(command: str, options_type: Any, args: Sequence[str]) -> list[str]:
    """The options in the file of `--config`, and after them, so that they take precedence, the arguments.

    `--config` itself comes between the two, so that the file's last option takes no argument as a further value.
    """
    split = (arg.split("=", 1) if arg.startswith(f"{_CONFIG}=") else [arg] for arg in args)
    args = list(itertools.chain.from_iterable(split))
    if _CONFIG not in args:
        return args
    at = args.index(_CONFIG)
    if args.count(_CONFIG) > 1 or at + 1 == len(args):
        raise UserError("--config: expected one file, such as --config runs/ats/run.yaml.")
    from_file = _read_config(command, options_type, user_path(args[at + 1]))
    return [*from_file, *args[at : at + 2], *args]


def _read_config(command: str, options_type: Any, file: Path) -> Iterable[str]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"--config {file}: cannot be read ({first_line(error)}).") from error
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise UserError(f"--config {file}: expected a mapping of options to values, such as `batch-size: 32`.")
    content = dict(content)
    written_by = content.pop("command", command)
    if written_by in getattr(options_type, "PLANNED", ()):
        content = options_type.planned(written_by, content)
    elif written_by != command:
        raise UserError(f"--config {file}: is of `calibjax {written_by}`, not of `calibjax {command}`.")
    for name, value in content.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            raise UserError(f"--config {file}: {name}: expected a value or a list of values, got a mapping.")
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        elif value is not None and value != []:
            yield flag
            yield from map(str, value if isinstance(value, list) else [value])


def write_config(directory: Path, command: str, options: Any) -> None:
    """Writes run.yaml with every option of a run but those that have no value by default and none here."""
    values = {}
    for option in list_options(type(options)):
        value = functools.reduce(getattr, option.path, options)
        is_unset = value == () or (value is None and option.default is None)
        if option.path[-1] not in ("json", "quiet") and not is_unset:
            values[option.flag[2:]] = "None" if value is None else to_json(value)
    head = (
        f"# To run it again: calibjax {command} --config {shlex.quote(str(directory / CONFIG))}\n"
        "# Options on the command line take precedence over these.\n"
        f"# Made by: {' '.join((command_line.get() or f'calibjax {command}').split())}\n"
    )
    listed = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000) if values else ""
    write_file(directory / CONFIG, f"{head}command: {command}\n{listed}")


def made_by(directory: Path) -> str:
    """The command that made the run of a directory, as typed; "" where that is not known."""
    try:
        text = (directory / CONFIG).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    line = re.search(r"^# Made by: (.*)$", text, re.MULTILINE)
    return line[1] if line else ""
