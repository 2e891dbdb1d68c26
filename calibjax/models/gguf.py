"""GGUF, the file format of llama.cpp: every header is checked before any tensor is read.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. The package `gguf` has its constants
and dequantises tensors. Its reader is not used: it makes an array of every token (733 MB and 10 s for Gemma 3 270M)
and does not compare counts with the file's size.

Models are described as Hugging Face checkpoints: settings of config.json, names and layouts of tensors. The tables of
`families` then read them as any other checkpoint; what llama.cpp's converter changes in their values is undone here. A
new architecture is an entry of `ARCHITECTURES`.
"""

import contextlib
import functools
import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES, check_sizes
from calibjax.models.hf_read import FLOATS, Index, TensorEntry
from calibjax.runtime.arrays import round_up
from calibjax.runtime.errors import INT_MAX, UserError, first_line, shortened

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values, as `struct` names them."""
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")


class GgufTensor(NamedTuple):
    """A tensor of a file: `shape` as numpy has it, name of its `GGMLQuantizationType`, and first byte."""

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int

    @property
    def dtype(self) -> str:
        """Dtype of its values, as safetensors name it: quantised values are float32."""
        return self.kind if self.kind in FLOATS else "F32"

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Number of rows, along the last axis, and bytes of each."""
        block, size = _sizes()[self.kind]
        return math.prod(self.shape[:-1]), self.shape[-1] // block * size

    def read(self, rows: slice | np.ndarray) -> np.ndarray:
        """Rows of the tensor, seen as a matrix `[rows, columns]`, in `dtype`."""
        from gguf import GGMLQuantizationType, dequantize

        mapped = np.memmap(self.file, np.uint8, "r", self.offset, self.stored_shape)
        stored = np.ascontiguousarray(mapped[rows])
        if self.kind in FLOATS:
            return stored.view(FLOATS[self.kind])
        with np.errstate(over="ignore", invalid="ignore"):  # values are checked when they are placed
            return dequantize(stored, GGMLQuantizationType[self.kind])


class GgufFile(NamedTuple):
    """A parsed GGUF file, or the first of several that a model is split into, with the tensors of all by name.

    In the metadata, an array of strings is a list, another array a numpy array.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, checked to be of a Python type; `default` if the key is absent."""
        value = self.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise UserError(f"{self.path}: {key}: expected a value of type {kind.__name__}, got {shortened(value)}.")
        return value


class _Reader:
    """Reads values one after another from a mapped file, and never beyond its end."""

    def __init__(self, path: Path):
        self.position = 0
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def bytes(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise ValueError(f"byte {start:,} should be followed by {count:,} more, but the file ends")
        return self._data[start : self.position]

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]
        # The shortest decimal, 1e-05 and not 9.999999747378752e-06, is what the model's config.json has.
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            return [self.string() for _ in range(count)]
        if element not in _SCALARS:
            raise ValueError(f"an array has elements of type {element}")
        dtype = np.dtype(f"<{_SCALARS[element]}")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype)


@functools.cache
def _sizes() -> dict[str, tuple[int, int]]:
    """Types that can be read: values in a block, and bytes of one."""
    from gguf import GGML_QUANT_SIZES, dequantize

    sizes = {}
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            dequantize(np.zeros((1, size), np.uint8), kind)
            sizes[kind.name] = block, size
    return sizes


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf" and not Path(path).is_dir()


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file, and of the others that its model is split into. No tensor is read.

    Raises:
        UserError: the package `gguf` is missing; the file does not exist, is not GGUF, or is of another version or byte
            order; it is cut short; a count, size, type or offset is impossible; or tensors overlap.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: reading GGUF needs the package gguf: pip install 'calibjax[gguf]'.") from error
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    name = _SPLIT.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        raise UserError(f"{path}: one of {count} files of a model; expected NAME-00001-of-{count:05d}.gguf, the first.")
    others = [path.with_name(f"{name[1]}-{number:05d}-of-{name[2]}.gguf") for number in range(2, count + 1)]
    missing = [other.name for other in others if not other.is_file()]
    if missing:
        raise UserError(f"{path}: other files of this model are missing beside it: {', '.join(missing[:5])}.")
    tensors = dict(first.tensors)
    for other in others:
        more = _read_one(other).tensors
        if repeated := tensors.keys() & more.keys():
            raise UserError(f"{other}: holds {min(repeated)!r}, as another file of this model does.")
        tensors |= more
    return first._replace(tensors=tensors)


