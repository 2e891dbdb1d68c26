"""Rewards for reinforcement learning with answers that state their confidence."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.runtime.arrays import AnyArray


def calibrated_reward(correct: Float[AnyArray, "*B"], confidence: Float[AnyArray, "*B"]) -> Float[Array, "*B"]:
    """Correctness minus the Brier score of the stated confidence, correct − (confidence − correct)².

    RLCR (Damani et al. 2025, arXiv 2507.16806, section 3). Of an answer that is right with probability p, a policy that
    states q expects p − p(1 − q)² − (1 − p) q² = p² − (q − p)²: most at q = p, because the Brier score is proper, and
    then p², which rises with p, so that a better answer is never worth giving up for an easier confidence.

    Args:
        correct: 1 for right, 0 for wrong, or a fraction, any shape.
        confidence: stated, in [0, 1], same shape; 1 for an answer that states none, so that leaving it out never pays.

    Example:
        >>> calibrated_reward(jnp.array([1.0, 1.0, 0.0]), jnp.array([1.0, 0.5, 1.0])).tolist()
        [1.0, 0.75, -1.0]
    """
    correct, confidence = jnp.asarray(correct, jnp.float32), jnp.asarray(confidence, jnp.float32)
    return correct - jnp.square(confidence - correct)
