"""Orbax checkpoints of a run, and the finished head on disk."""

import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from calibjax.heads import FittedHead, HeadConfig, check_log_factor
from calibjax.models.hub import download, repository_of
from calibjax.models.own import FrozenModel
from calibjax.runtime.checksums import (
    array_digests,
    different_arrays,
    json_digest,
    read_checksums,
    seal,
    unseal,
    write_checksums,
)
from calibjax.runtime.distributed import is_first, on_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import check_orbax_path, check_plain_files, new_directory, read_json, write_file
from calibjax.train.portable import (
    AUTHORS,
    HEAD_SCHEMA,
    PORTABLE,
    PORTABLE_FILES,
    describe_head,
    read_authors_head,
    read_portable,
)
from calibjax.train.step import TrainState

_MOST_PARAMETERS = 2**31
_HEAD_REMEDY = "Restore the head from a copy, or fit it again."
_DATE = "a chat template that writes the date gives others every day"
_NAMES = {  # in the identities of runs
    "windows": f"the sequences of the data; {_DATE}",
    "tokens": f"tokens of the model and the sequences; {_DATE}",
}
_log = logging.getLogger(__name__)


class Checkpoints:
    """Asynchronous Orbax checkpoints: trained state, position in the data, what the run is, and checksums of all.

    `run` is a JSON-able description of the run (configuration, fingerprint of the base model), stored with every
    checkpoint; one of another run is refused on restore. `keep`: newest checkpoints kept.
    """

    def __init__(self, directory: Path, run: dict[str, Any], *, keep: int = 2):
        check_orbax_path(directory)
        if directory.exists() and not directory.is_dir():
            raise UserError(f"{directory}: expected a directory of checkpoints, found a file. Remove or rename it.")
        check_plain_files(directory)
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports every save, and failures that it raises
        self._run = json.loads(json.dumps(run))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        try:
            self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OSError) as error:
            raise UserError(
                f"{directory}: cannot be read ({_first_line(error)}). Remove it to train from the first step."
            ) from error

    def save(self, state: TrainState, data_state: dict[str, Any], *, step: int) -> None:
        """Starts a save; it is on disk when the next one starts or `close` returns."""
        jsons = {"data": data_state, "run": self._run}
        checksums = {
            "arrays": array_digests(state),
            "jsons": {name: json_digest(value) for name, value in jsons.items()},
        }
        items = {name: ocp.args.JsonSave(value) for name, value in jsons.items()}
        items["checksums"] = ocp.args.JsonSave(seal(checksums))
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), **items))

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest whole (state, data position), with the shapes and shardings of `state`; None without checkpoints.

        Each array and JSON value of a whole step has the checksum that it was saved with. Newer steps, which are not
        whole, are logged and removed: the run is to save them again.

        Raises:
            UserError: no step is whole, or the checkpoint belongs to a run with another configuration or base model.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                items = together(functools.partial(self._read_jsons, step))
            except UserError as error:
                damaged[step] = str(error)
                continue
            if (stored := items["run"]) != self._run:
                changed = (k for k in stored.keys() | self._run.keys() if stored.get(k) != self._run.get(k))
                different = sorted(str(_NAMES.get(key, key)) for key in changed)
                raise UserError(
                    f"{self._manager.directory} holds checkpoints of another run (different: {', '.join(different)}). "
                    "Choose another output directory, or remove this one."
                )
            try:
                restored = together(functools.partial(self._read_state, step, state, items["checksums"]["arrays"]))
            except UserError as error:
                damaged[step] = str(error)
                continue
            for number, reason in damaged.items():  # Orbax saves no step that is older than one it has
                if is_first():
                    _log.warning(
                        "%s: the checkpoint of step %d is damaged (%s); resuming from step %d, the newest that is "
                        "whole. The damaged one is removed.",
                        self._manager.directory,
                        number,
                        reason,
                        step,
                    )
                self._manager.delete(number)
            return restored, items["data"]
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise UserError(
                f"{self._manager.directory}: no checkpoint is whole ({reasons}). Remove this directory to train from "
                "the first step."
            )
        return None

    def _read_jsons(self, step: int) -> dict[str, Any]:
        names = ("data", "run", "checksums")
        try:
            items = ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in names})
            values = dict(self._manager.restore(step, args=items).items())
            values["checksums"] = unseal(values["checksums"])
        except Exception as error:  # Orbax raises bare Exception for damaged files
            raise UserError(f"{', '.join(names)}: cannot be read: {_first_line(error)}") from error
        expected = values["checksums"]["jsons"]
        if different := [name for name in ("data", "run") if json_digest(values[name]) != expected[name]]:
            raise UserError(f"the checksum of {', '.join(different)} differs")
        return values

    def _read_state(self, step: int, state: TrainState, digests: dict[str, Any]) -> TrainState:
        wanted = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
        try:
            restored = TrainState(*self._manager.restore(step, args=ocp.args.Composite(state=wanted))["state"])
        except Exception as error:  # Orbax raises bare Exception for damaged files
            raise UserError(f"state: cannot be read: {_first_line(error)}") from error
        if different := different_arrays(array_digests(restored), digests):
            raise UserError(f"the checksum of {', '.join(different[:5])} differs")
        return restored

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def save_head(directory: str | Path, head: FittedHead, *, notes: dict[str, Any] | None = None) -> None:
    """Writes a head: `params/` (Orbax), `head.json` (what it is, its base model's fingerprint, notes), and checksums.

    A head already there is replaced as a whole. Raises `UserError` if the directory holds anything but a head, or
    cannot be written.
    """
    directory = Path(directory)
    check_orbax_path(directory)
    digests = array_digests(head.params)
    description = describe_head(head, notes)
    with new_directory(directory, replace=True) as fresh:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", head.params)

        def describe() -> None:
            write_file(fresh / "head.json", json.dumps(description, indent=2) + "\n")
            write_checksums(fresh, digests)

        on_first(describe)


