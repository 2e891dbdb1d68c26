"""The TPU kernels compiled by the real compiler, for chips that need not be there, at the sizes of real models."""

import functools
import importlib.util
from pathlib import Path

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import FLOATS

from calibjax.kernels import SCALES, linear_cross_entropy, vocab_curves, vocab_stats
from calibjax.kernels.pallas_tpu import blocks, gather
from calibjax.kernels.stats import STATISTICS

FOLDER = str(Path(__file__).parents[2] / "kernels")
TOKENS = 8192
MODELS = {
    "gemma-2-2b": (2304, 256_000, 30.0),
    "llama-3.1-8b": (4096, 128_256, None),
    "qwen2.5-7b": (3584, 152_064, None),
    "gpt-oss": (2880, 201_088, None),
}
tpu = interpreted.tpu
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "v7x": "TPU7x"}

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which holds the TPU compiler, is not installed"
)


def loss(hidden, unembedding, targets, scale, **options):
    """The mean label-smoothed loss."""
    names = ("log_normalizer", "target_logit", "mean_logit")
    stats = vocab_stats(
        hidden, unembedding, targets, scale=scale, statistics=names, implementation="pallas_tpu", **options
    )
    smoothed = 0.9 * stats.target_logit + 0.1 * stats.mean_logit
    return jnp.sum(jnp.where(stats.valid, stats.log_normalizer - scale * smoothed, 0.0)) / TOKENS


def build(model, program, dtype=jnp.bfloat16, options=()):
    """What the compiler's process compiles."""
    from static_profile import Program

    width, vocab_size, softcap = MODELS[model]

    def statistics(hidden, unembedding, targets, scale):
        return vocab_stats(hidden, unembedding, targets, scale=scale, softcap=softcap, implementation="pallas_tpu")

    def curves(hidden, unembedding, targets, _):
        return vocab_curves(hidden, unembedding, targets, softcap=softcap, implementation="pallas_tpu")

    def scalar(hidden, unembedding, targets, scale):
        options = {"scale": scale, "softcap": softcap, "label_smoothing": 0.1, "reduction": "mean"}
        whole = functools.partial(linear_cross_entropy, implementation="pallas_tpu", **options)
        return jax.value_and_grad(whole, argnums=(0, 1))(hidden, unembedding, targets)

    def gradient(hidden, unembedding, targets, scale):
        which = {"scale": (3,), "hidden": (0, 3), "everything": (0, 1, 3)}[program]
        return jax.value_and_grad(lambda *x: loss(*x, softcap=softcap, **dict(options)), argnums=which)(
            hidden, unembedding, targets, scale
        )

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((TOKENS, width), dtype),
            ((vocab_size, width), dtype),
            ((TOKENS,), jnp.int32),
            ((TOKENS,), jnp.float32),
        )
    ]
    return Program({"statistics": statistics, "scalar": scalar, "curves": curves}.get(program, gradient), arguments)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "model"), [("v5p", "gemma-2-2b"), ("v6e", "gemma-2-2b"), ("v7x", "qwen2.5-7b")])
def test_gradients_compile_within_a_few_mebibytes(chip, model, monkeypatch):
    """Those in hidden, unembedding and scale: no more than 16 MiB beyond the results.

    Under a soft-cap one kernel for dh and dW also holds dh in float32, but for v5p.
    """
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for(chip, build, model, "everything", profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    width, _, softcap = MODELS[model]
    limit = 16 * 2**20
    if softcap is not None and chip != "v5p":
        limit = 4 * TOKENS * width + 2 * 2**20
    assert compiled.temporaries < limit


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("program", ["statistics", "everything"])
def test_no_copy_of_an_unembedding_of_any_width(program, monkeypatch):
    """At D = 2,880 W would be 1,104 MiB; hidden states, their gradient and the gathered rows of W are 45 each."""
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for("v6e", build, "gpt-oss", program, profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    assert compiled.temporaries < 5 * 2 * TOKENS * MODELS["gpt-oss"][0]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "model"), [("v6e", "gemma-2-2b"), ("v7x", "qwen2.5-7b")])
def test_a_scalar_loss_compiles(chip, model, monkeypatch):
    """It holds the exponentials of 4,096 tokens and gradients in float32, and no logits of all tokens.

    libtpu 0.0.42.1 takes up to 1.41 times that, for copies around the loop over blocks of tokens; 0.0.51 makes none.
    """
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for(chip, build, model, "scalar", profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    width, vocab_size, _ = MODELS[model]
    held = 2.125 * 4096 * vocab_size + 4 * width * (vocab_size + TOKENS)
    assert compiled.temporaries < 1.5 * held


@needs_compiler
@pytest.mark.slow
def test_statistics_compile_in_float32(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for("v5e", build, "gemma-2-2b", "statistics", jnp.float32, profile=False)
    assert compiled.temporaries < 2 * 2**20


def build_small(program, width, softcap):
    """All statistics, with a bias: arithmetic that takes more memory than operands so narrow."""
    from static_profile import Program

    def statistics(hidden, unembedding, bias, targets, scale):
        options = {"statistics": STATISTICS, "softcap": softcap, "implementation": "pallas_tpu"}
        return vocab_stats(hidden, unembedding, targets, bias=bias, scale=scale, **options)

    def gradient(hidden, *rest):
        def value(hidden):
            found = statistics(hidden, *rest)
            return sum(jnp.sum(jnp.sin(getattr(found, name))) for name in FLOATS)

        return jax.grad(value)(hidden)

    floats = [((1500, width), jnp.bfloat16), ((5000, width), jnp.bfloat16), ((5000,), jnp.float32)]
    arguments = [*floats, ((1500,), jnp.int32), ((1500,), jnp.float32)]
    chosen = statistics if program == "statistics" else gradient
    return Program(chosen, [jax.ShapeDtypeStruct(*x) for x in arguments])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "program", "width", "softcap"), [("v6e", "statistics", 256, 30.0), ("v5e", "hidden", 128, None)]
)
def test_compiles_at_a_small_width(chip, program, width, softcap, monkeypatch):
    """There `blocks.UNPLANNED` is a large part of what a kernel takes on the chip."""
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for(chip, build_small, program, width, softcap, profile=False)
    print(f"compiled in {compiled.compile_seconds:.0f} s")
    assert compiled.temporaries < 2**20


