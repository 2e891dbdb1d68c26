"""The Hopper kernels: their schedule, where they run, soft-capped form, chunks, and what the compiler makes of them."""

import dataclasses
import functools
import importlib.util
import itertools
import re
from pathlib import Path

import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from calibjax.kernels import VocabSharding, cross_entropy, explain, linear_cross_entropy, vocab_stats
from calibjax.kernels.pallas_gpu import backward, schedule
from calibjax.kernels.pallas_gpu.schedule import Blocks
from calibjax.runtime.sharding import make_mesh

gpu = interpreted_gpu.gpu
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
STATS = "vocab_stats pallas_gpu"
FOLDER = str(Path(__file__).parents[2] / "kernels")
H100 = "NVIDIA H100 80GB HBM3"
SIZES = [(8192, 256_000), (4096, 128_256), (32_768, 128_256), (1000, 50_257), (128, 32_000), (1, 300), (129, 256)]


@pytest.mark.parametrize(("tokens", "vocab_size"), SIZES)
def test_every_tile_is_computed_once(tokens, vocab_size):
    """In at most 16 MiB of pieces, evenly over the multiprocessors, with few different operands at a time."""
    plan = schedule.choose(tokens, vocab_size, Blocks(), H100)
    units = np.stack(jax.jit(jax.vmap(plan.unit))(np.arange(plan.units)), axis=1).tolist()
    assert {(tile, piece) for tile, piece, _, _ in units} == set(
        itertools.product(range(plan.token_tiles), range(plan.pieces))
    )
    assert plan.padded_tokens >= tokens
    assert plan.padded_tokens - tokens < 128
    for tile in range(plan.token_tiles):
        spans = sorted((start, end) for t, _, start, end in units if t == tile)
        assert spans[0][0] == 0
        assert spans[-1][1] == plan.vocab_tiles == -(-vocab_size // 256)
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise([*spans, (plan.vocab_tiles, 10**9)]))
    assert plan.pieces * plan.padded_tokens * 28 <= 16 * 2**20 or plan.pieces <= 132
    together = units[: plan.programs]
    assert len({tile for tile, *_ in together}) <= 17, "token tiles of a wave"
    assert len({piece for _, piece, *_ in together}) <= max(10, plan.programs // plan.group + 1)
    work = np.zeros(plan.programs)
    for i, (_, _, start, end) in enumerate(units):
        work[i % plan.programs] += end - start
    ideal = plan.token_tiles * plan.vocab_tiles / 132
    assert work.max() <= max(1.04 * ideal, np.ceil(ideal))


def on(kind):
    """A mesh of one GPU that need not be there."""
    device = type(make_mesh().abstract_mesh.abstract_device)(kind, 1, platform="cuda")
    auto = (AxisType.Auto,) * 3
    return VocabSharding(AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=auto, abstract_device=device))


def shapes(dtype=jnp.bfloat16, tokens=8192, width=2304, vocab_size=256_000):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((tokens, width), (vocab_size, width))]


def test_a_hopper_gpu_chooses_it():
    text = explain(*shapes(), sharding=on("NVIDIA H200"))
    assert "for gpu (NVIDIA H200)" in text
    assert "  pallas_gpu  chosen: statistics by tiles of 128 tokens by 256 columns in 35 pieces" in text
    assert "gradients by dz of 8192 columns at a time" in text
    assert "  chunked     comes later (could: " in text
    # The logits are computed anew, once for both gradients.
    assert [line[-5:] for line in text.splitlines()[-4:]] == ["1 + 0", "1 + 2", "1 + 2", "1 + 3"]
    saved = explain(*shapes(), sharding=on(H100), save_logits=True)
    assert "4125 MiB" in saved
    assert "from saved exponentials" in saved
    assert saved.endswith("1 + 2")


@pytest.mark.parametrize(
    ("kind", "change", "options", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, {}, "it runs on Hopper GPUs (H100, H200, GH200, H800, H20), not on NVIDIA A100"),
        (H100, {"dtype": jnp.float32}, {}, "takes bfloat16 and float16, not float32"),
        (H100, {"tokens": 0}, {}, "there are no tokens"),
        (H100, {}, {"chunk_size": 512}, "does not take chunk_size"),
    ],
)
def test_what_it_cannot_run(kind, change, options, reason):
    text = explain(*shapes(**change), sharding=on(kind), implementation="pallas_gpu", **options)
    [line] = [line for line in text.splitlines() if line.startswith("  pallas_gpu")]
    assert "cannot run this call here" in line
    assert reason in line


