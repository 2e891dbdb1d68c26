"""Loading of a `LanguageModel` from a directory or the Hugging Face hub, without unpickling or running any file."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from calibjax.models.families import FAMILIES, config_from_hf
from calibjax.models.fingerprint import combine_digests, join_digests, layer_name, tensor_digest
from calibjax.models.hf_tensors import Piece, Plan, TensorEntry, merge_mxfp4, plan_tensors, read_mxfp4
from calibjax.models.hub import download, repository_of
from calibjax.models.model import LanguageModel, check_tokenizer
from calibjax.models.orbax_checkpoint import is_checkpoint, read_description, restore_params
from calibjax.models.rules import transposed
from calibjax.runtime.distributed import is_first, together
from calibjax.runtime.errors import UserError, require_directory
from calibjax.runtime.files import read_json
from calibjax.runtime.platforms import torch_left_out
from calibjax.runtime.sharding import param_sharding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# float16 is not supported: hidden states of many models exceed its range, and JAX's attention requires a GPU for it.
_DTYPES = ("float32", "bfloat16")
_SHORT = {"BF16": "bfloat16", "F16": "float16"}
"""Dtypes of safetensors with fewer bits than float32."""
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# Subfolders and `consolidated*` hold the same weights in the authors' own layout.
_HUB_SKIPPED = ["*/*", "consolidated*"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_log = logging.getLogger(__name__)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def load_model(path: str | Path, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> LanguageModel:
    """Loads a causal language model from safetensors or from the output of `calibjax convert`.

    File names, headers and configuration are validated before any weight is read.

    Args:
        path: a directory in Hugging Face's layout (`config.json`, `model.safetensors` or its sharded index, tokenizer
            files), an output directory of `calibjax convert`, or a model id on the hub, which is downloaded once;
            `org/name@revision` pins a branch, tag or commit.
        dtype: dtype of the weights and of computations: float32 or bfloat16. Files may also hold float16.
        mesh: devices among which `sharding.RULES` divide the weights; `None` for the default device. Run the model
            under `jax.set_mesh(mesh)`, because kernels on TPUs are divided by the current mesh.

    Returns:
        The model. Its fingerprint is that of the stored weights, independent of `dtype`.

    Raises:
        UserError: if the model does not exist; its architecture, configuration or tensors are not supported; files are
            missing, damaged or pickled; its tokenizer has ids beyond the vocabulary; or a weight is not finite.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise UserError(f"dtype: expected {' or '.join(_DTYPES)}, got {dtype.name}.")
    folder = _find_folder(path)
    description = read_description(folder) if is_checkpoint(folder) else None
    config = config_from_hf(folder)
    plan = None if description else plan_tensors(config, _read_headers(_find_weights(folder)))
    tokenizer = _load_tokenizer(folder, native=FAMILIES[config.family].native)
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    if plan is not None and plan.left_out and is_first():
        parts = ", ".join(f"{part} ({count:,} tensors)" for part, count in sorted(plan.left_out.items()))
        _log.warning("%s: the language model is loaded; left out: %s.", folder, parts)
    if plan is None:
        assert description is not None
        params, fingerprint = restore_params(folder, description, config, dtype, mesh)
    else:
        params, digests = together(functools.partial(_read_params, plan, dtype, mesh))
        fingerprint = combine_digests(config, join_digests(digests, plan.names))
    return LanguageModel(config, params, dtype, fingerprint, folder, tokenizer)


def stored_dtype(path: str | Path) -> str:
    """Returns the common dtype of all stored weights if it is `"bfloat16"` or `"float16"`, else `"float32"`.

    For an output of `calibjax convert`, this is the dtype of the files it was made from. For `path` and errors see
    `load_model`.
    """
    folder = _find_folder(path)
    if is_checkpoint(folder):
        return read_description(folder)["dtype"]
    kinds = {entry.dtype for entry in _read_headers(_find_weights(folder))}
    return _SHORT.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def tensor_dtypes(path: str | Path) -> dict[str, str]:
    """Returns the dtypes of the tensors that are not stored as `stored_dtype`, by their names in `fingerprint`.

    float64 is read, and reported, as float32. For `path` and errors see `load_model`.
    """
    folder = _find_folder(path)
    if is_checkpoint(folder):
        return dict(read_description(folder).get("tensor_dtypes", {}))
    plan = plan_tensors(config_from_hf(folder), _read_headers(_find_weights(folder)))
    common = stored_dtype(folder)
    pieces = [(layer_name(path, piece.layer), piece) for path, pieces in plan.pieces.items() for piece in pieces]
    dtypes = {name: _SHORT.get(piece.entries[0].dtype, "float32") for name, piece in pieces}
    return {name: dtype for name, dtype in dtypes.items() if dtype != common}


def _find_folder(path: str | Path) -> Path:
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
        raise UserError(
            f"{folder}: the weights are pickled ({', '.join(pickles[:3])}). They are not loaded because unpickling "
            "can run arbitrary code. If you trust them, convert them once with PyTorch and transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted')."
        )
    raise UserError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither.")


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


def _open(file: Path) -> Any:
    """`safe_open`, which reports every failure to open a file as "No such file or directory"."""
    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError:
        with file.open("rb"):  # raises what the system says
            raise UserError(f"{file} could not be opened, though it can be now: start again.") from None


def _read_headers(files: list[Path]) -> list[TensorEntry]:
    return merge_mxfp4(_read_stored(files))


