"""Small random models of every family, and what transformers and PyTorch make of them.

Weights come from numpy by their names, so that a golden file needs to hold no weights.
"""

import json
import zlib
from pathlib import Path

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny import LLAMA_JSON

from calibjax import models

GPT2_JSON = {"model_type": "gpt2", "vocab_size": 31, "n_positions": 32, "n_embd": 12, "n_layer": 1, "n_head": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_BOS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GEMMA = {"head_dim": 10, "num_attention_heads": 2, "hidden_size": 12, "rms_norm_eps": 1e-6}
GEMMA2 = GEMMA | {"sliding_window": 5, "query_pre_attn_scalar": 7, "num_hidden_layers": 4}
# Normed queries and keys: with a small divisor attention turns on rounding, in PyTorch as well.
GEMMA3 = GEMMA2 | {"query_pre_attn_scalar": 40}
NEOX = {"num_key_value_heads": None, "num_attention_heads": 3, "hidden_size": 24, "hidden_act": "gelu_fast"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3}
UNTIED = {"tie_word_embeddings": False}
MIXTURE = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 9}
GPT_OSS = {"head_dim": 8, "num_key_value_heads": 1, "max_position_embeddings": 131072, **UNTIED}
LONGROPE = {"short_factor": [1.1, 1.7, 2.0, 2.5], "long_factor": [2.0, 9.0, 9.0, 9.0]}
LONG = {"hidden_size": 16, "max_position_embeddings": 64, "original_max_position_embeddings": 16, **NO_BOS}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
SCALED_QUERIES = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}
MINISTRAL3 = {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5, **SCALED_QUERIES}
MINISTRAL3 |= {"original_max_position_embeddings": 128}
LOCAL_LAYERS = {"layer_types": ["sliding_attention"] * 2}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Keys of some families' configurations, which others ignore. Each would change the numbers.
KEYS = {
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "activation_function": "relu",
    "rms_norm_eps": 0.3,
    "layer_norm_eps": 0.4,
    "layer_norm_epsilon": 0.5,
    "attention_bias": True,
    "mlp_bias": True,
    "use_qkv_bias": True,
    "sliding_window": 2,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.75,
    "rotary_emb_base": 30.0,
    "rope_theta": 40.0,
    "rope_local_base_freq": 50.0,
    "attn_logit_softcapping": 0.1,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 3,
    "embedding_multiplier": 5.0,
    "attention_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
    "use_parallel_residual": True,
    "scale_attn_weights": False,
    "n_inner": 7,
}

