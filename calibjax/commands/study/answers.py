"""What the studies of answers share: their options, tasks and documents."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from calibjax import metrics
from calibjax.commands.common import (
    SCHEMA,
    BinningOptions,
    ModelOptions,
    OutputOptions,
    begin,
    load_placed,
    presentation,
    split_names,
)
from calibjax.commands.eval_tasks import HIDDEN, BenchmarkTask, Temperature, check_tasks, load_tasks, parts_of
from calibjax.eval.answers.clusters import find_clustering
from calibjax.eval.answers.judges import STRING_MATCH, find_judge
from calibjax.eval.report.schema import AnswerSet, TasksDocument
from calibjax.eval.tasks.local_data import assets_folder
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, Range, run_identity

if TYPE_CHECKING:
    from calibjax.eval.answers.clusters import Clustering
    from calibjax.eval.tasks.evaluate import Answers, How


ALL = "all tasks"
"""In place of the task in the title of a set: the answers to all of them together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerStudyOptions(BinningOptions, OutputOptions, ModelOptions):
    """What the studies of answers share.

    Attributes:
        tasks: tasks of lm-eval with written answers, or story_words, story_last_words, story_names; separated by commas
            or spaces.
        out: directory for metrics.json, report.html and figures; samples are kept in answers/, so that a killed run
            resumes.
        assets: folder whose data/ holds the questions; by default CALIBJAX_ASSETS.
        samples: answers sampled for each question.
        sampling_temperature: temperature of the samples.
        same: which answers mean the same: exact, normalised, numeric (the last number), hidden, or
            package.module:function.
        judge: how written answers are judged: string-match, a model (directory or hub id) that is asked, or
            package.module:function.
        max_new_tokens: largest number of tokens of an answer; that of the task if not given.
        limit: use only so many questions of each task, drawn at random.
        batch_size: rows per step.
    """

    tasks: tuple[str, ...]
    out: Path = presentation()
    assets: Path | None = None
    samples: Annotated[int, Range(2, 1024)] = 8
    sampling_temperature: Temperature = 1.0
    same: str = "normalised"
    judge: str = STRING_MATCH
    max_new_tokens: Count | None = None
    limit: Count | None = None
    batch_size: BatchSize = presentation(32)


class AnswerStudy(NamedTuple):
    """What a study of answers is and works on: command, options, context, model, tasks by name, and how they are asked
    (without samples)."""

    command: str
    options: AnswerStudyOptions
    context: RunContext
    lm: LanguageModel
    tasks: dict[str, BenchmarkTask]
    how: "How"
    same: "Clustering"

    def parts(self, name: str) -> Any:
        return parts_of(self.tasks[name])


def open_study(command: str, options: AnswerStudyOptions, log: Callable[[str], None]) -> AnswerStudy:
    """Checks the options, claims --out, loads tasks and model; raises `UserError` before any work is lost."""
    try:
        from calibjax.eval.tasks.evaluate import How
        from calibjax.eval.tasks.evidence import hidden_clustering
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'calibjax[lm-eval]'.") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = split_names(options.tasks)
    judge, assets = find_judge(options.judge), assets_folder(options.assets)
    clustering = None if options.same == HIDDEN else find_clustering(options.same)
    manager = together(functools.partial(check_tasks, names, assets))
    options = dataclasses.replace(options, tasks=names)
    context = begin(command, options, log)
    tasks = together(functools.partial(load_tasks, names, manager, assets, log))
    for name, task in tasks.items():
        if any(part.OUTPUT_TYPE != "generate_until" for part in task.parts.values()):
            raise UserError(f"--tasks {name}: expected a task with written answers; options are not sampled.")
    lm = load_placed(options.model, context.mesh, options.dtype, adapter=options.adapter, log=log)
    how = How(None, "options", "length_normalised", judge, options.max_new_tokens, options.limit, options.seed, log=log)
    return AnswerStudy(command, options, context, lm, tasks, how, clustering or hidden_clustering(lm))


def document_of(
    study: AnswerStudy,
    found: Mapping[str, "Answers"],
    first: str,
    names: Sequence[str],
    *,
    reference: str,
    said: str,
) -> TasksDocument:
    """The document of `eval tasks` with other sets.

    Args:
        study: of the run.
        found: title, which begins with the task or `ALL` -> answers, a row for each name.
        first: title of the set that is shown first.
        names: of the rows.
        reference: the row that others are compared with.
        said: where the confidences are from.
    """
    options = study.options
    binning: dict[str, Any] = {"bins": options.bins, "closed": options.closed, "seed": options.seed}
    sets: dict[str, Any] = {
        title: {
            **_figures(answers, names, binning, reference),
            "title": title,
            "confidence": said,
            "shots": 0,
            "source": ", ".join(dict.fromkeys(of.source for name, of in study.tasks.items() if _concerns(title, name))),
            "subjects": [],
        }
        for title, answers in found.items()
    }
    run = {**run_identity(study.command, options), "base_fingerprint": study.lm.fingerprint}
    held_out = sets.pop(first) if first.startswith(ALL) else sets[first]
    return {"schema": SCHEMA, "held_out": held_out, "tasks": sets, "run": run}


def joined(found: Mapping[str, "Answers"]) -> dict[str, "Answers"]:
    """The answers to each task, after those to `ALL` of them where there are several."""
    from calibjax.eval.tasks.evaluate import Answers

    return {ALL: Answers.join(list(found.values())), **found} if len(found) > 1 else dict(found)


def _concerns(title: str, task: str) -> bool:
    """Whether a set has answers to a task."""
    return title.partition(",")[0] in (ALL, task)


def _figures(answers: "Answers", names: Sequence[str], binning: Mapping[str, Any], reference: str) -> AnswerSet:
    """`answers_json`, with the paired difference in AUROC beside the others."""
    from calibjax.eval.tasks.results import answers_json

    of_set, pairs = answers_json(answers, names, **binning, reference=reference), {}
    for number, name in enumerate(names):
        pairs[name] = answers.confidence[number], answers.correct[number]
    for name, row in of_set["methods"].items():
        if name != reference and row["auroc"] is not None and of_set["methods"][reference]["auroc"] is not None:
            pair = pairs[name], pairs[reference]
            compared: Any = metrics.paired_comparison(metrics.auroc, *pair, seed=binning["seed"])._asdict()
            row.setdefault("against", {})["auroc"] = compared
    return of_set
