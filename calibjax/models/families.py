"""Registry of model families: how each maps its configuration and tensor names to ours.

A new family is one entry of `FAMILIES`. A setting that changes the numbers and is not implemented is refused by name.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.models.config import MAX_LAYERS, DecoderConfig
from calibjax.models.rules import Rule
from calibjax.nn.blocks import ACTIVATIONS, Rope
from calibjax.nn.experts import Mixture
from calibjax.runtime.errors import INT_MAX, UserError, require_directory, shortened
from calibjax.runtime.files import read_json
from calibjax.runtime.platforms import torch_left_out

Fields = dict[str, Any]
"""Fields of a `DecoderConfig`, or settings of a config.json."""
Rules = tuple[Rule, ...]


class Family(NamedTuple):
    """One `model_type` of Hugging Face.

    `fields` returns those fields of a `DecoderConfig` that `_SETTINGS` lacks or reads otherwise. A rule is skipped if
    the model has no parameter for it, such as a bias. Tensor names may begin with `prefix`. Where transformers does not
    know the family (`native` is False), `fields` gets config.json itself, which must then have every setting.
    """

    fields: Callable[[Any], Fields]
    rules: Rules
    prefix: str = "model."
    native: bool = True

    def stored(self, config: DecoderConfig, leaves: Container[str]) -> Iterator[tuple[Rule, int | None]]:
        """Yields the rules whose targets are among the parameters `leaves`, each with every layer, or with None."""
        for rule in self.rules:
            if all(target in leaves for target in rule.targets):
                for layer in range(config.num_layers) if rule.stacked else (None,):
                    yield rule, layer


# --- config.json ---

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "original_max_position_embeddings", "sliding_window"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_embd", "n_inner", "n_head", "n_positions", "seq_length", "kv_channels"),
)
_LAYERS = ("num_hidden_layers", "n_layer")
_MAX_BYTES = 2**24
TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Multimodal `model_type`s, and the `model_type` of their language model where they do not name it."""


def config_from_hf(folder: str | Path) -> DecoderConfig:
    """Reads a model's config.json, of a multimodal model its text part, without running code from the directory.

    Raises:
        UserError: the file is missing or cannot be read, or its `model_type` or a setting is not supported.
    """
    file = require_directory(folder, "model") / "config.json"
    if not file.is_file():
        inside = file.parent / "model"  # of the directory of a run of `train sft`
        has_one = (inside / "config.json").is_file()
        there = f"there is one in {inside}" if has_one else "give the directory that holds it"
        raise UserError(f"{file.parent}: expected a Hugging Face model, but there is no config.json; {there}.")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES:,} bytes")
        settings = read_json(file)
        if not isinstance(settings, dict):
            raise ValueError(f"got {shortened(settings)!r}")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not a JSON object ({error}).") from error
    return config_from_settings(file, text_settings(settings))


def text_settings(settings: Fields) -> Fields:
    """The settings of a multimodal model's language model; the settings of a language model are returned unchanged."""
    kind, text = settings.get("model_type"), settings.get("text_config")
    if kind not in [*TEXT_MODELS] or not isinstance(text, Mapping):  # values of JSON may have no hash
        return settings
    # Whether embeddings are tied and how weights are quantised is set for the whole model, not for its text part.
    shared = ("tie_word_embeddings", "quantization_config")
    shared_settings = {name: settings[name] for name in shared if name in settings}
    # transformers does not cap the logits of a multimodal model.
    return {"model_type": TEXT_MODELS[kind], **text, **shared_settings, "final_logit_softcapping": None}


def config_from_settings(file: Path, settings: Fields) -> DecoderConfig:
    """Converts the settings of a config.json, or settings that another `file` implies; see `config_from_hf`."""
    family = settings.get("model_type")
    if family not in [*FAMILIES]:
        known = ", ".join(sorted({*FAMILIES, *TEXT_MODELS}))
        raise UserError(f"{file}: model_type {family!r} is not supported; supported: {known}.")
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


