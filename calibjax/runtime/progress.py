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


def progress_bar(
    items: Iterable[Any] | None, *, title: str, unit: str, disable: bool | None, **options: Any
) -> standard_tqdm:
    """A progress bar over `items`, or one to update manually up to `total`; `options` are tqdm's.

    It is redrawn in a terminal and in a notebook. With `disable=None` it is hidden elsewhere.
    """
    redrawn = sys.stderr.isatty() or (tqdm is not standard_tqdm and "ipykernel" in sys.modules)
    return (Bar if redrawn else LineBar)(items, desc=title, unit=unit, disable=disable, **options)


class _Timed(standard_tqdm):
    """Estimates the time left by the median of 64 recent steps: the first one, and others that compile, are longer."""

    def __init__(self, *args: Any, **options: Any):
        self._since, self._durations = 0.0, collections.deque[float](maxlen=64)
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
    """A progress bar that is never redrawn: a line at the start, an estimate, every half minute, and at the end."""

    disable = True  # until it has been made: `close` is called where memory ended before

    def __init__(self, items: Iterable[Any] | None = None, **options: Any):
        form = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}{postfix}]"
        options |= {"mininterval": _EVERY, "miniters": 1, "bar_format": form}
        self._updates = 0
        super().__init__(items, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        left = self._left()
        more = f", about {self.format_interval(left)} left" if left >= 1 else ""
        print(f"{self}{more}" if msg is None else msg, file=sys.stderr, flush=True)
        return True

    def update(self, n: float | None = 1) -> bool | None:
        shown = super().update(n)
        self._updates += 1
        if self._updates == 2 and not self.disable and (left := self._left()) >= _WORTH:
            self.display(f"{self.desc}: about {self.format_interval(left)} from a timed step")
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
