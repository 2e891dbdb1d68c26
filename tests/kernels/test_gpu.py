"""The Hopper kernels: their schedule, where they run, soft-capped form, chunks, and what the compiler makes of them."""

import dataclasses
import importlib.util
import itertools
import re
from pathlib import Path

import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AbstractMesh, AxisType
from oracle import EPS, assert_within

from calibjax.kernels import VocabSharding, api, explain, linear_cross_entropy, pallas_gpu, stats, vocab_stats
from calibjax.kernels.pallas_gpu import forward, schedule
from calibjax.kernels.pallas_gpu.schedule import Blocks
from calibjax.runtime.sharding import make_mesh

gpu = interpreted_gpu.gpu
pytestmark = pytest.mark.usefixtures("quick_compile")
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
    print(f"{plan.pieces} pieces; the busiest of {plan.programs} does {work.max():.0f} tiles, {ideal:.1f} at best")
    assert work.max() <= max(1.04 * ideal, np.ceil(ideal))


@pytest.mark.parametrize("count", [1, 3])
def test_pieces_merge_to_the_whole(count):
    rng = np.random.default_rng(6)
    logits, scale = rng.normal(size=(9, 70)).astype(np.float32) * 20, np.geomspace(0.1, 3, 9).astype(np.float32)
    wanted = frozenset({"argmax", "first", "second", "total"})
    starts = [70 * i // count for i in range(count + 1)]

    @jax.jit
    def run(logits):
        pieces = [stats.moments(logits[:, a:b], scale, None, a, wanted) for a, b in itertools.pairwise(starts)]
        merged = forward._merged(jax.tree.map(lambda *x: jnp.stack(x), *pieces), scale)
        return merged, stats.moments(logits, scale, None, 0, wanted)

    got, want = run(logits)
    for name in ("max_logit", "argmax"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    for name in ("weight", "first", "second", "total"):
        x = np.asarray(getattr(want, name))
        assert_within(getattr(got, name), x, 50 * EPS * (1 + np.abs(logits).sum(axis=1) + np.abs(x)), name)


def test_multiprocessors():
    names = {H100: 132, "NVIDIA H200": 132, "NVIDIA H100 PCIe": 114, "NVIDIA H20": 78, "NVIDIA GH200 480GB": 132}
    assert {name: schedule.multiprocessors(name) for name in names} == names


def on(kind):
    """A mesh of one GPU that need not be there."""
    device = type(make_mesh().abstract_mesh.abstract_device)(kind, 1, platform="cuda")
    auto = (AxisType.Auto,) * 3
    return VocabSharding(AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=auto, abstract_device=device))


def shapes(dtype=jnp.bfloat16, tokens=8192, width=2304, vocab_size=256_000):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((tokens, width), (vocab_size, width))]


def test_nothing_chooses_it_until_it_is_measured():
    text = explain(*shapes(), sharding=on(H100))
    assert f"for gpu ({H100})" in text
    assert "  chunked     chosen: " in text
    assert "  pallas_gpu  comes later (could: statistics by tiles of 128 tokens by 256 columns in 35 pieces" in text
    assert "gradients by dz of 8192 columns at a time" in text
    assert "by the exponentials of 2048 tokens at a time" in text
    assert "not timed on a GPU yet" in text
    named = explain(*shapes(), sharding=on("NVIDIA H200"), implementation="pallas_gpu")
    assert "  pallas_gpu  chosen: " in named
    # dh alone comes out of the forward pass; else the logits are computed anew, once for both gradients.
    assert [line[-5:] for line in named.splitlines()[-4:]] == ["1 + 0", "1 + 2", "1 + 2", "1 + 3"]
    alone = explain(*shapes(), sharding=on(H100), implementation="pallas_gpu", statistics=["log_normalizer"])
    assert [line[-5:] for line in alone.splitlines()[-4:]] == ["1 + 0", "2 + 0", "1 + 2", "1 + 3"]
    saved = explain(*shapes(), sharding=on(H100), implementation="pallas_gpu", save_logits=True)
    assert "4125 MiB" in saved
    assert "from saved exponentials; dh that comes" in saved
    assert saved.endswith("1 + 2")
    assert "252 MiB to pad W" in explain(*shapes(vocab_size=50_257, width=2570), sharding=on(H100))


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


