"""Configurations of published models by name, to plan a run or count parameters without their files.

Sizes and settings are those of the published configurations.
"""

import math
from typing import Any

from calibjax.models.config import DecoderConfig
from calibjax.nn.blocks import Rope
from calibjax.nn.experts import Mixture


def _llama(layers: int, width: int, inner: int, heads: int, kv_heads: int, **others: Any) -> DecoderConfig:
    """A Llama-like decoder; `others` are the fields that differ from Llama 2."""
    fields = {
        "family": "llama",
        "vocab_size": 32000,
        "num_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width // heads,
        "max_positions": 4096,
    }
    return DecoderConfig(**{**fields, **others})


def _llama3(layers: int, width: int, inner: int, heads: int, factor: float, **others: Any) -> DecoderConfig:
    rope = Rope(theta=500000.0, scaling="llama3", factor=factor)
    return _llama(layers, width, inner, heads, 8, vocab_size=128256, max_positions=131072, rope=rope, **others)


def _gemma(family: str, layers: int, width: int, inner: int, heads: int, kv_heads: int, **others: Any) -> DecoderConfig:
    fields = {
        "family": family,
        "vocab_size": 256000,
        "head_dim": 256,
        "max_positions": 8192,
        "norm_eps": 1e-6,
        "norm_offset": 1.0,
        "activation": "gelu_pytorch_tanh",
        "tie_embeddings": True,
        "embedding_scale": width**0.5,
    }
    return _llama(layers, width, inner, heads, kv_heads, **{**fields, **others})


def _gemma2(layers: int, width: int, inner: int, heads: int, kv_heads: int) -> DecoderConfig:
    return _gemma(
        "gemma2",
        layers,
        width,
        inner,
        heads,
        kv_heads,
        norm_placement="both",
        attention_scale=256**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        local_layers=tuple(layer % 2 == 0 for layer in range(layers)),
        window=4096,
    )


def _gemma3(
    layers: int,
    width: int,
    inner: int,
    heads: int,
    kv_heads: int,
    window: int,
    scaling: Any = None,
    factor: float = 1.0,
    **others: Any,
) -> DecoderConfig:
    return _gemma(
        "gemma3_text",
        layers,
        width,
        inner,
        heads,
        kv_heads,
        norm_placement="both",
        qk_norm="head",
        attention_scale=256**-0.5,
        rope=Rope(theta=1e6, scaling=scaling, factor=factor),
        local_rope=Rope(theta=1e4),
        local_layers=tuple((layer + 1) % 6 != 0 for layer in range(layers)),
        window=window,
        **others,
    )


