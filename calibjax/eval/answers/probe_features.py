"""Probes: what they read of the hidden states of a written answer, and what they are fitted to predict.

A probe is named `probe_TARGET_FEATURE`: `probe_correct_question` is P(IK) of Kadavath et al. (2022), the probability,
from the question alone, that the answer will be right; `probe_agreement_mean` costs one forward pass and no sample. The
log-odds of the confidence are a linear function of the feature (`calibjax.train.probes`).
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.models import LanguageModel, decoder
from calibjax.runtime.arrays import round_up
from calibjax.runtime.distributed import to_host

_LAYERS = 4  # whose last token `layers` reads
_ROWS = 16  # answers in a step
_WIDTH = 32  # of which the width of a step is a multiple, for few compiled programs
_STEPS = 5  # perturbations of a hidden state
_REACH = 0.25  # length of the largest one, as a fraction of the state's
Logits = Callable[[Float[Array, "*B D"]], Float[Array, "*B V"]]
"""From hidden states after the final norm to logits, float32."""


class AnswerSpans(NamedTuple):
    """Where the answers are: row b has its tokens from `start[b]` to `end[b]` − 1. `logits` is the model's function."""

    start: Int[Array, " B"]
    end: Int[Array, " B"]
    tokens: Int[Array, "B T"]
    logits: Logits


States = Float[Array, "L B T D"]


def _at(states: States, layer: int, place: Int[Array, " B"]) -> Float[Array, "B D"]:
    return states[layer][jnp.arange(states.shape[1]), place]


def _mean(states: States, spans: AnswerSpans) -> Float[Array, "B D"]:
    columns = jnp.arange(states.shape[2])[None, :]
    inside = (columns >= spans.start[:, None]) & (columns < spans.end[:, None])
    summed = jnp.sum(jnp.where(inside[..., None], states[-1], 0.0), axis=1)
    return summed / jnp.sum(inside, axis=1, keepdims=True)


def _several(states: States, spans: AnswerSpans) -> Float[Array, "B F"]:
    layers = np.unique(np.linspace(1, len(states) - 1, _LAYERS).round().astype(int))
    return jnp.concatenate([_at(states, layer, spans.end - 1) for layer in layers.tolist()], axis=1)


def _perturbed(states: States, spans: AnswerSpans) -> Float[Array, "B F"]:
    rows = jnp.arange(states.shape[1])
    counts = spans.end - spans.start

    def add(step: Array, total: Array) -> Array:
        place = jnp.minimum(spans.start + step, spans.end - 1)
        hidden = states[-1][rows, place - 1]
        features = perturbed_features(hidden, spans.tokens[rows, place], spans.logits)
        return total + jnp.where((step < counts)[:, None], features, 0.0)

    shape = jax.eval_shape(add, jnp.int32(0), jnp.float32(0)).shape
    return jax.lax.fori_loop(0, jnp.max(counts), add, jnp.zeros(shape)) / counts[:, None].astype(jnp.float32)


PROBE_FEATURES: dict[str, Callable[[States, AnswerSpans], Float[Array, "B F"]]] = {
    "question": lambda states, spans: _at(states, -1, spans.start - 1),
    "answer": lambda states, spans: _at(states, -1, spans.end - 1),
    "mean": _mean,
    "layers": _several,
    "perturbed": _perturbed,
}
"""Name -> function of the float32 states of all layers (embeddings first, after the final norm last) and of the spans
of the answers: the last token of the question or of the answer, the mean over the answer's tokens, the last token in
four layers, evenly spaced, and the mean over the answer's tokens of `perturbed_features`."""

TARGETS = ("correct", "agreement", "capability")
"""Whether the answer is right (Kadavath et al. 2022, arXiv 2207.05221); the fraction of samples that mean the same as
the answer, which needs no labels (arXiv 2604.19444); and the fraction of samples that are right (arXiv 2602.13540)."""


class Probe(NamedTuple):
    """Names in `TARGETS` and `PROBE_FEATURES`."""

    target: str
    feature: str


PROBES = {f"probe_{target}_{feature}": Probe(target, feature) for target in TARGETS for feature in PROBE_FEATURES}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _features(config: Any, dtype: Any, names: tuple[str, ...], params: Any, tokens: Any, start: Any, end: Any):
    segments = (jnp.arange(tokens.shape[1])[None, :] < end[:, None]).astype(jnp.int32)
    states = decoder.hidden_states(config, params, tokens, segment_ids=segments, layers="all", dtype=dtype)
    spans = AnswerSpans(start, end, tokens, functools.partial(decoder.unembed, config, params))
    return tuple(PROBE_FEATURES[name](states.astype(jnp.float32), spans) for name in names)


def answer_features(
    lm: LanguageModel, contexts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], names: Collection[str]
) -> dict[str, Float[np.ndarray, "N F"]]:
    """Features of N answers, float32 by name in `PROBE_FEATURES`, each read after its context in one forward pass.

    Contexts and answers are token ids, none empty, that together fit the model.
    """
    count = len(contexts)
    if not names or not count:
        return {name: np.zeros((0, 0), np.float32) for name in names}
    ordered = tuple(sorted(names))
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
        features = _features(lm.config, lm.dtype, ordered, lm.params, tokens[rows], start[rows], end[rows])
        parts.append(to_host(features))
    columns = map(np.concatenate, zip(*parts, strict=True))
    return {name: column[:count] for name, column in zip(ordered, columns, strict=True)}