def load_head(path: str | Path, lm: FrozenModel | None = None) -> FittedHead:
    """Reads a head that `calibjax train ats`, `calibjax export` or `save_head` wrote.

    Args:
        path: the head's directory, or the run's directory that holds it as `head`; where nothing has this path, a
            repository of the Hugging Face Hub that `calibjax push` wrote, as `org/name` or `org/name@revision`. Or a
            directory of the code of arXiv 2409.19817: calibration_head.safetensors and config.json.
        lm: the base model to use it with; its fingerprint must be the one the head was fitted on.

    Returns:
        The head, its parameters on the host.

    Raises:
        UserError: no head there, an unreadable one, one that is not as it was written, or one of another base model.
    """
    if (Path(path) / AUTHORS).is_file():
        return read_authors_head(Path(path), lm)
    file = _head_file(path)
    directory = file.parent
    check_plain_files(directory)
    digests = read_checksums(directory, _HEAD_REMEDY)
    try:
        description = read_json(file)
        if (schema := description["schema"]) != HEAD_SCHEMA:
            raise ValueError(f"schema {schema}, this calibjax reads {HEAD_SCHEMA}")
        config = HeadConfig(**description["head"])
        log_factor, fingerprint = float(description["log_factor"]), str(description["base_fingerprint"])
        check_log_factor(log_factor)
        abstract = jax.eval_shape(config.init, jax.random.key(0))
        if (count := sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))) > _MOST_PARAMETERS:
            raise ValueError(f"a head of {count:,} parameters; expected at most {_MOST_PARAMETERS:,}")
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{file} is not a head's description ({error}). {_HEAD_REMEDY}") from error
    if lm is not None and fingerprint != lm.fingerprint:
        raise UserError(
            f"{directory}: this head was fitted on another base model (fingerprint {fingerprint[:12]}..., the model "
            f"given has {lm.fingerprint[:12]}...). Load the model it was fitted on, or fit a head for this one."
        )
    on_host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
    try:
        if (directory / PORTABLE).exists():
            params = read_portable(directory / PORTABLE, on_host)
        else:
            with ocp.StandardCheckpointer() as checkpointer:
                params = checkpointer.restore(directory.absolute() / "params", on_host)
        shapes, expected = (jax.tree.map(np.shape, tree) for tree in (params, on_host))
        if shapes != expected:  # onto the host, Orbax does not look
            raise ValueError(f"expected arrays of the shapes {expected}, found {shapes}")
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise ValueError("they are not finite")
        if different := different_arrays(array_digests(params), digests):
            raise ValueError(f"damaged: the checksum of {', '.join(different[:5])} differs")
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = _first_line(error)
        message = f"{directory / 'params'}: cannot read the head's parameters ({reason}). {_HEAD_REMEDY}"
        raise UserError(message) from error
    return FittedHead(config, params, log_factor, fingerprint if lm is None else lm.fingerprint)


def head_notes(path: str | Path) -> dict[str, Any]:
    """What `save_head` was given as notes: of `calibjax train ats`, the report of the fit. Raises as `load_head`."""
    file = _head_file(path)
    try:
        return dict(read_json(file)["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a head's description ({error}); fit the head again.") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def _head_file(path: str | Path) -> Path:
    repository = repository_of(path) if "/" in str(path) else None
    directory = Path(path) if repository is None else download(repository, "head", PORTABLE_FILES)
    if (directory / "head" / "head.json").is_file():
        directory = directory / "head"
    file = directory / "head.json"
    if not file.is_file():
        raise UserError(f"{path}: expected a head (head.json and params/) or a run that holds one; found none.")
    return file