def _gpt_like(family: str, layers: int, width: int, heads: int, **others: Any) -> DecoderConfig:
    """A decoder with LayerNorm, an ungated MLP of width 4 × `width`, and biases in all projections."""
    fields = {
        "family": family,
        "max_positions": 2048,
        "norm": "layer",
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
    return _llama(layers, width, 4 * width, heads, heads, **{**fields, **others})


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    return _llama(
        layers,
        *(2880, 2880, 64, 8),
        family="gpt_oss",
        vocab_size=201088,
        head_dim=64,
        max_positions=131072,
        rope=Rope(
            theta=150000.0,
            scaling="yarn",
            factor=32.0,
            truncate=False,
            original_max_positions=4096,
            amplitude=0.1 * math.log(32) + 1,
        ),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_sinks=True,
        mixture=Mixture(experts=experts, per_token=4, router_bias=True, clamp=7.0),
        local_layers=tuple(layer % 2 == 0 for layer in range(layers)),
        window=128,
    )


SHAPES: dict[str, DecoderConfig] = {
    "llama-2-7b": _llama(32, 4096, 11008, 32, 32),
    "llama-2-13b": _llama(40, 5120, 13824, 40, 40),
    "llama-2-70b": _llama(80, 8192, 28672, 64, 8),
    "llama-3.1-8b": _llama3(32, 4096, 14336, 32, factor=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 28672, 64, factor=8.0),
    "llama-3.3-70b": _llama3(80, 8192, 28672, 64, factor=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, factor=32.0, tie_embeddings=True),
    "mistral-7b": _llama(
        32, 4096, 14336, 32, 8, family="mistral", max_positions=32768, local_layers=(True,) * 32, window=4096
    ),
    "ministral-8b": _llama(
        36, 4096, 12288, 32, 8, family="mistral", vocab_size=131072, max_positions=32768, rope=Rope(theta=1e8)
    ),
    "mistral-small-3.1-24b": _llama(
        40,
        5120,
        32768,
        32,
        8,
        family="mistral",
        vocab_size=131072,
        head_dim=128,
        max_positions=131072,
        rope=Rope(theta=1e9),
    ),
    "smollm3-3b": _llama(
        36,
        2048,
        11008,
        16,
        4,
        family="smollm3",
        vocab_size=128256,
        max_positions=65536,
        norm_eps=1e-6,
        tie_embeddings=True,
        rope=Rope(theta=5e6),
        local_rope=Rope(scaling="none"),
        local_layers=tuple((layer + 1) % 4 == 0 for layer in range(36)),
    ),
    "qwen-7b": _llama(
        32, 4096, 11008, 32, 32, family="qwen", vocab_size=151936, max_positions=8192, norm_eps=1e-6, qkv_bias=True
    ),
    "qwen2.5-7b": _llama(
        28,
        3584,
        18944,
        28,
        4,
        family="qwen2",
        vocab_size=152064,
        max_positions=131072,
        norm_eps=1e-6,
        rope=Rope(theta=1e6),
        qkv_bias=True,
    ),
    "qwen3-8b": _llama(
        36,
        4096,
        12288,
        32,
        8,
        family="qwen3",
        vocab_size=151936,
        max_positions=40960,
        norm_eps=1e-6,
        rope=Rope(theta=1e6),
        qk_norm="head",
    ),
    "gemma-2b": _gemma("gemma", 18, 2048, 16384, 8, 1),
    "gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4),
    "gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8),
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, window=512, vocab_size=262144, max_positions=32768),
    "gemma-3-4b": _gemma3(
        34, 2560, 10240, 8, 4, window=1024, vocab_size=262208, max_positions=131072, scaling="linear", factor=8.0
    ),
    "phi-2": _gpt_like(
        "phi",
        32,
        2560,
        32,
        vocab_size=51200,
        activation="gelu_new",
        parallel="one_norm",
        rope=Rope(fraction=0.4),
        unembedding_bias=True,
    ),
    "phi-3-mini-4k": _llama(
        32, 3072, 8192, 32, 32, family="phi3", vocab_size=32064, local_layers=(True,) * 32, window=2047
    ),
    "phi-4": _llama(
        40, 5120, 17920, 40, 10, family="phi3", vocab_size=100352, max_positions=16384, rope=Rope(theta=250000.0)
    ),
    "pythia-1.4b": _gpt_like(
        "gpt_neox", 24, 2048, 16, vocab_size=50304, activation="gelu", parallel="two_norms", rope=Rope(fraction=0.25)
    ),
    "olmo-2-7b": _llama(
        32,
        4096,
        11008,
        32,
        32,
        family="olmo2",
        vocab_size=100352,
        norm_eps=1e-6,
        norm_placement="post",
        qk_norm="projection",
        rope=Rope(theta=5e5),
    ),
    "olmo-3-7b": _llama(
        32,
        4096,
        11008,
        32,
        32,
        family="olmo3",
        vocab_size=100278,
        max_positions=65536,
        norm_eps=1e-6,
        norm_placement="post",
        qk_norm="projection",
        rope=Rope(theta=5e5, scaling="yarn", factor=8.0, original_max_positions=8192, amplitude=0.1 * math.log(8) + 1),
        local_rope=Rope(theta=5e5),
        local_layers=tuple((layer + 1) % 4 != 0 for layer in range(32)),
        window=4096,
    ),
    "glm-4-9b": _llama(
        40,
        4096,
        13696,
        32,
        2,
        family="glm4",
        vocab_size=151552,
        max_positions=32768,
        norm_placement="both",
        qkv_bias=True,
        rope=Rope(fraction=0.5, interleaved=True),
    ),
    "granite-3.1-2b": _llama(
        40,
        2048,
        8192,
        32,
        8,
        family="granite",
        vocab_size=49155,
        max_positions=131072,
        tie_embeddings=True,
        rope=Rope(theta=5e6),
        embedding_scale=12.0,
        attention_scale=1 / 64,
        residual_scale=0.22,
        logit_divisor=8.0,
    ),
    "stablelm-3b": _llama(
        32, 2560, 6912, 32, 32, family="stablelm", vocab_size=50304, norm="layer", rope=Rope(fraction=0.25)
    ),
    "mixtral-8x7b": _llama(
        32,
        4096,
        14336,
        32,
        8,
        family="mixtral",
        max_positions=32768,
        rope=Rope(theta=1e6),
        mixture=Mixture(experts=8, per_token=2),
    ),
    "qwen3-30b-a3b": _llama(
        48,
        2048,
        768,
        32,
        4,
        family="qwen3_moe",
        vocab_size=151936,
        head_dim=128,
        max_positions=40960,
        norm_eps=1e-6,
        rope=Rope(theta=1e6),
        qk_norm="head",
        mixture=Mixture(experts=128, per_token=8),
    ),
    "olmoe-1b-7b": _llama(
        16,
        2048,
        1024,
        16,
        16,
        family="olmoe",
        vocab_size=50304,
        qk_norm="projection",
        mixture=Mixture(experts=64, per_token=8, normalized=False),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt2": _gpt_like(
        "gpt2",
        12,
        768,
        12,
        vocab_size=50257,
        max_positions=1024,
        activation="gelu_new",
        rope=None,
        tie_embeddings=True,
    ),
}
