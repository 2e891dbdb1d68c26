"""`filter_threshold` in the TPU and GPU kernels: what is left out, block by block, and nothing else."""

import interpreted
import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import EPS, FLOATS, assert_within

from calibjax.kernels import chunked, vocab_stats

tpu, gpu = interpreted.tpu, interpreted_gpu.gpu
pytestmark = pytest.mark.usefixtures("tpu", "gpu", "quick_compile")

BLOCK = 128  # tokens and columns, of dh and dW alike, in `interpreted.SMALL` and `interpreted_gpu.WIDER`
TOKENS, VOCAB, WIDTH = 2 * BLOCK - 6, 3 * BLOCK + 16, 16
THRESHOLD = 1e-2
INPUTS = ("hidden", "unembedding", "bias", "scale")


def problem(dtype=jnp.float32):
    """Two tokens of the vocabulary have nearly all the probability: 140 and 170, or 300 and 390 for the second half."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(TOKENS, WIDTH)) / 8
    unembedding = rng.normal(size=(VOCAB, WIDTH))
    unembedding[:, :2] = 0
    hidden[:BLOCK, :2], hidden[BLOCK:, :2] = (3, 0), (0, 3)
    unembedding[[140, 170], 0] = unembedding[[300, 390], 1] = 3
    targets = np.where(np.arange(TOKENS) < BLOCK, 140, 390)
    targets[5] = 7  # a surprise: its one-hot lies where all p are small
    targets[TOKENS - 1] = -100
    scale, bias = np.linspace(0.9, 1.1, TOKENS), rng.normal(size=VOCAB) / 8
    model = (jnp.asarray(x, dtype) for x in (hidden, unembedding))
    return *model, *(jnp.asarray(x, jnp.float32) for x in (bias, scale)), jnp.asarray(targets)


def gradients(inputs, targets, cotangents, **options):
    @jax.jit
    def run(*inputs):
        def value(h, w, b, s):
            got = vocab_stats(h, w, targets, bias=b, scale=s, statistics=tuple(cotangents), **options)
            return sum(jnp.sum(g * getattr(got, name)) for name, g in cotangents.items())

        return jax.grad(value, (0, 1, 2, 3))(*inputs)

    return run(*inputs)


@pytest.mark.parametrize(
    ("names", "softcap", "save", "implementation"),
    [
        (FLOATS, None, False, interpreted.NAME),
        pytest.param(FLOATS, 30.0, True, interpreted.NAME, marks=pytest.mark.slow),
        pytest.param(
            ("log_normalizer", "target_logit", "mean_logit"), None, False, interpreted.NAME, marks=pytest.mark.slow
        ),
        pytest.param(FLOATS, None, False, interpreted_gpu.WIDER, marks=pytest.mark.slow),
        pytest.param(FLOATS, 30.0, True, interpreted_gpu.WIDER, marks=pytest.mark.slow),
    ],
    ids=["plain", "softcap-saved", "dh-out-of-the-forward-pass", "gpu", "gpu-softcap-saved"],
)
def test_what_is_left_out(names, softcap, save, implementation):
    on_gpu = implementation == interpreted_gpu.WIDER
    *inputs, targets = problem(jnp.bfloat16 if on_gpu else jnp.float32)
    hidden, unembedding, bias, scale = (np.asarray(x, np.float64) for x in inputs)
    rng, valid = np.random.default_rng(1), np.asarray(targets) >= 0
    safe = np.where(valid, targets, 0)
    g = {name: rng.normal(size=TOKENS).astype(np.float32) for name in names}
    options = {"implementation": implementation, "filter_threshold": THRESHOLD, "save_logits": save}
    got = gradients(inputs, targets, g, softcap=softcap, **options)

    p = oracle.probabilities(oracle.logits(hidden, unembedding, bias, softcap), scale) * valid[:, None]
    notable = p >= THRESHOLD
    notable[np.arange(TOKENS), safe] |= valid
    keep = np.zeros_like(notable)
    for i in range(0, TOKENS, BLOCK):
        for j in range(0, VOCAB, BLOCK):
            keep[i : i + BLOCK, j : j + BLOCK] = notable[i : i + BLOCK, j : j + BLOCK].any()
    assert keep[::BLOCK, ::BLOCK].tolist() == [[True, True, False, False], [False, False, True, True]]

    def parts(*chosen):
        counted = {name: g[name] * valid for name in chosen if name in g}
        return oracle.gradients(counted, hidden, unembedding, safe, scale, bias, softcap)

    in_blocks = ("log_normalizer", "expected_logit", *(("mean_logit",) if softcap else ()))
    dz_left, dz_exact = parts(*in_blocks)[1], parts(*(set(FLOATS) - set(in_blocks)))[1]
    (*_, d_bias, d_scale), dz = parts(*FLOATS)
    filtered = keep * dz_left + dz_exact
    first = names == FLOATS or softcap is not None  # else dh comes out of the forward pass, exact
    want = ((filtered if first else dz) @ unembedding, filtered.T @ hidden, d_bias, d_scale)
    size = np.abs(dz_left) + np.abs(dz_exact)
    # Logits of 9 with their error twice, and the sums over V or N; on a GPU dz is rounded to bfloat16, and so is dh.
    rounding = 300 * EPS + (2.0**-8 if on_gpu else 0.0)
    bounds = [rounding * x for x in (size @ np.abs(unembedding), size.T @ np.abs(hidden), size.sum(axis=0))]
    bounds.append(rounding * 10 * sum(np.abs(x) for x in g.values()))
    for name, x, y, bound in zip(INPUTS, got, want, bounds, strict=True):
        of_result = 2.0**-8 * np.abs(y) if on_gpu and name in INPUTS[:2] else 0.0
        print(name, assert_within(x, y, bound + of_result + 1e-30, name))
    left_out = np.max(np.abs((dz - filtered).T @ hidden) / bounds[1], axis=1)
    assert np.mean(left_out > (3 if on_gpu else 10)) > 0.9, "too little to be seen"
    np.testing.assert_array_equal(got[0][-1], 0.0)


@pytest.mark.parametrize("implementation", ["chunked", interpreted.NAME])
def test_nan_is_not_left_out(implementation, monkeypatch):
    """A NaN in a token that counts shows in its gradient, as it does without a filter."""
    monkeypatch.setattr(chunked, "_FILTER_TOKENS", BLOCK)
    hidden, unembedding, bias, scale, targets = problem()
    tokens, columns = slice(BLOCK), slice(2 * BLOCK)
    inputs = (hidden.at[3, 2].set(jnp.nan)[tokens], unembedding[columns], bias[columns], scale[tokens])
    g, targets = dict.fromkeys(("log_normalizer", "expected_logit"), np.ones(BLOCK, np.float32)), targets[tokens]
    d_hidden, d_unembedding, *_ = gradients(inputs, targets, g, filter_threshold=2.0, implementation=implementation)
    assert np.isnan(d_hidden[3]).all()
    assert np.isnan(d_unembedding).any(axis=1).all()
    assert np.isfinite(np.delete(d_hidden, 3, axis=0)).all()
