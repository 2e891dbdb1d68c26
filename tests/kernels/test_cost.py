"""What the operator costs, read off the compiled programs: products with the unembedding, memory, compilations."""

import math
import re

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from calibjax.kernels import cross_entropy, linear_cross_entropy, vocab_stats
from calibjax.runtime.hlo import executions

N, D, V, CHUNK, BLOCK = 96, 16, 1500, 256, 40  # a ragged chunk of 220 columns, a ragged block of 16 tokens
tpu = interpreted.tpu

WHOLE = ("log_normalizer", "target_logit", "mean_logit", "max_logit", "argmax", "expected_logit")
SMOOTHING = ("log_normalizer", "target_logit", "mean_logit")


def arrays(tokens=N, width=D, vocab=V):
    """hidden, unembedding, bias, scale; targets."""
    rng = np.random.default_rng(0)
    shapes = ((tokens, width), (vocab, width), (vocab,))
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return (*inputs, jnp.linspace(0.5, 2, tokens)), jnp.asarray(rng.integers(0, vocab, tokens), jnp.int32)


def statistics_loss(targets, wanted=SMOOTHING, **options):
    """A scalar of every wanted statistic, whose cotangents differ from token to token."""

    def loss(h, w, b, s):
        got = vocab_stats(h, w, targets, bias=b, scale=s, statistics=wanted, **options)
        values = [getattr(got, name) for name in wanted if name != "argmax"]
        return sum(jnp.sum(jnp.sin((i + 1) * x)) for i, x in enumerate(values))

    return loss


def scalar_loss(targets, **options):
    def loss(h, w, b, s):
        given = {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-3, **options}
        return linear_cross_entropy(h, w, targets, bias=b, scale=s, **given)

    return loss


def multiply_adds(program) -> int:
    """Multiply-adds of all matrix products of two matrices that a compiled program executes, loops counted in full."""
    text = program.as_text()
    assert "custom-call" not in text, "a product could hide in a library call"
    times, total = executions(text), 0
    matches = re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", text)
    shapes = {name: [int(n) for n in dims.split(",") if n] for name, dims in matches}
    products = r"%([\w.-]+) = \S+ dot\(%([\w.-]+),.*lhs_contracting_dims=\{([\d,]+)\}"
    for name, left, contracted in re.findall(products, text):
        inner = math.prod(shapes[left][int(i)] for i in contracted.split(","))
        total += times[name] * math.prod(shapes[name]) * inner
    return total


def products(function, argnums, inputs) -> float:
    """Products of N·D·V multiply-adds in value and gradient, when compiled."""
    program = jax.jit(jax.value_and_grad(function, argnums)).lower(*inputs).compile()
    (tokens, width), vocab = inputs[0].shape, inputs[1].shape[0]
    return multiply_adds(program) / (tokens * width * vocab)


# XLA shares the logits of the one ragged chunk, or of the first, between forward and backward pass where it can, and
# the mean of the logits is a product with one row: neither makes up half a product here.
def assert_products(function, argnums, count):
    inputs, _ = arrays()
    got = products(function, argnums, inputs)
    assert count - 0.4 < got < count + 0.1


@pytest.mark.parametrize(
    ("argnums", "wanted", "softcap", "save", "count"),
    [
        ((3,), WHOLE, None, False, 1),
        ((0, 3), SMOOTHING, None, False, 2),
        ((0,), ("log_normalizer", "target_logit"), 5.0, False, 2),
        ((0,), SMOOTHING, 5.0, False, 3),
        ((0,), SMOOTHING, 5.0, True, 2),
        ((0, 3), WHOLE, None, False, 3),
        ((1,), SMOOTHING, None, False, 3),
        ((2,), SMOOTHING, None, False, 2),
        ((0, 1), SMOOTHING, None, False, 4),
        ((0, 1, 2, 3), WHOLE, 5.0, False, 4),
        ((0, 1, 2, 3), WHOLE, 5.0, True, 3),
    ],
    ids=str,
)
def test_products_of_the_statistics(argnums, wanted, softcap, save, count):
    _, targets = arrays()
    options = {"chunk_size": CHUNK, "softcap": softcap, "save_logits": save}
    assert_products(statistics_loss(targets, wanted, **options), argnums, count)


