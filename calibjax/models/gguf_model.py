"""Models in GGUF files, described as Hugging Face checkpoints: settings of config.json, names and layouts of tensors.

The tables of `families` then read them as any other checkpoint. A new architecture is an entry of `ARCHITECTURES`. The
names of tensors come from the package `gguf`; what llama.cpp's converter changes in their values is undone here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES, config_from_settings
from calibjax.models.gguf_file import GgufFile, GgufTensor, check_layers, read_gguf, regrouped
from calibjax.models.hf_tensors import Index, TensorEntry
from calibjax.runtime.errors import UserError

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp writes one family.

    Args:
        family: key of `FAMILIES`.
        keys: metadata keys that only some architectures have, and the settings they are; `KEYS` are those of all.
        fixed: settings that llama.cpp's code assumes and files do not hold.
        adapt: changes settings in place by the metadata and tensors of a file.
        interleaved: whether rows of queries and keys are stored so that rotated pairs are neighbours.
        norm_shift: number that is added to the scales of norms in the file.
    """

    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adapt: Callable[[Settings, GgufFile], None] | None = None
    interleaved: bool = False
    norm_shift: float = 0.0


KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Metadata keys of all architectures, after the architecture's name and a dot, and the settings that they are."""

_REQUIRED = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
_OTHER_KEYS = (
    *("vocab_size", "attention.value_length", "rope.dimension_count", "attention.causal", "tensor_data_layout"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "expert_count", "expert_used_count"),
)
"""Keys that are read by name, or that change nothing."""
_SWITCHED_OFF = (0, 0.0, False)
"""Values with which an unknown key is ignored, because it then states that the model lacks something."""


def _mixture(count: str) -> Callable[[Settings, GgufFile], None]:
    def adapt(settings: Settings, file: GgufFile) -> None:
        arch = file.metadata["general.architecture"]
        settings[count] = file.get(f"{arch}.expert_count", int)
        settings["num_experts_per_tok"] = file.get(f"{arch}.expert_used_count", int)

    return adapt


def _adapt_llama(settings: Settings, file: GgufFile) -> None:
    if file.get("llama.expert_count", int, 0):
        settings["model_type"] = "mixtral"
        _mixture("num_local_experts")(settings, file)


def _adapt_expert_size(settings: Settings, file: GgufFile) -> None:
    _mixture("num_experts")(settings, file)
    settings["intermediate_size"] = settings.get("moe_intermediate_size") or settings.get("intermediate_size")
    settings["moe_intermediate_size"] = settings["intermediate_size"]


def _adapt_gemma(settings: Settings, file: GgufFile, *, largest: int, local_base: float | None, pattern: int) -> None:
    """Attention scale, kinds of layers, and rotary positions of local layers, as llama.cpp sets them."""
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    arch = file.metadata["general.architecture"]
    # Of the largest model of each generation, the scale is not that of the width of its heads.
    settings["query_pre_attn_scalar"] = settings["hidden_size"] // heads if layers == largest else settings["head_dim"]
    pattern = file.get(f"{arch}.attention.sliding_window_pattern", int, pattern)
    if pattern < 1:
        raise UserError(f"{file.path}: {arch}.attention.sliding_window_pattern: expected at least 1, got {pattern}.")
    kinds = ("sliding_attention", "full_attention")
    settings["layer_types"] = [kinds[(layer + 1) % pattern == 0] for layer in range(layers)]
    if local_base is not None:
        base = file.get(f"{arch}.rope.freq_base_swa", float, local_base)
        local = {"rope_type": "default", "rope_theta": base}
        whole = {"rope_theta": settings.pop("rope_theta"), **settings.pop("rope_scaling", {"rope_type": "default"})}
        settings["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}


def _adapt_stablelm(settings: Settings, file: GgufFile) -> None:
    settings["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors


def _adapt_gpt2(settings: Settings, file: GgufFile) -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
    settings |= {theirs: settings[ours] for theirs, ours in names.items()}
    settings["layer_norm_epsilon"] = settings.pop("layer_norm_eps")


def _adapt_olmo2(settings: Settings, file: GgufFile) -> None:
    """Olmo 3 has the same architecture with local layers, three of four, where rotary positions are not scaled."""
    if settings["sliding_window"] is None:
        return
    pattern = file.metadata.get("olmo2.attention.sliding_window_pattern")
    kinds = ("full_attention", "sliding_attention")
    layers = settings["num_hidden_layers"]
    local = [(layer + 1) % 4 != 0 for layer in range(layers)] if pattern is None else list(map(bool, pattern))
    whole = {"rope_theta": settings.pop("rope_theta"), **settings.pop("rope_scaling", {"rope_type": "default"})}
    sliding = {"rope_type": "default", "rope_theta": whole["rope_theta"]}
    settings |= {
        "model_type": "olmo3",
        "layer_types": [kinds[is_local] for is_local in local],
        "rope_parameters": {"full_attention": whole, "sliding_attention": sliding},
    }


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window_pattern": "",
    "rope.freq_base_swa": "",
}
_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
_GEMMA2 = functools.partial(_adapt_gemma, largest=46, local_base=None, pattern=2)
_GEMMA3 = functools.partial(_adapt_gemma, largest=62, local_base=10000.0, pattern=6)
_ALL_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", adapt=_adapt_llama, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _EXPERTS, {**_ALL_EXPERTS, "norm_topk_prob": True}, adapt=_adapt_expert_size),
    "olmoe": Architecture(
        "olmoe", {"attention.clamp_kqv": "clip_qkv", **_EXPERTS}, {"norm_topk_prob": False}, adapt=_adapt_expert_size
    ),
    "gemma": Architecture("gemma", fixed=_GELU, norm_shift=1.0),
    "gemma2": Architecture("gemma2", {**_WINDOW, **_SOFTCAPS}, _GELU, adapt=_GEMMA2, norm_shift=1.0),
    "gemma3": Architecture("gemma3_text", {**_WINDOW, **_SOFTCAPS}, _GELU, adapt=_GEMMA3, norm_shift=1.0),
    "phi3": Architecture("phi3", _WINDOW),
    "gpt2": Architecture("gpt2", fixed={"activation_function": "gelu_new"}, adapt=_adapt_gpt2),
    "stablelm": Architecture(
        "stablelm", {"use_parallel_residual": "use_parallel_residual"}, {"qk_layernorm": False}, adapt=_adapt_stablelm
    ),
    "granite": Architecture("granite", _GRANITE, interleaved=True),
    "olmo2": Architecture("olmo2", {**_WINDOW, "attention.sliding_window_pattern": ""}, adapt=_adapt_olmo2),
}
"""Values of `general.architecture` that are read."""


