"""Options on the command line: dataclasses of options as flags of `argparse`, each with its default, under headings."""

import argparse
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union

from calibjax.runtime.errors import UserError, printable
from calibjax.runtime.options import Positional, check_value, flag_of, marks, shortened

Options = TypeVar("Options")
Path = tuple[str, ...]

HEADINGS = ("model", "data", "method", "evaluation", "output", "device")
"""In the order of the help. An options class names its own by a class variable `heading`; without one it is method."""

_CONFIG_HELP = "--config FILE reads options from a YAML file, such as the run.yaml that every run leaves in --out."
_HELP_ALL = "--help-all"


class Option(NamedTuple):
    """One flag.

    Attributes:
        path: names of the fields that lead to it, such as ("text", "rows").
        flag: such as "--rows".
        heading: one of `HEADINGS`.
        annotation: of the field, with its `Range`.
        default: `dataclasses.MISSING` where the option is required.
        unset: what a default of None comes to, where that is known.
        help: from the docstring of the class.
    """

    path: Path
    flag: str
    heading: str
    annotation: Any
    default: Any
    unset: Any
    help: str

    @property
    def kind(self) -> Any:
        """The type of a value, or of each of several: int, float, bool, str, pathlib.Path or a `Literal`."""
        kind = _without_none(self.annotation)
        return _without_none(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind

    @property
    def several(self) -> bool:
        return typing.get_origin(_without_none(self.annotation)) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """The fixed choices; () where there are none."""
        return tuple(map(str, typing.get_args(self.kind))) if typing.get_origin(self.kind) is Literal else ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.flag, f"--no-{self.flag[2:]}") if self.kind is bool else (self.flag,)

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def is_positional(self) -> bool:
        return any(marks(self.annotation, Positional))

    def read(self, text: str) -> Any:
        """The value that a text gives; raises `UserError` where it is not one or is out of range."""
        if text == "None" and self.default is not None and type(None) in typing.get_args(self.annotation):
            return None
        if self.choices:
            if text not in self.choices:
                raise UserError(f"expected one of {', '.join(self.choices)}, got {shortened(ascii(text))}")
            return text
        try:
            value = self.kind(text)
        except ValueError as error:
            expected = "a whole number" if self.kind is int else "a number"
            raise UserError(f"expected {expected}, got {shortened(ascii(text))}") from error
        check_value(self.flag, self.annotation, text if self.kind not in (int, float) else value)
        return value

    def described(self) -> str:
        """The help: what it is, its choices where they are many, and its default."""
        value = self.unset if self.default is None else self.default
        text = self.help
        if _is_long(self.choices):
            text += f" One of: {', '.join(self.choices)}."
        if not any(value is nothing for nothing in (None, False, (), dataclasses.MISSING)):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else "yes" if value is True else value
            text += f" (default: {shown})"
        return text.replace("%", "%%")


def parse(
    options_type: type[Options],
    args: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: Options | None = None,
    config: bool = True,
) -> Options:
    """The options that command-line arguments give.

    Args:
        options_type: a dataclass; its fields, and those of dataclasses in it, are options.
        args: the arguments.
        prog: the command, as the help has it.
        description: what it does; by default the docstring of `options_type` up to its attributes.
        default: values of options that are not given, in place of the fields' own.
        config: the help describes --config, which the caller has read.

    Raises:
        UserError: an option is unknown, missing, cannot be read or is not in its range.
        SystemExit: with code 0 after --help.
    """
    options = list(list_options(options_type, default))
    args = [_dashed(arg) for arg in args]
    doc = (description or inspect.cleandoc(options_type.__doc__ or "")).partition("Attributes:")[0].strip()
    parser = _parser(options, prog, f"{doc}\n\n{_CONFIG_HELP}" if config else doc, fold=_HELP_ALL not in args)
    known = {name: name for option in options if not option.is_positional for name in option.names}
    for name in (arg.partition("=")[0] for arg in _before_dashes(args) if arg.startswith("--")):
        if name not in (*known, "--help", _HELP_ALL):
            fail(f"{name}: {prog} has no such option", name, known, f"{prog} --help lists them")
    values = vars(parser.parse_args(args))
    given = {option.path: values[option.dest] for option in options}
    given |= {option.path: tuple(given[option.path]) for option in options if option.several}
    return _assemble(options_type, given, ())


def parse_script(options_type: type[Options], args: Sequence[str] | None = None, **options: Any) -> Options:
    """`parse` for a script, by default of the arguments of the process; ends with one line where they are invalid.

    `options`: description and default, as of `parse`.
    """
    try:
        given = sys.argv[1:] if args is None else args
        return parse(options_type, given, prog=f"python {sys.argv[0]}", config=False, **options)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from error


def list_options(options_type: type, default: Any = None, path: Path = ()) -> Iterator[Option]:
    """The options of a dataclass, those of dataclasses in it too; `default` is an instance with other defaults."""
    hints, documented = typing.get_type_hints(options_type, include_extras=True), _documented(options_type)
    for field in dataclasses.fields(options_type):
        value = _default(field) if default is None else getattr(default, field.name)
        declared = [cls for cls in options_type.__mro__ if field.name in inspect.get_annotations(cls)][-1]
        heading = declared.__dict__.get("heading", "method")
        hint, at = hints[field.name], (*path, field.name)
        if dataclasses.is_dataclass(hint):
            yield from list_options(typing.cast(type, hint), None if value is dataclasses.MISSING else value, at)
            continue
        unset = getattr(options_type, "unset_value", lambda name: None)(field.name) if value is None else None
        yield Option(at, flag_of(field), heading, hint, value, unset, documented.get(field.name, ""))


