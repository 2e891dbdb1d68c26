"""Decisions with finite-sample guarantees: when to answer, which claims to keep, and which options to return.

Every threshold is computed from n questions with known outcomes, finite `confidence` and `correct` 1 for right and 0
for wrong, and holds for a new question that is exchangeable with them, at a `risk` in (0, 1). Nothing else is assumed
of the model or the confidence. A question is answered where its confidence is *above* the threshold; −inf answers
everything; inf, where n is below 1/risk − 1 or too many are wrong at the highest confidence, nothing. A guarantee for
each category is the same function on the rows of that category (Vovk 2012, arXiv 1209.2673).

A finite threshold lies strictly between two neighbouring confidences and is the shortest such decimal (`_between`).
Printed, read back and compared with `>` or `>=`, in float64 or float32, it selects the same questions. Confidences are
compared as they are given, in float64: rounded, equal ones could fall on two sides of a threshold.
"""

import functools
import heapq
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from calibjax.runtime.arrays import AnyArray, as_array, label_numbers
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Fraction, check_value

TITLES = {"average": "of all questions", "answers": "of the answers", "claims": "claims of an answer"}
"""Kind of guarantee on the fraction of wrong answers -> its title in tables; for sets of options see `SET_SCORES`."""
_RANKS = 20
"""Fractions answered that are tested by `selective_threshold`: 5%, 10%, ... 100%."""
_ROUNDING = 1 + 1e-12
_LEVEL = 0.9


def decide(
    confidence: Float[AnyArray, "N *K"],
    correct: Int[AnyArray, " N"],
    risk: float = 0.05,
    level: float = _LEVEL,
    *,
    answer: AnyArray | None = None,
    category: AnyArray | None = None,
) -> dict[str, Any]:
    """Finds the confidence above which to answer, with a guarantee on the fraction of wrong answers.

    Args:
        confidence: `[N]` in [0, 1], of answers with known outcomes; or `[N, K]`, probabilities of the options of
            multiple choice; the result then has sets of options that hold the right one, by each of `SET_SCORES`.
        correct: `[N]`, 1 for right and 0 for wrong; with probabilities, the index of the right option.
        risk: largest fraction of wrong answers, in (0, 1).
        level: probability, over the draw of the data, with which the guarantee on "answers" holds, in (0, 1).
        answer: `[N]`, labels. If given, rows are factual claims and a label names the answer that a claim belongs to;
            the threshold then bounds the expected fraction of false claims in an answer.
        category: `[N]`, labels; each category of questions gets its own threshold.

    Returns:
        A JSON-able dictionary with "risk", "level", "guarantees" (kind -> what holds, in words) and "thresholds", kind
        of guarantee -> threshold and outcome; with `category` it has instead "categories", name -> such thresholds.
        Kinds are "average" (wrong answers of all questions), "answers" (of those that are given), "claims" and
        `SET_SCORES`. A threshold is None where it selects every row or none: its "selects" is then "all" or "none".

    Raises:
        UserError: shapes that do not fit, numbers outside their ranges, or outcomes that are neither right nor wrong.

    Example:
        >>> confidence = np.arange(400) / 400
        >>> result = decide(confidence, confidence > 0.4, risk=0.1)
        >>> result["thresholds"]["answers"]["threshold"]
        0.398
    """
    confidence, correct = as_array(confidence).astype(np.float64), as_array(correct)
    if confidence.ndim not in (1, 2) or correct.shape != confidence.shape[:1] or not len(correct):
        raise UserError(f"expected confidence [N] or [N, K] and correct [N], got {confidence.shape}, {correct.shape}.")
    for name, value in (("risk", risk), ("level", level)):
        check_value(name, Fraction, value)
    outside = ~((confidence >= 0) & (confidence <= 1 + 1e-5))  # rounding of a softmax
    if outside.any():
        raise UserError(f"confidence: expected numbers in [0, 1], got {confidence[outside][0]}; leave such rows out.")
    outcomes, expected = 2, "0 (wrong) or 1 (right)"
    if confidence.ndim == 2:
        outcomes = confidence.shape[1]
        expected = f"an option's index below {outcomes}"
    if not (known := np.isin(correct, np.arange(outcomes))).all():
        raise UserError(f"correct: expected {expected}, got {correct[~known][0]}. Give each attempt a row.")
    rows = {"": np.arange(len(correct))}
    if category is not None:
        numbers = label_numbers("category", category, len(correct))
        firsts = np.unique(numbers, return_index=True)[1]
        rows = {str(as_array(category)[first]): np.flatnonzero(numbers == numbers[first]) for first in firsts}
    if answer is not None and level != _LEVEL:
        raise UserError("level: the guarantee on claims is on average over tables, without it; leave it out.")
    answer = None if answer is None else label_numbers("answer", answer, len(correct))
    scope = " of its category" if category is not None else ""
    categories: dict[str, Any] = {}
    for name, at in rows.items():
        top, is_right = confidence[at], correct[at]
        if confidence.ndim == 2:
            options, labels = top, is_right.astype(int)
            top, is_right = options.max(axis=1), options.argmax(axis=1) == labels
        if answer is not None:
            categories[name] = {"claims": _claims_outcome(top, is_right, answer[at], risk)}
            continue
        categories[name] = {
            "average": threshold_outcome(top, is_right, risk_threshold(top, is_right, risk)),
            "answers": threshold_outcome(top, is_right, selective_threshold(top, is_right, risk, level)),
        }
        if confidence.ndim == 2:
            categories[name] |= {kind: _coverage(scores(options), labels, risk) for kind, scores in SET_SCORES.items()}
    thresholds = {"thresholds": categories[""]} if category is None else {"categories": categories}
    return {"risk": risk, "level": level, "guarantees": _guarantees(risk, level, scope), **thresholds}


