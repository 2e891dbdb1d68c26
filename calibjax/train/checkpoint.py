"""Orbax checkpoints of a run, and the finished head on disk."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from calibjax._checks import UserError
from calibjax._files import check_orbax_path, new_directory, write_file
from calibjax.distributed import on_first
from calibjax.heads import FittedHead, HeadConfig, check_log_factor
from calibjax.models import LanguageModel
from calibjax.train.state import TrainState

_HEAD_SCHEMA = 1


class Checkpoints:
    """Asynchronous Orbax checkpoints: trained state, position in the data, and what the run is.

    Args:
        directory: made if missing.
        run: JSON-able description of the run (configuration, fingerprint of the base model), kept with every
            checkpoint; a checkpoint of another run is refused on restore.
        keep: newest checkpoints kept.

    Raises:
        UserError: as `check_orbax_path`.
    """

    def __init__(self, directory: Path, run: dict[str, Any], *, keep: int = 2):
        check_orbax_path(directory)
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save at length
        self._run = json.loads(json.dumps(run))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, state: TrainState, data_state: dict[str, Any], *, step: int) -> None:
        """Starts a save; it is on disk when the next one starts or `close` returns."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state), run=ocp.args.JsonSave(self._run)
        )
        self._manager.save(step, args=items)

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest (state, data position), with the shapes and shardings of `state`; None where there is none.

        Raises:
            UserError: the checkpoint belongs to a run with another configuration or base model.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        stored = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        if stored != self._run:
            different = sorted(k for k in stored.keys() | self._run.keys() if stored.get(k) != self._run.get(k))
            raise UserError(
                f"{self._manager.directory} holds checkpoints of another run (different: {', '.join(different)}). "
                "Choose another output directory, or remove this one."
            )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)),
            data=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        return TrainState(*restored["state"]), restored["data"]

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def save_head(directory: Path, head: FittedHead, *, notes: dict[str, Any] | None = None) -> None:
    """Writes a head: `params/` (Orbax) and `head.json` (what it is, its base model's fingerprint, notes).

    A head already there is replaced as a whole: the new one is written beside it first.

    Raises:
        UserError: the directory holds anything but a head, or cannot be written.
    """
    check_orbax_path(directory)
    description = {
        "schema": _HEAD_SCHEMA,
        "head": dataclasses.asdict(head.config),
        "log_factor": head.log_factor,
        "base_fingerprint": head.fingerprint,
        "notes": notes or {},
    }
    with new_directory(directory, replace=True) as fresh:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", head.params)
        on_first(lambda: write_file(fresh / "head.json", json.dumps(description, indent=2) + "\n"))


def load_head(path: str | Path, lm: LanguageModel | None = None) -> FittedHead:
    """Reads a head that `calibjax train ats` or `save_head` wrote.

    Args:
        path: the head's directory, or the run's directory that holds it as `head`.
        lm: the base model to use it with; its fingerprint must be the one the head was fitted on.

    Returns:
        `FittedHead`, its parameters on the host: they go with a model on any devices.

    Raises:
        UserError: no head there, an unreadable one, or one of another base model.
    """
    file = _head_file(path)
    directory = file.parent
    try:
        description = json.loads(file.read_text())
        if description["schema"] != _HEAD_SCHEMA:
            raise UserError(
                f"{file}: written with schema {description['schema']}, this calibjax reads {_HEAD_SCHEMA}: use the "
                "version that wrote it, or fit the head again."
            )
        config = HeadConfig(**description["head"])
        log_factor, fingerprint = float(description["log_factor"]), str(description["base_fingerprint"])
        abstract = jax.eval_shape(config.init, jax.random.key(0))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a head's description ({error}); fit the head again.") from error
    try:
        check_log_factor(log_factor)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if lm is not None and lm.fingerprint != fingerprint:
        raise UserError(
            f"{directory}: this head was fitted on another base model (fingerprint {fingerprint[:12]}..., the model "
            f"given has {lm.fingerprint[:12]}...). Load the model it was fitted on, or fit a head for this one."
        )
    on_host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(directory.absolute() / "params", on_host)
        found, expected = (jax.tree.map(np.shape, tree) for tree in (params, on_host))
        if found != expected:  # onto the host, Orbax does not look
            raise ValueError(f"expected arrays of the shapes {expected}, found {found}")
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"{directory / 'params'}: cannot read the head's parameters ({reason}).") from error
    return FittedHead(config, params, log_factor, fingerprint)


def head_notes(path: str | Path) -> dict[str, Any]:
    """What `save_head` was given as notes: of `calibjax train ats`, the report of the fit. Raises as `load_head`."""
    file = _head_file(path)
    try:
        return dict(json.loads(file.read_text())["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a head's description ({error}); fit the head again.") from error


def _head_file(path: str | Path) -> Path:
    directory = Path(path)
    if (directory / "head" / "head.json").is_file():
        directory = directory / "head"
    file = directory / "head.json"
    if not file.is_file():
        raise UserError(f"{path}: expected a head (head.json and params/) or a run that holds one; found none.")
    return file
