"""Figures of a benchmark as plain data: over all questions, and per subject."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.eval.compare.contenders import Outcome, Result
from calibjax.eval.compare.results import comparison_json
from calibjax.eval.figures_json import ece_json, wilson_interval
from calibjax.eval.tasks.evaluate import Answers
from calibjax.eval.tasks.subjects import subject_rows
from calibjax.metrics import CalibrationSums, Closed

_FURTHER = {
    "ks_error": metrics.ks_calibration_error,
    "debiased_l2": metrics.debiased_calibration_error,
    "aurc": metrics.aurc,
    "excess_aurc": metrics.excess_aurc,
}
"""Figures of a row beside those of a comparison, without intervals."""


def answers_json(
    answers: Answers,
    names: Sequence[str],
    *,
    bins: int,
    closed: Closed,
    resamples: int = 1000,
    seed: int = 0,
    reference: str = "temperature",
) -> dict[str, Any]:
    """A set of metrics.json: methods, each with the fields of `comparison_json` and those of `_FURTHER`.

    The bootstrap resamples questions; the interval of an accuracy of right and wrong answers is Wilson's. `harness` are
    the means of lm-eval's own metrics for the first method; `cut` counts the questions whose prompt was cut at its
    start, `too_long` those left out. Each method is compared with the `reference`.
    """
    results = {}
    for row, name in enumerate(names):
        choice = answers.choice[row] if (answers.choice[row] >= 0).all() else None
        log_prob = answers.log_prob[row] if not np.isnan(answers.log_prob[row]).any() else None
        results[name] = Result(Outcome(answers.confidence[row], answers.correct[row], choice, log_prob), 0.0, 0, None)
    options = {"bins": bins, "closed": closed, "resamples": resamples, "seed": seed}
    compared = comparison_json(results, reference=reference, **options)
    methods: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        row = {key: value for key, value in compared[name].items() if key not in ("parameters", "fit_seconds")}
        pair = jnp.asarray(result.outcome.confidence), jnp.asarray(result.outcome.correct)
        correct = np.asarray(result.outcome.correct)
        if ((correct == 0) | (correct == 1)).all():
            interval = wilson_interval(int(correct.sum()), len(correct))
        else:
            sums = metrics.pooled_sums(*pair, bins=bins, closed=closed, seed=seed)
            low, high = metrics.bootstrap_interval(sums, _accuracy, resamples=resamples, seed=seed)
            interval = {"low": low, "high": high}
        values = {key: float(metric(*pair)) for key, metric in _FURTHER.items()}
        further = {key: value if np.isfinite(value) else None for key, value in values.items()}
        methods[name] = {**row, **further, "accuracy_interval": interval}
    return {
        "tokens": answers.confidence.shape[1],
        "unit": "questions",
        "clusters": "questions",
        "reference": reference,
        "methods": methods,
        "failed": {},
        "left_out": {},
        "harness": {name: float(values.mean()) for name, values in answers.harness.items()},
        "cut": int((answers.cut > 0).sum()),
        "too_long": answers.too_long,
    }


def subjects_json(
    answers: Answers, names: Sequence[str], *, bins: int, closed: Closed, resamples: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """`subject_rows` of the first method, each with `methods`: confidence, and ECE with its interval, of every method.

    Empty if all questions are of one subject.
    """
    if len(set(answers.subject)) < 2:
        return []
    rows: list[dict[str, Any]] = []
    of_subjects = subject_rows(answers.subject.tolist(), answers.confidence[0], answers.correct[0] > 0)
    each = [  # one group per question, computed once: a subject is a slice
        CalibrationSums(
            *(
                np.asarray(field, np.float64)
                for field in metrics.calibration_sums(confidence[:, None], correct[:, None], bins=bins, closed=closed)
            )
        )
        for confidence, correct in zip(answers.confidence, answers.correct, strict=True)
    ]
    for subject in of_subjects:
        mine = answers.subject == subject["subject"]
        row: dict[str, Any] = {**subject, "methods": {}}
        rows.append(row)
        for name, sums in zip(names, each, strict=True):
            own = CalibrationSums(*(field[mine] for field in sums))
            ece = metrics.error_interval(own, resamples=resamples, seed=seed)
            of_method = {"confidence": metrics.summarise(own)["confidence"], **ece_json(ece)}
            row["methods"][name] = of_method
    return rows


def _accuracy(sums: CalibrationSums) -> Any:
    count, _, correct, _ = sums.whole()
    return correct / count
