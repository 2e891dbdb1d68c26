"""Progress of long work: bars in a terminal and in a notebook, and a few lines where the output is a file or a pipe."""

import collections
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm as standard_tqdm
from tqdm.auto import tqdm


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
        self._since, self._items, self._durations = 0.0, 0.0, collections.deque[float](maxlen=64)
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        now = time.perf_counter()
        self._items += n or 0
        if self._items and now - self._since > 0.05:  # what a batch completes comes at once
            if self._since:
                self._durations.append((now - self._since) / self._items)
            self._since, self._items = now, 0.0
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's, with a rate of 0, which it shows as "?", before the second step, and `left` where it is known."""
        rate = 1 / max(statistics.median(self._durations), 1e-9) if self._durations else 0.0
        seconds = (self.total - self.n) / rate if self.total and rate else 0.0
        left = f", about {self.format_interval(seconds)} left" if seconds >= 1 else ""
        return {**super().format_dict, "rate": rate, "left": left}


class Bar(_Timed, tqdm):  # pyright: ignore[reportGeneralTypeIssues]
    """The bar of a terminal or a notebook."""


class _Lines:
    """Standard error, where each text that tqdm would redraw is a line."""

    _last = ""

    def write(self, text: str) -> None:
        line = text.replace("\x1b[A", "").strip()  # without the steps to the place of a bar among others
        if line not in ("", self._last):
            print(line, file=sys.stderr, flush=True)
        self._last = line or self._last

    def flush(self) -> None: ...


class LineBar(_Timed):
    """A progress bar that is never redrawn: a line at the start, every half minute, and at the end."""

    disable = True  # until it has been made: `close` is called where memory ended before

    def __init__(self, items: Iterable[Any] | None = None, **options: Any):
        form = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}{left}{postfix}]"
        options |= {"mininterval": 30.0, "miniters": 1, "bar_format": form, "file": _Lines()}
        super().__init__(items, **options)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Keeps the text without printing it."""
        super().set_postfix_str(s, refresh=False)
