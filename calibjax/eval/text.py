"""The likelihood and the diversity of a model's text, which a temperature trades for each other."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibjax.data import Sequences
from calibjax.models import LanguageModel
from calibjax.models.generate import log_probs, sample_sequences
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError


def distinct_n(texts: Sequence[Sequence[Any]], n: int) -> float:
    """Distinct n-grams of all texts as a fraction of all n-grams (Li et al. 2016, arXiv 1510.03055, section 5).

    In (0, 1], or NaN if no text has n words. It falls with the amount of text: compare equal amounts.

    Example:
        >>> distinct_n([["a", "b", "a"], ["a", "b"]], 2)
        0.6666666666666666
    """
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def repetition(texts: Sequence[Sequence[Any]], n: int = 4) -> float:
    """Fraction of a text's n-grams that occurred earlier in it; mean over the texts of at least n words.

    Example:
        >>> repetition([["a", "a", "a", "a"]], 1)
        0.75
    """
    fractions = [1 - distinct_n([text], n) for text in texts if len(text) >= n]
    return float(np.mean(fractions)) if fractions else float("nan")


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU-4 of every text against all others, 0 to 100 (Zhu et al. 2018, arXiv 1802.01886, section 3.2)."""
    bleu = load_bleu()
    scores = [bleu(text, [*texts[:i], *texts[i + 1 :]]).score for i, text in enumerate(texts)]
    return float(np.mean(scores))


def load_bleu() -> Any:
    """sacrebleu's sentence BLEU with tokenizer 13a and exponential smoothing; raises `UserError` without sacrebleu."""
    try:
        from sacrebleu import sentence_bleu  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("--self-bleu needs sacrebleu: pip install 'calibjax[bleu]'.") from error
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

    `scorer`, which has the same tokenizer, gives its likelihood. `temperature` is that of every next token; 0: the most
    likely one.

    Returns:
        log_prob: mean log p of a token under the scorer, nats, with its standard error over texts `log_prob_error`;
        tokens; distinct_1, distinct_2, distinct_3 and repetition, of words; self_bleu or None; and the first text.
    """
    drawn = sample_sequences(
        lm, sequences, prompt=prompt, temperature=temperature, batch_size=batch_size, context=context
    )
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
