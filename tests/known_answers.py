"""Exact probabilities of answers in the small language of `calibjax.data.synthetic`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.data.synthetic import TopicLanguage, sample

VOCAB = 32
MEANINGS = 4
"""Number of things that an answer can mean: the vowels."""


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
    return np.tile(np.arange(VOCAB) // (VOCAB // MEANINGS), VOCAB ** (length - 1))


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
    judgement = np.where(meaning[answer] == meaning[right], VOCAB, VOCAB + 1)
    return np.column_stack([np.asarray(questions), answer, judgement]).astype(np.int32)