def test_it_never_falls_back():
    x = jnp.ones((3, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="it runs on Hopper GPUs, and the program is compiled for cpu"):
        vocab_stats(x, x, implementation="pallas_gpu")


@pytest.mark.slow
def test_soft_capped_logits_at_any_scale(gpu):
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(5, 64)) * 20, jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(70, 64)) / 8, jnp.bfloat16)
    targets = rng.integers(0, 70, 5).astype(np.int32)

    @jax.jit
    def run(scale):
        return vocab_stats(hidden, weights, targets, scale=scale, softcap=30.0, implementation=gpu)

    for largest in (2.2, 500.0):
        scale = np.geomspace(0.01, largest, 5).astype(np.float32)
        got, want = run(scale), oracle.statistics(hidden, weights, targets, scale, softcap=30.0)
        for name in ("log_normalizer", "target_logit", "mean_logit", "max_logit", "expected_logit"):
            # A logit carries a few roundings of the cap, s·z as many of itself.
            tolerance = 20 * EPS * 30 * (1 + (scale if name == "log_normalizer" else 0))
            print(name, assert_within(getattr(got, name), want[name], tolerance, name))
        np.testing.assert_array_equal(got.argmax, want["argmax"])


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True])
def test_gradients_by_several_chunks(gpu, save, monkeypatch):
    """Three chunks of the vocabulary, the last ragged; a masked token of NaN, and a bias of −inf that removes a row."""
    small = pallas_gpu.make(interpreted_gpu.PARAMS, Blocks(columns=64, stages=2, programs=1, chunk=64))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "by chunks", small)
    rng, removed = np.random.default_rng(4), 7
    hidden = jnp.asarray(rng.normal(size=(5, 64)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(150, 64)) / 4, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=150), jnp.float32).at[removed].set(-jnp.inf)
    targets, scale = np.array([140, 3, -100, 70, 9], np.int32), np.linspace(0.5, 1.5, 5).astype(np.float32)
    names = ("log_normalizer", "target_logit", "expected_logit")
    g = {name: rng.normal(size=5).astype(np.float32) for name in names}

    @jax.jit
    def run(hidden):
        def value(h, w, b, s):
            options = {"scale": s, "bias": b, "implementation": "by chunks", "save_logits": save, "statistics": names}
            got = vocab_stats(h, w, targets, **options)
            return sum(jnp.sum(g[name] * getattr(got, name)) for name in names)

        return jax.grad(value, (0, 1, 2, 3))(hidden, weights, bias, scale)

    got = run(hidden.at[2].set(jnp.nan))
    kept, counted = np.arange(150) != removed, targets >= 0
    places = np.where(counted, targets - (targets > removed), 0)
    inputs = [np.asarray(x, np.float64) for x in (hidden, weights[kept], bias[kept])]
    g = {name: x * counted for name, x in g.items()}
    want, dz = oracle.gradients(g, inputs[0], inputs[1], places, scale, inputs[2])
    # dz is rounded to bfloat16, and so are dh and dW; before that, where they are kept, p, and by as much over s z.
    size = 2.0**-8 * np.abs(dz) + 100 * EPS
    if save:
        p = oracle.probabilities(oracle.logits(*inputs), scale)
        part = np.abs(dz) + (np.arange(149) == places[:, None]) * np.abs(g["target_logit"])[:, None]
        size = size + 2.0**-8 * (part + p * np.abs(g["expected_logit"])[:, None])
    bounds = [size @ np.abs(inputs[1]), size.T @ np.abs(inputs[0]), size.sum(axis=0), 100 * EPS * 10]
    for name, x, y, bound in zip(("hidden", "unembedding", "bias", "scale"), got, want, bounds, strict=True):
        x = np.asarray(x, np.float64)
        if name in ("unembedding", "bias"):
            np.testing.assert_array_equal(x[removed], 0.0)
            x = x[kept]
        rounded = 2.0**-8 * np.abs(y) if name in ("hidden", "unembedding") else 0.0
        print(name, assert_within(x, y, bound + rounded, name))
    np.testing.assert_array_equal(np.asarray(got[0], np.float32)[2], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("softcap", "largest"), [(None, 1.5), (20.0, 1.5), (20.0, 100.0)])
