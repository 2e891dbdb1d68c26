"""The registry of probes: what a probe reads of the hidden states, and what it is taught to predict.

A probe is named `probe_TARGET_FEATURE`: `probe_correct_question` is P(IK) of Kadavath et al. (2022), the probability,
from the question alone, that the answer will be right; `probe_agreement_mean` costs one forward pass and no sample. The
log-odds of the confidence are a linear function of the feature (`calibjax.train.probes`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.eval.answers.perturbed import Logits, perturbed_features

_LAYERS = 4


class Places(NamedTuple):
    """Where the answers are: row b's answer has the tokens from `start[b]` to `end[b]`, without the latter; and how the
    logits of its model are computed from states after the final norm."""

    start: Int[Array, " B"]
    end: Int[Array, " B"]
    tokens: Int[Array, "B T"]
    logits: Logits


States = Float[Array, "L B T D"]


def _at(states: States, layer: int, place: Int[Array, " B"]) -> Float[Array, "B D"]:
    return states[layer][jnp.arange(states.shape[1]), place]


def _mean(states: States, places: Places) -> Float[Array, "B D"]:
    columns = jnp.arange(states.shape[2])[None, :]
    inside = (columns >= places.start[:, None]) & (columns < places.end[:, None])
    return jnp.sum(jnp.where(inside[..., None], states[-1], 0.0), axis=1) / jnp.sum(inside, axis=1, keepdims=True)


def _several(states: States, places: Places) -> Float[Array, "B F"]:
    layers = np.unique(np.linspace(1, len(states) - 1, _LAYERS).round().astype(int))
    return jnp.concatenate([_at(states, layer, places.end - 1) for layer in layers.tolist()], axis=1)


def _perturbed(states: States, places: Places) -> Float[Array, "B F"]:
    rows, counts = jnp.arange(states.shape[1]), places.end - places.start

    def add(step: Array, total: Array) -> Array:
        place = jnp.minimum(places.start + step, places.end - 1)
        found = perturbed_features(states[-1][rows, place - 1], places.tokens[rows, place], places.logits)
        return total + jnp.where((step < counts)[:, None], found, 0.0)

    shape = jax.eval_shape(add, jnp.int32(0), jnp.float32(0)).shape
    return jax.lax.fori_loop(0, jnp.max(counts), add, jnp.zeros(shape)) / counts[:, None].astype(jnp.float32)


FEATURES: dict[str, Callable[[States, Places], Float[Array, "B F"]]] = {
    "question": lambda states, places: _at(states, -1, places.start - 1),
    "answer": lambda states, places: _at(states, -1, places.end - 1),
    "mean": _mean,
    "layers": _several,
    "perturbed": _perturbed,
}
"""Name -> function of the float32 states of all layers (embeddings first, after the final norm last) and of the places
of the answers: the last token of the question, the last one of the answer, the mean over the answer's tokens, the last
token in four layers, evenly spaced, and the mean over the answer's tokens of `perturbed_features`."""

TARGETS: dict[str, tuple[str, str]] = {
    "correct": ("whether the answer is right", "Kadavath et al. 2022, arXiv 2207.05221"),
    "agreement": ("the fraction of samples that mean the same as the answer", "arXiv 2604.19444"),
    "capability": ("the fraction of samples that are right", "arXiv 2602.13540"),
}
"""Name -> (what is predicted, source). "agreement" needs no labels."""


class Probe(NamedTuple):
    """An entry of `PROBES`: names in `TARGETS` and `FEATURES`."""

    target: str
    feature: str


PROBES = {f"probe_{target}_{feature}": Probe(target, feature) for target in TARGETS for feature in FEATURES}
"""Name -> probe."""
