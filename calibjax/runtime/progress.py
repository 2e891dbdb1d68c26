"""Progress of long work: bars in a terminal and in a notebook, and a few lines where the output is a file or a pipe."""

import collections
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm as standard_tqdm
from tqdm.auto import tqdm

_EVERY = 30.0
"""Seconds between two lines of a phase."""
_WORTH = 10.0
"""Seconds that a phase must still take for its estimate to be printed."""
_RECENT = 64
"""Updates that the rate is the median of."""


def progress_bar(
    items: Iterable[Any] | None, *, title: str, unit: str, disable: bool | None, **options: Any
) -> standard_tqdm:
    """A progress bar over `items`, or one to update manually up to `total`.

    Args:
        items: what to iterate over, or None.
        title: name of the phase.
        unit: what is counted.
        disable: show nothing; None: only in a terminal.
        options: further arguments of tqdm.
    """
    kind = Bar if is_interactive() else LineBar
    return kind(items, desc=title, unit=unit, disable=disable, **options)


def is_interactive() -> bool:
    """Whether standard error is a terminal, or the code runs in a notebook, so that a bar can be redrawn."""
    return sys.stderr.isatty() or (tqdm is not standard_tqdm and "ipykernel" in sys.modules)


class _Timed(standard_tqdm):
    """Estimates the time left by the median of recent steps: the first one, and others that compile, are longer."""

    def __init__(self, *args: Any, **options: Any):
        self._since, self._durations = 0.0, collections.deque[float](maxlen=_RECENT)
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        now = time.perf_counter()
        if self._since and n:
            self._durations.append((now - self._since) / n)
        self._since = now
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's, with a rate of 0, which it shows as "?", before the second step."""
        rate = 1 / max(statistics.median(self._durations), 1e-9) if self._durations else 0.0
        return {**super().format_dict, "rate": rate}


class Bar(_Timed, tqdm):  # pyright: ignore[reportGeneralTypeIssues]
    """The bar of a terminal or a notebook."""


class LineBar(_Timed):
    """A progress bar that is never redrawn: a line at the start, an estimate, every half minute, and at the end.

    The estimate of the time comes from the second step on: the first one includes compilation.
    """

    disable = True  # until it has been made: `close` is called where memory ended before

    def __init__(self, items: Iterable[Any] | None = None, **options: Any):
        options |= {
            "mininterval": _EVERY,
            "miniters": 1,
            "bar_format": "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]",
        }
        self._updates = 0
        super().__init__(items, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        left = self._left()
        more = f", about {self.format_interval(left)} left" if left >= 1 else ""
        self._line(f"{self}{more}" if msg is None else msg)
        return True

    def update(self, n: float | None = 1) -> bool | None:
        shown = super().update(n)
        self._updates += 1
        if self._updates == 2 and not self.disable and (left := self._left()) >= _WORTH:
            self._line(f"{self.desc}: about {self.format_interval(left)} from a timed step")
        return shown

    def _left(self) -> float:
        """Seconds; 0 if they are not known."""
        rate = self.format_dict["rate"]
        return (self.total - self.n) / rate if self.total and rate else 0.0

    def __iter__(self) -> Iterator[Any]:
        assert self.iterable is not None
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Keeps the text without printing it."""
        super().set_postfix_str(s, refresh=False)

    def clear(self, nolock: bool = False) -> None:
        """Does nothing: lines stay."""

    def close(self) -> None:
        if self.disable:
            return
        if self._updates:  # otherwise the line of the start holds
            self.display()
        self.disable = True
        self._decr_instances(self)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def write(cls, s: str, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
        """Prints a line of its own."""
        print(s, file=sys.stdout if file is None else file, end=end, flush=True)

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
