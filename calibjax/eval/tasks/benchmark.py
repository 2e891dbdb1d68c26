"""Evaluation of a model on the benchmarks of lm-eval: accuracy and calibration of its answers."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from calibjax.eval.answers.clusters import find_clustering
from calibjax.eval.answers.confidence import WORDS, OptionConfidence, TextConfidence
from calibjax.eval.answers.judges import STRING_MATCH, find_judge
from calibjax.eval.answers.methods import WRITTEN
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.tasks.local_data import TASKS, assets_folder
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.models.generate import TEMPERATURES
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first, on_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import (
    INT_MAX,
    NOT_IDENTITY,
    BatchSize,
    Bins,
    Count,
    Range,
    check_options,
    named,
)

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    from calibjax.eval.answers.clusters import Clustering
    from calibjax.eval.tasks.evaluate import Answers, Calibration, How, Part
    from calibjax.eval.tasks.evidence import Asking
    from calibjax.eval.tasks.harness import Chat

HIDDEN = "hidden"
"""Name of the clustering by the model's own hidden states."""
Temperature = Annotated[float, Range(*TEMPERATURES)]


class Preset(NamedTuple):
    """A protocol: examples before a question of each task (others: as the task says), confidences, bins."""

    shots: Mapping[str, int]
    options: OptionConfidence
    text: TextConfidence
    bins: int
    closed: Literal["right", "left", "none"]