def _read_stored(files: list[Path]) -> Iterator[TensorEntry]:
    for file in files:
        try:
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dictionary)
                    view = handle.get_slice(name)
                    yield TensorEntry(name, tuple(view.get_shape()), view.get_dtype(), file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: damaged or cut short ({error}). Download it again.") from error


def _load_tokenizer(folder: Path, native: bool) -> "PreTrainedTokenizerBase | None":
    # If transformers has no tokenizer class for the family, the class that the files name is remote code.
    names = _TOKENIZER_FILES if native else _TOKENIZER_FILES[:1]
    if not any((folder / name).is_file() for name in names):
        return None
    with torch_left_out():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if native:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer("a", verbose=False)  # some settings are read only now
        return tokenizer
    except Exception as error:  # the tokenizers package raises bare Exception for damaged files
        raise UserError(f"{folder}: transformers cannot read the tokenizer files: {error}") from error


def _read_params(plan: Plan, dtype: np.dtype, mesh: Mesh | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the parameters and the digests of the tensors that this process has hashed.

    Tensors are read one at a time. The host holds one tensor, and the part of one parameter that belongs to the devices
    of this process. With several processes, each reads its own part of every tensor, and reads and hashes every
    `process_count`-th tensor as a whole.
    """
    if plan.must_equal is not None and is_first():
        first, second = plan.must_equal
        if not np.array_equal(_read(first), _read(second)):
            raise UserError(
                f"The configuration ties {first.name} and {second.name}, but their values in the files differ."
            )
    params, digests, number = {}, {}, 0
    for path, leaf in plan.leaves.items():
        sharding = None if mesh is None else param_sharding(mesh, path, leaf.shape)
        shards = {index: np.empty([b - a for a, b in index], dtype) for index in _held(sharding, leaf.shape)}
        for piece in plan.pieces[path]:
            whole = None
            if number % jax.process_count() == jax.process_index() or mesh is None:
                whole = np.ascontiguousarray(_read_piece(piece))
                name = layer_name(path, piece.layer)
                digests[name] = tensor_digest(name, whole)
            number += 1
            for index, shard in shards.items():
                inner = tuple(slice(*bounds) for bounds in index[piece.layer is not None :])
                values = _read_part(piece, inner) if whole is None else whole[inner]
                slot = shard if piece.layer is None else shard[piece.layer]
                with np.errstate(over="ignore"):
                    slot[...] = values
                if not _is_finite(slot):
                    cause = (
                        "holds values too large for" if np.isfinite(values).all() else "holds NaN or infinity, read as"
                    )
                    first = piece.entries[0]
                    more = f" or one of its {len(piece.entries) - 1} siblings" if len(piece.entries) > 1 else ""
                    raise UserError(f"{first.file}: {first.name}{more} {cause} {dtype.name}.")
        params[path] = _place(shards, sharding, leaf.shape)
    return traverse_util.unflatten_dict(params, sep="."), digests


def _is_finite(array: np.ndarray) -> bool:
    """Whether all values are finite; of bfloat16 by its exponent, because numpy converts each number."""
    if array.dtype == jnp.bfloat16:
        return not array.size or int((array.view(np.uint16) & 0x7FFF).max()) < 0x7F80
    return bool(np.isfinite(array).all())


_Index = tuple[tuple[int, int], ...]
"""(start, stop) of every axis."""


def _held(sharding: NamedSharding | None, shape: tuple[int, ...]) -> set[_Index]:
    """Parts of an array that the devices of this process hold; the layer axis is never divided."""
    if sharding is None:
        return {tuple((0, n) for n in shape)}
    return {_bounds(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}


def _bounds(index: Any, shape: tuple[int, ...]) -> _Index:
    return tuple(along.indices(n)[:2] for along, n in zip(index, shape, strict=True))


def _place(shards: dict[_Index, np.ndarray], sharding: NamedSharding | None, shape: tuple[int, ...]) -> jax.Array:
    if sharding is None:
        return jax.device_put(*shards.values())
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[_bounds(index, shape)])


def _read(entry: TensorEntry) -> np.ndarray:
    if entry.scales is None:
        with _open(entry.file) as handle:
            return handle.get_tensor(entry.name)
    with _open(entry.file) as blocks, _open(entry.scales) as scales:
        views = blocks.get_slice(f"{entry.name}_blocks"), scales.get_slice(f"{entry.name}_scales")
        values = np.empty(entry.shape, jnp.bfloat16)
        for expert in range(entry.shape[0]):  # one at a time, because the intermediate values are float32
            values[expert] = read_mxfp4(*(view[expert : expert + 1][0] for view in views))
    return values


def _read_piece(piece: Piece) -> np.ndarray:
    values = [piece.cut(_read(entry)) for entry in piece.entries]
    return values[0] if len(values) == 1 else np.stack(values)


def _read_part(piece: Piece, index: tuple[slice, ...]) -> np.ndarray:
    """Returns `_read_piece(piece)[index]` and reads only this part if the layout of the tensors allows it."""
    first, *others = piece.entries
    if others:
        return np.stack([_part_of(piece, entry, index[1:]) for entry in piece.entries[index[0]]])
    return _part_of(piece, first, index)


def _part_of(piece: Piece, entry: TensorEntry, index: tuple[slice, ...]) -> np.ndarray:
    if piece.layout.groups > 1 or entry.scales is not None:
        return piece.cut(_read(entry))[index]
    *others, last = index
    start = piece.columns.start
    inner = (*others, slice(start + last.start, start + last.stop))
    with _open(entry.file) as handle:
        view = handle.get_slice(entry.name)
        return transposed(view[inner[::-1]]) if piece.layout.transpose else view[inner]
