"""Accuracy and calibration of a model's answers on the benchmarks of lm-eval, and their figures as plain data."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.eval.answers.confidence import DESCRIPTIONS
from calibjax.eval.answers.registry import CONFIDENCES
from calibjax.eval.compare import Outcome, Result, comparison_json
from calibjax.eval.figures_json import draws_of, ece_json, finite_or_none, subject_rows, wilson_json
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.tasks import answer_files
from calibjax.eval.tasks.answer_files import COLUMNS, Answers, OptionTemperature, load_or_compute, read_fit
from calibjax.eval.tasks.choices import MultipleChoice
from calibjax.eval.tasks.local_data import BenchmarkTask, assets_folder, check_tasks, load_tasks
from calibjax.eval.tasks.options import TasksOptions
from calibjax.eval.tasks.questions import BATCH, Batch, TaskQuestions
from calibjax.eval.tasks.written import WrittenAnswers
from calibjax.heads import FittedHead
from calibjax.metrics import CalibrationSums, Closed
from calibjax.models import LanguageModel
from calibjax.runtime.checksums import json_digest
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first, on_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import check_options, options_identity

if TYPE_CHECKING:
    from calibjax.eval.tasks.harness import Chat


_FURTHER = {
    "ks_error": metrics.ks_calibration_error,
    "debiased_l2": metrics.debiased_calibration_error,
    "aurc": metrics.aurc,
    "excess_aurc": metrics.excess_aurc,
}
"""Figures of a row that a comparison does not have, without intervals."""


def evaluate_tasks(
    lm: LanguageModel,
    tasks: Sequence[str] | Mapping[str, BenchmarkTask],
    heads: FittedHead | Mapping[str, FittedHead] | None = None,
    options: TasksOptions = TasksOptions(),
    context: RunContext | None = None,
    *,
    chat: "Chat | None" = None,
    probes: Callable[[WrittenAnswers], Mapping[str, Any]] | None = None,
) -> Document:
    """Accuracy and calibration on benchmarks, through lm-eval: of the base model, and with heads.

    Args:
        lm: the frozen model, on `context.mesh`.
        tasks: names of lm-eval's tasks; or what `load_tasks` returned.
        heads: name -> head, fitted on `lm`; one head is called "head".
        context: with a directory, a killed run resumes at its task or subject, and answers/ has tables of answers.
        chat: prompts are messages in the model's chat template (`calibjax.eval.tasks.harness.Chat`).
        probes: fits the probes of a task; needed for confidences named probe_*.

    Returns:
        The contents of metrics.json: "held_out", all tasks together, and "tasks", each by its name.

    Raises:
        UserError: lm-eval is not installed, no such task, options that do not fit, or a directory of another run.

    Example:
        >>> import calibjax
        >>> lm = calibjax.load_model("path/to/model")  # doctest: +SKIP
        >>> calibjax.evaluate_tasks(lm, ["arc_easy"])["held_out"]["methods"]["uncalibrated"]["ece"]  # doctest: +SKIP
        {'value': ...}
    """
    context = context or RunContext()
    check_options(options)
    heads = {"head": heads} if isinstance(heads, FittedHead) else dict(heads or {})
    options.check_methods(bool(heads))
    reserved = {"uncalibrated", *COLUMNS, *options.further_confidences, *(["temperature"] if options.fit else [])}
    if taken := reserved & heads.keys():
        raise UserError(f"heads: {', '.join(sorted(taken))}: the name of a row or column beside them; choose another.")
    options = options.resolved()
    if not isinstance(tasks, Mapping):
        names, assets = tuple(tasks), assets_folder(options.assets)
        manager = together(functools.partial(check_tasks, names, assets))
        tasks = together(functools.partial(load_tasks, names, manager, assets, context.log))
    from calibjax.eval.tasks.harness import HarnessLM  # needs lm-eval, which `check_tasks` has found

    compared = {"uncalibrated": FittedHead.constant(lm)}
    if options.fit:
        compared["temperature"] = FittedHead.constant(lm)  # a factor of the options, not of the tokens
    heads = {**compared, **heads}
    if context.directory is not None:
        settings = {**options_identity(options), "seed": context.seed, "chat": None if chat is None else list(chat)}
        for name, task in tasks.items():
            documents = [str(document) for part in task.parts.values() for document in part.eval_docs]
            settings[f"questions of {name}"] = json_digest(documents)
        answer_files.claim_answers(context.directory, lm, heads, settings)
    model = HarnessLM(
        lm, heads, batch_size=options.batch_size, max_length=options.max_length, seed=context.seed, chat=chat
    )
    questions = {name: TaskQuestions(model, name, task, options, context) for name, task in tasks.items()}
    for each in questions.values():
        each.check()
    evaluators = {name: TaskEvaluator(each) for name, each in questions.items()}
    for name, evaluator in evaluators.items():
        if options.fit:
            file = None if context.directory is None else context.directory / "answers" / f"{name}.fit.json"
            choice = evaluator.multiple_choice
            choice.temperature = load_or_compute(file, read_fit, choice.fit_temperature, OptionTemperature._asdict)
            context.log(f"task {name}: {choice.temperature}")
        if evaluator.questions.probe_names:
            if probes is None:
                raise UserError("probes: expected a function that fits them, as in calibjax eval tasks, got none.")
            evaluator.written.probes = probes(evaluator.written)
    total = sum(len(each.numbers(part)) for each in questions.values() for part in each.task.parts.values())
    bar = context.bar(title="benchmarks", unit="question", total=total)
    answers = {name: _answers(evaluator, bar) for name, evaluator in evaluators.items()}
    bar.close()
    empty = [name for name, joined in answers.items() if not joined.confidence.shape[1]]
    if empty:
        raise UserError(f"tasks: {', '.join(empty)}: each question has an option longer than max_length; leave it out.")
    names = [*heads, *options.further_confidences]
    if context.directory is not None and is_first():
        for name, joined in answers.items():
            table = context.directory / "answers" / f"{name}.jsonl"
            answer_files.write_table(table, names[: len(joined.confidence)], joined)
    return tasks_document(evaluators, answers, names)


class TaskEvaluator:
    """Evaluates a model on one task. The harness's own metrics are of the first head of the model."""

    def __init__(self, questions: TaskQuestions):
        self.questions = questions
        self.multiple_choice, self.written = MultipleChoice(questions), WrittenAnswers(questions)

    def groups(self) -> list[list[str]]:
        """The parts of the task. Small ones are scored together: a batch has one shape however few its questions."""
        # Whatever is answered already: in other batches, scores round differently.
        groups: list[list[str]] = []
        small, size = [], BATCH
        for part, task in self.questions.task.parts.items():
            count = len(self.questions.numbers(task))
            if task.OUTPUT_TYPE != "multiple_choice" or count > BATCH:
                groups.append([part])
                continue
            if size + count > BATCH:
                small, size = [], 0
                groups.append(small)
            small.append(part)
            size += count
        return groups

    def answers(self, group: Sequence[str], tick: Callable[[int], Any]) -> Iterator[tuple[str, Answers]]:
        """Asks the questions of one of the `groups` and yields the answers to each part; `tick(n)`: n more are done."""

        def choose(batches: Sequence[Batch]) -> list[Answers]:
            tick(sum(len(batch.numbers) - len(batch.documents) for batch in batches))  # too long to be asked
            return [self.multiple_choice.answers(*scored) for scored in self.multiple_choice.score(batches, tick)]

        def write(batch: Batch) -> Answers:
            result = self.written.answers(batch)
            tick(len(batch.numbers))
            return result

        tasks = {part: self.questions.task.parts[part] for part in group}
        batches = (
            batch
            for part, task in tasks.items()
            for batch in self.questions.batches(part, task.eval_docs, self.questions.numbers(task))
        )
        if len(group) > 1:
            yield from zip(group, choose([*batches]), strict=True)
        elif tasks[group[0]].OUTPUT_TYPE == "multiple_choice":
            yield group[0], Answers.join([choose([batch])[0] for batch in batches])
        else:
            yield group[0], Answers.join([write(batch) for batch in batches])


