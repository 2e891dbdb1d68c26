"""Analogies as multiple choice: a is to b as c is to one of four words, chosen by likelihood."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from calibjax.data import Rows, read_source
from calibjax.eval.tasks.scoring import Continuation, Scorer
from calibjax.eval.tokens import identity_head
from calibjax.heads import MAX_LOG_FACTOR
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError

TEMPLATE = "{a} is to {b} as {c} is to"
CHOICES = 4
_COLDEST = math.exp(-MAX_LOG_FACTOR)  # 1/403; lower temperatures are computed as it


class Analogies(NamedTuple):
    """Q questions as tokens: prompt and choice, `CHOICES` consecutive ones per question; the index of the correct
    choice of each, int64; and its category."""

    choices: list[Continuation]
    right: Int[np.ndarray, " Q"]
    categories: list[str]


class AnalogyQuestion(NamedTuple):
    """The prompt, `CHOICES` words to choose from, the index of the correct one, and the category."""

    prompt: str
    choices: tuple[str, ...]
    right: int
    category: str


def read_analogies(source: str) -> Rows:
    """The rows of analogies; raises `UserError` if columns are missing."""
    rows = read_source(source)
    missing = {"category", "a", "b", "c", "d"} - set(rows.first)
    if missing:
        raise UserError(f"{source}: expected analogies with columns category, a, b, c, d; missing {sorted(missing)}.")
    return rows


def analogy_questions(
    rows: Sequence[Mapping[str, str]], *, count: int | None = None, seed: int = 0
) -> list[AnalogyQuestion]:
    """`count` questions drawn without replacement, or all, in a random order.

    The wrong choices are fourth words of the same category other than the question's own four words. Questions of
    a category with too few of them are left out.
    """
    fourth: dict[str, set[str]] = {}
    for row in rows:
        fourth.setdefault(row["category"], set()).add(row["d"])
    rng = np.random.default_rng(seed)
    questions = []
    for row in (rows[int(i)] for i in rng.permutation(len(rows))[:count]):
        others = sorted(fourth[row["category"]] - {row[name] for name in "abcd"})
        if len(others) < CHOICES - 1:
            continue
        choices = [row["d"], *rng.choice(others, CHOICES - 1, replace=False)]
        shuffled = rng.permutation(CHOICES)
        words, right = tuple(str(choices[i]) for i in shuffled), int(np.argmin(shuffled))
        questions.append(AnalogyQuestion(TEMPLATE.format(**row), words, right, str(row["category"])))
    return questions


def load_analogies(source: str, lm: LanguageModel, *, count: int | None = None, seed: int = 0) -> Analogies:
    """Reads the Google analogies, or a file, directory or hub id with columns category, a, b, c, d, as tokens of `lm`.

    Raises `UserError` if columns are missing, no question is left, or one is longer than the model reads.
    """
    questions = analogy_questions(list(read_analogies(source)), count=count, seed=seed)
    if not questions:
        raise UserError(f"{source}: no question with {CHOICES} different choices.")
    choices = []
    for question in questions:
        prompt = lm.tokenizer(question.prompt)["input_ids"]
        for word in question.choices:
            whole = lm.tokenizer(f"{question.prompt} {word}")["input_ids"]
            differs = (i for i, pair in enumerate(zip(whole, prompt, strict=False)) if pair[0] != pair[1])
            common = max(next(differs, min(len(whole), len(prompt))), 1)
            choices.append(Continuation(whole[:common], whole[common:]))
    longest = max(len(context) + len(tokens) for context, tokens in choices)
    if longest > lm.config.max_positions + 1:
        raise UserError(f"an analogy has {longest} tokens, the model reads {lm.config.max_positions}.")
    right, categories = [question.right for question in questions], [question.category for question in questions]
    return Analogies(choices, np.array(right), categories)


def choice_log_probs(
    lm: LanguageModel,
    choices: Sequence[Continuation],
    temperatures: Sequence[float],
    *,
    batch_size: int = 32,
    context: RunContext | None = None,
) -> Float[np.ndarray, "K Q C"]:
    """log-probability of every choice's tokens at K myopic temperatures of each next token; float64.

    Temperature 0 and those below 1/403 are computed as 1/403, where a difference of 0.01 between two logits decides.
    """
    base = identity_head(lm)
    heads = {str(t): dataclasses.replace(base, log_factor=-math.log(max(t, _COLDEST))) for t in temperatures}
    scorer = Scorer(lm, heads, batch_size=batch_size)
    log_probs = np.zeros((len(heads), len(choices)))
    context = context or RunContext()
    bar = context.bar(scorer.stream(choices), title=context.title or "analogies", unit="choice", total=len(choices))
    for number, score in bar:
        log_probs[:, number] = score.log_probs.sum(axis=1, dtype=np.float64)
    return log_probs.reshape(len(heads), -1, CHOICES)


def accuracy(
    log_probs: Float[np.ndarray, "Q C"], right: Int[np.ndarray, " Q"], temperature: float
) -> Float[np.ndarray, " Q"]:
    """Probability of drawing the correct choice; at temperature 0 of the most likely one, ties divided equally."""
    most = log_probs.max(axis=1, keepdims=True)
    chances = np.exp(log_probs - most) if temperature else (log_probs == most).astype(float)
    chances /= chances.sum(axis=1, keepdims=True)
    return chances[np.arange(len(right)), right]


def evaluate_analogies(
    lm: LanguageModel,
    analogies: Analogies,
    temperatures: Sequence[float],
    *,
    batch_size: int = 32,
    context: RunContext | None = None,
) -> dict[str, dict[str, Any]]:
    """Accuracy at each myopic temperature: name -> accuracy, its standard error, and that of every category."""
    temperatures = list(dict.fromkeys(temperatures))
    log_probs = choice_log_probs(lm, analogies.choices, temperatures, batch_size=batch_size, context=context)
    results: dict[str, dict[str, Any]] = {}
    groups = np.array(analogies.categories)
    for temperature, scores in zip(temperatures, log_probs, strict=True):
        each = accuracy(scores, analogies.right, temperature)
        results[f"{temperature:g}"] = {
            "accuracy": float(each.mean()),
            "error": float(each.std() / np.sqrt(len(each))),
            "questions": len(each),
            "categories": {name: float(each[groups == name].mean()) for name in sorted(set(analogies.categories))},
        }
    return results
