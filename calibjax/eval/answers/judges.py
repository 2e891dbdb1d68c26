"""Judges of free-text answers."""

import functools
import importlib
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from calibjax.runtime.errors import UserError, about, require_directory

Judge = Callable[[str, str, Sequence[str]], float]
"""(prompt, answer, right answers) -> 1 for right, 0 for wrong, or a value between."""
Function = TypeVar("Function", bound=Callable[..., Any])

STRING_MATCH = "string-match"
_QUESTION = (
    "Question: {question}\nCorrect answers: {right}\nGiven answer: {answer}\n"
    "Is the given answer correct? Reply with Yes or No.\nReply:"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4\u201c\u201d", " "))  # and quotes


def string_match(prompt: str, answer: str, right: Sequence[str]) -> float:
    """1.0 where the answer is one of the right ones, but for case, punctuation, articles, spaces and a label "A:".

    So TriviaQA counts exact matches (Joshi et al., 2017, https://arxiv.org/abs/1705.03551, section 6.1).

    Example:
        >>> string_match("Which vegetable?", " The onion.", ["Onion", "Allium cepa"])
        1.0
        >>> string_match("Which vegetable?", "onion rings", ["Onion"])
        0.0
    """
    text = plain_text(answer.strip().removeprefix("A:"))
    return float(text != "" and text in map(plain_text, right))


def plain_text(text: str) -> str:
    """A text in lower case and NFC, without punctuation, repeated spaces, and articles unless it is nothing else."""
    text = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split()) or " ".join(text.split())


def references(document: Mapping[str, Any]) -> list[str]:
    """The right answers of a question of TriviaQA, TruthfulQA, NQ or GSM8K; raises `UserError` for other forms."""
    if "correct_answers" in document:
        return list(document["correct_answers"])
    answer = document.get("answer")
    if isinstance(answer, Mapping) and "aliases" in answer:
        return [answer["value"], *answer["aliases"]] if answer.get("value") else list(answer["aliases"])
    answers = [answer.rpartition("#### ")[2]] if isinstance(answer, str) else answer  # GSM8K's is after its reasoning
    if isinstance(answers, list) and answers and all(isinstance(one, str) for one in answers):
        return answers
    raise UserError(f"expected answers in correct_answers, answer or answer.aliases, got {', '.join(document)}.")


@functools.cache
def model_judge(path: str) -> Judge:
    """A language model as the judge: 1.0 where, of "Yes" and "No", it finds "Yes" the likelier reply to `_QUESTION`.

    The model, a directory or hub id, is loaded at the first answer, in bfloat16 on one device.
    """
    from calibjax.data import is_hub_id
    from calibjax.models.load import stored_dtype

    if not is_hub_id(path):
        require_directory(path, "judge")
    with about("judge"):
        stored_dtype(path)

    @functools.cache
    def load() -> Any:
        from calibjax.eval.tasks.harness import HarnessLM
        from calibjax.heads import FittedHead
        from calibjax.models import load_model

        lm = load_model(path, "bfloat16")
        return HarnessLM(lm, {"judge": FittedHead.constant(lm)}, batch_size=2)

    def judge(prompt: str, answer: str, right: Sequence[str]) -> float:
        text = _QUESTION.format(question=prompt, right="; ".join(right), answer=answer.strip())
        model = load()
        yes, no = model.scorer.score([model.encode(text, reply) for reply in (" Yes", " No")])
        return float(yes.log_probs[0].sum() > no.log_probs[0].sum())

    return judge


def find_judge(name: str) -> Judge:
    """The judge of a name: "string-match", a model (directory, or hub id org/name), or your "package.module:function";
    raises `UserError` if there is no such model or function."""
    if ":" not in name and ("/" in name or Path(name).is_dir()):
        return model_judge(name)
    contract = "(prompt, answer, right answers) -> 0 to 1; or a model"
    return find_function("judge", name, {STRING_MATCH: string_match}, contract)


def find_function(option: str, name: str, known: Mapping[str, Function], contract: str) -> Function:
    """The function of a name in `known`, or "package.module:function"; `contract` is what such a function does."""
    if name in known:
        return known[name]
    module, _, function = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        expected = f"{', '.join(known)}, or package.module:function, {contract}"
        raise UserError(f"{option}: expected {expected}; got {name} ({error}).") from error
    if not callable(value):
        raise UserError(f"{option}: expected a function, got {name}, of type {type(value).__name__}.")
    return cast(Function, value)
