"""Judges of free-text answers."""

import importlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

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
    given = _plain(answer.strip().removeprefix("A:"))
    return float(bool(given) and given in {_plain(text) for text in right})


def _plain(text: str) -> str:
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
    if name == STRING_MATCH:
        return string_match
    module, _, function = name.partition(":")
    try:
        judge = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"--judge {name}: expected {STRING_MATCH}, or package.module:function, (prompt, answer, right answers) -> "
            f"0 to 1 ({error})."
        ) from error
    if not callable(judge):
        raise UserError(f"--judge {name}: expected a function, got {type(judge).__name__}.")
    return cast(Judge, judge)
