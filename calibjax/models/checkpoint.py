"""A model as an Orbax checkpoint: our parameter tree as it is, restored on any mesh, beside the usual small files.

The directory holds `params/` (Orbax), `calibjax.json`, and config.json with the tokenizer's files as they came.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from calibjax._checks import UserError
from calibjax._files import check_orbax_path, new_directory, write_file
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.export import DESCRIPTION, copy_settings
from calibjax.models.fingerprint import distinctive
from calibjax.models.model import LanguageModel
from calibjax.sharding import param_shardings

_SCHEMA = 1


def save_checkpoint(directory: Path, lm: LanguageModel, *, dtype: str) -> None:
    """Writes a model that `load_model` reads with no safetensors, each device its own part of the parameters.

    It is written beside `directory` first, and renamed when it is complete.

    Args:
        directory: new or empty.
        lm: a model that was loaded from a directory; its parameters are written in their own dtype.
        dtype: what `export.save_model` is to write it back in, to give the files it was read from.

    Raises:
        UserError: `directory` is not empty or cannot be written; or as `copy_settings`.
    """
    assert lm.path is not None
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save at length
    check_orbax_path(directory)
    description = {"schema": _SCHEMA, "fingerprint": lm.fingerprint, "dtype": dtype, "config": distinctive(lm.config)}
    with new_directory(directory) as fresh:
        copy_settings(lm.path, fresh, dtype)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", lm.params)
        write_file(fresh / DESCRIPTION, json.dumps(description, indent=2) + "\n")


def is_checkpoint(folder: Path) -> bool:
    """Whether `save_checkpoint` wrote this directory."""
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    """Returns what the checkpoint says of itself: schema, fingerprint, dtype and configuration.

    Raises:
        UserError: it says it in another way than this version does.
    """
    file = folder / DESCRIPTION
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        schema = description["schema"]
        complete = {"fingerprint", "dtype", "config"} <= description.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a checkpoint's description ({error!r}); convert the model again.") from error
    if schema != _SCHEMA or not complete:
        raise UserError(
            f"{file}: written with schema {schema}, this calibjax reads {_SCHEMA}; convert the model again."
        )
    return description


def restore_params(
    folder: Path, config: DecoderConfig, dtype: np.dtype, mesh: Mesh | None
) -> tuple[dict[str, Any], str]:
    """Reads a checkpoint's parameters, each device what it holds of them; returns them and the model's fingerprint.

    Raises:
        UserError: the checkpoint is damaged or not finite, or config.json is not the one it was made with.
    """
    description = read_description(folder)
    if description["config"] != distinctive(config):
        raise UserError(
            f"{folder}: config.json is not the one that the checkpoint was made with; convert the model again."
        )
    shapes = abstract_params(config, dtype)
    if mesh is None:
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
    else:
        shardings = param_shardings(mesh, shapes)
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    # What is read at once is held twice for a moment: not the whole model, as by default, but the largest parameter.
    stored = 2 if description["dtype"] == "bfloat16" else 4
    largest = stored * max(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    try:
        with ocp.StandardCheckpointer(restore_concurrent_gb=1 + largest // 10**9) as checkpointer:
            params = checkpointer.restore((folder / "params").absolute(), wanted)
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"{folder / 'params'}: cannot be read ({reason}); convert the model again.") from error
    if not all(jax.tree.leaves(jax.jit(_finite)(params))):
        raise UserError(f"{folder / 'params'} holds NaN or infinity, read in {dtype.name}.")
    return params, description["fingerprint"]


def _finite(params: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)
