"""The parts of a Hugging Face configuration that families have in common, in our words.

Whatever would change the numbers and is not implemented here is an error that names the field, never ignored.
"""

import math
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
        if fields["rope"].scaling == "longrope":
            # Beyond it, other divisors hold for the whole sequence: a model for each length, of which this is one.
            fields["max_positions"] = fields["rope"].original_max_positions
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


# What each `rope_type` must have. "dynamic" changes nothing up to `max_position_embeddings`, and we refuse longer
# sequences.
_ROPE_TYPES = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor",),
}


def rope(hf: Any, parameters: Mapping[str, Any] | None = None) -> Rope:
    """Returns the rotary positions of `parameters`, or of the configuration's own."""
    # transformers 5 keeps theta and scaling together in `rope_parameters`; before, `rope_scaling` stood beside
    # `rope_theta`, and called its kind `type`.
    given: Mapping[str, Any] = (
        parameters or getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    )
    kind = given.get("rope_type", given.get("type", "default"))
    refuse(hf, "rope_type", kind, allowed=_ROPE_TYPES)
    for name in _ROPE_TYPES[kind]:
        if given.get(name) is None:
            raise UserError(f"{hf.model_type} configuration: rope_type {kind!r} needs {name!r}, which is missing.")
    fields: dict[str, Any] = {name: float(given[name]) for name in _ROPE_TYPES[kind] if name != "short_factor"}
    if kind in ("llama3", "yarn", "longrope"):
        fields["original_max_positions"] = int(
            given.get("original_max_position_embeddings") or hf.max_position_embeddings
        )
    if kind == "yarn":
        fields |= _yarn(hf, given)
    elif kind == "longrope":
        fields |= _longrope(hf, given, fields["original_max_positions"])
    return Rope(
        theta=float(given.get("rope_theta", getattr(hf, "rope_theta", 10000.0))),
        fraction=float(given.get("partial_rotary_factor", 1.0)),
        scaling=None if kind in ("default", "dynamic") else kind,
        **fields,
    )


def _yarn(hf: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("mscale", "mscale_all_dim"):
        refuse(hf, f"rope_parameters.{name}", given.get(name), allowed=(None,))
    refuse(hf, "rope_parameters.truncate", given.get("truncate", True), allowed=(True,))
    amplitude = given.get("attention_factor")
    return {
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "amplitude": 0.1 * math.log(max(given["factor"], 1)) + 1 if amplitude is None else float(amplitude),
    }


def _longrope(hf: Any, given: Mapping[str, Any], original: int) -> dict[str, Any]:
    factor = given.get("factor") or hf.max_position_embeddings / original
    amplitude = given.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    return {"divisors": tuple(map(float, given["short_factor"])), "amplitude": float(amplitude)}
