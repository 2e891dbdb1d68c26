"""Models as Orbax checkpoints of our parameter tree, which restore on any mesh.

The directory holds `params/` (Orbax), `calibjax.json`, config.json, the tokenizer's files, and `checksums.json`, which
covers all of them.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.fingerprint import (
    combine_digests,
    distinctive,
    dotted_leaves,
    first_tensor_digest,
    join_digests,
    layer_name,
    tensor_digest,
)
from calibjax.models.hf_export import DESCRIPTION, copy_settings
from calibjax.models.model import LanguageModel
from calibjax.runtime.checksums import CHECKSUMS, different_arrays, read_checksums, write_checksums
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import check_orbax_path, check_plain_files, new_directory, read_json, write_file
from calibjax.runtime.sharding import param_sharding

# Imported where it is used: a model of safetensors needs none of it, a sixth of what `load_model` imports.
if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_SCHEMA = 3
"""Version of the description. Schema 1 has digests and the fingerprint of version 1."""

_REMEDY = "Convert the model again."
_log = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path, lm: LanguageModel, *, dtype: str, tensor_dtypes: Mapping[str, str] | None = None
) -> None:
    """Writes a model as an Orbax checkpoint, to which each device contributes its part of the parameters.

    It is written to a temporary directory that is renamed to `directory` when it is complete.

    Args:
        directory: output directory, new or empty.
        lm: a model that was loaded from a directory; its parameters are written in their own dtype.
        dtype: common dtype of the tensors in the original files, see `load.stored_dtype`.
        tensor_dtypes: dtypes of the tensors that the original files hold in another dtype, by name. The fingerprint is
            that of the tensors in the dtypes of the original files.

    Raises:
        UserError: if `directory` is not empty or cannot be written, or as for `copy_settings`.
    """
    import orbax.checkpoint as ocp

    assert lm.path is not None
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every save, and failures that it raises
    check_orbax_path(directory)
    dtypes = dict(tensor_dtypes or {})
    digests = {}
    with new_directory(directory) as fresh:
        copy_settings(lm.path, fresh, dtype)
        with ocp.StandardCheckpointer() as checkpointer, ThreadPoolExecutor(os.cpu_count()) as pool:
            checkpointer.save(fresh / "params", lm.params)  # asynchronous; digests are computed meanwhile
            for path, leaf in dotted_leaves(lm.params):
                started = _start_digests(pool, _by_name(path, np.asarray(leaf)), dtypes, dtype, _SCHEMA)
                digests |= {name: digest for name, (digest, _) in _results(started).items()}
        description = {
            "schema": _SCHEMA,
            "fingerprint": combine_digests(lm.config, digests),
            "dtype": dtype,
            "tensor_dtypes": dtypes,
            "config": distinctive(lm.config),
            "checksums": CHECKSUMS,
        }
        write_file(fresh / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        write_checksums(fresh, digests)


def is_checkpoint(folder: Path) -> bool:
    """Whether the directory is a checkpoint of `save_checkpoint`."""
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    """Returns the description of a checkpoint: schema, fingerprint, dtypes, configuration, checksums of its tensors.

    The checksums, under `tensors`, are `None` in checkpoints of earlier versions.

    Raises:
        UserError: if the description is invalid or has another schema, or a file of the checkpoint has changed.
    """
    file = folder / DESCRIPTION
    check_plain_files(folder)
    checksums = read_checksums(folder, _REMEDY)
    try:
        description = read_json(file)
        schema = description["schema"]
        complete = {"fingerprint", "dtype", "config"} <= description.keys()
        dtypes = {description.get("dtype"), *description.get("tensor_dtypes", {}).values()}
        if complete and not dtypes <= {"float32", "bfloat16", "float16"}:
            raise ValueError(f"dtypes {dtypes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a checkpoint's description ({error!r}); convert the model again.") from error
    if schema not in (1, _SCHEMA) or not complete:
        raise UserError(
            f"{file}: written with schema {schema}, this calibjax reads 1 and {_SCHEMA}; convert the model again."
        )
    if checksums is None and "checksums" in description:
        raise UserError(f"{folder / CHECKSUMS} is missing. {_REMEDY}")
    return {**description, "tensors": checksums}


def restore_params(
    folder: Path, description: Mapping[str, Any], config: DecoderConfig, dtype: np.dtype, mesh: Mesh | None
) -> tuple[dict[str, Any], str]:
    """Reads and verifies the parameters of a checkpoint; returns them and the fingerprint of the values read.

    The host reads one whole parameter at a time and hashes the previous one meanwhile, so it holds two. With several
    processes, each reads all parameters and hashes some of the tensors.

    Args:
        folder: directory written by `save_checkpoint`.
        description: result of `read_description`.
        config: configuration from config.json.
        dtype: dtype that the parameters are cast to.
        mesh: devices to divide the parameters among; `None` for the default device.

    Raises:
        UserError: if the checkpoint is damaged or not finite, or config.json has changed.
    """
    import orbax.checkpoint as ocp

    expected = description["tensors"]
    if description["config"] != distinctive(config):
        raise UserError(
            f"{folder}: config.json is not the one that the checkpoint was made with; convert the model again."
        )
    stored = jnp.dtype("bfloat16" if description["dtype"] == "bfloat16" else "float32")
    leaves = dict(dotted_leaves(abstract_params(config, stored)))
    names = [name for path, leaf in leaves.items() for name in _by_name(path, range(leaf.shape[0]))]
    mine = set(names[jax.process_index() :: jax.process_count()])
    # Orbax briefly holds two copies of what it reads at once.
    largest = stored.itemsize * max(math.prod(leaf.shape) for leaf in leaves.values())
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1 + largest // 10**9)
    params, digests = {}, {}
    pending: dict[str, Future[tuple[str, str]]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool, ocp.Checkpointer(handler) as checkpointer:
        for path, array in _read_arrays(checkpointer, folder / "params", leaves):
            digests |= _results(pending)
            pieces = {name: piece for name, piece in _by_name(path, array).items() if name in mine}
            pending = _start_digests(
                pool, pieces, description.get("tensor_dtypes", {}), description["dtype"], description["schema"]
            )
            with np.errstate(over="ignore"):
                params[path] = _place(array.astype(dtype, copy=False), path, mesh)
        digests |= _results(pending)
    now = join_digests({name: digest for name, (digest, _) in digests.items()}, names)
    digests = join_digests({name: digest for name, (_, digest) in digests.items()}, names)
    fingerprint = combine_digests(config, digests, description["schema"])
    if expected is not None and (different := different_arrays(digests, expected)):
        raise UserError(f"{folder / 'params'}: damaged (the checksum of {', '.join(different[:5])} differs). {_REMEDY}")
    if fingerprint != description["fingerprint"]:
        # Earlier versions did not record dtypes per tensor, which the fingerprint depends on.
        if expected is not None or description["dtype"] != "float32":
            raise UserError(f"{folder}: the weights do not have the fingerprint in {DESCRIPTION}. {_REMEDY}")
        _log.warning("%s: converted by an earlier version, without checksums; it is not verified.", folder)
        return _finished(params, dtype, folder), description["fingerprint"]
    return _finished(params, dtype, folder), combine_digests(config, now)


def _finished(params: Mapping[str, jax.Array], dtype: np.dtype, folder: Path) -> dict[str, Any]:
    if not all(jax.tree.leaves(jax.jit(_finite)(params))):
        raise UserError(f"{folder / 'params'} holds NaN or infinity, read as {dtype.name}.")
    return traverse_util.unflatten_dict(params, sep=".")


def _read_arrays(
    checkpointer: "ocp.Checkpointer", folder: Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields whole parameters on the host with dotted paths. All shapes are checked before the first is read."""
    import orbax.checkpoint as ocp

    try:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        if metadata is None:
            raise ValueError("no metadata")
        found = {path: (tuple(array.shape), jnp.dtype(array.dtype)) for path, array in dotted_leaves(metadata.tree)}
        for path, leaf in leaves.items():
            if found.get(path) != (leaf.shape, leaf.dtype):
                raise ValueError(f"{path}: expected {leaf.shape} of {leaf.dtype}, found {found.get(path)}")
        for path, leaf in leaves.items():
            item = traverse_util.unflatten_dict({path: np.empty((), leaf.dtype)}, sep=".")
            as_numpy = traverse_util.unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)}, sep=".")
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
            yield from dotted_leaves(checkpointer.restore(folder.absolute(), args=arguments))
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise UserError(f"{folder}: cannot be read ({reason}). {_REMEDY}") from error


