"""Analogies as multiple choice: a is to b as c is to one of four words, chosen by likelihood."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from calibjax.data import Rows, Sequences, eval_batches, read_source
from calibjax.kernels import vocab_stats
from calibjax.models import LanguageModel
from calibjax.models.frozen import batch_hidden, freeze, vocab_sharding
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

TEMPLATE = "{a} is to {b} as {c} is to"
CHOICES = 4


class Analogies(NamedTuple):
    """Multiple-choice questions.

    Attributes:
        sequences: one for each choice, `CHOICES` consecutive ones per question; only the choice's tokens are scored.
        right: index of the correct choice of each question, int64 `[Q]`.
        categories: of each question.
    """

    sequences: Sequences
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
    """Questions in a random order; arguments as `load_analogies`'s."""
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
    """Reads the Google analogy set, or one with the same columns, as questions.

    The wrong choices are fourth words of the same category other than the question's own four words. Questions of
    a category with too few of them are left out.

    Args:
        source: file, directory or hub id with columns category, a, b, c, d.
        lm: its tokenizer and context length are used.
        count: of questions, drawn without replacement; None: all.
        seed: of questions, wrong choices and their order.

    Raises:
        UserError: columns are missing, no question is left, or one is longer than the model reads.
    """
    questions = analogy_questions(list(read_analogies(source)), count=count, seed=seed)
    if not questions:
        raise UserError(f"{source}: no question with {CHOICES} different choices.")
    texts = [(question.prompt, f"{question.prompt} {word}") for question in questions for word in question.choices]
    ids = [[lm.tokenizer(text)["input_ids"] for text in pair] for pair in texts]
    longest = max(len(whole) for _, whole in ids) - 1
    if longest > lm.config.max_positions:
        raise UserError(f"an analogy has {longest + 1} tokens, the model reads {lm.config.max_positions}.")
    tokens, targets, real = np.zeros((3, len(ids), longest), np.int32)
    where = np.zeros(tokens.shape, bool)
    for row, (prompt, whole) in enumerate(ids):
        differs = (i for i, pair in enumerate(zip(whole, prompt, strict=False)) if pair[0] != pair[1])
        common, length = next(differs, min(len(whole), len(prompt))), len(whole) - 1
        tokens[row, :length], targets[row, :length], real[row, :length] = whole[:-1], whole[1:], 1
        where[row, max(common, 1) - 1 : length] = True
    positions = np.arange(longest, dtype=np.int32) * real
    sequences = Sequences(tokens, targets, where, real, positions, np.arange(len(ids), dtype=np.int32))
    right, categories = [question.right for question in questions], [question.category for question in questions]
    return Analogies(sequences, np.array(right), categories)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _log_probs(config: Any, dtype: Any, greedy: bool, frozen: Any, batch: Any, scale: Any):
    stats = vocab_stats(
        batch_hidden(config, frozen, batch, dtype),
        frozen.unembedding.astype(dtype),
        batch["targets"],
        scale=scale,
        bias=frozen.bias,
        softcap=config.logit_softcap,
        where=batch["where"],
        statistics=("log_normalizer", "target_logit", "max_logit"),
        sharding=vocab_sharding(jax.sharding.get_abstract_mesh(), config),
    )
    each = stats.require("target_logit") - stats.require("max_logit") if greedy else stats.log_prob()
    return jnp.sum(jnp.where(batch["where"], each, 0.0), axis=1)


def choice_log_probs(
    lm: LanguageModel,
    sequences: Sequences,
    temperature: float,
    *,
    batch_size: int = 32,
    context: RunContext | None = None,
) -> Float[np.ndarray, "Q C"]:
    """log-probability of every choice's tokens at a myopic temperature of each next token; float64.

    At temperature 0 the values are Σ (z_y − max_v z_v), which orders the choices as the limit of small temperatures.
    """
    frozen, parts = freeze(lm), []
    scale = jnp.float32(1 / temperature if temperature else 1)
    context = context or RunContext()
    bar = context.bar(title=context.title or "analogies", unit="choice", total=len(sequences.tokens))
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        parts.append(to_host(_log_probs(lm.config, lm.dtype, temperature == 0, frozen, batch, scale))[:real])
        bar.update(real)
    bar.close()
    return np.concatenate(parts).astype(np.float64).reshape(-1, CHOICES)


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
    context = context or RunContext()
    results: dict[str, dict[str, Any]] = {}
    groups = np.array(analogies.categories)
    for temperature in temperatures:
        titled = context.titled(f"{context.title or 'analogies'} at {temperature:g}")
        scores = choice_log_probs(lm, analogies.sequences, temperature, batch_size=batch_size, context=titled)
        each = accuracy(scores, analogies.right, temperature)
        results[f"{temperature:g}"] = {
            "accuracy": float(each.mean()),
            "error": float(each.std() / np.sqrt(len(each))),
            "questions": len(each),
            "categories": {name: float(each[groups == name].mean()) for name in sorted(set(analogies.categories))},
        }
    return results
