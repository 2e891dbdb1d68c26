"""Accuracy and calibration of a model's answers on the benchmarks of lm-eval, from top to bottom."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibjax.eval.report.schema import Document
from calibjax.eval.tasks.answer_files import (
    Answers,
    claim_answers,
    read_answers,
    read_fit,
    resumed,
    write_answers,
    write_fit,
    write_table,
)
from calibjax.eval.tasks.evaluator import TaskEvaluator
from calibjax.eval.tasks.local_data import BenchmarkTask, assets_folder, check_tasks, load_tasks
from calibjax.eval.tasks.options import TasksOptions
from calibjax.eval.tasks.results import tasks_document
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first, on_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import check_options

if TYPE_CHECKING:
    from calibjax.eval.tasks.harness import Chat


def evaluate_tasks(
    lm: LanguageModel,
    tasks: Sequence[str] | Mapping[str, BenchmarkTask],
    heads: FittedHead | Mapping[str, FittedHead] | None = None,
    options: TasksOptions | None = None,
    context: RunContext | None = None,
    *,
    chat: "Chat | None" = None,
    probes: Callable[[TaskEvaluator], Mapping[str, Any]] | None = None,
) -> Document:
    """Accuracy and calibration on benchmarks, through lm-eval: of the base model, and with heads.

    Args:
        lm: the frozen model, on `context.mesh`.
        tasks: names of lm-eval's tasks; or what `load_tasks` returned.
        heads: name -> head, fitted on `lm`; one head is called "ats".
        options: see `TasksOptions`.
        context: seed, devices, log and progress. With a directory, a killed run resumes at the task (or subject) it was
            killed in, and tables of answers are left in answers/.
        chat: prompts are messages in the model's chat template (`calibjax.eval.tasks.harness.Chat`).
        probes: fits the probes of a task; needed for confidences named probe_*.

    Returns:
        The contents of metrics.json: "held_out", all tasks together, and "tasks", each by its name.

    Raises:
        UserError: lm-eval is not installed, no such task, or options that do not fit.

    Example:
        >>> import calibjax
        >>> lm = calibjax.load_model("path/to/model")  # doctest: +SKIP
        >>> calibjax.evaluate_tasks(lm, ["arc_easy"])["held_out"]["methods"]["uncalibrated"]["ece"]  # doctest: +SKIP
        {'value': ...}
    """
    try:
        from calibjax.eval.tasks.harness import HarnessLM
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'calibjax[lm-eval]'.") from error
    context, options = context or RunContext(), options or TasksOptions()
    check_options(options)
    heads = {"ats": heads} if isinstance(heads, FittedHead) else dict(heads or {})
    options.check_methods(bool(heads))
    options = options.resolved()
    if not isinstance(tasks, Mapping):
        names, assets = tuple(tasks), assets_folder(options.assets)
        manager = together(functools.partial(check_tasks, names, assets))
        tasks = together(functools.partial(load_tasks, names, manager, assets, context.log))
    scaled = {"temperature": identity_head(lm)} if options.fit else {}  # a factor of the options, not of the tokens
    heads = {"uncalibrated": identity_head(lm), **scaled, **heads}
    if context.directory is not None:
        claim_answers(context.directory, lm, heads)
    model = HarnessLM(
        lm, heads, batch_size=options.batch_size, max_length=options.max_length, seed=context.seed, chat=chat
    )
    evaluators = {name: TaskEvaluator(model, name, task, options, context) for name, task in tasks.items()}
    for evaluator in evaluators.values():
        evaluator.check()
    for name, evaluator in evaluators.items():
        if options.fit:
            file = None if context.directory is None else context.directory / "answers" / f"{name}.fit.json"
            evaluator.fit = resumed(file, read_fit, evaluator.fit_temperature, write_fit)
            context.log(f"task {name}: {evaluator.fit}")
        if evaluator.probe_names:
            if probes is None:
                raise UserError("confidence: probes are fitted on questions: run calibjax eval tasks, or give probes.")
            evaluator.probes = probes(evaluator)
    total = sum(len(e.question_numbers(part)) for e in evaluators.values() for part in e.task.parts.values())
    bar = context.bar(title="benchmarks", unit="question", total=total)
    answers = {name: _answers(evaluator, bar) for name, evaluator in evaluators.items()}
    bar.close()
    empty = [name for name, joined in answers.items() if not joined.confidence.shape[1]]
    if empty:
        raise UserError(
            f"--tasks {', '.join(empty)}: every question has an option that is longer than the model reads."
        )
    names = [*heads, *options.confidence]
    if context.directory is not None and is_first():
        for name, joined in answers.items():
            write_table(context.directory / "answers" / f"{name}.jsonl", names[: len(joined.confidence)], joined)
    return tasks_document(evaluators, answers, names)


def _answers(evaluator: TaskEvaluator, bar: Any) -> Answers:
    """The answers to a task; those to each part are saved, and read where they are."""
    directory, parts = evaluator.context.directory, evaluator.task.parts
    files = (
        {} if directory is None else {part: directory / "answers" / f"{evaluator.name}-{part}.npz" for part in parts}
    )
    answers = {part: read_answers(file) for part, file in files.items() if on_first(file.is_file)}
    for part in answers:
        bar.update(len(evaluator.question_numbers(parts[part])))
    for part, own in evaluator.answers([part for part in parts if part not in answers], tick=bar.update):
        bar.set_postfix_str(part)
        if part in files and is_first():
            write_answers(files[part], own)
        answers[part] = own
    return Answers.join([answers[part] for part in parts])
