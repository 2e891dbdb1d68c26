"""Campaign: random small configurations of every family against transformers and PyTorch in float64.

    PYTHONPATH=$PWD python tests/campaigns/fuzz_families.py --seed 0 --per-family 20 [FAMILY ...]

The error of a run is the largest difference from PyTorch in float64 over the largest value, of the worst layer's hidden
states or the logits. Ours, in float32, may be at most `FACTOR` times that of PyTorch in float32, or of `FLOOR`.
A configuration is drawn from (seed, family, number): `--number N` repeats one.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import jax
import numpy as np
from parity import VARIANTS, as_qwen1, random_tensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from calibjax import models

FACTOR = 4
FLOOR = 1e-6
"""About eight roundings of float32. PyTorch's own error may be smaller by chance."""
TOKENS = (2, 20)

YES_NO = [False, True]
BIAS = {"attention_bias": YES_NO}
WINDOW = {"sliding_window": [None, 3, 7]}
QWEN_WINDOW = {"use_sliding_window": YES_NO, "sliding_window": [4], "max_window_layers": [0, 1]}
TYPES = {"layer_types": ["draw"], "sliding_window": [3, 7]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
THETA = {"rope_theta": 500.0}
ROPES = {
    "rope_parameters": [
        {"rope_type": "default", **THETA},
        {"rope_type": "linear", "factor": 3.0, **THETA},
        {"rope_type": "dynamic", "factor": 3.0, **THETA},
        {"rope_type": "llama3", "factor": 8.0, **THETA, **LLAMA3},
        YARN | THETA,
        YARN | THETA | {"truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7},
    ]
}
PARTIAL = {
    "rope_parameters": [
        {"rope_type": kind, "factor": 2.0, **THETA, "partial_rotary_factor": fraction}
        for kind, fraction in (("default", 0.5), ("default", 0.25), ("linear", 0.5))
    ],
    "head_dim": [8, 16],
}
LONG = {"rope_type": "longrope", **THETA, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0, 1.1, 1.7, 2.5], "long_factor": [2.0, 9.0, 9.0, 9.0]}
KINDS = {
    "rope_parameters": [
        {"full_attention": full | THETA, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
        for full, theta in (
            ({"rope_type": "default"}, 500.0),
            (YARN, 90.0),
            ({"rope_type": "linear", "factor": 8.0}, 50.0),
        )
    ]
}
EXPERTS = {
    **{name: [4, 5, 8] for name in ("num_experts", "num_local_experts")},
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [7, 12],
    "norm_topk_prob": YES_NO,
}
CAPS = {"attn_logit_softcapping": [None, 2.0, 20.0], "final_logit_softcapping": [None, 3.0, 30.0]}
# A small divisor makes attention, and with it PyTorch's own rounding errors, sharp.
GEMMA = {"hidden_activation": ["gelu_pytorch_tanh", "gelu"], "query_pre_attn_scalar": [8, 40], **TYPES, **BIAS}
EQUAL = {"hidden_size": [16, 32], "num_attention_heads": [2, 4], "head_dim": [None]}
DRAWN = {
    "llama": BIAS | ROPES | {"mlp_bias": YES_NO, "hidden_act": ["silu", "gelu", "relu"]},
    "mistral": WINDOW | ROPES,
    "ministral": TYPES | ROPES,
    "ministral3": WINDOW
    | {"rope_parameters": [r | {"llama_4_scaling_beta": 0.1} for r in ROPES["rope_parameters"][4:]]},
    "smollm3": BIAS | ROPES | {"mlp_bias": YES_NO, "no_rope_layer_interval": [2, 3]},
    "qwen": EQUAL | {"num_key_value_heads": ["heads"], "tie_word_embeddings": [False]},
    "qwen2": ROPES | QWEN_WINDOW | EQUAL,
    "qwen3": BIAS | ROPES | QWEN_WINDOW,
    "gemma": BIAS | ROPES | {"hidden_activation": ["gelu_pytorch_tanh", "gelu"]},
    "gemma2": GEMMA | CAPS | ROPES,
    "gemma3_text": GEMMA | KINDS | {"final_logit_softcapping": [None, 3.0], "query_pre_attn_scalar": [40]},
    "olmo2": BIAS | ROPES,
    "olmo3": BIAS | KINDS | TYPES,
    "glm4": BIAS | PARTIAL,
    "granite": BIAS
    | ROPES
    | {"mlp_bias": YES_NO, "embedding_multiplier": [1.0, 3.0], "attention_multiplier": [0.2, 0.4]}
    | {"residual_multiplier": [0.4, 1.0], "logits_scaling": [1.0, 2.5]},
    "stablelm": PARTIAL | EQUAL | {"hidden_size": [32], "use_parallel_residual": YES_NO, "use_qkv_bias": YES_NO},
    "phi": PARTIAL | {"head_dim": [None], "hidden_size": [32], "num_attention_heads": [2, 4]},
    "phi3": WINDOW
    | {"head_dim": [None], "hidden_size": [32], "num_attention_heads": [4]}
    | {"rope_parameters": [*({"rope_type": "default", **THETA, "partial_rotary_factor": f} for f in (1.0, 0.5)), LONG]},
    "gpt_neox": (BIAS | PARTIAL | EQUAL)
    | {"hidden_size": [32], "num_key_value_heads": [None], "use_parallel_residual": YES_NO},
    "mixtral": EXPERTS | WINDOW | ROPES,
    "qwen3_moe": EXPERTS | BIAS | ROPES,
    "olmoe": EXPERTS | BIAS | ROPES | {"head_dim": [None], "clip_qkv": [None, 0.5]},
    "gpt_oss": EXPERTS | BIAS | ROPES | TYPES | {"swiglu_limit": [0.5, 7.0]},
    "gpt2": {"n_embd": [12, 24], "n_head": [2, 3], "n_layer": [1, 2], "n_inner": [None, 17], "n_positions": [64]}
    | {"activation_function": ["gelu_new", "gelu", "relu"], "scale_attn_weights": YES_NO},
}
"""By family: the values of its options that a configuration is drawn from."""


def draw(family, seed, number):
    """A configuration in the words of transformers; Qwen v1 in those of Qwen2."""
    rng = np.random.default_rng([seed, zlib.crc32(family.encode()), number])

    def one(values):
        return values[rng.integers(len(values))]

    heads = int(one([2, 4, 6]))
    chosen = {
        "model_type": "qwen2" if family == "qwen" else family,
        "vocab_size": int(rng.integers(20, 60)),
        "tie_word_embeddings": bool(rng.integers(2)),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    if family != "gpt2":
        chosen |= {
            "hidden_size": heads * int(one([4, 6, 8])),
            "intermediate_size": int(rng.integers(9, 40)),
            "num_hidden_layers": int(one([1, 2, 3])),
            "num_attention_heads": heads,
            "num_key_value_heads": "divisor",
            "head_dim": int(one([4, 8, 10])),
            "max_position_embeddings": 256,
            "rms_norm_eps": float(one([1e-6, 1e-5])),
        }
    chosen |= {name: one(values) for name, values in DRAWN[family].items()}
    heads = chosen.get("num_attention_heads")
    if chosen.get("num_key_value_heads") in ("divisor", "heads"):
        divisors = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
        chosen["num_key_value_heads"] = int(one(divisors)) if chosen["num_key_value_heads"] == "divisor" else heads
    if chosen.get("layer_types") == "draw":
        kinds = ["sliding_attention", "full_attention"]
        chosen["layer_types"] = [one(kinds) for _ in range(chosen["num_hidden_layers"])]
    if chosen.get("head_dim", 0) is None:
        del chosen["head_dim"]
    return json.loads(json.dumps(chosen))


@contextlib.contextmanager
def everything_in_float64():
    """transformers casts norms, softmax and rotary positions to float32; within, to float64."""
    import torch

    names = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = names


def torch_states(folder, tokens):
    """Hidden states of all layers and logits of PyTorch, in float64 and in float32."""
    import torch
    import transformers

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}

    def run(model):
        with torch.no_grad():
            out = model.eval()(torch.from_numpy(tokens), output_hidden_states=True)
        return [state.numpy() for state in (*out.hidden_states, out.logits)]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **eager)
    states = [run(model)]
    with everything_in_float64():
        exact = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float64, **eager)
        exact.load_state_dict(model.state_dict())
        states.insert(0, run(exact))
    assert {state.dtype for state in states[0]} == {np.dtype("float64")}
    return states