def _guarantees(risk: float, level: float, scope: str) -> dict[str, str]:
    return {
        "average": f"a new question{scope} is answered wrongly with probability at most {risk}, on average over tables "
        "of this size; rows and new questions are exchangeable (conformal risk control)",
        "answers": f"with probability {level} over the draw of the table, at most {risk} of the answers "
        f"given to new questions{scope} are wrong; rows and new questions are independent and drawn alike (binomial "
        "tests)",
        "claims": f"of the claims kept of a new answer{scope}, the expected fraction of false ones is at most {risk}, "
        "on average over tables of this size; answers are exchangeable, their claims may depend on each other "
        "(conformal risk control)",
        "options": f"the set of a new question{scope} holds the right option with probability at least "
        f"{1 - risk:.10g}; rows and new questions are exchangeable (split-conformal). Its score is the "
        "option's probability; options_aps: 1 minus the probability of all more probable options; options_raps: the "
        "same minus 0.1 for each of them",
    }


def threshold_outcome(confidence: np.ndarray, correct: np.ndarray, threshold: float) -> dict[str, Any]:
    """Fractions answered, wrong, and wrong among the answers (None if none), where confidence exceeds a threshold."""
    taken = confidence > threshold
    wrong = (taken & (correct < 1)).sum()
    return {
        "threshold": threshold if math.isfinite(threshold) else None,
        "questions": len(confidence),
        "answered": float(taken.mean()),
        "wrong": float(wrong / len(confidence)),
        "wrong_of_answered": float(wrong / taken.sum()) if taken.any() else None,
        "selects": {math.inf: "none", -math.inf: "all"}.get(threshold, "some"),
    }


def _claims_outcome(confidence: np.ndarray, correct: np.ndarray, answers: np.ndarray, risk: float) -> dict[str, Any]:
    """The threshold of claims, and the mean over answers of the fraction of false claims above it."""
    threshold = claim_threshold(confidence, correct, answers, risk)
    taken = confidence > threshold
    numbers = np.unique(answers, return_inverse=True)[1]
    claims, false = (np.bincount(numbers, weights=x) for x in (taken, taken & (correct < 1)))
    wrong_of_answered = float((false / np.maximum(claims, 1)).mean())
    outcome = threshold_outcome(confidence, correct, threshold)
    return {**outcome, "questions": len(claims), "wrong_of_answered": wrong_of_answered}


def _coverage(scores: np.ndarray, labels: np.ndarray, risk: float) -> dict[str, Any]:
    """The threshold of sets of options, and how large the sets are: options whose score reaches it."""
    threshold = set_threshold(scores, labels, risk)
    sets = scores >= threshold
    sizes = sets.sum(axis=1)
    return {
        "threshold": threshold if math.isfinite(threshold) else None,
        "questions": len(scores),
        "right_in_set": float(sets[np.arange(len(scores)), labels].mean()),
        "mean_size": float(sizes.mean()),
        "single": float((sizes == 1).mean()),
    }


