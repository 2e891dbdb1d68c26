"""`kernels/cross_entropy.py`, the idea in one file, computes what `calibjax.kernels` computes."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.kernels import linear_cross_entropy


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "kernels")
    module = importlib.import_module("cross_entropy")
    monkeypatch.setattr(module, "BLOCK_N", 128)
    monkeypatch.setattr(module, "BLOCK_V", 128)
    return module


@pytest.mark.parametrize(("tokens", "label_smoothing"), [(200, 0.0), (200, 0.1), (300, 0.1)])
def test_loss_and_gradients_are_the_librarys(example, monkeypatch, tokens, label_smoothing):
    """Ragged blocks of tokens and vocabulary, also as many tokens as words; ignored targets, cotangents per token."""
    monkeypatch.setattr(example, "BLOCK_V", 256)
    rng = np.random.default_rng(0)
    hidden, unembedding = (jnp.asarray(rng.normal(size=(n, 16)), jnp.float32) for n in (tokens, 300))
    targets = jnp.asarray(np.where(np.arange(tokens) % 7, rng.integers(0, 300, tokens), -100), jnp.int32)
    g = jnp.asarray(rng.normal(size=tokens), jnp.float32)

    def ours(hidden, unembedding):
        return example.cross_entropy(hidden, unembedding, targets, label_smoothing, True)

    def library(hidden, unembedding):
        options = {"label_smoothing": label_smoothing, "implementation": "chunked"}
        return linear_cross_entropy(hidden, unembedding, targets, **options)

    def loss_and_gradients(loss, hidden, unembedding):
        values, pull = jax.vjp(loss, hidden, unembedding)
        return values, pull(g)

    run = jax.jit(loss_and_gradients, static_argnums=0)
    (got, grads), (want, want_grads) = (run(loss, hidden, unembedding) for loss in (ours, library))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for x, y in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_the_script_runs(example, capsys):
    example.main(tokens=130, width=16, vocab_size=140)
    loss, *gradients = capsys.readouterr().out.splitlines()
    ours, dense = (float(part.split()[-1]) for part in loss.split(", dense "))
    assert ours == pytest.approx(dense, rel=1e-5)
    assert len(gradients) == 2
