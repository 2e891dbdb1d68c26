"""Agreement without labels: of the answers sampled for one question, and of two models on many questions."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.recalibrate.contract import IMPOSSIBLE, Predictions, checked_fields
from calibjax.recalibrate.temperature import TemperatureState, fit_to_target
from calibjax.runtime.arrays import AnyArray, as_array, plain_array
from calibjax.runtime.errors import UserError


def sample_agreement(
    answers: Int[AnyArray, "N S"], *, where: Bool[AnyArray, "N S"] | None = None
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """The answer that most samples gave, and the fraction of samples that gave it (Wang et al. 2023; Lyu et al. 2025).

    Args:
        answers: `[N, S]`, S sampled answers to each of N questions, as integers: equal answers, equal numbers.
        where: bool `[N, S]`, False for samples that do not count.

    Returns:
        The answer, int32 `[N]`, the first of equally frequent ones; its fraction, float32 `[N]`, 0 without samples.
    """
    if not isinstance(answers, jax.Array):  # JAX would keep 32 bits of each: different answers could become equal
        answers = as_array(answers)
        if answers.dtype.kind not in "iu" or (answers != answers.astype(np.int32)).any():
            raise UserError("answers: expected 32-bit integers; np.unique(answers, return_inverse=True) gives them.")
    counts = jnp.ones(answers.shape, bool) if where is None else jnp.asarray(plain_array(where))

    def question(row: tuple[Array, Array]) -> tuple[Array, Array]:
        samples, mask = row
        is_same = samples[:, None] == samples[None, :]
        votes = jnp.where(mask, jnp.sum(is_same & mask[None, :], axis=1), 0)
        best = jnp.argmax(votes)
        return samples[best], votes[best] / jnp.maximum(jnp.sum(mask), 1)

    answer, fraction = jax.lax.map(question, (answers, counts))
    return answer.astype(jnp.int32), fraction.astype(jnp.float32)


def fit_daca(logits: Float[AnyArray, "N K"], base_logits: Float[AnyArray, "N K"]) -> TemperatureState:
    """Temperature of a chat model from its base model, without labels: DACA (arXiv 2505.16690, section 4).

    Post-training makes a model overconfident where its base model was calibrated. The scale s minimises the mean of
    KL(softmax(b) ‖ softmax(s z)) over the questions on which both have the same most likely option. Where they
    disagree, the base model's confidence is in another option and would make the temperature too high.

    `logits` z score K options under the chat model, `base_logits` b the same options under the base model. The result
    is a state of the method `temperature`; its loss is the cross-entropy.

    Raises:
        UserError: the shapes differ, a value is not finite, or the models agree on no question.
    """
    (z,) = checked_fields(Predictions(logits=logits), ("logits",), impossible=True)
    (b,) = checked_fields(Predictions(logits=base_logits), ("logits",), impossible=True)
    if z.shape != b.shape:
        raise UserError(f"base_logits: expected the shape {z.shape} of the logits, got {b.shape}.")
    if ((z > IMPOSSIBLE) != (b > IMPOSSIBLE)).any():
        raise UserError("base_logits: expected the same options to be impossible (-inf) as in the logits.")
    agree = z.argmax(axis=1) == b.argmax(axis=1)
    if not agree.any():
        raise UserError("base_logits: the two models agree on no question, so there is nothing to fit to.")
    z, b = z[agree].astype(np.float64), b[agree].astype(np.float64)
    p = np.exp(b - b.max(axis=1, keepdims=True))
    return fit_to_target(z, (p * z).sum(axis=1) / p.sum(axis=1))
