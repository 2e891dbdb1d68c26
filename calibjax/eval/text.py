"""The likelihood and the diversity of a model's text, and accuracy on analogies."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from calibjax.data import Rows, Sequences, read_source
from calibjax.eval.tasks.scoring import Continuation, Scorer, common_length
from calibjax.heads import MAX_LOG_FACTOR, FittedHead
from calibjax.models import LanguageModel
from calibjax.models.generate import log_probs, sample_sequences
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError

TEMPLATE = "{a} is to {b} as {c} is to"
CHOICES = 4
_COLDEST = math.exp(-MAX_LOG_FACTOR)  # 1/403; lower temperatures are computed as it


def distinct_n(texts: Sequence[Sequence[Any]], n: int) -> float:
    """Distinct n-grams of all texts as a fraction of all n-grams (Li et al. 2016, arXiv 1510.03055, section 5).

    In (0, 1], or NaN if no text has n words. It falls with the amount of text: compare equal amounts.
    """
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else np.nan


def repetition(texts: Sequence[Sequence[Any]], n: int = 4) -> float:
    """Fraction of a text's n-grams that occurred earlier in it; mean over the texts of at least n words."""
    fractions = [1 - distinct_n([text], n) for text in texts if len(text) >= n]
    return float(np.mean(fractions)) if fractions else np.nan


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU-4 of every text against all others, 0 to 100 (Zhu et al. 2018, arXiv 1802.01886, section 3.2)."""
    bleu = load_bleu()
    scores = []
    for number, text in enumerate(texts):
        others = [*texts[:number], *texts[number + 1 :]]
        scores.append(bleu(text, others).score)
    return float(np.mean(scores))


def load_bleu() -> Any:
    """sacrebleu's sentence BLEU with tokenizer 13a and exponential smoothing; raises `UserError` without sacrebleu."""
    try:
        from sacrebleu import sentence_bleu  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("self_bleu: sacrebleu is not installed: pip install 'calibjax[bleu]'.") from error
    return functools.partial(sentence_bleu, smooth_method="exp")


def evaluate_text(
    lm: LanguageModel,
    scorer: LanguageModel,
    sequences: Sequences,
    *,
    temperature: float,
    prompt: int,
    batch_size: int = 16,
    with_self_bleu: bool = False,
    context: RunContext | None = None,
) -> dict[str, Any]:
    """Lets `lm` continue the first `prompt` tokens of sequences to their length, and evaluates the text.

    `scorer`, which has the same tokenizer, gives its likelihood. `temperature` 0: the most likely token.

    Returns:
        log_prob: mean log p of a token under the scorer, nats, with its standard error over texts `log_prob_error`;
        tokens; distinct_1, distinct_2, distinct_3 and repetition, of words; self_bleu or None; and the first text.
    """
    options: Any = {"batch_size": batch_size, "context": context}
    drawn = sample_sequences(lm, sequences, prompt_tokens=prompt, temperature=temperature, **options)
    sums = log_probs(scorer, drawn, batch_size=batch_size).sum(axis=1, dtype=np.float64)
    counts = drawn.where.sum(axis=1)
    mean = sums.sum() / counts.sum()
    error = np.sqrt(np.sum((sums - mean * counts) ** 2)) / counts.sum()  # of a ratio of sums, over texts
    rows = [row[where].tolist() for row, where in zip(drawn.targets, drawn.where, strict=True)]
    texts = [str(scorer.tokenizer.decode(row, skip_special_tokens=True)).strip() for row in rows]
    words = [text.split() for text in texts]
    return {
        "log_prob": float(mean),
        "log_prob_error": float(error),
        "tokens": int(counts.sum()),
        **{f"distinct_{n}": distinct_n(words, n) for n in (1, 2, 3)},
        "repetition": repetition(words),
        "self_bleu": self_bleu(texts) if with_self_bleu else None,
        "first": texts[0],
    }


class Analogies(NamedTuple):
    """Q questions: prompt and choice as tokens, `CHOICES` for each; the index of the right choice, and the category."""

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
    """The rows of a source of analogies; raises `UserError` if columns are missing."""
    rows = read_source(source)
    missing = {"category", "a", "b", "c", "d"} - set(rows.first)
    if missing:
        raise UserError(f"{source}: expected analogies with columns category, a, b, c, d; missing {sorted(missing)}.")
    return rows


def analogy_questions(
    rows: Sequence[Mapping[str, str]], *, count: int | None = None, seed: int = 0
) -> list[AnalogyQuestion]:
    """`count` questions drawn without replacement, or all, in a random order.

    Wrong choices are other fourth words of the category; questions of categories with too few are left out.
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
        raise UserError(f"{source}: expected a question with {CHOICES} different choices, found none; give more rows.")
    choices = []
    for question in questions:
        prompt = lm.tokenizer(question.prompt)["input_ids"]
        for word in question.choices:
            whole = lm.tokenizer(f"{question.prompt} {word}")["input_ids"]
            common = max(common_length(whole, prompt), 1)
            choices.append(Continuation(whole[:common], whole[common:]))
    longest = max(len(context) + len(tokens) for context, tokens in choices)
    if longest > lm.config.max_positions + 1:
        raise UserError(f"an analogy has {longest} tokens, the model reads {lm.config.max_positions}.")
    right, categories = [question.right for question in questions], [question.category for question in questions]
    return Analogies(choices, np.array(right), categories)


def choice_probability(
    scores: Float[np.ndarray, "Q C"], right: Int[np.ndarray, " Q"], temperature: float
) -> Float[np.ndarray, " Q"]:
    """Probability of drawing the correct choice; at temperature 0 of the most likely one, ties divided equally."""
    largest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - largest) if temperature else (scores == largest).astype(float)
    p /= p.sum(axis=1, keepdims=True)
    return p[np.arange(len(right)), right]


def evaluate_analogies(
    lm: LanguageModel, analogies: Analogies, temperatures: Sequence[float], *, batch_size: int = 32, context: RunContext
) -> dict[str, dict[str, Any]]:
    """Accuracy at each myopic temperature: name -> accuracy, its standard error, and the accuracy on each category.

    A question asks which of four words d completes "a is to b as c is to d"; its accuracy is the probability of d.
    Temperature 0 and those below 1/403 are computed as 1/403, where a difference of 0.01 between two logits decides.
    """
    temperatures, base = list(dict.fromkeys(temperatures)), FittedHead.constant(lm)
    heads = {f"{t:g}": dataclasses.replace(base, log_factor=-math.log(max(t, _COLDEST))) for t in temperatures}
    scorer, choices = Scorer(lm, heads, batch_size=batch_size), analogies.choices
    choice_scores = np.zeros((len(heads), len(choices)))
    bar = context.bar(scorer.stream(choices), title=context.title or "analogies", unit="choice", total=len(choices))
    for number, score in bar:
        choice_scores[:, number] = score.log_probs.sum(axis=1, dtype=np.float64)
    results: dict[str, dict[str, Any]] = {}
    groups = np.array(analogies.categories)
    by_question = choice_scores.reshape(len(heads), -1, CHOICES)
    for name, temperature, scores in zip(heads, temperatures, by_question, strict=True):
        accuracy = choice_probability(scores, analogies.right, temperature)
        by_category = {str(name): float(accuracy[groups == name].mean()) for name in np.unique(groups)}
        results[name] = {
            "accuracy": float(accuracy.mean()),
            "error": float(accuracy.std() / np.sqrt(len(accuracy))),
            "questions": len(accuracy),
            "categories": by_category,
        }
    return results
