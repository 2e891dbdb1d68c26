"""The training loop: steps, logs, evaluation and checkpoints. An interrupted run resumes."""

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
from jaxtyping import Array

from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import NonFiniteLossError
from calibjax.runtime.files import write_file
from calibjax.runtime.sharding import place_rows
from calibjax.runtime.signals import finishing_steps
from calibjax.runtime.tracking import TrackerName, make_tracker
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.step import StepMetrics, TrainState, TrainStep

LOG_EVERY = 10
_FLUSH_EVERY = 30.0  # seconds between writes of events to the disk


class TrainLog:
    """Scalars of a run as JSON lines (`train.jsonl`) and TensorBoard events (`tensorboard/`), in process 0 only.

    Rows of steps after `first_step`, where the run resumes, are removed. `track` names a tracker that gets the scalars.
    """

    def __init__(self, directory: Path, *, first_step: int, track: TrackerName = "tensorboard"):
        self._file = self._events = self._tracker = None
        if not is_first():
            return
        # SummaryWriter writes in a thread of its own, which hides a failure and then waits forever.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "train.jsonl"
        lines = []
        for line in file.read_text().splitlines() if file.is_file() else ():
            with contextlib.suppress(json.JSONDecodeError):  # incomplete: the run was killed while it was written
                if json.loads(line)["step"] <= first_step:
                    lines.append(line + "\n")
        write_file(file, "".join(lines))
        self._file = file.open("a")
        (directory / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(directory / "tensorboard" / "events"))
        restart = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=time.time(), step=first_step + 1, session_log=restart))
        self._next_flush = 0.0
        self._tracker = make_tracker(track, directory)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._file is None or self._events is None:
            return
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboardX.summary import scalar

        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        for name, value in scalars.items():
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        if time.monotonic() >= self._next_flush:
            self._events.flush()
            self._next_flush = time.monotonic() + _FLUSH_EVERY
        if self._tracker is not None:
            self._tracker.log(scalars, step=step)

    def close(self) -> None:
        if self._file is not None and self._events is not None:
            self._file.close()
            self._events.close()
        if self._tracker is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._tracker.finish()


class Validation(NamedTuple):
    """Scalars of the parameters, logged after every `every` steps and after the last one."""

    scalars_of: Callable[[Any], dict[str, float]]
    every: int


@dataclasses.dataclass
class _DelayedMetrics:
    """Checks and logs the metrics of each step after the next step has started, so that the device is never idle."""

    log: TrainLog
    bar: Any
    steps: int
    context: RunContext
    pending: tuple[int, StepMetrics] | None = None
    tokens: float = 0.0
    begin: float = dataclasses.field(default_factory=time.perf_counter)

    def settle(self) -> None:
        """Waits for the step added last, if it is not settled; checks and logs its metrics."""
        if self.pending is None:
            return
        step, metrics = self.pending
        self.pending = None
        loss, count, norm = (float(x) for x in jax.device_get(metrics))
        # With a finite loss and a non-finite gradient the parameters are already invalid: no checkpoint may hold them.
        for name, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                problem = f"{self.context.title}: the {name} at step {step} is {value}"
                hint = f"checkpoints of earlier steps are in {self.context.require_directory()}/checkpoints"
                raise NonFiniteLossError(f"{problem}. Lower the learning rate or check the data; {hint}.")
        self.tokens += count
        rate = self.tokens / (time.perf_counter() - self.begin)
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()
        if step % LOG_EVERY == 0 or step == self.steps:
            self.log.write(step, {"loss": loss, "grad_norm": norm, "tokens_per_second": rate})


def train(
    step_fn: TrainStep,
    state: TrainState,
    frozen: Any,
    hyper: Mapping[str, Array],
    batches: grain.DatasetIterator,
    *,
    steps: int,
    context: RunContext,
    identity: dict[str, Any],
    checkpoint_every: int = 200,
    validation: Validation | None = None,
) -> TrainState:
    """Trains up to step `steps`, from the newest checkpoint in `context.directory` if there is one.

    A run that is killed at any moment and started again with the same arguments ends with bit-identical parameters:
    state, optimiser and position in the data come from the checkpoint, and every step is a pure function of them.

    Args:
        step_fn: result of `make_train_step`.
        state: before the first step; donated.
        frozen, hyper: arrays and scalars that the objective reads.
        batches: iterator over this process's rows of each batch, dicts of arrays.
        steps: number of steps in all, counted from a state that has not been trained.
        context: directory of checkpoints and logs, mesh that batches are placed on, progress and its title.
        identity: JSON-able description of the run, stored with the checkpoints.
        checkpoint_every: steps between checkpoints; the last step is always saved.
        validation: scalars of the parameters to log.

    Raises:
        NonFiniteLossError: a loss or gradient was not finite; checkpoints of earlier steps are kept.
        UserError: the directory holds checkpoints of another run.
    """
    context = context.titled(context.title or "training")
    directory = context.require_directory()
    checkpoints = Checkpoints(directory / "checkpoints", identity)
    restored = checkpoints.restore(state)
    if restored is not None:
        state, data_state = restored
        batches.set_state(data_state)
    start = int(state.step)
    log = TrainLog(directory, first_step=start, track=context.track)
    bar = context.bar(title=str(context.title), unit="step", total=steps, initial=start, mininterval=0.2)
    delayed = _DelayedMetrics(log, bar, steps, context)
    with finishing_steps() as stop_requested, contextlib.ExitStack() as exit_stack:
        for close in (checkpoints.close, log.close, bar.close):
            exit_stack.callback(close)
        for step in range(start + 1, steps + 1):
            batch = place_rows(context.mesh, next(batches))
            state, metrics = step_fn(state, frozen, batch, hyper)
            delayed.settle()  # the step before this one
            delayed.pending = (step, metrics)
            stops = stop_requested(step)
            saves = step == steps or stops or step % checkpoint_every == 0
            due = validation if validation and (step == steps or step % validation.every == 0) else None
            if due or saves:
                delayed.settle()
            if due:
                scalars = due.scalars_of(state.params)
                log.write(step, scalars)
                text = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scalars.items())
                if context.shows_progress:
                    bar.write(f"{context.title}: step {step:,} of {steps:,}: {text}", file=sys.stderr)
            if saves:
                checkpoints.save(state, batches.get_state(), step=step)
            if stops:
                break
    return state
