"""Options of `evaluate_tasks`, and the protocols of the papers as presets."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from calibjax.eval.answers.clusters import find_clustering
from calibjax.eval.answers.confidence import OptionConfidence, TextConfidence
from calibjax.eval.answers.judges import STRING_MATCH, find_judge
from calibjax.eval.answers.probe_features import PROBES
from calibjax.eval.answers.registry import CONFIDENCES
from calibjax.models.generate import TEMPERATURES
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import INT_MAX, BatchSize, Bins, Closed, Count, Range, not_identity

Temperature = Annotated[float, Range(*TEMPERATURES)]


class Preset(NamedTuple):
    """A protocol: examples before a question of each task (others: the task's own), confidences, bins."""

    shots: Mapping[str, int]
    option_confidence: OptionConfidence
    text_confidence: TextConfidence
    bins: int
    closed: Closed


PRESETS = {
    "plain": Preset({}, "options", "length_normalised", 15, "right"),
    "ats": Preset({"mmlu": 5, "triviaqa": 5}, "options", "arithmetic_mean", 15, "none"),
    "label-smoothing": Preset({}, "full_vocabulary", "length_normalised", 15, "right"),
}
"""The harness's own prompts; arXiv 2409.19817; arXiv 2508.00264. docs/benchmarks.md describes each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksOptions:
    """Options of `evaluate_tasks`.

    Attributes:
        fit: fit temperature scaling over the options of each task, on calibration questions of the task: a split that
            is neither asked nor gives examples, or else a fifth of the questions, which are then not asked. The same
            is done for the log-likelihoods under a head. Tasks of free text have no options.
        preset: how prompts are built and confidence is read: plain (zero-shot, softmax over the options), ats
            (5-shot MMLU and TriviaQA, softmax over the letters, 15 open bins, mean probability of a text's tokens) or
            label-smoothing (probability of the option among the whole vocabulary).
        assets: folder whose data/ holds the questions; by default CALIBJAX_ASSETS.
        shots: examples before each question of every task.
        option_confidence: confidence of a chosen option, in place of the preset's: options (by summed log-likelihoods),
            options_per_token (by their mean per token, for options of different lengths), margin (over the second),
            negentropy (of the options' distribution) or full_vocabulary.
        text_confidence: confidence of a free-text answer, in place of the preset's.
        further_confidences: further confidences in free text, such as consistency, semantic_entropy, p_true,
            verbalised or probe_correct_answer (docs/answers.md), separated by commas or spaces; they are rows of the
            tables, and columns of answers/TASK.jsonl. Probes are fitted on calibration questions, and kept in probes/.
        samples: answers sampled for each question, where a confidence needs them.
        sampling_temperature: temperature of these samples.
        sample_calibrated: draw them from the calibrated distribution of --head; otherwise from the base model's.
        clustering: which answers mean the same: exact, normalised, numeric (the last number), hidden (cosine of
            hidden states), nli:DIR (mutual entailment by a PyTorch classifier on disk), or package.module:function.
        judge: what judges free text: string-match, a model (directory or hub id), or package.module:function.
        max_new_tokens: largest number of tokens of a free-text answer.
        limit: number of questions of each task (of MMLU: of each subject), drawn at random; by default all.
        batch_size: rows per step, rounded up to a multiple of the mesh axes data and fsdp.
        max_length: largest number of tokens that the model reads; longer prompts lose their start.
        bins: number of equal-width bins of the expected calibration error, in place of the preset's.
        closed: the bin of a confidence on an edge, in place of the preset's.
    """

    fit: bool = False
    preset: Literal["plain", "ats", "label-smoothing"] = "plain"
    assets: Path | None = None
    shots: Annotated[int, Range(0, INT_MAX)] | None = None
    option_confidence: OptionConfidence | None = None
    text_confidence: TextConfidence | None = None
    further_confidences: tuple[str, ...] = ()
    samples: Annotated[int, Range(2, 1024)] = 8
    sampling_temperature: Temperature = 1.0
    sample_calibrated: bool = False
    clustering: str = "normalised"
    judge: str = STRING_MATCH
    max_new_tokens: Count | None = None
    limit: Count | None = None
    batch_size: BatchSize = not_identity(32)
    max_length: Count | None = None
    bins: Bins | None = not_identity(None)
    closed: Closed | None = not_identity(None)

    def check_methods(self, heads: bool) -> None:
        """Raises `UserError` for options that are unknown or cannot be used together."""
        if self.fit and self.resolved().option_confidence == "full_vocabulary":
            raise UserError("fit: expected a confidence among the options, such as options, got full_vocabulary.")
        if self.sample_calibrated and not heads:
            raise UserError("sample_calibrated: expected a head, whose distribution is sampled.")
        if self.fit and set(self.further_confidences) & set(PROBES):
            raise UserError("fit: it is for multiple choice, and probes are for free text: run each alone.")
        unknown = [name for name in self.further_confidences if name not in CONFIDENCES]
        if unknown:
            known = ", ".join(CONFIDENCES)
            raise UserError(f"further_confidences: expected some of {known}; got {', '.join(unknown)}.")
        find_judge(self.judge)
        if self.clustering != "hidden":
            find_clustering(self.clustering)
        sample_options = ("samples", "sampling_temperature", "sample_calibrated", "clustering")
        changed = [name for name in sample_options if getattr(self, name) != getattr(TasksOptions, name)]
        fields = {field for name in self.further_confidences for field in CONFIDENCES[name].fields}
        targets = {PROBES[name].target for name in self.further_confidences if name in PROBES}
        if changed and "clusters" not in fields and targets <= {"correct"}:
            raise UserError(f"{', '.join(changed)}: further_confidences names none that reads samples; leave them out.")

    def resolved(self) -> "TasksOptions":
        """The options, with what is None taken from the preset, except `shots`."""
        preset = PRESETS[self.preset]._asdict()
        open_fields = [name for name in preset if name != "shots" and getattr(self, name) is None]
        return dataclasses.replace(self, **{name: preset[name] for name in open_fields})
