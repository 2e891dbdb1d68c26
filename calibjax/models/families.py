"""Registry of model families: how each maps its configuration and tensor names to ours.

A new family is one entry of `FAMILIES`. A configuration setting that changes the numbers and is not implemented here
raises an error.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibjax.models.config import DecoderConfig
from calibjax.models.hf_config import (
    TEXT_MODELS,
    activation,
    attention_biases,
    check_sizes,
    common_config,
    equal_heads,
    everywhere_local,
    local_layers,
    read_settings,
    refuse,
    rope,
)
from calibjax.models.hf_plain import plain_config
from calibjax.models.rules import Rule, linear, norm
from calibjax.nn.blocks import ACTIVATIONS, Rope
from calibjax.nn.experts import Mixture
from calibjax.runtime.errors import UserError, require_directory
from calibjax.runtime.files import read_json
from calibjax.runtime.platforms import torch_left_out

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """How to read one Hugging Face `model_type`.

    Args:
        read_config: converts their configuration to ours.
        prefix: optional prefix of tensor names.
        rules: rules of the tensors; a rule is skipped if a model's tree lacks its targets (such as an absent bias).
        native: whether transformers knows the family. If not, `read_config` gets the fields of the JSON file, which
            must be complete.
    """

    read_config: Callable[[Any], DecoderConfig]
    prefix: str
    rules: tuple[Rule, ...]
    native: bool = True


def config_from_hf(source: "str | Path | PretrainedConfig") -> DecoderConfig:
    """Converts a Hugging Face configuration to a `DecoderConfig`, without running code from the model's directory.

    Args:
        source: a model's directory with its `config.json`, or a configuration object of transformers. Of a multimodal
            model, the language model is described.

    Returns:
        The configuration.

    Raises:
        UserError: if the file is missing or cannot be read, or its `model_type` or a setting is not supported; the
            message names the field and its value.
    """
    hf: Any = source
    if isinstance(source, str | Path):
        file, settings = _find_settings(require_directory(source, "model"))
        plain = _read_plain(settings)
        if plain is not None:
            return plain
        hf = _read_hf_config(file, settings)
    elif hf.model_type in TEXT_MODELS:
        text = config_from_hf(hf.text_config)
        return dataclasses.replace(text, tie_embeddings=hf.tie_word_embeddings, logit_softcap=None)
    return _convert(hf)


def config_from_settings(file: Path, settings: dict[str, Any]) -> DecoderConfig:
    """Converts the settings of a config.json that `file` implies, as `config_from_hf` does."""
    check_sizes(file, settings)
    return _read_plain(settings) or _convert(_of_transformers(file, settings))


def _of_transformers(file: Path, settings: dict[str, Any]) -> Any:
    with torch_left_out():
        from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers computes with settings before, and while, it checks them
        raise UserError(f"{file}: transformers cannot read it: {error!r}") from error


def _convert(hf: Any) -> DecoderConfig:
    family = FAMILIES.get(hf.model_type)
    if family is None:
        raise UserError(_unsupported(hf.model_type))
    quantized = getattr(hf, "quantization_config", None)
    if not (isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"):
        refuse(hf, "quantization_config", quantized, allowed=(None,))
    refuse(hf, "is_causal", getattr(hf, "is_causal", True), allowed=(True,))
    try:
        return family.read_config(hf)
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        reason = f"cannot be used ({error!r})"
        if isinstance(error, AttributeError) and error.obj is hf:
            reason = f"{error.name} is missing"
        raise UserError(f"{hf.model_type} configuration: {reason}.") from error


def _find_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The config.json of a model of a known family, and its settings."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: expected a Hugging Face model, but there is no config.json.")
    settings = read_settings(file)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"{file}: {_unsupported(model_type)}")
    return file, settings


def _read_plain(settings: Mapping[str, Any]) -> DecoderConfig | None:
    """The configuration if it can be read without transformers, which otherwise reads it and raises the errors."""
    hf: Any = plain_config(settings)
    try:
        return None if hf is None else FAMILIES[hf.model_type].read_config(hf)
    except (UserError, AttributeError):
        return None


def _read_hf_config(file: Path, settings: dict[str, Any]) -> Any:
    if not FAMILIES[settings["model_type"]].native:
        return types.SimpleNamespace(**settings)

    if "text_config" in read_json(file):
        return _of_transformers(file, settings)
    with torch_left_out():
        from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(file.parent, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers computes with settings before, and while, it checks them
        raise UserError(f"{file}: transformers cannot read it: {error!r}") from error


def _unsupported(model_type: object) -> str:
    return f"model_type {model_type!r} is not supported; supported: {', '.join(sorted({*FAMILIES, *TEXT_MODELS}))}."


# Tensor names that several families have in common.

_ENDS = (
    Rule("embed_tokens.weight", ("embedding",)),
    *norm("norm", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
)
_QKV = (
    *linear("layers.{}.self_attn.q_proj", "layers.attention.q"),
    *linear("layers.{}.self_attn.k_proj", "layers.attention.k"),
    *linear("layers.{}.self_attn.v_proj", "layers.attention.v"),
)
_OUTPUT = linear("layers.{}.self_attn.o_proj", "layers.attention.o")
_QK_NORMS = (
    *norm("layers.{}.self_attn.q_norm", "layers.attention.q_norm"),
    *norm("layers.{}.self_attn.k_norm", "layers.attention.k_norm"),
)
_GATE_UP = (
    *linear("layers.{}.mlp.gate_proj", "layers.mlp.gate"),
    *linear("layers.{}.mlp.up_proj", "layers.mlp.up"),
)
_DOWN = linear("layers.{}.mlp.down_proj", "layers.mlp.down")
_PRE_NORMS = (
    *norm("layers.{}.input_layernorm", "layers.attention_norm"),
    *norm("layers.{}.post_attention_layernorm", "layers.mlp_norm"),
)
_POST_NORMS = (
    *norm("layers.{}.post_attention_layernorm", "layers.attention_post_norm"),
    *norm("layers.{}.post_feedforward_layernorm", "layers.mlp_post_norm"),
)
_GEMMA_NORMS = (
    *norm("layers.{}.input_layernorm", "layers.attention_norm"),
    *norm("layers.{}.pre_feedforward_layernorm", "layers.mlp_norm"),
    *_POST_NORMS,
)
_LLAMA_RULES = (*_ENDS, *_PRE_NORMS, *_QKV, *_OUTPUT, *_GATE_UP, *_DOWN)


def _llama_config(hf: Any) -> DecoderConfig:
    return common_config(hf, **attention_biases(hf), mlp_bias=hf.mlp_bias)


_LLAMA = Family(_llama_config, "model.", _LLAMA_RULES)


def _mistral_config(hf: Any) -> DecoderConfig:
    return common_config(hf, **everywhere_local(hf))


def _qwen2_config(hf: Any) -> DecoderConfig:
    return common_config(hf, qkv_bias=True, **local_layers(hf))


def _qwen3_config(hf: Any) -> DecoderConfig:
    return common_config(hf, qk_norm="head", **attention_biases(hf), **local_layers(hf))


def _gemma_config(hf: Any, **ours: Any) -> DecoderConfig:
    refuse(hf, "use_bidirectional_attention", hf.use_bidirectional_attention, allowed=(None, False))
    return common_config(hf, norm_offset=1.0, embedding_scale=hf.hidden_size**0.5, **attention_biases(hf), **ours)


def _local_global_gemma_config(hf: Any, **ours: Any) -> DecoderConfig:
    return _gemma_config(
        hf,
        activation=activation(hf, "hidden_activation"),
        norm_placement="both",
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        logit_softcap=hf.final_logit_softcapping,
        **local_layers(hf),
        **ours,
    )


def _gemma2_config(hf: Any) -> DecoderConfig:
    return _local_global_gemma_config(hf, attention_softcap=hf.attn_logit_softcapping)


def _gemma3_config(hf: Any) -> DecoderConfig:
    # transformers' model ignores the configuration's `attn_logit_softcapping`.
    kinds = hf.rope_parameters
    local = rope(hf, kinds["sliding_attention"])
    return _local_global_gemma_config(hf, qk_norm="head", rope=rope(hf, kinds["full_attention"]), local_rope=local)


def _ministral_config(hf: Any) -> DecoderConfig:
    return common_config(hf, **local_layers(hf))


def _ministral3_config(hf: Any) -> DecoderConfig:
    config = _mistral_config(hf)
    if (hf.rope_parameters or {}).get("llama_4_scaling_beta"):
        # Queries at positions beyond the original length have another scale, which is not implemented.
        original = hf.rope_parameters["original_max_position_embeddings"]
        return dataclasses.replace(config, max_positions=min(config.max_positions, original))
    return config


def _smollm3_config(hf: Any) -> DecoderConfig:
    unrotated = tuple(not rotated for rotated in hf.no_rope_layers)
    ours = local_layers(hf)
    if ours.get("local_layers", unrotated) != unrotated:
        refuse(hf, "layer_types", hf.layer_types, allowed=("sliding_attention where no_rope_layers has 0",))
    if any(unrotated):
        ours |= {"local_layers": unrotated, "local_rope": Rope(scaling="none")}
    return common_config(hf, **attention_biases(hf), mlp_bias=hf.mlp_bias, **ours)


def _phi3_config(hf: Any) -> DecoderConfig:
    return common_config(hf, rope=rope(hf, partial=True), **everywhere_local(hf))


_PHI3_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *linear("layers.{}.self_attn.qkv_proj", "layers.attention.q", "layers.attention.k", "layers.attention.v"),
    *_OUTPUT,
    *linear("layers.{}.mlp.gate_up_proj", "layers.mlp.gate", "layers.mlp.up"),
    *_DOWN,
)


_OLMO_RULES = (*_ENDS, *_POST_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_GATE_UP, *_DOWN)


def _olmo2_config(hf: Any) -> DecoderConfig:
    return common_config(hf, norm_placement="post", qk_norm="projection", **attention_biases(hf))


def _olmo3_config(hf: Any) -> DecoderConfig:
    kinds = hf.rope_parameters
    return common_config(
        hf,
        norm_placement="post",
        qk_norm="projection",
        rope=rope(hf, kinds["full_attention"]),
        local_rope=rope(hf, kinds["sliding_attention"]),
        **attention_biases(hf),
        **local_layers(hf),
    )


def _glm4_config(hf: Any) -> DecoderConfig:
    positions = dataclasses.replace(rope(hf, partial=True), interleaved=True)
    return common_config(hf, norm_placement="both", qkv_bias=hf.attention_bias, rope=positions)


_GLM4_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *norm("layers.{}.post_self_attn_layernorm", "layers.attention_post_norm"),
    *norm("layers.{}.post_mlp_layernorm", "layers.mlp_post_norm"),
    *_QKV,
    *_OUTPUT,
    *linear("layers.{}.mlp.gate_up_proj", "layers.mlp.gate", "layers.mlp.up"),
    *_DOWN,
)


def _granite_config(hf: Any) -> DecoderConfig:
    return common_config(
        hf,
        **attention_biases(hf),
        mlp_bias=hf.mlp_bias,
        embedding_scale=float(hf.embedding_multiplier),
        attention_scale=float(hf.attention_multiplier),
        residual_scale=float(hf.residual_multiplier),
        logit_divisor=float(hf.logits_scaling),
    )


def _stablelm_config(hf: Any) -> DecoderConfig:
    refuse(hf, "qk_layernorm", hf.qk_layernorm, allowed=(False,))
    parallel = "one_norm" if hf.use_parallel_residual else None
    return common_config(
        hf,
        norm="layer",
        parallel=parallel,
        qkv_bias=hf.use_qkv_bias,
        rope=rope(hf, partial=True),
        **equal_heads(hf),
    )


_ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def _phi_config(hf: Any) -> DecoderConfig:
    refuse(hf, "qk_layernorm", hf.qk_layernorm, allowed=(False,))
    return common_config(
        hf,
        norm="layer",
        gated_mlp=False,
        parallel="one_norm",
        unembedding_bias=True,
        rope=rope(hf, partial=True),
        **_ALL_BIASES,
    )


_PHI_RULES = (
    Rule("embed_tokens.weight", ("embedding",)),
    *norm("layers.{}.input_layernorm", "layers.attention_norm"),
    *_QKV,
    *linear("layers.{}.self_attn.dense", "layers.attention.o"),
    *linear("layers.{}.mlp.fc1", "layers.mlp.up"),
    *linear("layers.{}.mlp.fc2", "layers.mlp.down"),
    *norm("final_layernorm", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
    Rule("lm_head.bias", ("unembedding_bias",)),
)


def _gpt_neox_config(hf: Any) -> DecoderConfig:
    return common_config(
        hf,
        norm="layer",
        gated_mlp=False,
        parallel="two_norms" if hf.use_parallel_residual else None,
        mlp_bias=True,
        rope=rope(hf, partial=True),
        num_kv_heads=hf.num_attention_heads,
        **equal_heads(hf),
        **attention_biases(hf),
    )


_GPT_NEOX_RULES = (
    Rule("embed_in.weight", ("embedding",)),
    *norm("layers.{}.input_layernorm", "layers.attention_norm"),
    *linear(
        "layers.{}.attention.query_key_value",
        "layers.attention.q",
        "layers.attention.k",
        "layers.attention.v",
        by_head=True,
    ),
    *linear("layers.{}.attention.dense", "layers.attention.o"),
    *norm("layers.{}.post_attention_layernorm", "layers.mlp_norm"),
    *linear("layers.{}.mlp.dense_h_to_4h", "layers.mlp.up"),
    *linear("layers.{}.mlp.dense_4h_to_h", "layers.mlp.down"),
    *norm("final_layer_norm", "final_norm"),
    Rule("embed_out.weight", ("unembedding",)),
)


def _gpt2_config(hf: Any) -> DecoderConfig:
    refuse(hf, "activation_function", hf.activation_function, allowed=ACTIVATIONS)
    refuse(hf, "scale_attn_by_inverse_layer_idx", hf.scale_attn_by_inverse_layer_idx, allowed=(False,))
    refuse(hf, "add_cross_attention", hf.add_cross_attention, allowed=(False,))
    # `reorder_and_upcast_attn` selects float32 attention logits; ours are always float32.
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
        attention_scale=None if hf.scale_attn_weights else 1.0,
        tie_embeddings=hf.tie_word_embeddings,
        **_ALL_BIASES,
    )


_GPT2_RULES = (
    Rule("wte.weight", ("embedding",)),
    Rule("wpe.weight", ("position_embedding",)),
    *norm("h.{}.ln_1", "layers.attention_norm"),
    # GPT-2's Conv1D holds `[in, out]`, with query, key and value concatenated.
    *linear("h.{}.attn.c_attn", "layers.attention.q", "layers.attention.k", "layers.attention.v", transpose=False),
    *linear("h.{}.attn.c_proj", "layers.attention.o", transpose=False),
    *norm("h.{}.ln_2", "layers.mlp_norm"),
    *linear("h.{}.mlp.c_fc", "layers.mlp.up", transpose=False),
    *linear("h.{}.mlp.c_proj", "layers.mlp.down", transpose=False),
    *norm("ln_f", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
)


def _qwen_config(hf: Any) -> DecoderConfig:
    refuse(hf, "no_bias", hf.no_bias, allowed=(True,))
    refuse(hf, "scale_attn_weights", hf.scale_attn_weights, allowed=(True,))
    # `use_dynamic_ntk` and `use_logn_attn` take effect beyond `seq_length`, and such sequences raise an error.
    return DecoderConfig(
        family="qwen",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        # Theirs is the size of gate and up together.
        intermediate_size=hf.intermediate_size // 2,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=hf.kv_channels,
        max_positions=hf.seq_length,
        norm_eps=hf.layer_norm_epsilon,
        rope=Rope(theta=float(hf.rotary_emb_base), fraction=float(hf.rotary_pct)),
        qkv_bias=True,
        tie_embeddings=hf.tie_word_embeddings,
    )


_QWEN_RULES = (
    Rule("wte.weight", ("embedding",)),
    *norm("h.{}.ln_1", "layers.attention_norm"),
    *linear("h.{}.attn.c_attn", "layers.attention.q", "layers.attention.k", "layers.attention.v"),
    *linear("h.{}.attn.c_proj", "layers.attention.o"),
    *norm("h.{}.ln_2", "layers.mlp_norm"),
    *linear("h.{}.mlp.w1", "layers.mlp.up"),
    *linear("h.{}.mlp.w2", "layers.mlp.gate"),
    *linear("h.{}.mlp.c_proj", "layers.mlp.down"),
    *norm("ln_f", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
)


def _mixtral_config(hf: Any) -> DecoderConfig:
    mixture = Mixture(experts=hf.num_local_experts, per_token=hf.num_experts_per_tok)
    return common_config(hf, mixture=mixture, **everywhere_local(hf))


_MIXTRAL_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *_QKV,
    *_OUTPUT,
    *linear("layers.{}.block_sparse_moe.gate", "layers.mlp.router"),
    *linear("layers.{}.block_sparse_moe.experts.{}.w1", "layers.mlp.gate"),
    *linear("layers.{}.block_sparse_moe.experts.{}.w3", "layers.mlp.up"),
    *linear("layers.{}.block_sparse_moe.experts.{}.w2", "layers.mlp.down"),
)


def _optionally_normalized(hf: Any) -> Mixture:
    return Mixture(experts=hf.num_experts, per_token=hf.num_experts_per_tok, normalized=hf.norm_topk_prob)


def _qwen3_moe_config(hf: Any) -> DecoderConfig:
    refuse(hf, "mlp_only_layers", hf.mlp_only_layers, allowed=([],))
    refuse(hf, "decoder_sparse_step", hf.decoder_sparse_step, allowed=(1,))
    return common_config(
        hf,
        qk_norm="head",
        intermediate_size=hf.moe_intermediate_size,
        mixture=_optionally_normalized(hf),
        **attention_biases(hf),
        **everywhere_local(hf),
    )


def _olmoe_config(hf: Any) -> DecoderConfig:
    return common_config(
        hf, qk_norm="projection", qkv_clip=hf.clip_qkv, mixture=_optionally_normalized(hf), **attention_biases(hf)
    )


_QWEN3_MOE_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *_QKV,
    *_QK_NORMS,
    *_OUTPUT,
    *linear("layers.{}.mlp.gate", "layers.mlp.router"),
    *linear("layers.{}.mlp.experts.{}.gate_proj", "layers.mlp.gate"),
    *linear("layers.{}.mlp.experts.{}.up_proj", "layers.mlp.up"),
    *linear("layers.{}.mlp.experts.{}.down_proj", "layers.mlp.down"),
)


def _gpt_oss_config(hf: Any) -> DecoderConfig:
    mixture = Mixture(
        experts=hf.num_local_experts,
        per_token=hf.num_experts_per_tok,
        router_bias=True,
        # Constants of transformers' code, not of its configuration, before they were options.
        clamp=float(getattr(hf, "swiglu_limit", 7.0)),
        swish=float(getattr(hf, "swiglu_alpha", 1.702)),
    )
    # `hidden_act` is not read: `clamp` names the activation.
    return common_config(
        hf,
        activation="silu",
        mlp_bias=True,
        attention_sinks=True,
        mixture=mixture,
        **attention_biases(hf),
        **local_layers(hf),
    )


_GPT_OSS_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *_QKV,
    Rule("layers.{}.self_attn.sinks", ("layers.attention.sinks",)),
    *_OUTPUT,
    *linear("layers.{}.mlp.router", "layers.mlp.router"),
    Rule("layers.{}.mlp.experts.gate_up_proj", ("layers.mlp.gate.kernel", "layers.mlp.up.kernel"), by_column=True),
    Rule("layers.{}.mlp.experts.gate_up_proj_bias", ("layers.mlp.gate.bias", "layers.mlp.up.bias"), by_column=True),
    Rule("layers.{}.mlp.experts.down_proj", ("layers.mlp.down.kernel",)),
    Rule("layers.{}.mlp.experts.down_proj_bias", ("layers.mlp.down.bias",)),
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(_mistral_config, "model.", _LLAMA_RULES),
    "ministral": Family(_ministral_config, "model.", _LLAMA_RULES),
    "ministral3": Family(_ministral3_config, "model.", _LLAMA_RULES),
    "smollm3": Family(_smollm3_config, "model.", _LLAMA_RULES),
    "qwen": Family(_qwen_config, "transformer.", _QWEN_RULES, native=False),
    "qwen2": Family(_qwen2_config, "model.", _LLAMA_RULES),
    "qwen3": Family(_qwen3_config, "model.", (*_LLAMA_RULES, *_QK_NORMS)),
    "gemma": Family(_gemma_config, "model.", _LLAMA_RULES),
    "gemma2": Family(_gemma2_config, "model.", (*_ENDS, *_GEMMA_NORMS, *_QKV, *_OUTPUT, *_GATE_UP, *_DOWN)),
    "gemma3_text": Family(
        _gemma3_config, "model.", (*_ENDS, *_GEMMA_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_GATE_UP, *_DOWN)
    ),
    "olmo2": Family(_olmo2_config, "model.", _OLMO_RULES),
    "olmo3": Family(_olmo3_config, "model.", _OLMO_RULES),
    "glm4": Family(_glm4_config, "model.", _GLM4_RULES),
    "granite": Family(_granite_config, "model.", _LLAMA_RULES),
    "stablelm": Family(_stablelm_config, "model.", _LLAMA_RULES),
    "phi": Family(_phi_config, "model.", _PHI_RULES),
    "phi3": Family(_phi3_config, "model.", _PHI3_RULES),
    "gpt_neox": Family(_gpt_neox_config, "gpt_neox.", _GPT_NEOX_RULES),
    "mixtral": Family(_mixtral_config, "model.", _MIXTRAL_RULES),
    "qwen3_moe": Family(_qwen3_moe_config, "model.", _QWEN3_MOE_RULES),
    "olmoe": Family(_olmoe_config, "model.", _QWEN3_MOE_RULES),
    "gpt_oss": Family(_gpt_oss_config, "model.", _GPT_OSS_RULES),
    "gpt2": Family(_gpt2_config, "transformer.", _GPT2_RULES),
}
