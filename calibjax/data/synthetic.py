"""A small language whose true next-token probabilities are known exactly."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.data.sequences import Sequences
from calibjax.runtime.arrays import AnyArray

_VOCAB, _TOPICS, _DRIFT = 32, 3, 0.02
MEANINGS = 4
"""Number of things that an answer can mean: the vowels."""


class Syllables:
    """A tokenizer that reads each token of the small language as a word of one syllable."""

    def __init__(self):
        self._words = [consonant + vowel for vowel in "aeio" for consonant in "bdfgklmn"]
        self.added_tokens_decoder: dict[int, Any] = {}
        """As of transformers: none of the words was added."""

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


def answer_probabilities(language: TopicLanguage, questions: Int[Array, "N T"], length: int = 1) -> Float[Array, "N A"]:
    """Exact P(answer | question) of every answer: the next `length` tokens, after a question of T tokens.

    With the joint probability of the answer so far and the topic, each token v takes P_k(v | last token) and the topic
    drifts. What an answer means, `answer_meanings`, has the probability of all answers that mean it; so consistency,
    semantic entropy, capability, and the probability that a proposed answer is right are known.

    Args:
        language: of the tokens.
        questions: `[N, T]`.
        length: tokens of an answer; there are A = V^length answers, the last token changing fastest.

    Returns:
        float32 `[N, A]`, rows sum to 1.

    Example:
        >>> language = make_language(jax.random.key(0))
        >>> questions = sample(language, jax.random.key(1), 2, 8)
        >>> p = answer_probabilities(language, questions, 2)
        >>> p.shape, float(p.sum().round(3))
        ((2, 1024), 2.0)
    """
    with jax.default_matmul_precision("highest"):
        topics = language.topic_transitions.shape[0]
        start = jnp.full((questions.shape[0], topics), 1.0 / topics)

        def step(belief: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
            belief = belief * jnp.moveaxis(language.transitions[:, pair[0], pair[1]], 0, 1)
            return (belief / jnp.maximum(belief.sum(axis=1, keepdims=True), 1e-30)) @ language.topic_transitions, None

        belief, _ = jax.lax.scan(step, start, (questions[:, :-1].T, questions[:, 1:].T))
        rows = jnp.moveaxis(language.transitions[:, questions[:, -1]], 0, 1)  # [N, K, V]
        joint = jnp.einsum("nk,nkv,kj->nvj", belief, rows, language.topic_transitions)  # answer, next topic
        for _ in range(length - 1):
            last = jnp.arange(joint.shape[1]) % language.vocab_size
            rows = jnp.moveaxis(language.transitions[:, last], 0, 1)
            joint = jnp.einsum("nak,akv,kj->navj", joint, rows, language.topic_transitions)
            joint = joint.reshape(len(questions), -1, topics)
        return joint.sum(axis=-1)


def answer_meanings(length: int = 1) -> Int[np.ndarray, " A"]:
    """What each answer of `answer_probabilities` means, 0 to 3: the vowel of its last syllable."""
    return np.tile(np.arange(_VOCAB) // (_VOCAB // MEANINGS), _VOCAB ** (length - 1))


def judged_answers(language: TopicLanguage, key: Array, count: int, question_length: int) -> Int[np.ndarray, "S T"]:
    """Questions with an answer of one token and a judgement of it: the text that teaches a model P(True).

    Answer and right answer are drawn independently from P(answer | question), and the judgement is whether they mean
    the same, so that P(judged right | question, answer) is the probability of the answer's meaning.

    Returns:
        int32 `[count, question_length + 2]`: the last column is V for "right" and V + 1 for "wrong".
    """
    question_key, answer_key = jax.random.split(key)
    questions = sample(language, question_key, count, question_length)
    scores = jnp.log(answer_probabilities(language, questions))
    answer, right = np.asarray(jax.random.categorical(answer_key, scores, axis=-1, shape=(2, count)))
    meaning = answer_meanings()
    judgement = np.where(meaning[answer] == meaning[right], _VOCAB, _VOCAB + 1)
    return np.column_stack([np.asarray(questions), answer, judgement]).astype(np.int32)


def as_sequences(tokens: Int[AnyArray, "S T"]) -> Sequences:
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