def perturbed_features(hidden: Float[Array, "B D"], tokens: Int[Array, " B"], logits: Logits) -> Float[Array, "B 71"]:
    """71 features of the distribution of a token, and of what perturbations of the hidden state do to it (CCPS).

    Khanmohammadi et al. 2025, arXiv 2505.21772: the hidden state moves in the direction in which the token becomes
    unlikely fastest; a token that the model has reason to give stays likely for longer.

    With z(h) the logits, p = softmax z(h), t the token, g = −∇_h log p_t and u = g/‖g‖, the states are h_0 = h and
    h_k = h + r_k u, r_k = k/5 · ‖h‖/4, k = 1, ..., 5; z_k and p_k are theirs. In this order:

    - 8 of h_0: log p_t, p_t, z_t, max p, max z, the entropy of p, the largest logit less the second, ‖z‖;
    - 4 of h_0: the largest probability less the second, the standard deviation of z, ‖h‖, whether t is the argmax;
    - ‖g‖; the smallest k/5 at which the argmax is another one, 6/5 if it never is; and the area (1/5) Σ_k (f_{k−1} +
      f_k)/2 under the fall f_k = max(log p_{0,t} − log p_{k,t}, 0), their "perturbation energy";
    - mean, standard deviation, minimum and maximum over k = 1, ..., 5 of each of 14: the first eight for h_k;
      log p_{0,t} − log p_{k,t}; whether the argmax changed; KL(p_0‖p_k); the Jensen-Shannon divergence of p_0 and p_k;
      the cosines of z_0 with z_k and of h with h_k.

    The paper's radii go to 20, whatever the model; here to a quarter of ‖h‖, which has a meaning in any width. Its 75
    features include the distance ‖h_k − h‖, which is r_k. `hidden` are the states after the final norm that predict
    the tokens. It takes the memory of 6 B V logits. float32, finite.
    """
    rows = jnp.arange(len(tokens))

    def surprise(states: Array) -> Array:
        return -jnp.sum(jax.nn.log_softmax(logits(states))[rows, tokens])

    gradient = jax.grad(surprise)(hidden)
    gradient_norm = jnp.linalg.norm(gradient, axis=-1, keepdims=True)
    hidden_norm = jnp.linalg.norm(hidden, axis=-1, keepdims=True)
    direction = gradient / jnp.where(gradient_norm > 0, gradient_norm, 1.0)
    fractions = jnp.arange(1, _STEPS + 1, dtype=jnp.float32)[:, None] / _STEPS

    h_0 = hidden[None]  # [1, B, D]; h_k: [5, B, D]
    h_k = h_0 + fractions[..., None] * (_REACH * hidden_norm * direction)[None]
    z_0, z_k = logits(hidden)[None], logits(h_k)
    log_p_0, log_p_k = jax.nn.log_softmax(z_0), jax.nn.log_softmax(z_k)
    state_0 = _state_features(z_0, log_p_0, tokens)
    state_k = _state_features(z_k, log_p_k, tokens)

    best = jnp.argmax(z_0, axis=-1)
    changed = jnp.argmax(z_k, axis=-1) != best
    largest, second = _largest_two(jnp.exp(log_p_0))
    is_best = (best == tokens[None]).astype(jnp.float32)
    only_0 = [largest - second, jnp.std(z_0, axis=-1), hidden_norm.T, is_best]

    fall = state_0[0] - state_k[0]
    f = jnp.concatenate([jnp.zeros_like(fall[:1]), jnp.maximum(fall, 0.0)])
    energy = jnp.mean((f[:-1] + f[1:]) / 2, axis=0, keepdims=True)
    flip = jnp.min(jnp.where(changed, fractions, (_STEPS + 1) / _STEPS), axis=0, keepdims=True)
    log_mean = jnp.logaddexp(log_p_0, log_p_k) - jnp.log(2.0)
    jensen_shannon = (_divergence(log_p_0, log_mean) + _divergence(log_p_k, log_mean)) / 2
    moves = [fall, changed.astype(jnp.float32), _divergence(log_p_0, log_p_k), jensen_shannon]
    moves += [_cosine(z_0, z_k), _cosine(h_0, h_k)]
    summaries = []
    for values in state_k + moves:
        for summary in (jnp.mean, jnp.std, jnp.min, jnp.max):
            summaries.append(summary(values, axis=0, keepdims=True))
    return jnp.stack([*state_0, *only_0, gradient_norm.T, flip, energy, *summaries], axis=-1)[0]


def _state_features(z: Float[Array, "K B V"], log_p: Float[Array, "K B V"], tokens: Int[Array, " B"]) -> list[Array]:
    """log p_t, p_t, z_t, max p, max z, entropy, margin of the logits, and their norm; `[K, B]` each."""
    rows = jnp.arange(len(tokens))
    log_p_t = log_p[:, rows, tokens]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    most_likely = jnp.exp(jnp.max(log_p, axis=-1))
    largest, second = _largest_two(z)
    norm = jnp.linalg.norm(z, axis=-1)
    return [log_p_t, jnp.exp(log_p_t), z[:, rows, tokens], most_likely, largest, entropy, largest - second, norm]


def _largest_two(values: Float[Array, "K B V"]) -> tuple[Float[Array, "K B"], Float[Array, "K B"]]:
    largest = jax.lax.top_k(values, 2)[0]
    return largest[..., 0], largest[..., 1]


def _divergence(log_p: Float[Array, "_ B V"], log_q: Float[Array, "K B V"]) -> Float[Array, "K B"]:
    """KL(p‖q)."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _cosine(a: Float[Array, "1 B D"], b: Float[Array, "K B D"]) -> Float[Array, "K B"]:
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.where(lengths > 0, lengths, 1.0)
