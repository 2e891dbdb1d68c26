"""Which answers mean the same: a clustering is a function of the answers to one question.

`CLUSTERINGS` has those that read the text alone; "hidden" compares the hidden states of the model itself, and "nli:DIR"
asks a model of entailment. A function of the user is "package.module:function".
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from jaxtyping import Int

from calibjax.eval.answers.judges import find_function, plain_text
from calibjax.models import LanguageModel
from calibjax.runtime.arrays import round_up
from calibjax.runtime.errors import UserError, first_line, require_directory

Clustering = Callable[[str, Sequence[str]], Sequence[int]]
"""(question, answers) -> a number for each answer, equal where two answers mean the same."""

_WIDTH = 16  # texts to embed are padded to a multiple of this
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,9}\b)?")


def _numbered(keys: Sequence[object]) -> list[int]:
    """Numbers by first appearance, from 0."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def exact_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers that are equal but for space around them."""
    return _numbered([answer.strip() for answer in answers])


def normalised_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers that are equal but for case, punctuation, articles and spaces, as `string_match` compares them."""
    return _numbered([plain_text(answer) for answer in answers])


def last_number(text: str) -> Decimal | None:
    """The last number of a text, as benchmarks of arithmetic read the answer after a chain of reasoning; None without.

    Example:
        >>> last_number("6 times 200 is 1,200.0, so the answer is 1,200.")
        Decimal('1200')
    """
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def numeric_clusters(question: str, answers: Sequence[str]) -> list[int]:
    """Answers with the same last number; those without a number are compared by `normalised_clusters`.

    Example:
        >>> numeric_clusters("6 times 200?", ["It is 1,200.", "6 x 200 = 1200.0", "1.2e3", "3", "many"])
        [0, 0, 0, 1, 2]
    """
    values = [last_number(answer) for answer in answers]
    keys = [plain_text(answer) if value is None else value for value, answer in zip(values, answers, strict=True)]
    return _numbered(keys)


def _by_first(items: Iterable[Any], alike: Callable[[Any, Any], bool]) -> list[int]:
    """The cluster of each item: the first one whose first member is like the item, or a new one.

    Only the first member is compared with (Kuhn et al. 2023, arXiv 2302.09664, algorithm 1): small steps do not chain.
    """
    firsts, numbers = [], []
    for item in items:
        number = next((number for number, first in enumerate(firsts) if alike(first, item)), len(firsts))
        numbers.append(number)
        if number == len(firsts):
            firsts.append(item)
    return numbers


@functools.cache
def nli_clustering(path: str) -> Clustering:
    """Answers that entail each other, each after the question (Kuhn et al. 2023, arXiv 2302.09664, algorithm 1).

    `path` is the directory of a sequence-classification model of Hugging Face with a label "entailment", such as
    microsoft/deberta-large-mnli, which runs in PyTorch.
    """
    require_directory(path, "clustering")
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(path).eval().requires_grad_(False)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"clustering: nli:{path} cannot be loaded in PyTorch ({first_line(error)}).") from error
    labels = {name.lower(): number for name, number in model.config.label2id.items()}
    if "entailment" not in labels:
        raise UserError(f"clustering: nli:{path}: expected a label entailment, got {', '.join(labels)}.")

    def entails(premise: str, conclusion: str) -> bool:
        logits = model(**tokenizer(premise, conclusion, truncation=True, return_tensors="pt")).logits
        return int(logits.argmax()) == labels["entailment"]

    def clusters(question: str, answers: Sequence[str]) -> list[int]:
        texts = [f"{question} {answer}" for answer in answers]
        return _by_first(texts, lambda first, text: entails(first, text) and entails(text, first))

    return clusters


CLUSTERINGS: dict[str, Clustering] = {
    "exact": exact_clusters,
    "normalised": normalised_clusters,
    "numeric": numeric_clusters,
}


def hidden_clustering(lm: LanguageModel, threshold: float = 0.9) -> Clustering:
    """A clustering by hidden states: an answer belongs to a cluster if its mean hidden state after the last layer and
    the mean hidden state of the cluster's first answer have a cosine of at least `threshold`."""

    def clusters(question: str, answers: Sequence[str]) -> list[int]:
        ids = [lm.tokenizer.encode(text, add_special_tokens=False) or [0] for text in answers]
        width = round_up(max(map(len, ids)), _WIDTH)
        tokens, segments = np.zeros((2, len(ids), width), np.int32)
        for row, text_ids in enumerate(ids):
            tokens[row, : len(text_ids)] = text_ids
            segments[row, : len(text_ids)] = 1
        hidden = np.asarray(lm.hidden_states(tokens, segment_ids=segments), np.float64)
        means = (hidden * segments[..., None]).sum(axis=1) / segments.sum(axis=1, keepdims=True)
        unit = means / np.linalg.norm(means, axis=1, keepdims=True)
        return _by_first(unit, lambda first, vector: first @ vector >= threshold)

    return clusters


def find_clustering(name: str, lm: LanguageModel | None = None) -> Clustering:
    """A clustering by its name: of `CLUSTERINGS`, "hidden" (of `lm`), "nli:DIR", or your "package.module:function".

    Raises `UserError` if there is none.
    """
    if name == "hidden" and lm is not None:
        return hidden_clustering(lm)
    if name.startswith("nli:"):
        return nli_clustering(name.removeprefix("nli:"))
    return find_function("clustering", name, CLUSTERINGS, "(question, answers) -> a whole number for each answer")


def clusters_of(
    clustering: Clustering, questions: Sequence[str], answers: Sequence[str], samples: Sequence[Sequence[str]]
) -> tuple[Int[np.ndarray, "N K"], Int[np.ndarray, " N"]]:
    """Clusters of K samples of each question, int32 `[N, K]`, and of the answer to it, comparable within a question.

    The clustering receives the answer, then the samples; raises `UserError` unless it returns a whole number for each.
    """
    rows = []
    for question, answer, drawn in zip(questions, answers, samples, strict=True):
        numbers = np.asarray(clustering(question, [answer, *drawn]))
        if numbers.shape != (len(drawn) + 1,) or not np.issubdtype(numbers.dtype, np.integer):
            got = f"{numbers.dtype} {list(numbers.shape)} for {question[:60]!r}"
            raise UserError(f"clustering: expected a whole number for each of {len(drawn) + 1} answers, got {got}.")
        rows.append(np.unique(numbers, return_inverse=True)[1].astype(np.int32))
    clusters = np.stack(rows) if rows else np.zeros((0, 1), np.int32)
    return clusters[:, 1:], clusters[:, 0]
