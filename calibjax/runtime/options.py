"""Options of commands: the range of each value, checked from its declaration, and which values identify a run."""

import contextvars
import dataclasses
import math
import numbers
import re
import types
import typing
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from calibjax.runtime.errors import INT_MAX, UserError, shortened

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
        low_is_open = self.open in ("low", "both") or math.isinf(self.low)
        above = value > self.low if low_is_open else value >= self.low
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


class OneOf:
    """Marks a text that is a key of a registry or one of `others`. Entries may be added to the registry at any time."""

    def __init__(self, registry: Mapping[str, Any], others: tuple[str, ...] = ()):
        self.registry, self.others = registry, others

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.others, *self.registry)

    def __repr__(self) -> str:  # of signatures, in help() and in the reference
        return f"OneOf{self.names}"


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
Closed = Literal["right", "left", "none"]
"""Which edge belongs to a bin of confidences; see `calibjax.metrics.bin_index`."""


def not_identity(default: Any = dataclasses.MISSING) -> Any:
    """A field for where a run happens or how it is shown: two runs may differ in it and be the same."""
    return dataclasses.field(default=default, metadata={"identity": False})


def flag_of(name: str) -> str:
    """A field on the command line, such as `--batch-size`."""
    return "--" + name.replace("_", "-")


def check_options(options: Any) -> None:
    """Checks a dataclass and those in it against the annotations; raises `UserError` for the first wrong field."""
    if not dataclasses.is_dataclass(options):
        raise UserError(f"options: expected a dataclass, such as AtsOptions(...), got {type(options).__name__}.")
    for name, annotation in typing.get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if dataclasses.is_dataclass(value):
            check_options(value)
        else:
            check_value(name, annotation, value)


def check_value(name: str, annotation: Any, value: Any) -> None:
    """Checks one value; raises `UserError` that begins with `name` if it does not fit its annotation."""
    if expected := expected_value(annotation, value):
        raise UserError(f"{name}: {mismatch(expected, value)}.")


def mismatch(expected: str, value: Any) -> str:
    """The text of an error for a value that should be something else."""
    plain = str(value) if isinstance(value, Path | numbers.Real) else value
    got = plain if isinstance(value, numbers.Real) else ascii(plain)
    return f"expected {expected}{';' if ',' in expected else ','} got {shortened(got)}"


def expected_value(annotation: Any, value: Any) -> str | None:
    """What a value should be, if it does not fit its annotation; None if it fits.

    A number lies in the `Range` that its annotation has; without one an `int` is a size, from 1 to `INT_MAX`, and a
    `float` is finite; a `bool` is no number. Text is Unicode without NUL; if it is not marked `AnyText`, it is a name:
    not empty, without control characters, and its parts between slashes are at most 255 bytes long. Tuples are checked
    entry by entry. Any value fits an annotation of another kind. A choice is a `Literal`, or text marked `OneOf`.
    """
    kind = typing.get_origin(annotation) or annotation
    parts = typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return None if value is None and type(None) in parts else expected_value(parts[0], value)
    if kind is Annotated:
        for mark in parts[1:]:
            if isinstance(mark, OneOf):
                return _expected_choice(mark.names, value)
            if isinstance(mark, AnyText):
                return _expected_text(value, is_name=False)
            if isinstance(mark, Range):
                return _expected_number(parts[0], mark, value)
        return expected_value(parts[0], value)  # marked for the command line only
    if kind is tuple:
        if not isinstance(value, tuple):
            return "a tuple"
        if parts[0] is str:  # an entry may be several names, joined by commas
            expected = (_expected_text(entry, separator="[/,]") for entry in value)
        else:
            expected = (expected_value(parts[0], entry) for entry in value)
        return next(filter(None, expected), None)
    if kind is Literal:
        return _expected_choice(parts, value)
    if kind is bool:
        return None if type(value).__name__ in ("bool", "bool_") else "True or False"  # also NumPy's
    if kind is int:
        return _expected_number(int, Range(1, INT_MAX), value)
    if kind is float:
        return _expected_number(float, Range(), value)
    return _expected_text(value) if kind in (str, Path) else None


def _expected_choice(choices: tuple[Any, ...], value: Any) -> str | None:
    return None if value in choices else f"one of {', '.join(map(str, choices))}"


def _expected_number(kind: Any, limits: Range, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
        return "a whole number" if kind is int else "a number"
    number: Any = value
    return None if limits.holds(number) else limits.expected(number)


def _expected_text(value: Any, *, is_name: bool = True, separator: str = "/") -> str | None:
    if not isinstance(value, str | Path):
        return "text"
    text = str(value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "Unicode text without NUL"
    if not is_name:
        return None
    if not text:
        return "a name, which is not empty"
    if any(unicodedata.category(character) == "Cc" for character in text):
        return "a name without control characters"
    longest = max(len(part.encode()) for part in re.split(separator, text))
    if len(text.encode()) > 4095 or longest > 255:
        return "a name of at most 255 bytes, or a path of such names"
    return None


def run_identity(command: str, options: Any) -> dict[str, Any]:
    """The command and its `options_identity`, JSON-able: two runs with equal identities are the same run."""
    return {"command": command, **options_identity(options)}


def options_identity(options: Any) -> dict[str, Any]:
    """Every option but fields of `not_identity`; JSON-able."""
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
