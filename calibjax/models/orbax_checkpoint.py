"""Models as Orbax checkpoints of our parameter tree, which restore on any mesh.

The directory holds `params/` (Orbax), calibjax.json, config.json, the tokenizer's files, and checksums.json of all.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, SingleDeviceSharding

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.fingerprint import distinctive, dotted_leaves
from calibjax.models.hf_export import DESCRIPTION, copy_settings
from calibjax.models.model import LanguageModel
from calibjax.runtime.checksums import array_digests, different_names, read_checksums, write_checksums
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import check_orbax_path, check_plain_files, json_text, new_directory, read_json, write_file
from calibjax.runtime.sharding import param_sharding

# Orbax is imported where it is used: a model of safetensors needs none of it, a sixth of what `load_model` imports.

_SCHEMA = 4  # version of the description
_REMEDY = "Convert the model again."


def save_checkpoint(directory: Path, lm: LanguageModel, *, dtype: str) -> None:
    """Writes a model as an Orbax checkpoint in a new or empty directory, to which each device contributes its part.

    `dtype` names the dtype of the files that `lm` was loaded from (`load.stored_dtype`); parameters keep their own.
    """
    import orbax.checkpoint as ocp

    assert lm.path is not None
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every save, and failures that it raises
    check_orbax_path(directory)
    description = {"schema": _SCHEMA, "dtype": dtype, "fingerprint": lm.fingerprint, "config": distinctive(lm.config)}
    with new_directory(directory) as fresh:
        copy_settings(lm.path, fresh, dtype)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", lm.params)  # asynchronous; digests are computed meanwhile
            digests = array_digests(lm.params)
        write_file(fresh / DESCRIPTION, json_text(description))
        write_checksums(fresh, digests)


def is_checkpoint(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    """The description of a checkpoint, with the checksums of its parameters under `arrays`.

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
        if description["dtype"] not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {description['dtype']}")
        return {**description, "fingerprint": str(description["fingerprint"]), "arrays": checksums}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a checkpoint's description ({error!r}). {_REMEDY}") from error


def restore_params(
    folder: Path, description: Mapping[str, Any], config: DecoderConfig, dtype: np.dtype, mesh: Mesh | None
) -> dict[str, jax.Array]:
    """Reads the parameters of a checkpoint one by one, in each process the part it needs; returns them by dotted path.

    Raises:
        UserError: the checkpoint is damaged or not finite, or config.json has changed.
    """
    import orbax.checkpoint as ocp

    if description.get("config") != distinctive(config):
        raise UserError(f"{folder}: config.json is not the one that the checkpoint was made with. {_REMEDY}")
    stored = jnp.dtype("bfloat16" if description["dtype"] == "bfloat16" else "float32")
    default = SingleDeviceSharding(jax.devices()[0])
    file, params, digests = (folder / "params").absolute(), {}, {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:

        def read(path: str, shape: tuple[int, ...]) -> jax.Array:
            sharding = default if mesh is None else param_sharding(mesh, path, shape)
            tree = traverse_util.unflatten_dict({path: jax.ShapeDtypeStruct(shape, stored, sharding=sharding)}, ".")
            arguments = ocp.checkpoint_utils.construct_restore_args(tree)
            options = ocp.args.PyTreeRestore(item=tree, restore_args=arguments, partial_restore=True)
            try:
                return dict(dotted_leaves(checkpointer.restore(file, args=options)))[path]
            except Exception as error:  # Orbax raises bare Exception for damaged files
                raise UserError(f"{file}: cannot be read ({first_line(error)}). {_REMEDY}") from error

        for path, leaf in dotted_leaves(abstract_params(config)):
            array = together(lambda path=path, leaf=leaf: read(path, leaf.shape))
            digests |= array_digests({path: array})
            params[path] = array.astype(dtype)
    if different := different_names(digests, description["arrays"]):
        raise UserError(f"{folder / 'params'}: damaged (the checksum of {', '.join(different[:5])} differs). {_REMEDY}")
    finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(params)
    if not all(finite.values()):
        raise UserError(f"{folder / 'params'} holds NaN or infinity, read as {dtype.name}. {_REMEDY}")
    return params
