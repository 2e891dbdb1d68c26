"""Confidence from several sampled answers to a question, once it is known which of them mean the same.

Samples are given as clusters: integers `[N, K]`, equal where two samples of a question mean the same
(`calibjax.eval.answers.clusters`). A cluster's mass is the fraction of the samples in it, or, where the
log-probabilities of the samples are given, their fraction of the total probability of the samples.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.runtime.arrays import AnyArray


def _weights(
    clusters: Int[AnyArray, "N K"], log_probs: Float[AnyArray, "N K"] | None, where: Bool[AnyArray, "N K"] | None
) -> tuple[Float[Array, "N K"], Int[Array, " N"]]:
    """The weight of each sample, 0 or more, with sum one where there is a sample; and the number of samples."""
    there = jnp.ones(clusters.shape, bool) if where is None else jnp.asarray(where)
    scores = jnp.zeros(clusters.shape) if log_probs is None else jnp.asarray(log_probs, jnp.float32)
    scores = jnp.where(there, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(there, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0), jnp.sum(there, axis=-1)


def semantic_confidence(
    clusters: Int[AnyArray, "N K"],
    answer: Int[AnyArray, " N"],
    log_probs: Float[AnyArray, "N K"] | None = None,
    where: Bool[AnyArray, "N K"] | None = None,
) -> Float[Array, " N"]:
    """Mass of the cluster that an answer belongs to: P(a sample means the same as the answer).

    Without `log_probs` it is the consistency of the answer, #{k: c_k = a}/K: for samples that are drawn independently
    of the answer, an unbiased estimate of that probability. With them, Σ_k 1[c_k = a] p_k / Σ_k p_k.

    Args:
        clusters: of each sample.
        answer: cluster of the answer whose confidence this is; a number that no sample has gives 0.
        log_probs: of each sample, nats, whole or divided by its length; None: every sample counts the same.
        where: False for samples that do not count; None: all do.

    Returns:
        float32 `[N]` in [0, 1]; 0 where no sample counts.

    Example:
        >>> semantic_confidence(jnp.array([[0, 0, 1, 0]]), jnp.array([0])).tolist()
        [0.75]
    """
    weights, _ = _weights(clusters, log_probs, where)
    return jnp.minimum(jnp.sum(jnp.where(clusters == answer[:, None], weights, 0.0), axis=-1), 1.0)


def semantic_entropy(
    clusters: Int[AnyArray, "N K"],
    log_probs: Float[AnyArray, "N K"] | None = None,
    where: Bool[AnyArray, "N K"] | None = None,
) -> Float[Array, " N"]:
    """Entropy over meanings, −Σ_c m_c log m_c with the mass m_c of each cluster (Kuhn et al. 2023; Farquhar et al.
    2024).

    With the log-probabilities of the samples it is the estimator of Farquhar et al. (doi 10.1038/s41586-024-07421-0,
    Methods), who divide them by the samples' lengths; without, their discrete semantic entropy.

    Args:
        clusters, log_probs, where: see `semantic_confidence`.

    Returns:
        float32 `[N]`, nats, from 0 to log K; 0 where no sample counts.

    Example:
        >>> f"{float(semantic_entropy(jnp.array([[0, 0, 1, 1]]))[0]):.4f}"
        '0.6931'
    """
    weights, _ = _weights(clusters, log_probs, where)
    same = clusters[:, :, None] == clusters[:, None, :]
    mass = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    # Each cluster is met once for each of its samples, with their weights: these sum to its mass.
    surprise = jnp.where(weights > 0, -jnp.log(jnp.where(weights > 0, mass, 1.0)), 0.0)
    return jnp.maximum(jnp.sum(weights * surprise, axis=-1), 0.0)


def entropy_confidence(
    clusters: Int[AnyArray, "N K"],
    log_probs: Float[AnyArray, "N K"] | None = None,
    where: Bool[AnyArray, "N K"] | None = None,
) -> Float[Array, " N"]:
    """1 − H/log K, H the `semantic_entropy` of K samples: 1 where all agree, 0 where all differ with equal mass.

    Args:
        clusters, log_probs, where: see `semantic_confidence`.

    Returns:
        float32 `[N]` in [0, 1]. A single sample has entropy 0 and confidence 1; where none counts, 0.

    Example:
        >>> entropy_confidence(jnp.array([[0, 0, 1, 1], [0, 1, 2, 3]])).round(4).tolist()
        [0.5, 0.0]
    """
    _, count = _weights(clusters, log_probs, where)
    most = jnp.log(jnp.maximum(count, 2).astype(jnp.float32))
    confidence = 1.0 - semantic_entropy(clusters, log_probs, where) / most
    return jnp.where(count > 0, jnp.clip(confidence, 0.0, 1.0), 0.0)


def two_way_confidence(log_probs: Float[AnyArray, "N 2"]) -> Float[Array, " N"]:
    """P(True): the probability of the first of two words among the two (Kadavath et al. 2022, arXiv 2207.05221).

    Args:
        log_probs: of "yes, the answer is right" and of "no", nats.

    Returns:
        float32 `[N]` in [0, 1].

    Example:
        >>> two_way_confidence(jnp.log(jnp.array([[0.3, 0.1]]))).round(4).tolist()
        [0.75]
    """
    log_probs = jnp.asarray(log_probs, jnp.float32)
    return jax.nn.sigmoid(log_probs[:, 0] - log_probs[:, 1])
