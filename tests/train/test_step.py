"""One step: its gradient, and what it is allowed to do to memory and to the compiler."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_lm, make_sequences, ragged

from calibjax.heads import MAX_SCALE, MIN_SCALE, HeadConfig
from calibjax.kernels import SCALES, vocab_curves
from calibjax.train import AtsObjective, OptimizerConfig, create_state, make_train_step

HYPER = {"alpha": 0.3}


def hyper(**changes):
    return {name: jnp.float32(value) for name, value in {**HYPER, **changes}.items()}


@functools.cache
def setting(count=8):
    """A model with its batch, whose masks differ from row to row, and a head that is not the identity."""
    lm = make_lm()
    sequences = ragged(make_sequences(count))
    batch = {name: jnp.asarray(value) for name, value in sequences._asdict().items() if name != "source"}
    hidden = lm.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    curves = vocab_curves(hidden, lm.unembedding, batch["targets"], where=batch["where"], top_k=5)
    fields = {name: x for name, x in vars(curves).items() if name != "scales"}
    return lm, {**batch, "hidden_states": hidden, **fields}


def random_head(kind, lm):
    head = HeadConfig(kind=kind, hidden_size=lm.config.hidden_size, identity_start=False)
    return head, jax.jit(head.init)(jax.random.key(5))


# --- the gradient ---


def dense_loss(params, kind, loss, hidden, unembedding, batch):
    """The mean loss, written out over the whole `[N, V]`; in float64 under `jax.enable_x64`."""
    counts = batch["where"]
    if kind == "mlp":
        normed = hidden / jnp.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        gate, up = jnp.split(normed @ params["gate_up"]["kernel"], 2, axis=-1)
        features = gate / (1 + jnp.exp(-gate)) * up
    else:
        features = hidden
    u = (features @ params["output"]["kernel"])[..., 0] + params["output"]["bias"][0]
    s = jnp.exp(jnp.clip(u, math.log(MIN_SCALE), math.log(MAX_SCALE)))
    z = hidden @ unembedding.T
    log_q = jax.nn.log_softmax(s[..., None] * z, axis=-1)
    of_target = jnp.take_along_axis(log_q, batch["targets"][..., None], axis=-1)[..., 0]
    best = z.argmax(-1)
    right = best == batch["targets"]
    top = jnp.take_along_axis(log_q, best[..., None], axis=-1)[..., 0]
    nll, uniform = -of_target, -log_q.mean(-1)
    a = w = HYPER["alpha"]

    def mean(values, group):
        return jnp.where(group, values, 0.0).sum() / group.sum()

    if loss == "joint":
        return mean(nll - w * jnp.where(right, top, jnp.log1p(-jnp.exp(top))), counts)
    if loss == "brier":
        q = jnp.exp(log_q)
        return mean((q**2).sum(-1) - 2 * jnp.exp(of_target) + 1, counts)
    if loss == "top-k-smoothing":
        return mean((1 - a) * nll - a * jnp.sort(log_q, axis=-1)[..., -5:].mean(-1), counts)
    # Each group's own mean, weighted by the other's share: (w_right n_wrong R + w_wrong n_right W) / the weights' sum.
    n_right, n_wrong = (right & counts).sum(), (~right & counts).sum()
    weights = (1 - a) * n_wrong, a * n_right
    return (weights[0] * mean(nll, right & counts) + weights[1] * mean(uniform, ~right & counts)) / sum(weights)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("mlp", "joint"), ("mlp", "selective-balanced"), ("linear", "brier"), ("linear", "top-k-smoothing")],
)
def test_gradient_equals_the_dense_formula(kind, loss):
    lm, batch = setting()
    head, params = random_head(kind, lm)
    objective = AtsObjective(head, loss, SCALES)
    frozen = ()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean(params):
        total, tokens = objective(params, frozen, batch, hyper())
        return total / tokens, tokens

    (got, tokens), got_grads = mean(params)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
        arrays = [jnp.asarray(np.asarray(x), jnp.float64) for x in (batch["hidden_states"], lm.unembedding)]
        marks = {name: jnp.asarray(np.asarray(batch[name])) for name in ("where", "targets")}
        dense = jax.jit(jax.value_and_grad(dense_loss), static_argnums=(1, 2))
        expected, grads = dense(double, kind, loss, *arrays, marks)
    assert int(tokens) == int(batch["where"].sum())
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(grads))
    assert largest > 1e-3
    for got_leaf, leaf in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        error = float(np.abs(np.asarray(got_leaf, np.float64) - np.asarray(leaf)).max() / largest)
        print(f"{kind} {loss}: gradient off by {error:.1e} of the largest")
        assert error < 2e-5


# --- accumulation, donation, compilation, the mesh ---


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
    z = np.asarray(batch["hidden_states"], np.float64) @ np.asarray(lm.unembedding, np.float64).T
    targets, where, real = (np.asarray(x) for x in (batch["targets"], batch["where"], batch["segment_ids"] > 0))
    output = jax.tree.map(lambda x: np.asarray(x, np.float64), params["output"])
    u = (np.asarray(batch["hidden_states"], np.float64) @ output["kernel"])[..., 0] + output["bias"][0]
    s = np.exp(np.clip(u, math.log(MIN_SCALE), math.log(MAX_SCALE)))
    scaled = s[..., None] * z
    log_q = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    right = where & (z.argmax(axis=-1) == targets)
    assert (real & ~where).sum(axis=1).max() > 0, "nothing is ignored: the two forms agree"
    alpha, each = HYPER["alpha"], []
    for row in range(len(z)):
        wrong = real[row] & ~right[row]
        if not right[row].any():
            each.append(0.0)
            continue
        hard = -log_q[row, right[row], targets[row, right[row]]].mean()
        smooth = np.where(where[row], -log_q[row].mean(axis=-1), 0.0)[wrong].mean()
        weights = np.array([(1 - alpha) * wrong.sum(), alpha * right[row].sum()])
        each.append(weights @ [hard, smooth] / weights.sum())
    assert np.ptp(each) > 0.1
    optimizer = optax.sgd(0.1)
    step = make_train_step(AtsObjective(head, "selective-authors", SCALES), optimizer, accumulate=len(z))
    _, metrics = step(create_state(params, optimizer), (), batch, hyper())
    np.testing.assert_allclose(metrics.loss, np.mean(each), rtol=1e-5)
    assert int(metrics.tokens) == where.sum()


def test_state_is_donated_and_nothing_else():
    lm, batch = setting()
    head, params = random_head("linear", lm)
    optimizer = OptimizerConfig().build(10)
    step = make_train_step(AtsObjective(head, "cross-entropy", SCALES), optimizer)
    state, frozen = create_state(params, optimizer), ()
    new, _ = step(state, frozen, batch, hyper())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, frozen, batch)))
    assert int(new.step) == 1


def test_one_program_for_all_steps_and_hyper_parameters():
    lm, batch = setting()
    head, params = random_head("linear", lm)
    objective = AtsObjective(head, "selective", SCALES)
    optimizer = OptimizerConfig(warmup_fraction=0.0).build(10)
    step = make_train_step(chex.assert_max_traces(objective.__call__, n=1), optimizer)
    state, frozen = create_state(params, optimizer), ()
    values = []
    for alpha in (0.1, 0.1, 0.5, 0.9):
        state, metrics = step(state, frozen, batch, hyper(alpha=alpha))
        values.append(float(metrics.loss))
    state, metrics = step(state, frozen, {**batch, "where": jnp.zeros_like(batch["where"])}, hyper())
    assert (float(metrics.loss), float(metrics.tokens)) == (0, 0)
    chex.assert_tree_all_finite(state.params)
    assert step._cache_size() == 1
    assert len(set(values)) == 4


def test_a_step_does_not_touch_the_vocabulary():
    """No array of the compiled step has an axis as long as the vocabulary."""
    head = HeadConfig(kind="mlp", hidden_size=24)
    lm = make_lm(hidden_size=24, vocab_size=4072, num_heads=3, num_kv_heads=3, num_layers=1)
    sequences = make_sequences(8, length=30)
    batch = {name: jnp.asarray(value) for name, value in sequences._asdict().items() if name != "source"}
    hidden = lm.hidden_states(batch["tokens"])
    curves = vocab_curves(hidden, lm.unembedding, batch["targets"], where=batch["where"])
    fields = {name: x for name, x in vars(curves).items() if name != "scales" and x is not None}
    batch |= {"hidden_states": hidden, **fields}
    optimizer = OptimizerConfig().build(100)
    state = create_state(jax.jit(head.init)(jax.random.key(3)), optimizer)
    step = make_train_step(AtsObjective(head, "joint", SCALES), optimizer)
    text = step.lower(state, (), batch, hyper()).compile().as_text()
    sizes = {int(n) for dims in re.findall(r"\w+\[([\d,]+)\]", text) for n in dims.split(",")}
    assert len(SCALES) in sizes, "the curves are there"
    assert 4072 not in sizes
