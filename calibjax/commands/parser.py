"""Options on the command line: dataclasses of options as flags, each with its default, under headings."""

import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from calibjax.runtime.errors import UserError, printable
from calibjax.runtime.options import check_value, flag_of, marks, shortened

Options = TypeVar("Options")
Path = tuple[str, ...]

HEADINGS = ("model", "data", "method", "evaluation", "output", "device")
"""In the order of the help. An options class names its own by a class variable `heading`; without one it is method."""


_CONFIG_HELP = "--config FILE reads options from a YAML file, such as the run.yaml that every run leaves in --out."


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
    def names(self) -> tuple[str, ...]:
        return (self.flag, f"--no-{self.flag[2:]}") if _alternatives(self.annotation) == (bool,) else (self.flag,)


def parse(
    options_type: type[Options],
    args: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    default: Options | None = None,
) -> Options:
    """The options that command-line arguments give.

    Args:
        options_type: a dataclass; its fields, and those of dataclasses in it, are options.
        args: the arguments.
        prog: the command, as the help has it.
        description: what it does; by default the docstring of `options_type` up to its attributes.
        default: values of options that are not given, in place of the fields' own.

    Raises:
        UserError: a number or text is not in its range; see `check_options`.
        SystemExit: with code 0 after --help, 2 after one line on an unknown or missing option, or a value that
            cannot be read.
    """
    found = list(list_options(options_type, default))
    _check_args(args, found, prog)
    described = description or inspect.cleandoc(options_type.__doc__ or "").split("\n\nAttributes:")[0]
    groups = {heading: [option for option in found if option.heading == heading] for heading in HEADINGS}
    given = tyro.cli(
        dataclasses.make_dataclass(
            "options",
            [  # with a help, because tyro parses source files to find one
                (heading, Annotated[_group(heading, of_group), tyro.conf.arg(help="")])
                for heading, of_group in groups.items()
                if of_group
            ],
        ),
        prog=prog,
        description=_wrapped(f"{described}\n\n{_CONFIG_HELP}"),
        args=list(args),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values = {option.path: getattr(getattr(given, option.heading), _identifier(option)) for option in found}
    return _assemble(options_type, values, ())


def list_options(options_type: type, default: Any = None, path: Path = ()) -> Iterator[Option]:
    """The options of a dataclass, those of dataclasses in it too; `default` is an instance with other defaults."""
    hints, documented = typing.get_type_hints(options_type, include_extras=True), _documented(options_type)
    for field in dataclasses.fields(options_type):
        value = _default(field) if default is None else getattr(default, field.name)
        declared = [cls for cls in options_type.__mro__ if field.name in inspect.get_annotations(cls)][-1]
        of_field = declared.__dict__.get("heading", "method")
        hint, at = hints[field.name], (*path, field.name)
        if dataclasses.is_dataclass(hint):
            yield from list_options(typing.cast(type, hint), value, at)
            continue
        unset = getattr(options_type, "unset_value", lambda name: None)(field.name) if value is None else None
        yield Option(at, flag_of(field), of_field, hint, value, unset, documented.get(field.name, ""))


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


def _group(heading: str, options: list[Option]) -> type:
    fields = []
    for option in options:
        annotation = Annotated[
            option.annotation,
            tyro.conf.arg(
                name=option.flag[2:],
                help=option.help,
                metavar=_metavar(option),
                help_behavior_hint=_shown_default(option),
            ),
        ]
        if _alternatives(option.annotation) in ((int,), (float,)):
            annotation = Annotated[annotation, _number(option)]
        if option.default is None or _alternatives(option.annotation) == (bool,):
            annotation = tyro.conf.DisallowNone[annotation]  # None is what it is when it is not given
        if option.default is dataclasses.MISSING:
            fields.append((_identifier(option), annotation))
        else:
            fields.append((_identifier(option), annotation, dataclasses.field(default=option.default)))
    made = dataclasses.make_dataclass(heading, fields, kw_only=True)
    made.__doc__ = " "
    return made


def _identifier(option: Option) -> str:
    return "_".join(option.path)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation allows besides None."""
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        parts = (_alternatives(part) for part in typing.get_args(annotation) if part is not type(None))
        return tuple(alternative for part in parts for alternative in part)
    return (annotation,)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The words that an option accepts, of one with fixed choices."""
    kinds = _alternatives(annotation)
    return tuple(str(word) for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind))


def _metavar(option: Option) -> str | None:
    """Of an optional value the value's own; None: as tyro has it."""
    (kind,) = _alternatives(option.annotation)
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if kind is bool or not isinstance(kind, type):
        return None
    return kind.__name__.upper() + ("|None" if _takes_none(option) else "")


def _shown_default(option: Option) -> str:
    value = option.unset if option.default is None else option.default
    if value is None or value is False or value == ():
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else "yes" if value is True else value
    return f"(default: {shown})"


