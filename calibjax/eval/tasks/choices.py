"""Answers to multiple choice: the log-likelihoods of the options, and the confidence in the most likely one."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from calibjax import recalibrate
from calibjax.eval.answers.confidence import answer_confidence
from calibjax.eval.tasks.answer_files import Answers, OptionTemperature
from calibjax.eval.tasks.questions import BATCH, Batch, TaskQuestions, harness_metrics
from calibjax.eval.tasks.scoring import Score
from calibjax.recalibrate import Predictions
from calibjax.runtime.arrays import round_up
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

_confidence = jax.jit(answer_confidence, static_argnums=0)


class MultipleChoice:
    """Chooses among the options of a task's questions.

    Attributes:
        temperature: temperature scaling over the options, if it is fitted.
    """

    def __init__(self, questions: TaskQuestions):
        self.questions, self.model, self.options = questions, questions.model, questions.options
        self.temperature: OptionTemperature | None = None

    def score(
        self, batches: Sequence[Batch], tick: Callable[[int], Any] = lambda _: None
    ) -> Iterator[tuple[Batch, list[list[Score]], Float[np.ndarray, "M _ K"]]]:
        """Yields each batch, the scores of its options, and their log-likelihoods under each head, padded with −inf:
        sums over their tokens, or means (`options_per_token`). `tick` is called with 1 for each scored question."""
        option_lists = [options for batch in batches for options in batch.options]
        continuations = [option for options in option_lists for option in options]
        question_of = [number for number, options in enumerate(option_lists) for _ in options]
        longest = max((len(option.tokens) for option in continuations), default=0)
        if longest > 1 and self.options.option_confidence == "full_vocabulary":
            problem = "among everything the model could write, the probability of a text is near 0 and says nothing"
            hint = "the option confidence `options` compares the options"
            self.questions.context.log(f"WARNING: options of up to {longest} tokens: {problem}; {hint}")
        unscored = [len(options) for options in option_lists]
        results = {}
        for number, score in self.model.scorer.stream(continuations):
            results[number] = score
            unscored[question_of[number]] -= 1
            if not unscored[question_of[number]]:
                tick(1)
        per_token = self.options.option_confidence == "options_per_token"
        remaining = (results[number] for number in range(len(continuations)))
        for batch in batches:
            scores = [list(islice(remaining, len(options))) for options in batch.options]
            most = max(map(len, scores), default=1)
            width = max(round_up(most, 4), 4)  # few shapes
            log_probs = np.full((len(self.model.heads), BATCH, width), -np.inf, np.float32)
            for number, options in enumerate(scores):
                for place, score in enumerate(options):
                    total = score.log_probs.sum(axis=1)
                    log_probs[:, number, place] = total / score.log_probs.shape[1] if per_token else total
            yield batch, scores, log_probs

    def answers(self, batch: Batch, scores: list[list[Score]], log_probs: Float[np.ndarray, "M _ K"]) -> Answers:
        task, method = batch.task, self.options.option_confidence
        count = len(batch.documents)
        if self.temperature is not None:
            log_probs = np.asarray(self.temperature.scales, np.float32)[:, None, None] * log_probs
        confidence = confidences(method, log_probs)[:, :count]
        log_probs = log_probs[:, :count]
        choice = log_probs.argmax(axis=-1)
        distribution = log_probs
        if method != "full_vocabulary":
            distribution = log_probs - np.logaddexp.reduce(log_probs, axis=-1, keepdims=True)
        correct = np.zeros(choice.shape, np.float32)
        log_prob = np.full(choice.shape, np.nan, np.float32)
        harness, texts = [], []
        for number, (document, option_scores) in enumerate(zip(batch.documents, scores, strict=True)):
            right = right_options(task, document)
            options = [str(option) for option in task.doc_to_choice(document)]
            facts: dict[str, Any] = {"right": [options[place] for place in right], "options": options}
            correct[:, number] = np.isin(choice[:, number], right)
            if len(right) == 1:
                log_prob[:, number] = distribution[:, number, right[0]]
                if method != "full_vocabulary":
                    facts |= {"logits": log_probs[0, number, : len(options)].tolist(), "label": right[0]}
            text = document.get("question") or document.get("query")
            if not task.multiple_input:
                text = task.doc_to_text(document)
            texts.append((str(text or ""), options[choice[0, number]], json.dumps(facts)))
            results = [(float(score.log_probs[0].sum()), bool(score.greedy.all())) for score in option_scores]
            harness.append(task.process_results(document, results))
        columns = zip(*texts, strict=True) if texts else ((), (), ())
        question, answer, details = (np.array(column, str) for column in columns)
        return Answers(
            confidence=confidence,
            correct=correct,
            choice=choice.astype(np.int32),
            log_prob=log_prob,
            subject=batch.subjects(),
            harness=harness_metrics(harness),
            cut=np.array([max(score.cut for score in option_scores) for option_scores in scores], np.int32),
            too_long=len(batch.numbers) - count,
            question=question,
            answer=answer,
            details=details,
        )

    def fit_temperature(self) -> OptionTemperature:
        """Fits temperature scaling over the options to each head but the first, on the calibration questions that have
        one right option: s minimises the mean of −log softmax(s a)_right over the options' log-likelihoods a."""
        rows, labels = [], []
        batches = self.questions.calibration_batches()
        bar = self.questions.calibration_bar(batches)
        for batch, _, log_probs in self.score(batches, bar.update):
            for number, document in enumerate(batch.documents):
                right = right_options(batch.task, document)
                if len(right) == 1:
                    rows.append(log_probs[:, number])
                    labels.append(right[0])
        bar.close()
        parts = self.questions.task.parts
        if not labels:
            raise UserError(f"fit: no calibration question of {', '.join(parts)} has exactly one right option.")
        width = max(row.shape[1] for row in rows)
        padded = np.full((len(rows[0]), len(rows), width), -np.inf, np.float32)
        for number, row in enumerate(rows):
            padded[:, number, : row.shape[1]] = row
        scales = [1.0]
        for logits in padded[1:]:
            state = recalibrate.METHODS["temperature"].fit(Predictions(logits=logits, labels=np.asarray(labels)))
            scales.append(float(np.exp(state.log_scale)))
        splits = {self.questions.calibration_split(task) for task in parts.values()}
        source = "a fifth of the questions, which are not asked"
        if None not in splits:
            source = ", ".join(sorted(map(str, splits)))
        return OptionTemperature(tuple(scales), len(labels), source)


def confidences(method: Any, log_probs: Float[np.ndarray, "M _ K"]) -> Float[np.ndarray, "M _"]:
    return np.stack([_confidence(method, head_log_probs) for head_log_probs in log_probs])


def right_options(task: "ConfigurableTask", document: dict[str, Any]) -> list[int]:
    """Indices of the correct options of a question: several in TruthfulQA's mc2, none where it has no such option."""
    if task.config.task == "truthfulqa_mc2":
        return np.flatnonzero(document["mc2_targets"]["labels"]).tolist()
    right: Any = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    choices = task.doc_to_choice(document)
    answers = right if isinstance(right, list) else [right]
    places = [choices.index(answer) if answer in choices else answer for answer in answers]
    return [int(place) for place in places if not isinstance(place, str) and 0 <= place < len(choices)]