# By family: the first of each has a golden file and is run in bfloat16 too.
VARIANTS = {
    "llama": {
        "gqa-llama3": LLAMA_JSON
        | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 50000.0, "max_position_embeddings": 200, "head_dim": 16},
        "untied-odd-gelu": {"vocab_size": 37, "intermediate_size": 17, "hidden_act": "gelu"} | UNTIED,
        "biases-wide-heads-linear": {"head_dim": 10, "rope_scaling": {"type": "linear", "factor": 3.0}, **BIASES},
        "keys-of-other-families": KEYS | LOCAL_LAYERS,
        "yarn-original-length-beside": {"original_max_position_embeddings": 16, "head_dim": 16, "rope_scaling": YARN}
        | {"max_position_embeddings": 512},
    },
    "mistral": {
        "window": {"sliding_window": 5, "head_dim": 8},
        "untied-no-window": {"sliding_window": None, "vocab_size": 37, "num_key_value_heads": 2} | UNTIED,
    },
    "qwen": {
        "qkv-bias": {"num_key_value_heads": 2, "rms_norm_eps": 1e-6} | UNTIED,
        "odd-sizes": {"num_key_value_heads": 2, "hidden_size": 20, "intermediate_size": 17, "vocab_size": 37}
        | {"rms_norm_eps": 1e-5, **UNTIED},
    },
    "qwen2": {
        "windows-in-upper-layers": WINDOWS,
        "untied-mha-yarn": {"num_key_value_heads": 2, "sliding_window": 3, "intermediate_size": 17, "hidden_size": 32}
        | {"rope_scaling": YARN, "max_position_embeddings": 512, **UNTIED},
    },
    "qwen3": {
        "gqa": {"head_dim": 8},
        "untied-biases-windows": WINDOWS | {"head_dim": 10, "attention_bias": True} | UNTIED,
    },
    "gemma": {
        "mqa": GEMMA,
        "untied-biases-dynamic": GEMMA
        | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, **UNTIED}
        | {"attention_bias": True, "num_key_value_heads": 2, "vocab_size": 37},
        "stored-as-gelu": GEMMA | {"hidden_act": "gelu", "hidden_activation": None},
    },
    "gemma2": {
        "local-global": GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "odd-layers-no-caps": GEMMA2
        | {"num_hidden_layers": 3, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        "untied-biases": GEMMA2 | {"attention_bias": True, "attn_logit_softcapping": 0.5} | UNTIED,
    },
    "gemma3_text": {
        "five-to-one": GEMMA3 | {"num_hidden_layers": 7},
        "scaled-rope-own-pattern": GEMMA3
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
        | {"rope_local_base_freq": 500.0, "rope_theta": 2000.0, "final_logit_softcapping": 2.0},
    },
    "phi3": {
        "window-gqa": {"sliding_window": 5, **NO_BOS, **UNTIED},
        "partial-longrope-tied": {"partial_rotary_factor": 0.5, **LONG}
        | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.1, 1.7], "long_factor": [2.0, 9.0]}},
        "keys-of-other-families": KEYS | {"hidden_size": 16, **NO_BOS, **UNTIED, **LOCAL_LAYERS},
        "longrope-as-su": {**LONG, **UNTIED}
        | {"rope_scaling": LONGROPE | {"type": "su", "original_max_position_embeddings": 64}},
    },
    "phi": {
        "partial-rotary": {"hidden_size": 20, "partial_rotary_factor": 0.4, "hidden_act": "gelu_new"} | UNTIED,
        "gqa-half-rotary": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2} | UNTIED,
    },
    "gpt_neox": {
        "parallel": NEOX | {"rotary_pct": 0.25, "hidden_act": "gelu"} | UNTIED,
        "sequential-no-bias-tied": NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
    },
    "olmo2": {
        "mha": {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, **NO_BOS, **UNTIED},
        "gqa-tied-biases": {"attention_bias": True, **NO_BOS},
    },
    "granite": {
        "scaled": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.4, "logits_scaling": 2.5},
        "untied-biases": {"num_key_value_heads": 2, "logits_scaling": 8.0, **BIASES, **UNTIED},
    },
    "stablelm": {
        "partial-rotary": {"head_dim": None, "hidden_size": 32, **NO_BOS, **UNTIED},
        "parallel-biases-tied": {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5}
        | {"num_key_value_heads": 2, "hidden_size": 16, **NO_BOS},
    },
    "olmo3": {
        "yarn-on-global-layers": {"num_hidden_layers": 4, "sliding_window": 5, "head_dim": 8, **NO_BOS, **UNTIED}
        | {"max_position_embeddings": 512, "rope_scaling": YARN}
        | {"original_max_position_embeddings": 128},
        "biases-own-layers-tied": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]}
        | {"sliding_window": 3, **NO_BOS},
        "keys-of-other-families": KEYS | NO_BOS | {"sliding_window": 3},
    },
    "glm4": {
        "interleaved-partial": {"head_dim": 12, "num_key_value_heads": 1, **NO_BOS, **UNTIED},
        "no-biases-full-tied": {"attention_bias": False, "partial_rotary_factor": 1.0, "head_dim": 6, **NO_BOS},
    },
    "smollm3": {
        "no-rope-layers": {"num_hidden_layers": 4, **NO_BOS},
        "windows-without-rope": {"no_rope_layers": [0, 1, 0], "num_hidden_layers": 3, "use_sliding_window": True}
        | {"sliding_window": 4, **BIASES, **NO_BOS, **UNTIED},
        "keys-of-other-families": KEYS | NO_BOS | {"no_rope_layer_interval": 2},
    },
    "ministral": {
        "windows-in-some-layers": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
        | {"head_dim": 8}
    },
    "ministral3": {
        "yarn-mscale": {"head_dim": 8, "max_position_embeddings": 512, "rope_parameters": YARN | MINISTRAL3},
        "keys-of-other-families": KEYS
        | UNTIED
        | {"rope_parameters": PLAIN_ROPE | {"rope_theta": 100.0, **SCALED_QUERIES}},
    },
    "mixtral": {
        "top-two": {"num_local_experts": 5, "num_experts_per_tok": 2, **UNTIED},
        "window-tied-one": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5},
    },
    "qwen3_moe": {
        "gqa": MIXTURE | {"head_dim": 8},
        "normalised-biases-window": MIXTURE
        | WINDOWS
        | {"head_dim": 10, "attention_bias": True, "norm_topk_prob": True, **UNTIED},
    },
    "olmoe": {
        "mha": MIXTURE | {"num_key_value_heads": 2, **NO_BOS, **UNTIED},
        "clipped-biases-normalised": MIXTURE
        | {"clip_qkv": 0.6, "attention_bias": True, "norm_topk_prob": True, **NO_BOS},
    },
    "gpt_oss": {
        "sinks-yarn-window": MIXTURE | GPT_OSS | {"sliding_window": 5},
        "tied-no-biases-default-rope": MIXTURE
        | GPT_OSS
        | {"attention_bias": False, "rope_parameters": PLAIN_ROPE, "tie_word_embeddings": True}
        | {"swiglu_limit": 0.3, "swiglu_alpha": 1.1},
        "keys-of-other-families": KEYS | MIXTURE | GPT_OSS | {"rope_parameters": PLAIN_ROPE},
    },
    "gpt2": {
        "tied": GPT2_JSON,
        "untied-inner-relu-unscaled": GPT2_JSON
        | {"n_inner": 23, "activation_function": "relu", "scale_attn_weights": False, "n_layer": 3}
        | {"reorder_and_upcast_attn": True}
        | UNTIED,
        "keys-of-other-families": KEYS | GPT2_JSON | {"head_dim": 5, "num_key_value_heads": 1},
    },
}
ONE_KIND = ("gemma", "phi", "gpt_neox", "olmo2", "granite", "stablelm")
"""Families that do not read kinds of layers."""
for _family, _variants in VARIANTS.items():
    if _family != "qwen" and "keys-of-other-families" not in _variants:
        _own = next(iter(_variants.values()))
        _variants["keys-of-other-families"] = KEYS | (LOCAL_LAYERS if _family in ONE_KIND else {}) | _own
