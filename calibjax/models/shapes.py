"""Configurations of published models by name, to plan a run without their files; others are planned by their hub id."""

import math
from typing import Any

from calibjax.models.config import DecoderConfig
from calibjax.nn.blocks import Rope
from calibjax.nn.experts import Mixture

_Sizes = tuple[int, int, int, int, int, int, int]
"""Layers, hidden size, intermediate size, heads, heads of keys and values, vocabulary, largest number of positions."""


def _model(family: str, sizes: _Sizes, **others: Any) -> DecoderConfig:
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    fields = dict(zip((*names, "vocab_size", "max_positions"), sizes, strict=True))
    head_dim = fields["hidden_size"] // fields["num_heads"]
    return DecoderConfig(**{"family": family, "head_dim": head_dim, **fields, **others})


def _llama3(sizes: _Sizes, factor: float = 8.0, **others: Any) -> DecoderConfig:
    return _model("llama", sizes, rope=Rope(theta=500000.0, scaling="llama3", factor=factor), **others)


def _gemma(family: str, sizes: _Sizes, *, every: int, **others: Any) -> DecoderConfig:
    """Attention is local in all layers but each `every`-th."""
    return _model(
        family,
        sizes,
        head_dim=256,
        norm_eps=1e-6,
        norm_offset=1.0,
        norm_placement="both",
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
        embedding_scale=sizes[1] ** 0.5,
        attention_scale=256**-0.5,
        local_layers=tuple((layer + 1) % every != 0 for layer in range(sizes[0])),
        **others,
    )


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    yarn: Any = {"scaling": "yarn", "factor": 32.0, "original_max_positions": 4096, "truncate": False}
    return _model(
        "gpt_oss",
        (layers, 2880, 2880, 64, 8, 201088, 131072),
        head_dim=64,
        rope=Rope(theta=150000.0, amplitude=0.1 * math.log(32) + 1, **yarn),
        attention_sinks=True,
        mixture=Mixture(experts=experts, per_token=4, router_bias=True, clamp=7.0),
        local_layers=(True, False) * (layers // 2),
        window=128,
        **_BIASES,
    )


_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_GPT: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "activation": "gelu_new", **_BIASES}
_SOFTCAPS: dict[str, Any] = {"attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096}
_GEMMA3: dict[str, Any] = {"qk_norm": "head", "rope": Rope(theta=1e6), "local_rope": Rope(theta=1e4), "window": 512}
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope": Rope(theta=1e6)}
_QWEN3_MOE: dict[str, Any] = {"head_dim": 128, "qk_norm": "head", "mixture": Mixture(experts=128, per_token=8), **_QWEN}
_PHI2: dict[str, Any] = {"parallel": "one_norm", "rope": Rope(fraction=0.4), "unembedding_bias": True, **_GPT}
_MIXTRAL: dict[str, Any] = {"rope": Rope(theta=1e6), "mixture": Mixture(experts=8, per_token=2)}
_OLMOE: dict[str, Any] = {"qk_norm": "projection", "mixture": Mixture(experts=64, per_token=8, normalized=False)}

SHAPES: dict[str, DecoderConfig] = {
    "llama-2-7b": _model("llama", (32, 4096, 11008, 32, 32, 32000, 4096)),
    "llama-2-13b": _model("llama", (40, 5120, 13824, 40, 40, 32000, 4096)),
    "llama-2-70b": _model("llama", (80, 8192, 28672, 64, 8, 32000, 4096)),
    "llama-3.1-8b": _llama3((32, 4096, 14336, 32, 8, 128256, 131072)),
    "llama-3.1-70b": _llama3((80, 8192, 28672, 64, 8, 128256, 131072)),
    "llama-3.3-70b": _llama3((80, 8192, 28672, 64, 8, 128256, 131072)),
    "llama-3.2-1b": _llama3((16, 2048, 8192, 32, 8, 128256, 131072), factor=32.0, tie_embeddings=True),
    "mistral-7b": _model("mistral", (32, 4096, 14336, 32, 8, 32000, 32768), local_layers=(True,) * 32, window=4096),
    "qwen-7b": _model("qwen", (32, 4096, 11008, 32, 32, 151936, 8192), norm_eps=1e-6, qkv_bias=True),
    "qwen2.5-7b": _model("qwen2", (28, 3584, 18944, 28, 4, 152064, 131072), qkv_bias=True, **_QWEN),
    "gemma-2-2b": _gemma("gemma2", (26, 2304, 9216, 8, 4, 256000, 8192), every=2, **_SOFTCAPS),
    "gemma-2-9b": _gemma("gemma2", (42, 3584, 14336, 16, 8, 256000, 8192), every=2, **_SOFTCAPS),
    "gemma-3-1b": _gemma("gemma3_text", (26, 1152, 6912, 4, 1, 262144, 32768), every=6, **_GEMMA3),
    "phi-2": _model("phi", (32, 2560, 10240, 32, 32, 51200, 2048), **_PHI2),
    "mixtral-8x7b": _model("mixtral", (32, 4096, 14336, 32, 8, 32000, 32768), **_MIXTRAL),
    "qwen3-30b-a3b": _model("qwen3_moe", (48, 2048, 768, 32, 4, 151936, 40960), **_QWEN3_MOE),
    "olmoe-1b-7b": _model("olmoe", (16, 2048, 1024, 16, 16, 50304, 4096), **_OLMOE),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt2": _model("gpt2", (12, 768, 3072, 12, 12, 50257, 1024), rope=None, tie_embeddings=True, **_GPT),
}
