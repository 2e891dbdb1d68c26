"""Which correction calibrates the confidence in whole answers best: one temperature, ATS, its losses, or clipping?"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from calibjax.commands.common import DataOptions, finish, split_names
from calibjax.commands.eval_tasks import temperature_head
from calibjax.commands.study.answers import AnswerStudy, AnswerStudyOptions, document_of, joined, open_study
from calibjax.commands.study.fits import SINGLE, fit_heads
from calibjax.data import Sequences, eval_batches
from calibjax.eval.answers.methods import WRITTEN
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.report.schema import TasksDocument
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead
from calibjax.losses import LOSSES
from calibjax.models import LanguageModel
from calibjax.recalibrate import METHODS as RECALIBRATORS
from calibjax.recalibrate import Predictions
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import IDENTITY_IF_CHANGED
from calibjax.train import AtsOptions, head_notes, load_head
from calibjax.train.curves import array_hash

METHODS = ("consistency", "discrete_semantic_entropy", "minimum")
FITTED = ("cross-entropy", "joint", "brier", "focal", "label-smoothing", "selective")
CLIPPING = "feature_clipping"
_CLIPPED_SEQUENCES = 64
"""Sequences that the limit of feature clipping is fitted on: one number, from some thousands of tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceStudyOptions(AnswerStudyOptions):
    """Corrections of the token distribution compared at the level of answers, semantic confidence among them.

    With --head, temperature scaling against ATS (arXiv 2604.07172). With --data, temperature scaling against feature
    clipping and ATS heads that are fitted with one loss each on that text. Answers are greedy; only feature clipping
    can change them. Confidences are read from each distribution: the probabilities of the answer's tokens in it, and
    samples that are drawn from it. Prints paired differences from temperature scaling.

    Attributes:
        head: directory of a fitted head, or of the run of `train ats` that holds it; it also holds the temperature.
        data: in place of --head, text to fit on, which the tasks should not ask about: file, directory or hub id.
        losses: losses of the heads that are fitted to --data, as of `train ats --loss`; separated by commas or spaces.
        confidence: confidences beside length_normalised (docs/answers.md), separated by commas or spaces.
        text: how --data becomes sequences.
    """

    head: Path | None = None
    data: str | None = dataclasses.field(default=None, metadata=IDENTITY_IF_CHANGED)
    losses: tuple[str, ...] = dataclasses.field(default=FITTED, metadata=IDENTITY_IF_CHANGED)
    confidence: tuple[str, ...] = METHODS
    text: DataOptions = dataclasses.field(default=DataOptions(), metadata=IDENTITY_IF_CHANGED)

    def check(self) -> None:
        """Raises `UserError` unless there is a head, or else text to fit heads on."""
        if (self.head is None) == (self.data is None):
            raise UserError("give either --head, a fitted head, or --data, text to fit heads on.")
        if self.head is not None and self.losses != FITTED:
            raise UserError("--losses: expected --data, to fit heads on; --head is one that was fitted.")
        unknown = [name for name in split_names(self.losses) if name not in LOSSES]
        if unknown:
            raise UserError(f"--losses {', '.join(unknown)}: expected some of {', '.join(LOSSES)}.")


Corrected = Mapping[str, tuple[LanguageModel, FittedHead | None]]
"""Name -> the model, and the head that corrects its distribution; None: as the model has it."""


