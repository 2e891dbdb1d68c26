"""Which questions of a task are asked and which are fitted on, and their prompts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from calibjax.eval.answers.judges import references
from calibjax.eval.answers.probe_features import PROBES
from calibjax.eval.tasks.continuation import room_for_context
from calibjax.eval.tasks.options import PRESETS
from calibjax.eval.tasks.scoring import Continuation
from calibjax.models.generate import Sampling
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import check_same
from calibjax.runtime.errors import UserError, about

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from calibjax.eval.tasks.harness import HarnessLM
    from calibjax.eval.tasks.local_data import BenchmarkTask
    from calibjax.eval.tasks.options import TasksOptions

BATCH = 256  # questions whose log-probabilities are stored at a time
_MAX_CALIBRATION = 1_000  # questions of a part that a temperature or a probe is fitted on, at most


class Batch(NamedTuple):
    """Up to `BATCH` questions of a part of a task; if answers are written, as many as a step has rows.

    Attributes:
        subject: subject of questions that have no column category.
        numbers: indices of the questions in the task's data, including those that are left out.
        documents, prompts: document and prompt of each question that the model can read.
        options: a continuation for each option of each question; empty for written answers.
    """

    part: str
    task: "ConfigurableTask"
    subject: str
    numbers: list[int]
    documents: list[Any]
    prompts: list[Any]
    options: list[list[Continuation]]

    def subjects(self) -> np.ndarray:
        return np.array([str(document.get("category", self.subject)) for document in self.documents], str)


class TaskQuestions:
    """The questions of one task for a model, by resolved options (`TasksOptions.resolved`).

    Attributes:
        probe_names: probes among the further confidences of written answers.
    """

    def __init__(
        self, model: "HarnessLM", name: str, task: "BenchmarkTask", options: "TasksOptions", context: RunContext
    ):
        self.model, self.name, self.task, self.options, self.context = model, name, task, options, context
        are_written = all(part.OUTPUT_TYPE == "generate_until" for part in task.parts.values())
        self.probe_names = [method for method in options.further_confidences if method in PROBES and are_written]

    def check(self) -> None:
        """Raises `UserError` for parts that cannot be evaluated with these options, model and data."""
        for task in self.task.parts.values():
            kind, name, shots = task.OUTPUT_TYPE, task.config.task, self.shots(task)
            if self.options.fit and kind != "multiple_choice":
                raise UserError(f"fit: it fits a temperature over options, and the task {name} has none.")
            if kind not in ("multiple_choice", "generate_until"):
                raise UserError(f"task {name}: expected multiple choice or free text, got {kind}.")
            examples = _example_count(task)
            if shots > examples:
                raise UserError(f"shots: expected at most the {examples} examples of the task {name}, got {shots}.")
            if kind == "generate_until":
                with about(f"task {name}"):
                    room_for_context(self.generation_options(task)["max_new_tokens"], self.model.max_length)
                    references(task.eval_docs[0])

    def shots(self, task: "ConfigurableTask") -> int:
        shots = self.options.shots
        if shots is None:
            shots = PRESETS[self.options.preset].shots.get(self.name.removesuffix("_local"))
        return task.config.num_fewshot or 0 if shots is None else shots

    def generation_options(self, task: "ConfigurableTask") -> dict[str, Any]:
        """The arguments of `continue_contexts` for an answer: greedy, whatever the task requests."""
        requested: dict[str, Any] = dict(task.config.generation_kwargs or {})
        if self.options.max_new_tokens is not None:
            requested = {name: value for name, value in requested.items() if not name.startswith("max_")}
            requested["max_gen_toks"] = self.options.max_new_tokens
        return {**self.model.generation_options(requested), "sampling": Sampling()}

    def numbers(self, task: "ConfigurableTask") -> list[int]:
        """Indices of the questions to evaluate: up to `limit`, drawn from those that nothing is fitted on."""
        numbers = np.arange(len(task.eval_docs))
        if (self.options.fit or self.probe_names) and self.calibration_split(task) is None:
            numbers = np.setdiff1d(numbers, _set_aside(len(numbers), self.context.seed))
        count = min(len(numbers), self.options.limit or len(numbers))
        chosen = np.random.default_rng(self.context.seed).choice(len(numbers), count, replace=False)
        return numbers[np.sort(chosen)].tolist()

    def calibration_split(self, task: "ConfigurableTask") -> str | None:
        """Name of a split that is neither evaluated nor the source of examples; None if there is none."""
        evaluated = task.config.test_split or task.config.validation_split
        examples = _example_split(task) if self.shots(task) else None
        splits = (task.config.validation_split, task.config.training_split, task.fewshot_cfg.split)
        return next((split for split in splits if split and split not in (evaluated, examples)), None)

    def calibration_questions(self, task: "ConfigurableTask") -> tuple[Any, list[int]]:
        """The documents of `calibration_split`, or else of the task; indices of up to 1,000 to fit on, not to ask."""
        seed, split = self.context.seed, self.calibration_split(task)
        if split is None:
            documents: Any = task.eval_docs
            numbers = _set_aside(len(documents), seed)
        else:
            process = task.config.process_docs
            documents = task.dataset[split] if process is None else process(task.dataset[split])
            numbers = np.arange(len(documents))
        if len(numbers) > _MAX_CALIBRATION:
            numbers = np.sort(np.random.default_rng((seed, 2)).choice(numbers, _MAX_CALIBRATION, replace=False))
        return documents, numbers.tolist()

    def batches(self, part: str, source: Any, numbers: Sequence[int]) -> Iterator[Batch]:
        """Yields the documents `numbers` of `source` in batches; one with an option too long to be read is left out."""
        task, lm = self.task.parts[part], self.model
        subject = str(task.config.task_alias or part) if len(self.task.parts) > 1 else ""
        # Written answers take long: few at a time, so that progress shows and little is lost where a run is killed.
        size = BATCH if task.OUTPUT_TYPE == "multiple_choice" else min(lm.scorer.batch_size, BATCH)
        task.set_fewshot_seed(self.context.seed)  # once: examples are drawn by a question's place, not by its batch
        for start in range(0, len(numbers), size):
            chosen = list(numbers[start : start + size])
            documents = [source[number] for number in chosen]
            prompts = [lm.prompt(task, document, self.shots(task)) for document in documents]
            check_same([str(len(chosen)), *prompts], f"the questions of {task.config.task}")
            options: list[list[Continuation]] = []
            if task.OUTPUT_TYPE == "multiple_choice":
                for document, prompt in zip(documents, prompts, strict=True):
                    requests: Any = task.construct_requests(document, prompt, apply_chat_template=lm.chat is not None)
                    options.append([lm.encode(*request.args) for request in requests])
                longest = [max(len(option.tokens) for option in question) for question in options]
                readable = [place for place, length in enumerate(longest) if length <= lm.max_length]
                documents, prompts, options = ([x[place] for place in readable] for x in (documents, prompts, options))
            yield Batch(part, task, subject, chosen, documents, prompts, options)

    def calibration_batches(self) -> list[Batch]:
        parts = self.task.parts.items()
        return [batch for name, task in parts for batch in self.batches(name, *self.calibration_questions(task))]

    def calibration_bar(self, batches: Sequence[Batch]) -> Any:
        total = sum(len(batch.documents) for batch in batches)
        return self.context.bar(title=f"{self.name}: calibration questions", unit="question", total=total)


def _set_aside(count: int, seed: int) -> Int[np.ndarray, " n"]:
    return np.sort(np.random.default_rng((seed, 1)).choice(count, count // 5, replace=False))


def _example_split(task: "ConfigurableTask") -> str | None:
    splits = (task.fewshot_cfg.split, task.config.training_split, task.config.validation_split)
    return next((split for split in splits if split and split != task.config.test_split), None)


def _example_count(task: "ConfigurableTask") -> int:
    listed = task.fewshot_cfg.samples
    if listed:
        return len(listed() if callable(listed) else listed)
    split, evaluated = _example_split(task), task.config.test_split or task.config.validation_split
    return 0 if split is None or split == evaluated else len(task.dataset[split])


def harness_metrics(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Name -> values, of the metrics that have one number for each question."""
    first = rows[0] if rows else {}
    names = [name for name in first if all(np.ndim(row[name]) == 0 for row in rows)]
    return {name: np.array([float(row[name]) for row in rows]) for name in names}
