"""Loading of a `LanguageModel` from a directory or the Hugging Face hub, without unpickling or running any file."""

import hashlib
import json
import logging
from pathlib import Path

import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from calibjax.models.config import DecoderConfig
from calibjax.models.families import config_from_hf, config_from_settings
from calibjax.models.fingerprint import combine_digests
from calibjax.models.gguf import gguf_entries, gguf_settings, is_gguf, read_gguf
from calibjax.models.hf_read import TensorEntry, merge_mxfp4, plan_tensors, read_params
from calibjax.models.hub import download, repository_of
from calibjax.models.lora import merge_adapter
from calibjax.models.model import LanguageModel
from calibjax.models.orbax_checkpoint import is_checkpoint, read_description, restore_params
from calibjax.models.tokenizer import find_tokenizer
from calibjax.runtime.distributed import is_first, together
from calibjax.runtime.errors import UserError, require_directory
from calibjax.runtime.files import read_json
from calibjax.runtime.sharding import as_mesh

_DTYPES = ("float32", "bfloat16")
"""Not float16: hidden states of many models exceed its range, and JAX's attention requires a GPU for it."""
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# Subfolders and `consolidated*` hold the same weights in the authors' own layout.
_HUB_SKIPPED = ["*/*", "consolidated*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_log = logging.getLogger(__name__)


def load_model(
    path: str | Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None, *, adapter: str | Path | None = None
) -> LanguageModel:
    """Loads a causal language model from safetensors, GGUF or the output of `calibjax convert`.

    File names, headers and configuration are validated before any weight is read.

    Args:
        path: a directory in Hugging Face's layout (`config.json`, `model.safetensors` or its sharded index, tokenizer
            files), a GGUF file, an output directory of `calibjax convert`, or a model id on the hub, which is
            downloaded once; `org/name@revision` pins a branch, tag or commit.
        dtype: dtype of the weights and of computations: float32 or bfloat16. Files may also hold float16.
        mesh: devices, with axes among data, fsdp and tensor, that divide the weights; None: the default device.
        adapter: directory of a low-rank adapter of PEFT, which is merged into the weights.

    Returns:
        The model. Its fingerprint depends on the stored weights and the adapter, but not on `dtype`.

    Raises:
        UserError: the model does not exist; its architecture, configuration or tensors are not supported; files are
            missing, damaged or pickled; its tokenizer has ids beyond the vocabulary; or a weight is not finite. Files
            of the tokenizer other than tokenizer.json are read when `LanguageModel.tokenizer` is first used.
    """
    if dtype is None or not any(jnp.dtype(name) == dtype for name in _DTYPES):
        raise UserError(f"dtype: expected {' or '.join(_DTYPES)}, got {getattr(dtype, '__name__', dtype)}.")
    dtype = jnp.dtype(dtype)
    mesh = None if mesh is None else as_mesh(mesh)
    folder = _find_folder(path)
    if is_checkpoint(folder):
        description, config = read_description(folder), config_from_hf(folder)
        tokenizer = find_tokenizer(folder, config)
        params = restore_params(folder, description, config, dtype, mesh)
        fingerprint = description["fingerprint"]
    else:
        config = together(lambda: read_config(folder))
        pieces, left_out = together(lambda: plan_tensors(config, _read_entries(folder, config)))
        if left_out and is_first():
            parts = ", ".join(f"{part} ({count:,} tensors)" for part, count in sorted(left_out.items()))
            _log.warning("%s: the language model is loaded; left out: %s.", folder, parts)
        tokenizer = find_tokenizer(folder, config)
        params, digests = read_params(config, pieces, dtype, mesh)
        fingerprint = combine_digests(config, digests)
    if adapter is not None:
        params, digest = merge_adapter(config, params, require_directory(adapter, "adapter"))
        version, base = fingerprint.split(":")
        fingerprint = f"{version}:{hashlib.sha256(f'{base} {digest}'.encode()).hexdigest()}"
    tree = traverse_util.unflatten_dict(params, sep=".")
    return LanguageModel(config, tree, dtype, fingerprint, folder, tokenizer)


def stored_dtype(path: str | Path) -> str:
    """The common dtype of all stored weights if it is `"bfloat16"` or `"float16"`, else `"float32"`.

    For an output of `calibjax convert`, that of the files it was made from. For `path` and errors see `load_model`.
    """
    folder = _find_folder(path)
    if is_checkpoint(folder):
        return read_description(folder)["dtype"]
    kinds = {entry.dtype for entry in _read_entries(folder, read_config(folder))}
    kind = kinds.pop() if len(kinds) == 1 else "F32"
    return {"BF16": "bfloat16", "F16": "float16"}.get(kind, "float32")


def read_config(path: str | Path) -> DecoderConfig:
    """The configuration of the model in a directory or a GGUF file; for errors see `config_from_hf`."""
    if is_gguf(path):
        return config_from_settings(Path(path), gguf_settings(read_gguf(Path(path))))
    return config_from_hf(path)


def _read_entries(path: Path, config: DecoderConfig) -> list[TensorEntry]:
    return gguf_entries(path, config) if is_gguf(path) else _read_headers(_find_weights(path))


def _find_folder(path: str | Path) -> Path:
    if is_gguf(path):
        return Path(path)
    repository = repository_of(path)
    if repository is None:
        return require_directory(path, "model")
    return download(repository, "model", _HUB_FILES, _HUB_SKIPPED)


def _find_weights(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return _read_index(index)
    pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
    if pickles:
        reason = "They are not loaded because unpickling can run arbitrary code"
        convert = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted')"
        hint = f"If you trust them, convert them once with PyTorch and transformers: {convert}"
        raise UserError(f"{folder}: the weights are pickled ({', '.join(pickles[:3])}). {reason}. {hint}.")
    files = sorted(folder.glob("*.gguf"))
    hint = f" Give the GGUF file itself: {files[0]}." if files else ""
    raise UserError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither.{hint}")


def _read_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: expected a JSON object with a weight_map ({error!r}).") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise UserError(f"{index}: expected names of files in the same directory, got {outside[0]!r}.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} lists files that are missing: {', '.join(missing[:10])}. Download them again.")
    return [index.parent / name for name in names]


def _read_headers(files: list[Path]) -> list[TensorEntry]:
    entries = []
    for file in files:
        try:
            # `safe_open` refuses every header that is not valid, or whose tensors do not fill the file.
            with file.open("rb") as opened, safe_open(file, framework="numpy") as handle:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
                names = list(handle.keys())
            for name in names:
                stored = header[name]
                offset = 8 + length + stored["data_offsets"][0]
                entries.append(TensorEntry(name, tuple(stored["shape"]), stored["dtype"], file, offset))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{file}: damaged or cut short ({error}). Download it again.") from error
    return merge_mxfp4(entries)
