"""`calibjax eval tasks`: accuracy and calibration of a model on the benchmarks of lm-eval."""

import dataclasses
import functools
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp

from calibjax.commands.common import (
    SCHEMA,
    ChatOptions,
    ModelOptions,
    OutputOptions,
    begin,
    finish,
    load_placed,
    on_devices,
    presentation,
    split_names,
)
from calibjax.eval.answers.clusters import find_clustering
from calibjax.eval.answers.confidence import WORDS, OptionConfidence, TextConfidence
from calibjax.eval.answers.judges import STRING_MATCH, find_judge
from calibjax.eval.answers.methods import WRITTEN
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.report.schema import Document
from calibjax.eval.report.terminal import print_report
from calibjax.eval.tasks.local_data import TASKS, assets_folder
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import LanguageModel
from calibjax.models.generate import TEMPERATURES
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import DeviceOptions, is_first, on_first, together
from calibjax.runtime.errors import UserError, about, require_directory
from calibjax.runtime.options import (
    IDENTITY_IF_CHANGED,
    INT_MAX,
    BatchSize,
    Bins,
    Count,
    Positive,
    Range,
    named,
    run_identity,
)
from calibjax.train import head_notes, load_head
from calibjax.train.probes import fit_probe, load_probe, save_probe

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    from calibjax.eval.answers.clusters import Clustering
    from calibjax.eval.tasks.evaluate import Answers, Calibration, How, Part
    from calibjax.eval.tasks.evidence import Asking


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
class EvalTasksOptions(OutputOptions, ChatOptions, ModelOptions):
    """Evaluates accuracy and calibration on benchmarks, through lm-eval.

    Prints accuracy and calibration with intervals for each task, each subject and all tasks together: of the base
    model, with temperature scaling and with a head. Prompts are those of lm-eval's task definitions; questions come
    from local data where --assets (or CALIBJAX_ASSETS) has them, else from the hub. Started again with the same
    options, a killed run resumes at the task (or subject) it was killed in. Needs `pip install calibjax[lm-eval]`.

    Attributes:
        tasks: tasks of lm-eval, such as mmlu, arc_easy, arc_challenge, hellaswag, truthfulqa_mc1, truthfulqa_mc2,
            truthfulqa_gen, triviaqa; or google_analogies, story_words, story_last_words, story_names; separated by
            commas or spaces.
        head: directory of a fitted head, or of the run of `train ats` that holds it, or a head on the hub
            (org/name@revision); it also holds the temperature of temperature scaling.
        temperature: temperature of temperature scaling, in place of that of --head.
        fit: fit temperature scaling over the options of each task, on calibration questions of the task: a split that
            is neither asked nor gives examples, or else a fifth of the questions, which are then not asked. Of a head,
            too, the options' log-likelihoods get a fitted temperature. Tasks of written answers have no options.
        preset: how prompts are built and confidence is read: plain (zero-shot, softmax over the options), ats
            (5-shot MMLU, softmax over the letters, 15 open bins, mean probability of a text's tokens) or
            label-smoothing (probability of the option among the whole vocabulary).
        out: directory for metrics.json, report.html, figures and answers/TASK.jsonl, a question a line, which compare,
            apply and decide read; without it only the tables are printed.
        assets: folder whose data/ holds the questions; by default CALIBJAX_ASSETS.
        shots: examples before each question of every task.
        options: confidence of a chosen option, in place of the preset's: options (by summed log-likelihoods),
            options_per_token (by their mean per token, for options of different lengths) or full_vocabulary.
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
        subjects: print the table of subjects too.
        bins: number of equal-width bins of the expected calibration error, in place of the preset's.
        closed: the bin of a confidence on an edge, in place of the preset's.
        devices: devices of the run.
    """

    tasks: tuple[str, ...]
    head: Path | None = None
    temperature: Positive | None = None
    fit: bool = dataclasses.field(default=False, metadata=IDENTITY_IF_CHANGED)
    preset: Literal["plain", "ats", "label-smoothing"] = "plain"
    out: Path | None = presentation(None)
    assets: Path | None = None
    shots: Annotated[int, Range(0, INT_MAX)] | None = None
    options: OptionConfidence | None = named("option-confidence", None)
    text: TextConfidence | None = named("text-confidence", None)
    confidence: tuple[str, ...] = dataclasses.field(default=(), metadata=IDENTITY_IF_CHANGED)
    samples: Annotated[int, Range(2, 1024)] = dataclasses.field(default=8, metadata=IDENTITY_IF_CHANGED)
    sampling_temperature: Temperature = dataclasses.field(default=1.0, metadata=IDENTITY_IF_CHANGED)
    sample_calibrated: bool = dataclasses.field(default=False, metadata=IDENTITY_IF_CHANGED)
    same: str = dataclasses.field(default="normalised", metadata=IDENTITY_IF_CHANGED)
    judge: str = STRING_MATCH
    max_new_tokens: Count | None = None
    limit: Count | None = None
    batch_size: BatchSize = presentation(32)
    max_length: Count | None = None
    bins: Bins | None = presentation(None)
    closed: Literal["right", "left", "none"] | None = presentation(None)
    subjects: bool = presentation(False)
    devices: DeviceOptions = presentation(DeviceOptions())


