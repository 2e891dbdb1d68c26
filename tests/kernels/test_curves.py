"""`vocab_curves` against float64: the sums at the nodes, the law of the interpolant's errors, and every loss on it."""

import functools

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import EPS, assert_within, f64

from calibjax.kernels import DOUBLED_SCALES, SCALES, VocabSharding, explain, interpolation, top_logits, vocab_curves
from calibjax.kernels.stats import octaves
from calibjax.losses import LOSSES, curve_loss, linear_loss
from calibjax.runtime.sharding import make_mesh

NODES = tuple(2.0 ** (k / 2) for k in range(-4, 4))  # four octaves of two
DENSE = (0.3, 0.5, 1.3, 2.0)  # no octaves
tpu = interpreted.tpu
STATIC = ("scales", "top_k", "softcap", "implementation", "chunk_size")
compiled_curves = jax.jit(vocab_curves, static_argnames=STATIC)


def rows_of_logits(vocab):
    """Logits [N, V] of every kind: flat, peaked, one-hot, ties of the largest and of all others, bounded, far apart."""
    rng = np.random.default_rng(0)
    index = np.arange(vocab)
    kinds = [
        np.zeros(vocab),
        rng.normal(size=vocab) * 0.01,
        rng.normal(size=vocab) * 3.0,
        rng.normal(size=vocab) * 12.0,
        np.where(index == vocab // 2, 40.0, 0.0),
        np.where(index == 0, 1e4, 0.0),
        np.where(index < 2, 3.0, -2.0),
        -np.log1p(index) * 2.0,
        np.where(index % 2, 8.0, -8.0),
    ]
    return np.stack(kinds).astype(np.float32)


def exact(z, scale):
    """f, f' and f'' of logits [N, V] at a scale, in float64."""
    u = f64(z) - f64(z).max(axis=1, keepdims=True)
    e = np.exp(scale * u)
    p = e / e.sum(axis=1, keepdims=True)
    first = (p * u).sum(axis=1)
    return np.log(e.sum(axis=1)), first, (p * (u - first[:, None]) ** 2).sum(axis=1)


def node_bounds(z, scale, levels):
    """Errors at a node: of an exponential rel = ε (4 + 2^levels + 4 s |u|), as far as p |u|ᵏ is not zero."""
    u = f64(z) - f64(z).max(axis=1, keepdims=True)
    e = np.exp(scale * u)
    p = e / e.sum(axis=1, keepdims=True)
    rel = EPS * (4 + 2.0**levels + 4 * scale * np.abs(u)) * (u < 0) + EPS * 0.1 * np.sqrt(z.shape[1])
    # The logits themselves are rounded to ε/2 of the largest that the product adds up.
    zerr = 2 * EPS * np.abs(f64(z)).max(axis=1)
    spread, square = (p * np.abs(u)).sum(axis=1), (p * u * u).sum(axis=1)
    weight = (p * rel).sum(axis=1) + 2 * scale * zerr
    slope = (p * rel * np.abs(u)).sum(axis=1) + (weight + 2 * EPS) * spread + zerr * (1 + 2 * scale * spread)
    curvature = (p * rel * u * u).sum(axis=1) + (weight + 4 * EPS) * square + 2 * spread * slope
    curvature = curvature + zerr * (4 * spread + 2 * scale * square)
    return weight + EPS * np.log(z.shape[1]), slope, curvature


def assert_nodes(curves, z, nodes, rows=slice(None), factor=1):
    """The sums at the nodes are those of the logits in float64."""
    for k, node in enumerate(nodes):
        names = ("log_weight", "expected_difference", "logit_variance")
        bounds = node_bounds(z, node, int(np.log2(node / nodes[0])))
        for name, value, bound in zip(names, exact(z, node), bounds, strict=True):
            assert_within(getattr(curves, name)[rows, k], value[rows], factor * bound[rows] + 1e-30, f"{name}, {node}")


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("nodes", [NODES, DENSE], ids=["octaves", "any"])
@pytest.mark.parametrize("vocab", [1, 129])
def test_the_sums_at_the_nodes_match_float64(implementation, nodes, vocab):
    z = rows_of_logits(vocab)
    options = {"chunk_size": 50} if implementation == "chunked" else {}
    targets = jnp.asarray(np.arange(len(z)) % vocab, jnp.int32)
    curves = compiled_curves(
        z, np.eye(vocab, dtype=np.float32), targets, scales=nodes, implementation=implementation, **options
    )
    assert_nodes(curves, z, nodes)
    want = oracle.statistics(z, np.eye(vocab), np.asarray(targets), np.ones(len(z)))
    for name in ("target_logit", "max_logit", "argmax", "correct"):
        np.testing.assert_array_equal(getattr(curves, name), want[name], name)
    assert_within(curves.mean_logit, want["mean_logit"], 4 * EPS * np.abs(z).max(axis=1))


def jets(z, nodes):
    """f, f' and f'' [N, K] of logits at the nodes, in float64."""
    return tuple(np.stack(x, axis=1) for x in zip(*(exact(z, node) for node in nodes), strict=True))


def interpolated(nodes, values, scale):
    with jax.enable_x64(True):
        at = jnp.full(len(values[0]), scale, jnp.float64)
        jet = interpolation.Jet(*map(jnp.asarray, values))
        return [np.asarray(x) for x in interpolation.interpolate(nodes, jet, at)]


@pytest.mark.parametrize("distance", [0.05, 0.3, 1.0])
def test_errors_of_the_interpolant_are_within_the_law(distance):
    """With M = 720 R⁶/π⁵ >= |f⁽⁶⁾|: h⁶ M/46080, √5 h⁵ M/30000 and h⁴ M/1920, of any logits in a range of R."""
    rng = np.random.default_rng(0)
    range_ = 3.0
    z = rng.uniform(-range_, 0.0, size=(40, 30))
    z[:20] = np.where(rng.uniform(size=(20, 30)) < np.linspace(0.05, 0.95, 20)[:, None], -range_, 0.0)
    z[:, 0], z[:, 1] = 0.0, -range_
    nodes = (0.4, 0.4 + distance, 0.4 + 1.7 * distance)
    values = jets(z, nodes)
    sixth = 720 * range_**6 / np.pi**5
    h = distance
    bounds = (h**6 * sixth / 46080, np.sqrt(5) * h**5 * sixth / 30000, h**4 * sixth / 1920)
    worst = np.zeros(3)
    for scale in np.linspace(nodes[0], nodes[2], 41):
        got, want = interpolated(nodes, values, scale), exact(z, scale)
        for i, (x, y, bound) in enumerate(zip(got, want, bounds, strict=True)):
            worst[i] = max(worst[i], assert_within(x, y, bound + 1e-13, f"derivative {i} at {scale}"))
    assert (worst > 1e-3).all(), worst  # the law is of the right order


def levels(vocab=2**18):
    """Logits of two levels, the jets of which are known: n of `vocab` at the top, the others g below: g x n rows."""
    gaps, tops = np.meshgrid(np.geomspace(0.01, 100.0, 60), [1, 2, 10, 1000, 100000], indexing="ij")
    return gaps.ravel(), np.log((vocab - tops.ravel()) / tops.ravel()), np.log(tops.ravel())


def jets_of_levels(gaps, log_ratio, log_tops, scale):
    x = log_ratio - scale * gaps
    q = 1 / (1 + np.exp(-x))
    return log_tops + np.logaddexp(0.0, x), -gaps * q, gaps**2 * q * (1 - q)


def test_the_default_scales_with_two_levels_of_logits():
    """The steepest curves that a vocabulary can have: all mass moves between two levels at one scale.

    V = 262,144. Errors relative to 1, 1/s and 1/s²: of a loss, and of its gradients in log s. The scales are octaves:
    K/L exponentials a logit, where scales that double only nearly would cost K.
    """
    assert octaves(SCALES) == 6
    family = levels()
    values = [np.stack(x, axis=1) for x in zip(*(jets_of_levels(*family, node) for node in SCALES), strict=True)]
    worst = np.zeros(3)
    for scale in np.geomspace(SCALES[0], SCALES[-1], 400):
        got, want = interpolated(SCALES, values, scale), jets_of_levels(*family, scale)
        worst = np.maximum(
            worst, [np.abs(x - y).max() * scale**i for i, (x, y) in enumerate(zip(got, want, strict=True))]
        )
    assert (worst < [5e-4, 1e-2, 0.4]).all(), worst


@pytest.mark.parametrize("vocab", [1, 2, 129])
def test_beyond_the_nodes(vocab):
    """Convex, falling, at least 0, its slope the derivative, and the exact limit for logits of two levels."""
    z = rows_of_logits(vocab)
    values = jets(z, NODES)
    for scales in (np.geomspace(1e-6, NODES[0], 60), np.geomspace(NODES[-1], 1e4, 200)):
        f, slope, curvature = (np.stack(x) for x in zip(*(interpolated(NODES, values, s) for s in scales), strict=True))
        size = 1e-12 * (1 + np.abs(f[:-1]))
        assert np.isfinite(f).all()
        assert (f >= -1e-12).all()
        assert (slope <= 1e-12).all()
        assert (curvature >= 0).all()
        step = np.diff(scales)[:, None]
        assert (np.diff(f, axis=0) <= size).all()
        # A convex function's chord has a slope between those at its ends.
        assert (np.diff(f, axis=0) >= slope[:-1] * step - size).all()
        assert (np.diff(f, axis=0) <= slope[1:] * step + size).all()
    for i in (0, 4, 5, 6):  # two levels of logits, or one
        for s in (NODES[-1] * 1.5, 1e4):
            np.testing.assert_allclose(interpolated(NODES, values, s)[0][i], exact(z, s)[0][i], atol=1e-9)


def problem(vocab=150, tokens=41, width=16, size=2.0):
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)) * size, jnp.float32)
    unembedding = jnp.asarray(rng.normal(size=(vocab, width)) / 4, jnp.float32)
    targets = rng.integers(0, vocab, tokens)
    targets[::5] = -100
    return hidden, unembedding, jnp.asarray(targets), jnp.asarray(rng.normal(size=vocab), jnp.float32)


