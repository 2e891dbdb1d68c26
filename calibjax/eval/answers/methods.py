"""The registry of confidences in whole answers: each is a pure function of `Evidence`.

Example:
    >>> import jax.numpy as jnp
    >>> evidence = Evidence(clusters=jnp.array([[0, 0, 1, 0]]), answer=jnp.array([0]))
    >>> for name, method in METHODS.items():
    ...     if all(getattr(evidence, field) is not None for field in method.reads):
    ...         print(name, f"{float(method.function(evidence)[0]):.3f}")
    agreement 0.750
    entropy 0.189
    first_second 0.500
    consistency 0.750
    discrete_semantic_entropy 0.594
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.eval.answers.confidence import WORDS, AnswerConfidence, answer_confidence
from calibjax.eval.answers.probes import PROBES, TARGETS
from calibjax.eval.answers.samples import entropy_confidence, semantic_confidence, two_way_confidence
from calibjax.runtime.arrays import AnyArray


class Evidence(NamedTuple):
    """What is known of the answers to N questions; a method reads the fields that it names, the others may be None.

    Attributes:
        options: `[N, O]`, log-probability of each option of a multiple choice, nats; −inf where there is none.
        tokens: `[N, T]`, log-probability of each token of the answer, nats; −inf where there is none.
        clusters: int `[N, K]`, which of the K samples mean the same (`calibjax.eval.answers.clusters`).
        answer: int `[N]`, the cluster of the answer.
        sample_log_probs: `[N, K]`, log-probability of each sample divided by its length, nats.
        asked: `[N, 2]`, log-probability of "yes" and of "no" to a question whether the answer is right.
        stated: `[N]`, the confidence that the model stated in words or numbers, in [0, 1]; NaN where it cannot be read.
        probed: `[N]`, log-odds that a probe of the hidden states gives (`calibjax.eval.answers.probes`).
    """

    options: Float[AnyArray, "N O"] | None = None
    tokens: Float[AnyArray, "N T"] | None = None
    clusters: Int[AnyArray, "N K"] | None = None
    answer: Int[AnyArray, " N"] | None = None
    sample_log_probs: Float[AnyArray, "N K"] | None = None
    asked: Float[AnyArray, "N 2"] | None = None
    stated: Float[AnyArray, " N"] | None = None
    probed: Float[AnyArray, " N"] | None = None


class Method(NamedTuple):
    """One confidence: an entry of `METHODS`.

    Attributes:
        function: from `Evidence` to the confidence, float32 `[N]` in [0, 1]; pure and jittable.
        reads: the fields of `Evidence` that it needs.
        words: description, as reports print it.
        source: the paper.
    """

    function: Callable[[Evidence], Float[Array, " N"]]
    reads: tuple[str, ...]
    words: str
    source: str


def _of(how: AnswerConfidence, field: str, source: str) -> Method:
    """An entry of `answer_confidence`."""

    def function(evidence: Evidence) -> Array:
        values = getattr(evidence, field)
        return answer_confidence(how, values, None if field == "clusters" else values > -jnp.inf)

    return Method(function, (field,), WORDS[how], source)


def _given(value: Array | None) -> Array:
    assert value is not None, "a method was called without a field that it reads"
    return value


def _stated(value: Array) -> Array:
    """One half, which says nothing, where the model stated nothing that can be read."""
    return jnp.where(jnp.isnan(value), 0.5, jnp.asarray(value, jnp.float32)).astype(jnp.float32)


METHODS: dict[str, Method] = {
    "options": _of("options", "options", "Hendrycks et al. 2021"),
    "margin": _of("margin", "options", "Scheffer et al. 2001"),
    "negentropy": _of("negentropy", "options", "Shannon 1948"),
    "full_vocabulary": _of("full_vocabulary", "options", "arXiv 2508.00264"),
    "arithmetic_mean": _of("arithmetic_mean", "tokens", "arXiv 2409.19817"),
    "product": _of("product", "tokens", "the chain rule"),
    "minimum": _of("minimum", "tokens", "Manakul et al. 2023, arXiv 2303.08896"),
    "length_normalised": _of("length_normalised", "tokens", "Malinin and Gales 2021, arXiv 2002.07650"),
    "agreement": _of("agreement", "clusters", "Wang et al. 2023, arXiv 2203.11171"),
    "entropy": _of("entropy", "clusters", "Lyu et al. 2025, arXiv 2402.13904"),
    "first_second": _of("first_second", "clusters", "Lyu et al. 2025, arXiv 2402.13904"),
    "consistency": Method(
        lambda e: semantic_confidence(_given(e.clusters), _given(e.answer)),
        ("clusters", "answer"),
        "fraction of the samples that mean the same as the answer",
        "Manakul et al. 2023, arXiv 2303.08896",
    ),
    "semantic_confidence": Method(
        lambda e: semantic_confidence(_given(e.clusters), _given(e.answer), _given(e.sample_log_probs)),
        ("clusters", "answer", "sample_log_probs"),
        "fraction of the samples' probability that means the same as the answer",
        "Farquhar et al. 2024, doi 10.1038/s41586-024-07421-0",
    ),
    "semantic_entropy": Method(
        lambda e: entropy_confidence(_given(e.clusters), _given(e.sample_log_probs)),
        ("clusters", "sample_log_probs"),
        "1 minus the entropy over meanings, of log K, weighted by probability",
        "Farquhar et al. 2024, doi 10.1038/s41586-024-07421-0",
    ),
    "discrete_semantic_entropy": Method(
        lambda e: entropy_confidence(_given(e.clusters)),
        ("clusters",),
        "1 minus the entropy over meanings, of log K",
        "Farquhar et al. 2024, doi 10.1038/s41586-024-07421-0",
    ),
    "p_true": Method(
        lambda e: two_way_confidence(_given(e.asked)),
        ("asked",),
        "probability that the model calls its answer true",
        "Kadavath et al. 2022, arXiv 2207.05221",
    ),
    "p_not_none": Method(
        lambda e: two_way_confidence(_given(e.asked)),
        ("asked",),
        "probability that the model prefers its answer to none of the above",
        "Kadavath et al. 2022, arXiv 2207.05221",
    ),
    "verbalised": Method(
        lambda e: _stated(_given(e.stated)),
        ("stated",),
        "confidence that the model states as a number",
        "Lin et al. 2022, arXiv 2205.14334",
    ),
    "verbalised_words": Method(
        lambda e: _stated(_given(e.stated)),
        ("stated",),
        "confidence that the model states in words",
        "Lin et al. 2022, arXiv 2205.14334",
    ),
    **{
        name: Method(
            lambda e: jax.nn.sigmoid(jnp.asarray(_given(e.probed), jnp.float32)),
            ("probed",),
            f"probe of hidden states ({probe.feature}) for {TARGETS[probe.target][0]}",
            TARGETS[probe.target][1],
        )
        for name, probe in PROBES.items()
    },
}
"""Name -> method. 1/perplexity of an answer is length_normalised."""

WRITTEN = tuple(name for name, method in METHODS.items() if "options" not in method.reads)
"""The methods for written answers."""