def _place(array: np.ndarray, path: str, mesh: Mesh | None) -> jax.Array:
    if mesh is None:
        return jax.device_put(array, jax.devices()[0])
    return jax.make_array_from_callback(
        array.shape, param_sharding(mesh, path, array.shape), lambda index: array[index]
    )


def _by_name(path: str, array: Any) -> dict[str, Any]:
    """Tensors of the parameter at `path` by the names of their digests; stacked tensors layer by layer."""
    return (
        {layer_name(path, i): piece for i, piece in enumerate(array)} if path.startswith("layers.") else {path: array}
    )


def _start_digests(
    pool: ThreadPoolExecutor, pieces: Mapping[str, np.ndarray], dtypes: Mapping[str, str], dtype: str, schema: int
) -> "dict[str, Future[tuple[str, str]]]":
    """Starts the computation of the digest of each piece, and of its digest in the version of `schema`."""

    def digest(name: str, piece: np.ndarray) -> tuple[str, str]:
        piece = piece.astype(jnp.dtype(dtypes.get(name, dtype)), copy=False)
        now = tensor_digest(name, piece)
        return now, first_tensor_digest(name, piece) if schema == 1 else now

    return {name: pool.submit(digest, name, piece) for name, piece in pieces.items()}


def _results(pending: "Mapping[str, Future[tuple[str, str]]]") -> dict[str, tuple[str, str]]:
    return {name: future.result() for name, future in pending.items()}


def _finite(params: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)
