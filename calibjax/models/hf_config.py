"""Conversion of Hugging Face configuration fields that several families have in common.

A setting that changes the numbers and is not implemented here raises an error that names the field.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibjax.models.config import MOST_LAYERS, DecoderConfig
from calibjax.nn.blocks import ACTIVATIONS, Rope
from calibjax.runtime.errors import LARGEST_SIZE, UserError
from calibjax.runtime.files import read_json

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "original_max_position_embeddings", "sliding_window"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_embd", "n_inner", "n_head", "n_positions", "seq_length", "kv_channels"),
)
_LAYERS = ("num_hidden_layers", "n_layer")
_MOST_BYTES = 2**24


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the settings of the language model in a config.json; raises `UserError` if it is no JSON object."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES:,} bytes")
        settings = read_json(file)
        if not isinstance(settings, dict):
            raise ValueError(f"got {str(settings)[:60]!r}")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not a JSON object ({error}).") from error
    return text_settings(settings)


def check_sizes(file: Path, text: dict[str, Any]) -> None:
    """Raises `UserError` if a size is not positive or too large: transformers makes a list entry for each layer."""
    for names, largest in ((_SIZES, LARGEST_SIZE), (_LAYERS, MOST_LAYERS)):
        for name in names:
            value = text.get(name)
            if value is not None and not (type(value) is int and 1 <= value <= largest):
                raise UserError(f"{file}: {name}: expected a whole number from 1 to {largest}, got {str(value)[:60]}.")


TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Multimodal `model_type`s, and the `model_type` of their language model where they do not name it."""