@pytest.mark.parametrize("softcap", [None, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient_in_the_scale(name, softcap):
    hidden, unembedding, targets, bias = problem()
    scales = DOUBLED_SCALES if LOSSES[name].doubled else SCALES
    loss, scale = LOSSES[name], jnp.geomspace(0.15, min(10.0, scales[-1]), len(hidden))
    options = {"bias": bias, "softcap": softcap}
    curves = compiled_curves(hidden, unembedding, targets, scales=scales, top_k=5, **options)

    def by_curves(scale):
        losses = curve_loss(loss, curves, scale)[0]
        return jnp.sum(losses), losses

    def by_logits(scale):
        losses = linear_loss(loss, hidden, unembedding, targets, scale=scale, **options)[0]
        return jnp.sum(losses), losses

    got, want = (jax.jit(jax.value_and_grad(f, has_aux=True))(scale) for f in (by_curves, by_logits))
    np.testing.assert_allclose(got[0][1][::5], 0.0)
    # Logits of about 10: sums over 33 tokens of terms of some units, each to ε of s·max; slopes to h⁵ of the law.
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(got[1][::5], 0.0)


def test_gradients_are_those_of_the_interpolated_function():
    """Also of second order, as Newton's method takes them; constant in what the curves are made of."""
    hidden, unembedding, targets, bias = problem()
    curves = compiled_curves(hidden, unembedding, targets, bias=bias, scales=NODES)
    scale = jnp.geomspace(0.1, 20.0, len(hidden))
    slopes = jax.grad(lambda s: jnp.sum(curves.at(s).log_normalizer))
    np.testing.assert_array_equal(slopes(scale), curves.at(scale).expected_logit)
    second = jax.grad(lambda s: jnp.sum(slopes(s)))(scale)
    assert_within(second, curves.at(scale).logit_variance, 1e-6 * (1 + np.abs(second)))
    with jax.enable_x64(True):
        nodes = interpolation.Jet(*map(f64, (curves.log_weight, curves.expected_difference, curves.logit_variance)))
        wide, h = f64(scale), 1e-5
        low, high = (interpolation.interpolate(NODES, nodes, jnp.asarray(wide + d)) for d in (-h, h))
        at, slopes = jax.jvp(lambda s: interpolation.interpolate(NODES, nodes, s), (wide,), (np.ones_like(wide),))
        for i, slope in enumerate((at.slope, at.curvature, slopes.curvature)):
            np.testing.assert_allclose((high[i] - low[i]) / (2 * h), slope, atol=1e-6)

    def value(hidden):
        return jnp.sum(vocab_curves(hidden, unembedding, targets, scales=NODES).at(scale).log_normalizer)

    np.testing.assert_array_equal(jax.jit(jax.grad(value))(hidden), 0.0)


def test_masked_tokens_and_a_pytree():
    hidden, unembedding, targets, bias = problem()
    where = jnp.arange(len(hidden)) % 3 > 0
    run = functools.partial(compiled_curves, unembedding=unembedding, bias=bias, scales=NODES, top_k=3, where=where)
    clean = run(hidden, targets=targets)
    counted = np.asarray(where & (targets >= 0))
    dirty = run(jnp.where(counted[:, None], hidden, jnp.nan), targets=targets)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    np.testing.assert_array_equal(clean.valid, counted)
    of_ignored = jax.tree.map(lambda x: np.asarray(x)[~counted], clean)
    for name, value in vars(of_ignored).items():
        if name != "scales":
            np.testing.assert_array_equal(value, {"argmax": -1}.get(name, 0), name)
    stats = clean.at(jnp.where(counted, 0.7, jnp.nan))
    for name, value in stats._asdict().items():
        assert np.isfinite(np.asarray(value)[counted]).all(), name
    np.testing.assert_array_equal(stats.log_normalizer[~counted], 0.0)
    some = jax.tree.map(lambda x: x[3:9], clean)
    np.testing.assert_array_equal(some.at(0.7).log_normalizer, clean.at(0.7).log_normalizer[3:9])
    wanted = top_logits(hidden, unembedding, 3, bias=bias, where=jnp.asarray(counted)).logits
    np.testing.assert_array_equal(clean.top_logits, wanted)


SHARDINGS = {
    "1x1x8": lambda: VocabSharding(make_mesh((1, 1, 8))),
    "stored along D": lambda: VocabSharding(make_mesh((2, 2, 2)), width="fsdp"),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_over_a_mesh(name, monkeypatch):
    """150 rows and 41 tokens divide among none of the axes."""
    monkeypatch.setattr("calibjax.kernels.sharded._GATHERED_BYTES", 200)
    monkeypatch.setattr("calibjax.kernels.sharded._NARROW", 8)
    hidden, unembedding, targets, bias = problem()
    want, got = (
        jax.jit(
            functools.partial(vocab_curves, softcap=5.0, bias=bias, scales=NODES, chunk_size=30, sharding=sharding)
        )(hidden, unembedding, targets)
        for sharding in (None, SHARDINGS[name]())
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), got, want)
    np.testing.assert_array_equal(got.argmax, want.argmax)


@pytest.mark.parametrize(("softcap", "nodes"), [(None, NODES), (3.0, DENSE)], ids=["octaves", "any"])
def test_the_tpu_kernel_matches_float64(softcap, nodes, tpu):
    """Five blocks of the vocabulary, the last of 22 columns; a removed entry, a bias, and tokens that hold NaN."""
    hidden, unembedding, targets, bias = problem()
    bias = bias.at[7].set(-jnp.inf if softcap is None else 0.0)
    dirty = jnp.where(targets[:, None] < 0, jnp.nan, hidden)
    options = {"bias": bias, "softcap": softcap, "scales": nodes}
    got = compiled_curves(dirty, unembedding, targets, implementation=tpu, **options)
    z = f64(hidden) @ f64(unembedding).T + f64(bias)
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    logits = np.delete(z, 7, axis=1) if softcap is None else z
    counted = np.asarray(targets) >= 0
    # Products of 16 terms, and the soft-cap, round the logits a few times more than those at hand.
    assert_nodes(got, logits, nodes, counted, factor=8)
    want = compiled_curves(hidden, unembedding, targets, implementation="reference", **options)
    for name in ("target_logit", "mean_logit", "max_logit"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-5, err_msg=name)
    for name in ("argmax", "correct", "valid"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)


def test_explain_names_the_operator():
    text = explain(jnp.ones((8, 16)), jnp.ones((32, 16)), scales=NODES)
    assert text.startswith("vocab_curves: 8 tokens")
    assert f"three sums at each of {len(NODES)} scales" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": (1.0,)}, "scales: expected at least two"),
        ({"scales": (2.0, 1.0)}, "rising"),
        ({"scales": (0.0, 1.0)}, "above 0"),
        ({"top_k": 151}, "top_k"),
        ({"save_logits": True}, "save_logits"),
    ],
)
def test_invalid_input(options, message):
    hidden, unembedding, targets, _ = problem()
    with pytest.raises(ValueError, match=message):
        vocab_curves(hidden, unembedding, targets, **options)