def gguf_settings(file: GgufFile) -> Settings:
    """Returns the settings that a config.json of the model would have.

    Raises:
        UserError: if the architecture is not supported, or a key is missing, unknown or of another type.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture {str(name)[:60]!r} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    architecture = ARCHITECTURES[name]
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    keys = {**KEYS, **architecture.keys}
    settings: Settings = {setting: None for setting in architecture.keys.values() if setting}
    for key, value in own.items():
        if key in keys:
            if type(value) not in (int, float, bool) and key != "attention.sliding_window_pattern":
                raise UserError(
                    f"{file.path}: {name}.{key}: expected one number for all layers, got {str(value)[:60]}."
                )
            settings[keys[key]] = value
        elif key not in _OTHER_KEYS and value not in _SWITCHED_OFF:
            raise UserError(f"{file.path}: {name}.{key} = {str(value)[:60]} is not supported.")
    settings.pop("", None)
    for setting in _REQUIRED:
        if setting not in settings:
            key = next(key for key, ours in KEYS.items() if ours == setting)
            raise UserError(f"{file.path}: {name}.{key} is missing.")
    check_layers(file, settings["num_hidden_layers"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{file.path}: the tensor token_embd.weight is missing.")
    heads = settings["num_attention_heads"]
    if type(heads) is not int or heads < 1 or type(settings["hidden_size"]) is not int:
        raise UserError(f"{file.path}: {name}.attention.head_count: expected a positive number, got {heads}.")
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
    for token in ("bos", "eos", "padding"):
        settings[f"{token.removesuffix('ding')}_token_id"] = file.get(f"tokenizer.ggml.{token}_token_id", int)
    if settings.get("rms_norm_eps", settings.get("layer_norm_eps")) is None:
        raise UserError(f"{file.path}: {name}.attention.layer_norm_rms_epsilon is missing.")
    if architecture.adapt is not None:
        architecture.adapt(settings, file)
    if settings.get("intermediate_size") is None:
        raise UserError(f"{file.path}: {name}.feed_forward_length is missing.")
    return settings


def _rope(file: GgufFile, name: str, settings: Settings) -> Settings:
    """The settings of rotary positions that differ from the default."""
    head_dim = settings["head_dim"]
    rotated = file.get(f"{name}.rope.dimension_count", int, head_dim)
    values = file.get(f"{name}.attention.value_length", int, head_dim)
    if name == "gpt2":
        return {}
    if values != head_dim:
        raise UserError(f"{file.path}: keys of {head_dim} channels and values of {values} are not supported.")
    found: Settings = {}
    if name in ("phi3", "stablelm"):
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise UserError(f"{file.path}: {name}.rope.dimension_count: expected {head_dim}, got {rotated}.")
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    factor = file.get(f"{name}.rope.scaling.factor", float, 1.0)
    original = file.get(f"{name}.rope.scaling.original_context_length", int)
    amplitude = file.get(f"{name}.rope.scaling.attn_factor", float)
    short, long = (file.tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long"))
    divisors = file.tensors.get("rope_freqs.weight", short)
    scaling: Settings = {}
    if divisors is not None:
        original = settings["max_position_embeddings"] if short is None or original is None else original
        scaling = {
            "rope_type": "longrope",
            "short_factor": _vector(divisors, rotated // 2),
            "long_factor": _vector(divisors if long is None else long, rotated // 2),
            "original_max_position_embeddings": original,
            "attention_factor": 1.0 if amplitude is None else amplitude,
        }
        found["original_max_position_embeddings"] = original
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if amplitude not in (None, 1.0):
            scaling["attention_factor"] = amplitude * (1 + 0.1 * math.log(factor))
    elif kind != "none" and not (kind == "longrope" and factor == 1.0):
        raise UserError(f"{file.path}: {name}.rope.scaling.type {kind!r} is not supported.")
    if scaling:
        found["rope_scaling"] = scaling
    return found


def _vector(tensor: GgufTensor, size: int) -> list[float]:
    if tensor.shape != (size,):
        raise UserError(f"{tensor.file}: {tensor.name} has the shape {list(tensor.shape)}, expected {[size]}.")
    return [float(str(value)) for value in tensor.read(slice(None))[0]]


def gguf_config(path: Path) -> DecoderConfig:
    """Returns the configuration of the model in a GGUF file; raises `UserError` if it cannot be read."""
    file = read_gguf(path)
    return config_from_settings(path, gguf_settings(file))


def gguf_entries(path: Path, config: DecoderConfig) -> list[TensorEntry]:
    """Returns the tensors of a GGUF file under the names of the family's checkpoints, for `plan_tensors`.

    A tensor of all experts of a layer is one entry for each. A tensor that the family does not have keeps its name.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    file = read_gguf(path)
    name = file.metadata["general.architecture"]
    architecture, family = ARCHITECTURES[name], FAMILIES[config.family]
    known = get_tensor_name_map(next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == name), 1)
    ignored = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    left = {name: tensor for name, tensor in file.tensors.items() if name not in ignored}
    entries = []
    for rule in family.rules:
        one_expert = rule.experts(config) == (None,)
        template = rule.full_name(family.prefix, 0, None if one_expert else 0)
        template = template if one_expert else template.replace(".experts.0.", ".experts.")
        stored = known.get_name(template, try_suffixes=(".weight", ".bias"))
        for layer in range(config.num_layers) if rule.stacked and stored else (0,):
            tensor = left.pop((stored or "").replace("blk.0.", f"blk.{layer}."), None)
            if tensor is None:
                continue
            groups, shift = None, 0.0
            if architecture.interleaved and rule.targets[0].startswith(("layers.attention.q.", "layers.attention.k.")):
                groups = config.head_dim // 2, 2, 1
            if rule.targets[0].endswith("norm.scale"):
                shift = architecture.norm_shift
            swapped = name == "gpt2" and rule.targets[0].endswith(".kernel")
            for expert in rule.experts(config):
                full = rule.full_name(family.prefix, layer, expert)
                entries.append(_entry(full, tensor, expert, config, groups, shift, swapped))
    return entries + [_entry(name, tensor, None, config) for name, tensor in left.items()]