@needs_compiler
@pytest.mark.slow
def test_saved_exponentials_compile(monkeypatch):
    """Under a soft-cap with smoothing: statistics, dh and dW; beyond the exponentials no more than 64 MiB."""
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    options = (jnp.bfloat16, (("save_logits", True),))
    compiled = static_profile.compile_for("v6e", build, "gemma-2-2b", "everything", *options, profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    saved = 2.125 * TOKENS * MODELS["gemma-2-2b"][1]
    assert saved <= compiled.temporaries < saved + 64 * 2**20


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_curves_compile(chip, monkeypatch):
    """The results, 12 bytes for a token and scale, are transposed once."""
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for(chip, build, "gemma-2-2b", "curves", profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    assert compiled.temporaries < 3 * 4 * TOKENS * 3 * len(SCALES)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("program", ["scale", "hidden"])
def test_compiles_for_one_chip(program, monkeypatch):
    """What a temperature head and LoRA take."""
    monkeypatch.syspath_prepend(FOLDER)
    import static_profile

    compiled = static_profile.compile_for("v5e", build, "llama-3.1-8b", program, profile=False)
    print(f"{compiled.temporaries / 2**20:.2f} MiB of temporaries, compiled in {compiled.compile_seconds:.0f} s")
    assert compiled.temporaries < 2 * 2**20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ids", ["any", "first", "last", "first and last"])
def test_gathered_rows_are_exact(ids, dtype, tpu):
    """With ids in every block of the vocabulary, in one, and in two that lie apart; the last block is ragged."""
    tokens, vocab_size = 200, 450
    rng = np.random.default_rng(0)
    unembedding = jnp.asarray(rng.normal(size=(vocab_size, 72)), dtype)
    among = {"any": range(vocab_size), "first": [0], "last": [vocab_size - 1], "first and last": [0, vocab_size - 1]}
    drawn = jnp.asarray(rng.choice(among[ids], tokens), jnp.int32)
    (size,) = interpreted.SMALL["statistics"]
    rows, places = gather.rows(unembedding, drawn, size, interpreted.PARAMS)
    np.testing.assert_array_equal(rows[places], unembedding[drawn])


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [128, 2304, 4096, 8192, 16384])
@pytest.mark.parametrize("chip", KINDS)
@pytest.mark.parametrize("kernel", ["statistics", "curves", "rows", "d_hidden", "unembedding", "fused"])
def test_some_blocks_fit_on_every_chip(kernel, chip, width, itemsize):
    preferred = blocks.PREFERENCES[kernel]
    count = len(SCALES) if kernel == "curves" else 1
    small_chip = chip in ("v5p", "v7x")
    limit = 2**15 if kernel != "fused" or not small_chip else 2**14  # bytes of a row
    if width * itemsize > limit and (small_chip or kernel == "fused"):
        with pytest.raises(NotImplementedError, match=f"MiB on chip at D = {width}"):
            blocks.choose(preferred, kernel, (TOKENS, width, itemsize), KINDS[chip], count=count)
        return
    chosen = blocks.choose(preferred, kernel, (TOKENS, width, itemsize), KINDS[chip], count=count)
    assert blocks.vmem_bytes(kernel, chosen, width, itemsize, count=count) <= blocks.capacity(KINDS[chip])
    assert blocks.choose(preferred, kernel, (1, width, itemsize), KINDS[chip]).tokens == 128
    if kernel in ("fused", "curves"):  # never with saved exponentials
        return
    preferred = blocks.preferred(blocks.PREFERENCES, kernel, saved=True)
    saving = blocks.choose(preferred, kernel, (TOKENS, width, itemsize), KINDS[chip], saved=True)
    used = blocks.vmem_bytes(kernel, saving, width, itemsize, saved=True, before=blocks.buffers(KINDS[chip]))
    assert used <= blocks.capacity(KINDS[chip])