@pytest.mark.parametrize(
    ("argnums", "softcap", "count"),
    [
        ((3,), None, 1),
        ((0, 3), None, 2),
        ((1,), None, 2),
        ((2,), None, 1),
        ((0, 1), None, 3),
        ((0, 1, 2, 3), 5.0, 3),
        ((0,), 5.0, 2),
    ],
    ids=str,
)
def test_products_of_a_scalar_loss(argnums, softcap, count, monkeypatch):
    monkeypatch.setattr(cross_entropy, "choose_block_size", lambda *_: BLOCK)
    _, targets = arrays()
    assert_products(scalar_loss(targets, chunk_size=CHUNK, softcap=softcap), argnums, count)


WIDTH = 128


def products_of_a_block(jaxpr, block):
    """Products of tokens x D x columns in a kernel's program for one block of its grid, or of the loop in it."""

    def multiply_adds(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                contracted = eqn.params["dimension_numbers"][0][0]
                total += eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            elif eqn.primitive.name == "cond":
                total += max(multiply_adds(branch.jaxpr) for branch in eqn.params["branches"])
            else:
                inner = sum(multiply_adds(inner) for inner in jaxprs_in_params(eqn.params))
                assert eqn.primitive.name != "scan" or not inner
                total += inner
        return total

    return multiply_adds(jaxpr) / (block.tokens * WIDTH * block.columns)


@pytest.mark.parametrize(
    ("argnums", "names", "softcap", "expected"),
    [
        ((3,), SMOOTHING, None, {"statistics": 1}),
        ((0,), SMOOTHING, None, {"expected_row": 2}),
        ((0,), SMOOTHING, 5.0, {"statistics": 1, "d_hidden": 2}),
        ((1,), SMOOTHING, None, {"statistics": 1, "d_unembedding": 2}),
        ((0, 1), SMOOTHING, None, {"expected_row": 2, "d_unembedding": 2}),
        ((0, 1), SMOOTHING, 5.0, {"statistics": 1, "d_hidden": 2, "d_unembedding": 2}),
    ],
    ids=str,
)
def test_products_of_the_tpu_kernels(argnums, names, softcap, expected, tpu):
    rng = np.random.default_rng(0)
    hidden, unembedding = (rng.normal(size=(n, WIDTH)).astype(np.float32) for n in (256, 1024))
    inputs = hidden, unembedding, np.zeros(1024, np.float32), np.ones(256, np.float32)
    loss = statistics_loss(np.zeros(256, np.int32), names, softcap=softcap, implementation=tpu)
    counted = {}

    def collect(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                name = eqn.params["name"].removeprefix("calibjax_")
                counted[name] = products_of_a_block(eqn.params["jaxpr"], interpreted.SMALL[name][0])
            else:
                for inner in jaxprs_in_params(eqn.params):
                    collect(inner)

    collect(jax.make_jaxpr(jax.value_and_grad(loss, argnums))(*inputs).jaxpr)
    assert counted == expected


def test_the_count_sees_the_products_of_a_dense_program():
    """What is counted must be found where it is: forward, dh and dW of the dense formula."""
    _, targets = arrays()
    assert_products(scalar_loss(targets, implementation="reference"), (0, 1), 3)


@pytest.mark.parametrize(
    ("loss", "argnums", "options"),
    [
        (statistics_loss, (3,), {}),
        (statistics_loss, (0,), {}),
        (scalar_loss, (0, 1, 2, 3), {"softcap": 5.0}),
        pytest.param(statistics_loss, (0, 1), {}, marks=pytest.mark.slow),
    ],
)
def test_no_array_of_all_logits(loss, argnums, options):
    """Compiled, not run: one block of 24 MiB, or two of [N, 1024], and slices of [1024, D]."""
    inputs, targets = arrays(tokens=2048, width=128, vocab=16384)
    program = jax.jit(jax.value_and_grad(loss(targets, **options), argnums)).lower(*inputs).compile()
    logits = 2048 * 16384
    assert program.memory_analysis().temp_size_in_bytes < 4 * logits / 3.5
    everything = re.findall(r"\w+\[([\d,]+)\]", program.as_text())
    assert max(math.prod(int(n) for n in dims.split(",")) for dims in everything) < logits / 3.5