def _read_one(path: Path) -> GgufFile:
    if not path.exists():
        raise UserError(f"model: {path} does not exist.")
    try:
        if not path.is_file():
            raise ValueError("not a file")
        return _parse(path, _Reader(path), path.stat().st_size)
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise UserError(f"{path}: not a GGUF file that can be read: {first_line(error)}. Download it again.") from error


def _parse(path: Path, reader: _Reader, size: int) -> GgufFile:
    if reader.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        known = "big-endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
        raise ValueError(f"it is {known}; expected version 2 or 3, little-endian")
    tensor_count, key_count = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"two values of the key {key!r}")
        metadata[key] = reader.value(reader.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two, got {shortened(alignment)}")
    described = [_tensor(path, reader) for _ in range(tensor_count)]
    start = round_up(reader.position, alignment)
    tensors, used = {}, start
    for tensor in sorted(described, key=lambda tensor: tensor.offset):
        placed = tensor._replace(offset=start + tensor.offset)
        if tensor.name in tensors:
            raise ValueError(f"two tensors of the name {tensor.name!r}")
        if tensor.offset % alignment or placed.offset < used:
            raise ValueError(f"a tensor overlaps another, or its offset is not aligned: {tensor.name!r}")
        used = placed.offset + math.prod(tensor.stored_shape)
        if used > size:
            raise ValueError(f"a tensor ends at byte {used:,}, and the file at {size:,}: {tensor.name!r}")
        tensors[tensor.name] = placed
    return GgufFile(path, metadata, tensors)


def _tensor(path: Path, reader: _Reader) -> GgufTensor:
    from gguf import GGMLQuantizationType

    name, axes = reader.string(), reader.number("I")
    if not 1 <= axes <= 4:
        raise ValueError(f"a tensor has {axes} axes, expected 1 to 4: {name!r}")
    shape = tuple(reader.number("Q") for _ in range(axes))[::-1]
    number, offset = reader.number("I"), reader.number("Q")
    if not all(1 <= n <= INT_MAX for n in shape):
        raise ValueError(f"a tensor has the shape {list(shape)}: {name!r}")
    kind = next((kind.name for kind in GGMLQuantizationType if kind == number), str(number))
    if kind not in _sizes():
        raise ValueError(f"a tensor has the type {kind}, which is not supported: {name!r}")
    block, _ = _sizes()[kind]
    if shape[-1] % block:
        raise ValueError(f"a tensor has rows of {shape[-1]}, expected a multiple of {block}: {name!r}")
    return GgufTensor(name, shape, kind, path, offset)


Settings = dict[str, Any]


class Architecture(NamedTuple):
    """One family, a key of `FAMILIES`, as llama.cpp writes it."""

    family: str
    keys: Mapping[str, str] = {}  # in addition to `_KEYS`
    fixed: Mapping[str, Any] = {}  # settings that llama.cpp's code assumes
    adapt: Callable[[Settings, GgufFile], None] | None = None  # changes settings by the metadata and tensors of a file
    interleaved: bool = False  # rows of queries and keys are stored so that rotated pairs are neighbours
    norm_shift: float = 0.0  # number that is added to the scales of norms in the file
    adapt_keys: tuple[str, ...] = ()  # metadata keys that `adapt` reads


_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.causal": "is_causal",
    "rope.freq_base": "rope_theta",
}
"""Metadata keys of all architectures, after the architecture's name and a dot, and the settings that they are."""

