"""Mean confidence and accuracy of every subject of a benchmark."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from calibjax.eval.figures_json import wilson_interval


def subject_rows(
    subjects: Sequence[str], confidence: Float[np.ndarray, " N"], correct: Bool[np.ndarray, " N"]
) -> list[dict[str, Any]]:
    """Mean confidence and accuracy of each subject, the most overconfident first.

    Intervals of the accuracy are Wilson's, 95%, for independent questions.

    Args:
        subjects: of each question; "" for none.
        confidence: of each answer, in [0, 1].
        correct: whether each answer is correct.

    Returns:
        Rows of subject, questions, confidence, accuracy (`{"value", "low", "high"}`) and gap, confidence minus
        accuracy; empty if no question has a subject.
    """
    names, of = np.unique(np.asarray(subjects, str), return_inverse=True)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        mine = of == number
        count, right = int(mine.sum()), int(correct[mine].sum())
        accuracy = {"value": right / count, **wilson_interval(right, count)}
        mean = float(np.mean(confidence[mine], dtype=np.float64))
        gap = mean - accuracy["value"]
        rows.append({"subject": str(name), "questions": count, "confidence": mean, "accuracy": accuracy, "gap": gap})
    return sorted(rows, key=lambda row: -row["gap"]) if (names != "").any() else []
