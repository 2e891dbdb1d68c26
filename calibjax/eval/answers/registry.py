"""The registry of confidences in written answers: each is a pure function of `Evidence`. Sources: docs/answers.md.

Example:
    >>> import jax.numpy as jnp
    >>> evidence = Evidence(clusters=jnp.array([[0, 0, 1, 0]]), answer=jnp.array([0]))
    >>> for name, confidence in CONFIDENCES.items():
    ...     if evidence.keys() >= set(confidence.fields):
    ...         print(name, f"{float(confidence(evidence)[0]):.3f}")
    agreement 0.750
    entropy 0.189
    first_second 0.500
    consistency 0.750
    discrete_semantic_entropy 0.594
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.eval.answers import confidence
from calibjax.eval.answers.probe_features import PROBES

Evidence = dict[str, Any]
"""What is known of the answers to N questions; a confidence needs the fields that `Confidence.fields` names. Arrays:

- `tokens`: float `[N, T]`, log-probability of each token of the answer, nats; -inf where there is none.
- `distributions`: float `[N, T, 1 + K]`, of the vocabulary at each token of the answer: the entropy, nats, and the
  log-probabilities of the K most likely tokens, largest first; of the base model, as `tokens`.
- `clusters`: int `[N, K]`, which of the K samples mean the same (`calibjax.eval.answers.clusters`).
- `answer`: int `[N]`, the cluster of the answer.
- `sample_log_probs`: float `[N, K]`, log-probability of each sample divided by its length, nats.
- `traces`: float `[N, K, 2]`, `trace_confidence` of each sample by its calibrated tokens.
- `distinct`: bool `[N, K]`, the first sample of each text that is not the text of the answer.
- `two_way`: float `[N, 2]`, log-probability of "yes" and of "no" to a question whether the answer is right.
- `stated`: float `[N]`, the confidence that the model stated, in words or numbers, in [0, 1]; NaN if unreadable.
- `log_odds`: float `[N]`, by a probe of the hidden states (`calibjax.eval.answers.probe_features`).
"""


@dataclasses.dataclass(frozen=True)
class Confidence:
    """One confidence: a jittable function to float32 `[N]` in [0, 1], and the fields of `Evidence` that it takes."""

    function: Callable[..., Float[Array, " N"]]
    fields: tuple[str, ...]

    def __call__(self, evidence: Evidence) -> Float[Array, " N"]:
        return self.function(*(evidence[field] for field in self.fields))


def _by_name(names: Iterable[str], function: Callable[..., Any], *fields: str) -> dict[str, Confidence]:
    return {name: Confidence(functools.partial(function, name), fields) for name in names}


def _weighted_consistency(part: int, clusters: Any, answer: Any, traces: Any) -> Float[Array, " N"]:
    """The fraction of the votes for the answer, each of the weight of its trace."""
    return confidence.semantic_confidence(clusters, answer, jnp.log(jnp.maximum(traces[..., part], 1e-30)))


def _cocoa(tokens: Any, clusters: Any, answer: Any) -> Float[Array, " N"]:
    return confidence.answer_confidence("length_normalised", tokens) * confidence.semantic_confidence(clusters, answer)


CONFIDENCES: dict[str, Confidence] = {
    **_by_name(get_args(confidence.TextConfidence), confidence.answer_confidence, "tokens"),
    **_by_name(get_args(confidence.DistributionConfidence), confidence.token_confidence, "tokens", "distributions"),
    **_by_name(get_args(confidence.SampleConfidence), confidence.answer_confidence, "clusters"),
    "consistency": Confidence(confidence.semantic_confidence, ("clusters", "answer")),
    "deepconf_group": Confidence(functools.partial(_weighted_consistency, 0), ("clusters", "answer", "traces")),
    "deepconf_tail": Confidence(functools.partial(_weighted_consistency, 1), ("clusters", "answer", "traces")),
    "cocoa": Confidence(_cocoa, ("tokens", "clusters", "answer")),
    "semantic_density": Confidence(
        confidence.semantic_density, ("clusters", "answer", "sample_log_probs", "distinct", "tokens")
    ),
    "semantic_confidence": Confidence(confidence.semantic_confidence, ("clusters", "answer", "sample_log_probs")),
    "semantic_entropy": Confidence(confidence.entropy_confidence, ("clusters", "sample_log_probs")),
    "discrete_semantic_entropy": Confidence(confidence.entropy_confidence, ("clusters",)),
    "p_true": Confidence(confidence.two_way_confidence, ("two_way",)),
    "p_not_none": Confidence(confidence.two_way_confidence, ("two_way",)),
    "verbalised": Confidence(lambda x: jnp.where(jnp.isnan(x), 0.5, jnp.asarray(x, jnp.float32)), ("stated",)),
    **{name: Confidence(lambda x: jax.nn.sigmoid(jnp.asarray(x, jnp.float32)), ("log_odds",)) for name in PROBES},
}
"""Name -> confidence. 1/perplexity of an answer is length_normalised."""