GOLDENS = Path(__file__).parent / "goldens"
CASES = [(family, name) for family, variants in VARIANTS.items() for name in variants]


def settings_of(family, name):
    """The configuration as transformers reads it; Qwen v1, which it does not know, in the words of Qwen2."""
    variant = VARIANTS[family][name]
    base = {} if family == "gpt2" else LLAMA_JSON
    return base | variant | {"model_type": "qwen2" if family == "qwen" else family}


def random_tensors(settings, shapes):
    tensors = {}
    # Gemma stores norms' scales less one.
    centre = 0 if settings["model_type"].startswith("gemma") else 1
    for name, shape in shapes.items():
        # RandomState and not Generator: numpy promises its stream for ever.
        noise = 0.2 * np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        is_scale = len(shape) == 1 and name.endswith("weight")
        tensors[name] = (noise + centre * is_scale).astype(np.float32)
    return tensors


def random_tokens(settings, rows=2):
    return np.random.RandomState(rows).randint(0, settings["vocab_size"], (rows, 12))


def write_files(folder, family, settings, shapes):
    """Writes `config.json` and random weights under `shapes`' names; for Qwen v1, in its own words."""
    tensors = random_tensors(settings, shapes)
    if family == "qwen":
        settings, tensors = as_qwen1(settings, tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))


def read_golden(family, folder):
    """Writes the model of a golden file; returns its arrays."""
    golden = np.load(GOLDENS / f"{family}.npz")
    write_files(folder, family, json.loads(str(golden["settings"])), json.loads(str(golden["shapes"])))
    return golden