@on_devices
def run(options: EvalTasksOptions, log: Callable[[str], None] = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    names, further = split_names(options.tasks), split_names(options.confidence)
    try:
        from calibjax.eval.tasks.evaluate import How, check
        from calibjax.eval.tasks.evidence import hidden_clustering
        from calibjax.eval.tasks.harness import Chat, HarnessLM
        from calibjax.eval.tasks.kept import claim_answers, write_rows_of
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'calibjax[lm-eval]'.") from error
    if options.fit and options.temperature is not None:
        raise UserError("--temperature: --fit fits the temperature; leave one of them out.")
    if options.fit and (options.options or PRESETS[options.preset].options) == "full_vocabulary":
        raise UserError("--fit: expected a confidence among the options; give --option-confidence options.")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # a line for every task, of what is meant here
    judge = find_judge(options.judge)
    clustering = None if options.same == HIDDEN else find_clustering(options.same)
    _check_confidences(options, further)
    assets = assets_folder(options.assets)
    if options.assets is not None:
        with about("--assets"):
            require_directory(options.assets, "assets")
    if options.head is not None:
        with about("--head"):
            head_notes(options.head)
    options = dataclasses.replace(options, tasks=names, confidence=further, assets=assets)
    manager = together(functools.partial(check_tasks, names, assets))
    context = begin("eval tasks", options, log)
    tasks = together(functools.partial(load_tasks, names, manager, assets, log))
    lm = load_placed(options.model, context.mesh, options.dtype, adapter=options.adapter, log=log)
    heads = _heads(options, lm, log)
    claim_answers(options.out, lm, heads)
    preset = PRESETS[options.preset]
    chat = Chat(options.system) if options.applies(lm, log) else None
    model = HarnessLM(
        lm, heads, batch_size=options.batch_size, max_length=options.max_length, seed=options.seed, chat=chat
    )
    how = How(
        None,
        options.options or preset.options,
        options.text or preset.text,
        judge,
        options.max_new_tokens,
        options.limit,
        options.seed,
        _asking(options, clustering or hidden_clustering(lm), heads) if further else None,
        log,
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
    fits = _fit_all(options, model, tasks, hows, log) if options.fit else {}
    hows = {name: of._replace(scales=fits[name].scales) if name in fits else of for name, of in hows.items()}
    hows = {
        name: of._replace(asking=with_probes(model, name, parts_of(tasks[name]), of, context))
        if _fits_probes(tasks[name], of)
        else of
        for name, of in hows.items()
    }
    answers = _ask_all(options, model, tasks, hows, context)
    rows = [*heads, *further]
    document = _document(options, rows, tasks, hows, answers, fits)
    document["run"] = {**run_identity("eval tasks", options), "base_fingerprint": lm.fingerprint}
    if options.out is not None:
        for name, found in answers.items():
            if is_first():
                methods = rows[: len(found.confidence)]
                write_rows_of(options.out / "answers" / f"{name}.jsonl", methods, found)
        finish(
            document, options.out, holds="answers/ (every question)", show=not options.json, subjects=options.subjects
        )
    elif not options.json and is_first():
        print_report(document, subjects=options.subjects)
    return document


def _check_confidences(options: EvalTasksOptions, names: tuple[str, ...]) -> None:
    if options.sample_calibrated and options.head is None:
        raise UserError("--sample-calibrated: expected --head, whose distribution is sampled.")
    if options.fit and set(names) & set(PROBES):
        raise UserError("--fit: it is for the options of multiple choice, and probes for written answers: run each.")
    unknown = [name for name in names if name not in WRITTEN]
    if unknown:
        raise UserError(f"--confidence {', '.join(unknown)}: expected some of {', '.join(WRITTEN)}.")


def _asking(options: EvalTasksOptions, same: "Clustering", heads: Mapping[str, FittedHead]) -> "Asking":
    from calibjax.eval.tasks.evidence import Asking

    folder = None if options.out is None else options.out / "answers" / "samples"
    head = heads["ats"] if options.sample_calibrated else None
    return Asking(options.confidence, options.samples, options.sampling_temperature, same, folder, head)


def _fits_probes(task: "BenchmarkTask", how: "How") -> bool:
    written = all(part.OUTPUT_TYPE == "generate_until" for part in task.parts.values())
    return written and how.asking is not None and bool(how.asking.probed)


def with_probes(model: Any, task: str, parts: Mapping[str, "Part"], how: "How", context: RunContext) -> "Asking":
    """The confidences of a task with their probes, which are read from probes/ or fitted on calibration questions."""
    from calibjax.eval.tasks.drawn import probe_data

    asking, fingerprint = how.asking, model.lm.fingerprint
    assert asking is not None
    with context.kept() as kept:
        folder = kept.require_directory() / "probes" / task
        missing = [name for name in asking.probed if not on_first((folder / name / "probe.json").is_file)]
        if missing:
            data = probe_data(model, parts, how._replace(asking=asking._replace(methods=tuple(missing))))
        for name in missing:
            of, fit = PROBES[name], folder / f"{name}.fit"
            features, target = data.features[of.feature], data.targets[of.target]
            params = fit_probe(
                features, target, context=dataclasses.replace(kept, directory=fit), identity=[name, fingerprint]
            )
            notes = {"task": task, "questions": len(target)}
            save_probe(folder / name, params, name=name, fingerprint=fingerprint, notes=notes)
            on_first(functools.partial(shutil.rmtree, fit, ignore_errors=True))
        if missing:
            context.log(f"task {task}: fitted on {len(target):,} calibration questions: {', '.join(missing)}")
        return asking._replace(probes={name: load_probe(folder / name, fingerprint) for name in asking.probed})


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


def temperature_head(lm: LanguageModel, temperature: float) -> FittedHead:
    """The head that divides every logit by one temperature."""
    config = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
    return FittedHead(config, {"log_scale": jnp.float32(-math.log(temperature))}, 0.0, lm.fingerprint)


def _heads(options: EvalTasksOptions, lm: LanguageModel, log: Callable[[str], None]) -> dict[str, FittedHead]:
    heads = {"uncalibrated": identity_head(lm)}
    temperature = options.temperature
    if options.fit:
        heads["temperature"] = identity_head(lm)  # its factor is of the options, not of the tokens
    elif options.head is not None and temperature is None:
        temperature = head_notes(options.head).get("temperature")
        if temperature is None:
            log(f"{options.head} holds no temperature: give --temperature to compare with temperature scaling")
    if temperature is not None and not options.fit:
        heads["temperature"] = temperature_head(lm, temperature)
        log(f"temperature scaling: {temperature:.4f}")
    if options.head is not None:
        heads["ats"] = load_head(options.head, lm)
    return heads


def _ask_all(
    options: EvalTasksOptions,
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
            file = _answers_file(options, name, label)
            if file is not None and on_first(file.is_file):
                found[label] = read_answers(file)
                bar.update(question_count(part, hows[name]))
                del parts[label]
        for label, kept in ask_parts(model, parts, hows[name], tick=bar.update):
            bar.set_postfix_str(label)
            file = _answers_file(options, name, label)
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
    options: EvalTasksOptions,
    model: Any,
    tasks: Mapping[str, BenchmarkTask],
    hows: "Mapping[str, How]",
    log: Callable[[str], None],
) -> dict[str, "Calibration"]:
    """Temperature scaling over the options of each task, kept beside the answers for a run that resumes."""
    from calibjax.eval.tasks.evaluate import fit_options
    from calibjax.eval.tasks.kept import read_fit, write_fit

    fits = {}
    for name, task in tasks.items():
        file = None if options.out is None else options.out / "answers" / f"{name}.fit.json"
        if file is not None and on_first(file.is_file):
            fits[name] = read_fit(file)
        else:
            fits[name] = fit_options(model, parts_of(task), hows[name])
            if file is not None and is_first():
                write_fit(file, fits[name])
        log(f"task {name}: {_describe(fits[name])}")
    return fits


def _describe(fit: "Calibration") -> str:
    temperatures = " and ".join(f"{1 / scale:.9g}" for scale in fit.scales[1:])
    bound = ", the largest: no sign of the right option" if min(fit.scales) < 1.01 * math.exp(-6) else ""
    return f"temperature over the options {temperatures}{bound}, fitted on {fit.questions:,} questions ({fit.source})"


def _answers_file(options: EvalTasksOptions, task: str, part: str) -> Path | None:
    return None if options.out is None else options.out / "answers" / f"{task}-{part}.npz"


def _document(
    options: EvalTasksOptions,
    names: list[str],
    tasks: Mapping[str, BenchmarkTask],
    hows: "Mapping[str, How]",
    answers: Mapping[str, "Answers"],
    fits: Mapping[str, "Calibration"],
) -> Document:
    from calibjax.eval.tasks.evaluate import Answers
    from calibjax.eval.tasks.results import answers_json, subjects_json

    preset = PRESETS[options.preset]
    binning: dict[str, Any] = {
        "bins": options.bins or preset.bins,
        "closed": options.closed or preset.closed,
        "seed": options.seed,
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
