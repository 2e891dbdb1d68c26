"""Ctrl-C and SIGTERM: a run ends so that it can be resumed.

SIGTERM in training ends with a checkpoint of the current step. If only one of several processes gets the signal, JAX's
notice of preemption reaches all of them, and they agree on the step to end with. Ctrl-C ends at once.
"""

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM: 128 and the number of the signal, as shells have it."""
PATIENCE = 5.0
"""Seconds that a signal leaves Python to unwind. C++ code or a callback can hold the exception up, or drop it."""


class Terminated(BaseException):
    """SIGTERM. No `Exception`, as `KeyboardInterrupt` is none: what handles failures must not handle it."""


class _State:
    handled = False
    at_once = False
    requested = False
    agreed = False
    in_step = False
    notice: Callable[[int], None] | None = None  # JAX's handler of SIGTERM


@contextlib.contextmanager
def handled(on_stop: Callable[[str], None]) -> Iterator[None]:
    """Within it, SIGTERM raises `Terminated`, and a signal ends the process even where its exception is swallowed.

    `on_stop` is called in another thread, with the name of the signal, before a process ends without unwinding: in
    `ending_at_once`, at a second signal that is Ctrl-C, or where the exception did not end it within `PATIENCE`.
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
        _State.handled = _State.requested = _State.agreed = False
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_interrupt)
        os.close(writer)  # ends the watcher
        watcher.join()
        os.close(reader)


def share_sigterm() -> None:
    """Makes SIGTERM reach this module and JAX, which sets its own handler in C when the processes join."""
    import jax

    if not _State.handled or not getattr(jax.config, "jax_enable_preemption_service", False):
        return
    c_signal = ctypes.CDLL(None).signal
    c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handler = c_signal(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, _on_terminate)
    _State.notice = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler) if handler else None


def agreed() -> bool:
    """Whether all processes of a job have ended training at the same step."""
    return _State.agreed


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
    if not _State.requested and _State.notice is not None:
        _State.notice(number)
    _State.requested = True
    if not _State.in_step:
        raise Terminated


def _watch(reader: int, on_stop: Callable[[str], None]) -> None:
    """Reads the signals' numbers, which C writes at once; Python's own handler waits for the main thread."""
    while numbers := os.read(reader, 64):
        terminates = signal.SIGTERM in numbers
        if (terminates and _State.in_step) or not (terminates or signal.SIGINT in numbers):
            continue
        while not _State.at_once and select.select([reader], [], [], PATIENCE)[0]:
            more = os.read(reader, 64)
            if not more:
                return
            if signal.SIGINT in more:
                break
        on_stop("SIGTERM" if terminates else "Ctrl-C")
        os._exit(TERMINATED if terminates else INTERRUPTED)


@contextlib.contextmanager
def finishing_steps() -> Iterator[Callable[[int], bool]]:
    """For a training loop, until its last checkpoint is written: SIGTERM waits.

    After each step the loop calls what this yields with the number of the step, in all processes; where that returns
    True it saves and leaves the block, which raises `Terminated`.
    """
    import jax  # here, so that Ctrl-C is handled while it is imported
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    several = jax.process_count() > 1

    def stop_requested(step: int) -> bool:
        if several and _State.notice is not None:
            _State.agreed = reached_preemption_sync_point(step)
            return _State.agreed
        return _State.requested and not several

    _State.in_step = _State.handled and (not several or _State.notice is not None)
    try:
        yield stop_requested
    finally:
        _State.in_step = False
    if _State.requested or _State.agreed:
        raise Terminated
