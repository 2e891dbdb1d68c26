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
    two_ropes,
)
from calibjax.models.rules import Rule, linear, norm
from calibjax.nn.blocks import ACTIVATIONS, Rope
from calibjax.nn.experts import Mixture
from calibjax.runtime.errors import UserError, require_directory
from calibjax.runtime.platforms import torch_left_out

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    `read_config` converts their configuration to ours. Tensor names may begin with `prefix`. A rule is skipped if a
    model's tree lacks its targets, such as an absent bias. Where transformers does not know the family (`native` is
    False), `read_config` gets the fields of the JSON file, which must be complete.
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

    Raises:
        UserError: the file is missing or cannot be read, or its `model_type` or a setting is not supported.
    """
    if isinstance(source, str | Path):
        folder = require_directory(source, "model")
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{folder}: expected a Hugging Face model, but there is no config.json.")
        return config_from_settings(file, read_settings(file))
    if source.model_type in TEXT_MODELS:
        hf: Any = source
        text = config_from_hf(hf.text_config)
        return dataclasses.replace(text, tie_embeddings=hf.tie_word_embeddings, logit_softcap=None)
    return _convert(source)


def config_from_settings(file: Path, settings: dict[str, Any]) -> DecoderConfig:
    """Converts the settings of a config.json, or those that another `file` implies; see `config_from_hf`."""
    family = settings.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{file}: {_unsupported(family)}")
    check_sizes(file, settings)
    if not FAMILIES[family].native:
        return _convert(types.SimpleNamespace(**settings))
    if family == "mistral" and "layer_types" in settings:  # as transformers reads such files
        settings = {**settings, "model_type": "ministral"}
    with torch_left_out():
        from transformers import AutoConfig

    try:
        hf = AutoConfig.for_model(**settings)
    except Exception as error:  # transformers computes with settings before, and while, it checks them
        raise UserError(f"{file}: transformers cannot read it: {error!r}") from error
    return _convert(hf)


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


def _unsupported(model_type: object) -> str:
    return f"model_type {model_type!r} is not supported; supported: {', '.join(sorted({*FAMILIES, *TEXT_MODELS}))}."


# --- rules of tensors that several families have in common ---


def _norms(layer: str = "layers.{}", **targets: str) -> tuple[Rule, ...]:
    """Rules of the norms of a layer, by their names in files."""
    return tuple(rule for name, target in targets.items() for rule in norm(f"{layer}.{name}", f"layers.{target}"))


def _linears(module: str, place: str, transpose: bool = True, **targets: str) -> tuple[Rule, ...]:
    """Rules of the projections of a module, by their names in files."""
    return tuple(
        rule
        for name, target in targets.items()
        for rule in linear(f"{module}.{name}", f"{place}.{target}", transpose=transpose)
    )


_ENDS = (
    Rule("embed_tokens.weight", ("embedding",)),
    *norm("norm", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
)
_QKV = _linears("layers.{}.self_attn", "layers.attention", q_proj="q", k_proj="k", v_proj="v")
_OUTPUT = linear("layers.{}.self_attn.o_proj", "layers.attention.o")
_QK_NORMS = _norms("layers.{}.self_attn", q_norm="attention.q_norm", k_norm="attention.k_norm")
_MLP = _linears("layers.{}.mlp", "layers.mlp", gate_proj="gate", up_proj="up", down_proj="down")
_FUSED_QKV = ("layers.attention.q", "layers.attention.k", "layers.attention.v")
_FUSED_MLP = (
    *linear("layers.{}.mlp.gate_up_proj", "layers.mlp.gate", "layers.mlp.up"),
    *linear("layers.{}.mlp.down_proj", "layers.mlp.down"),
)
_PRE_NORMS = _norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm")
_POST_NORMS = _norms(post_attention_layernorm="attention_post_norm", post_feedforward_layernorm="mlp_post_norm")
_GEMMA_NORMS = (*_norms(input_layernorm="attention_norm", pre_feedforward_layernorm="mlp_norm"), *_POST_NORMS)
_LLAMA_RULES = (*_ENDS, *_PRE_NORMS, *_QKV, *_OUTPUT, *_MLP)

# --- families ---


def _llama_config(hf: Any) -> DecoderConfig:
    return common_config(hf, **attention_biases(hf), mlp_bias=hf.mlp_bias)


def _mistral_config(hf: Any) -> DecoderConfig:
    return common_config(hf, **everywhere_local(hf))


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
    *_norms("h.{}", ln_1="attention_norm"),
    *linear("h.{}.attn.c_attn", *_FUSED_QKV),
    *linear("h.{}.attn.c_proj", "layers.attention.o"),
    *_norms("h.{}", ln_2="mlp_norm"),
    *_linears("h.{}.mlp", "layers.mlp", w1="up", w2="gate", c_proj="down"),
    *norm("ln_f", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
)


def _qwen2_config(hf: Any) -> DecoderConfig:
    return common_config(hf, qkv_bias=True, **local_layers(hf))


def _qwen3_config(hf: Any) -> DecoderConfig:
    return common_config(hf, qk_norm="head", **attention_biases(hf), **local_layers(hf))


def _gemma_config(hf: Any, **ours: Any) -> DecoderConfig:
    refuse(hf, "use_bidirectional_attention", hf.use_bidirectional_attention, allowed=(None, False))
    return common_config(hf, norm_offset=1.0, embedding_scale=hf.hidden_size**0.5, **attention_biases(hf), **ours)


def _local_gemma_config(hf: Any, **ours: Any) -> DecoderConfig:
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
    return _local_gemma_config(hf, attention_softcap=hf.attn_logit_softcapping)


def _gemma3_config(hf: Any) -> DecoderConfig:
    # transformers' model ignores the configuration's `attn_logit_softcapping`.
    return _local_gemma_config(hf, qk_norm="head", **two_ropes(hf))


def _phi3_config(hf: Any) -> DecoderConfig:
    return common_config(hf, rope=rope(hf, partial=True), **everywhere_local(hf))


def _olmo2_config(hf: Any, **ours: Any) -> DecoderConfig:
    return common_config(hf, norm_placement="post", qk_norm="projection", **attention_biases(hf), **ours)


def _olmo3_config(hf: Any) -> DecoderConfig:
    return _olmo2_config(hf, **two_ropes(hf), **local_layers(hf))


def _glm4_config(hf: Any) -> DecoderConfig:
    positions = dataclasses.replace(rope(hf, partial=True), interleaved=True)
    return common_config(hf, norm_placement="both", qkv_bias=hf.attention_bias, rope=positions)


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
    ours = {"norm": "layer", "parallel": parallel, "qkv_bias": hf.use_qkv_bias}
    return common_config(hf, rope=rope(hf, partial=True), **ours, **equal_heads(hf))


_ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def _phi_config(hf: Any) -> DecoderConfig:
    refuse(hf, "qk_layernorm", hf.qk_layernorm, allowed=(False,))
    ours = {"norm": "layer", "gated_mlp": False, "parallel": "one_norm", "unembedding_bias": True}
    return common_config(hf, rope=rope(hf, partial=True), **ours, **_ALL_BIASES)


_PHI_RULES = (
    Rule("embed_tokens.weight", ("embedding",)),
    *_norms(input_layernorm="attention_norm"),
    *_QKV,
    *linear("layers.{}.self_attn.dense", "layers.attention.o"),
    *_linears("layers.{}.mlp", "layers.mlp", fc1="up", fc2="down"),
    *norm("final_layernorm", "final_norm"),
    Rule("lm_head.weight", ("unembedding",)),
    Rule("lm_head.bias", ("unembedding_bias",)),
)


def _gpt_neox_config(hf: Any) -> DecoderConfig:
    parallel = "two_norms" if hf.use_parallel_residual else None
    ours = {"norm": "layer", "gated_mlp": False, "parallel": parallel, "mlp_bias": True}
    ours |= {"rope": rope(hf, partial=True), "num_kv_heads": hf.num_attention_heads}
    return common_config(hf, **ours, **equal_heads(hf), **attention_biases(hf))


_GPT_NEOX_RULES = (
    Rule("embed_in.weight", ("embedding",)),
    *_norms(input_layernorm="attention_norm"),
    *linear("layers.{}.attention.query_key_value", *_FUSED_QKV, by_head=True),
    *linear("layers.{}.attention.dense", "layers.attention.o"),
    *_norms(post_attention_layernorm="mlp_norm"),
    *_linears("layers.{}.mlp", "layers.mlp", dense_h_to_4h="up", dense_4h_to_h="down"),
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
    *_norms("h.{}", ln_1="attention_norm"),
    # GPT-2's Conv1D holds `[in, out]`, with query, key and value concatenated.
    *linear("h.{}.attn.c_attn", *_FUSED_QKV, transpose=False),
    *linear("h.{}.attn.c_proj", "layers.attention.o", transpose=False),
    *_norms("h.{}", ln_2="mlp_norm"),
    *_linears("h.{}.mlp", "layers.mlp", transpose=False, c_fc="up", c_proj="down"),
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
    *_linears("layers.{}.block_sparse_moe.experts.{}", "layers.mlp", w1="gate", w3="up", w2="down"),
)


def _optionally_normalized(hf: Any) -> Mixture:
    return Mixture(experts=hf.num_experts, per_token=hf.num_experts_per_tok, normalized=hf.norm_topk_prob)


def _qwen3_moe_config(hf: Any) -> DecoderConfig:
    refuse(hf, "mlp_only_layers", hf.mlp_only_layers, allowed=([],))
    refuse(hf, "decoder_sparse_step", hf.decoder_sparse_step, allowed=(1,))
    ours = {"qk_norm": "head", "intermediate_size": hf.moe_intermediate_size, "mixture": _optionally_normalized(hf)}
    return common_config(hf, **ours, **attention_biases(hf), **everywhere_local(hf))


def _olmoe_config(hf: Any) -> DecoderConfig:
    ours = {"qk_norm": "projection", "qkv_clip": hf.clip_qkv, "mixture": _optionally_normalized(hf)}
    return common_config(hf, **ours, **attention_biases(hf))


_QWEN3_MOE_RULES = (
    *_ENDS,
    *_PRE_NORMS,
    *_QKV,
    *_QK_NORMS,
    *_OUTPUT,
    *linear("layers.{}.mlp.gate", "layers.mlp.router"),
    *_linears("layers.{}.mlp.experts.{}", "layers.mlp", gate_proj="gate", up_proj="up", down_proj="down"),
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
    ours = {"activation": "silu", "mlp_bias": True, "attention_sinks": True, "mixture": mixture}
    return common_config(hf, **ours, **attention_biases(hf), **local_layers(hf))


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
_GLM4_NORMS = _norms(post_self_attn_layernorm="attention_post_norm", post_mlp_layernorm="mlp_post_norm")
_OLMO_RULES = (*_ENDS, *_POST_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_MLP)
_PHI3_QKV = linear("layers.{}.self_attn.qkv_proj", *_FUSED_QKV)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama_config, "model.", _LLAMA_RULES),
    "mistral": Family(_mistral_config, "model.", _LLAMA_RULES),
    "ministral": Family(lambda hf: common_config(hf, **local_layers(hf)), "model.", _LLAMA_RULES),
    "ministral3": Family(_ministral3_config, "model.", _LLAMA_RULES),
    "smollm3": Family(_smollm3_config, "model.", _LLAMA_RULES),
    "qwen": Family(_qwen_config, "transformer.", _QWEN_RULES, native=False),
    "qwen2": Family(_qwen2_config, "model.", _LLAMA_RULES),
    "qwen3": Family(_qwen3_config, "model.", (*_LLAMA_RULES, *_QK_NORMS)),
    "gemma": Family(_gemma_config, "model.", _LLAMA_RULES),
    "gemma2": Family(_gemma2_config, "model.", (*_ENDS, *_GEMMA_NORMS, *_QKV, *_OUTPUT, *_MLP)),
    "gemma3_text": Family(_gemma3_config, "model.", (*_ENDS, *_GEMMA_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_MLP)),
    "olmo2": Family(_olmo2_config, "model.", _OLMO_RULES),
    "olmo3": Family(_olmo3_config, "model.", _OLMO_RULES),
    "glm4": Family(_glm4_config, "model.", (*_ENDS, *_PRE_NORMS, *_GLM4_NORMS, *_QKV, *_OUTPUT, *_FUSED_MLP)),
    "granite": Family(_granite_config, "model.", _LLAMA_RULES),
    "stablelm": Family(_stablelm_config, "model.", _LLAMA_RULES),
    "phi": Family(_phi_config, "model.", _PHI_RULES),
    "phi3": Family(_phi3_config, "model.", (*_ENDS, *_PRE_NORMS, *_PHI3_QKV, *_OUTPUT, *_FUSED_MLP)),
    "gpt_neox": Family(_gpt_neox_config, "gpt_neox.", _GPT_NEOX_RULES),
    "mixtral": Family(_mixtral_config, "model.", _MIXTRAL_RULES),
    "qwen3_moe": Family(_qwen3_moe_config, "model.", _QWEN3_MOE_RULES),
    "olmoe": Family(_olmoe_config, "model.", _QWEN3_MOE_RULES),
    "gpt_oss": Family(_gpt_oss_config, "model.", _GPT_OSS_RULES),
    "gpt2": Family(_gpt2_config, "transformer.", _GPT2_RULES),
}
