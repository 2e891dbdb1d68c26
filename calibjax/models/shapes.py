"""Published models by name, to plan a run or count parameters without their files. Settings are those published."""

import math
from typing import Any

from calibjax.models.config import DecoderConfig
from calibjax.nn.blocks import Rope
from calibjax.nn.experts import Mixture

_Sizes = tuple[int, int, int, int, int, int, int]
"""Layers, hidden size, intermediate size, heads, heads of keys and values, vocabulary, largest number of positions."""


def _model(family: str, sizes: _Sizes, **others: Any) -> DecoderConfig:
    """A decoder like Llama 2 but for `others`."""
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    fields = dict(zip((*names, "vocab_size", "max_positions"), sizes, strict=True))
    head_dim = fields["hidden_size"] // fields["num_heads"]
    return DecoderConfig(**{"family": family, "head_dim": head_dim, **fields, **others})


def _llama3(sizes: _Sizes, factor: float = 8.0, **others: Any) -> DecoderConfig:
    return _model("llama", sizes, rope=Rope(theta=500000.0, scaling="llama3", factor=factor), **others)


def _local(layers: int, every: int) -> tuple[bool, ...]:
    """Local attention in all layers but each `every`-th."""
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def _gemma(family: str, sizes: _Sizes, **others: Any) -> DecoderConfig:
    fields = {
        "head_dim": 256,
        "norm_eps": 1e-6,
        "norm_offset": 1.0,
        "activation": "gelu_pytorch_tanh",
        "tie_embeddings": True,
        "embedding_scale": sizes[1] ** 0.5,
    }
    if family != "gemma":
        fields |= {"norm_placement": "both", "attention_scale": 256**-0.5}
    return _model(family, sizes, **fields, **others)


def _gemma2(sizes: _Sizes) -> DecoderConfig:
    local = _local(sizes[0], 2)
    return _gemma("gemma2", sizes, attention_softcap=50.0, logit_softcap=30.0, local_layers=local, window=4096)


def _gemma3(sizes: _Sizes, rope: Rope, window: int) -> DecoderConfig:
    fields = {"qk_norm": "head", "local_rope": Rope(theta=1e4), "local_layers": _local(sizes[0], 6)}
    return _gemma("gemma3_text", sizes, rope=rope, window=window, **fields)


def _yarn(theta: float, factor: float, **others: Any) -> Rope:
    return Rope(theta=theta, scaling="yarn", factor=factor, amplitude=0.1 * math.log(factor) + 1, **others)


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    return _model(
        "gpt_oss",
        (layers, 2880, 2880, 64, 8, 201088, 131072),
        head_dim=64,
        rope=_yarn(150000.0, 32.0, original_max_positions=4096, truncate=False),
        attention_sinks=True,
        mixture=Mixture(experts=experts, per_token=4, router_bias=True, clamp=7.0),
        local_layers=_local(layers, 2),
        window=128,
        **_BIASES,
    )


_BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_GPT: dict[str, Any] = {"norm": "layer", "gated_mlp": False, **_BIASES}
_MISTRAL_7B: dict[str, Any] = {"local_layers": (True,) * 32, "window": 4096}
_SMOLLM3: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "rope": Rope(theta=5e6),
    "local_rope": Rope(scaling="none"),
    "local_layers": tuple((layer + 1) % 4 == 0 for layer in range(36)),
}
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope": Rope(theta=1e6)}
_QWEN3_MOE: dict[str, Any] = {"head_dim": 128, "qk_norm": "head", "mixture": Mixture(experts=128, per_token=8), **_QWEN}
_PHI2: dict[str, Any] = {"activation": "gelu_new", "parallel": "one_norm", "rope": Rope(fraction=0.4), **_GPT}
_PHI3: dict[str, Any] = {"local_layers": (True,) * 32, "window": 2047}
_PYTHIA: dict[str, Any] = {"activation": "gelu", "parallel": "two_norms", "rope": Rope(fraction=0.25), **_GPT}
_OLMO: dict[str, Any] = {"norm_eps": 1e-6, "norm_placement": "post", "qk_norm": "projection"}
_OLMO3: dict[str, Any] = {
    "rope": _yarn(5e5, 8.0, original_max_positions=8192),
    "local_rope": Rope(theta=5e5),
    "local_layers": _local(32, 4),
    "window": 4096,
    **_OLMO,
}
_GLM4: dict[str, Any] = {"norm_placement": "both", "qkv_bias": True, "rope": Rope(fraction=0.5, interleaved=True)}
_GRANITE: dict[str, Any] = {
    "tie_embeddings": True,
    "rope": Rope(theta=5e6),
    "embedding_scale": 12.0,
    "attention_scale": 1 / 64,
    "residual_scale": 0.22,
    "logit_divisor": 8.0,
}
_MIXTRAL: dict[str, Any] = {"rope": Rope(theta=1e6), "mixture": Mixture(experts=8, per_token=2)}
_OLMOE: dict[str, Any] = {"qk_norm": "projection", "mixture": Mixture(experts=64, per_token=8, normalized=False)}
_GPT2: dict[str, Any] = {"activation": "gelu_new", "rope": None, "tie_embeddings": True, **_GPT}
_SCALED = Rope(theta=1e6, scaling="linear", factor=8.0)