_OTHER_KEYS = (
    *("vocab_size", "attention.value_length", "rope.dimension_count", "tensor_data_layout"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    "rope.scaling.attn_factor",
)
"""Keys that are read by name, or that change nothing."""
_REQUIRED = (
    *(("context_length",), ("embedding_length",), ("block_count",), ("attention.head_count",)),
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    ("feed_forward_length", "expert_feed_forward_length"),
)
"""At least one key of each tuple is required; transformers would take its defaults."""


def _adapt_llama(settings: Settings, file: GgufFile) -> None:
    if settings["num_local_experts"]:
        settings["model_type"] = "mixtral"
    else:
        del settings["num_local_experts"], settings["num_experts_per_tok"]


def _adapt_expert_size(settings: Settings, file: GgufFile) -> None:
    settings["intermediate_size"] = settings.get("moe_intermediate_size") or settings.get("intermediate_size")
    settings["moe_intermediate_size"] = settings["intermediate_size"]


def _adapt_gemma(settings: Settings, file: GgufFile, *, largest: int, local_base: float | None, pattern: int) -> None:
    """Attention scale, kinds of layers, and rotary positions of local layers, as llama.cpp sets them."""
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    arch = file.metadata["general.architecture"]
    # Gemma 2 27B (46 layers) and Gemma 3 27B (62) scale attention by hidden_size / heads.
    settings["query_pre_attn_scalar"] = settings["hidden_size"] // heads if layers == largest else settings["head_dim"]
    pattern = file.get(f"{arch}.attention.sliding_window_pattern", int, pattern)
    if pattern < 1:
        raise UserError(f"{file.path}: {arch}.attention.sliding_window_pattern: expected at least 1, got {pattern}.")
    _set_local(settings, [(layer + 1) % pattern != 0 for layer in range(layers)])
    if local_base is not None:
        _set_local_rope(settings, file.get(f"{arch}.rope.freq_base_swa", float, local_base))


def _set_local(settings: Settings, local: list[bool]) -> None:
    settings["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]


def _set_local_rope(settings: Settings, theta: float) -> None:
    whole = {"rope_theta": settings.pop("rope_theta"), **settings.pop("rope_scaling", {"rope_type": "default"})}
    local = {"rope_type": "default", "rope_theta": theta}
    settings["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}


def _adapt_gpt2(settings: Settings, file: GgufFile) -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    settings |= {theirs: settings[ours] for theirs, ours in names.items()}
    settings["layer_norm_epsilon"] = settings.pop("layer_norm_eps")


def _adapt_olmo2(settings: Settings, file: GgufFile) -> None:
    """Olmo 3 has the same architecture with local layers, three of four, where rotary positions are not scaled."""
    if settings["sliding_window"] is None:
        return
    three_of_four = [(layer + 1) % 4 != 0 for layer in range(settings["num_hidden_layers"])]
    pattern = file.metadata.get("olmo2.attention.sliding_window_pattern", three_of_four)
    settings["model_type"] = "olmo3"
    _set_local(settings, list(map(bool, pattern)))
    _set_local_rope(settings, settings["rope_theta"])


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LOCAL = ("attention.sliding_window_pattern", "rope.freq_base_swa")
_USED = {"expert_used_count": "num_experts_per_tok"}
_EXPERTS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size", **_USED}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
_GEMMA2 = functools.partial(_adapt_gemma, largest=46, local_base=None, pattern=2)
_GEMMA3 = functools.partial(_adapt_gemma, largest=62, local_base=10000.0, pattern=6)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama", {"expert_count": "num_local_experts", **_USED}, adapt=_adapt_llama, interleaved=True
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}, adapt=_adapt_expert_size),
    "olmoe": Architecture(
        "olmoe", {"attention.clamp_kqv": "clip_qkv", **_EXPERTS}, {"norm_topk_prob": False}, adapt=_adapt_expert_size
    ),
    "gemma": Architecture("gemma", fixed=_GELU, norm_shift=1.0),
    "gemma2": Architecture("gemma2", {**_WINDOW, **_SOFTCAPS}, _GELU, _GEMMA2, norm_shift=1.0, adapt_keys=_LOCAL),
    "gemma3": Architecture("gemma3_text", {**_WINDOW, **_SOFTCAPS}, _GELU, _GEMMA3, norm_shift=1.0, adapt_keys=_LOCAL),
    "phi3": Architecture("phi3", _WINDOW),
    "gpt2": Architecture("gpt2", fixed={"activation_function": "gelu_new"}, adapt=_adapt_gpt2),
    "stablelm": Architecture(
        "stablelm",
        {"use_parallel_residual": "use_parallel_residual"},
        {"qk_layernorm": False},
        adapt=lambda settings, file: settings.update(use_qkv_bias=settings["attention_bias"]),
    ),
    "granite": Architecture("granite", _GRANITE, interleaved=True),
    "olmo2": Architecture("olmo2", _WINDOW, adapt=_adapt_olmo2, adapt_keys=("attention.sliding_window_pattern",)),
}


