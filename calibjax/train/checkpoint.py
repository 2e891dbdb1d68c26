"""Orbax checkpoints of a training run."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from calibjax.runtime.checksums import array_digests, different_names, json_digest, seal, unseal
from calibjax.runtime.distributed import is_first, together
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import check_orbax_path, check_plain_files
from calibjax.train.step import TrainState

_DATE = "a chat template that writes the date gives others every day"
_DESCRIPTIONS = {  # of the entries of a run's identity
    "sequences": f"the sequences of the data; {_DATE}",
    "tokens": f"tokens of the model and the sequences; {_DATE}",
}
_log = logging.getLogger(__name__)


class Checkpoints:
    """Asynchronous Orbax checkpoints of the trained state, the position in the data and `identity`, with checksums.

    `identity` is a JSON-able description of the run (configuration, fingerprint of the base model); a checkpoint of
    another run is refused on restore. The two newest checkpoints are kept.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]):
        check_orbax_path(directory)
        if directory.exists() and not directory.is_dir():
            raise UserError(f"{directory}: expected a directory of checkpoints, found a file. Remove or rename it.")
        check_plain_files(directory)
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports every save, and failures that it raises
        self._identity = json.loads(json.dumps(identity))
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=True, cleanup_tmp_directories=True
        )
        try:
            self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OSError) as error:
            reason = first_line(error)
            raise UserError(f"{directory} cannot be read ({reason}). Remove it to train from the start.") from error

    def save(self, state: TrainState, data_state: dict[str, Any], *, step: int) -> None:
        """Starts a save; it is on disk when the next one starts or `close` returns."""
        documents = {"data": data_state, "run": self._identity}
        digests = {name: json_digest(x) for name, x in documents.items()}
        checksums = {"arrays": array_digests(state), "jsons": digests}
        items = {name: ocp.args.JsonSave(value) for name, value in documents.items()}
        items["checksums"] = ocp.args.JsonSave(seal(checksums))
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), **items))

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest whole (state, data position), with the shapes and shardings of `state`; None without checkpoints.

        A step is whole if each of its arrays and JSON values has the checksum that it was saved with. Newer steps,
        which are damaged, are logged and removed, so that the run can save them again.

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
            if (stored := items["run"]) != self._identity:
                changed = different_names(stored, self._identity)
                names = sorted(str(_DESCRIPTIONS.get(key, key)) for key in changed)
                other = f"{self._manager.directory} holds checkpoints of another run (different: {', '.join(names)})"
                raise UserError(f"{other}. Choose another output directory, or remove this one.")
            try:
                restored = together(functools.partial(self._read_state, step, state, items["checksums"]["arrays"]))
            except UserError as error:
                damaged[step] = str(error)
                continue
            for number, reason in damaged.items():  # Orbax saves no step that is older than one it has
                if is_first():
                    damage = f"{self._manager.directory}: the checkpoint of step {number} is damaged ({reason})"
                    _log.warning("%s and is removed; resuming from step %d, the newest that is whole.", damage, step)
                self._manager.delete(number)
            return restored, items["data"]
        if damaged:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            directory = self._manager.directory
            raise UserError(f"{directory}: no checkpoint is whole ({reasons}). Remove it to train from the start.")
        return None

    def _read_jsons(self, step: int) -> dict[str, Any]:
        names = ("data", "run", "checksums")
        try:
            items = ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in names})
            values = dict(self._manager.restore(step, args=items).items())
            values["checksums"] = unseal(values["checksums"])
        except Exception as error:  # Orbax raises bare Exception for damaged files
            raise UserError(f"{', '.join(names)}: cannot be read: {first_line(error)}") from error
        expected = values["checksums"]["jsons"]
        different = [name for name in ("data", "run") if json_digest(values[name]) != expected[name]]
        if different:
            raise UserError(f"the checksum of {', '.join(different)} differs")
        return values

    def _read_state(self, step: int, state: TrainState, digests: dict[str, Any]) -> TrainState:
        template = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
        try:
            restored = TrainState(*self._manager.restore(step, args=ocp.args.Composite(state=template))["state"])
        except Exception as error:  # Orbax raises bare Exception for damaged files
            raise UserError(f"state: cannot be read: {first_line(error)}") from error
        if different := different_names(array_digests(restored), digests):
            raise UserError(f"the checksum of {', '.join(different[:5])} differs")
        return restored

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
