"""`linear_cross_entropy` against the float64 oracle, its reductions and its blocks."""

import functools
from typing import NamedTuple

import chex
import interpreted
import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import EPS, assert_within, f64

from calibjax.kernels import cross_entropy, linear_cross_entropy
from calibjax.kernels.platforms import Platform

tpu, gpu = interpreted.tpu, interpreted_gpu.gpu
pytestmark = pytest.mark.usefixtures("tpu", "gpu", "quick_compile")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAMES = ("hidden", "unembedding", "bias", "scale")


class Case(NamedTuple):
    """A row of the table: V, N, D, columns a chunk, tokens a block, options and dtype.

    chunk: None: reference; "tpu", "gpu": the kernels for TPUs and Hopper GPUs, interpreted.
    """

    vocab: int
    tokens: int
    width: int
    chunk: int | str | None
    block: int
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    softcap: float | None = None
    scale: bool = False
    dtype: str = "float32"

    @property
    def options(self):
        names = {None: "reference", "tpu": interpreted.NAME, "gpu": interpreted_gpu.NAME}
        implementation = {"implementation": names[self.chunk]} if self.chunk in names else {"chunk_size": self.chunk}
        options = {"label_smoothing": self.smoothing, "z_loss": self.z_loss, "softcap": self.softcap}
        return {**options, **implementation}


