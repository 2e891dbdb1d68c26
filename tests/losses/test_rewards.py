"""The reward of RLCR: the expectation over right and wrong, written out, and its optimum."""

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.losses import calibrated_reward


def expected(p, q):
    return p * calibrated_reward(1.0, q) + (1 - p) * calibrated_reward(0.0, q)


def test_the_best_confidence_is_the_probability_of_being_right():
    grid = np.linspace(0, 1, 101, dtype=np.float32)
    rewards = np.asarray(expected(grid[:, None], grid[None, :]))
    assert (rewards.argmax(axis=1) == np.arange(101)).all()
    np.testing.assert_allclose(rewards.max(axis=1), grid**2, atol=1e-6)
    assert (np.diff(rewards.max(axis=1)) > 0).all()  # of two answers the likelier one is worth more
    slope = jax.vmap(jax.grad(expected, argnums=1))(jnp.asarray(grid), jnp.asarray(grid))
    np.testing.assert_allclose(slope, 0, atol=1e-6)
