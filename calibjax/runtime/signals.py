"""Ctrl-C and SIGTERM: a run ends so that it can be resumed.

SIGTERM in training ends with a checkpoint of the current step. Ctrl-C ends at once; nothing is lost either, as a run
resumes from its newest checkpoint whenever it was killed. Of several processes only one may get the signal, and they
save together or not at all: there, both signals end the process as they would without this module.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM: 128 and the number of the signal, as shells have it."""
PATIENCE = 5.0
"""Seconds that Ctrl-C leaves Python to unwind. Code of C++ that runs, or a callback, can hold the exception up."""


class Terminated(BaseException):
    """SIGTERM. No `Exception`, as `KeyboardInterrupt` is none: what handles failures must not handle it."""


class _State:
    handled = False
    at_once = False
    requested = False
    in_step = False


@contextlib.contextmanager
def handled(on_stop: Callable[[str], None]) -> Iterator[None]:
    """Within it, SIGTERM raises `Terminated`, and Ctrl-C ends the process even where its exception is swallowed.

    Args:
        on_stop: called in another thread, with the name of the signal, before a process ends without unwinding: in
            `ending_at_once`, at a second Ctrl-C, or where `KeyboardInterrupt` did not end it within `PATIENCE` seconds.
    """
    if threading.current_thread() is not threading.main_thread() or _State.handled:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_watch, args=(reader, on_stop), daemon=True)
    before = signal.signal(signal.SIGTERM, _on_terminate)
    before_interrupt = signal.signal(signal.SIGINT, _on_interrupt)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    _State.handled = True
    try:
        yield
    finally:
        _State.handled = _State.requested = False
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_interrupt)
        os.close(writer)  # ends the watcher
        watcher.join()
        os.close(reader)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """For the imports of a command: both signals end the process without unwinding.

    Packages turn an exception that is raised in them into an `ImportError`, or swallow it.
    """
    _State.at_once = _State.handled
    try:
        yield
    finally:
        _State.at_once = False


def _on_interrupt(number: int, frame: Any) -> None:
    if not _State.at_once:
        raise KeyboardInterrupt


def _on_terminate(number: int, frame: Any) -> None:
    if _State.at_once:
        return
    _State.requested = True
    if not _State.in_step:
        raise Terminated


def _watch(reader: int, on_stop: Callable[[str], None]) -> None:
    """Reads the signals' numbers, which C writes at once; Python's own handler waits for the main thread."""
    while numbers := os.read(reader, 64):
        if _State.at_once and (signal.SIGINT in numbers or signal.SIGTERM in numbers):
            terminated = signal.SIGTERM in numbers
            on_stop("SIGTERM" if terminated else "Ctrl-C")
            os._exit(TERMINATED if terminated else INTERRUPTED)
        if signal.SIGINT not in numbers:
            continue
        ready, _, _ = select.select([reader], [], [], PATIENCE)
        if ready and not (more := os.read(reader, 64)):
            return
        elif ready and signal.SIGINT not in more:
            continue
        on_stop("Ctrl-C")
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def finishing_steps() -> Iterator[Callable[[], bool]]:
    """For a training loop: SIGTERM waits.

    After each step the loop calls what this yields; where that returns True it saves and leaves the block, which raises
    `Terminated`.
    """
    import jax  # here, so that the signals are handled while it is imported

    _State.in_step = _State.handled and jax.process_count() == 1
    try:
        yield lambda: _State.in_step and _State.requested
    finally:
        _State.in_step = False
    if _State.requested:
        raise Terminated
