"""A small language whose true next-token probabilities are known exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.data.examples import Example
from calibjax.data.sequences import Sequences, make_sequences
from calibjax.runtime.arrays import AnyArray

_VOCAB, _TOPICS, _DRIFT = 32, 3, 0.02


class TopicLanguage(NamedTuple):
    """A hidden Markov mixture of Markov chains: a hidden topic drifts, and each topic has its own transitions.

    Some (topic, token) contexts have one likely successor, others dozens, so overconfidence differs between contexts.
    """

    transitions: Float[Array, "K V V"]  # P(next token | topic, token)
    topic_transitions: Float[Array, "K K"]  # P(next topic | topic)

    @property
    def vocab_size(self) -> int:
        return self.transitions.shape[-1]


def make_language(key: Array) -> TopicLanguage:
    """Random language of 32 tokens and 3 topics, whose topic changes with probability 0.02 after a token.

    Rows of transitions are Dirichlet with concentrations that are log-uniform in [0.01, 1].
    """
    concentration_key, row_key = jax.random.split(key)
    exponent = jax.random.uniform(concentration_key, (_TOPICS, _VOCAB, 1), minval=-2.0, maxval=0.0)
    # Gammas are drawn in log space because most would underflow to 0 at concentration 0.01.
    log_gamma = jax.random.loggamma(row_key, jnp.broadcast_to(10.0**exponent, (_TOPICS, _VOCAB, _VOCAB)))
    stay = jnp.eye(_TOPICS) * (1 - _DRIFT)
    leave = (1 - jnp.eye(_TOPICS)) * _DRIFT / (_TOPICS - 1)
    return TopicLanguage(jax.nn.softmax(log_gamma, axis=-1), stay + leave)


def sample(language: TopicLanguage, key: Array, count: int, length: int) -> Int[Array, "S T"]:
    """Samples `count` sequences of `length` tokens; the first topic and the first token are uniform."""
    topics = language.topic_transitions.shape[0]
    topic_key, token_key, scan_key = jax.random.split(key, 3)
    topic = jax.random.randint(topic_key, (count,), 0, topics)
    token = jax.random.randint(token_key, (count,), 0, language.vocab_size)

    def step(carry, step_key):
        topic, token = carry
        next_key, drift_key = jax.random.split(step_key)
        chosen = jax.random.categorical(next_key, jnp.log(language.transitions[topic, token]))
        topic = jax.random.categorical(drift_key, jnp.log(language.topic_transitions[topic]))
        return (topic, chosen), token

    _, tokens = jax.lax.scan(step, (topic, token), jax.random.split(scan_key, length))
    return tokens.T.astype(jnp.int32)


def as_sequences(tokens: Int[AnyArray, "S T"]) -> Sequences:
    """`Sequences` of T − 1 predictions from token arrays, each a row of its own."""
    every = np.arange(np.shape(tokens)[1]) > 0
    rows = (Example(text, every, row) for row, text in enumerate(np.asarray(tokens, np.int32)))
    return make_sequences(rows, len(every), layout="full")
