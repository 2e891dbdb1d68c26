"""Mixtures of experts: routing and products against float64 formulas, in every form, on one device and on a mesh."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import make_lm

from calibjax import models
from calibjax.nn.experts import Mixture, mix, route, use_ragged_dot
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import make_mesh, param_shardings

N, D, F, E = 40, 6, 5, 7


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_by_one(hidden, weights, chosen, params):
    """Token by token and expert by expert, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    out = np.zeros(hidden.shape)
    for token, copy in zip(*np.nonzero((chosen >= 0) & (chosen < E)), strict=True):
        expert = chosen[token, copy]
        gate, up = (hidden[token] @ params[p]["kernel"][expert] + params[p]["bias"][expert] for p in ("gate", "up"))
        down = (gate / (1 + np.exp(-gate)) * up) @ params["down"]["kernel"][expert] + params["down"]["bias"][expert]
        out[token] += weights[token, copy] * down
    return out


def test_products_equal_the_formula():
    """All forms, for tokens on all experts, on few, on one, and on experts of other devices; and their gradients."""
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    params = {k: {"kernel": draw(E, *shape, seed=1), "bias": draw(E, shape[1], seed=2)} for k, shape in shapes.items()}
    params = jax.tree.map(jnp.asarray, params)
    hidden, weights, cotangent = draw(N, D), draw(N, 2, seed=3), draw(N, D, seed=4)
    spread = np.argsort(draw(N, E, seed=5), axis=-1)[:, :2].astype(np.int32)
    routings = {
        "spread": spread,
        "two of seven": np.tile([[5, 2]], (N, 1)).astype(np.int32),
        "one, and others' experts": np.stack([np.full(N, 3), np.where(np.arange(N) % 2, -1, E)], -1).astype(np.int32),
    }

    def loss(hidden, weights, chosen):
        out = mix(hidden, weights, chosen, params, lambda gate, up: jax.nn.silu(gate) * up)
        return jnp.sum(out * cotangent), out

    gradients = {}
    for ragged in (False, True):
        run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
        for name, chosen in routings.items():
            with use_ragged_dot(ragged):
                gradients[ragged, name], out = run(hidden, weights, chosen)
            expected = one_by_one(hidden, weights, chosen, params)
            assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max(), (ragged, name)
    shift = 1e-4 * draw(N, D, seed=6).astype(np.float64)
    ends = [one_by_one(hidden + sign * shift, weights, spread, params) for sign in (1, -1)]
    slope = np.sum((ends[0] - ends[1]) / 2 * cotangent)
    for name in routings:
        chex.assert_trees_all_close(gradients[False, name], gradients[True, name], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.sum(gradients[False, "spread"][0] * shift), slope, rtol=1e-4)


@pytest.mark.parametrize("normalized", [True, False])
def test_routing(normalized):
    """The largest logits, of equal ones those with the smaller index; weights by a softmax over the chosen or all."""
    logits = np.round(draw(50, 9, seed=7) * 2) / 2  # many are equal
    logits[0] = 0.0
    mixture = Mixture(experts=9, per_token=3, normalized=normalized)
    weights, chosen = jax.jit(functools.partial(route, mixture=mixture))(logits)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :3]
    np.testing.assert_array_equal(chosen, expected)
    odds = np.exp(logits.astype(np.float64))
    taken = np.take_along_axis(odds, expected, -1)
    whole = (taken if normalized else odds).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, taken / whole, rtol=1e-6)


@pytest.mark.parametrize("rows", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_experts_are_divided_over_a_mesh(rows):
    """The same hidden states as on one device, with experts on the tensor axis; also where rows do not divide."""
    mixture = Mixture(experts=4, per_token=2, router_bias=True, clamp=1.5)
    lm = make_lm(family="gpt_oss", mixture=mixture, mlp_bias=True, attention_sinks=True, num_heads=2, num_kv_heads=2)
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (rows, 6))
    run = jax.jit(models.hidden_states, static_argnums=0)
    expected = run(lm.config, lm.params, tokens)
    mesh = make_mesh((2, 2, 2))
    params = jax.device_put(lm.params, param_shardings(mesh, lm.params))
    assert params["layers"]["mlp"]["up"]["kernel"].sharding.spec == P(None, "tensor", "fsdp", None)
    with jax.set_mesh(mesh):
        got = run(lm.config, params, tokens)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.slow
def test_a_token_that_is_not_finite_stays_alone():
    lm = make_lm(family="mixtral", mixture=Mixture(experts=4, per_token=2))
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (3, 6))
    clean = np.asarray(lm.hidden_states(tokens))
    tokens[1, 0] = lm.config.vocab_size  # NaN
    got = np.asarray(lm.hidden_states(tokens))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


def test_invalid_mixtures():
    lm = make_lm()
    for changes, message in (({"clamp": -1.0}, "clamp: expected above 0"), ({"per_token": 0}, "per_token")):
        with pytest.raises(UserError, match=message):
            Mixture(**{"experts": 4, "per_token": 2} | changes)
    with pytest.raises(UserError, match="experts are gated"):
        dataclasses.replace(lm.config, mixture=Mixture(experts=4, per_token=2), gated_mlp=False)