def risk_threshold(confidence: Float[np.ndarray, " N"], correct: Float[np.ndarray, " N"], risk: float) -> float:
    """The least threshold for which a new question is answered wrongly with probability at most `risk`.

    Conformal risk control (Angelopoulos et al. 2024, arXiv 2208.02814, theorem 1) of the loss 1[c > t and wrong], which
    falls in t and is at most 1: the least t with (#{i: c_i > t, wrong} + 1)/(n + 1) <= risk, just above the confidence
    of a wrong answer. The probability is over the n questions and the new one together.

    Example:
        >>> confidence = np.arange(20) / 20
        >>> risk_threshold(confidence, (confidence > 0.4).astype(float), 0.1)
        0.36
    """
    confidence = np.asarray(confidence, np.float64)
    wrong = np.sort(confidence[np.asarray(correct) < 1])[::-1]
    allowed = int(np.floor(risk * (len(confidence) + 1) * _ROUNDING)) - 1  # answers that may be wrong
    if allowed < 0:
        return math.inf
    return _above(float(wrong[allowed]), confidence) if allowed < len(wrong) else -math.inf


def selective_threshold(
    confidence: Float[np.ndarray, " N"], correct: Float[np.ndarray, " N"], risk: float, level: float = 0.9
) -> float:
    """The threshold that answers most, for which with probability `level` at most `risk` of the answers are wrong.

    Selection with guaranteed risk (Geifman and El-Yaniv 2017, arXiv 1705.08500) by tests at 20 thresholds: the j-th
    largest confidence for j = n/20, 2n/20, ..., and −inf. Given the value t of one of them, the N_t answers with
    confidence above t are independent draws from those above t, so that with a risk of r(t) their number of wrong ones
    is binomial, ties or not. A threshold passes if so few wrong answers would have a probability of at most
    (1 − `level`)/20 were its risk r(t) equal to `risk`. So the chance that a threshold with a larger risk passes is
    below 1 − `level` (Bonferroni). The questions must be independent and drawn alike, not only exchangeable. A
    threshold that answers m of them without a wrong one passes if (1 − `risk`)^m <= (1 − `level`)/20. The result lies
    just above the t that passed; inf if none passes.

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
    wrong = taken[:, np.asarray(correct) < 1].sum(axis=1)
    passes = binom.cdf(wrong, taken.sum(axis=1), risk) <= (1 - level) / _RANKS
    if not passes.any():
        return math.inf
    threshold = float(thresholds[np.argmax(passes)])
    return _above(threshold, confidence) if threshold > -np.inf else threshold


def claim_threshold(
    confidence: Float[np.ndarray, " M"], correct: Float[np.ndarray, " M"], answer: Int[np.ndarray, " M"], risk: float
) -> float:
    """The least threshold for which the expected fraction of false claims in a new answer is at most `risk`.

    `answer` numbers the n answers that the M claims belong to. An answer keeps the claims whose confidence exceeds t.
    The fraction of false ones among them may rise and fall with t, so it is bounded by its largest value at any higher
    threshold, max over u >= t of false(u)/max(kept(u), 1), to which conformal risk control applies: the least t with
    (Σ of this bound over n answers + 1)/(n + 1) <= risk, just above the confidence of a false claim (Angelopoulos et
    al. 2024, arXiv 2208.02814, theorem 1; claims as in Mohri and Hashimoto 2024, arXiv 2402.10978).

    Example:
        >>> confidence, answer = np.tile([0.2, 0.6, 0.9], 40), np.arange(120) // 3
        >>> claim_threshold(confidence, (confidence > 0.5).astype(float), answer, 0.1)
        0.3
    """
    confidence = np.asarray(confidence, np.float64)
    numbers = np.unique(answer, return_inverse=True)[1]
    order = np.lexsort((-confidence, numbers))  # each answer's claims, the most confident one first
    score = confidence[order]
    numbers = numbers[order]
    n = int(numbers[-1]) + 1
    first = np.searchsorted(numbers, numbers)  # of the claim's answer
    total = np.cumsum(np.asarray(correct)[order] < 1)
    wrong = total - np.where(first > 0, total[first - 1], 0)
    # Claims of equal confidence are kept together: what counts is the fraction after the last of them.
    changes = (score[1:] != score[:-1]) | (numbers[1:] != numbers[:-1])
    last = np.append(changes, True)
    fraction = np.where(last, wrong / (np.arange(len(score)) - first + 1), 0.0)
    worst = np.zeros(len(score))
    for begin, end in pairwise([*np.flatnonzero(np.diff(numbers, prepend=-1)), len(score)]):
        worst[begin:end] = np.maximum.accumulate(fraction[begin:end])
    rise = np.diff(worst, prepend=0.0)
    rise[first] = worst[first]
    # The sum as a function of the threshold: each rise counts where the threshold is below its confidence.
    falling = np.argsort(-score, kind="stable")
    values, start = np.unique(-score[falling], return_index=True)
    ends = np.append(start[1:], len(score)) - 1
    sums = np.cumsum(rise[falling])[ends]  # at thresholds just below values
    most = risk * (n + 1) * _ROUNDING
    if most < 1:
        return math.inf
    allowed = sums + 1 <= most
    return -math.inf if allowed.all() else _above(float(-values[np.argmin(allowed)]), confidence)


def set_threshold(probabilities: Float[np.ndarray, "N O"], labels: Int[np.ndarray, " N"], risk: float) -> float:
    """The probability that an option of the set needs, so that the right one is in it with probability 1 − `risk`.

    Split-conformal prediction (Vovk et al. 2005; the score 1 − p of Sadinle et al. 2019, arXiv 1609.00451): the
    ⌊risk (n + 1)⌋-th least probability of a right option, `labels`; −inf, which takes every option, where n is below
    1/risk − 1. The probability is over the n questions and the new one.

    Example:
        >>> right = np.arange(1, 20) / 40
        >>> set_threshold(np.stack([right, 1 - right], axis=1), np.zeros(19, int), 0.1)
        0.04
    """
    probabilities = np.asarray(probabilities, np.float64)
    right = np.sort(probabilities[np.arange(len(labels)), labels])
    place = int(np.floor(risk * (len(right) + 1) * _ROUNDING))
    if not place:
        return -math.inf
    value = float(right[place - 1])
    lower = probabilities[probabilities < value]
    return _between(value, float(lower.max()) if lower.size else min(value, 0.0))


def adaptive_scores(probabilities: Float[np.ndarray, "N O"], penalty: float = 0.0) -> Float[np.ndarray, "N O"]:
    """Scores, in place of the probabilities, whose sets are larger where a question is harder.

    1 minus the probability of all options that are more probable, without the random part: a set with the threshold t
    is the most probable options until they hold 1 − t (adaptive prediction sets, APS: Romano et al. 2020, arXiv
    2006.02544). RAPS (Angelopoulos et al. 2021, arXiv 2009.14193) subtracts `penalty` for each more probable option, so
    that sets of many options become rare. Options of equal probability have equal scores.

    Example:
        >>> adaptive_scores(np.array([[0.25, 0.5, 0.25]])), adaptive_scores(np.array([[0.25, 0.5, 0.25]]), penalty=0.25)
        (array([[0.5, 1. , 0.5]]), array([[0.25, 1.  , 0.25]]))
    """
    p = np.asarray(probabilities, np.float64)
    order = np.argsort(-p, axis=1, kind="stable")
    falling = np.take_along_axis(p, order, axis=1)
    is_lower = np.diff(falling, axis=1, prepend=np.inf) < 0
    first = np.maximum.accumulate(np.where(is_lower, np.arange(p.shape[1]), 0), axis=1)  # of the options as probable
    before = np.take_along_axis(np.cumsum(falling, axis=1) - falling, first, axis=1)
    scores = np.empty_like(p)
    np.put_along_axis(scores, order, 1 - before - penalty * first, axis=1)
    return scores


SET_SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "options": np.asarray,
    "options_aps": adaptive_scores,
    "options_raps": functools.partial(adaptive_scores, penalty=0.1),
}
"""Kind of set -> scores of the options by their probabilities: an option is in the set whose threshold it reaches."""


def allocate(confidence: Float[AnyArray, " N"], budget: int) -> Int[np.ndarray, " N"]:
    """How many samples to draw for each question, so that of most questions at least one sample is right.

    The k_i that sum to at most `budget` with the largest Σ_i 1 − (1 − q_i)^k_i (arXiv 2602.13540), where q_i is the
    confidence that a sample is right, calibrated to the capability c/n. Each sample goes where it adds most, q(1 − q)^k
    after k samples; questions of confidence 0 get none, of 1 one.

    Example:
        >>> allocate(np.array([0.9, 0.3, 0.0]), 4).tolist()
        [1, 3, 0]
    """
    q = np.asarray(confidence, np.float64)
    counts = np.zeros(len(q), np.int64)
    gains = [(-q[number], number) for number in np.flatnonzero(q > 0)]
    heapq.heapify(gains)
    for _ in range(budget if gains else 0):
        gain, number = gains[0]
        if not gain:  # every other question is certain, too
            break
        counts[number] += 1
        heapq.heapreplace(gains, (gain * (1 - q[number]), number))
    return counts


def _between(value: float, limit: float) -> float:
    """The shortest decimal strictly between a score and its neighbour on either side, the nearest to the score.

    If float32 has such a number, it lies strictly between them in float32; otherwise it is nearer to the score, so that
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
    """A threshold that exceeds `value`, a confidence, but not 1 nor any higher confidence; inf if none is higher."""
    highest = 1.0 if value < 1 else math.inf
    higher = float(scores[scores > value].min(initial=highest))
    return _between(value, higher) if higher < math.inf else math.inf
