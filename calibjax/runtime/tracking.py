"""Trackers of a training run beside TensorBoard: Weights & Biases and Trackio, where they are installed."""

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file

TrackerName = Literal["tensorboard", "wandb", "trackio"]
_PROJECT = "calibjax"


class Tracker:
    """Receives the scalars of steps; `run` is of the library. What the library prints goes to standard error."""

    def __init__(self, run: Any):
        self._run = run

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def check_tracker(name: TrackerName) -> None:
    """Raises `UserError` where a tracker is not installed."""
    import importlib.util

    if name != "tensorboard" and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name}: {name} is not installed: pip install 'calibjax[{name}]'.")


def make_tracker(name: TrackerName, directory: Path) -> Tracker | None:
    """A tracker of the run in `directory`; None for TensorBoard, which `TrainLog` writes itself.

    A run that resumes continues the tracked run: its identity is kept in `directory`. Where the scalars go, and whether
    a service is contacted, is set as each library documents (`WANDB_MODE=offline`, `WANDB_DIR`, `TRACKIO_DIR`).

    Raises:
        UserError: the tracker is not installed, or could not be started.
    """
    if name == "tensorboard":
        return None
    check_tracker(name)
    identity = _identity(directory / "tracking.json")
    title = "/".join(directory.absolute().parts[-3:])
    try:
        if name == "wandb":
            import wandb  # pyright: ignore[reportMissingImports]

            settings = wandb.Settings(console="off", silent=True)
            given: dict[str, Any] = {"id": identity, "resume": "allow", "dir": directory, "settings": settings}
            return Tracker(wandb.init(project=_PROJECT, name=title, **given))
        import trackio  # pyright: ignore[reportMissingImports]

        more: dict[str, Any] = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the command's
            trackio.init(project=_PROJECT, name=f"{title} {identity}", resume="allow", **more)
        return Tracker(trackio)  # the module's own `finish` also ends what it would do at exit
    except Exception as error:  # of the network, of a missing login: whatever goes wrong is the tracker's
        raise UserError(f"--track {name}: {next(iter(str(error).splitlines()), type(error).__name__)}") from error


def _identity(file: Path) -> str:
    if not file.is_file():
        write_file(file, json.dumps({"run": secrets.token_hex(4)}) + "\n")
    return str(json.loads(file.read_text())["run"])