PRESETS = {
    "plain": Preset({}, "options", "length_normalised", 15, "right"),
    "ats": Preset({"mmlu": 5}, "options", "arithmetic_mean", 15, "none"),
    "label-smoothing": Preset({}, "full_vocabulary", "length_normalised", 15, "right"),
}
"""The harness's own prompts; arXiv 2409.19817; arXiv 2508.00264. docs/benchmarks.md says what each is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksOptions:
    """Options of `evaluate_tasks`.

    Attributes:
        fit: fit temperature scaling over the options of each task, on calibration questions of the task: a split that
            is neither asked nor gives examples, or else a fifth of the questions, which are then not asked. Of a head,
            too, the options' log-likelihoods get a fitted temperature. Tasks of written answers have no options.
        preset: how prompts are built and confidence is read: plain (zero-shot, softmax over the options), ats
            (5-shot MMLU, softmax over the letters, 15 open bins, mean probability of a text's tokens) or
            label-smoothing (probability of the option among the whole vocabulary).
        assets: folder whose data/ holds the questions; by default CALIBJAX_ASSETS.
        shots: examples before each question of every task.
        options: confidence of a chosen option, in place of the preset's: options (by summed log-likelihoods),
            options_per_token (by their mean per token, for options of different lengths), margin (over the second),
            negentropy (of the options' distribution) or full_vocabulary.
        text: confidence of a written answer, in place of the preset's.
        confidence: further confidences in written answers, such as consistency, semantic_entropy, p_true, verbalised or
            probe_correct_answer (docs/answers.md), separated by commas or spaces; they are rows of the tables, and
            columns of answers/TASK.jsonl. Probes are fitted on calibration questions, as --fit has them, and kept in
            probes/.
        samples: answers sampled for each question, where a confidence needs them.
        sampling_temperature: temperature of these samples.
        sample_calibrated: draw them from the calibrated distribution of --head; otherwise from the base model's.
        same: which answers mean the same: exact, normalised, numeric (the last number), hidden (cosine of the model's
            hidden states), or package.module:function.
        judge: how written answers are judged: string-match, a model (directory or hub id) that is asked, or
            package.module:function.
        max_new_tokens: largest number of tokens of a written answer.
        limit: use only so many questions of each task (of MMLU: of each subject), drawn at random.
        batch_size: rows per step, rounded up to a multiple of the mesh axes data and fsdp.
        max_length: largest number of tokens that the model reads; longer prompts lose their start.
        bins: number of equal-width bins of the expected calibration error, in place of the preset's.
        closed: the bin of a confidence on an edge, in place of the preset's.
    """

    fit: bool = False
    preset: Literal["plain", "ats", "label-smoothing"] = "plain"
    assets: Path | None = None
    shots: Annotated[int, Range(0, INT_MAX)] | None = None
    options: OptionConfidence | None = named("option-confidence", None)
    text: TextConfidence | None = named("text-confidence", None)
    confidence: tuple[str, ...] = ()
    samples: Annotated[int, Range(2, 1024)] = 8
    sampling_temperature: Temperature = 1.0
    sample_calibrated: bool = False
    same: str = "normalised"
    judge: str = STRING_MATCH
    max_new_tokens: Count | None = None
    limit: Count | None = None
    batch_size: BatchSize = dataclasses.field(default=32, metadata=NOT_IDENTITY)
    max_length: Count | None = None
    bins: Bins | None = dataclasses.field(default=None, metadata=NOT_IDENTITY)
    closed: Literal["right", "left", "none"] | None = dataclasses.field(default=None, metadata=NOT_IDENTITY)

    def check_confidences(self, heads: bool) -> None:
        """Raises `UserError` for confidences that are unknown or cannot be computed together."""
        if self.fit and (self.options or PRESETS[self.preset].options) == "full_vocabulary":
            raise UserError("--fit: expected a confidence among the options; give --option-confidence options.")
        if self.sample_calibrated and not heads:
            raise UserError("--sample-calibrated: expected --head, whose distribution is sampled.")
        if self.fit and set(self.confidence) & set(PROBES):
            raise UserError(
                "--fit: it is for the options of multiple choice, and probes for written answers: run each."
            )
        unknown = [name for name in self.confidence if name not in WRITTEN]
        if unknown:
            raise UserError(f"--confidence {', '.join(unknown)}: expected some of {', '.join(WRITTEN)}.")


class BenchmarkTask(NamedTuple):
    """A task by the name that was asked for: its parts (MMLU: the subjects), and where its questions come from."""

    parts: dict[str, "ConfigurableTask"]
    source: str


def check_tasks(names: tuple[str, ...], assets: Path | None) -> "TaskManager":
    """lm-eval's tasks; raises `UserError` for names that are none of them."""
    from calibjax.eval.tasks.local_data import task_manager

    manager = task_manager(names, assets)
    known = set(manager.all_tasks)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(
            f"--tasks {', '.join(unknown)}: expected names of lm-eval's tasks, such as mmlu, arc_easy, hellaswag, "
            "truthfulqa_mc1, triviaqa; `lm_eval ls tasks` lists them."
        )
    return manager


def load_tasks(
    names: tuple[str, ...], manager: "TaskManager", assets: Path | None, log: Callable[[str], None]
) -> dict[str, BenchmarkTask]:
    known = set(manager.all_tasks)
    tasks = {}
    for name in names:
        local = f"{name}_local" if f"{name}_local" in known and assets_folder(assets) is not None else name
        at_hand = local.endswith("_local") or (TASKS / f"{local}.yaml").is_file()
        try:
            found: dict[str, Any] = dict(manager.load([local])["tasks"])
        except UserError:
            raise
        except Exception as error:  # of the hub, of datasets, of a task file: whatever goes wrong is the task's
            where = (
                "" if at_hand else " Its questions come from the hub; --assets names a folder that has some of them."
            )
            raise UserError(
                f"--tasks {name}: cannot be loaded: {str(error).strip().splitlines()[0]}.{where}"
            ) from error
        tasks[name] = BenchmarkTask(found, "local data" if at_hand else "hub")
        count = sum(len(task.eval_docs) for task in found.values())
        parts = f" in {len(found)} parts" if len(found) > 1 else ""
        log(f"task {name}: {count:,} questions{parts}, {tasks[name].source}")
    return tasks


def evaluate_tasks(
    lm: LanguageModel,
    tasks: "Sequence[str] | Mapping[str, BenchmarkTask]",
    heads: FittedHead | Mapping[str, FittedHead] | None = None,
    options: TasksOptions = TasksOptions(),
    context: RunContext | None = None,
    *,
    chat: "Chat | None" = None,
    probes: "Callable[[Any, str, Mapping[str, Part], How, RunContext], Asking] | None" = None,
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
        probes: gives the confidences of a task with their fitted probes; needed for those named probe_*.

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
        from calibjax.eval.tasks.evaluate import How, check
        from calibjax.eval.tasks.evidence import hidden_clustering
        from calibjax.eval.tasks.harness import HarnessLM
        from calibjax.eval.tasks.kept import claim_answers, write_rows_of
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'calibjax[lm-eval]'.") from error
    context = context or RunContext()
    check_options(options)
    heads = {"ats": heads} if isinstance(heads, FittedHead) else dict(heads or {})
    options.check_confidences(bool(heads))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for every task, of what is meant here
    judge = find_judge(options.judge)
    clustering = None if options.same == HIDDEN else find_clustering(options.same)
    if not isinstance(tasks, Mapping):
        names, assets = tuple(tasks), assets_folder(options.assets)
        manager = together(functools.partial(check_tasks, names, assets))
        tasks = together(functools.partial(load_tasks, names, manager, assets, context.log))
    scaled = {"temperature": identity_head(lm)} if options.fit else {}  # a factor of the options, not of the tokens
    heads = {"uncalibrated": identity_head(lm), **scaled, **heads}
    claim_answers(context.directory, lm, heads)
    preset = PRESETS[options.preset]
    model = HarnessLM(
        lm, heads, batch_size=options.batch_size, max_length=options.max_length, seed=context.seed, chat=chat
    )
    how = How(
        None,
        options.options or preset.options,
        options.text or preset.text,
        judge,
        options.max_new_tokens,
        options.limit,
        context.seed,
        _asking(options, clustering or hidden_clustering(lm), heads, context) if options.confidence else None,
        context.log,
    )
    hows = {
        name: how._replace(
            shots=preset.shots.get(name.removesuffix("_local")) if options.shots is None else options.shots,
            fit=options.fit or _fits_probes(task, how),
        )
        for name, task in tasks.items()
    }
    for name, task in tasks.items():
        for part in task.parts.values():
            check(model, part, hows[name])
    fits = _fit_all(model, tasks, hows, context) if options.fit else {}
    hows = {name: of._replace(scales=fits[name].scales) if name in fits else of for name, of in hows.items()}
    for name, of in hows.items():
        if _fits_probes(tasks[name], of):
            if probes is None:
                raise UserError("confidence: probes are fitted on questions: run calibjax eval tasks, or give probes.")
            hows[name] = of._replace(asking=probes(model, name, parts_of(tasks[name]), of, context))
    answers = _ask_all(model, tasks, hows, context)
    rows = [*heads, *options.confidence]
    for name, found in answers.items():
        if context.directory is not None and is_first():
            write_rows_of(context.directory / "answers" / f"{name}.jsonl", rows[: len(found.confidence)], found)
    return _document(options, rows, tasks, hows, answers, fits, context.seed)


def _asking(
    options: TasksOptions, same: "Clustering", heads: Mapping[str, FittedHead], context: RunContext
) -> "Asking":
    from calibjax.eval.tasks.evidence import Asking

    folder = None if context.directory is None else context.directory / "answers" / "samples"
    head = list(heads.values())[-1] if options.sample_calibrated else None
    return Asking(options.confidence, options.samples, options.sampling_temperature, same, folder, head)


def _fits_probes(task: "BenchmarkTask", how: "How") -> bool:
    written = all(part.OUTPUT_TYPE == "generate_until" for part in task.parts.values())
    return written and how.asking is not None and bool(how.asking.probed)


def _ask_all(
    model: Any,
    tasks: Mapping[str, BenchmarkTask],
    hows: "Mapping[str, How]",
    context: RunContext,
) -> dict[str, "Answers"]:
    from calibjax.eval.tasks.evaluate import Answers, ask_parts, question_count
    from calibjax.eval.tasks.kept import read_answers, write_answers

    counts = [question_count(part, hows[name]) for name, task in tasks.items() for part in task.parts.values()]
    bar = context.bar(title="benchmarks", unit="question", total=sum(counts))
    answers = {}
    for name, task in tasks.items():
        found: dict[str, Answers] = {}
        parts = parts_of(task)
        for label, part in task.parts.items():
            file = _answers_file(context, name, label)
            if file is not None and on_first(file.is_file):
                found[label] = read_answers(file)
                bar.update(question_count(part, hows[name]))
                del parts[label]
        for label, kept in ask_parts(model, parts, hows[name], tick=bar.update):
            bar.set_postfix_str(label)
            file = _answers_file(context, name, label)
            if file is not None and is_first():
                write_answers(file, kept)
            found[label] = kept
        answers[name] = Answers.join([found[label] for label in task.parts])
    bar.close()
    empty = [name for name, found in answers.items() if not found.confidence.shape[1]]
    if empty:
        raise UserError(
            f"--tasks {', '.join(empty)}: every question has an option that is longer than the model reads."
        )
    return answers


def parts_of(task: BenchmarkTask) -> dict[str, "Part"]:
    from calibjax.eval.tasks.evaluate import Part

    several = len(task.parts) > 1
    return {
        label: Part(part, str(part.config.task_alias or label) if several else "") for label, part in task.parts.items()
    }


def _fit_all(
    model: Any,
    tasks: Mapping[str, BenchmarkTask],
    hows: "Mapping[str, How]",
    context: RunContext,
) -> dict[str, "Calibration"]:
    """Temperature scaling over the options of each task, kept beside the answers for a run that resumes."""
    from calibjax.eval.tasks.evaluate import fit_options
    from calibjax.eval.tasks.kept import read_fit, write_fit

    fits = {}
    for name, task in tasks.items():
        file = None if context.directory is None else context.directory / "answers" / f"{name}.fit.json"
        if file is not None and on_first(file.is_file):
            fits[name] = read_fit(file)
        else:
            fits[name] = fit_options(model, parts_of(task), hows[name])
            if file is not None and is_first():
                write_fit(file, fits[name])
        context.log(f"task {name}: {_describe(fits[name])}")
    return fits


def _describe(fit: "Calibration") -> str:
    temperatures = " and ".join(f"{1 / scale:.9g}" for scale in fit.scales[1:])
    bound = ", the largest: no sign of the right option" if min(fit.scales) < 1.01 * math.exp(-6) else ""
    return f"temperature over the options {temperatures}{bound}, fitted on {fit.questions:,} questions ({fit.source})"


def _answers_file(context: RunContext, task: str, part: str) -> Path | None:
    return None if context.directory is None else context.directory / "answers" / f"{task}-{part}.npz"


def _document(
    options: TasksOptions,
    names: list[str],
    tasks: Mapping[str, BenchmarkTask],
    hows: "Mapping[str, How]",
    answers: Mapping[str, "Answers"],
    fits: Mapping[str, "Calibration"],
    seed: int,
) -> Document:
    from calibjax.eval.tasks.evaluate import Answers
    from calibjax.eval.tasks.results import answers_json, subjects_json

    preset = PRESETS[options.preset]
    binning: dict[str, Any] = {
        "bins": options.bins or preset.bins,
        "closed": options.closed or preset.closed,
        "seed": seed,
    }
    sets, spoken = {}, {}
    for name, found in answers.items():
        how, methods = hows[name], names[: len(found.confidence)]
        written = (found.choice < 0).all()
        spoken[name] = f"{how.text} ({WORDS[how.text]})" if written else f"{how.options} ({WORDS[how.options]})"
        if name not in fits and {"temperature", "ats"} & set(names):
            spoken[name] += "; temperatures calibrate tokens"
        if written:
            spoken[name] += f"; judge: {options.judge}"
        fit = f"; {_describe(fits[name])}" if name in fits else ""
        part = next(iter(tasks[name].parts.values()))
        sets[name] = {
            **answers_json(found, methods, **binning),
            "title": name,
            "confidence": spoken[name] + fit,
            "shots": (part.config.num_fewshot or 0) if how.shots is None else how.shots,
            "source": tasks[name].source,
            "subjects": subjects_json(found, methods, **binning),
        }
    if len(sets) == 1:
        return {"schema": SCHEMA, "held_out": next(iter(sets.values())), "tasks": sets}
    shared = min(len(found.confidence) for found in answers.values())  # options have no further confidences
    together = answers_json(
        Answers.join([found.first(shared) for found in answers.values()]), names[:shared], **binning
    )
    fitted = ["temperature over the options of each task"] if fits else []
    said = "; ".join([*dict.fromkeys(spoken.values()), *fitted])
    return {"schema": SCHEMA, "held_out": {**together, "title": "all tasks", "confidence": said}, "tasks": sets}
