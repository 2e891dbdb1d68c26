"""Decisions with finite-sample guarantees: when to answer, and which options to return.

Every threshold is computed from n questions with known outcomes and holds for a new question that is exchangeable with
them: drawn in the same way, in no order. Nothing else is assumed of the model or the confidence. A question is answered
where its confidence is *above* the threshold; −inf answers everything, inf nothing. A guarantee for each category is
the same function on the rows of that category (Vovk 2012, arXiv 1209.2673).

A finite threshold lies strictly between two neighbouring confidences of the questions and is the shortest such decimal
(`_between`). Printed, read back and compared with `>` or `>=`, in float64 or float32, it selects the same questions.
Confidences are compared as they are given, in float64: rounded, equal ones could fall on two sides of a threshold.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_RANKS = 20
"""Fractions answered that are tested by `selective_threshold`: 5%, 10%, ... 100%."""


def _between(value: float, limit: float) -> float:
    """The shortest decimal strictly between a score and its neighbour on either side, the nearest to the score.

    It lies strictly between them in float32 too, if there is such a number; otherwise nearer to the score, so that
    float32 rounds it to the score. Without a number between them it is the score itself.
    """
    sign = 1 if limit > value else -1
    for number, end in ((np.float32, limit), (np.float64, value + (limit - value) / 2)):
        low, high = sorted((number(value), number(end)))
        for digits in range(324):
            step = sign * 10.0**-digits
            for decimal in (round(value, digits), round(value + step, digits)):
                if low < number(decimal) < high:
                    return decimal
    return value


def _above(value: float, scores: Float[np.ndarray, " N"]) -> float:
    """A threshold that exceeds `value`, a score, and no higher one; below 1 if there is no higher one."""
    higher = scores[scores > value]
    return _between(value, float(higher.min()) if len(higher) else max(value, 1.0))


class Answering(NamedTuple):
    """What a threshold does to questions with known outcomes.

    Attributes:
        threshold: answered where the confidence is above it.
        questions: number of questions.
        answered: fraction of the questions that are answered.
        wrong: fraction of the questions that are answered, and wrongly.
        wrong_of_answered: fraction of the answers that are wrong; NaN where none is given.
    """

    threshold: float
    questions: int
    answered: float
    wrong: float
    wrong_of_answered: float


def answering(confidence: Float[np.ndarray, " N"], correct: Float[np.ndarray, " N"], threshold: float) -> Answering:
    """Counts what a threshold does."""
    taken = confidence > threshold
    wrong = float((taken & (correct < 1)).sum())
    count = len(confidence)
    of_answered = wrong / taken.sum() if taken.any() else float("nan")
    return Answering(threshold, count, float(taken.mean()), wrong / count, float(of_answered))


def risk_threshold(confidence: Float[np.ndarray, " N"], correct: Float[np.ndarray, " N"], risk: float) -> float:
    """The least threshold for which a new question is answered wrongly with probability at most `risk`.

    Conformal risk control (Angelopoulos et al. 2024, arXiv 2208.02814, theorem 1) of the loss 1[c > t and wrong], which
    falls in t and is at most 1: the least t with (#{i: c_i > t, wrong} + 1)/(n + 1) <= risk. The probability is over
    the n questions and the new one together.

    Args:
        confidence: of n answers, any finite numbers.
        correct: 1 for right, 0 for wrong.
        risk: in (0, 1).

    Returns:
        The threshold: just above the confidence of a wrong answer, −inf, or inf where n is below 1/risk − 1.

    Example:
        >>> confidence = np.arange(20) / 20
        >>> risk_threshold(confidence, (confidence > 0.4).astype(float), 0.1)
        0.36
    """
    confidence = np.asarray(confidence, np.float64)
    wrong = np.sort(confidence[np.asarray(correct) < 1])[::-1]
    allowed = int(np.floor(risk * (len(confidence) + 1) * (1 + 1e-12))) - 1  # answers that may be wrong
    if allowed < 0:
        return float("inf")
    return _above(float(wrong[allowed]), confidence) if allowed < len(wrong) else float("-inf")


def selective_threshold(
    confidence: Float[np.ndarray, " N"], correct: Float[np.ndarray, " N"], risk: float, level: float = 0.9
) -> float:
    """The threshold that answers most, for which with probability `level` at most `risk` of the answers are wrong.

    Selection with guaranteed risk (Geifman and El-Yaniv 2017, arXiv 1705.08500) by tests at 20 thresholds: the j-th
    largest confidence for j = n/20, 2n/20, ..., and −inf. Given the value t of one of them, the N_t answers with
    confidence above t are independent draws from those above t, so that with a risk of r(t) their number of wrong ones
    is binomial, ties or not. A threshold passes where at r(t) = `risk` so few would have a probability of at most
    (1 − `level`)/20: the chance that any passes whose risk is larger is below 1 − `level` (Bonferroni). Here the
    questions must be independent and drawn alike, not only exchangeable. Of few questions the tests say little: a
    threshold that answers m of them without a wrong one passes if (1 − `risk`)^m <= (1 − `level`)/20. What is returned
    lies above the t that passed and below the next confidence: between them lies a fraction of new questions of the
    order of 1/n.

    Args:
        confidence, correct, risk: see `risk_threshold`.
        level: probability over the n questions, in (0, 1).

    Returns:
        The threshold; inf where none passes.

    Example:
        >>> confidence = np.arange(400) / 400
        >>> selective_threshold(confidence, (confidence > 0.4).astype(float), 0.1)
        0.398
    """
    from scipy.stats import binom

    confidence = np.asarray(confidence, np.float64)
    order = np.sort(confidence)[::-1]
    ranks = np.unique(np.arange(1, _RANKS) * len(order) // _RANKS)
    thresholds = np.unique([-np.inf, *order[ranks]])  # from that which answers most
    taken = confidence[None, :] > thresholds[:, None]
    answered, wrong = taken.sum(axis=1), (taken & (np.asarray(correct) < 1)[None, :]).sum(axis=1)
    passes = binom.cdf(wrong, answered, risk) <= (1 - level) / _RANKS
    if not passes.any():
        return float("inf")
    threshold = float(thresholds[np.argmax(passes)])
    return _above(threshold, confidence) if threshold > -np.inf else threshold


def claim_threshold(
    confidence: Float[np.ndarray, " M"], correct: Float[np.ndarray, " M"], answer: Int[np.ndarray, " M"], risk: float
) -> float:
    """The least threshold for which the expected fraction of false claims in a new answer is at most `risk`.

    Of an answer the claims with confidence above t are kept. The fraction of false ones among them may rise and fall
    with t, so it is bounded by its largest value at any higher threshold, max over u >= t of false(u)/max(kept(u), 1),
    to which conformal risk control applies: the least t with (Σ of it over n answers + 1)/(n + 1) <= risk
    (Angelopoulos et al. 2024, arXiv 2208.02814, theorem 1; claims as in Mohri and Hashimoto 2024, arXiv 2402.10978). An
    answer of which nothing is kept has no false claim. The claims of an answer may depend on each other.

    Args:
        confidence: of M claims, finite.
        correct: 1 for true, 0 for false.
        answer: number of the answer that a claim belongs to; n answers in all.
        risk: in (0, 1).

    Returns:
        The threshold: just above the confidence of a false claim, −inf, or inf where n is below 1/risk − 1.

    Example:
        >>> confidence, answer = np.tile([0.2, 0.6, 0.9], 40), np.arange(120) // 3
        >>> claim_threshold(confidence, (confidence > 0.5).astype(float), answer, 0.1)
        0.3
    """
    confidence, false = np.asarray(confidence, np.float64), np.asarray(correct) < 1
    numbers = np.unique(answer, return_inverse=True)[1]
    order = np.lexsort((-confidence, numbers))  # each answer's claims, the most confident one first
    score, false, numbers = confidence[order], false[order], numbers[order]
    n, first = int(numbers[-1]) + 1, np.searchsorted(numbers, numbers)
    total = np.cumsum(false)
    wrong = total - np.where(first > 0, total[first - 1], 0)
    # Claims of equal confidence are kept together: what counts is the fraction after the last of them.
    last = np.append((score[1:] != score[:-1]) | (numbers[1:] != numbers[:-1]), True)
    fraction = np.where(last, wrong / (np.arange(len(score)) - first + 1), 0.0)
    worst = np.zeros(len(score))
    for begin, end in pairwise([*np.flatnonzero(np.diff(numbers, prepend=-1)), len(score)]):
        worst[begin:end] = np.maximum.accumulate(fraction[begin:end])
    rise = np.diff(worst, prepend=0.0)
    rise[first == np.arange(len(score))] = worst[first == np.arange(len(score))]
    # The sum as a function of the threshold: each rise counts where the threshold is below its confidence.
    falling = np.argsort(-score, kind="stable")
    values, start = np.unique(-score[falling], return_index=True)
    ends = np.append(start[1:], len(score)) - 1
    sums = np.cumsum(rise[falling])[ends]  # at thresholds just below values
    allowed = sums + 1 <= risk * (n + 1) * (1 + 1e-12)
    if risk * (n + 1) * (1 + 1e-12) < 1:
        return float("inf")
    return float("-inf") if allowed.all() else _above(float(-values[int(np.argmin(allowed))]), confidence)


def set_threshold(probabilities: Float[np.ndarray, "N O"], labels: Int[np.ndarray, " N"], risk: float) -> float:
    """The probability that an option of the set needs, so that the right one is in it with probability 1 − `risk`.

    Split-conformal prediction (Vovk et al. 2005; the score 1 − p of Sadinle et al. 2019, arXiv 1609.00451): the
    ⌊risk (n + 1)⌋-th least probability of a right option. The probability is over the n questions and the new one.

    Args:
        probabilities: of the options of n questions.
        labels: number of the right option.
        risk: in (0, 1).

    Returns:
        The threshold, for `option_sets`: just below the probability of a right option; −inf, which takes every option,
        where n is below 1/risk − 1.

    Example:
        >>> right = np.arange(1, 20) / 40
        >>> set_threshold(np.stack([right, 1 - right], axis=1), np.zeros(19, int), 0.1)
        0.04
    """
    probabilities = np.asarray(probabilities, np.float64)
    right = np.sort(probabilities[np.arange(len(labels)), labels])
    place = int(np.floor(risk * (len(right) + 1) * (1 + 1e-12)))
    if not place:
        return float("-inf")
    value = float(right[place - 1])
    lower = probabilities[probabilities < value]
    return _between(value, float(lower.max()) if lower.size else min(value, 0.0))


def option_sets(probabilities: Float[np.ndarray, "N O"], threshold: float) -> Bool[np.ndarray, "N O"]:
    """Which options are in the set of each question: those whose probability reaches the threshold."""
    return np.asarray(probabilities) >= threshold
