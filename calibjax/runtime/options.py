"""Options of commands: the range of each value, checked from its declaration, and which values identify a run."""

import contextvars
import dataclasses
import math
import numbers
import types
import typing
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from calibjax.runtime.errors import INT_MAX, UserError

Mark = TypeVar("Mark")

command_line: contextvars.ContextVar[str] = contextvars.ContextVar("command_line", default="")
"""The command that this process runs, as typed; "" where the code was not called from a command line."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option accepts, as in `Annotated[float, Range(0, 1)]`. NaN is in no range."""

    low: float = -math.inf
    high: float = math.inf
    open: str = ""  # bounds that are not in it: "low", "high" or "both"
    infinite: bool = False  # whether infinity is accepted, where there is no upper bound

    def holds(self, value: float) -> bool:
        above = self.low < value if self.open in ("low", "both") or math.isinf(self.low) else self.low <= value
        below = value < self.high if self.open in ("high", "both") else value <= self.high
        return above and below and (self.infinite or isinstance(value, int) or math.isfinite(value))

    def __str__(self) -> str:
        low = f"{'above' if self.open in ('low', 'both') else 'at least'} {self.low:.12g}"
        high = f"{'below' if self.open in ('high', 'both') else 'at most'} {self.high:.12g}"
        if math.isinf(self.low) and math.isinf(self.high):
            return "a number above -inf" if self.infinite else "a finite number"
        if self.high >= INT_MAX:
            return low
        return f"{low} and {high}" if self.open else f"from {self.low:.12g} to {self.high:.12g}"

    def expected(self, value: float) -> str:
        """The range in words, for a value outside it."""
        if self.high >= INT_MAX and math.isfinite(self.high) and value > self.high:
            return f"at most {self.high:.12g}"
        if isinstance(value, float) and math.isinf(value) and math.isinf(self.high) and math.isfinite(self.low):
            return f"{self}, finite"
        return str(self)


class Positional:
    """Marks an option that the command line takes by its place, without a flag."""


class AnyText:
    """Marks a text that may be empty and of several lines, as a prompt. Any other text is a name, such as a path."""


Count = Annotated[int, Range(1, INT_MAX)]
BatchSize = Annotated[int, Range(1, 2**16)]
Bins = Annotated[int, Range(1, 10_000)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, open="low")]
NonNegative = Annotated[float, Range(0)]
Weight = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, open="both")]

NOT_IDENTITY = {"identity": False}
"""`metadata` of a field that says where a run happens or how it is shown: two runs may differ in it and be the same."""


def named(flag: str, default: Any, **metadata: Any) -> Any:
    """A field that the command line calls `--flag`, and run.json and Python by its own name."""
    return dataclasses.field(default=default, metadata={"flag": flag, **metadata})


def flag_of(field: dataclasses.Field) -> str:
    """A field on the command line, such as `--batch-size`."""
    return "--" + field.metadata.get("flag", field.name).replace("_", "-")


def check_options(options: Any) -> None:
    """Checks every value against its annotation; groups of options are included.

    Raises `UserError` for a value of another type, one that is no choice of a `Literal`, a number outside its `Range`,
    and text that is not Unicode without NUL. Text that is not marked `AnyText` is a name: not empty, without control
    characters, and its parts between slashes are at most 255 bytes long, as in a path.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        annotation = hints[field.name]
        if dataclasses.is_dataclass(value):
            check_options(value)
        elif value is None and type(None) in leaf_types(annotation):
            continue
        elif any(typing.get_origin(part) is tuple for part in (annotation, *typing.get_args(annotation))):
            if not isinstance(value, tuple | list):
                raise UserError(f"{field.name}: expected a sequence, got {shortened(repr(value))}.")
            for entry in value:
                check_value(field.name, annotation, entry)
        else:
            check_value(field.name, annotation, value)


_TYPES: dict[type, tuple[Any, str]] = {
    bool: (bool | np.bool_, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str | Path, "a text"),
    Path: (str | Path, "a path"),
}
"""Type in an annotation -> the types that it accepts, and its name in a message."""


def check_value(name: str, annotation: Any, value: Any) -> None:
    """Checks one value of an option, or one entry of a sequence; raises `UserError` as `check_options` does."""
    kinds = leaf_types(annotation)
    choices = [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    known = [_TYPES[kind] for kind in kinds if kind in _TYPES]
    if choices and not known and value not in choices:
        raise UserError(f"{name}: expected one of {', '.join(choices)}; got {shortened(repr(value))}.")
    is_bool = isinstance(value, bool | np.bool_)
    if known and not any(
        isinstance(value, accepted) and is_bool == (kind == "True or False") for accepted, kind in known
    ):
        expected = " or ".join(kind for _, kind in known)
        raise UserError(f"{name}: expected {expected}, got {shortened(repr(value))}.")
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if isinstance(value, int | float):
        for limits in marks(annotation, Range):
            if not limits.holds(value):
                raise UserError(f"{name}: expected {limits.expected(value)}, got {shortened(value)}.")
    if isinstance(value, str | Path):
        _check_text(name, str(value), is_name=not any(marks(annotation, AnyText)))


def _check_text(name: str, text: str, *, is_name: bool) -> None:
    expected = None
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        expected = "Unicode text without NUL"
    elif not is_name:
        return
    elif not text:
        expected = "a name, which is not empty"
    elif any(unicodedata.category(character) == "Cc" for character in text):
        expected = "a name without control characters"
    elif len(text.encode()) > 4095 or any(len(part.encode()) > 255 for part in text.split("/")):
        expected = "a name of at most 255 bytes, or a path of such names"
    if expected is not None:
        raise UserError(f"{name}: expected {expected}, got {shortened(ascii(text))}.")


def leaf_types(annotation: Any) -> list[Any]:
    """The types and `Literal`s in an annotation, such as int and NoneType in `tuple[Count, ...] | None`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return leaf_types(typing.get_args(annotation)[0])
    if origin in (tuple, typing.Union, types.UnionType):
        return [leaf for part in typing.get_args(annotation) if part is not ... for leaf in leaf_types(part)]
    return [annotation]


def shortened(value: Any) -> str:
    """A value for a message, at most 80 characters of it."""
    try:
        text = str(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a number of about {value.bit_length() * 3 // 10} digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def run_identity(command: str, options: Any) -> dict[str, Any]:
    """The command and its `options_identity`, JSON-able: two runs with equal identities are the same run."""
    return {"command": command, **options_identity(options)}


def options_identity(options: Any) -> dict[str, Any]:
    """Every option but those marked `NOT_IDENTITY`; JSON-able."""
    return {
        field.name: to_json(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.metadata.get("identity", True)
    }


def to_json(value: Any) -> Any:
    """The value of an option as JSON and YAML have it."""
    if dataclasses.is_dataclass(value):
        return options_identity(value)
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def marks(annotation: Any, kind: type[Mark]) -> Iterator[Mark]:
    """Every mark of a kind, such as `Range`, in an annotation such as `Count | None` or `tuple[Count, ...]`."""
    yield from (extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, kind))
    for part in typing.get_args(annotation):
        if not isinstance(part, kind):
            yield from marks(part, kind)