@pytest.mark.parametrize(
    ("argnums", "reduction", "softcap", "again", "products"),
    [
        ((0,), "mean", 30.0, 0, 1),  # gradients formed block by block
        ((0, 1), "mean", None, 0, 2),  # dh and dW of dz, where a token has several references
        ((0,), "none", None, 1, 1),
        ((0, 1), "none", None, 1, 2),
    ],
)
def test_logits_computed_again(gpu, argnums, reduction, softcap, again, products):
    """Of a loss with label smoothing: whether the kernel of dz runs, and XLA's products in one block and chunk."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 64), (128, 64))]

    def loss(hidden, weights):
        options = {"label_smoothing": 0.1, "softcap": softcap, "reduction": reduction, "implementation": gpu}
        return jnp.sum(linear_cross_entropy(hidden, weights, jnp.arange(16), **options))

    program = str(jax.make_jaxpr(jax.grad(loss, argnums))(*arrays))
    assert "calibjax_statistics" in program
    assert ("calibjax_dz" in program) == bool(again)
    assert len(re.findall(r":f32\[128,64\] = dot_general", program)) == products


@pytest.mark.parametrize(
    ("far", "block", "forms_dz"),
    [(25.0, 140, False), slow(0.0, 70, False), slow(200.0, 140, True), slow(200.0, 70, True)],
)
def test_exponentials_relative_to_the_target(gpu, far, block, forms_dz, monkeypatch):
    """dz is formed only where a target is so improbable, by `far` nats, that exponentials relative to it overflow."""
    monkeypatch.setattr(cross_entropy, "choose_block_size", lambda *_: block)
    rng = np.random.default_rng(0)
    tokens, vocab_size, width = 140, 200, 64
    weights = jnp.asarray(rng.normal(size=(vocab_size, width)) / 8, jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, vocab_size - 1, tokens), jnp.int32).at[5].set(-100)
    last = np.float32(weights[-1])
    hidden = rng.normal(0.5, size=(tokens, width)).astype(np.float32)
    hidden[3] += far * last / (last @ last)
    hidden[7] += 30 * np.float32(weights[targets[7]])  # a token of whose target the model is certain
    hidden[5] = np.nan
    hidden = jnp.asarray(hidden, jnp.bfloat16)

    def gradients(hidden, weights, **options):
        def loss(h, w):
            return linear_cross_entropy(h, w, targets, label_smoothing=0.5, reduction="mean", **options)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, weights)

    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in (hidden, weights))
        want = jax.tree.map(np.asarray, gradients(*wide, implementation="reference"))
    relative = gradients(hidden, weights, implementation=gpu)
    np.testing.assert_allclose(relative[0], want[0], rtol=1e-5)
    for got, expected in zip(relative[1], want[1], strict=True):
        assert np.abs(np.float64(got) - expected).max() <= 2.0**-7 * np.abs(expected).max()
        assert got.dtype == jnp.bfloat16

    def no_dz(options, saved, values, ids, start, count):
        return jnp.full((saved.references.shape[1], count), jnp.nan)

    monkeypatch.setattr(backward, "_dz_of_saved", no_dz)
    assert np.isnan(np.float32(gradients(hidden, weights, implementation=gpu)[1][0])).any() == forms_dz


@pytest.mark.slow
@pytest.mark.parametrize("unused", [0.0, 1e-30], ids=str)
def test_a_one_hot_that_no_exponential_carries(gpu, unused):
    """A token of whose statistics the target's logit alone is differentiated, or as good as alone."""
    rng = np.random.default_rng(1)
    hidden, weights = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((20, 64), (100, 64)))
    targets = jnp.asarray(rng.integers(0, 100, 20), jnp.int32)
    factor = jnp.where(jnp.arange(20) < 3, unused, 1.0)

    def gradients(hidden, weights, **options):
        def loss(h, w):
            got = vocab_stats(h, w, targets, statistics=["log_normalizer", "target_logit"], **options)
            return jnp.sum(factor * got.log_normalizer - got.target_logit)

        return jax.grad(loss, (0, 1))(hidden, weights)

    with jax.enable_x64(True):
        want = gradients(*(jnp.asarray(x, jnp.float64) for x in (hidden, weights)), implementation="reference")
    for got, expected in zip(gradients(hidden, weights, implementation=gpu, save_logits=True), want, strict=True):
        assert np.abs(np.float64(got) - np.asarray(expected)).max() <= 2.0**-7 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin and jax-cuda13-pjrt, which hold the compiler for GPUs, are not installed",
)
@pytest.mark.parametrize(
    ("preset", "changes", "task", "kernels", "name"),
    [
        ("gemma2-2b", {"softcap": 30.0}, "statistics", 1, STATS),
        ("gemma2-2b", {"softcap": 30.0, "label_smoothing": 0.1}, "both", 3, STATS),  # dz of full chunks, and the last
        ("llama31-8b-4k", {"label_smoothing": 0.1}, "both", 3, STATS),
        ("llama31-8b-4k", {"softcap": 30.0}, "both", 1, f"{STATS}, logits saved"),
        ("gemma2-2b", {"softcap": 30.0, "label_smoothing": 0.1}, "hidden", 2, "linear_cross_entropy pallas_gpu"),
        ("tokens-32k", {"softcap": 30.0, "label_smoothing": 0.1}, "both", 2, "linear_cross_entropy pallas_gpu"),
        ("tokens-32k", {"label_smoothing": 0.1}, "both", 3, STATS),
        ("tokens-32k", {"dtype": "float16", "vocab": 50_257, "width": 1000}, "statistics", 1, STATS),
    ],
)
def test_compiles_for_an_h100_without_spills(preset, changes, task, kernels, name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import contenders
    import hopper_static

    problem = dataclasses.replace(contenders.PRESETS[preset], **changes)
    got = hopper_static.compile_for_h100(problem, task, name)
    # Those that a test before this one compiled too are not compiled again.
    assert 0 < len(got["kernels"]) <= kernels
    for kernel in got["kernels"]:
        assert kernel["spilled"] == 0
        assert kernel["registers"] == 168  # 65,536 over three warpgroups, which then divide them anew
        assert kernel["shared_memory"] <= 227 * 2**10
        assert kernel["wgmma"] > 0
        assert not kernel["serialized"]
    copied = 2 * problem.vocab * problem.width if problem.width % 64 else 0
    if task == "statistics":
        assert got["temporaries"] < 16 * 2**20 + 1.1 * copied + 2.2 * problem.tokens * problem.width * bool(copied)