def _answers(evaluator: TaskEvaluator, bar: Any) -> Answers:
    """The answers to a task; those to each part are saved, and read where those to all of its group are."""
    questions = evaluator.questions
    directory, parts = questions.context.directory, questions.task.parts
    files = {}
    if directory is not None:
        files = {part: directory / "answers" / f"{questions.name}-{part}.npz" for part in parts}
    answers = {}
    for group in evaluator.groups():
        if files and all(on_first(files[part].is_file) for part in group):
            answers |= {part: answer_files.read_answers(files[part]) for part in group}
            bar.update(sum(len(questions.numbers(parts[part])) for part in group))
            continue
        for part, part_answers in evaluator.answers(group, tick=bar.update):
            bar.set_postfix_str(part)
            if files and is_first():
                answer_files.write_answers(files[part], part_answers)
            answers[part] = part_answers
    return Answers.join([answers[part] for part in parts])


def tasks_document(
    evaluators: Mapping[str, TaskEvaluator], answers: Mapping[str, Answers], names: Sequence[str]
) -> Document:
    """The contents of metrics.json of `evaluate_tasks`; `names` are the names of the methods."""
    first = next(iter(evaluators.values())).questions
    options = first.options
    binning: dict[str, Any] = {"bins": options.bins, "closed": options.closed, "seed": first.context.seed}
    is_fitted = any(evaluator.multiple_choice.temperature for evaluator in evaluators.values())
    scaled_tokens = not is_fitted and bool({*names} - {"uncalibrated", *options.further_confidences})
    sets: dict[str, dict[str, Any]] = {}
    sources: dict[str, None] = {}
    for name, evaluator in evaluators.items():
        questions, task_answers = evaluator.questions, answers[name]
        methods = names[: len(task_answers.confidence)]
        are_texts = bool((task_answers.choice < 0).all())
        source = _confidence_source(options, are_texts=are_texts, scaled_tokens=scaled_tokens)
        sources[source] = None
        temperature = evaluator.multiple_choice.temperature
        sets[name] = {
            **answers_json(task_answers, methods, **binning),
            "title": name,
            "confidence": f"{source}; {temperature}" if temperature else source,
            "shots": questions.shots(next(iter(questions.task.parts.values()))),
            "source": questions.task.source,
            "subjects": subjects_json(task_answers, methods, **binning),
        }
    held_out = next(iter(sets.values()))
    if len(sets) > 1:
        common = min(len(part.confidence) for part in answers.values())  # options have no further ones
        held_out = answers_json(Answers.join(list(answers.values()), common), names[:common], **binning)
        last = ["temperature over the options of each task"] if is_fitted else []
        held_out |= {"title": "all tasks", "confidence": "; ".join([*sources, *last])}
    return {"schema": SCHEMA, "held_out": held_out, "tasks": sets}


