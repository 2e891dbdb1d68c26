"""The features that probes read from the hidden states of a written answer, and the targets that they are fitted to.

A probe is named `probe_TARGET_FEATURE`: `probe_correct_question` is P(IK) of Kadavath et al. (2022), the probability,
from the question alone, that the answer will be right; `probe_agreement_mean` costs one forward pass and no sample. The
log-odds of the confidence are a linear function of the feature (`calibjax.train.probes`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.models import LanguageModel, decoder
from calibjax.runtime.arrays import AnyArray, round_up
from calibjax.runtime.distributed import to_host

_LAYERS = 4  # whose last token `layers` reads
_ROWS = 16  # answers in a step
_WIDTH = 32  # of which the width of a step is a multiple, for few compiled programs


class AnswerSpans(NamedTuple):
    """Where the answers are: row b has the tokens of its answer from `start[b]` to `end[b]` − 1."""

    start: Int[AnyArray, " B"]
    end: Int[AnyArray, " B"]


States = Float[Array, "L B T D"]


def _at(states: States, layer: int, place: Int[AnyArray, " B"]) -> Float[Array, "B D"]:
    return states[layer][jnp.arange(states.shape[1]), place]


def _mean(states: States, spans: AnswerSpans) -> Float[Array, "B D"]:
    columns = jnp.arange(states.shape[2])[None, :]
    inside = (columns >= spans.start[:, None]) & (columns < spans.end[:, None])
    summed = jnp.sum(jnp.where(inside[..., None], states[-1], 0.0), axis=1)
    return summed / jnp.sum(inside, axis=1, keepdims=True)


def _several(states: States, spans: AnswerSpans) -> Float[Array, "B F"]:
    layers = np.unique(np.linspace(1, len(states) - 1, _LAYERS).round().astype(int))
    return jnp.concatenate([_at(states, layer, spans.end - 1) for layer in layers.tolist()], axis=1)


PROBE_FEATURES: dict[str, Callable[[States, AnswerSpans], Float[Array, "B F"]]] = {
    "question": lambda states, spans: _at(states, -1, spans.start - 1),
    "answer": lambda states, spans: _at(states, -1, spans.end - 1),
    "mean": _mean,
    "layers": _several,
}
"""Name -> function of the float32 states of all layers (embeddings first, after the final norm last) and of the spans
of answers: the last token of question or answer, the mean over the answer, the last token in four spaced layers."""

TARGETS = ("correct", "agreement", "capability")
"""Whether the answer is right (Kadavath et al. 2022, arXiv 2207.05221); the fraction of samples that mean the same as
the answer, which needs no labels (arXiv 2604.19444); and the fraction of samples that are right (arXiv 2602.13540)."""


class Probe(NamedTuple):
    """Names in `TARGETS` and `PROBE_FEATURES`."""

    target: str
    feature: str


PROBES = {f"probe_{target}_{feature}": Probe(target, feature) for target in TARGETS for feature in PROBE_FEATURES}


@jax.jit(static_argnums=(0, 1, 2))
def _features(config: Any, dtype: Any, names: tuple[str, ...], params: Any, tokens: Any, spans: AnswerSpans):
    is_token = jnp.arange(tokens.shape[1])[None, :] < spans.end[:, None]
    segments = is_token.astype(jnp.int32)
    states = decoder.hidden_states(config, params, tokens, segment_ids=segments, layers="all", dtype=dtype)
    states = states.astype(jnp.float32)
    return {name: PROBE_FEATURES[name](states, spans) for name in names}


def answer_features(
    lm: LanguageModel, contexts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], names: Collection[str]
) -> dict[str, Float[np.ndarray, "N F"]]:
    """Features of N answers, float32 by name in `PROBE_FEATURES`, each read after its context in one forward pass.

    Contexts and answers are token ids, none empty, that together fit the model.
    """
    count = len(contexts)
    if not names or not count:
        return {name: np.zeros((0, 0), np.float32) for name in names}
    static = (lm.config, lm.dtype, tuple(sorted(names)))
    sequences = [[*context, *answer] for context, answer in zip(contexts, answers, strict=True)]
    start = np.array([len(context) for context in contexts], np.int32)
    end = np.array([len(sequence) for sequence in sequences], np.int32)
    width = round_up(int(max(end)), _WIDTH)
    tokens = np.zeros((count, min(width, lm.config.max_positions)), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    parts = []
    for first in range(0, count, _ROWS):
        rows = np.arange(first, first + _ROWS).clip(max=count - 1)  # the last step repeats the last row
        spans = AnswerSpans(start[rows], end[rows])
        parts.append(to_host(_features(*static, lm.params, tokens[rows], spans)))
    return jax.tree.map(lambda *blocks: np.concatenate(blocks)[:count], *parts)
