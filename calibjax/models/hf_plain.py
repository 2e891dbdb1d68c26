"""Configurations that transformers takes as they stand, read without it: with PyTorch its import takes seconds."""

import types
from collections.abc import Callable, Mapping
from typing import Any

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
}
"""Families -> what transformers sets where a file lacks it. A file that lacks another setting we read is not plain."""


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _tokens(value: Any) -> bool:
    return all(type(token) is int for token in (value if isinstance(value, list) else [value])) or value is None


_TAKEN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), _of(int)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_window_layers"), _of(int)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "pretraining_tp"), _of(int)),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "sliding_window"), _of(int, types.NoneType)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "attention_dropout"), _of(float)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), _of(bool)),
    **dict.fromkeys(("model_type", "hidden_act", "transformers_version", "_name_or_path"), _of(str)),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value: value in ("float32", "bfloat16", "float16")),
    "architectures": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "eos_token_id": _tokens,
    "initializer_range": lambda value: type(value) is float and 0 <= value <= 1,
    "rope_scaling": _of(types.NoneType),
    "use_sliding_window": lambda value: value is False,
}
"""Settings, and whether transformers takes a value as it stands."""


def plain_config(settings: Mapping[str, Any]) -> types.SimpleNamespace | None:
    """The fields of transformers' configuration that we read; None if transformers has to read the file.

    Args:
        settings: of a config.json, by `read_settings`.
    """
    family = settings.get("model_type")
    if family not in _DEFAULTS or not all(name in _TAKEN and _TAKEN[name](settings[name]) for name in settings):
        return None
    given = {**_DEFAULTS[family], **settings}
    if not {"hidden_size", "num_attention_heads", "num_hidden_layers", "rope_theta"} <= given.keys():
        return None
    if given["hidden_size"] % given["num_attention_heads"]:
        return None
    kinds = ["full_attention"] * given["num_hidden_layers"]
    rope = {"rope_type": "default", "rope_theta": given["rope_theta"]}
    return types.SimpleNamespace(**given, layer_types=kinds, rope_parameters=rope)
