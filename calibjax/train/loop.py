"""The loop: batches in, steps out, progress shown, everything resumable."""

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
from calibjax.train.state import TrainState
from calibjax.train.step import StepMetrics, TrainStep

LOG_EVERY = 10


class TrainLog:
    """Scalars of a run as JSON lines (`train.jsonl`) and TensorBoard events (`tensorboard/`), by the first process.

    Args:
        directory: made if missing.
        first_step: what an earlier, killed process logged from this step on is dropped: the steps are run again.
        track: a tracker that gets the scalars too.
    """

    def __init__(self, directory: Path, *, first_step: int, track: TrackerName = "tensorboard"):
        self._file = self._writer = self._tracker = None
        if not is_first():
            return
        from tensorboardX import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "train.jsonl"
        kept = []
        if file.is_file():
            for line in file.read_text().splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # the line that the kill cut short
                    continue
                if row["step"] <= first_step:
                    kept.append(line + "\n")
        write_file(file, "".join(kept))
        self._file = file.open("a")
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step + 1)
        self._tracker = make_tracker(track, directory)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._file is None or self._writer is None:
            return
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(scalars, step=step)

    def close(self) -> None:
        if self._file is not None and self._writer is not None:
            self._file.close()
            self._writer.close()
        if self._tracker is not None:
            self._tracker.finish()


class Evaluation(NamedTuple):
    """What is measured during training.

    Attributes:
        function: from parameters to scalars that are logged and shown.
        every: steps between two evaluations; the last step is always followed by one.
    """

    function: Callable[[Any], dict[str, float]]
    every: int


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
    title: str,
    checkpoint_every: int = 200,
    evaluation: Evaluation | None = None,
) -> TrainState:
    """Takes `steps` steps, from the newest checkpoint in `context.directory` if there is one.

    A run that was killed at any moment and is started again with the same arguments ends with bit-identical parameters:
    state, optimiser and position in the data come from the checkpoint, and every step is a pure function of them.

    Args:
        step_fn: made by `make_train_step`.
        state: the state before the first step; donated.
        frozen: arrays that the objective reads.
        hyper: scalars that the objective reads.
        batches: iterator over dicts of arrays with this process's rows of each batch; has `get_state` and `set_state`.
        steps: total number of steps, counted from the state before the first.
        context: directory of checkpoints and logs, mesh that batches are placed on, progress.
        identity: JSON-able description of the run, kept with the checkpoints.
        title: of the progress bar.
        checkpoint_every: steps between checkpoints; the last step is always kept.
        evaluation: what is measured during training; None: nothing.

    Returns:
        The state after the last step.

    Raises:
        NonFiniteLossError: names the first step whose loss or gradient was not finite; checkpoints before it are kept.
        UserError: the directory holds checkpoints of another run.
    """
    directory = context.require_directory()
    checkpoints = Checkpoints(directory / "checkpoints", identity)
    restored = checkpoints.restore(state)
    if restored is not None:
        state, data_state = restored
        batches.set_state(data_state)
    start = int(state.step)
    log = TrainLog(directory, first_step=start, track=context.track)
    bar = context.bar(title=title, unit="step", total=steps, initial=start, mininterval=0.2)
    tokens, begin = 0.0, time.perf_counter()

    def settle(number: int, metrics: StepMetrics) -> None:
        """Waits for a step and looks at it; called one step late, so that the device is never idle."""
        nonlocal tokens
        loss, count, norm = (float(x) for x in jax.device_get(metrics))
        # A finite loss with a gradient that is not has already spoilt the parameters, and must not reach a checkpoint.
        for name, value in (("loss", loss), ("norm of the gradient", norm)):
            if not math.isfinite(value):
                raise NonFiniteLossError(
                    f"{title}: the {name} at step {number} is {value}. Lower the learning rate or check the "
                    f"data; checkpoints of earlier steps are in {directory / 'checkpoints'}."
                )
        tokens += count
        rate = tokens / (time.perf_counter() - begin)
        bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
        bar.update()
        if number % LOG_EVERY == 0 or number == steps:
            log.write(number, {"loss": loss, "grad_norm": norm, "tokens_per_second": rate})

    try:
        pending: tuple[int, StepMetrics] | None = None
        with finishing_steps() as stop_requested:
            for number in range(start + 1, steps + 1):
                state, metrics = step_fn(state, frozen, place_rows(context.mesh, next(batches)), hyper)
                if pending is not None:
                    settle(*pending)
                pending = (number, metrics)
                last, stopping = number == steps, stop_requested()
                due = evaluation is not None and (last or number % evaluation.every == 0)
                keep = last or stopping or number % checkpoint_every == 0
                if due or keep:
                    settle(*pending)
                    pending = None
                if due and evaluation is not None:
                    scalars = evaluation.function(state.params)
                    log.write(number, scalars)
                    text = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scalars.items())
                    if context.shows_progress:
                        bar.write(f"{title}: step {number:,} of {steps:,}: {text}", file=sys.stderr)
                if keep:
                    checkpoints.save(state, batches.get_state(), step=number)
                if stopping:
                    break
    finally:
        bar.close()
        log.close()
        checkpoints.close()
    return state