def run(options: ConfidenceStudyOptions, log: Callable[[str], None] = print) -> TasksDocument:
    """Runs the command; returns the contents of metrics.json."""
    names = split_names(options.confidence)
    unknown = [name for name in names if name not in WRITTEN or name in PROBES]
    if unknown or not names:
        expected = ", ".join(name for name in WRITTEN if name not in PROBES)
        raise UserError(f"--confidence {', '.join(unknown)}: expected some of {expected}.")
    temperature = None if options.head is None else _temperature_of(options.head)
    study = open_study("study confidence", options, log)
    from calibjax.eval.tasks.evaluate import Answers, ask_parts, check, question_count
    from calibjax.eval.tasks.evidence import Asking
    from calibjax.eval.tasks.harness import HarnessLM
    from calibjax.eval.tasks.kept import claim_answers

    if options.head is None:
        corrected = _fitted(study, options)
    else:
        assert temperature is not None
        log(f"temperature scaling: {temperature:.4f}")
        heads = {SINGLE: temperature_head(study.lm, temperature), "ats": load_head(options.head, study.lm)}
        corrected = {"uncalibrated": (study.lm, None), **{name: (study.lm, head) for name, head in heads.items()}}
    whole = {name: identity_head(lm) if head is None else head for name, (lm, head) in corrected.items()}
    claim_answers(options.out, study.lm, whole)
    found: dict[str, dict[str, Answers]] = {}
    for name, (lm, head) in corrected.items():
        folder = options.out / "answers" / name
        asking = Asking(names, options.samples, options.sampling_temperature, study.same, folder, head)
        how, model = (
            study.how._replace(asking=asking),
            HarnessLM(lm, {name: whole[name]}, batch_size=options.batch_size),
        )
        of_tasks = {}
        for task in study.tasks:
            parts = study.parts(task)
            for part in parts.values():
                check(model, part.task, how)
            total = sum(question_count(part.task, how) for part in parts.values())
            bar = study.context.bar(title=f"{task}, {name}", unit="question", total=total)
            asked = dict(ask_parts(model, parts, how, tick=bar.update))
            bar.close()
            of_tasks[task] = Answers.join([asked[label] for label in parts])
        found[name] = joined(of_tasks)
    titles = list(found["uncalibrated"])
    sets = {
        f"{title}, {method}": Answers.stack([of_head[title].row(number) for of_head in found.values()])
        for title in titles
        for number, method in enumerate(("length_normalised", *names))
    }
    document = document_of(
        *(study, sets, f"{titles[0]}, {names[0]}", list(corrected)),
        reference=SINGLE,
        said=f"{options.samples} samples at temperature {options.sampling_temperature:g} of each distribution; judge: "
        f"{options.judge}",
    )
    finish(document, options.out, holds="answers/ (samples)", show=not options.json)
    return document


def _temperature_of(folder: Path) -> float:
    with about("--head"):
        temperature = head_notes(folder).get("temperature")
    if temperature is None:
        raise UserError(f"--head {folder}: holds no temperature to compare with; fit it by `train ats`.")
    return temperature


def _fitted(study: AnswerStudy, options: ConfidenceStudyOptions) -> Corrected:
    """Temperature scaling, feature clipping, and a head for each loss, fitted to --data and kept in heads/."""
    lm, log = study.lm, study.context.log
    sequences = options.text.read(str(options.data), lm, log)
    variants = {
        loss: AtsOptions(head="mlp", loss=loss, refit_temperature=False) for loss in split_names(options.losses)
    }
    # Other text would be fitted anew; that answers are of other heads is then found by `claim_answers`.
    context = study.context.within("heads", array_hash(sequences._asdict())[:12])
    with jax.set_mesh(context.mesh):
        heads = fit_heads(lm, sequences, variants, seeds=1, context=context)
        log(f"temperature scaling and {', '.join(variants)}: fitted to {len(sequences.tokens):,} sequences")
        clipped = _clip(lm, sequences, log)
    of_heads = {name: (lm, head) for name, (head,) in heads.items()}
    return {
        "uncalibrated": (lm, None),
        SINGLE: of_heads.pop(SINGLE),
        **({} if clipped is None else {CLIPPING: (clipped, None)}),
        **of_heads,
    }


def _clip(lm: LanguageModel, sequences: Sequences, log: Callable[[str], None]) -> LanguageModel | None:
    """The model with its hidden states clipped; None where the method does not apply, as to `calibjax compare`."""
    if lm.config.logit_softcap is not None or lm.unembedding_bias is not None:
        log(f"{CLIPPING} left out: the model's logits have a soft-cap or a bias, which it does not know")
        return None
    some, features = sequences.take(slice(_CLIPPED_SEQUENCES)), []
    for batch, real in eval_batches(some.arrays(), min(16, len(some.tokens))):
        where = np.array(to_host(batch["where"]))
        where[real:] = False
        hidden = lm.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        features.append(to_host(hidden).astype(np.float32)[where])
    held, unembedding = np.concatenate(features), to_host(lm.unembedding).astype(np.float32)
    data = Predictions(features=held, unembedding=unembedding, labels=some.targets[some.where])
    limit = float(RECALIBRATORS[CLIPPING].fit(data).limit)
    log(f"{CLIPPING}: hidden states, of {np.abs(held).max():.4g} at most, to within {limit:.4g}")
    return dataclasses.replace(lm, config=dataclasses.replace(lm.config, hidden_limit=limit))
