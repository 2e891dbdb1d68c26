"""`linear_cross_entropy` against the float64 oracle, its reductions and its blocks."""

import functools
from typing import NamedTuple

import chex
import interpreted
import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import EPS, assert_within, f64

from calibjax.kernels import cross_entropy, linear_cross_entropy
from calibjax.kernels.platforms import Platform

tpu, gpu = interpreted.tpu, interpreted_gpu.gpu
pytestmark = pytest.mark.usefixtures("tpu", "gpu")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAMES = ("hidden", "unembedding", "bias", "scale")


class Case(NamedTuple):
    """A row of the table: V, N, D, columns a chunk, tokens a block, options and dtype.

    chunk: columns at a time in "chunked", or the name of another implementation.
    """

    vocab: int
    tokens: int
    width: int
    chunk: int | str
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
        chosen = {"implementation": self.chunk} if isinstance(self.chunk, str) else {"chunk_size": self.chunk}
        return {"label_smoothing": self.smoothing, "z_loss": self.z_loss, "softcap": self.softcap, **chosen}


CASES = [
    Case(1, 1, 8, 128, 128),
    Case(11, 7, 8, 4, 3, "sum", 0.1, bias=True),
    Case(129, 16, 8, 128, 4, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True),
    Case(129, 17, 8, 43, 5, "sum", 1.0, softcap=3.0),
    Case(129, 17, 8, 43, 5, "none", 0.3, 1e-2, bias=True, softcap=3.0, scale=True),
    Case(500, 31, 20, 128, 8, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16"),
    Case(2049, 40, 8, 2048, 16, "mean", 0.0, 1e-2, scale=True, bias=True),
    Case(129, 16, 8, "reference", 4, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True),
    # Two blocks of tokens, of which one is ragged; several tiles of the vocabulary.
    Case(200, 11, 8, interpreted.NAME, 8, "mean", 0.1, 1e-3, bias=True, scale=True),
    slow(Case(200, 300, 64, interpreted.NAME, 160, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16")),
    slow(Case(200, 11, 64, interpreted.NAME, 8, "sum", 0.1, softcap=4.0, scale=True, dtype="bfloat16")),
    slow(Case(100, 11, 64, interpreted_gpu.NAME, 8, "mean", 0.1, 1e-3, bias=True, scale=True, dtype="bfloat16")),
    slow(Case(100, 11, 64, interpreted_gpu.NAME, 8, "sum", 0.1, softcap=4.0, scale=True, dtype="bfloat16")),
]


def make(case):
    """hidden, unembedding, bias, scale, targets; one token in five is ignored, where there are several."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    hidden = jnp.asarray(rng.normal(size=(case.tokens, case.width)) * 2, dtype)
    unembedding = jnp.asarray(rng.normal(size=(case.vocab, case.width)) / np.sqrt(case.width), dtype)
    bias = jnp.asarray(rng.normal(size=case.vocab), dtype) if case.bias else None
    scale = jnp.asarray(np.geomspace(0.1, 5, case.tokens) if case.scale else np.ones(case.tokens), jnp.float32)
    targets = rng.integers(0, case.vocab, case.tokens)
    targets[4::5] = -100
    return hidden, unembedding, bias, scale, jnp.asarray(targets, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=(1, 2, 3, 4), has_aux=True)
def dense(case, hidden, unembedding, bias, scale, targets):
    """The sum of the loss by the dense formula; the loss itself, and the largest scaled logit."""
    z = hidden @ unembedding.T + (0.0 if bias is None else bias[None, :])
    z = z if case.softcap is None else case.softcap * jnp.tanh(z / case.softcap)
    lse, log_p = jax.nn.logsumexp(scale[:, None] * z, axis=1), jax.nn.log_softmax(scale[:, None] * z)
    target = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    losses = case.smoothing * (target - log_p.mean(axis=1)) - target + case.z_loss * lse**2
    losses = jnp.where(targets >= 0, losses, 0.0)
    count = jnp.maximum((targets >= 0).sum(), 1) if case.reduction == "mean" else 1
    values = losses if case.reduction == "none" else losses.sum() / count
    return values.sum(), (values, jnp.abs(scale[:, None] * z).max())


def expected(case, inputs, targets):
    """`dense` and its gradients, in float64, and the relative error that rounding may leave."""
    with jax.enable_x64(True):
        wide = (None if x is None else f64(x) for x in inputs)
        (_, (values, largest)), gradients = dense(case, *wide, np.asarray(targets))
        error = EPS * (20 + 8 * largest) + (2.0**-7 if case.dtype == "bfloat16" else 0.0)
        return f64(values), [f64(x) for x in gradients], float(error)


@pytest.fixture
def block_size(monkeypatch):
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


def assert_right(case, inputs, targets, values, gradients, argnums=(0, 1, 2, 3)):
    want, of_all, error = expected(case, inputs, targets)
    assert_within(values, want, EPS * np.sqrt(case.vocab) + error * np.abs(want).max(initial=0.1), "loss")
    for i, got in zip(argnums, gradients, strict=True):
        if inputs[i] is not None:
            assert_within(got, of_all[i], error * (1e-3 + np.abs(of_all[i]).max()), NAMES[i])


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_loss_and_gradients_match_float64(case, block_size):
    block_size(case.block)
    *inputs, targets = make(case)
    values, gradients = value_and_gradients(case, inputs, targets)
    assert_right(case, inputs, targets, values, gradients)
    assert values.dtype == jnp.float32
    for x, got in zip(inputs, gradients, strict=True):
        assert got is x is None or got.dtype == x.dtype
    if case.reduction == "none":
        np.testing.assert_array_equal(np.asarray(values)[np.asarray(targets) == -100], 0.0)


BASE = Case(129, 17, 8, 64, 5, "mean", 0.2, 1e-2, bias=True, softcap=4.0, scale=True)


@pytest.mark.parametrize("argnums", [(0,), (2,), (3,), (1, 3), (0, 1, 2)], ids=str)
def test_what_is_differentiated_does_not_change_the_gradient(argnums, block_size):
    block_size(BASE.block)
    *inputs, targets = make(BASE)
    assert_right(BASE, inputs, targets, *value_and_gradients(BASE, inputs, targets, argnums), argnums)


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
        labels = jnp.where(where, targets, -100)
        return linear_cross_entropy(h, w, labels, scale=jnp.broadcast_to(s, (16,)), **options)

    def boxed(h, w, s):
        h, y, mask = h.reshape(4, 4, -1), targets.reshape(4, 4), where.reshape(4, 4)
        return linear_cross_entropy(h, w, y, scale=s, where=mask, **options)

    inputs = (hidden, unembedding, np.float32(0.7))
    one, two = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*inputs) for f in (flat, boxed))
    assert two[1][2].shape == ()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), one, two)


def test_what_float16_does_not_hold():
    """p = 1e-4 over N = 1000 in dh, and dW before it is multiplied by the scale of the loss; all logits are equal."""
    inputs = jnp.full((1000, 8), 2.0**-14, jnp.float16), jnp.ones((10_000, 8), jnp.float16)
    loss = functools.partial(linear_cross_entropy, targets=np.zeros(1000, int), reduction="mean")
    d_hidden, d_weights = jax.jit(jax.grad(lambda *inputs: 2.0**14 * loss(*inputs), (0, 1)))(*inputs)
    assert_within(d_hidden, np.zeros((1000, 8)), 2.0**-9 * 2**14 / 1000)  # ∝ Σ p W − W_y = 0
    assert_within(d_weights[1:], np.full((9999, 8), 1e-4), 2.0**-9 * 1e-4)


def test_a_target_outside_the_vocabulary_is_nan(block_size):
    block_size(BASE.block)
    *inputs, targets = make(BASE)
    value, _ = value_and_gradients(BASE, inputs, targets.at[1].set(BASE.vocab))
    assert np.isnan(value)
    ignored, _ = value_and_gradients(BASE, inputs, targets.at[1].set(-7), ignore_index=-7)
    assert np.isnan(ignored), "-100 is now a target like any other"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_settings_of_jax(reduction):
    """Strict promotion and the search for NaN find nothing: an ignored target is no NaN in passing."""
    *inputs, targets = make(BASE)
    assert (np.asarray(targets) == -100).any()

    def loss(h, w, b, s):
        options = {**BASE.options, "reduction": reduction}
        return linear_cross_entropy(h, w, targets, bias=b, scale=s, **options).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*inputs)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        chex.assert_trees_all_close(jax.value_and_grad(loss, (0, 1, 2, 3))(*inputs), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"reduction": "total"}, "reduction"), ({"label_smoothing": 1.5}, "label_smoothing"), ({"z_loss": -1}, "z_loss")],
)
def test_errors_teach(change, message):
    hidden, unembedding, _, _, targets = make(BASE)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, unembedding, targets, **change)


@pytest.mark.parametrize("tokens", [0, 1, 100, 2048, 100_000])
@pytest.mark.parametrize("vocab", [1, 32_000, 256_000])
def test_choose_block_size(tokens, vocab, monkeypatch):
    monkeypatch.setattr(cross_entropy, "platform", lambda: Platform("cpu", "cpu"))
    block = cross_entropy.choose_block_size(tokens, vocab)
    assert 1 <= block <= max(tokens, 1)
    assert 4 * vocab * block <= max(24 * 2**20, 4 * vocab * max(128, tokens // 32))
    monkeypatch.setattr(cross_entropy, "platform", lambda: Platform("gpu", "NVIDIA H200"))
    sizes = [cross_entropy.choose_block_size(8192, 256_000, bytes_a_logit) for bytes_a_logit in (4, 2.0625)]
    assert sizes == [2048, 4096]
    # Gemma-2-2B: all tokens, or blocks where more exponentials would be held than the float32 gradient takes.
    sizes = [cross_entropy.choose_block_size(n, 256_000, 2.0625, 4 * 2304) for n in (8192, 32_768)]
    assert sizes == [8192, 4096]


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
