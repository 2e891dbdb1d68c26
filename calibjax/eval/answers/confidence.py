"""The confidence of an answer: one function, and a name for each definition.

| name | confidence of | read from |
|---|---|---|
| options | the chosen option, given that it is one of the options (letters only, where they are letters) | options |
| options_per_token | the same, of each option's mean log-probability per token | options |
| margin | the chosen option: its probability less that of the second | options |
| negentropy | the chosen option: 1 − H / log K, H the entropy of the distribution over K options | options |
| full_vocabulary | the chosen option, in the distribution over the whole vocabulary | options |
| arithmetic_mean | a text: the mean of its tokens' probabilities | tokens |
| product | a text: their product, the probability of the text | tokens |
| minimum | a text: the smallest of them | tokens |
| length_normalised | a text: their geometric mean, product^(1/n) | tokens |
| agreement | the most frequent of several sampled answers: its frequency | samples |
| entropy | the same answer: 1 − H / log K, H the entropy of the frequencies of the K different answers | samples |
| first_second | the same: its share less that of the next most frequent | samples |
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.recalibrate import sample_agreement
from calibjax.runtime.arrays import AnyArray

OptionConfidence = Literal["options", "options_per_token", "margin", "negentropy", "full_vocabulary"]
TextConfidence = Literal["arithmetic_mean", "product", "minimum", "length_normalised"]
SampleConfidence = Literal["agreement", "entropy", "first_second"]
AnswerConfidence = OptionConfidence | TextConfidence | SampleConfidence

WORDS: dict[str, str] = {
    "options": "probability of the chosen option among the options, by their summed log-likelihoods",
    "options_per_token": "probability of the chosen option among the options, by their log-likelihoods per token",
    "margin": "probability of the chosen option among the options minus that of the second",
    "negentropy": "1 minus the normalised entropy of the distribution over the options",
    "full_vocabulary": "probability of the chosen option among everything the model could write",
    "arithmetic_mean": "mean probability of the answer's tokens",
    "product": "product of the probabilities of the answer's tokens",
    "minimum": "smallest probability of the answer's tokens",
    "length_normalised": "geometric mean of the probabilities of the answer's tokens",
    "agreement": "fraction of the samples that gave the answer",
    "entropy": "1 minus the normalised entropy of the sampled answers",
    "first_second": "fraction of the most frequent sampled answer minus that of the second",
}
"""Descriptions of the confidences, as reports print them."""


def answer_confidence(
    how: AnswerConfidence,
    values: Float[AnyArray, "N K"] | Int[AnyArray, "N K"],
    where: Bool[AnyArray, "N K"] | None = None,
) -> Float[Array, " N"]:
    """The confidence of N answers, in [0, 1].

    Options: of the option with the largest log-probability, softmax over the options alone or exp of it (Hendrycks et
    al., 2021; arXiv 2409.19817 takes the first, arXiv 2508.00264 the second). Texts: arXiv 2409.19817 takes the
    arithmetic mean. Samples: Lyu et al., arXiv 2402.13904, where one answer alone has entropy 0 and confidence 1.

    Args:
        how: see the table above.
        values: of "options" and "full_vocabulary" the log-probability of each of K options, an option of several tokens
            having that of all of them, of "options_per_token" that divided by their number; of texts that of each
            token; of samples each answer as an integer, equal answers equal numbers.
        where: False for what is not there; None: everything is.

    Returns:
        float32 `[N]`; 0 where nothing is there.

    Raises:
        ValueError: `how` is none of the names.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs = jnp.log(jnp.array([[0.3, 0.1, 0.1, 0.1]]))
        >>> for how in ("options", "full_vocabulary", "arithmetic_mean", "length_normalised"):
        ...     print(how, answer_confidence(how, log_probs).round(3))
        options [0.5]
        full_vocabulary [0.3]
        arithmetic_mean [0.15]
        length_normalised [0.132]
        >>> answer_confidence("first_second", jnp.array([[7, 3, 3, 3]])).tolist()
        [0.5]
    """
    if how not in WORDS:
        raise ValueError(f"how: expected one of {', '.join(WORDS)}, got {how!r}.")
    there = jnp.ones(values.shape, bool) if where is None else jnp.asarray(where)
    if how in get_args(SampleConfidence):
        return _of_samples(how, jnp.asarray(values), there)
    log_probs = jnp.where(there, jnp.asarray(values, jnp.float32), -jnp.inf)
    found, count = jnp.any(there, axis=-1), jnp.maximum(jnp.sum(there, axis=-1), 1)
    if how in ("options", "options_per_token"):
        log_confidence = jnp.max(log_probs, axis=-1) - jax.nn.logsumexp(log_probs, axis=-1)
    elif how in ("margin", "negentropy"):
        return jnp.where(found, _of_distribution(how, jax.nn.softmax(log_probs, axis=-1), count), 0.0)
    elif how == "full_vocabulary":
        log_confidence = jnp.max(log_probs, axis=-1)
    elif how == "arithmetic_mean":
        return jnp.sum(jnp.exp(log_probs), axis=-1) / count
    elif how == "minimum":
        log_confidence = jnp.min(jnp.where(there, log_probs, jnp.inf), axis=-1)
    else:
        total = jnp.sum(jnp.where(there, log_probs, 0.0), axis=-1)
        log_confidence = total if how == "product" else total / count
    return jnp.where(found, jnp.exp(jnp.minimum(log_confidence, 0.0)), 0.0)


def _of_distribution(how: str, p: Float[Array, "N K"], count: Int[Array, " N"]) -> Float[Array, " N"]:
    """The difference of the two largest probabilities (1 of one option); or 1 − H/log K."""
    if how == "margin":
        largest = jnp.max(p, axis=-1, keepdims=True)
        first = jnp.argmax(p, axis=-1, keepdims=True) == jnp.arange(p.shape[-1])[None, :]
        return largest[:, 0] - jnp.max(jnp.where(first, 0.0, p), axis=-1, initial=0.0)
    entropy = -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)
    return jnp.where(count > 1, jnp.clip(1 - entropy / jnp.log(jnp.maximum(count, 2)), 0.0, 1.0), 1.0)


def _of_samples(how: str, answers: Array, there: Array) -> Array:
    first, share = sample_agreement(answers, there)
    if how == "agreement":
        return share
    if how == "first_second":
        _, second = sample_agreement(answers, there & (answers != first[:, None]))
        others = jnp.sum(there & (answers != first[:, None]), axis=-1)
        return share - second * others / jnp.maximum(jnp.sum(there, axis=-1), 1)
    count = jnp.maximum(jnp.sum(there, axis=-1), 1)
    same = (answers[:, :, None] == answers[:, None, :]) & there[:, None, :]
    of_sample = jnp.maximum(jnp.sum(same, axis=-1), 1)
    # Each answer is met as often as it was drawn: 1/n of each meeting sums to one for every answer.
    different = jnp.sum(jnp.where(there, 1 / of_sample, 0.0), axis=-1)
    entropy = jnp.sum(jnp.where(there, jnp.log(count[:, None] / of_sample), 0.0), axis=-1) / count
    normalised = entropy / jnp.log(jnp.maximum(jnp.round(different), 2.0))
    return jnp.where(jnp.any(there, axis=-1), jnp.clip(1.0 - normalised, 0.0, 1.0), 0.0)