CASES = [
    Case(1, 1, 8, 128, 128),
    Case(11, 7, 8, 4, 3, "sum", 0.1, bias=True),
    Case(129, 16, 8, 128, 4, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True),
    Case(129, 17, 8, 43, 5, "sum", 1.0, softcap=3.0),
    Case(129, 17, 8, 43, 5, "none", 0.3, 1e-2, bias=True, softcap=3.0, scale=True),
    Case(500, 31, 20, 128, 8, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16"),
    slow(Case(500, 31, 20, 500, 31, "sum", 0.1, bias=True, scale=True, dtype="bfloat16")),
    Case(2049, 40, 8, 2048, 16, "mean", 0.0, 1e-2, scale=True, bias=True),
    Case(129, 16, 8, None, 4, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True),
    # Two blocks of tokens, of which one is ragged; several tiles of the vocabulary.
    Case(200, 11, 8, "tpu", 8, "mean", 0.1, 1e-3, bias=True, scale=True),
    slow(Case(200, 300, 64, "tpu", 160, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16")),
    slow(Case(200, 11, 64, "tpu", 8, "sum", 0.1, softcap=4.0, scale=True)),
    slow(Case(200, 11, 64, "tpu", 8, "sum", 0.1, softcap=4.0, scale=True, dtype="bfloat16")),
    slow(Case(100, 11, 64, "gpu", 8, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16")),
    slow(Case(100, 11, 64, "gpu", 8, "sum", 0.1, softcap=4.0, scale=True, dtype="bfloat16")),
]


def make(case, seed=0):
    """hidden, unembedding, bias, scale, targets; one token in five is ignored, where there are several."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    hidden = jnp.asarray(rng.normal(size=(case.tokens, case.width)) * 2, dtype)
    unembedding = jnp.asarray(rng.normal(size=(case.vocab, case.width)) / np.sqrt(case.width), dtype)
    bias = jnp.asarray(rng.normal(size=case.vocab), dtype) if case.bias else None
    scale = jnp.asarray(np.geomspace(0.1, 5, case.tokens) if case.scale else np.ones(case.tokens), jnp.float32)
    targets = rng.integers(0, case.vocab, case.tokens)
    targets[4::5] = -100
    return hidden, unembedding, bias, scale, jnp.asarray(targets, jnp.int32)


def expected(case, hidden, unembedding, bias, scale, targets):
    """Loss per token, weights, gradients and a bound on what rounding adds to them; all in float64."""
    valid = np.asarray(targets) != -100
    safe, s = np.where(valid, targets, 0), f64(scale)
    stats = oracle.statistics(hidden, unembedding, safe, s, bias, case.softcap)
    lse, target, mean, b = stats["log_normalizer"], stats["target_logit"], stats["mean_logit"], case.smoothing
    loss = (1 - b) * (lse - s * target) + b * (lse - s * mean) + case.z_loss * lse**2
    weights = valid / (max(valid.sum(), 1) if case.reduction == "mean" else 1)
    g = {
        "log_normalizer": weights * (1 + 2 * case.z_loss * lse),
        "target_logit": -(1 - b) * s * weights,
        "mean_logit": -b * s * weights,
    }
    gradients, _ = oracle.gradients(g, hidden, unembedding, safe, s, bias, case.softcap)
    d_scale = gradients[3] - weights * ((1 - b) * target + b * mean)
    # Rounding of z moves p by s|z| ε; every term of a sum is rounded; bfloat16 rounds dz and the result.
    z = oracle.logits(hidden, unembedding, bias, case.softcap)
    sizes = {name: np.abs(x) for name, x in g.items()}
    size = oracle.probabilities(z, s) * (s * sizes["log_normalizer"])[:, None]
    size += sizes["mean_logit"][:, None] / case.vocab
    size[np.arange(case.tokens), safe] += sizes["target_logit"]
    error = EPS * (20 + 8 * np.abs(s[:, None] * z).max()) + (2.0**-7 if case.dtype == "bfloat16" else 0.0)
    of_scale = np.abs(weights) * EPS * 20 * (1 + np.abs(z).max()) * (1 + s * np.abs(z).max())
    bound = (
        error * size @ np.abs(f64(unembedding)),
        error * size.T @ np.abs(f64(hidden)),
        error * size.sum(axis=0),
        of_scale,
    )
    return np.where(valid, loss, 0.0), weights, (*gradients[:3], d_scale), bound


@pytest.fixture
def block_size(monkeypatch):
    """Sets the tokens a block."""
    return lambda tokens: monkeypatch.setattr(cross_entropy, "choose_block_size", lambda *_: tokens)


@functools.cache
def program(case, argnums, options, block):
    """One for all tests of the case with so many tokens a `block`."""

    def loss(targets, *x):
        values = linear_cross_entropy(
            x[0], x[1], targets, bias=x[2], scale=x[3], reduction=case.reduction, **case.options, **dict(options)
        )
        return jnp.sum(values), values

    return jax.jit(jax.value_and_grad(loss, tuple(i + 1 for i in argnums), has_aux=True))


def value_and_gradients(case, inputs, targets, argnums=(0, 1, 2, 3), **options):
    """The loss and its gradients; for reduction "none" those of its sum."""
    block = cross_entropy.choose_block_size(case.tokens, case.vocab)
    (_, values), gradients = program(case, argnums, tuple(options.items()), block)(targets, *inputs)
    return values, gradients


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_loss_and_gradients_match_float64(case, block_size):
    block_size(case.block)
    *inputs, targets = make(case)
    values, gradients = value_and_gradients(case, inputs, targets)
    loss, weights, want, bound = expected(case, *inputs, targets)
    scale, largest = f64(inputs[3]), np.abs(oracle.logits(*inputs[:3], case.softcap)).max()
    near = 8 * EPS * (1 + scale * largest) * (1 + case.z_loss * scale * largest) + EPS * np.sqrt(case.vocab)
    if case.reduction == "none":
        assert_within(values, loss, near, "loss")
        np.testing.assert_array_equal(np.asarray(values)[np.asarray(targets) == -100], 0.0)
    else:
        assert_within(values, (weights * loss).sum(), (weights * near).sum(), "loss")
    assert values.dtype == jnp.float32
    worst = {}
    for name, x, got, e, tolerance in zip(NAMES, inputs, gradients, want, bound, strict=True):
        if x is None:
            assert got is None
            continue
        assert got.dtype == x.dtype, name
        rounded = 2.0**-8 * np.abs(e) if x.dtype == jnp.bfloat16 else 0.0
        worst[name] = f"{assert_within(got, e, tolerance + rounded + 1e-30, name):.2f}"
    print(worst, "of the bound")


BASE = Case(129, 17, 8, 64, 5, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True)


@pytest.mark.parametrize("argnums", [(0,), (2,), (3,), (1, 3), (0, 1, 2)], ids=str)
def test_what_is_differentiated_does_not_change_the_gradient(argnums, block_size):
    block_size(BASE.block)
    *inputs, targets = make(BASE)
    value, gradients = value_and_gradients(BASE, inputs, targets, argnums)
    loss, weights, want, bound = expected(BASE, *inputs, targets)
    assert_within(value, (weights * loss).sum(), 1e-5)
    for i, got in zip(argnums, gradients, strict=True):
        assert_within(got, want[i], bound[i] + 1e-30, NAMES[i])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_masked_tokens_give_exact_zeros_whatever_they_hold(reduction, block_size):
    block_size(BASE.block)
    case = BASE._replace(reduction=reduction)
    hidden, unembedding, bias, scale, targets = make(case)
    clean = value_and_gradients(case, (hidden, unembedding, bias, scale), targets)
    masked = np.asarray(targets) == -100
    hidden = jnp.where(masked[:, None], jnp.nan, hidden)
    scale = jnp.where(masked, jnp.inf, scale)
    got = value_and_gradients(case, (hidden, unembedding, bias, scale), targets)
    chex.assert_trees_all_equal(got, clean)
    np.testing.assert_array_equal(np.asarray(got[1][0])[masked], 0.0)
    np.testing.assert_array_equal(np.asarray(got[1][3])[masked], 0.0)


@pytest.mark.parametrize(
    ("reduction", "argnums"), [("none", (0, 1, 2, 3)), ("mean", (0, 1, 2, 3)), ("mean", (3,)), ("sum", (0, 3))], ids=str
)
def test_all_masked(reduction, argnums, block_size):
    block_size(BASE.block)
    case = BASE._replace(reduction=reduction)
    hidden, unembedding, bias, scale, targets = make(case)
    inputs = (jnp.full_like(hidden, jnp.nan), unembedding, bias, scale)
    for x in jax.tree.leaves(value_and_gradients(case, inputs, jnp.full_like(targets, -100), argnums)):
        np.testing.assert_array_equal(x, 0.0)


def test_where_leading_dimensions_and_a_scale_for_all(block_size):
    block_size(5)
    case = BASE._replace(tokens=16, reduction="mean")
    hidden, unembedding, bias, _, targets = make(case)
    where = np.arange(16) % 3 > 0
    options = {**case.options, "reduction": "mean", "bias": bias}

    def flat(h, w, s):
        kept = jnp.where(where, targets, -100)
        return linear_cross_entropy(h, w, kept, scale=jnp.broadcast_to(s, (16,)), **options)

    def boxed(h, w, s):
        shape = (4, 4)
        return linear_cross_entropy(
            h.reshape(*shape, -1), w, targets.reshape(shape), scale=s, where=where.reshape(shape), **options
        )

    inputs = (hidden, unembedding, np.float32(0.7))
    one, two = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*inputs) for f in (flat, boxed))
    assert two[1][2].shape == ()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), one, two)


@pytest.mark.parametrize("argnums", [(0,), (0, 1, 2)], ids=str)
def test_a_target_outside_the_vocabulary_is_nan(argnums, block_size):
    block_size(BASE.block)
    *inputs, targets = make(BASE)
    value, _ = value_and_gradients(BASE, inputs, targets.at[1].set(BASE.vocab), argnums)
    assert np.isnan(value)
    ignored, _ = value_and_gradients(BASE, inputs, targets.at[1].set(-7), argnums, ignore_index=-7)
    assert np.isnan(ignored), "-100 is now a target like any other"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_settings_of_jax(reduction):
    """Strict promotion and the search for NaN find nothing: an ignored target is no NaN in passing."""
    *inputs, targets = make(BASE)
    assert (np.asarray(targets) == -100).any()

    def loss(h, w, b, s):
        options = {**BASE.options, "reduction": reduction}
        return linear_cross_entropy(h, w, targets, bias=b, scale=s, **options).sum()

    expected = jax.value_and_grad(loss, (0, 1, 2, 3))(*inputs)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        chex.assert_trees_all_close(jax.value_and_grad(loss, (0, 1, 2, 3))(*inputs), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "total"}, "reduction: expected one of"),
        ({"label_smoothing": 1.5}, "label_smoothing: expected"),
        ({"z_loss": -1.0}, "z_loss: expected"),
    ],
)
def test_errors_teach(change, message):
    hidden, unembedding, _, _, targets = make(BASE)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, unembedding, targets, **change)


@pytest.mark.parametrize("tokens", [0, 1, 100, 2048, 100_000])
@pytest.mark.parametrize("vocab", [1, 32_000, 256_000])
def test_choose_block_size(tokens, vocab, monkeypatch):
    block = cross_entropy.choose_block_size(tokens, vocab)
    assert 1 <= block <= max(tokens, 1)
    assert 4 * vocab * block <= max(24 * 2**20, 4 * vocab * max(128, tokens // 32))
    monkeypatch.setattr(cross_entropy, "platform", lambda: Platform("gpu", "NVIDIA H200"))
    found = [cross_entropy.choose_block_size(8192, 256_000, bytes_a_logit) for bytes_a_logit in (4, 2.0625)]
    assert found == [2048, 4096]


@pytest.mark.parametrize("name", [interpreted.NAME, interpreted_gpu.NAME])
def test_kernels_have_no_second_derivative(name):
    """One error that names what has; JAX's own is a bare AssertionError."""
    hidden, unembedding = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
    targets = jnp.zeros(64, jnp.int32)

    def loss(hidden):
        return linear_cross_entropy(hidden, unembedding, targets, reduction="sum", implementation=name)

    assert jax.eval_shape(jax.grad(loss), hidden).shape == hidden.shape
    with pytest.raises(NotImplementedError, match="chunked"):
        jax.eval_shape(jax.hessian(loss), hidden)
