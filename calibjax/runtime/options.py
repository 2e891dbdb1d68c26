"""Options of commands: the range of each value, checked from its declaration, and which values identify a run."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from calibjax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option accepts, as in `Annotated[float, Range(0, 1)]`. NaN is in no range.

    Attributes:
        low, high: the bounds; an infinite bound is never accepted as a value.
        open: without the bounds themselves: "low", "high" or "both".
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""

    def holds(self, value: float) -> bool:
        above = self.low < value if self.open in ("low", "both") or math.isinf(self.low) else self.low <= value
        below = value < self.high if self.open in ("high", "both") or math.isinf(self.high) else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open in ('low', 'both') else 'at least'} {self.low:.12g}"
        high = f"{'below' if self.open in ('high', 'both') else 'at most'} {self.high:.12g}"
        if math.isinf(self.high):
            return "a finite number" if math.isinf(self.low) else low
        return f"{low} and {high}" if self.open else f"from {self.low:.12g} to {self.high:.12g}"


Count = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, open="low")]
NonNegative = Annotated[float, Range(0)]
Weight = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, open="both")]

NOT_IDENTITY = {"identity": False}
"""`metadata` of a field that says where a run happens or how it is shown: two runs may differ in it and be the same."""

IDENTITY_IF_CHANGED = {"identity": "changed"}
"""`metadata` of an option that is newer than runs that must resume: part of the identity unless it has its default."""


def check_options(options: Any) -> None:
    """Checks every value against the `Range` in its annotation, in groups of options too.

    Raises:
        UserError: names the option, the range and the value.
    """
    for name, annotation, value in _fields(options):
        if dataclasses.is_dataclass(value):
            check_options(value)
            continue
        for limits in _ranges(annotation):
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not limits.holds(number):
                    finite = "" if math.isfinite(number) else ", finite"
                    raise UserError(f"--{name.replace('_', '-')}: expected {limits}{finite}, got {number}.")


def run_identity(command: str, options: Any) -> dict[str, Any]:
    """What makes two runs the same: the command and every option but those marked `NOT_IDENTITY`; JSON-able."""
    return {"command": command, **options_identity(options)}


def options_identity(options: Any) -> dict[str, Any]:
    """Every option but those marked `NOT_IDENTITY`; JSON-able."""
    kept = {}
    for field in dataclasses.fields(options):
        part, value = field.metadata.get("identity", True), getattr(options, field.name)
        if part is True or (part == "changed" and value != field.default):
            kept[field.name] = _plain(value)
    return kept


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return options_identity(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _fields(options: Any) -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        yield field.name, hints[field.name], getattr(options, field.name)


def _ranges(annotation: Any) -> Iterator[Range]:
    """Every `Range` in an annotation such as `Count`, `Count | None` or `tuple[Positive, ...]`."""
    yield from (extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Range))
    for part in typing.get_args(annotation):
        if not isinstance(part, Range):
            yield from _ranges(part)
