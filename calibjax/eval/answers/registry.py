"""The registry of confidences in written answers: each is a pure function of `Evidence`. Sources: docs/answers.md.

Example:
    >>> import jax.numpy as jnp
    >>> evidence = Evidence(clusters=jnp.array([[0, 0, 1, 0]]), answer=jnp.array([0]))
    >>> for name, confidence in CONFIDENCES.items():
    ...     if all(getattr(evidence, field) is not None for field in confidence.reads):
    ...         print(name, f"{float(confidence.function(evidence)[0]):.3f}")
    agreement 0.750
    entropy 0.189
    first_second 0.500
    consistency 0.750
    discrete_semantic_entropy 0.594
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.eval.answers.confidence import (
    DistributionConfidence,
    SampleConfidence,
    TextConfidence,
    answer_confidence,
    entropy_confidence,
    semantic_confidence,
    semantic_density,
    token_confidence,
    two_way_confidence,
)
from calibjax.eval.answers.probe_features import PROBES
from calibjax.runtime.arrays import AnyArray


class Evidence(NamedTuple):
    """What is known of the answers to N questions; a confidence needs the fields of `Confidence.reads`.

    Attributes:
        tokens: `[N, T]`, log-probability of each token of the answer, nats; −inf where there is none.
        distributions: `[N, T, 1 + K]`, of the vocabulary at each token of the answer: the entropy, nats, and the
            log-probabilities of the K most likely tokens, largest first; of the base model, as `tokens`.
        clusters: int `[N, K]`, which of the K samples mean the same (`calibjax.eval.answers.clusters`).
        answer: int `[N]`, the cluster of the answer.
        sample_log_probs: `[N, K]`, log-probability of each sample divided by its length, nats.
        traces: `[N, K, 2]`, `trace_confidence` of each sample by its calibrated tokens.
        distinct: bool `[N, K]`, the first sample of each text that is not the text of the answer.
        two_way: `[N, 2]`, log-probability of "yes" and of "no" to a question whether the answer is right.
        stated: `[N]`, the confidence that the model stated in words or numbers, in [0, 1]; NaN where it cannot be read.
        log_odds: `[N]`, by a probe of the hidden states (`calibjax.eval.answers.probe_features`).
    """

    tokens: Float[AnyArray, "N T"] | None = None
    distributions: Float[AnyArray, "N T _"] | None = None
    clusters: Int[AnyArray, "N K"] | None = None
    answer: Int[AnyArray, " N"] | None = None
    sample_log_probs: Float[AnyArray, "N K"] | None = None
    traces: Float[AnyArray, "N K 2"] | None = None
    distinct: Bool[AnyArray, "N K"] | None = None
    two_way: Float[AnyArray, "N 2"] | None = None
    stated: Float[AnyArray, " N"] | None = None
    log_odds: Float[AnyArray, " N"] | None = None


class Confidence(NamedTuple):
    """One confidence: a jittable function from `Evidence` to float32 `[N]` in [0, 1], and the fields that it reads."""

    function: Callable[[Evidence], Float[Array, " N"]]
    reads: tuple[str, ...]


def _confidence(function: Callable[..., Any], *reads: str) -> Confidence:
    """A function that takes the fields that it reads, in their order."""
    return Confidence(lambda evidence: function(*(getattr(evidence, field) for field in reads)), reads)


def _by_name(names: Iterable[str], function: Callable[..., Any], *reads: str) -> dict[str, Confidence]:
    """Confidences of a function that takes their name before the fields that they read."""
    return {name: _confidence(functools.partial(function, name), *reads) for name in names}


def _weighted_consistency(part: int, clusters: Any, answer: Any, traces: Any) -> Float[Array, " N"]:
    """The fraction of the votes for the answer, each of the weight of its trace."""
    return semantic_confidence(clusters, answer, jnp.log(jnp.maximum(traces[..., part], 1e-30)))


def _cocoa(tokens: Any, clusters: Any, answer: Any) -> Float[Array, " N"]:
    return answer_confidence("length_normalised", tokens) * semantic_confidence(clusters, answer)


def _stated_confidence(stated: Float[AnyArray, " N"]) -> Float[Array, " N"]:
    """One half, which says nothing, where the statement cannot be read."""
    return jnp.where(jnp.isnan(stated), 0.5, jnp.asarray(stated, jnp.float32)).astype(jnp.float32)


CONFIDENCES: dict[str, Confidence] = {
    **_by_name(get_args(TextConfidence), answer_confidence, "tokens"),
    **_by_name(get_args(DistributionConfidence), token_confidence, "tokens", "distributions"),
    **_by_name(get_args(SampleConfidence), answer_confidence, "clusters"),
    "consistency": _confidence(semantic_confidence, "clusters", "answer"),
    "deepconf_group": _confidence(functools.partial(_weighted_consistency, 0), "clusters", "answer", "traces"),
    "deepconf_tail": _confidence(functools.partial(_weighted_consistency, 1), "clusters", "answer", "traces"),
    "cocoa": _confidence(_cocoa, "tokens", "clusters", "answer"),
    "semantic_density": _confidence(semantic_density, "clusters", "answer", "sample_log_probs", "distinct", "tokens"),
    "semantic_confidence": _confidence(semantic_confidence, "clusters", "answer", "sample_log_probs"),
    "semantic_entropy": _confidence(entropy_confidence, "clusters", "sample_log_probs"),
    "discrete_semantic_entropy": _confidence(entropy_confidence, "clusters"),
    "p_true": _confidence(two_way_confidence, "two_way"),
    "p_not_none": _confidence(two_way_confidence, "two_way"),
    "verbalised": _confidence(_stated_confidence, "stated"),
    "verbalised_words": _confidence(_stated_confidence, "stated"),
    **{name: _confidence(lambda x: jax.nn.sigmoid(jnp.asarray(x, jnp.float32)), "log_odds") for name in PROBES},
}
"""Name -> confidence. 1/perplexity of an answer is length_normalised."""
