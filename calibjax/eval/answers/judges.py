"""Judges of free-text answers."""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from calibjax.eval.answers.named import find_function
from calibjax.runtime.errors import UserError

Judge = Callable[[str, str, Sequence[str]], float]
"""(prompt, answer, right answers) -> 1 for right, 0 for wrong, or a share between."""

STRING_MATCH = "string-match"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def string_match(prompt: str, answer: str, right: Sequence[str]) -> float:
    """1.0 where the answer is one of the right ones, but for case, punctuation, articles and spaces.

    So TriviaQA counts exact matches (Joshi et al., 2017, https://arxiv.org/abs/1705.03551, section 6.1). A label "A:"
    before the answer is left out.

    Example:
        >>> string_match("Which vegetable?", " The onion.", ["Onion", "Allium cepa"])
        1.0
        >>> string_match("Which vegetable?", "onion rings", ["Onion"])
        0.0
    """
    given = plain_text(answer.strip().removeprefix("A:"))
    return float(bool(given) and given in {plain_text(text) for text in right})


def plain_text(text: str) -> str:
    """A text in lower case, without punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def references(document: Mapping[str, Any]) -> list[str]:
    """The right answers of a question of TriviaQA or TruthfulQA.

    Raises:
        UserError: the document has none in a form that is known.
    """
    if "correct_answers" in document:
        return list(document["correct_answers"])
    answer = document.get("answer")
    if isinstance(answer, Mapping) and "aliases" in answer:
        return [answer["value"], *answer["aliases"]] if answer.get("value") else list(answer["aliases"])
    if isinstance(answer, str):
        return [answer]
    raise UserError(
        f"a question with the fields {', '.join(document)}: expected right answers in correct_answers, answer or "
        "answer.aliases."
    )


def find_judge(name: str) -> Judge:
    """The judge of a name: "string-match", or "package.module:function" of your own.

    Raises:
        UserError: there is no such function.
    """
    return find_function("--judge", name, {STRING_MATCH: string_match}, "(prompt, answer, right answers) -> 0 to 1")
