"""The confidence of N answers: pure functions, jittable, that return float32 `[N]` in [0, 1].

Samples are given as `clusters`, integers `[N, K]`, equal where two samples of a question mean the same
(`calibjax.eval.answers.clusters`), with their log-probabilities `log_probs` `[N, K]`, nats, whole or divided by their
lengths; `answer` `[N]` is the answer's cluster. `tokens` `[N, T]` are its tokens' log-probabilities, −inf for none.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.recalibrate import sample_agreement
from calibjax.runtime.arrays import AnyArray

OptionConfidence = Literal["options", "options_per_token", "margin", "negentropy", "full_vocabulary"]
TextConfidence = Literal["arithmetic_mean", "product", "minimum", "length_normalised"]
DistributionConfidence = Literal["token_entropy", "mean_token_negentropy", "min_token_negentropy", "probability_margin"]
SampleConfidence = Literal["agreement", "entropy", "first_second"]
AnswerConfidence = OptionConfidence | TextConfidence | SampleConfidence

DESCRIPTIONS: dict[str, str] = {
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
    method: AnswerConfidence, values: Float[AnyArray, "N K"] | Int[AnyArray, "N K"]
) -> Float[Array, " N"]:
    """The confidence of N answers by the name of its definition in `DESCRIPTIONS`.

    Options: of the option with the largest log-probability, softmax over the options alone or exp of it (Hendrycks et
    al., 2021; arXiv 2409.19817 takes the first, arXiv 2508.00264 the second). Texts: arXiv 2409.19817 takes the
    arithmetic mean. Samples: Lyu et al., arXiv 2402.13904, where one answer alone has entropy 0 and confidence 1.

    Args:
        method: name in `DESCRIPTIONS`; ValueError for another.
        values: for options the log-probability of each of K options, summed over its tokens ("options_per_token": their
            mean); for texts the log-probability of each token; −inf where there is none. For samples their clusters.

    Returns:
        float32 `[N]`; 0 where no value exists.

    Example:
        >>> import jax.numpy as jnp
        >>> log_probs = jnp.log(jnp.array([[0.3, 0.1, 0.1, 0.1]]))
        >>> for method in ("options", "full_vocabulary", "arithmetic_mean", "length_normalised"):
        ...     print(method, answer_confidence(method, log_probs).round(3))
        options [0.5]
        full_vocabulary [0.3]
        arithmetic_mean [0.15]
        length_normalised [0.132]
    """
    if method not in DESCRIPTIONS:
        raise ValueError(f"method: expected one of {', '.join(DESCRIPTIONS)}, got {method!r}.")
    if method in get_args(SampleConfidence):
        return _sample_confidence(method, jnp.asarray(values))
    log_probs = jnp.asarray(values, jnp.float32)
    is_value = log_probs > -jnp.inf
    exists = jnp.any(is_value, axis=-1)
    count = jnp.maximum(jnp.sum(is_value, axis=-1), 1)
    if method == "arithmetic_mean":
        return jnp.minimum(jnp.sum(jnp.exp(log_probs), axis=-1) / count, 1.0)
    if method in ("margin", "negentropy"):
        p = jax.nn.softmax(log_probs, axis=-1)
        if method == "margin":
            two, _ = jax.lax.top_k(jnp.pad(p, ((0, 0), (0, 1))), 2)  # the second of a single option is 0
            confidence = two[:, 0] - two[:, 1]
        else:
            entropy = -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)
            confidence = jnp.clip(1 - entropy / jnp.log(jnp.maximum(count, 2)), 0.0, 1.0)
            confidence = jnp.where(count > 1, confidence, 1.0)
        return jnp.where(exists, confidence, 0.0)
    if method in ("options", "options_per_token"):
        log_confidence = jnp.max(log_probs, axis=-1) - jax.nn.logsumexp(log_probs, axis=-1)
    elif method == "full_vocabulary":
        log_confidence = jnp.max(log_probs, axis=-1)
    elif method == "minimum":
        log_confidence = jnp.min(jnp.where(is_value, log_probs, jnp.inf), axis=-1)
    else:
        total = jnp.sum(jnp.where(is_value, log_probs, 0.0), axis=-1)
        log_confidence = total if method == "product" else total / count
    return jnp.where(exists, jnp.exp(jnp.minimum(log_confidence, 0.0)), 0.0)


def _sample_confidence(method: str, clusters: Int[Array, "N K"]) -> Float[Array, " N"]:
    first, frequency = sample_agreement(clusters)
    if method == "agreement":
        return frequency
    samples = clusters.shape[1]
    occurrences = jnp.sum(clusters[:, :, None] == clusters[:, None, :], axis=-1)
    if method == "first_second":
        second = jnp.max(jnp.where(clusters == first[:, None], 0, occurrences), axis=-1)
        return (jnp.max(occurrences, axis=-1) - second) / samples
    # An answer that n samples gave is met n times; 1/n of each sums to one per different answer.
    different = jnp.sum(1 / occurrences, axis=-1)
    entropy = jnp.sum(jnp.log(samples / occurrences), axis=-1) / samples
    return jnp.clip(1.0 - entropy / jnp.log(jnp.maximum(jnp.round(different), 2.0)), 0.0, 1.0)


def token_confidence(
    method: DistributionConfidence, tokens: Float[AnyArray, "N T"], distributions: Float[AnyArray, "N T _"]
) -> Float[Array, " N"]:
    """The confidence of N written answers by the distributions that their tokens were taken from.

    "token_entropy": exp of minus the mean entropy of the whole vocabulary (Malinin and Gales 2021, arXiv 2002.07650),
    the reciprocal of the effective number of choices. From the K most likely tokens of the vocabulary (uqlm, arXiv
    2504.19254): "mean_token_negentropy" and "min_token_negentropy", the mean and the least over the answer's tokens of
    1 + Σ_k p_k log p_k / log K; "probability_margin", the mean of the largest probability minus the second.

    `distributions` are at each token the entropy, nats, and the log-probabilities of K >= 2 tokens, largest first.
    Raises ValueError for an unknown method.
    """
    is_token = jnp.isfinite(tokens)
    count = jnp.maximum(jnp.sum(is_token, axis=-1), 1)
    values = jnp.asarray(distributions, jnp.float32)
    entropy = values[..., 0]
    p = jnp.exp(values[..., 1:])
    p_log_p = jax.scipy.special.xlogy(p, p)
    negentropy = 1 + jnp.sum(p_log_p, axis=-1) / jnp.log(p.shape[-1])

    def mean(value: Float[Array, "N T"]) -> Float[Array, " N"]:
        return jnp.sum(jnp.where(is_token, value, 0.0), axis=-1) / count

    confidences = {
        "token_entropy": jnp.exp(-mean(entropy)),
        "mean_token_negentropy": mean(negentropy),
        "min_token_negentropy": jnp.min(jnp.where(is_token, negentropy, 1.0), axis=-1),
        "probability_margin": mean(p[..., 0] - p[..., 1]),
    }
    if method not in confidences:
        raise ValueError(f"method: expected one of {', '.join(confidences)}, got {method!r}.")
    return jnp.where(jnp.any(is_token, axis=-1), jnp.clip(confidences[method], 0.0, 1.0), 0.0)


def _weights(clusters: Int[AnyArray, "N K"], log_probs: Float[AnyArray, "N K"] | None) -> Float[Array, "N K"]:
    """The fraction of the total probability of the samples that each has; without log-probabilities 1/K."""
    log_probs = jnp.zeros(clusters.shape) if log_probs is None else jnp.asarray(log_probs, jnp.float32)
    return jax.nn.softmax(log_probs)


def semantic_confidence(
    clusters: Int[AnyArray, "N K"], answer: Int[AnyArray, " N"], log_probs: Float[AnyArray, "N K"] | None = None
) -> Float[Array, " N"]:
    """Mass of the cluster that an answer belongs to: P(a sample means the same as the answer).

    Without `log_probs` it is the consistency of the answer, #{k: c_k = a}/K: for samples that are drawn independently
    of the answer, an unbiased estimate of that probability. With them, Σ_k 1[c_k = a] p_k / Σ_k p_k.
    """
    weights = _weights(clusters, log_probs)
    return jnp.minimum(jnp.sum(jnp.where(clusters == answer[:, None], weights, 0.0), axis=-1), 1.0)


def trace_confidence(probabilities: Sequence[float], window: int = 2048) -> tuple[float, float]:
    """The least mean of `window` successive tokens of a reasoning trace, and the mean of the last ones.

    Weights of its vote: "lowest group" and "tail" confidence of DeepConf (arXiv 2508.15260), where the confidence of a
    token is minus the mean log-probability of the most likely ones; here it is its own calibrated probability.
    """
    sums = np.cumsum([0.0, *probabilities])
    width = min(window, len(sums) - 1)
    means = (sums[width:] - sums[:-width]) / width
    return float(means.min()), float(means[-1])


def semantic_density(
    clusters: Int[AnyArray, "N K"],
    answer: Int[AnyArray, " N"],
    log_probs: Float[AnyArray, "N K"],
    distinct: Bool[AnyArray, "N K"],
    tokens: Float[AnyArray, "N T"],
) -> Float[Array, " N"]:
    """Density of the answer among the different texts that were sampled (Qiu and Miikkulainen 2024, arXiv 2405.13845).

    (p + Σ_k 1[c_k = a] p_k) / (p + Σ_k p_k) over the `distinct` samples: one of each text, and none with the text of
    the answer; p and p_k are the geometric means of the probabilities of the tokens of the answer and of a sample.
    The paper's kernel falls with a distance of meanings; here it is 1 within a cluster.
    """
    probability = answer_confidence("length_normalised", tokens)
    weights = jnp.where(distinct, jnp.exp(jnp.asarray(log_probs, jnp.float32)), 0.0)
    same = probability + jnp.sum(jnp.where(clusters == answer[:, None], weights, 0.0), axis=-1)
    total = probability + jnp.sum(weights, axis=-1)
    return same / jnp.where(total > 0, total, 1.0)


def semantic_entropy(
    clusters: Int[AnyArray, "N K"], log_probs: Float[AnyArray, "N K"] | None = None
) -> Float[Array, " N"]:
    """Entropy over meanings, −Σ_c m_c log m_c, m_c the mass of a cluster, nats, in [0, log K] (Kuhn et al. 2023).

    With the log-probabilities of the samples it is the estimator of Farquhar et al. (doi 10.1038/s41586-024-07421-0,
    Methods), who divide them by the samples' lengths; without, their discrete semantic entropy.
    """
    weights = _weights(clusters, log_probs)
    same = clusters[:, :, None] == clusters[:, None, :]
    mass = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    # Each cluster is met once for each of its samples, with their weights: these sum to its mass.
    surprise = jnp.where(weights > 0, -jnp.log(jnp.where(weights > 0, mass, 1.0)), 0.0)
    return jnp.maximum(jnp.sum(weights * surprise, axis=-1), 0.0)


def entropy_confidence(
    clusters: Int[AnyArray, "N K"], log_probs: Float[AnyArray, "N K"] | None = None
) -> Float[Array, " N"]:
    """1 − H/log K, H the `semantic_entropy` of K samples: 1 where all agree, 0 where all differ with equal mass."""
    most = jnp.log(jnp.float32(max(clusters.shape[1], 2)))
    return jnp.clip(1.0 - semantic_entropy(clusters, log_probs) / most, 0.0, 1.0)


def two_way_confidence(log_probs: Float[AnyArray, "N 2"]) -> Float[Array, " N"]:
    """P(True), the probability of the reply "right" and not "wrong" (Kadavath et al. 2022, arXiv 2207.05221)."""
    log_probs = jnp.asarray(log_probs, jnp.float32)
    return jax.nn.sigmoid(log_probs[:, 0] - log_probs[:, 1])