def check_sizes(file: Path, settings: Mapping[str, Any]) -> None:
    """Raises `UserError` for a size out of range: transformers makes a list entry for each layer."""
    for name in (*_SIZES, *_LAYERS):
        value = settings.get(name)
        largest = MAX_LAYERS if name in _LAYERS else INT_MAX
        if value is not None and not (type(value) is int and 1 <= value <= largest):
            raise UserError(f"{file}: {name}: expected a whole number from 1 to {largest}, got {shortened(value)}.")


_SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
"""Our fields, and the settings that most families read them from."""


def _convert(hf: Any) -> DecoderConfig:
    """The configuration with the fields of the family, and the others from the settings that most families read.

    A configuration may hold keys of other families, which transformers ignores: presence does not decide what is read.
    """
    quantized = getattr(hf, "quantization_config", None)
    if not (isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"):
        _refuse(hf, "quantization_config", quantized, allowed=(None,))
    _refuse(hf, "is_causal", getattr(hf, "is_causal", True), allowed=(True,))
    try:
        fields = FAMILIES[hf.model_type].fields(hf)
        norm_eps = "layer_norm_eps" if fields.get("norm") == "layer" else "rms_norm_eps"
        for ours, theirs in {**_SETTINGS, "norm_eps": norm_eps}.items():
            if ours not in fields:
                fields[ours] = getattr(hf, theirs)
        fields.setdefault("num_kv_heads", getattr(hf, "num_key_value_heads", None) or fields["num_heads"])
        fields.setdefault("head_dim", getattr(hf, "head_dim", None) or fields["hidden_size"] // fields["num_heads"])
        if "activation" not in fields:
            fields["activation"] = _activation(hf, "hidden_act")
        if "rope" not in fields:
            fields["rope"] = _rope(hf)
        for positions in (fields["rope"], fields.get("local_rope")):
            if positions is not None and positions.scaling == "longrope":
                # Longer sequences use other divisors for all their positions, which is not implemented.
                fields["max_positions"] = min(fields["max_positions"], positions.original_max_positions)
        return DecoderConfig(family=hf.model_type, **fields)
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        reason = f"cannot be used ({error!r})"
        if isinstance(error, AttributeError) and error.obj is hf:
            reason = f"{error.name} is missing"
        raise UserError(f"{hf.model_type} configuration: {reason}.") from error


# --- settings that several families read ---


def _refuse(hf: Any, field: str, value: Any, allowed: Any) -> None:
    if value not in [*allowed]:
        choices = ", ".join(map(repr, allowed))
        raise UserError(f"{hf.model_type} configuration: {field} = {value!r} is not supported; expected {choices}.")


def _activation(hf: Any, field: str) -> str:
    _refuse(hf, field, getattr(hf, field), allowed=ACTIVATIONS)
    return getattr(hf, field)


def _equal_heads(hf: Any) -> Fields:
    """Heads that divide `hidden_size` equally and ignore `head_dim`, which transformers reads for rotary positions."""
    head_dim = hf.hidden_size // hf.num_attention_heads
    _refuse(hf, "head_dim", getattr(hf, "head_dim", None), allowed=(None, head_dim))
    return {"head_dim": head_dim}


def _attention_biases(hf: Any) -> Fields:
    return {"qkv_bias": hf.attention_bias, "output_bias": hf.attention_bias}


def _local_layers(hf: Any) -> Fields:
    """Our fields for `layer_types` and `sliding_window`; empty if no layer has a window."""
    for kind in hf.layer_types:
        _refuse(hf, "layer_types", kind, allowed=("full_attention", "sliding_attention"))
    local = tuple(kind == "sliding_attention" for kind in hf.layer_types)
    if not any(local):
        return {}
    if hf.sliding_window is None:
        raise UserError(f"{hf.model_type} configuration: layer_types has sliding_attention but sliding_window is null.")
    return {"local_layers": local, "window": hf.sliding_window}


def _everywhere_local(hf: Any) -> Fields:
    """Our fields for a `sliding_window` of all layers; empty if it is not set."""
    if hf.sliding_window is None:
        return {}
    return {"local_layers": (True,) * hf.num_hidden_layers, "window": hf.sliding_window}


# Required fields of each `rope_type`. "dynamic" is "default" up to `max_position_embeddings`, which is our limit.
_ROPE_TYPES = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor",),
}


def _rope(hf: Any, parameters: Mapping[str, Any] | None = None, partial: bool = False) -> Rope:
    """The rotary positions of `parameters`, which describe one kind of layer; by default of the configuration."""
    settings: Mapping[str, Any] = parameters or hf.rope_parameters or {}
    kind = settings.get("rope_type", "default")
    _refuse(hf, "rope_type", kind, allowed=_ROPE_TYPES)
    required = (*_ROPE_TYPES[kind], "rope_theta")
    for name in (*required, "partial_rotary_factor") if partial else required:
        if settings.get(name) is None:
            raise UserError(f"{hf.model_type} configuration: rope_type {kind!r} requires {name}, got null.")
    fields: Fields = {name: float(settings[name]) for name in _ROPE_TYPES[kind] if name != "short_factor"}
    if kind in ("llama3", "yarn", "longrope"):
        # As in transformers, the top-level field takes precedence, unless kinds of layers differ.
        original = None if parameters else getattr(hf, "original_max_position_embeddings", None)
        original = original or settings.get("original_max_position_embeddings") or hf.max_position_embeddings
        fields["original_max_positions"] = int(original)
    if not partial and kind != "default":
        # transformers ignores it without scaling and fails with scaling.
        _refuse(hf, "partial_rotary_factor", settings.get("partial_rotary_factor"), allowed=(None, 1.0))
    if kind == "yarn":
        fields |= _yarn(hf, settings)
    elif kind == "longrope":
        factor = settings.get("factor") or hf.max_position_embeddings / fields["original_max_positions"]
        amplitude = settings.get("attention_factor")
        if amplitude is None:
            amplitude = math.sqrt(1 + math.log(max(factor, 1)) / math.log(fields["original_max_positions"]))
        fields |= {"divisors": tuple(map(float, settings["short_factor"])), "amplitude": float(amplitude)}
    return Rope(
        theta=float(settings["rope_theta"]),
        fraction=float(settings["partial_rotary_factor"]) if partial else 1.0,
        scaling=None if kind in ("default", "dynamic") else kind,
        **fields,
    )


def _yarn(hf: Any, settings: Mapping[str, Any]) -> Fields:
    def stretch(mscale: Any) -> float:
        return 0.1 * mscale * math.log(max(settings["factor"], 1)) + 1

    amplitude = settings.get("attention_factor")
    if amplitude is None:
        scales = settings.get("mscale"), settings.get("mscale_all_dim")
        amplitude = stretch(scales[0]) / stretch(scales[1]) if all(scales) else stretch(1)
    return {
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        # transformers reads it from the whole configuration, even if kinds of layers differ.
        "truncate": bool(hf.rope_parameters.get("truncate", True)),
        "amplitude": float(amplitude),
    }


def _two_ropes(hf: Any) -> Fields:
    kinds = hf.rope_parameters
    return {"rope": _rope(hf, kinds["full_attention"]), "local_rope": _rope(hf, kinds["sliding_attention"])}


# --- rules of tensors that several families have in common ---


def _norm(source: str, target: str) -> Rules:
    return Rule(f"{source}.weight", (f"{target}.scale",)), Rule(f"{source}.bias", (f"{target}.bias",))


def _ends(embedding: str = "embed_tokens", norm: str = "norm", unembedding: str = "lm_head") -> Rules:
    """Rules of the embedding, the final norm and the unembedding, by their names in files."""
    return (
        Rule(f"{embedding}.weight", ("embedding",)),
        *_norm(norm, "final_norm"),
        Rule(f"{unembedding}.weight", ("unembedding",)),
    )


def _norms(layer: str = "layers.{}", **targets: str) -> Rules:
    return tuple(rule for name, target in targets.items() for rule in _norm(f"{layer}.{name}", f"layers.{target}"))


def _linear(source: str, *targets: str, transpose: bool = True, groups: str | None = None) -> Rules:
    kernels, biases = (tuple(f"{target}.{name}" for target in targets) for name in ("kernel", "bias"))
    return Rule(f"{source}.weight", kernels, transpose, groups), Rule(f"{source}.bias", biases, groups=groups)


def _linears(module: str, place: str, transpose: bool = True, **targets: str) -> Rules:
    return tuple(
        rule
        for name, target in targets.items()
        for rule in _linear(f"{module}.{name}", f"{place}.{target}", transpose=transpose)
    )


_ENDS = _ends()
_FUSED_QKV = ("layers.attention.q", "layers.attention.k", "layers.attention.v")
_QKV = _linears("layers.{}.self_attn", "layers.attention", q_proj="q", k_proj="k", v_proj="v")
_OUTPUT = _linear("layers.{}.self_attn.o_proj", "layers.attention.o")
_QK_NORMS = _norms("layers.{}.self_attn", q_norm="attention.q_norm", k_norm="attention.k_norm")
_MLP = _linears("layers.{}.mlp", "layers.mlp", gate_proj="gate", up_proj="up", down_proj="down")
_FUSED_MLP = (
    *_linear("layers.{}.mlp.gate_up_proj", "layers.mlp.gate", "layers.mlp.up"),
    *_linear("layers.{}.mlp.down_proj", "layers.mlp.down"),
)
_PRE_NORMS = _norms(input_layernorm="attention_norm", post_attention_layernorm="mlp_norm")
_POST_NORMS = _norms(post_attention_layernorm="attention_post_norm", post_feedforward_layernorm="mlp_post_norm")
_GEMMA_NORMS = (*_norms(input_layernorm="attention_norm", pre_feedforward_layernorm="mlp_norm"), *_POST_NORMS)
_ALL_BUT_MLP = (*_ENDS, *_PRE_NORMS, *_QKV, *_OUTPUT)
_LLAMA_RULES = (*_ALL_BUT_MLP, *_MLP)

# --- families ---

_ALL_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def _llama(hf: Any) -> Fields:
    return {**_attention_biases(hf), "mlp_bias": hf.mlp_bias}


def _ministral3(hf: Any) -> Fields:
    fields = _everywhere_local(hf)
    if (hf.rope_parameters or {}).get("llama_4_scaling_beta"):
        # Queries at positions beyond the original length have another scale, which is not implemented.
        original = hf.rope_parameters["original_max_position_embeddings"]
        fields["max_positions"] = min(hf.max_position_embeddings, original)
    return fields


def _smollm3(hf: Any) -> Fields:
    unrotated = tuple(not rotated for rotated in hf.no_rope_layers)
    fields = _local_layers(hf)
    if fields.get("local_layers", unrotated) != unrotated:
        _refuse(hf, "layer_types", hf.layer_types, allowed=("sliding_attention where no_rope_layers has 0",))
    if any(unrotated):
        fields |= {"local_layers": unrotated, "local_rope": Rope(scaling="none")}
    return {**_llama(hf), **fields}


def _qwen(hf: Any) -> Fields:
    _refuse(hf, "no_bias", hf.no_bias, allowed=(True,))
    _refuse(hf, "scale_attn_weights", hf.scale_attn_weights, allowed=(True,))
    # `use_dynamic_ntk` and `use_logn_attn` take effect beyond `seq_length`, and such sequences raise an error.
    return {
        "intermediate_size": hf.intermediate_size // 2,  # theirs is the size of gate and up together
        "num_kv_heads": hf.num_attention_heads,
        "head_dim": hf.kv_channels,
        "max_positions": hf.seq_length,
        "norm_eps": hf.layer_norm_epsilon,
        "activation": "silu",
        "rope": Rope(theta=float(hf.rotary_emb_base), fraction=float(hf.rotary_pct)),
        "qkv_bias": True,
    }


_QWEN_RULES = (
    *_ends("wte", "ln_f"),
    *_norms("h.{}", ln_1="attention_norm", ln_2="mlp_norm"),
    *_linear("h.{}.attn.c_attn", *_FUSED_QKV),
    *_linear("h.{}.attn.c_proj", "layers.attention.o"),
    *_linears("h.{}.mlp", "layers.mlp", w1="up", w2="gate", c_proj="down"),
)


def _gemma(hf: Any) -> Fields:
    _refuse(hf, "use_bidirectional_attention", hf.use_bidirectional_attention, allowed=(None, False))
    return {"norm_offset": 1.0, "embedding_scale": hf.hidden_size**0.5, **_attention_biases(hf)}


def _local_gemma(hf: Any) -> Fields:
    return {
        **_gemma(hf),
        **_local_layers(hf),
        "activation": _activation(hf, "hidden_activation"),
        "norm_placement": "both",
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "logit_softcap": hf.final_logit_softcapping,
    }


def _gemma3(hf: Any) -> Fields:
    # transformers' model ignores the configuration's `attn_logit_softcapping`.
    return {**_local_gemma(hf), **_two_ropes(hf), "qk_norm": "head"}


def _olmo2(hf: Any) -> Fields:
    return {"norm_placement": "post", "qk_norm": "projection", **_attention_biases(hf)}


def _glm4(hf: Any) -> Fields:
    positions = dataclasses.replace(_rope(hf, partial=True), interleaved=True)
    return {"norm_placement": "both", "qkv_bias": hf.attention_bias, "rope": positions}


def _granite(hf: Any) -> Fields:
    return {
        **_llama(hf),
        "embedding_scale": float(hf.embedding_multiplier),
        "attention_scale": float(hf.attention_multiplier),
        "residual_scale": float(hf.residual_multiplier),
        "logit_divisor": float(hf.logits_scaling),
    }


def _stablelm(hf: Any) -> Fields:
    _refuse(hf, "qk_layernorm", hf.qk_layernorm, allowed=(False,))
    parallel = "one_norm" if hf.use_parallel_residual else None
    rope = _rope(hf, partial=True)
    return {"norm": "layer", "parallel": parallel, "qkv_bias": hf.use_qkv_bias, "rope": rope, **_equal_heads(hf)}


def _phi(hf: Any) -> Fields:
    _refuse(hf, "qk_layernorm", hf.qk_layernorm, allowed=(False,))
    fields = {"norm": "layer", "gated_mlp": False, "parallel": "one_norm", "unembedding_bias": True, **_ALL_BIASES}
    return {**fields, "rope": _rope(hf, partial=True)}


_PHI_RULES = (
    *_ends(norm="final_layernorm"),
    *_norms(input_layernorm="attention_norm"),
    *_QKV,
    *_linear("layers.{}.self_attn.dense", "layers.attention.o"),
    *_linears("layers.{}.mlp", "layers.mlp", fc1="up", fc2="down"),
    Rule("lm_head.bias", ("unembedding_bias",)),
)


def _gpt_neox(hf: Any) -> Fields:
    parallel = "two_norms" if hf.use_parallel_residual else None
    fields = {"norm": "layer", "gated_mlp": False, "parallel": parallel, "mlp_bias": True}
    fields |= {"rope": _rope(hf, partial=True), "num_kv_heads": hf.num_attention_heads}
    return {**fields, **_equal_heads(hf), **_attention_biases(hf)}


_GPT_NEOX_RULES = (
    *_ends("embed_in", "final_layer_norm", "embed_out"),
    *_PRE_NORMS,
    *_linear("layers.{}.attention.query_key_value", *_FUSED_QKV, groups="num_heads"),
    *_linear("layers.{}.attention.dense", "layers.attention.o"),
    *_linears("layers.{}.mlp", "layers.mlp", dense_h_to_4h="up", dense_4h_to_h="down"),
)


def _gpt2(hf: Any) -> Fields:
    _refuse(hf, "scale_attn_by_inverse_layer_idx", hf.scale_attn_by_inverse_layer_idx, allowed=(False,))
    _refuse(hf, "add_cross_attention", hf.add_cross_attention, allowed=(False,))
    # `reorder_and_upcast_attn` selects float32 attention logits; ours are always float32.
    return {
        "intermediate_size": hf.n_inner if hf.n_inner is not None else 4 * hf.n_embd,
        "num_kv_heads": hf.n_head,
        "head_dim": hf.n_embd // hf.n_head,
        "norm": "layer",
        "norm_eps": hf.layer_norm_epsilon,
        "activation": _activation(hf, "activation_function"),
        "gated_mlp": False,
        "rope": None,
        "attention_scale": None if hf.scale_attn_weights else 1.0,
        **_ALL_BIASES,
    }


_GPT2_RULES = (
    *_ends("wte", "ln_f"),
    Rule("wpe.weight", ("position_embedding",)),
    *_norms("h.{}", ln_1="attention_norm", ln_2="mlp_norm"),
    # GPT-2's Conv1D holds `[in, out]`, with query, key and value concatenated.
    *_linear("h.{}.attn.c_attn", *_FUSED_QKV, transpose=False),
    *_linear("h.{}.attn.c_proj", "layers.attention.o", transpose=False),
    *_linears("h.{}.mlp", "layers.mlp", transpose=False, c_fc="up", c_proj="down"),
)


def _mixtral(hf: Any) -> Fields:
    mixture = Mixture(experts=hf.num_local_experts, per_token=hf.num_experts_per_tok)
    return {"mixture": mixture, **_everywhere_local(hf)}


_MIXTRAL_RULES = (
    *_ALL_BUT_MLP,
    *_linear("layers.{}.block_sparse_moe.gate", "layers.mlp.router"),
    *_linears("layers.{}.block_sparse_moe.experts.{}", "layers.mlp", w1="gate", w3="up", w2="down"),
)


def _qwen_mixture(hf: Any) -> Mixture:
    return Mixture(experts=hf.num_experts, per_token=hf.num_experts_per_tok, normalized=hf.norm_topk_prob)


def _qwen3_moe(hf: Any) -> Fields:
    _refuse(hf, "mlp_only_layers", hf.mlp_only_layers, allowed=([],))
    _refuse(hf, "decoder_sparse_step", hf.decoder_sparse_step, allowed=(1,))
    fields = {"qk_norm": "head", "intermediate_size": hf.moe_intermediate_size, "mixture": _qwen_mixture(hf)}
    return {**fields, **_attention_biases(hf), **_everywhere_local(hf)}


def _olmoe(hf: Any) -> Fields:
    mixture = _qwen_mixture(hf)
    return {"qk_norm": "projection", "qkv_clip": hf.clip_qkv, "mixture": mixture, **_attention_biases(hf)}


_QWEN3_MOE_RULES = (
    *_ALL_BUT_MLP,
    *_QK_NORMS,
    *_linear("layers.{}.mlp.gate", "layers.mlp.router"),
    *_linears("layers.{}.mlp.experts.{}", "layers.mlp", gate_proj="gate", up_proj="up", down_proj="down"),
)


def _gpt_oss(hf: Any) -> Fields:
    mixture = Mixture(
        experts=hf.num_local_experts,
        per_token=hf.num_experts_per_tok,
        router_bias=True,
        # Constants of transformers' code, not of its configuration, before they were options.
        clamp=float(getattr(hf, "swiglu_limit", 7.0)),
        swish=float(getattr(hf, "swiglu_alpha", 1.702)),
    )
    # `hidden_act` is not read: `clamp` names the activation.
    fields = {"activation": "silu", "mlp_bias": True, "attention_sinks": True, "mixture": mixture}
    return {**fields, **_attention_biases(hf), **_local_layers(hf)}


_GPT_OSS_RULES = (
    *_ALL_BUT_MLP,
    Rule("layers.{}.self_attn.sinks", ("layers.attention.sinks",)),
    *_linear("layers.{}.mlp.router", "layers.mlp.router"),
    Rule(
        "layers.{}.mlp.experts.gate_up_proj",
        ("layers.mlp.gate.kernel", "layers.mlp.up.kernel"),
        groups="intermediate_size",
    ),
    Rule(
        "layers.{}.mlp.experts.gate_up_proj_bias",
        ("layers.mlp.gate.bias", "layers.mlp.up.bias"),
        groups="intermediate_size",
    ),
    Rule("layers.{}.mlp.experts.down_proj", ("layers.mlp.down.kernel",)),
    Rule("layers.{}.mlp.experts.down_proj_bias", ("layers.mlp.down.bias",)),
)
_GLM4_NORMS = _norms(post_self_attn_layernorm="attention_post_norm", post_mlp_layernorm="mlp_post_norm")
_OLMO_RULES = (*_ENDS, *_POST_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_MLP)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _LLAMA_RULES),
    "mistral": Family(_everywhere_local, _LLAMA_RULES),
    "ministral": Family(_local_layers, _LLAMA_RULES),
    "ministral3": Family(_ministral3, _LLAMA_RULES),
    "smollm3": Family(_smollm3, _LLAMA_RULES),
    "qwen": Family(_qwen, _QWEN_RULES, "transformer.", native=False),
    "qwen2": Family(lambda hf: {"qkv_bias": True, **_local_layers(hf)}, _LLAMA_RULES),
    "qwen3": Family(
        lambda hf: {"qk_norm": "head", **_attention_biases(hf), **_local_layers(hf)}, (*_LLAMA_RULES, *_QK_NORMS)
    ),
    "gemma": Family(_gemma, _LLAMA_RULES),
    "gemma2": Family(
        lambda hf: {**_local_gemma(hf), "attention_softcap": hf.attn_logit_softcapping},
        (*_ENDS, *_GEMMA_NORMS, *_QKV, *_OUTPUT, *_MLP),
    ),
    "gemma3_text": Family(_gemma3, (*_ENDS, *_GEMMA_NORMS, *_QKV, *_QK_NORMS, *_OUTPUT, *_MLP)),
    "olmo2": Family(_olmo2, _OLMO_RULES),
    "olmo3": Family(lambda hf: {**_olmo2(hf), **_two_ropes(hf), **_local_layers(hf)}, _OLMO_RULES),
    "glm4": Family(_glm4, (*_ENDS, *_PRE_NORMS, *_GLM4_NORMS, *_QKV, *_OUTPUT, *_FUSED_MLP)),
    "granite": Family(_granite, _LLAMA_RULES),
    "stablelm": Family(_stablelm, _LLAMA_RULES),
    "phi": Family(_phi, _PHI_RULES),
    "phi3": Family(
        lambda hf: {"rope": _rope(hf, partial=True), **_everywhere_local(hf)},
        (*_ENDS, *_PRE_NORMS, *_linear("layers.{}.self_attn.qkv_proj", *_FUSED_QKV), *_OUTPUT, *_FUSED_MLP),
    ),
    "gpt_neox": Family(_gpt_neox, _GPT_NEOX_RULES, "gpt_neox."),
    "mixtral": Family(_mixtral, _MIXTRAL_RULES),
    "qwen3_moe": Family(_qwen3_moe, _QWEN3_MOE_RULES),
    "olmoe": Family(_olmoe, _QWEN3_MOE_RULES),
    "gpt_oss": Family(_gpt_oss, _GPT_OSS_RULES),
    "gpt2": Family(_gpt2, _GPT2_RULES, "transformer."),
}
