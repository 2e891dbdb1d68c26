"""Which answers mean the same: a clustering is a function of the answers to one question.

`CLUSTERINGS` has those that read the text alone. `cosine_clusters` reads vectors, such as the hidden states of a model.
A function of the user's, such as one that asks a model whether two answers entail each other, is named
"package.module:function" (`find_clustering`).
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
from jaxtyping import Float, Int

from calibjax.eval.answers.judges import plain_text
from calibjax.eval.answers.named import find_function
from calibjax.runtime.errors import UserError

Clustering = Callable[[str, Sequence[str]], Sequence[int]]
"""(question, answers) -> a number for each answer, equal where two answers mean the same."""

_NUMBER = re.compile(r"[-\u2212+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-\u2212+]?\.\d+")


def _numbered(keys: Sequence[object]) -> list[int]:
    """Numbers by first appearance, from 0."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def exact_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers that are equal but for space around them.

    Example:
        >>> exact_clusters("Which city?", ["Bonn", " Bonn", "bonn"])
        [0, 0, 1]
    """
    return _numbered([answer.strip() for answer in answers])


def normalised_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers that are equal but for case, punctuation, articles and spaces, as `string_match` compares them.

    Example:
        >>> normalised_clusters("Which vegetable?", ["The onion.", "onion", "onions"])
        [0, 0, 1]
    """
    return _numbered([plain_text(answer) for answer in answers])


def last_number(text: str) -> Decimal | None:
    """The last number of a text, thousands separated by commas or not; None if there is none.

    The answer at the end of a chain of reasoning is read in this way, as benchmarks of arithmetic do.

    Example:
        >>> last_number("6 times 200 is 1,200.0, so the answer is 1,200.")
        Decimal('1200')
    """
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None
    except InvalidOperation:
        return None


def numeric_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers with the same last number; those without a number are compared by `normalised_clusters`.

    Example:
        >>> numeric_clusters("6 times 200?", ["It is 1,200.", "6 x 200 = 1200.0", "1,300", "many"])
        [0, 0, 1, 2]
    """
    values = [last_number(answer) for answer in answers]
    return _numbered([plain_text(a) if v is None else v for v, a in zip(values, answers, strict=True)])


def cosine_clusters(vectors: Float[np.ndarray, "K D"], threshold: float = 0.9) -> Int[np.ndarray, " K"]:
    """Groups vectors whose cosine reaches a threshold with the first vector of a group, in the order of the vectors.

    Only the first member is compared with, as in the clustering of Kuhn et al. 2023 (arXiv 2302.09664, algorithm 1), so
    that a chain of small steps does not join opposite ends.

    Args:
        vectors: of each answer; one of zeros is like no other.
        threshold: smallest cosine within a group, in [-1, 1].

    Returns:
        int32 `[K]`, numbered from 0 by first appearance.

    Example:
        >>> cosine_clusters(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.1]])).tolist()
        [0, 1, 0]
    """
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1.0)
    firsts: list[int] = []
    clusters = np.zeros(len(unit), np.int32)
    for row, own in enumerate(unit):
        near = np.flatnonzero(unit[firsts] @ own >= threshold) if firsts else np.zeros(0, int)
        if len(near):
            clusters[row] = near[0]
        else:
            clusters[row] = len(firsts)
            firsts.append(row)
    return clusters


CLUSTERINGS: dict[str, Clustering] = {
    "exact": exact_clusters,
    "normalised": normalised_clusters,
    "numeric": numeric_clusters,
}
"""Name -> clustering by the text of the answers."""


def find_clustering(name: str) -> Clustering:
    """The clustering of a name in `CLUSTERINGS`, or "package.module:function" of your own.

    Raises:
        UserError: there is no such function.
    """
    return find_function("--same", name, CLUSTERINGS, "(question, answers) -> a whole number for each answer")


def clusters_of(
    clustering: Clustering, questions: Sequence[str], answers: Sequence[str], samples: Sequence[Sequence[str]]
) -> tuple[Int[np.ndarray, "N K"], Int[np.ndarray, " N"]]:
    """Clusters of the samples of N questions, and of the answer to each.

    Args:
        clustering: receives the answer first and then the samples of a question.
        questions, answers: N texts each.
        samples: K texts for each question.

    Returns:
        (int32 `[N, K]`, int32 `[N]`), comparable within a question.

    Raises:
        UserError: the clustering returned something other than one whole number for each answer.
    """
    rows = []
    for question, answer, drawn in zip(questions, answers, samples, strict=True):
        numbers = np.asarray(clustering(question, [answer, *drawn]))
        if numbers.shape != (len(drawn) + 1,) or not np.issubdtype(numbers.dtype, np.integer):
            raise UserError(
                f"--same: expected a whole number for each of {len(drawn) + 1} answers, got {numbers.dtype} "
                f"{list(numbers.shape)} for {question[:60]!r}."
            )
        rows.append(np.unique(numbers, return_inverse=True)[1].astype(np.int32))
    found = np.stack(rows) if rows else np.zeros((0, 1), np.int32)
    return found[:, 1:], found[:, 0]
