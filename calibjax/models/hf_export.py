"""Export of a parameter tree to a Hugging Face directory, with the original names, layouts and files."""

import json
import math
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from calibjax.models.config import DecoderConfig, Params
from calibjax.models.families import FAMILIES, text_settings
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.gguf import gguf_settings, is_gguf, read_gguf
from calibjax.models.hub import commit_of
from calibjax.models.rules import Rule
from calibjax.models.tokenizer import gguf_stop_tokens, gguf_tokenizer
from calibjax.runtime.checksums import CHECKSUMS
from calibjax.runtime.distributed import is_first, on_first, to_host
from calibjax.runtime.errors import UserError, require_directory
from calibjax.runtime.files import json_text, new_directory, write_file
from calibjax.runtime.platforms import torch_left_out

_FILE_BYTES = 2 * 10**9
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
DESCRIPTION = "calibjax.json"
"""Description file of an Orbax checkpoint, see `orbax_checkpoint.save_checkpoint`."""
_NOT_COPIED = ("*.safetensors.index.json", DESCRIPTION, CHECKSUMS)
_Tensor = tuple[Rule, tuple[int, ...]]  # its rule, and the index of layer and expert in our parameters


def save_model(
    directory: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    like: str | Path,
    dtype: DTypeLike = jnp.float32,
    replace: bool = False,
) -> None:
    """Writes a model that transformers and `load_model` can read. All processes of a job must call this.

    Tensors are fetched from the devices one at a time; the first process writes, and holds the tensors of one file.

    Args:
        directory: new or empty, or with `replace` an earlier export with the same files.
        config, params: of the decoder; the parameters may be sharded.
        like: GGUF file or directory of a model whose config.json and tokenizer files are copied; its configuration may
            differ from `config` in the soft-cap of the logits only.
        dtype: of the written tensors: float32, bfloat16 or float16.

    Raises:
        UserError: `like` is no model, `directory` cannot be written or replaced, or as for `settings_files`.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    directory, like = Path(directory), Path(like)
    source = like if is_gguf(like) else require_directory(like, "model")
    if not is_gguf(like) and not (source / "config.json").is_file():
        raise UserError(f"{source}: expected a Hugging Face model, but there is no config.json.")
    dtype, family = jnp.dtype(dtype), FAMILIES[config.family]
    with new_directory(directory, replace=replace) as fresh:
        on_first(lambda: copy_settings(source, fresh, dtype.name, softcap=config.logit_softcap))
        leaves = dict(dotted_leaves(params))
        tensors: dict[str, _Tensor] = {}
        for rule, layer in family.stored(config, leaves):
            for expert in rule.experts(config):
                index = tuple(i for i in (layer, expert) if i is not None)
                tensors[rule.full_name(family.prefix, layer, expert)] = rule, index

        def size(tensor: _Tensor) -> int:
            rule, index = tensor
            return sum(math.prod(leaves[target].shape[len(index) :]) for target in rule.targets) * dtype.itemsize

        split = split_state_dict_into_shards_factory(
            tensors, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=_FILE_BYTES
        )
        for file, names in split.filename_to_tensors.items():
            values = {}
            for name in names:
                rule, index = tensors[name]
                pieces = to_host([leaves[target][index] if index else leaves[target] for target in rule.targets])
                if is_first():
                    values[name] = np.ascontiguousarray(rule.layout(config).join(pieces)).astype(dtype)
            if is_first():
                save_file(values, fresh / file, metadata={"format": "pt"})
        if split.is_sharded and is_first():
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_file(fresh / "model.safetensors.index.json", json_text(index))


def settings_files(source: Path) -> list[Path]:
    """A model's configuration and tokenizer files, which are copied whenever its weights are written.

    Raises:
        UserError: one is a symbolic link to a file outside the model's directory, other than from a snapshot in the
            hub's cache to blobs of the same repository.
    """
    skipped = {file for pattern in _NOT_COPIED for file in source.glob(pattern)}
    files = sorted({file for pattern in _COPIED for file in source.glob(pattern)} - skipped)
    folder = Path(os.path.realpath(source))
    places = [folder] if commit_of(folder) is None else [folder, folder.parents[1] / "blobs"]
    for file in files:
        target = Path(os.path.realpath(file))
        is_inside = any(map(target.is_relative_to, places))
        leads_nowhere = file.is_symlink() and not target.is_file()
        if not is_inside or leads_nowhere:
            expected = f"expected a file in {folder}. Copy the file there or remove the link"
            raise UserError(f"{file} is a symbolic link to {target}: {expected}.")
    return [file for file in files if file.is_file()]


def copy_settings(source: Path, target: Path, dtype: str, *, softcap: float | None = None) -> None:
    """Copies `settings_files`, or writes them from a GGUF file's metadata, and writes config.json.

    config.json describes the language model with weights of `dtype`, not quantised, and with `softcap` if given.
    """
    if is_gguf(source):
        with torch_left_out():
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        file = read_gguf(source)
        settings = gguf_settings(file)
        written = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]], **settings}
        if "tokenizer.ggml.tokens" in file.metadata:
            gguf_tokenizer(source).save_pretrained(target)
            stops = {"eos_token_id": gguf_stop_tokens(source)}
            write_file(target / "generation_config.json", json.dumps(stops) + "\n")
    else:
        for file in settings_files(source):
            shutil.copy(file, target / file.name)
        written = text_settings(json.loads((source / "config.json").read_text(encoding="utf-8")))
    for name in ("torch_dtype", "quantization_config"):  # the first is the name before transformers 5
        written.pop(name, None)
    if softcap is not None and "final_logit_softcapping" in written:
        written["final_logit_softcapping"] = softcap
    write_file(target / "config.json", json_text({**written, "dtype": dtype}))