def _number(option: Option) -> PrimitiveConstructorSpec:
    """Reads a number, or None where the option takes it."""
    (kind,) = _alternatives(option.annotation)

    def read(texts: list[str]) -> Any:
        if texts == ["None"] and _takes_none(option):
            return None
        return kind(texts[0])  # `_check_value` was here before

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _takes_none(option: Option) -> bool:
    return type(None) in typing.get_args(option.annotation) and option.default is not None


def _wrapped(text: str) -> str:
    """Paragraphs as wide as the terminal, indented: tyro joins lines that begin with a letter."""
    width, indent = shutil.get_terminal_size().columns, "  "
    form = {"width": width, "initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(" ".join(part.split()), **form) for part in text.split("\n\n"))


def _check_args(args: Sequence[str], options: Sequence[Option], prog: str) -> None:
    """Ends with one line on the first argument that is not as the options declare it, or on missing options."""
    waiting = [option for option in options if any(marks(option.annotation, type(tyro.conf.Positional)))]
    by_name = {name: option for option in options if option not in waiting for name in option.names}
    for arg in args:
        name = _name(arg)
        if name and name not in by_name and not _of_tyro(name):
            fail(
                f"{name}: {prog} has no such option",
                name,
                {flag: flag for flag in by_name},
                f"{prog} --help lists them",
            )
    if any(arg in ("-h", "--help") or _of_tyro(arg) for arg in args):
        return
    given, option, values, ended = set(), None, 0, False
    for arg in (*args, "--"):
        name, _, value = arg.partition("=")
        if not _name(arg) and arg != "--":
            if option is None or values == 0:
                if not waiting:
                    stop(f"{shortened(ascii(arg))}: {prog} takes no such argument; {prog} --help lists its options.")
                option = waiting.pop(0)
                values = _arity(option)
            _check_value(option, arg)
            given.add(option.flag)
            values -= 1
            continue
        if option is not None and option.flag not in given and values > 0:
            stop(f"{option.flag}: expected a value, got none.")
        if arg == "--":
            option, values, ended = None, 0, True
            continue
        if ended:
            stop(f"{name}: expected before --, after which there are no options.")
        option = by_name[_name(arg)]
        values = _arity(option)
        if values != 1:
            given.add(option.flag)
        if value or arg.endswith("="):
            if values == 0:
                stop(f"{option.flag}: expected no value, got {shortened(ascii(value))}.")
            _check_value(option, value)
            given.add(option.flag)
            values -= 1
    missing = [option.flag for option in options if option.default is dataclasses.MISSING and option.flag not in given]
    if missing:
        stop(f"{', '.join(missing)}: missing; {prog} needs {'it' if len(missing) == 1 else 'them'}.")


def _name(arg: str) -> str:
    """The option that an argument names, "" if it is a value."""
    return arg.partition("=")[0].replace("_", "-") if arg.startswith("--") and arg != "--" else ""


def _of_tyro(name: str) -> bool:
    return name == "--help" or name.startswith("--tyro-")


def _arity(option: Option) -> int:
    """Number of values: -1 for any."""
    alternatives = _alternatives(option.annotation)
    return 0 if alternatives == (bool,) else -1 if any(typing.get_origin(x) is tuple for x in alternatives) else 1


def _check_value(option: Option, text: str) -> None:
    """Ends with one line on a text that is not what the option takes, before `tyro` is asked, which takes its time."""
    (kind,) = _alternatives(option.annotation)
    if typing.get_origin(kind) is tuple:
        (kind,) = _alternatives(typing.get_args(kind)[0])
    if text == "None" and _takes_none(option):
        return
    expected = {int: "a whole number", float: "a number"}.get(kind)
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        expected = None if text in choices else f"one of {', '.join(choices)}"
    else:
        try:
            check_value(option.flag, option.annotation, kind(text) if expected else text)
            return
        except UserError:
            raise
        except ValueError:
            pass
    if expected:
        stop(f"{option.flag}: expected {expected}, got {shortened(ascii(text))}.")


def fail(message: str, given: str, known: Mapping[str, str], otherwise: str) -> NoReturn:
    """Prints one line, which suggests the value of the nearest of the `known` names, and exits with code 2."""
    near = difflib.get_close_matches(given, known)
    near.sort(key=lambda name: sorted(name) != sorted(given))  # of equal letters first: "ats" for "ast"
    stop(f"{message}; {f'did you mean {known[near[0]]}?' if near else f'{otherwise}.'}")


def stop(message: str) -> NoReturn:
    """Prints one line and exits with code 2."""
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2)


def _assemble(options_type: type, values: dict[Path, Any], path: Path) -> Any:
    hints = typing.get_type_hints(options_type)
    given = {}
    for field in dataclasses.fields(options_type):
        at = (*path, field.name)
        given[field.name] = values[at] if at in values else _assemble(hints[field.name], values, at)
    return options_type(**given)
