"""Does one temperature, or a temperature for each token, make the confidence in whole answers better calibrated?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from calibjax.commands.common import finish
from calibjax.commands.eval_tasks import temperature_head
from calibjax.commands.study.answers import AnswerStudyOptions, document_of, open_study
from calibjax.eval.answers.methods import WRITTEN
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.report.schema import TasksDocument
from calibjax.eval.tokens import identity_head
from calibjax.runtime.errors import UserError, about
from calibjax.train import head_notes, load_head

METHODS = ("consistency", "discrete_semantic_entropy", "minimum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceStudyOptions(AnswerStudyOptions):
    """Temperature scaling against ATS at the level of answers, semantic confidence among them (arXiv 2604.07172).

    Answers are greedy, and the same for all three. Confidences are read from the distribution of the base model, with
    temperature scaling and with ATS: the probabilities of the answer's tokens in it, and samples that are drawn from
    it. Prints every task and confidence with paired differences from temperature scaling.

    Attributes:
        head: directory of a fitted head, or of the run of `train ats` that holds it; it also holds the temperature.
        confidence: confidences beside length_normalised (docs/answers.md), separated by commas or spaces.
    """

    head: Path
    confidence: tuple[str, ...] = METHODS


def run(options: ConfidenceStudyOptions, log: Callable[[str], None] = print) -> TasksDocument:
    """Runs the command; returns the contents of metrics.json."""
    names = tuple(dict.fromkeys(name for part in options.confidence for name in part.split(",") if name))
    unknown = [name for name in names if name not in WRITTEN or name in PROBES]
    if unknown or not names:
        expected = ", ".join(name for name in WRITTEN if name not in PROBES)
        raise UserError(f"--confidence {', '.join(unknown)}: expected some of {expected}.")
    with about("--head"):
        temperature = head_notes(options.head).get("temperature")
    if temperature is None:
        raise UserError(f"--head {options.head}: holds no temperature to compare with; fit it by `train ats`.")
    study = open_study("study confidence", options, log)
    from calibjax.eval.tasks.evaluate import Answers, ask_parts, check, question_count
    from calibjax.eval.tasks.evidence import Asking
    from calibjax.eval.tasks.harness import HarnessLM
    from calibjax.eval.tasks.kept import claim_answers

    lm = study.lm
    heads = {
        "uncalibrated": identity_head(lm),
        "temperature": temperature_head(lm, temperature),
        "ats": load_head(options.head, lm),
    }
    claim_answers(options.out, lm, heads)
    log(f"temperature scaling: {temperature:.4f}")
    found: dict[str, dict[str, Answers]] = {name: {} for name in study.tasks}
    for place, (name, head) in enumerate(heads.items()):
        folder = options.out / "answers" / name
        drawn_from = head if place else None
        asking = Asking(names, options.samples, options.sampling_temperature, study.same, folder, drawn_from)
        how, model = study.how._replace(asking=asking), HarnessLM(lm, {name: head}, batch_size=options.batch_size)
        for task in study.tasks:
            parts = study.parts(task)
            for part in parts.values():
                check(model, part.task, how)
            total = sum(question_count(part.task, how) for part in parts.values())
            bar = study.context.bar(title=f"{task}, {name}", unit="question", total=total)
            asked = dict(ask_parts(model, parts, how, tick=bar.update))
            bar.close()
            found[task][name] = Answers.join([asked[label] for label in parts])
    sets = {
        f"{task}, {method}": Answers.stack([of_head.row(number) for of_head in answers.values()])
        for task, answers in found.items()
        for number, method in enumerate(("length_normalised", *names))
    }
    document = document_of(
        *(study, sets, [title for title in sets if title.endswith(names[0])], list(heads)),
        reference="temperature",
        said=f"{options.samples} samples at temperature {options.sampling_temperature:g} of each distribution; judge: "
        f"{options.judge}",
    )
    finish(document, options.out, holds="answers/ (samples)", show=not options.json)
    return document