def _entry(
    name: str,
    tensor: GgufTensor,
    expert: int | None,
    config: DecoderConfig,
    groups: tuple[int, int, int] | None = None,
    shift: float = 0.0,
    swapped: bool = False,
) -> TensorEntry:
    """An entry of a tensor, or of one expert in it."""
    first, shape = 0, tensor.shape
    if expert is not None and config.mixture and len(shape) == 3 and shape[0] == config.mixture.experts:
        first, shape = expert * shape[1], shape[1:]
    read = functools.partial(_read, tensor, first, groups, shift, swapped)
    return TensorEntry(name, shape[::-1] if swapped else shape, tensor.dtype, tensor.file, tensor.offset, read)


def _read(
    tensor: GgufTensor,
    first: int,
    groups: tuple[int, int, int] | None,
    shift: float,
    swapped: bool,
    index: Index,
) -> np.ndarray:
    """Values of `index` in the layout of a Hugging Face checkpoint."""
    if len(tensor.shape) == 1:
        values = tensor.read(slice(None))[0]
        values = values[regrouped(len(values), groups)][index[0]]
        return values - values.dtype.type(shift) if shift else values
    rows, columns = index[::-1] if swapped else index
    if groups is None:
        values = tensor.read(slice(first + rows.start, first + rows.stop))[:, columns]
    else:
        values = tensor.read(first + regrouped(math.prod(tensor.shape[:-1]), groups)[rows])[:, columns]
    return values.T if swapped else values