def fail(message: str, given: str, known: Mapping[str, str], otherwise: str) -> NoReturn:
    """Raises `UserError` with a message that suggests the value of the nearest of the `known` names."""
    initials = [name for name in known if "".join(re.findall(r"\b\w", name)) == given.strip("-")]  # --lr
    near = difflib.get_close_matches(given, known)
    near.sort(key=lambda name: sorted(name) != sorted(given))  # of equal letters first: "ats" for "ast"
    near = initials + near
    raise UserError(f"{message}; {f'did you mean {known[near[0]]}?' if near else f'{otherwise}.'}")


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if missing := message.partition("the following arguments are required: ")[2]:
            message = f"{missing}: missing; {self.prog} needs {'them' if ',' in missing else 'it'}"
        if extra := message.partition("unrecognized arguments: ")[2]:
            message = (
                f"{shortened(ascii(extra))}: {self.prog} takes no such argument; {self.prog} --help lists its options"
            )
        message = re.sub(r"^(--[\w-]+)/[^:]+", r"\1", message)
        raise UserError(" ".join(message.split()).removesuffix(".") + ".")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no line at a hyphen, as names have them."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _parser(options: Sequence[Option], prog: str, doc: str, *, fold: bool) -> _Parser:
    """`fold` lists the options on devices by name alone."""
    width = shutil.get_terminal_size().columns
    form = {"width": width, "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}

    def wrapped(text: str) -> str:
        return "\n".join(textwrap.fill(" ".join(part.split()), **form) for part in text.split("\n\n"))

    positional = "".join(f" {option.path[-1].upper()}" for option in options if option.is_positional)
    parser = _Parser(
        prog=prog,
        usage=f"{prog}{positional} [OPTIONS]",
        description=wrapped(doc),
        formatter_class=lambda prog: _Formatter(prog, max_help_position=26, width=width),
        allow_abbrev=False,
        add_help=False,
    )
    parser._negative_number_matcher = re.compile(r"-[^-]")  # values such as -1e-3 and -inf: no option has one dash
    for heading in ("required", *HEADINGS):
        chosen = [o for o in options if (o.default is dataclasses.MISSING) == (heading == "required")]
        chosen = [o for o in chosen if heading in ("required", o.heading)]
        if not chosen:
            continue
        folded = fold and heading == "device"
        names = f"{', '.join(o.flag for o in chosen)}: {prog} {_HELP_ALL}" if folded else ""
        group = parser.add_argument_group(f"{heading} options", wrapped(names) if folded else None)
        for option in chosen:
            _add(group, option, hidden=folded)
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", _HELP_ALL, action="help", help=f"print this, and exit; {_HELP_ALL}: all options")
    return parser


def _add(group: Any, option: Option, *, hidden: bool) -> None:
    def read(text: str) -> Any:
        try:
            return option.read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option.flag}: ")) from error

    shown: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else option.described()}
    if option.is_positional:
        form = {"type": read, "metavar": _metavar(option), "nargs": "+" if option.several else None}
        group.add_argument(option.dest, **form, **shown)
        return
    is_required = option.default is dataclasses.MISSING
    shown |= {"dest": option.dest, "default": None if is_required else option.default, "required": is_required}
    if option.kind is not bool:
        form = {"nargs": "*"} if option.several else {}
        group.add_argument(option.flag, type=read, metavar=_metavar(option), **form, **shown)
    elif option.default is False:
        group.add_argument(option.flag, action="store_true", **shown)
        group.add_argument(option.names[1], action="store_false", **shown | {"help": argparse.SUPPRESS})
    else:
        group.add_argument(*option.names, action=_Switch, nargs=0, **shown)


class _Switch(argparse.Action):
    """`--x` and `--no-x`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


def _metavar(option: Option) -> str:
    if option.choices and not _is_long(option.choices):
        return "{" + ",".join(option.choices) + "}"
    name = "NAME" if option.choices else "TEXT" if option.kind is str else option.kind.__name__.upper()
    return option.path[-1].upper() if option.is_positional else name


def _is_long(choices: Sequence[str]) -> bool:
    return sum(map(len, choices)) > 40


def _dashed(arg: str) -> str:
    """An argument whose option is written with dashes in place of underscores."""
    name, sign, value = arg.partition("=")
    return name.replace("_", "-") + sign + value if re.match(r"--\w", arg) else arg


def _before_dashes(args: Sequence[str]) -> Iterable[str]:
    return args[: args.index("--")] if "--" in args else args


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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
    """The one type that an annotation allows besides None, without its marks."""
    if typing.get_origin(annotation) is Annotated:
        return _without_none(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        (kind,) = (part for part in typing.get_args(annotation) if part is not type(None))
        return _without_none(kind)
    return annotation


def _assemble(options_type: type, values: dict[Path, Any], path: Path) -> Any:
    hints = typing.get_type_hints(options_type)
    given = {}
    for field in dataclasses.fields(options_type):
        at = (*path, field.name)
        given[field.name] = values[at] if at in values else _assemble(hints[field.name], values, at)
    return options_type(**given)