SHAPES: dict[str, DecoderConfig] = {
    "llama-2-7b": _model("llama", (32, 4096, 11008, 32, 32, 32000, 4096)),
    "llama-2-13b": _model("llama", (40, 5120, 13824, 40, 40, 32000, 4096)),
    "llama-2-70b": _model("llama", (80, 8192, 28672, 64, 8, 32000, 4096)),
    "llama-3.1-8b": _llama3((32, 4096, 14336, 32, 8, 128256, 131072)),
    "llama-3.1-70b": _llama3((80, 8192, 28672, 64, 8, 128256, 131072)),
    "llama-3.3-70b": _llama3((80, 8192, 28672, 64, 8, 128256, 131072)),
    "llama-3.2-1b": _llama3((16, 2048, 8192, 32, 8, 128256, 131072), factor=32.0, tie_embeddings=True),
    "mistral-7b": _model("mistral", (32, 4096, 14336, 32, 8, 32000, 32768), **_MISTRAL_7B),
    "ministral-8b": _model("mistral", (36, 4096, 12288, 32, 8, 131072, 32768), rope=Rope(theta=1e8)),
    "mistral-small-3.1-24b": _model(
        "mistral", (40, 5120, 32768, 32, 8, 131072, 131072), head_dim=128, rope=Rope(theta=1e9)
    ),
    "smollm3-3b": _model("smollm3", (36, 2048, 11008, 16, 4, 128256, 65536), **_SMOLLM3),
    "qwen-7b": _model("qwen", (32, 4096, 11008, 32, 32, 151936, 8192), norm_eps=1e-6, qkv_bias=True),
    "qwen2.5-7b": _model("qwen2", (28, 3584, 18944, 28, 4, 152064, 131072), qkv_bias=True, **_QWEN),
    "qwen3-8b": _model("qwen3", (36, 4096, 12288, 32, 8, 151936, 40960), qk_norm="head", **_QWEN),
    "gemma-2b": _gemma("gemma", (18, 2048, 16384, 8, 1, 256000, 8192)),
    "gemma-2-2b": _gemma2((26, 2304, 9216, 8, 4, 256000, 8192)),
    "gemma-2-9b": _gemma2((42, 3584, 14336, 16, 8, 256000, 8192)),
    "gemma-3-1b": _gemma3((26, 1152, 6912, 4, 1, 262144, 32768), Rope(theta=1e6), window=512),
    "gemma-3-4b": _gemma3((34, 2560, 10240, 8, 4, 262208, 131072), _SCALED, window=1024),
    "phi-2": _model("phi", (32, 2560, 10240, 32, 32, 51200, 2048), unembedding_bias=True, **_PHI2),
    "phi-3-mini-4k": _model("phi3", (32, 3072, 8192, 32, 32, 32064, 4096), **_PHI3),
    "phi-4": _model("phi3", (40, 5120, 17920, 40, 10, 100352, 16384), rope=Rope(theta=250000.0)),
    "pythia-1.4b": _model("gpt_neox", (24, 2048, 8192, 16, 16, 50304, 2048), **_PYTHIA),
    "olmo-2-7b": _model("olmo2", (32, 4096, 11008, 32, 32, 100352, 4096), rope=Rope(theta=5e5), **_OLMO),
    "olmo-3-7b": _model("olmo3", (32, 4096, 11008, 32, 32, 100278, 65536), **_OLMO3),
    "glm-4-9b": _model("glm4", (40, 4096, 13696, 32, 2, 151552, 32768), **_GLM4),
    "granite-3.1-2b": _model("granite", (40, 2048, 8192, 32, 8, 49155, 131072), **_GRANITE),
    "stablelm-3b": _model("stablelm", (32, 2560, 6912, 32, 32, 50304, 4096), norm="layer", rope=Rope(fraction=0.25)),
    "mixtral-8x7b": _model("mixtral", (32, 4096, 14336, 32, 8, 32000, 32768), **_MIXTRAL),
    "qwen3-30b-a3b": _model("qwen3_moe", (48, 2048, 768, 32, 4, 151936, 40960), **_QWEN3_MOE),
    "olmoe-1b-7b": _model("olmoe", (16, 2048, 1024, 16, 16, 50304, 4096), **_OLMOE),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt2": _model("gpt2", (12, 768, 3072, 12, 12, 50257, 1024), **_GPT2),
}
