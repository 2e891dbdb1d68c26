"""Figures of benchmarks as plain data: of each task, of each subject, and of all tasks together."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.eval.answers.confidence import WORDS
from calibjax.eval.compare import Outcome, Result, comparison_json
from calibjax.eval.figures_json import draws_of, ece_json, subject_rows, wilson_interval
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.tasks.answer_files import Answers
from calibjax.metrics import CalibrationSums, Closed

if TYPE_CHECKING:
    from calibjax.eval.tasks.evaluator import TaskEvaluator

_FURTHER = {
    "ks_error": metrics.ks_calibration_error,
    "debiased_l2": metrics.debiased_calibration_error,
    "aurc": metrics.aurc,
    "excess_aurc": metrics.excess_aurc,
}
"""Figures of a row beside those of a comparison, without intervals."""


def tasks_document(
    evaluators: Mapping[str, "TaskEvaluator"], answers: Mapping[str, Answers], names: Sequence[str]
) -> Document:
    """The contents of metrics.json of `evaluate_tasks`; `names` are those of the methods."""
    sets, read_from = {}, {}
    binning: dict[str, Any] = {}
    fitted = any(evaluator.fit for evaluator in evaluators.values())
    for name, evaluator in evaluators.items():
        options, own = evaluator.options, answers[name]
        binning = {"bins": options.bins, "closed": options.closed, "seed": evaluator.context.seed}
        methods = names[: len(own.confidence)]
        method = options.text if (own.choice < 0).all() else options.options
        read_from[name] = f"{method} ({WORDS[str(method)]})"
        if not fitted and {"temperature", "ats"} & set(names):
            read_from[name] += "; temperatures calibrate tokens"
        if method == options.text:
            read_from[name] += f"; judge: {options.judge}"
        sets[name] = {
            **answers_json(own, methods, **binning),
            "title": name,
            "confidence": read_from[name] + (f"; {evaluator.fit}" if evaluator.fit else ""),
            "shots": evaluator.shots(next(iter(evaluator.task.parts.values()))),
            "source": evaluator.task.source,
            "subjects": subjects_json(own, methods, **binning),
        }
    if len(sets) == 1:
        return {"schema": SCHEMA, "held_out": next(iter(sets.values())), "tasks": sets}
    shared = min(len(own.confidence) for own in answers.values())  # options have no further confidences
    together = answers_json(Answers.join(list(answers.values()), shared), names[:shared], **binning)
    last = ["temperature over the options of each task"] if fitted else []
    confidence = "; ".join([*dict.fromkeys(read_from.values()), *last])
    return {"schema": SCHEMA, "held_out": {**together, "title": "all tasks", "confidence": confidence}, "tasks": sets}


def answers_json(
    answers: Answers,
    names: Sequence[str],
    *,
    bins: int,
    closed: Closed,
    seed: int = 0,
) -> dict[str, Any]:
    """A set of metrics.json: methods, each with the fields of `comparison_json` and those of `_FURTHER`.

    The bootstrap resamples questions; the interval of an accuracy of right and wrong answers is Wilson's. `harness` are
    the means of lm-eval's own metrics for the first method; `cut` counts the questions whose prompt was cut at its
    start, `too_long` those left out.
    """
    results = {}
    for row, name in enumerate(names):
        choice = answers.choice[row] if (answers.choice[row] >= 0).all() else None
        log_prob = answers.log_prob[row] if not np.isnan(answers.log_prob[row]).any() else None
        results[name] = Result(Outcome(answers.confidence[row], answers.correct[row], choice, log_prob), 0.0, 0, None)
    compared = comparison_json(results, reference="temperature", bins=bins, closed=closed, seed=seed)
    methods: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        row = {key: value for key, value in compared[name].items() if key not in ("parameters", "fit_seconds")}
        pair = jnp.asarray(result.outcome.confidence), jnp.asarray(result.outcome.correct)
        correct = np.asarray(result.outcome.correct)
        if ((correct == 0) | (correct == 1)).all():
            interval = wilson_interval(int(correct.sum()), len(correct))
        else:
            sums = metrics.pooled_sums(*pair, bins=bins, closed=closed, seed=seed)
            low, high = metrics.percentile_interval(draws_of(sums, seed)["accuracy"])
            interval = {"low": low, "high": high}
        values = {key: float(metric(*pair)) for key, metric in _FURTHER.items()}
        further = {key: value if np.isfinite(value) else None for key, value in values.items()}
        methods[name] = {**row, **further, "accuracy_interval": interval}
    return {
        "tokens": answers.confidence.shape[1],
        "unit": "questions",
        "clusters": "questions",
        "reference": "temperature",
        "methods": methods,
        "failed": {},
        "left_out": {},
        "harness": {name: float(values.mean()) for name, values in answers.harness.items()},
        "cut": int((answers.cut > 0).sum()),
        "too_long": answers.too_long,
    }


def subjects_json(
    answers: Answers, names: Sequence[str], *, bins: int, closed: Closed, seed: int = 0
) -> list[dict[str, Any]]:
    """`subject_rows` of the first method, each with `methods`: confidence, and ECE with its interval, of every method.

    Empty if all questions are of one subject.
    """
    if len(set(answers.subject)) < 2:
        return []
    rows: list[dict[str, Any]] = []
    binning: dict[str, Any] = {"bins": bins, "closed": closed}
    pairs = zip(answers.confidence[..., None], answers.correct[..., None], strict=True)
    # One group per question, computed once: a subject is a slice.
    groups = [metrics.calibration_sums(*pair, **binning) for pair in pairs]
    each = [CalibrationSums(*(np.asarray(field, np.float64) for field in sums)) for sums in groups]
    for row in subject_rows(answers.subject.tolist(), answers.confidence[0], answers.correct[0] > 0):
        mine = answers.subject == row["subject"]
        methods = {}
        for name, sums in zip(names, each, strict=True):
            own = CalibrationSums(*(field[mine] for field in sums))
            ece = metrics.error_interval(own, seed=seed)
            methods[name] = {"confidence": metrics.summarise(own)["confidence"], **ece_json(ece)}
        rows.append({**row, "methods": methods})
    return rows
