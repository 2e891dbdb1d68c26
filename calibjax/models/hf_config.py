"""The parts of a Hugging Face configuration that families have in common, in our words.

Whatever would change the numbers and is not implemented here is an error that names the field, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from calibjax._checks import UserError
from calibjax.layers import ACTIVATIONS, Rope
from calibjax.models.config import DecoderConfig


def refuse(hf: Any, field: str, value: Any, allowed: Any) -> None:
    """Raises `UserError` where the value of a field is not among those allowed."""
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise UserError(f"{hf.model_type} configuration: {field} = {value!r} is not supported; expected {choices}.")


def common_config(hf: Any, **ours: Any) -> DecoderConfig:
    """Returns the configuration by the names that most families use; `ours` are fields that differ.

    Args:
      hf: A configuration of transformers.
      ours: Fields of `DecoderConfig`, which take precedence.
    """
    heads = hf.num_attention_heads
    activation = "hidden_activation" if hasattr(hf, "hidden_activation") else "hidden_act"
    refuse(hf, activation, getattr(hf, activation), allowed=ACTIVATIONS)
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
        "norm_eps": hf.rms_norm_eps if hasattr(hf, "rms_norm_eps") else hf.layer_norm_eps,
        "activation": getattr(hf, activation),
        "tie_embeddings": hf.tie_word_embeddings,
    }
    if "rope" not in ours:
        fields["rope"] = rope(hf)
    return DecoderConfig(**{**fields, **ours})


def attention_biases(hf: Any) -> dict[str, bool]:
    """Returns our fields for `attention_bias`: of all four projections."""
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias}


def local_layers(hf: Any) -> dict[str, Any]:
    """Returns our fields for `layer_types` and `sliding_window`; nothing where no layer has a window."""
    for kind in hf.layer_types:
        refuse(hf, "layer_types", kind, allowed=("full_attention", "sliding_attention"))
    local = tuple(kind == "sliding_attention" for kind in hf.layer_types)
    return {"local_layers": local, "window": hf.sliding_window} if any(local) else {}


def everywhere_local(hf: Any) -> dict[str, Any]:
    """Returns our fields for a `sliding_window` that every layer has, where it is set."""
    if hf.sliding_window is None:
        return {}
    return {"local_layers": (True,) * hf.num_hidden_layers, "window": hf.sliding_window}


def rope(hf: Any, parameters: Mapping[str, Any] | None = None) -> Rope:
    """Returns the rotary positions of `parameters`, or of the configuration's own."""
    # transformers 5 keeps theta and scaling together in `rope_parameters`; before, `rope_scaling` stood beside
    # `rope_theta`, and called its kind `type`.
    if parameters is None:
        parameters = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta", getattr(hf, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    refuse(hf, "rope_type", kind, allowed=("default", "linear", "llama3"))
    names = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for name in names:
        if name not in parameters:
            raise UserError(f"{hf.model_type} configuration: rope_type {kind!r} needs {name!r}, which is missing.")
    original = parameters.get("original_max_position_embeddings") or hf.max_position_embeddings
    return Rope(
        theta=float(theta),
        fraction=float(parameters.get("partial_rotary_factor", 1.0)),
        scaling=None if kind == "default" else kind,
        **{name: float(parameters[name]) for name in names},
        **({"original_max_positions": int(original)} if kind == "llama3" else {}),
    )