@functools.partial(jax.jit, static_argnums=0)
def _ours(config, params, tokens):
    hidden = models.hidden_states(config, params, tokens, layers="all")
    return hidden, models.unembed(config, params, hidden[-1])


def error(got, exact):
    pairs = zip(got, exact, strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(family, seed, number):
    """Errors of one configuration: ours and PyTorch's, both in float32."""
    import transformers

    settings = draw(family, seed, number)
    rng = np.random.default_rng([seed, number])
    tokens = rng.integers(0, settings["vocab_size"], TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(settings)))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        file = folder / "model.safetensors"
        with safe_open(file, "numpy") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        save_file(random_tensors(settings, shapes), file, {"format": "pt"})
        exact, rough = torch_states(folder, tokens)
        if family == "qwen":
            settings, tensors = as_qwen1(settings, load_file(file))
            save_file(tensors, file)
        (folder / "config.json").write_text(json.dumps(settings))
        lm = models.load_model(folder)
    hidden, logits = jax.device_get(_ours(lm.config, lm.params, tokens))
    return error([*hidden, logits], exact), error(rough, exact)


def run(families, seed, numbers, log=print):
    """Measures all; logs a table of 80 columns, and returns the configurations that fail."""
    failed = []
    log(f"{'family':<14}{'drawn':>6}{'our error':>12}{'PyTorch':>12}{'worst ratio':>13}{'failed':>8}")
    for family in families:
        errors = np.array([measure(family, seed, number) for number in numbers])
        ratios = errors[:, 0] / np.maximum(errors[:, 1], FLOOR / FACTOR)
        bad = [number for number, ratio in zip(numbers, ratios, strict=True) if not ratio <= FACTOR]
        ours, theirs = errors.max(axis=0)
        log(f"{family:<14}{len(errors):>6}{ours:>12.1e}{theirs:>12.1e}{ratios.max():>13.2f}{len(bad):>8}")
        failed += [(family, number) for number in bad]
    for family, number in failed:
        log(f"failed: --seed {seed} --number {number} {family}")
    return failed


def quiet():
    """Leaves out what transformers writes about each model."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(VARIANTS), metavar="FAMILY", help="all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-family", type=int, default=20)
    parser.add_argument("--number", type=int, help="measure this one only")
    args = parser.parse_args()
    quiet()
    jax.config.update("jax_disable_most_optimizations", True)
    numbers = list(range(args.per_family)) if args.number is None else [args.number]
    failed = run(args.families, args.seed, numbers, functools.partial(print, flush=True))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
