"""A tracker of a training run in addition to TensorBoard: Weights & Biases, where it is installed."""

import importlib.util
import json
import secrets
from pathlib import Path
from typing import Any, Literal

from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import write_file

TrackerName = Literal["tensorboard", "wandb"]


def check_tracker(name: TrackerName) -> None:
    """Raises `UserError` where a tracker is not installed."""
    if name != "tensorboard" and importlib.util.find_spec(name) is None:
        raise UserError(f"--track {name}: {name} is not installed: pip install 'calibjax[{name}]'.")


def make_tracker(name: TrackerName, directory: Path) -> Any:
    """A tracker of the run in `directory`, with methods `log(scalars, step=)` and `finish()`; None for TensorBoard.

    A run that resumes continues the tracked run: its identity is kept in `directory`. Where the scalars go, and whether
    a service is contacted, is set as the library documents (`WANDB_MODE=offline`, `WANDB_DIR`).
    """
    if name == "tensorboard":
        return None
    check_tracker(name)
    file = directory / "tracking.json"
    if not file.is_file():
        write_file(file, json.dumps({"run": secrets.token_hex(4)}) + "\n")
    identity = str(json.loads(file.read_text())["run"])
    title = "/".join(directory.absolute().parts[-3:])
    try:
        import wandb  # pyright: ignore[reportMissingImports]

        settings = wandb.Settings(console="off", silent=True)
        options: dict[str, Any] = {"id": identity, "resume": "allow", "dir": directory, "settings": settings}
        return wandb.init(project="calibjax", name=title, **options)
    except Exception as error:  # of the network, of a missing login: whatever goes wrong is the tracker's
        raise UserError(f"--track {name}: {first_line(error)}") from error
