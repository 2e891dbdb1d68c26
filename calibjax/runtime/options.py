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
        low, high: the bounds.
        open: without the bounds themselves: "low", "high" or "both".
        infinite: whether infinity is accepted, where there is no upper bound.
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""
    infinite: bool = False

    def holds(self, value: float) -> bool:
        above = self.low < value if self.open in ("low", "both") or math.isinf(self.low) else self.low <= value
        below = value < self.high if self.open in ("high", "both") else value <= self.high
        return above and below and (self.infinite or math.isfinite(value))

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
        if self.high == INT_MAX and value > self.high:
            return f"at most {INT_MAX}"
        return (
            f"{self}, finite" if math.isinf(value) and math.isinf(self.high) and math.isfinite(self.low) else f"{self}"
        )


INT_MAX = 2**31 - 1
"""The largest count: arrays are indexed by int32."""
Count = Annotated[int, Range(1, INT_MAX)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, open="low")]
NonNegative = Annotated[float, Range(0)]
Weight = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, open="both")]

NOT_IDENTITY = {"identity": False}
"""`metadata` of a field that says where a run happens or how it is shown: two runs may differ in it and be the same."""

IDENTITY_IF_CHANGED = {"identity": "changed"}
"""`metadata` of an option that is newer than runs that must resume: part of the identity unless it has its default."""


def named(flag: str, default: Any, **metadata: Any) -> Any:
    """A field that the command line calls `--flag`, and run.json and Python by its own name."""
    return dataclasses.field(default=default, metadata={"flag": flag, **metadata})


def flag_of(field: dataclasses.Field) -> str:
    """A field on the command line, such as `--batch-size`."""
    return "--" + field.metadata.get("flag", field.name).replace("_", "-")


def check_options(options: Any) -> None:
    """Checks every value against the `Range` in its annotation, in groups of options too.

    Raises:
        UserError: names the option, the range and the value.
    """
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        name, annotation, value = flag_of(field), hints[field.name], getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_options(value)
            continue
        for limits in _ranges(annotation):
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not limits.holds(number):
                    raise UserError(f"{name}: expected {limits.expected(number)}, got {number}.")


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


def _ranges(annotation: Any) -> Iterator[Range]:
    """Every `Range` in an annotation such as `Count`, `Count | None` or `tuple[Positive, ...]`."""
    yield from (extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Range))
    for part in typing.get_args(annotation):
        if not isinstance(part, Range):
            yield from _ranges(part)