def text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the language model of a multimodal model; of a language model, the same settings."""
    kind, text = settings.get("model_type"), settings.get("text_config")
    if not (isinstance(kind, str) and kind in TEXT_MODELS and isinstance(text, Mapping)):
        return settings
    # Of the whole model, not of its part: whether embeddings are tied, and how its weights are quantised.
    shared = {name: settings[name] for name in ("tie_word_embeddings", "quantization_config") if name in settings}
    # transformers does not cap the logits of a multimodal model.
    return {"model_type": TEXT_MODELS[kind], **text, **shared, "final_logit_softcapping": None}


def refuse(hf: Any, field: str, value: Any, allowed: Any) -> None:
    """Raises `UserError` if the value of a field is not in `allowed`."""
    if not any(value == one for one in allowed):  # by ==, because a value of JSON may have no hash
        choices = ", ".join(map(repr, allowed))
        raise UserError(f"{hf.model_type} configuration: {field} = {value!r} is not supported; expected {choices}.")


def common_config(hf: Any, **ours: Any) -> DecoderConfig:
    """Returns the configuration from the keys that most families read; `ours` are fields that differ.

    A configuration may hold keys of other families, which transformers ignores: presence does not decide what is read.
    """
    heads = hf.num_attention_heads
    fields = {
        "family": hf.model_type,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": getattr(hf, "num_key_value_heads", None) or heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "max_positions": hf.max_position_embeddings,
        "norm_eps": hf.layer_norm_eps if ours.get("norm") == "layer" else hf.rms_norm_eps,
        "tie_embeddings": hf.tie_word_embeddings,
        **ours,
    }
    if "activation" not in ours:
        fields["activation"] = activation(hf, "hidden_act")
    if "rope" not in ours:
        fields["rope"] = rope(hf)
    for positions in (fields["rope"], fields.get("local_rope")):
        if positions is not None and positions.scaling == "longrope":
            # Longer sequences use other divisors for all their positions, which is not implemented.
            fields["max_positions"] = min(fields["max_positions"], positions.original_max_positions)
    return DecoderConfig(**fields)


def activation(hf: Any, field: str) -> str:
    """Returns the activation named by `field`."""
    refuse(hf, field, getattr(hf, field), allowed=ACTIVATIONS)
    return getattr(hf, field)


def equal_heads(hf: Any) -> dict[str, int]:
    """Returns our fields for heads that divide `hidden_size` equally, which ignore `head_dim`."""
    head_dim = hf.hidden_size // hf.num_attention_heads
    # transformers uses it only for rotary positions.
    refuse(hf, "head_dim", getattr(hf, "head_dim", None), allowed=(None, head_dim))
    return {"head_dim": head_dim}


def attention_biases(hf: Any) -> dict[str, bool]:
    """Returns our fields for `attention_bias`, which applies to all four projections."""
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias}


def local_layers(hf: Any) -> dict[str, Any]:
    """Returns our fields for `layer_types` and `sliding_window`; empty if no layer has a window."""
    for kind in hf.layer_types:
        refuse(hf, "layer_types", kind, allowed=("full_attention", "sliding_attention"))
    local = tuple(kind == "sliding_attention" for kind in hf.layer_types)
    if not any(local):
        return {}
    if hf.sliding_window is None:
        raise UserError(
            f"{hf.model_type} configuration: layer_types has sliding_attention, but sliding_window is null."
        )
    return {"local_layers": local, "window": hf.sliding_window}


def everywhere_local(hf: Any) -> dict[str, Any]:
    """Returns our fields for a `sliding_window` of all layers; empty if it is not set."""
    if hf.sliding_window is None:
        return {}
    return {"local_layers": (True,) * hf.num_hidden_layers, "window": hf.sliding_window}


# Required fields of each `rope_type`. "dynamic" differs from "default" only beyond `max_position_embeddings`, and
# longer sequences raise an error.
_ROPE_TYPES = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor",),
}


def rope(hf: Any, parameters: Mapping[str, Any] | None = None, partial: bool = False) -> Rope:
    """Returns the rotary positions of `parameters`, those of one kind of layer, or of the whole configuration.

    `partial`: whether the family reads `partial_rotary_factor`.
    """
    # transformers 5 has theta and scaling in `rope_parameters`. Older files have `rope_theta` and a separate
    # `rope_scaling`, which may name its kind `type`.
    given: Mapping[str, Any] = (
        parameters or getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    )
    kind = given.get("rope_type", given.get("type", "default"))
    refuse(hf, "rope_type", kind, allowed=_ROPE_TYPES)
    for name in _ROPE_TYPES[kind]:
        if given.get(name) is None:
            raise UserError(f"{hf.model_type} configuration: rope_type {kind!r} requires {name!r}, which is missing.")
    fields: dict[str, Any] = {name: float(given[name]) for name in _ROPE_TYPES[kind] if name != "short_factor"}
    if kind in ("llama3", "yarn", "longrope"):
        # As in transformers, the top-level field takes precedence, unless kinds of layers differ.
        original = None if parameters else getattr(hf, "original_max_position_embeddings", None)
        original = original or given.get("original_max_position_embeddings") or hf.max_position_embeddings
        fields["original_max_positions"] = int(original)
    numbers: dict[str, Any] = {"rope_theta": given.get("rope_theta", getattr(hf, "rope_theta", None))}
    if partial:
        numbers["partial_rotary_factor"] = given.get("partial_rotary_factor")
    elif kind != "default":
        # transformers ignores it without scaling and fails with scaling.
        refuse(hf, "partial_rotary_factor", given.get("partial_rotary_factor"), allowed=(None, 1.0))
    for name, number in numbers.items():
        if number is None:
            raise UserError(f"{hf.model_type} configuration: expected a number for {name}, got null.")
    if kind == "yarn":
        fields |= _yarn(hf, given)
    elif kind == "longrope":
        fields |= _longrope(hf, given, fields["original_max_positions"])
    return Rope(
        theta=float(numbers["rope_theta"]),
        fraction=float(numbers.get("partial_rotary_factor", 1.0)),
        scaling=None if kind in ("default", "dynamic") else kind,
        **fields,
    )


def two_ropes(hf: Any) -> dict[str, Rope]:
    """Returns our fields for `rope_parameters` by kind of layer."""
    kinds = hf.rope_parameters
    return {"rope": rope(hf, kinds["full_attention"]), "local_rope": rope(hf, kinds["sliding_attention"])}


def _yarn(hf: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    def stretch(mscale: Any) -> float:
        return 0.1 * mscale * math.log(max(given["factor"], 1)) + 1

    # transformers reads it from the whole configuration, also if kinds of layers differ.
    truncate = (getattr(hf, "rope_parameters", None) or given).get("truncate", True)
    amplitude = given.get("attention_factor")
    if amplitude is None:
        scales = given.get("mscale"), given.get("mscale_all_dim")
        amplitude = stretch(scales[0]) / stretch(scales[1]) if all(scales) else stretch(1)
    return {
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "truncate": bool(truncate),
        "amplitude": float(amplitude),
    }


def _longrope(hf: Any, given: Mapping[str, Any], original: int) -> dict[str, Any]:
    factor = given.get("factor") or hf.max_position_embeddings / original
    amplitude = given.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return {"divisors": tuple(map(float, given["short_factor"])), "amplitude": float(amplitude)}
