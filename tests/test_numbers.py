"""Extreme numbers, drawn by hypothesis: finite where a finite answer exists, equal to float64, and the ranking kept.

Shapes are few and fixed, and every function is compiled once for each of them.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import EPS, assert_within

from calibjax import losses
from calibjax.heads import MAX_LOG_FACTOR, MAX_SCALE, NO_MIN_SCALE, FittedHead, HeadConfig
from calibjax.kernels import vocab_stats

N, SIZES = 4, (1, 5)
TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 3.5, 88.7, -104.0, 1e4, 1e-3, 1e30, -1e30, 1e38, TINY, TINY / 8, -TINY / 8, 1e-45)
SCALES = (NO_MIN_SCALE, 1e-3, 0.05, 1.0, 2.5, MAX_SCALE, 1e4, 1e30)

logits = st.one_of(st.sampled_from(NUMBERS), st.floats(-30, 30, width=32))
"""Extreme values, and plain ones."""


def draws(examples):
    """The same examples on every machine, without a database and a deadline."""
    options = {"derandomize": True, "database": None, "deadline": None, "max_examples": examples}
    health = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    return hypothesis.settings(**options, suppress_health_check=health)


@st.composite
def problems(draw):
    """Logits `[N, V]`, bias `[V]` that may remove all entries but one, targets, scales, and which tokens count."""
    vocab = draw(st.sampled_from(SIZES))
    z = draw(arrays(np.float32, (N, vocab), elements=logits))
    if draw(st.booleans()):
        z[0] = z[0, 0]  # all equal
    removed = draw(arrays(bool, vocab)) & (np.arange(vocab) > 0)
    bias = np.where(removed, -np.inf, 0).astype(np.float32)
    y = draw(arrays(np.int32, N, elements=st.integers(-1, vocab - 1)))
    y = np.where(y < 0, -100, np.where(removed[y], 0, y)).astype(np.int32)
    scale = draw(arrays(np.float32, N, elements=st.sampled_from([np.float32(s) for s in SCALES])))
    if removed.any():  # entries are removed by logits of -1e15 (`stats.FLOOR`)
        scale = np.maximum(scale, np.float32(1e-12))
    return z, bias, y, scale, draw(st.sampled_from((np.ones(N, bool), np.arange(N) % 2 == 0, np.zeros(N, bool))))


@functools.cache
def operator(implementation, dtype):
    names = ("log_normalizer", "target_logit", "max_logit", "argmax", "expected_logit", "mean_logit")
    options = {"chunk_size": 3} if implementation == "chunked" else {}

    def run(z, bias, y, scale, where):
        eye = jnp.eye(z.shape[1], dtype=dtype)
        return vocab_stats(
            z, eye, y, bias=bias, scale=scale, where=where, statistics=names, implementation=implementation, **options
        )

    return jax.jit(run)


@pytest.mark.parametrize(("implementation", "dtype"), [("chunked", "float32"), ("reference", "bfloat16")])
@draws(40)
@hypothesis.given(problems())
def test_operator(implementation, dtype, problem):
    z, bias, y, scale, where = problem
    z = np.asarray(jnp.asarray(z, dtype))  # 3.4e38 is beyond bfloat16 as beyond float32
    z = np.where(np.isfinite(z), z, np.zeros((), z.dtype))
    got = operator(implementation, dtype)(z, bias, y, scale, where)
    counts, z = where & (y >= 0), z.astype(np.float64)
    expected = oracle.statistics(z, np.eye(z.shape[1]), np.maximum(y, 0), scale, bias)
    largest = np.abs(z).max(axis=1)
    for name, tolerance in (
        ("log_normalizer", np.maximum(scale * largest, 1)),
        ("target_logit", largest),
        ("max_logit", largest),
        ("expected_logit", largest * np.maximum(scale * largest, 1)),  # exponents are rounded
    ):
        value = np.asarray(getattr(got, name))
        assert (value[~counts] == 0).all(), name
        # The dense formula of the reference is fused by XLA, which rounds s·z twice in two ways.
        most = 1e6 if implementation == "reference" else LARGEST
        held = counts & (np.abs(expected[name]) < LARGEST) & (scale * largest < most)
        assert np.isfinite(value[held]).all(), (name, value, expected[name])
        within = np.where(largest < 1e6, 8 * EPS * tolerance + 4 * TINY, np.inf)
        within = np.where(tolerance < 1e6, within, np.inf)
        assert_within(value[held], expected[name][held], within[held], name)
    best = (z + bias).max(axis=1)
    chosen = (z + bias)[np.arange(N), np.where(counts, got.argmax, 0)]
    assert (chosen >= best - TINY)[counts].all(), "subnormal logits are 0"


@functools.cache
def loss(name):
    def run(z, bias, y, scale):
        def total(z, scale):
            value, counts = losses.linear_loss(losses.LOSSES[name], z, jnp.eye(z.shape[1]), y, bias=bias, scale=scale)
            return jnp.sum(jnp.where(counts, value, 0.0)), value

        return jax.value_and_grad(total, (0, 1), has_aux=True)(z, scale)

    return jax.jit(run)


QUICK = ("cross-entropy", "joint")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in losses.LOSSES])
@draws(15)
@hypothesis.given(problems())
def test_losses(name, problem):
    z, bias, y, scale, where = problem
    z = np.clip(z, -1e30, 1e30)
    scale = np.clip(scale, NO_MIN_SCALE, MAX_SCALE)
    y = np.where(where, y, -100).astype(np.int32)
    bias = np.zeros_like(bias) if "smoothing" in name or "selective" in name else bias  # log 0 is part of those
    (_, value), grads = loss(name)(z, bias, y, scale)
    value = np.asarray(value)
    assert (value[y < 0] == 0).all()
    with np.errstate(over="ignore"):
        squares = (scale.astype(np.float64) * np.abs(z).max(axis=1)) ** 2 < 1e37
    finite = squares if name == "z-loss" else np.ones(N, bool)
    assert np.isfinite(value[finite]).all(), value
    for grad in grads:
        assert np.isfinite(np.asarray(grad)[finite]).all(), grad
        assert (np.asarray(grad)[y < 0] == 0).all()
    if name == "cross-entropy":
        p = oracle.probabilities(z.astype(np.float64) + bias, scale)
        stats = oracle.statistics(z, np.eye(z.shape[1]), np.maximum(y, 0), scale, bias)
        expected = stats["log_normalizer"] - scale * stats["target_logit"]
        size = np.maximum(scale * np.abs(z).max(axis=1), 1)
        counts = (y >= 0) & (size < 1e6)
        assert_within(value[counts], expected[counts], (8 * EPS * size + TINY)[counts], "cross-entropy")
        dz = scale[:, None] * (p - np.eye(z.shape[1])[np.maximum(y, 0)])
        within = np.broadcast_to((16 * EPS * size * scale + TINY)[:, None], dz.shape)
        assert_within(np.asarray(grads[0])[counts], dz[counts], within[counts], "dz")


@functools.cache
def head(kind):
    config = HeadConfig(kind=kind, hidden_size=8, num_heads=2 if kind == "transformer" else None)
    return config, jax.eval_shape(config.init, jax.random.key(0)), jax.jit(config.build().apply)


@pytest.mark.parametrize("kind", ["constant", "linear", "mlp", "transformer"])
@draws(25)
@hypothesis.given(
    arrays(np.float32, (1, N, 8), elements=st.sampled_from([x for x in NUMBERS if abs(x) <= 1e30])),
    st.sampled_from((0.0, 1.0, -1e4)),
    st.sampled_from((-MAX_LOG_FACTOR, 0.0, MAX_LOG_FACTOR)),
)
def test_heads(kind, features, size, factor):
    """Whatever the parameters, the scale is positive and finite, and larger logits stay larger."""
    config, shapes, apply = head(kind)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: (size * rng.normal(size=leaf.shape)).astype(leaf.dtype), shapes)
    features = np.clip(features, -1e18, 1e18)  # what models produce; beyond, squares overflow float32
    log_scale = np.asarray(apply({"params": params}, features))
    assert log_scale.shape == (1, N)
    scale = np.exp(log_scale + np.float32(FittedHead(config, params, "", log_factor=factor).log_factor))
    assert np.isfinite(scale).all(), scale
    assert (scale > 0).all()
    z = np.sort(rng.normal(size=(N, 50)).astype(np.float32) * 20)
    assert (np.diff(scale[0][:, None] * z, axis=1) >= 0).all()