def test_gradient_in_hidden_by_blocks_of_tokens(gpu, softcap, largest, monkeypatch):
    """Out of the forward pass: two blocks of tokens, three chunks of the vocabulary; a masked token, a removed row."""
    monkeypatch.setattr(schedule, "_EXPONENTIALS_BYTES", 1)
    small = pallas_gpu.make(interpreted_gpu.PARAMS, Blocks(columns=64, stages=2, programs=1, chunk=64))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "by blocks", small)
    rng, removed, tokens = np.random.default_rng(4), 7, 130
    hidden = jnp.asarray(rng.normal(size=(tokens, 64)) * 2, jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(150, 64)) / 4, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=150), jnp.float32).at[removed].set(-jnp.inf)
    targets, scale = rng.integers(8, 150, tokens), np.geomspace(0.5, largest, tokens).astype(np.float32)
    targets[2] = -100
    names = ("log_normalizer", "target_logit")
    g = {name: rng.normal(size=tokens).astype(np.float32) for name in names}

    @jax.jit
    def run(hidden):
        def value(h):
            options = {"scale": scale, "bias": bias, "softcap": softcap, "implementation": "by blocks"}
            got = vocab_stats(h, weights, targets, statistics=names, **options)
            return sum(jnp.sum(g[name] * getattr(got, name)) for name in names), got

        return jax.grad(value, has_aux=True)(hidden)

    d_hidden, got = run(hidden.at[2].set(jnp.nan))
    kept, counted = np.arange(150) != removed, targets >= 0
    places = np.where(counted, targets - 1, 0)
    inputs = [np.asarray(x, np.float64) for x in (hidden, weights[kept], bias[kept])]
    of_logits = 20 * EPS * (1 + np.abs(oracle.logits(*inputs)).max())
    statistics = oracle.statistics(inputs[0], inputs[1], places, scale, inputs[2], softcap)
    for name in names:
        size = of_logits * (1 + scale * (name == "log_normalizer"))
        print(name, assert_within(getattr(got, name), counted * statistics[name], size, name))
    counted_g = {name: x * counted for name, x in g.items()}
    (want, *_), dz = oracle.gradients(counted_g, inputs[0], inputs[1], places, scale, inputs[2], softcap)
    # All but the target's part is rounded twice; the error in z moves the soft-cap's slope.
    part = np.abs(dz) * (np.arange(149) != places[:, None])
    slope = 2.0**-8 / (scale[:, None] * softcap) if softcap else 0.0
    p = (
        oracle.probabilities(oracle.logits(*inputs, softcap), scale)
        * np.abs(scale * counted_g["log_normalizer"])[:, None]
    )
    size = 2.0**-7 * part + p * slope + np.abs(p) * of_logits * scale[:, None] + 100 * EPS * np.abs(dz)
    print("hidden", assert_within(d_hidden, want, size @ np.abs(inputs[1]) + 2.0**-8 * np.abs(want), "hidden"))
    np.testing.assert_array_equal(np.asarray(d_hidden, np.float32)[2], 0.0)


@pytest.mark.parametrize(
    ("argnums", "reduction", "softcap", "again", "products"),
    [
        ((0,), "mean", None, 0, 1),  # with the statistics in one pass
        ((0,), "mean", 30.0, 0, 1),  # the mean logit is a second weight: gradients formed block by block
        ((0, 1), "mean", None, 0, 2),
        ((0,), "none", None, 0, 1),
        ((0,), "none", 30.0, 1, 1),
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
        ("llama31-8b-4k", {"label_smoothing": 0.1}, "hidden", 1, STATS),
        ("gemma2-2b", {"softcap": 30.0, "label_smoothing": 0.1}, "hidden", 2, "linear_cross_entropy pallas_gpu"),
        ("tokens-32k", {"softcap": 30.0, "label_smoothing": 0.1}, "both", 2, "linear_cross_entropy pallas_gpu"),
        ("tokens-32k", {"label_smoothing": 0.1}, "both", 3, STATS),
        ("tokens-32k", {"dtype": "float16", "vocab": 50_257, "width": 1000}, "statistics", 1, STATS),
        ("tokens-32k", {"dtype": "float16", "vocab": 50_257, "width": 1000}, "hidden", 1, STATS),
    ],
)
def test_compiles_for_an_h100_without_spills(preset, changes, task, kernels, name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import contenders
    import hopper_static

    problem = dataclasses.replace(contenders.PRESETS[preset], **changes)
    found = hopper_static.compile_for_h100(problem, task, name)
    print(problem, task, found)
    # Those that a test before this one compiled too are not compiled again.
    assert 0 < len(found["kernels"]) <= kernels
    for kernel in found["kernels"]:
        assert kernel["spilled"] == 0
        assert kernel["registers"] == 168  # 65,536 over three warpgroups, which then divide them anew
        assert kernel["shared_memory"] <= 227 * 2**10
        assert kernel["wgmma"] > 0
        assert not kernel["serialized"]
    copied = 2 * problem.vocab * problem.width if problem.width % 64 else 0
    if task == "statistics":
        assert found["temporaries"] < 16 * 2**20 + 1.1 * copied + 2.2 * problem.tokens * problem.width * bool(copied)
