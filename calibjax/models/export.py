"""From our parameter tree back to a Hugging Face directory: the same names, layout and files as the model came in."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from calibjax._checks import UserError, require_directory
from calibjax.distributed import is_first, on_first, to_host
from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.rules import Layout, Rule

_SHARD_BYTES = 5 * 10**9
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
DESCRIPTION = "calibjax.json"
"""What `checkpoint.save_checkpoint` says of its directory."""
_NOT_COPIED = ("*.safetensors.index.json", DESCRIPTION)


def save_model(
    directory: Path,
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    like: Path,
    dtype: DTypeLike = jnp.float32,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model that transformers, and `load_model`, read as they read the one it was made from.

    Tensors are fetched from the devices one at a time; the host holds one file's worth. A directory already there is
    replaced as a whole: the new one is written beside it first. All processes of a job call it; the first one writes.

    Args:
      directory: Where to.
      config: What the decoder is.
      params: Its parameters, as `init_params` shapes them; may be divided among devices.
      like: Directory of a model of the same configuration: its config.json and tokenizer files are copied.
      dtype: Of the tensors written: float32, bfloat16 or float16.
      shard_bytes: Largest size of one file of weights.

    Raises:
      UserError: `like` is no such directory.
    """
    source = require_directory(like, "model")
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: expected a Hugging Face model, but there is no config.json.")
    dtype = jnp.dtype(dtype)
    directory = directory.absolute()
    fresh = directory.with_name(directory.name + ".new")

    def begin() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        copy_settings(source, fresh, dtype.name)

    on_first(begin)
    leaves = dict(dotted_leaves(params))
    files: list[list[tuple[Rule, str, int | None]]] = [[]]
    held = total = 0
    for rule, name, layer in _tensors(config, leaves):
        shapes = [leaves[target].shape[0 if layer is None else 1 :] for target in rule.targets]
        size = sum(int(np.prod(shape)) for shape in shapes) * dtype.itemsize
        if files[-1] and held + size > shard_bytes:
            files.append([])
            held = 0
        files[-1].append((rule, name, layer))
        held, total = held + size, total + size
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= {name: file for _, name, _ in tensors}
        values = {
            name: _assemble(rule, rule.layout(config.num_heads), layer, leaves, dtype) for rule, name, layer in tensors
        }
        if is_first():
            save_file(values, fresh / file, metadata={"format": "pt"})

    def finish() -> None:
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (fresh / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        fresh.rename(directory)

    on_first(finish)


def copy_settings(source: Path, target: Path, dtype: str) -> None:
    """Copies a model's configuration and tokenizer files; `dtype` is said to be that of the weights."""
    skipped = {file for pattern in _NOT_COPIED for file in source.glob(pattern)}
    for file in {file for pattern in _COPIED for file in source.glob(pattern)} - skipped:
        shutil.copy(file, target / file.name)
    written = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written.pop("torch_dtype", None)  # the name before transformers 5
    (target / "config.json").write_text(json.dumps({**written, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _tensors(config: DecoderConfig, leaves: Mapping[str, Any]) -> Iterator[tuple[Rule, str, int | None]]:
    """Every tensor of the checkpoint: its rule, its name there, and which layer it is of."""
    family = FAMILIES[config.family]
    for rule in family.rules:
        if not all(target in leaves for target in rule.targets):
            continue
        stacked = rule.targets[0].startswith("layers.")
        for layer in range(config.num_layers) if stacked else (None,):
            yield rule, rule.full_name(family.prefix, layer), layer


def _assemble(rule: Rule, layout: Layout, layer: int | None, leaves: Mapping[str, Any], dtype: np.dtype) -> np.ndarray:
    pieces = [leaves[target] if layer is None else leaves[target][layer] for target in rule.targets]
    joined = layout.join(to_host(pieces))
    return np.ascontiguousarray(joined).astype(dtype)
