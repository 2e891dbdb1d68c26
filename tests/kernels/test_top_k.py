"""top_logits against a dense sort in float64: chunks, ties, soft-cap, bias, masks, gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import EPS, assert_within

from calibjax.kernels import VocabSharding, chunked, top_k, top_logits
from calibjax.runtime.sharding import make_mesh


def problem(n=9, d=6, v=37, seed=0):
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(n, d)), rng.normal(size=(v, d)), rng.normal(size=v)
    return tuple(array.astype(np.float32) for array in arrays)


@pytest.mark.parametrize(("width", "k"), [(37, 5), (10, 5), (4, 5), (8, 37)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_places_and_gradients(monkeypatch, width, k, softcap):
    """Whole, in ragged chunks, in chunks narrower than k, and all of the vocabulary."""
    monkeypatch.setattr(top_k, "choose_chunk_size", lambda tokens, vocab_size: min(width, vocab_size))
    hidden, unembedding, bias = problem()
    where = np.arange(9) != 4
    hidden[4] = np.nan
    weights = np.random.default_rng(1).normal(size=(9, k)).astype(np.float32)

    @functools.partial(jax.jit)
    def run(*arrays):
        def total(hidden, unembedding, bias):
            top = top_logits(hidden, unembedding, k, bias=bias, softcap=softcap, where=jnp.asarray(where))
            return jnp.sum(top.logits * weights), top

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)

    grads, top = run(hidden, unembedding, bias)
    z = oracle.logits(np.where(where[:, None], hidden, 0.0), unembedding, bias, softcap)
    order = np.argsort(-z, axis=1, kind="stable")[:, :k]
    want = np.where(where[:, None], np.take_along_axis(z, order, axis=1), 0.0)
    assert_within(top.logits, want, 30 * EPS * np.abs(z).max(), "logits")
    np.testing.assert_array_equal(top.ids, np.where(where[:, None], order, -1))

    dz = np.zeros_like(z)
    np.put_along_axis(dz, order, weights * where[:, None], axis=1)
    dz *= 1.0 if softcap is None else 1 - (z / softcap) ** 2
    clean = np.where(where[:, None], hidden, 0.0).astype(np.float64)
    for name, got, expected in zip(
        ("hidden", "unembedding", "bias"), grads, (dz @ unembedding, dz.T @ clean, dz.sum(axis=0)), strict=True
    ):
        assert_within(got, expected, 100 * EPS * np.abs(expected).max(), f"gradient in {name}")


def test_of_equal_logits_the_lowest_place_comes_first(monkeypatch):
    monkeypatch.setattr(top_k, "choose_chunk_size", lambda tokens, vocab_size: 3)
    z = np.array([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0, 1.0]], np.float32)
    bias = np.array([-np.inf, 0, 0, -np.inf, 0, 0, 0, 0], np.float32)  # which removes entries: they are the last
    assert jax.jit(lambda z: top_logits(z, jnp.eye(8), 8, bias=bias))(z).ids.tolist() == [[1, 2, 4, 6, 5, 7, 0, 3]]
    assert top_logits(np.float32([[-1]]), np.float32([[0], [-0.0], [1], [-0.0]]), 4).ids.tolist() == [[0, 1, 3, 2]]
    capped = top_logits(np.float32([[100, 300, 4, 200]]), jnp.eye(4), 4, softcap=1.0)  # tanh(100) is 1 in float32
    assert capped.ids.tolist() == [[0, 1, 3, 2]]


def test_no_block_is_as_wide_as_the_vocabulary():
    """Of the compiled program: nothing holds N times V numbers."""
    n, d, v = 256, 8, 50_000
    shapes = jax.ShapeDtypeStruct((n, d), jnp.float32), jax.ShapeDtypeStruct((v, d), jnp.float32)
    chunk = chunked.choose_chunk_size(n, v)
    memory = jax.jit(lambda h, w: top_logits(h, w, 5)).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 4 * n * chunk < 4 * n * v


def test_mistakes_are_named():
    hidden, unembedding, _ = problem()
    for k in (0, 38):
        with pytest.raises(ValueError, match="k: expected 1 to the vocabulary size 37"):
            top_logits(hidden, unembedding, k)
    with pytest.raises(ValueError, match="expected hidden"):
        top_logits(hidden[:, :3], unembedding, 2)


@pytest.mark.parametrize(
    ("shape", "stored"), [((1, 1, 8), ()), ((1, 2, 4), ("fsdp",)), ((2, 2, 2), ("fsdp",)), ((8, 1, 1), ())]
)
def test_over_a_mesh(shape, stored):
    """The places, values and gradients of one device, ties included, and no device ever holds all of W."""
    sharding = VocabSharding(make_mesh(shape), width=stored)
    hidden, unembedding, bias = problem(n=16, d=32, v=64)
    unembedding[33], bias[33] = unembedding[7], bias[7]  # a tie between two parts
    weights = np.random.default_rng(1).normal(size=(16, 20)).astype(np.float32)

    def run(sharding, *arrays):
        def total(*arrays):
            top = top_logits(*arrays[:2], 20, bias=arrays[2], sharding=sharding)
            return jnp.sum(top.logits * weights), top

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)

    places = [NamedSharding(sharding.mesh, P(*of)) for of in ((("data", "fsdp"),), ("tensor", stored), ("tensor",))]
    placed = jax.device_put([hidden, unembedding, bias], places)
    grads, top = jax.jit(functools.partial(run, sharding))(*placed)
    want_grads, want = jax.jit(functools.partial(run, None))(hidden, unembedding, bias)
    np.testing.assert_array_equal(top.ids, want.ids)
    assert_within(top.logits, np.asarray(want.logits), 30 * EPS * np.abs(want.logits).max(), "logits")
    for got, expected in zip(grads, want_grads, strict=True):
        assert_within(got, np.asarray(expected), 100 * EPS * np.abs(expected).max(), "gradient")
    program = jax.jit(lambda *x: top_logits(*x[:2], 5, bias=x[2], sharding=sharding)).lower(*placed).compile()
    if shape[2] > 1:
        assert not re.search(r"= \S*\[64,32\]", program.as_text())
