"""A small language whose true next-token probabilities are known exactly."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.data.sequences import Sequences

_VOCAB, _TOPICS, _DRIFT = 32, 3, 0.02


class Syllables:
    """A tokenizer that reads each token of the small language as a word of one syllable."""

    def __init__(self):
        self._words = [consonant + vowel for vowel in "aeio" for consonant in "bdfgklmn"]

    def get_vocab(self) -> dict[str, int]:
        """Word -> token."""
        return {word: token for token, word in enumerate(self._words)}

    def decode(self, ids: Iterable[int], **options: Any) -> str:
        """The words of tokens, each after a space; options are those of transformers, and unused."""
        return "".join(f" {self._words[token]}" for token in ids)


class TopicLanguage(NamedTuple):
    """A hidden Markov mixture of Markov chains: a hidden topic drifts, and each topic has its own transitions.

    The next token depends on the last one and on the topic, which must be inferred from all tokens so far. Some (topic,
    token) contexts have one likely successor, others dozens, so overconfidence differs between contexts and temperature
    scaling cannot remove it.

    Attributes:
        transitions: `[K, V, V]`, P(next token | topic, token); rows sum to 1.
        topic_transitions: `[K, K]`, P(next topic | topic); rows sum to 1.
    """

    transitions: Float[Array, "K V V"]
    topic_transitions: Float[Array, "K K"]

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


def true_probabilities(language: TopicLanguage, tokens: Int[Array, "S T"]) -> Float[Array, "S T V"]:
    """Exact P(next token | all tokens so far) after every position, by Bayesian filtering of the topic.

    With belief b over topics, P(next = v) = Σ_k b_k P_k(v | token); after v, b_k becomes
    proportional to b_k P_k(v | token), and then the topic drifts.

    Args:
        language: of the tokens.
        tokens: `[S, T]`.

    Returns:
        float32 `[S, T, V]`, rows sum to 1. Entry t is the distribution of the token at t + 1.
    """
    topics = language.topic_transitions.shape[0]
    start = jnp.full((tokens.shape[0], topics), 1.0 / topics)

    def step(belief, now):
        token, following = now
        rows = jnp.moveaxis(language.transitions[:, token], 0, 1)  # [S, K, V]
        predicted = jnp.einsum("sk,skv->sv", belief, rows, precision=jax.lax.Precision.HIGHEST)
        likelihood = jnp.take_along_axis(rows, following[:, None, None], axis=2)[..., 0]
        belief = belief * likelihood
        belief = belief / jnp.maximum(jnp.sum(belief, axis=1, keepdims=True), 1e-30)
        belief = jnp.matmul(belief, language.topic_transitions, precision=jax.lax.Precision.HIGHEST)
        return belief, predicted

    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)  # the last update is not used
    _, predicted = jax.lax.scan(step, start, (tokens.T, following.T))
    return jnp.moveaxis(predicted, 0, 1)


def as_sequences(tokens: Int[Array | np.ndarray, "S T"]) -> Sequences:
    """`Sequences` of T − 1 predictions from token arrays, each a row of its own."""
    tokens = np.asarray(tokens, np.int32)
    count, length = tokens.shape[0], tokens.shape[1] - 1
    return Sequences(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        where=np.ones((count, length), bool),
        segment_ids=np.ones((count, length), np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), (count, length)).copy(),
        source=np.arange(count, dtype=np.int32),
    )
