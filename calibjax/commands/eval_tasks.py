"""`calibjax eval tasks`: accuracy and calibration of a model on the benchmarks of lm-eval."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from calibjax.commands import groups, run_directory
from calibjax.eval.report.schema import Document
from calibjax.eval.tasks.benchmark import evaluate_tasks
from calibjax.eval.tasks.local_data import assets_folder, check_tasks, load_tasks
from calibjax.eval.tasks.options import TasksOptions
from calibjax.eval.tasks.written import WrittenAnswers
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.runtime.context import Log
from calibjax.runtime.distributed import on_first, together
from calibjax.runtime.errors import UserError, about, require_directory
from calibjax.runtime.options import Positive, not_identity, run_identity
from calibjax.train import head_notes, load_head
from calibjax.train.probes import fit_probe, load_probe, save_probe


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTasksOptions(TasksOptions, groups.OutputOptions, groups.ChatOptions, groups.ModelOptions):
    """Evaluates accuracy and calibration on benchmarks, through lm-eval.

    Prints accuracy and calibration with intervals for each task, each subject and all tasks together: of the base
    model, with temperature scaling and with a head. Prompts are those of lm-eval's task definitions; questions come
    from local data where --assets (or CALIBJAX_ASSETS) has them, else from the hub. Needs the extra `lm-eval`. To
    resume a killed run at the task (or subject) that it was killed in, start it again with the same options.
    Example: calibjax eval tasks --model HuggingFaceTB/SmolLM2-135M --tasks arc_easy --limit 100 --out runs/tasks

    Attributes:
        tasks: names, by commas or spaces: mmlu, arc_easy, arc_challenge, hellaswag, truthfulqa_mc1, truthfulqa_mc2,
            truthfulqa_gen, triviaqa or others of lm-eval; google_analogies, story_words, story_last_words, story_names.
        head: directory of a fitted head, or of the run of `train ats` that holds it, or a head on the hub
            (org/name@revision); it also holds the temperature of temperature scaling.
        temperature: temperature of temperature scaling, in place of the one that --head holds.
        out: directory for metrics.json, report.html, figures and answers/TASK.jsonl, a question a line, which compare,
            apply and decide read; without it only the tables are printed.
        subjects: print the table of subjects as well.
    """

    tasks: tuple[str, ...]
    head: Path | None = None
    temperature: Positive | None = None
    out: Path | None = not_identity(None)
    subjects: bool = not_identity(False)


def run(options: EvalTasksOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    if options.fit and options.temperature is not None:
        raise UserError("--temperature: --fit fits the temperature; leave one of them out.")
    names = groups.split_names(options.tasks)
    assets = assets_folder(options.assets)
    if options.assets is not None:
        with about("--assets"):
            require_directory(options.assets, "assets")
    if options.head is not None:
        with about("--head"):
            head_notes(options.head)
    further = groups.split_names(options.further_confidences)
    options = dataclasses.replace(options, tasks=names, further_confidences=further, assets=assets)
    options.check_methods(options.head is not None)
    manager = together(functools.partial(check_tasks, names, assets))
    from calibjax.eval.tasks.harness import Chat  # needs lm-eval, which `check_tasks` has found

    context = run_directory.begin("eval tasks", options, log)
    tasks = together(functools.partial(load_tasks, names, manager, assets, log))
    lm = options.load(context.mesh, log)
    chat = Chat(options.system) if options.applies(lm, log) else None
    heads = _heads(options, lm, log)
    document = evaluate_tasks(lm, tasks, heads, options, context, chat=chat, probes=with_probes)
    document["run"] = {**run_identity("eval tasks", options), "base_fingerprint": lm.fingerprint}
    run_directory.finish(document, options, holds="answers/ (every question)")
    return document


def with_probes(written: WrittenAnswers) -> dict[str, Any]:
    """Name -> parameters of the probes of a task, which are read from probes/ or fitted on calibration questions."""
    questions, fingerprint = written.questions, written.model.lm.fingerprint
    task, context, names = questions.name, questions.context, questions.probe_names
    with context.with_directory() as saved:
        folder = saved.require_directory() / "probes" / task
        missing = [name for name in names if not on_first((folder / name / "probe.json").is_file)]
        if missing:
            data = written.probe_data(missing)
            count = len(data[missing[0]][1])
            for name in missing:
                params = fit_probe(*data[name])
                notes = {"task": task, "questions": count}
                save_probe(folder / name, params, name=name, fingerprint=fingerprint, notes=notes)
            context.log(f"task {task}: fitted on {count:,} calibration questions: {', '.join(missing)}")
        return {name: load_probe(folder / name, fingerprint) for name in names}


def _heads(options: EvalTasksOptions, lm: LanguageModel, log: Log) -> dict[str, FittedHead]:
    heads: dict[str, FittedHead] = {}
    temperature = options.temperature
    if options.head is not None and temperature is None and not options.fit:
        temperature = head_notes(options.head).get("temperature")
        if temperature is None:
            log(f"{options.head} holds no temperature: give --temperature to compare with temperature scaling")
    if temperature is not None:
        heads["temperature"] = FittedHead.constant(lm, -math.log(temperature))
        log(f"temperature scaling: {temperature:.4f}")
    if options.head is not None:
        heads["ats"] = load_head(options.head, lm)
    return heads