def as_qwen1(settings, tensors):
    """A Qwen2 model's configuration and tensors as Qwen v1 would have them."""
    names = {
        "embed_tokens": "wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "model.": "transformer.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
    }
    renamed = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", "attn.c_attn"), np.concatenate(parts)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "_proj." not in name or "c_proj" in name:
            renamed[name] = tensor
    return qwen1_settings(settings), renamed


def qwen1_settings(settings):
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    return {name: settings[name] for name in same} | {
        "model_type": "qwen",
        "intermediate_size": 2 * settings["intermediate_size"],
        "kv_channels": settings["hidden_size"] // settings["num_attention_heads"],
        "seq_length": settings["max_position_embeddings"],
        "layer_norm_epsilon": settings["rms_norm_eps"],
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        **dict.fromkeys(("no_bias", "scale_attn_weights", "use_dynamic_ntk", "use_logn_attn"), True),
        "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    }


def torch_model(folder, settings):
    """Writes a random model in transformers' own layout; returns it in float32, and the shapes of its tensors."""
    import transformers

    written = json.dumps(settings)
    # A copy: transformers writes into nested dictionaries.
    options = {key: value for key, value in json.loads(written).items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(settings["model_type"], **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    save_file(random_tensors(settings, shapes), folder / "model.safetensors", {"format": "pt"})
    # Saving made transformers' reading of the keys explicit.
    (folder / "config.json").write_text(written)
    load = transformers.AutoModelForCausalLM.from_pretrained
    # The other implementation of experts requires sizes that are multiples of 8 in 16 bits.
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": "float32"}
    return load(folder, **options).eval(), shapes


MULTIMODAL = {"gemma3": ("gemma3_text", "scaled-rope-own-pattern"), "mistral3": ("mistral", "untied-no-window")}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def multimodal_model(folder, kind):
    """Writes a random model of text and images, of which JAX loads the language model; returns the whole."""
    import torch
    import transformers

    text = settings_of(*MULTIMODAL[kind])
    settings = {"text_config": text, "vision_config": VISION, "tie_word_embeddings": text["tie_word_embeddings"]}
    config = transformers.AutoConfig.for_model(kind, **json.loads(json.dumps(settings)))
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": kind}))
    return theirs


def torch_run(model, tokens):
    """Every layer's hidden states, and logits."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(tokens), output_hidden_states=True)
    return [state.float().numpy() for state in (*out.hidden_states, out.logits)]


_unembed = jax.jit(models.unembed, static_argnums=0)


def our_run(model, tokens):
    hidden = np.asarray(model.hidden_states(tokens, layers="all"))
    return [*hidden, _unembed(model.config, model.params, hidden[-1])]


def worst_error(got, expected):
    """Largest difference over largest value, of the worst layer."""
    pairs = zip(got, expected, strict=True)
    return max(float(np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max()) for a, b in pairs)


def mean_error(got, expected):
    """Root mean square of the difference over that of the values, of the worst layer."""
    pairs = zip(got, expected, strict=True)
    return max(float(np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)) for a, b in pairs)


def torch_errors(folder, family, name, *, half):
    """({what: error against PyTorch}, arrays of a golden file) of a configuration, in bfloat16 too where `half`."""
    import torch
    import transformers

    settings = settings_of(family, name)
    theirs, shapes = torch_model(folder, settings)
    if family == "qwen":
        write_files(folder, family, settings, shapes)
    tokens = random_tokens(settings)
    expected, got = torch_run(theirs, tokens), our_run(models.load_model(folder), tokens)
    errors = {"hidden": worst_error(got[:-1], expected[:-1]), "logits": worst_error(got[-1:], expected[-1:])}
    golden = {"settings": json.dumps(settings), "shapes": json.dumps(shapes), "version": transformers.__version__}
    golden |= {"tokens": tokens, "hidden": np.stack(expected[:-1]), "logits": expected[-1]}
    if half:
        tokens = random_tokens(settings, rows=64)
        expected = torch_run(theirs, tokens)
        errors["bfloat16"] = mean_error(our_run(models.load_model(folder, "bfloat16"), tokens), expected)
        errors["torch's bfloat16"] = mean_error(torch_run(theirs.to(torch.bfloat16), tokens), expected)
    return errors, golden
