"""Models as Orbax checkpoints of our parameter tree, which restore on any mesh.

The directory holds `params/` (Orbax), `calibjax.json`, config.json, the tokenizer's files, and `checksums.json`, which
covers all of them.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, SingleDeviceSharding

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.fingerprint import (
    by_layer,
    combine_digests,
    distinctive,
    dotted_leaves,
    join_digests,
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

_SCHEMA = 3  # version of the description

_REMEDY = "Convert the model again."


def save_checkpoint(
    directory: Path, lm: LanguageModel, *, dtype: str, tensor_dtypes: Mapping[str, str] | None = None
) -> None:
    """Writes a model as an Orbax checkpoint in a new or empty directory, to which each device contributes its part.

    Args:
        directory: output directory.
        lm: a model that was loaded from a directory; its parameters are written in their own dtype.
        dtype, tensor_dtypes: dtypes in the original files, of which the fingerprint is; see `load.stored_dtype` and
            `load.tensor_dtypes`.
    """
    import orbax.checkpoint as ocp

    assert lm.path is not None
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every save, and failures that it raises
    check_orbax_path(directory)
    description: dict[str, Any] = {"schema": _SCHEMA, "dtype": dtype, "tensor_dtypes": dict(tensor_dtypes or {})}
    digests = {}
    with new_directory(directory) as fresh:
        copy_settings(lm.path, fresh, dtype)
        with ocp.StandardCheckpointer() as checkpointer, ThreadPoolExecutor(os.cpu_count()) as pool:
            checkpointer.save(fresh / "params", lm.params)  # asynchronous; digests are computed meanwhile
            for path, leaf in dotted_leaves(lm.params):
                digests |= _digests(pool, by_layer(path, np.asarray(leaf)), description)
        description["fingerprint"] = combine_digests(lm.config, digests)
        description |= {"config": distinctive(lm.config), "checksums": CHECKSUMS}
        write_file(fresh / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        write_checksums(fresh, digests)


def is_checkpoint(folder: Path) -> bool:
    """Whether the directory is a checkpoint of `save_checkpoint`."""
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    """Returns the description of a checkpoint, with the checksums of its tensors under `tensors`.

    Raises:
        UserError: the description is invalid or has another schema, or a file of the checkpoint has changed.
    """
    file = folder / DESCRIPTION
    check_plain_files(folder)
    checksums = read_checksums(folder, _REMEDY)
    try:
        description = read_json(file)
        if description["schema"] != _SCHEMA:
            raise ValueError(f"schema {description['schema']}, expected {_SCHEMA}")
        dtypes = {description["dtype"], *description["tensor_dtypes"].values()}
        if not dtypes <= {"float32", "bfloat16", "float16"} or not {"fingerprint", "config"} <= description.keys():
            raise ValueError(f"dtypes {dtypes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a checkpoint's description ({error!r}). {_REMEDY}") from error
    return {**description, "tensors": checksums}


def restore_params(
    folder: Path, description: Mapping[str, Any], config: DecoderConfig, dtype: np.dtype, mesh: Mesh | None
) -> tuple[dict[str, Any], str]:
    """Reads and verifies the parameters of a checkpoint; returns them by dotted path, and the fingerprint.

    The host holds one whole parameter at a time. With several processes, each reads all parameters and hashes some of
    the tensors.

    Raises:
        UserError: the checkpoint is damaged or not finite, or config.json has changed.
    """
    import orbax.checkpoint as ocp

    if description["config"] != distinctive(config):
        raise UserError(f"{folder}: config.json is not the one that the checkpoint was made with. {_REMEDY}")
    stored = jnp.dtype("bfloat16" if description["dtype"] == "bfloat16" else "float32")
    leaves = dict(dotted_leaves(abstract_params(config, stored)))
    names = [name for path, leaf in leaves.items() for name in by_layer(path, range(leaf.shape[0]))]
    own = set(names[jax.process_index() :: jax.process_count()])
    # Orbax briefly holds two copies of what it reads at once.
    largest = stored.itemsize * max(math.prod(leaf.shape) for leaf in leaves.values())
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1 + largest // 10**9)
    params, digests, default = {}, {}, SingleDeviceSharding(jax.devices()[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool, ocp.Checkpointer(handler) as checkpointer:
        for path, array in _read_arrays(checkpointer, folder / "params", leaves):
            pieces = {name: piece for name, piece in by_layer(path, array).items() if name in own}
            digests |= _digests(pool, pieces, description)
            with np.errstate(over="ignore"):
                array = array.astype(dtype, copy=False)
            sharding = default if mesh is None else param_sharding(mesh, path, array.shape)
            params[path] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    digests = join_digests(digests, names)
    if different := different_arrays(digests, description["tensors"]):
        raise UserError(f"{folder / 'params'}: damaged (the checksum of {', '.join(different[:5])} differs). {_REMEDY}")
    fingerprint = combine_digests(config, digests)
    if fingerprint != description["fingerprint"]:
        raise UserError(f"{folder}: the weights do not have the fingerprint in {DESCRIPTION}. {_REMEDY}")
    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    if not all(finite.values()):
        raise UserError(f"{folder / 'params'} holds NaN or infinity, read as {dtype.name}.")
    return params, fingerprint


def _read_arrays(
    checkpointer: "ocp.Checkpointer", folder: Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields whole parameters on the host with dotted paths. All shapes are checked before the first is read."""
    import orbax.checkpoint as ocp

    try:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        if metadata is None:
            raise ValueError("no metadata")
        stored = {path: (tuple(array.shape), jnp.dtype(array.dtype)) for path, array in dotted_leaves(metadata.tree)}
        for path, leaf in leaves.items():
            if stored.get(path) != (leaf.shape, leaf.dtype):
                raise ValueError(f"{path}: expected {leaf.shape} of {leaf.dtype}, got {stored.get(path)}")
        for path, leaf in leaves.items():
            item = traverse_util.unflatten_dict({path: np.empty((), leaf.dtype)}, sep=".")
            as_numpy = traverse_util.unflatten_dict({path: ocp.RestoreArgs(restore_type=np.ndarray)}, sep=".")
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
            yield from dotted_leaves(checkpointer.restore(folder.absolute(), args=arguments))
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise UserError(f"{folder}: cannot be read ({reason}). {_REMEDY}") from error


def _digests(
    pool: ThreadPoolExecutor, pieces: Mapping[str, np.ndarray], description: Mapping[str, Any]
) -> dict[str, str]:
    """The digest of each piece in the dtype of its original file."""

    def digest(name: str) -> str:
        dtype = description["tensor_dtypes"].get(name, description["dtype"])
        return tensor_digest(name, pieces[name].astype(jnp.dtype(dtype), copy=False))

    return dict(zip(pieces, pool.map(digest, pieces), strict=True))