def gguf_settings(file: GgufFile) -> Settings:
    """The settings that a config.json of the model would have.

    Raises:
        UserError: if the architecture is not supported, or a key is missing, unknown or of another type.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{file.path}: general.architecture {shortened(name)!r} is not supported; supported: {known}.")
    architecture = ARCHITECTURES[name]
    prefix = f"{name}."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = {**_KEYS, **architecture.keys}
    settings: Settings = dict.fromkeys(architecture.keys.values())
    for key, value in values.items():
        is_number = type(value) in (int, float, bool)
        if key in keys:
            if not is_number:
                got = shortened(value)
                raise UserError(f"{file.path}: {name}.{key}: expected one number for all layers, got {got}.")
            settings[keys[key]] = value
        # A number of 0 means that the model does without what the key is for.
        elif not (is_number and value == 0) and key not in (*_OTHER_KEYS, *architecture.adapt_keys):
            raise UserError(f"{file.path}: {name}.{key} = {shortened(value)} is not supported.")
    for names in _REQUIRED:
        if not values.keys() & {*names}:
            raise UserError(f"{file.path}: {name}.{names[0]} is missing.")
    check_sizes(file.path, settings)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path}: the tensor token_embd.weight is missing. Download it again.")
    heads = settings["num_attention_heads"]
    settings.setdefault("head_dim", settings["hidden_size"] // heads)
    settings.setdefault("num_key_value_heads", heads)
    settings.setdefault("rope_theta", 10000.0)
    settings |= _rope(file, name, settings)
    settings |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": "silu",
        **architecture.fixed,
        "model_type": architecture.family,
    }
    for setting, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        settings[f"{setting}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id", int)
    if architecture.adapt is not None:
        architecture.adapt(settings, file)
    return settings


def _rope(file: GgufFile, name: str, settings: Settings) -> Settings:
    head_dim = settings["head_dim"]
    rotated = file.get(f"{name}.rope.dimension_count", int, head_dim)
    values = file.get(f"{name}.attention.value_length", int, head_dim)
    if name == "gpt2":
        return {}
    if values != head_dim:
        raise UserError(f"{file.path}: keys of {head_dim} channels and values of {values} are not supported.")
    rope: Settings = {}
    if name in ("phi3", "stablelm"):
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise UserError(f"{file.path}: {name}.rope.dimension_count: expected {head_dim}, got {rotated}.")
    factor = file.get(f"{name}.rope.scaling.factor", float, 1.0)
    kind = file.get(f"{name}.rope.scaling.type", str, "none" if factor == 1.0 else "linear")
    original = file.get(f"{name}.rope.scaling.original_context_length", int)
    amplitude = file.get(f"{name}.rope.scaling.attn_factor", float)
    short, long = (file.tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long"))
    divisors = file.tensors.get("rope_freqs.weight", short)
    scaling: Settings = {}
    if divisors is not None:
        if short is None or original is None:
            original = settings["max_position_embeddings"]
        scaling = {
            "rope_type": "longrope",
            "short_factor": _vector(divisors, rotated // 2),
            "long_factor": _vector(divisors if long is None else long, rotated // 2),
            "original_max_position_embeddings": original,
            "attention_factor": 1.0 if amplitude is None else amplitude,
        }
        rope["original_max_position_embeddings"] = original
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if amplitude not in (None, 1.0):
            scaling["attention_factor"] = amplitude * (1 + 0.1 * math.log(factor))
    elif kind != "none" and not (kind == "longrope" and factor == 1.0):
        raise UserError(f"{file.path}: {name}.rope.scaling.type {kind!r} is not supported.")
    if scaling:
        rope["rope_scaling"] = scaling
    return rope


def _vector(tensor: GgufTensor, size: int) -> list[float]:
    if tensor.shape != (size,):
        raise UserError(f"{tensor.file}: {tensor.name} has the shape {list(tensor.shape)}, expected {[size]}.")
    return [float(str(value)) for value in tensor.read(slice(None))[0]]


def gguf_entries(path: Path, config: DecoderConfig) -> list[TensorEntry]:
    """The tensors of a GGUF file under the names of the family's checkpoints, if it has them.

    A tensor of all experts of a layer gives one entry for each expert.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    file = read_gguf(path)
    name = file.metadata["general.architecture"]
    architecture, family = ARCHITECTURES[name], FAMILIES[config.family]
    number = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == name)
    known = get_tensor_name_map(number, 1)
    ignored = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    left = {name: tensor for name, tensor in file.tensors.items() if name not in ignored}
    entries = []
    for rule in family.rules:
        experts = rule.experts(config)
        template = rule.full_name(family.prefix, 0, experts[0]).replace(".experts.0.", ".experts.")
        stored = known.get_name(template, try_suffixes=(".weight", ".bias"))
        for layer in range(config.num_layers) if rule.stacked and stored else (0,):
            tensor = left.pop((stored or "").replace("blk.0.", f"blk.{layer}."), None)
            if tensor is None:
                continue
            target = rule.targets[0]
            is_rotated = architecture.interleaved and target.startswith(("layers.attention.q.", "layers.attention.k."))
            storage: dict[str, Any] = {
                "pairs": config.head_dim // 2 if is_rotated else None,
                "shift": architecture.norm_shift if target.endswith("norm.scale") else 0.0,
                "swapped": name == "gpt2" and target.endswith(".kernel"),
            }
            holds_all_experts = len(tensor.shape) == 3 and tensor.shape[0] == len(experts)
            for expert in experts:
                full_name = rule.full_name(family.prefix, layer, expert)
                entries.append(_entry(full_name, tensor, expert if holds_all_experts else None, **storage))
    return entries + [_entry(name, tensor) for name, tensor in left.items()]


def _entry(
    name: str,
    tensor: GgufTensor,
    expert: int | None = None,
    *,
    pairs: int | None = None,  # P: rows `[..., 2, P]` are stored as `[..., P, 2]`
    shift: float = 0.0,  # number that was added
    swapped: bool = False,  # whether the last two axes are swapped
) -> TensorEntry:
    first, shape = 0, tensor.shape
    if expert is not None:
        first, shape = expert * shape[1], shape[1:]

    def read(index: Index) -> np.ndarray:
        rows, *columns = index[::-1] if swapped else index
        places = slice(first + rows.start, first + rows.stop)
        if pairs is not None:
            stored_row = np.arange(shape[0]).reshape(-1, pairs, 2).swapaxes(1, 2).reshape(-1)  # of each row of ours
            places = stored_row[rows]
        if not columns:
            values = tensor.read(slice(None))[0][places]
            return values - values.dtype.type(shift) if shift else values
        values = tensor.read(places)[:, columns[0]]
        return values.T if swapped else values

    return TensorEntry(name, shape[::-1] if swapped else shape, tensor.dtype, tensor.file, tensor.offset, read)
