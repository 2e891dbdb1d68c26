"""The TPU kernels compiled by the real compiler, for chips that need not be there, at the sizes of real models."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from oracle import FLOATS

from calibjax.kernels import SCALES, linear_cross_entropy, vocab_curves, vocab_stats
from calibjax.kernels.pallas_tpu import blocks
from calibjax.kernels.stats import STATISTICS

FOLDER = str(Path(__file__).parents[2] / "kernels")
TOKENS = 8192
MODELS = {
    "gemma-2-2b": (2304, 256_000, 30.0),
    "llama-3.1-8b": (4096, 128_256, None),
    "qwen2.5-7b": (3584, 152_064, None),
    "gpt-oss": (2880, 201_088, None),
}
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "v7x": "TPU7x"}
MEBIBYTE = 2**20


def build(model, program, dtype=jnp.bfloat16):
    """What the compiler's process compiles: statistics, curves, the scalar loss, or gradients of a smoothed loss."""
    from static_profile import Program

    width, vocab_size, softcap = MODELS[model]
    options = {"softcap": softcap, "implementation": "pallas_tpu"}

    def statistics(hidden, unembedding, targets, scale):
        return vocab_stats(hidden, unembedding, targets, scale=scale, **options)

    def curves(hidden, unembedding, targets, _):
        return vocab_curves(hidden, unembedding, targets, **options)

    def scalar(hidden, unembedding, targets, scale):
        given = {"scale": scale, "label_smoothing": 0.1, "reduction": "mean", **options}
        return jax.value_and_grad(functools.partial(linear_cross_entropy, **given), (0, 1))(
            hidden, unembedding, targets
        )

    def loss(hidden, unembedding, targets, scale):
        names = ("log_normalizer", "target_logit", "mean_logit")
        stats = vocab_stats(hidden, unembedding, targets, scale=scale, statistics=names, **options)
        smoothed = 0.9 * stats.target_logit + 0.1 * stats.mean_logit
        return jnp.sum(jnp.where(stats.valid, stats.log_normalizer - scale * smoothed, 0.0)) / TOKENS

    shapes = ((TOKENS, width), dtype), ((vocab_size, width), dtype), ((TOKENS,), jnp.int32), ((TOKENS,), jnp.float32)
    arguments = [jax.ShapeDtypeStruct(*x) for x in shapes]
    whole = {"statistics": statistics, "scalar": scalar, "curves": curves}
    which = {"scale": (3,), "hidden": (0, 3), "everything": (0, 1, 3)}
    return Program(whole[program] if program in whole else jax.value_and_grad(loss, which[program]), arguments)


def build_small(program, width, softcap):
    """All statistics, with a bias: arithmetic that takes more memory than operands so narrow."""
    from static_profile import Program

    def statistics(hidden, unembedding, bias, targets, scale):
        options = {"statistics": STATISTICS, "softcap": softcap, "implementation": "pallas_tpu"}
        return vocab_stats(hidden, unembedding, targets, bias=bias, scale=scale, **options)

    def gradient(hidden, *rest):
        def value(hidden):
            got = statistics(hidden, *rest)
            return sum(jnp.sum(jnp.sin(getattr(got, name))) for name in FLOATS)

        return jax.grad(value)(hidden)

    floats = [((1500, width), jnp.bfloat16), ((5000, width), jnp.bfloat16), ((5000,), jnp.float32)]
    arguments = [*floats, ((1500,), jnp.int32), ((1500,), jnp.float32)]
    chosen = statistics if program == "statistics" else gradient
    return Program(chosen, [jax.ShapeDtypeStruct(*x) for x in arguments])


def scalar_loss(model):
    """The exponentials of 4,096 tokens and gradients in float32; libtpu 0.0.42.1 takes up to 1.43 times that."""
    width, vocab_size, _ = MODELS[model]
    return 1.5 * (2.125 * 4096 * vocab_size + 4 * width * (vocab_size + TOKENS))


# At D = 2,880 hidden states, their gradient and the targets' rows are 45 MiB each; for these rows W is copied once.
# Of the curves the results, 12 bytes for a token and scale, are transposed once. The small widths: there
# `blocks.UNPLANNED` is a large part of what a kernel takes on the chip.
GPT_OSS = 5 * 2 * TOKENS * MODELS["gpt-oss"][0]
COMPILED = [
    # chip, program, arguments of its builder, bytes of temporaries at most
    ("v5p", build, ("gemma-2-2b", "everything"), 16 * MEBIBYTE),
    ("v7x", build, ("qwen2.5-7b", "everything"), 16 * MEBIBYTE),
    ("v6e", build, ("gpt-oss", "statistics"), GPT_OSS),
    ("v6e", build, ("gpt-oss", "everything"), GPT_OSS + 1104 * MEBIBYTE),
    ("v7x", build, ("gemma-2-2b", "scalar"), scalar_loss("gemma-2-2b")),
    ("v5e", build, ("gemma-2-2b", "statistics", jnp.float32), 2 * MEBIBYTE),
    ("v6e", build_small, ("statistics", 256, 30.0), MEBIBYTE),
    ("v5e", build_small, ("hidden", 128, None), MEBIBYTE),
    ("v5e", build, ("gemma-2-2b", "curves"), 3 * 4 * TOKENS * 3 * len(SCALES)),
    ("v6e", build, ("gemma-2-2b", "curves"), 3 * 4 * TOKENS * 3 * len(SCALES)),
    ("v5e", build, ("llama-3.1-8b", "scale"), 2 * MEBIBYTE),
    ("v7x", build, ("llama-3.1-8b", "hidden"), 2 * MEBIBYTE),
]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)
@pytest.mark.parametrize(("chip", "program", "arguments", "limit"), COMPILED)
def test_it_compiles_in_little_memory(chip, program, arguments, limit, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    assert static_profile.compile_for(chip, program, *arguments, profile=False).temporaries < limit


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [128, 2304, 4096, 8192, 16384])
@pytest.mark.parametrize("chip", KINDS)
@pytest.mark.parametrize("kernel", ["statistics", "curves", "expected_row", "d_hidden", "d_unembedding"])
def test_some_blocks_fit_on_every_chip(kernel, chip, width, itemsize):
    choose = functools.partial(blocks.choose, blocks.PREFERENCES, kernel)
    count = len(SCALES) if kernel == "curves" else 1
    if width * itemsize > 2**15 and chip in ("v5p", "v7x"):
        with pytest.raises(NotImplementedError, match=f"MiB on chip at D = {width}"):
            choose((TOKENS, width, itemsize), KINDS[chip], count=count)
        return
    chosen = choose((TOKENS, width, itemsize), KINDS[chip], count=count)
    assert blocks.vmem_bytes(kernel, chosen, width, itemsize, count=count) <= blocks.capacity(KINDS[chip])
    assert choose((1, width, itemsize), KINDS[chip]).tokens == 128
    if kernel == "curves":  # never with saved exponentials
        return
    saving = choose((TOKENS, width, itemsize), KINDS[chip], saved=True)
    used = blocks.vmem_bytes(kernel, saving, width, itemsize, saved=True, before=blocks.buffers(KINDS[chip]))
    assert used <= blocks.capacity(KINDS[chip])