def _confidence_source(options: TasksOptions, *, are_texts: bool, scaled_tokens: bool) -> str:
    method = options.text_confidence if are_texts else options.option_confidence
    parts = [f"{method} ({DESCRIPTIONS[str(method)]})"]
    if scaled_tokens:
        parts.append("temperatures calibrate tokens")
    if are_texts:
        parts.append(f"judge: {options.judge}")
        if options.further_confidences and options.closed == "none":
            parts.append("bins of further confidences are closed on the right")
    return "; ".join(parts)


def answers_json(answers: Answers, names: Sequence[str], *, bins: int, closed: Closed, seed: int = 0) -> dict[str, Any]:
    """A set of metrics.json: methods, each with the fields of `comparison_json` and of `_FURTHER`.

    The interval of an accuracy of right and wrong answers is Wilson's. `harness`: lm-eval's metrics, first method.
    """
    results = {}
    for row, name in enumerate(names):
        choice = answers.choice[row] if (answers.choice[row] >= 0).all() else None
        log_prob = answers.log_prob[row] if not np.isnan(answers.log_prob[row]).any() else None
        results[name] = Result(Outcome(answers.confidence[row], answers.correct[row], choice, log_prob), 0.0, 0, None)
    compare = functools.partial(comparison_json, results, reference="temperature", bins=bins, seed=seed)
    conventions: set[Closed] = {_closed_for(name, closed) for name in names}
    compared = {each: compare(closed=each) for each in conventions}
    methods: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        row = dict(compared[_closed_for(name, closed)][name])
        del row["parameters"], row["fit_seconds"]
        pair = jnp.asarray(result.outcome.confidence), jnp.asarray(result.outcome.correct)
        correct = result.outcome.correct
        if ((correct == 0) | (correct == 1)).all():
            interval = wilson_json(int(correct.sum()), len(correct))
        else:
            sums = metrics.pooled_sums(*pair, bins=bins, closed=closed, seed=seed)
            low, high = metrics.percentile_interval(draws_of(sums, seed)["accuracy"])
            interval = {"low": low, "high": high}
        further = {key: finite_or_none(float(metric(*pair))) for key, metric in _FURTHER.items()}
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


def _closed_for(name: str, closed: Closed) -> Closed:
    """The edges of a method's bins: open ones would leave out fractions of samples, which lie on edges."""
    return "right" if closed == "none" and name in CONFIDENCES else closed


def subjects_json(
    answers: Answers, names: Sequence[str], *, bins: int, closed: Closed, seed: int = 0
) -> list[dict[str, Any]]:
    """`subject_rows` of the first method, each with confidence and ECE of every method; empty for a single subject."""
    if len(set(answers.subject)) < 2:
        return []
    rows: list[dict[str, Any]] = []
    sums_by_method = []
    for name, *pair in zip(names, answers.confidence[..., None], answers.correct[..., None], strict=True):
        # One group per question, computed once: a subject is a slice.
        sums = metrics.calibration_sums(*pair, bins=bins, closed=_closed_for(name, closed))
        sums_by_method.append(CalibrationSums(*(np.asarray(field, np.float64) for field in sums)))
    for row in subject_rows(answers.subject.tolist(), answers.confidence[0], answers.correct[0]):
        in_subject = answers.subject == row["subject"]
        methods = {}
        for name, sums in zip(names, sums_by_method, strict=True):
            subject_sums = CalibrationSums(*(field[in_subject] for field in sums))
            ece = metrics.error_interval(subject_sums, seed=seed)
            methods[name] = {"confidence": metrics.summarise(subject_sums)["confidence"], **ece_json(ece)}
        rows.append({**row, "methods": methods})
    return rows
