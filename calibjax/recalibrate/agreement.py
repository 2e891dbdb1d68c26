"""Consistency as confidence: how many of the answers sampled for one question agree."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sample_agreement(
    answers: Int[Array, "N S"], where: Bool[Array, "N S"] | None = None
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """The answer that most samples gave, and the fraction of samples that gave it (Wang et al. 2023; Lyu et al. 2025).

    The fraction is a confidence like any other: recalibrate it with the methods that read `Predictions.confidence`.

    Args:
        answers: of each of N questions, S sampled answers as integers: equal answers, equal numbers.
        where: bool `[N, S]`, False for samples that do not count.

    Returns:
        (answer int32 `[N]`, the one whose first sample comes first where several are as frequent; confidence float32
        `[N]`, 0 where no sample counts).

    Example:
        >>> import jax.numpy as jnp
        >>> answer, confidence = sample_agreement(jnp.array([[7, 3, 3, 3], [1, 2, 2, 1]]))
        >>> answer.tolist(), confidence.tolist()
        ([3, 1], [0.75, 0.5])
    """
    counts = jnp.ones(answers.shape, bool) if where is None else where

    def one(row: tuple[Array, Array]) -> tuple[Array, Array]:
        own, mask = row
        votes = jnp.where(mask, jnp.sum((own[:, None] == own[None, :]) & mask[None, :], axis=1), 0)
        best = jnp.argmax(votes)
        return own[best], votes[best] / jnp.maximum(jnp.sum(mask), 1)

    answer, fraction = jax.lax.map(one, (answers, counts))
    return answer.astype(jnp.int32), fraction.astype(jnp.float32)
