"""GGUF files as llama.cpp's converter writes them, written with the package `gguf` from Hugging Face checkpoints."""

import re

import gguf
import numpy as np

ARCHITECTURES = {"mixtral": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"gemma3_text": "gemma3", "olmo3": "olmo2"}
"""Values of `general.architecture` that are not the `model_type`."""
INTERLEAVED = ("llama", "granite")
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""Every type that the package writes."""


def write_gguf(file, config, tensors, kind="F32", *, divisors=None, more=lambda writer: None):
    """Writes a model; returns its tensors as the file holds them, under the names and in the layout of `tensors`.

    `kind`: type of all matrices; `divisors`: of the rotary frequencies, as in Llama 3; `more`: further metadata.
    """
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, arch)
    write_metadata(writer, config)
    more(writer)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[kind]
    stored, experts = {}, {}
    for name, tensor in tensors.items():
        target = names.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", name), try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        matrix = tensor.ndim > 1 and "gate_inp" not in target
        if matrix:
            turned = arch == "gpt2" and "_embd" not in target and target != "output.weight"
            used = gguf.quantize(np.ascontiguousarray(tensor.T) if turned else tensor, kind)
            held = gguf.dequantize(used.view(np.uint8), kind)
            stored[name] = held.T if turned else held
        else:
            shift = np.float32(arch.startswith("gemma") and target.endswith("norm.weight"))
            used = tensor + shift
            stored[name] = used - shift
        if arch in INTERLEAVED and re.search(r"\.attn_[qk]\.", target):
            heads = config.num_key_value_heads if ".attn_k." in target else config.num_attention_heads
            used = used.reshape(heads, 2, -1, *used.shape[1:]).swapaxes(1, 2).reshape(used.shape)
        if ".experts." in name:
            experts.setdefault(target, []).append(used)
        else:
            writer.add_tensor(target, used, raw_dtype=kind if matrix else None)
    for target, used in experts.items():
        writer.add_tensor(target, np.stack(used), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    finish(writer)
    return {name: np.ascontiguousarray(value, np.float32) for name, value in stored.items()}


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer, config):
    family, heads = config.model_type, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(4 * config.hidden_size if family == "gpt2" else config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if family == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if family == "stablelm":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family not in ("phi3", "stablelm"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if "full_attention" in rope:
        if family == "gemma3_text":
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if family not in ("qwen2", "qwen3"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        amplitude = np.sqrt(1 + np.log(config.max_position_embeddings / original) / np.log(original))
        writer.add_rope_scaling_attn_factors(float(amplitude))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.asarray(rope[f"{length}_factor"], np.float32))
    if family in ("gemma2", "gemma3_text", "phi3", "olmo3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if family == "qwen3_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "clip_qkv", None):
        writer.add_clamp_kqv(config.clip_qkv)
