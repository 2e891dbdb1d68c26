"""Batches: deterministic, resumable, of one shape, and every row once per epoch."""

import json
from itertools import islice

import chex
import jax
import numpy as np
import pytest

from calibjax.data import batches, eval_batches
from calibjax.data.pipeline import even_batch_size
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import batch_sharding, local_rows, make_mesh


def make_arrays(rows=10):
    tokens = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    return {"tokens": tokens, "where": np.ones((rows, 3), bool), "source": np.arange(rows, dtype=np.int32)}


def assert_equal(first, second):
    chex.assert_trees_all_equal(list(first), list(second), strict=True)


def test_every_row_once_per_epoch_in_a_fresh_order():
    given = list(batches(make_arrays(), 4, seed=0, epochs=4))
    for batch in given:
        np.testing.assert_array_equal(batch["tokens"][:, 0], batch["source"] * 3)
        assert (batch["tokens"].dtype, batch["tokens"].shape) == (np.int32, (4, 3))
    order = np.concatenate([batch["source"] for batch in given])
    assert len(order) == 40
    epochs = order.reshape(4, 10)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(10), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again, other = ([b["source"] for b in batches(make_arrays(), 4, seed=s, epochs=4)] for s in (0, 1))
    np.testing.assert_array_equal(np.concatenate(again), order)
    assert not np.array_equal(np.concatenate(other), order)


def test_batch_larger_than_the_data():
    (batch,) = batches(make_arrays(3), 8, seed=0, epochs=2)
    assert batch["tokens"].shape == (8, 3)
    assert sorted(batch["source"][:6].tolist()) == [0, 0, 1, 1, 2, 2]
    assert batch["where"].any(axis=1).tolist() == [True] * 6 + [False] * 2
    assert [len(b["source"]) for b in batches(make_arrays(3), 8, seed=0, steps=5)] == [8] * 5


@pytest.mark.parametrize("done", [0, 1, 3, 6])
def test_resumes_from_json(done):
    def make():
        return batches(make_arrays(), 4, seed=5, epochs=3)

    whole = list(make())
    interrupted = make()
    assert_equal(islice(interrupted, done), whole[:done])
    state = json.dumps(interrupted.get_state())
    resumed = make()
    resumed.set_state(json.loads(state))
    assert_equal(resumed, whole[done:])


def test_parts_make_up_the_batch():
    """Rows that belong to three processes, not side by side, of batches of which the last one is padded."""
    arrays = make_arrays(3)
    whole = list(batches(arrays, 6, seed=1, epochs=1))
    rows = [np.array([0, 4]), np.array([1, 5]), np.array([2, 3])]
    parts = [list(batches(arrays, 6, seed=1, epochs=1, part=part)) for part in rows]
    order = np.argsort(np.concatenate(rows))
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *parts)
    assert_equal(joined, whole)


def test_eval_batches():
    """Batches are laid out on the mesh that is set; a process that has all devices reads all rows."""
    arrays, mesh = make_arrays(10), make_mesh((2, 2, 2))
    host = list(eval_batches(arrays, 4))
    given, real = zip(*host, strict=True)
    assert {batch["tokens"].shape for batch in given} == {(4, 3)}
    tokens = np.concatenate([batch["tokens"][:n] for batch, n in zip(given, real, strict=True)])
    np.testing.assert_array_equal(tokens, arrays["tokens"])
    assert given[-1]["where"].tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
    assert arrays["where"].all()  # the caller's array is left alone
    with jax.set_mesh(mesh):
        placed = list(eval_batches(arrays, 4))
    assert [count for _, count in placed] == [*real] == [4, 4, 2]
    for (one, _), (other, _) in zip(placed, host, strict=True):
        assert one["tokens"].sharding == batch_sharding(mesh)
        chex.assert_trees_all_equal(one, other)
    assert local_rows(mesh, 8).tolist() == list(range(8))


@pytest.mark.parametrize("shards", [1, 4])
def test_even_batches_run_no_more_rows(shards):
    """At most the rows of the given size and a sixteenth of it for each further batch, on every mesh."""
    with jax.set_mesh(make_mesh((1, shards, 1), jax.devices()[:shards])):
        for rows in range(1, 200):
            size = even_batch_size(rows, 16)
            assert size in (8, 12, 16)
            assert size % shards == 0
            number, given = -(-rows // size), -(-rows // 16)
            assert number * size + number <= given * 16 + given
        assert [even_batch_size(rows, 16) for rows in (168, 10_001)] == [12, 16]


def test_errors():
    arrays = make_arrays()
    for given, options, message in (
        (arrays, {}, "either epochs or steps"),
        (arrays, {"epochs": 1, "steps": 1}, "either epochs or steps"),
        (arrays, {"steps": 1, "seed": -1}, "expected an integer >="),
        ({"a": np.zeros(3), "b": np.zeros(4)}, {"epochs": 1}, "same number of rows"),
    ):
        with pytest.raises(UserError, match=message):
            batches(given, 4, **({"seed": 0} | options))
    with pytest.raises(UserError, match="its padding requires an array 'where'"):
        list(eval_batches({"tokens": arrays["tokens"]}, 4))
