"""Decisions on a table of answers with known outcomes: thresholds, what they guarantee, and what they do to it."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from calibjax.eval.answers.decisions import (
    answering,
    claim_threshold,
    option_sets,
    risk_threshold,
    selective_threshold,
    set_threshold,
)
from calibjax.runtime.arrays import AnyArray
from calibjax.runtime.errors import UserError

AVERAGE, OF_ANSWERS, OF_CLAIMS = "of all questions", "of the answers", "claims of an answer"


def decide(
    confidence: Float[AnyArray, "N *K"],
    correct: Int[AnyArray, " N"],
    risk: float = 0.05,
    level: float = 0.9,
    *,
    answer: AnyArray | None = None,
    category: AnyArray | None = None,
) -> dict[str, Any]:
    """Finds the confidence above which to answer, with a guarantee on the fraction of wrong answers.

    Args:
        confidence: `[N]`, of answers with known outcomes; or probabilities `[N, K]` of the options of multiple choice,
            for which sets of options that hold the right one are found too.
        correct: `[N]`: 1 for right and 0 for wrong; of probabilities the number of the right option.
        risk: largest fraction of wrong answers, in (0, 1).
        level: probability, over the draw of the data, of the guarantee on the answers that are given.
        answer: `[N]`: the rows are factual claims, and these the answers that they belong to: the threshold limits the
            expected fraction of false claims in an answer.
        category: `[N]`, kinds of questions: a threshold for each.

    Returns:
        JSON-able: "risk", "level", "guarantees" in words, and "categories": name ("" without categories) -> kind of
        guarantee -> threshold (None where every or no question is answered, as "answers" says) and what it does to
        these rows.

    Raises:
        UserError: shapes that do not fit, or outcomes that are neither right nor wrong.

    Example:
        >>> confidence = np.arange(400) / 400
        >>> found = decide(confidence, confidence > 0.4, risk=0.1)
        >>> found["categories"][""]["of the answers"]["threshold"]
        0.398
    """
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct)
    if confidence.ndim not in (1, 2) or correct.shape != confidence.shape[:1] or not len(correct):
        raise UserError(f"expected confidence [N] or [N, K] and correct [N], got {confidence.shape}, {correct.shape}.")
    if confidence.ndim == 1 and not np.isin(correct, (0, 1)).all():
        raise UserError("correct: expected 0 or 1, got fractions: list each attempt in a row.")
    rows = {"": np.arange(len(correct))}
    if category is not None:
        names, of = np.unique(category, return_inverse=True)
        rows = {str(name): np.flatnonzero(of == number) for number, name in enumerate(names)}
    return {
        "risk": risk,
        "level": level,
        "guarantees": _guarantees(risk, level, by_category=category is not None),
        "categories": {
            name: _decided(confidence[at], correct[at], risk, level, None if answer is None else np.asarray(answer)[at])
            for name, at in rows.items()
        },
    }


def _decided(
    confidence: np.ndarray, correct: np.ndarray, risk: float, level: float, answer: np.ndarray | None
) -> dict[str, Any]:
    """The decisions for the rows of one category."""
    p = None if confidence.ndim == 1 else confidence
    labels = correct
    if p is not None:
        confidence, correct = p.max(axis=1), (p.argmax(axis=1) == labels).astype(np.float64)
    if answer is not None:
        return {OF_CLAIMS: _kept(confidence, correct, answer, risk)}
    thresholds = {
        AVERAGE: risk_threshold(confidence, correct, risk),
        OF_ANSWERS: selective_threshold(confidence, correct, risk, level),
    }
    found: dict[str, Any] = {}
    for name, threshold in thresholds.items():
        row = answering(confidence, correct, threshold)._asdict()
        found[name] = {**row, "threshold": _finite(threshold), "answers": _answers(threshold)}
        found[name]["wrong_of_answered"] = _finite(row["wrong_of_answered"])
    if p is not None:
        found["options"] = _options(p, labels, risk)
    return found


def _kept(confidence: np.ndarray, correct: np.ndarray, answers: np.ndarray, risk: float) -> dict[str, Any]:
    """The threshold of claims: what it keeps, and the mean over answers of the fraction of false claims kept."""
    threshold = claim_threshold(confidence, correct, answers, risk)
    taken = confidence > threshold
    numbers = np.unique(answers, return_inverse=True)[1]
    kept, false = (np.bincount(numbers, weights=x) for x in (taken, taken & (correct < 1)))
    return {
        "questions": len(kept),
        "answered": float(taken.mean()),
        "wrong": float((taken & (correct < 1)).mean()),
        "wrong_of_answered": float((false / np.maximum(kept, 1)).mean()),
        "threshold": _finite(threshold),
        "answers": _answers(threshold),
    }


def _options(p: np.ndarray, labels: np.ndarray, risk: float) -> dict[str, Any]:
    """The sets of options: their threshold, and how large they are on the table."""
    threshold = set_threshold(p, labels, risk)
    sets = option_sets(p, threshold)
    sizes = sets.sum(axis=1)
    return {
        "threshold": _finite(threshold),
        "questions": len(p),
        "right_in_set": float(sets[np.arange(len(p)), labels].mean()),
        "mean_size": float(sizes.mean()),
        "single": float((sizes == 1).mean()),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _answers(threshold: float) -> str:
    return "some" if math.isfinite(threshold) else "none" if threshold > 0 else "all"


def _guarantees(risk: float, level: float, *, by_category: bool) -> dict[str, str]:
    each = " of its category" if by_category else ""
    return {
        AVERAGE: f"a new question{each} is answered wrongly with probability at most {risk}, on average over tables of "
        "this size; rows and new questions are exchangeable (conformal risk control)",
        OF_ANSWERS: f"with probability {level} over the draw of the table, at most {risk} of the answers "
        f"given to new questions{each} are wrong; rows and new questions are independent and drawn alike (binomial "
        "tests)",
        OF_CLAIMS: f"of the claims kept of a new answer{each}, the expected fraction of false ones is at most {risk}, "
        "on average over tables of this size; answers are exchangeable, their claims may depend on each other "
        "(conformal risk control)",
        "options": f"the set of a new question{each} holds the right option with probability at least "
        f"{1 - risk:.10g}; rows and new questions are exchangeable (split-conformal)",
    }
