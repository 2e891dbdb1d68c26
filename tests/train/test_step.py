"""One step: its gradient, and what it is allowed to do to memory and to the compiler."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_lm, make_sequences, ragged

from calibjax import losses
from calibjax.heads import HeadConfig
from calibjax.kernels import SCALES, vocab_curves
from calibjax.train import AtsObjective, OptimizerConfig, create_state, make_train_step

HYPER = {"alpha": 0.3}


def hyper(**changes):
    return {name: jnp.float32(value) for name, value in {**HYPER, **changes}.items()}


@functools.cache
def setting():
    """A model with its batch, whose masks differ from row to row."""
    lm = make_lm()
    return lm, batch_of(lm, ragged(make_sequences(8)), top_k=5)


def batch_of(lm, sequences, top_k=0):
    batch = {name: jnp.asarray(value) for name, value in sequences._asdict().items() if name != "source"}
    hidden = lm.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    run = jax.jit(vocab_curves, static_argnames="top_k")
    curves = run(hidden, lm.unembedding, batch["targets"], where=batch["where"], top_k=top_k)
    fields = {name: x for name, x in vars(curves).items() if name != "scales" and x is not None}
    return {**batch, "hidden_states": hidden, **fields}


def random_head(kind, lm):
    head = HeadConfig(kind=kind, hidden_size=lm.config.hidden_size, identity_start=False)
    return head, jax.jit(head.init)(jax.random.key(5))


@functools.partial(jax.jit, static_argnums=(1, 2))
def dense_loss(params, head, loss, unembedding, batch):
    """The mean loss over the vocabulary itself, by formulas that `losses/test_per_token.py` holds against float64."""
    hidden, real = batch["hidden_states"], batch["segment_ids"] > 0
    values, counts = losses.linear_loss(
        *(losses.LOSSES[loss], hidden, unembedding, batch["targets"]),
        hyper=HYPER,
        where=batch["where"],
        real=real,
        scale=jnp.exp(head.build().apply({"params": params}, hidden)),
    )
    return jnp.sum(values) / jnp.sum(counts)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("mlp", "joint"), ("mlp", "selective-balanced"), ("linear", "brier"), ("linear", "top-k-smoothing")],
)
def test_gradient_equals_the_dense_formula(kind, loss):
    lm, batch = setting()
    head, params = random_head(kind, lm)
    objective = AtsObjective(head, loss, SCALES)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean(params):
        total, tokens = objective(params, (), batch, hyper())
        return total / tokens, tokens

    (got, tokens), got_grads = mean(params)
    expected, grads = jax.value_and_grad(dense_loss)(params, head, loss, lm.unembedding, batch)
    assert int(tokens) == int(batch["where"].sum())
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    assert largest > 1e-3
    for got_leaf, leaf in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        error = float(jnp.abs(got_leaf - leaf).max() / largest)
        print(f"{kind} {loss}: gradient off by {error:.1e} of the largest")
        assert error < 2e-5


def test_accumulation_is_the_mean_over_all_tokens():
    lm, batch = setting()
    per_part = np.asarray(batch["where"]).reshape(4, -1).sum(axis=1)
    assert len(set(per_part)) > 1, "the micro-batches must differ in their number of tokens"
    head, params = random_head("linear", lm)
    optimizer = optax.sgd(0.1)  # moves by the gradient itself; Adam would hide its size
    results = {}
    for accumulate in (1, 4):
        step = make_train_step(AtsObjective(head, "joint", SCALES), optimizer, accumulate=accumulate)
        state = create_state(jax.tree.map(jnp.copy, params), optimizer)
        for _ in range(3):
            state, metrics = step(state, (), batch, hyper())
        results[accumulate] = (state.params, metrics)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, results[1][0])
    assert min(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *results.values())


def test_the_authors_micro_batches_weigh_alike():
    """Each is balanced by itself, ignored tokens among the wrong ones, padding among neither; then all are averaged."""
    lm, batch = setting()
    head, params = random_head("linear", lm)
    loss = "selective-authors"
    assert ((batch["segment_ids"] > 0) & ~batch["where"]).any(), "nothing is ignored: the two forms agree"
    rows = [jax.tree.map(lambda x, row=row: x[row : row + 1], batch) for row in range(8)]
    each = [float(dense_loss(params, head, loss, lm.unembedding, row)) for row in rows]
    assert np.ptp(each) > 0.1
    optimizer = optax.sgd(0.1)
    step = make_train_step(AtsObjective(head, loss, SCALES), optimizer, accumulate=len(rows))
    _, metrics = step(create_state(params, optimizer), (), batch, hyper())
    np.testing.assert_allclose(metrics.loss, np.mean(each), rtol=1e-5)
    assert int(metrics.tokens) == batch["where"].sum()


def test_one_program_for_all_steps_donates_the_state_alone():
    lm, batch = setting()
    head, params = random_head("linear", lm)
    objective = AtsObjective(head, "selective", SCALES)
    optimizer = OptimizerConfig(warmup_fraction=0.0).build(10)
    step = make_train_step(chex.assert_max_traces(objective.__call__, n=1), optimizer)
    state, frozen = create_state(params, optimizer), ()
    values = []
    for alpha in (0.1, 0.1, 0.5, 0.9):
        old = state
        state, metrics = step(old, frozen, batch, hyper(alpha=alpha))
        values.append(float(metrics.loss))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, frozen, batch)))
    assert int(state.step) == 4
    state, metrics = step(state, frozen, {**batch, "where": jnp.zeros_like(batch["where"])}, hyper())
    assert (float(metrics.loss), float(metrics.tokens)) == (0, 0)
    chex.assert_tree_all_finite(state.params)
    assert (step._cache_size(), len(set(values))) == (1, 4)


def test_a_step_does_not_touch_the_vocabulary():
    """No array of the compiled step has an axis as long as the vocabulary."""
    head = HeadConfig(kind="mlp", hidden_size=24)
    lm = make_lm(hidden_size=24, vocab_size=4072, num_heads=3, num_kv_heads=3, num_layers=1)
    batch = batch_of(lm, make_sequences(8, length=30))
    optimizer = OptimizerConfig().build(100)
    state = create_state(jax.jit(head.init)(jax.random.key(3)), optimizer)
    step = make_train_step(AtsObjective(head, "joint", SCALES), optimizer)
    text = step.lower(state, (), batch, hyper()).compile().as_text()
    sizes = {int(n) for dims in re.findall(r"\w+\[([\d,]+)\]", text) for n in dims.split(",")}
    assert len(SCALES) in sizes, "the curves are there"
    assert 4072 not in sizes
