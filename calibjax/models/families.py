"""The model families we can read: for each, how its configuration and its tensors' names map to ours.

To add a family is to add one entry to `FAMILIES`. Whatever in a configuration would change the numbers and is not
implemented here is an error, never ignored.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibjax._checks import UserError, require_directory
from calibjax.layers import ACTIVATIONS, Rope
from calibjax.models.config import DecoderConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a checkpoint, and where in our parameter tree it goes.

    Args:
      source: Its name, without the family's prefix; `{}` stands for the layer.
      targets: Dotted paths in our tree; with several, the tensor is these side by side along its output axis.
      transpose: Whether the file holds `[out, in]`; ours is `[in, out]`, or `[V, D]` for the embeddings.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read one `model_type` of Hugging Face.

    Args:
      read_config: From their configuration to ours.
      prefix: What tensor names may begin with, and may lack.
      rules: The tensors; a rule whose targets are not in a model's tree (a bias it has not) does not apply to it.
      ignored: Regular expressions of names, without prefix, that hold buffers and no parameters.
    """

    read_config: Callable[[Any], DecoderConfig]
    prefix: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


def config_from_hf(source: "str | Path | PretrainedConfig") -> DecoderConfig:
    """Reads a Hugging Face configuration into a `DecoderConfig`; runs no code from the model's folder.

    Args:
      source: A model's directory, with its `config.json`, or a configuration object of transformers.

    Returns:
      The configuration.

    Raises:
      UserError: There is no such file, it cannot be read, its `model_type` is not supported, or it asks for something
        that is not implemented; the field and its value are named.
    """
    if isinstance(source, str | Path):
        source = _read_hf_config(require_directory(source, "model"))
    family = FAMILIES.get(source.model_type)
    if family is None:
        raise UserError(_unsupported(source.model_type))
    _refuse(source, "quantization_config", getattr(source, "quantization_config", None), allowed=(None,))
    return family.read_config(source)


def _read_hf_config(folder: Path) -> "PretrainedConfig":
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: expected a Hugging Face model, but there is no config.json.")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a JSON object ({error}).") from error
    if model_type not in FAMILIES:
        raise UserError(f"{file}: {_unsupported(model_type)}")

    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"{file}: transformers cannot read it: {error}") from error


def _unsupported(model_type: str | None) -> str:
    return f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}."


def _refuse(hf: Any, field: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise UserError(f"{hf.model_type} configuration: {field} = {value!r} is not supported; expected {choices}.")


def _rope(hf: Any) -> Rope:
    # transformers 5 keeps theta and scaling together in `rope_parameters`; before, `rope_scaling` stood beside
    # `rope_theta`, and called its kind `type`.
    parameters = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    theta = parameters.get("rope_theta", getattr(hf, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    _refuse(hf, "rope_type", kind, allowed=("default", "linear", "llama3"))
    _refuse(hf, "partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0), allowed=(1.0,))
    names = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for name in names:
        if name not in parameters:
            raise UserError(f"{hf.model_type} configuration: rope_type {kind!r} needs {name!r}, which is missing.")
    original = parameters.get("original_max_position_embeddings") or hf.max_position_embeddings
    return Rope(
        theta=float(theta),
        scaling=None if kind == "default" else kind,
        **{name: float(parameters[name]) for name in names},
        **({"original_max_positions": int(original)} if kind == "llama3" else {}),
    )


def _llama_config(hf: Any) -> DecoderConfig:
    _refuse(hf, "hidden_act", hf.hidden_act, allowed=ACTIVATIONS)
    return DecoderConfig(
        family="llama",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim or hf.hidden_size // hf.num_attention_heads,
        max_positions=hf.max_position_embeddings,
        norm="rms",
        norm_eps=hf.rms_norm_eps,
        activation=hf.hidden_act,
        gated_mlp=True,
        rope=_rope(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        tie_embeddings=hf.tie_word_embeddings,
    )


def _gpt2_config(hf: Any) -> DecoderConfig:
    _refuse(hf, "activation_function", hf.activation_function, allowed=ACTIVATIONS)
    _refuse(hf, "scale_attn_by_inverse_layer_idx", hf.scale_attn_by_inverse_layer_idx, allowed=(False,))
    _refuse(hf, "add_cross_attention", hf.add_cross_attention, allowed=(False,))
    # `reorder_and_upcast_attn` asks for float32 attention logits, which ours always are.
    return DecoderConfig(
        family="gpt2",
        vocab_size=hf.vocab_size,
        hidden_size=hf.n_embd,
        intermediate_size=hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        num_layers=hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=hf.n_embd // hf.n_head,
        max_positions=hf.n_positions,
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        activation=hf.activation_function,
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=None if hf.scale_attn_weights else 1.0,
        tie_embeddings=hf.tie_word_embeddings,
    )


def _linear(source: str, *targets: str, transpose: bool) -> tuple[Rule, Rule]:
    return (
        Rule(f"{source}.weight", tuple(f"{target}.kernel" for target in targets), transpose),
        Rule(f"{source}.bias", tuple(f"{target}.bias" for target in targets)),
    )


def _norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}.weight", (f"{target}.scale",)), Rule(f"{source}.bias", (f"{target}.bias",))


_LLAMA = Family(
    read_config=_llama_config,
    prefix="model.",
    rules=(
        Rule("embed_tokens.weight", ("embedding",)),
        *_norm("layers.{}.input_layernorm", "layers.attention_norm"),
        *_linear("layers.{}.self_attn.q_proj", "layers.attention.q", transpose=True),
        *_linear("layers.{}.self_attn.k_proj", "layers.attention.k", transpose=True),
        *_linear("layers.{}.self_attn.v_proj", "layers.attention.v", transpose=True),
        *_linear("layers.{}.self_attn.o_proj", "layers.attention.o", transpose=True),
        *_norm("layers.{}.post_attention_layernorm", "layers.mlp_norm"),
        *_linear("layers.{}.mlp.gate_proj", "layers.mlp.gate", transpose=True),
        *_linear("layers.{}.mlp.up_proj", "layers.mlp.up", transpose=True),
        *_linear("layers.{}.mlp.down_proj", "layers.mlp.down", transpose=True),
        *_norm("norm", "final_norm"),
        Rule("lm_head.weight", ("unembedding",)),
    ),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)

_GPT2 = Family(
    read_config=_gpt2_config,
    prefix="transformer.",
    rules=(
        Rule("wte.weight", ("embedding",)),
        Rule("wpe.weight", ("position_embedding",)),
        *_norm("h.{}.ln_1", "layers.attention_norm"),
        # GPT-2's Conv1D already holds `[in, out]`; query, key and value are side by side in one.
        *_linear("h.{}.attn.c_attn", "layers.attention.q", "layers.attention.k", "layers.attention.v", transpose=False),
        *_linear("h.{}.attn.c_proj", "layers.attention.o", transpose=False),
        *_norm("h.{}.ln_2", "layers.mlp_norm"),
        *_linear("h.{}.mlp.c_fc", "layers.mlp.up", transpose=False),
        *_linear("h.{}.mlp.c_proj", "layers.mlp.down", transpose=False),
        *_norm("ln_f", "final_norm"),
        Rule("lm_head.weight", ("unembedding",)),
    ),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)

FAMILIES: dict[str, Family] = {"llama": _LLAMA, "gpt2": _GPT2}
