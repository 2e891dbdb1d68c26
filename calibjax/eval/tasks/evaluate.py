"""Evaluation of a model on a task of lm-eval: the answer to every question, and its confidence under each head."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from lm_eval.api.task import ConfigurableTask

from calibjax import recalibrate
from calibjax.eval.answers.confidence import OptionConfidence, TextConfidence, answer_confidence
from calibjax.eval.answers.judges import Judge, references
from calibjax.eval.tasks.continuation import Continued, continue_contexts, room_for_context
from calibjax.eval.tasks.evidence import Asking, Questions, confidences
from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.scoring import Continuation, Score
from calibjax.models.generate import Sampling
from calibjax.recalibrate import Predictions
from calibjax.runtime.distributed import check_same, from_first
from calibjax.runtime.errors import UserError

AT_ONCE = 256
"""Questions whose log-probabilities are stored at a time."""
_MOST_CALIBRATION = 1_000
"""Questions of a part that a temperature over the options is fitted on."""
_confidence = jax.jit(answer_confidence, static_argnums=0)


_ROWS = ("confidence", "correct", "choice", "log_prob")


class Answers(NamedTuple):
    """Answers to N questions under M heads; of written answers M also counts the further confidences, after the heads.

    Attributes:
        confidence: float32 `[M, N]`.
        correct: float32 `[M, N]`.
        choice: int32 `[M, N]`, the option chosen; -1 for texts, which no head changes.
        log_prob: float32 `[M, N]`, of the right option under the distribution that the confidence is of, nats; NaN for
            texts, and where several options are right.
        subject: `[N]`, "" where a question has none.
        harness: `[N]` each, the harness's own metrics, of the first head.
        cut: `[N]`, tokens at the start of the prompt that the model could not read.
        too_long: questions left out because an option alone is longer than the model reads.
        question, answer: `[N]`, texts: the harness's question without examples, and the answer of the first head.
        details: `[N]`, JSON: `right`, the right answers; of multiple choice also `options`, and where one is right and
            the confidence is among the options, their log-likelihoods `logits` under the first head, and its `label`.
    """

    confidence: Float[np.ndarray, "M N"]
    correct: Float[np.ndarray, "M N"]
    choice: Int[np.ndarray, "M N"]
    log_prob: Float[np.ndarray, "M N"]
    subject: np.ndarray
    harness: dict[str, np.ndarray]
    cut: Int[np.ndarray, " N"]
    too_long: int
    question: np.ndarray
    answer: np.ndarray
    details: np.ndarray

    def first(self, rows: int) -> "Answers":
        """Keeps the first rows of M."""
        return self._replace(**{name: getattr(self, name)[:rows] for name in _ROWS})

    def row(self, number: int) -> "Answers":
        """Keeps one row of M."""
        return self._replace(**{name: getattr(self, name)[number : number + 1] for name in _ROWS})

    @classmethod
    def stack(cls, rows: Sequence["Answers"]) -> "Answers":
        """The rows of several answers to the same questions, one after the other."""
        return rows[0]._replace(**{name: np.concatenate([getattr(row, name) for row in rows]) for name in _ROWS})

    @classmethod
    def join(cls, parts: Sequence["Answers"]) -> "Answers":
        """Concatenates answers in their order."""
        arrays = (*_ROWS, "subject", "cut", "question", "answer", "details")
        joined = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in arrays}
        told = [part for part in parts if part.harness]  # a part without questions has no metrics
        names = [name for name in (told[0].harness if told else {}) if all(name in part.harness for part in told)]
        harness = {name: np.concatenate([part.harness[name] for part in told]) for name in names}
        return parts[0]._replace(**joined, harness=harness, too_long=sum(part.too_long for part in parts))


class How(NamedTuple):
    """Options of a benchmark: prompts, answers and confidences.

    Attributes:
        shots: few-shot examples before a question; None: the task's number.
        options: confidence of a chosen option.
        text: confidence of a written answer.
        judge: of written answers.
        max_new_tokens: largest number of tokens of a free-text answer; None: the task's, or else the model's default.
        limit: ask only so many questions of each task, drawn at random.
        seed: of that draw, of examples and of samples.
        asking: further confidences in written answers; None: none.
        log: called with a line on what could not be read.
        fit: leave calibration questions out, where the task has none beside those that it asks; see
            `calibration_questions`.
        scales: factor on the options' log-likelihoods of each head; empty for 1.
    """

    shots: int | None
    options: OptionConfidence
    text: TextConfidence
    judge: Judge
    max_new_tokens: int | None
    limit: int | None
    seed: int
    asking: Asking | None = None
    log: Callable[[str], None] = print
    fit: bool = False
    scales: tuple[float, ...] = ()


class Calibration(NamedTuple):
    """Temperature scaling over the options: the factor of each head, and the questions that it was fitted on."""

    scales: tuple[float, ...]
    questions: int
    source: str


def question_count(task: ConfigurableTask, how: How) -> int:
    """Returns the number of questions that `ask_parts` uses."""
    count = len(_pool(task, how))
    return min(count, how.limit or count)


def check(lm: HarnessLM, task: ConfigurableTask, how: How) -> None:
    """Raises `UserError` if a task is neither multiple choice nor free text, has too few few-shot examples, or allows
    longer answers than the model's context."""
    kind = task.OUTPUT_TYPE
    if how.fit and kind != "multiple_choice" and not (how.asking and how.asking.probed):
        raise UserError(f"task {task.config.task}: --fit fits a temperature over options, and this task has none.")
    if kind not in ("multiple_choice", "generate_until"):
        raise UserError(f"task {task.config.task}: expected multiple choice or free text, got {kind}.")
    shots = _shots(task, how)
    if shots and not _examples(task) >= shots:
        raise UserError(
            f"task {task.config.task}: {shots} examples before a question are asked for, and its data has "
            f"{_examples(task)}. Give --shots 0."
        )
    if kind == "generate_until":
        room_for_context(writing(lm, task, how)["max_new_tokens"], lm.max_length)


def _shots(task: ConfigurableTask, how: How) -> int:
    return task.config.num_fewshot or 0 if how.shots is None else how.shots


def writing(lm: HarnessLM, task: ConfigurableTask, how: How) -> dict[str, Any]:
    """Returns the arguments of `continue_contexts` for free text: greedy, whatever the task requests."""
    asked: dict[str, Any] = dict(task.config.generation_kwargs or {})
    if how.max_new_tokens is not None:
        asked = {name: value for name, value in asked.items() if not name.startswith("max_")}
        asked["max_gen_toks"] = how.max_new_tokens
    return {**lm.generation_options(asked), "sampling": Sampling()}


class Part(NamedTuple):
    """A part of a benchmark, such as a subject of MMLU; `subject` is of questions that have no column category."""

    task: ConfigurableTask
    subject: str


def ask_parts(
    lm: HarnessLM, parts: Mapping[str, Part], how: How, *, tick: Callable[[int], Any]
) -> Iterator[tuple[str, Answers]]:
    """Asks the questions of a benchmark, with its own prompts, and yields the answers to each part, in any order.

    Small parts are scored together: a batch has one shape however few questions are in it, and 57 subjects of 5
    questions would otherwise fill a sixth of their batches.

    Args:
        lm: the model with its heads; the first is that of the harness's metrics.
        parts: by name.
        how: see `How`.
        subject: of questions that have no column category.
        tick: called with the number of questions done.
    """
    waiting: list[Asked] = []
    for name, part in parts.items():
        count = question_count(part.task, how)
        questions = ((index, part.task.eval_docs[index]) for index in question_numbers(part.task, how))
        asked_pieces = (ask_piece(lm, name, part, how, piece) for piece in pieces(questions, AT_ONCE))
        if count > AT_ONCE or part.task.OUTPUT_TYPE != "multiple_choice":
            yield name, Answers.join([_answer_all(lm, how, [piece], tick)[0] for piece in asked_pieces])
            continue
        if sum(len(asked.documents) for asked in waiting) + count > AT_ONCE:
            yield from zip((asked.name for asked in waiting), _answer_all(lm, how, waiting, tick), strict=True)
            waiting = []
        waiting += asked_pieces
    yield from zip((asked.name for asked in waiting), _answer_all(lm, how, waiting, tick), strict=True)


class Asked(NamedTuple):
    """Up to `AT_ONCE` questions of a part, with their prompts; of multiple choice also what is scored, by question."""

    name: str
    part: Part
    documents: list[Any]
    prompts: Sequence[Any]
    options: list[list[Continuation]]
    numbers: Sequence[int]


def question_numbers(task: ConfigurableTask, how: How) -> Iterator[int]:
    pool = _pool(task, how)
    chosen = np.random.default_rng(how.seed).choice(len(pool), question_count(task, how), replace=False)
    return iter(pool[np.sort(chosen)].tolist())


def _pool(task: ConfigurableTask, how: How) -> Int[np.ndarray, " n"]:
    """The numbers of the questions that may be asked: all but those that a temperature is fitted on."""
    count = len(task.eval_docs)
    if not how.fit or calibration_split(task, how) is not None:
        return np.arange(count)
    return np.setdiff1d(np.arange(count), _set_aside(count, how.seed))


def _set_aside(count: int, seed: int) -> Int[np.ndarray, " n"]:
    """A fifth of `count` questions, drawn at random."""
    return np.sort(np.random.default_rng((seed, 1)).choice(count, count // 5, replace=False))


def calibration_split(task: ConfigurableTask, how: How) -> str | None:
    """The name of a split that is neither asked nor gives the examples before a question; None if there is none."""
    evaluated = task.config.test_split or task.config.validation_split
    examples = _example_split(task) if _shots(task, how) else None
    splits = (task.config.validation_split, task.config.training_split, task.fewshot_cfg.split)
    return next((split for split in splits if split and split not in (evaluated, examples)), None)


def calibration_questions(task: ConfigurableTask, how: How) -> list[tuple[int, Any]]:
    """Questions to fit on with their numbers, at most 1,000: of `calibration_split`, or a fifth of the task's own.

    They are drawn with the seed. No question is both here and in `ask_parts`.
    """
    split = calibration_split(task, how)
    if split is None:
        documents: Any = task.eval_docs
        numbers = _set_aside(len(documents), how.seed)
    else:
        process = task.config.process_docs
        documents = task.dataset[split] if process is None else process(task.dataset[split])
        numbers = np.arange(len(documents))
    if len(numbers) > _MOST_CALIBRATION:
        numbers = np.sort(np.random.default_rng((how.seed, 2)).choice(numbers, _MOST_CALIBRATION, replace=False))
    return [(index, documents[index]) for index in numbers.tolist()]


def fit_options(lm: HarnessLM, parts: Mapping[str, Part], how: How) -> Calibration:
    """Fits temperature scaling over the options to each head but the first, on calibration questions of all parts.

    The factor minimises the negative log-likelihood of the right option, −log softmax(s a)_right over the options'
    log-likelihoods a (summed or per token, as `how.options`). It never changes the choice.

    Raises:
        UserError: no calibration question has exactly one right option.
    """
    several = [
        ask_piece(lm, name, part, how, piece)
        for name, part in parts.items()
        for piece in pieces(iter(calibration_questions(part.task, how)), AT_ONCE)
    ]
    scored = [pair for asked in several for pairs in asked.options if _fit(lm, pairs) for pair in pairs]
    scores = iter(lm.scorer.score(scored))
    logits, labels = [], []
    for asked in several:
        kept, log_probs, _ = _option_log_probs(lm, how, asked, scores)
        for number, document in enumerate(kept):
            right = right_options(asked.part.task, document)
            if len(right) == 1:
                logits.append(log_probs[:, number])
                labels.append(right[0])
    if not labels:
        raise UserError(f"--fit: no calibration question of {', '.join(parts)} has exactly one right option.")
    width = max(row.shape[1] for row in logits)
    rows = [np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-np.inf) for row in logits]
    padded = np.stack(rows, axis=1)
    scales = [1.0]
    for of_head in padded[1:]:
        state = recalibrate.METHODS["temperature"].fit(Predictions(logits=of_head, labels=np.asarray(labels)))
        scales.append(float(np.exp(state.log_scale)))
    splits = {calibration_split(part.task, how) for part in parts.values()}
    source = "a fifth of the questions, which are not asked" if None in splits else ", ".join(sorted(map(str, splits)))
    return Calibration(tuple(scales), len(labels), source)


def ask_piece(lm: HarnessLM, name: str, part: Part, how: How, questions: Sequence[tuple[int, Any]]) -> Asked:
    """`questions`: their numbers in the task (in its calibration split), and what they are."""
    task, shots = part.task, _shots(part.task, how)
    numbers, documents = [number for number, _ in questions], [document for _, document in questions]
    task.set_fewshot_seed(how.seed)
    prompts = [lm.prompt(task, document, shots) for document in documents]
    check_same([str(len(documents)), *prompts], f"the questions of {task.config.task}")
    options: list[list[Continuation]] = []
    if task.OUTPUT_TYPE == "multiple_choice":
        for document, prompt in zip(documents, prompts, strict=True):
            requests: Any = task.construct_requests(document, prompt, apply_chat_template=lm.chat is not None)
            options.append([lm.encode(*request.args) for request in requests])
    return Asked(name, part, documents, prompts, options, numbers)


def _answer_all(lm: HarnessLM, how: How, several: Sequence[Asked], tick: Callable[[int], Any]) -> list[Answers]:
    """The answers to each of some parts. Options that can be read are scored in the same batches."""
    scored = [pair for asked in several for pairs in asked.options if _fit(lm, pairs) for pair in pairs]
    scores = iter(lm.scorer.score(scored))
    found = []
    for asked in several:
        if asked.part.task.OUTPUT_TYPE == "multiple_choice":
            found.append(_choose(lm, how, asked, scores))
        else:
            found.append(_ask_texts(lm, how, asked))
        tick(len(asked.documents))
    return found


def _fit(lm: HarnessLM, pairs: Sequence[Continuation]) -> bool:
    """Whether the model reads every option of a question."""
    return all(len(pair.tokens) <= lm.max_length for pair in pairs)


def _examples(task: ConfigurableTask) -> int:
    """Returns the number of few-shot examples of a task, not counting its test questions."""
    own = _example_split(task)
    evaluated = task.config.test_split or task.config.validation_split
    return 0 if own is None or own == evaluated else len(task.dataset[own])


def _example_split(task: ConfigurableTask) -> str | None:
    splits = (task.fewshot_cfg.split, task.config.training_split, task.config.validation_split)
    return next((split for split in splits if split and split != task.config.test_split), None)


def pieces(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while piece := list(islice(items, size)):
        yield piece


def _option_log_probs(
    lm: HarnessLM, how: How, asked: Asked, all_scores: Iterator[Score]
) -> tuple[list[Any], Float[np.ndarray, "M _ K"], list[tuple[int, list[Score]]]]:
    """The questions whose options can be read, log-likelihoods of their options, and each one's number and scores.

    The log-likelihoods are of `AT_ONCE` questions: of those that are not there, and of options that a question does
    not have, −inf. They are summed over the tokens of an option, or their mean (`options_per_token`).
    """
    readable = [_fit(lm, pairs) for pairs in asked.options]
    kept = [document for document, fits in zip(asked.documents, readable, strict=True) if fits]
    counts = [len(pairs) for pairs, fits in zip(asked.options, readable, strict=True) if fits]
    owners = np.repeat(np.arange(len(kept)), counts).tolist()
    scores = list(_grouped(owners, list(islice(all_scores, len(owners)))))
    most = max(counts, default=1)
    heads, width = len(lm.scorer.names), max(-(-most // 4) * 4, 4)  # few shapes
    log_probs = np.full((heads, AT_ONCE, width), -np.inf, np.float32)
    for question, options in scores:
        for place, score in enumerate(options):
            total = score.log_probs.sum(axis=1)
            per_token = how.options == "options_per_token"
            log_probs[:, question, place] = total / score.log_probs.shape[1] if per_token else total
    return kept, log_probs, scores


def _choose(lm: HarnessLM, how: How, asked: Asked, all_scores: Iterator[Score]) -> Answers:
    """The options chosen; takes the scores of this part's options from `all_scores`."""
    task, subject = asked.part.task, asked.part.subject
    kept, log_probs, scores = _option_log_probs(lm, how, asked, all_scores)
    if how.scales:
        log_probs = np.asarray(how.scales, np.float32)[:, None, None] * log_probs
    heads, n = len(lm.scorer.names), len(kept)
    there = np.isfinite(log_probs)
    confidence = np.stack([_confidence(how.options, *pair) for pair in zip(log_probs, there, strict=True)])[:, :n]
    choice = log_probs[:, :n].argmax(axis=-1)
    distribution = log_probs[:, :n]
    if how.options != "full_vocabulary":
        distribution = distribution - np.logaddexp.reduce(distribution, axis=-1, keepdims=True)
    correct, of_right, harness = np.zeros((heads, n)), np.full((heads, n), np.nan), []
    texts: list[tuple[str, str, str]] = []
    cut = np.zeros(n, np.int32)
    for question, options in scores:
        right = right_options(task, kept[question])
        correct[:, question] = np.isin(choice[:, question], right)
        if len(right) == 1:
            of_right[:, question] = distribution[:, question, right[0]]
        logits = None if how.options == "full_vocabulary" or len(right) != 1 else log_probs[0, question]
        texts.append(_texts_of_choice(task, kept[question], right, choice[0, question], logits))
        cut[question] = max(score.cut for score in options)
        answers = [(float(score.log_probs[0].sum()), bool(score.greedy.all())) for score in options]
        harness.append(task.process_results(kept[question], answers))
    return Answers(
        confidence.astype(np.float32),
        correct.astype(np.float32),
        choice.astype(np.int32),
        of_right.astype(np.float32),
        np.array([str(document.get("category", subject)) for document in kept], str),
        _numbers(harness),
        cut,
        len(asked.documents) - n,
        *(np.array(column, str) for column in (zip(*texts, strict=True) if texts else ((), (), ()))),
    )


def _texts_of_choice(
    task: ConfigurableTask, document: Any, right: list[int], chosen: int, logits: Float[np.ndarray, " K"] | None
) -> tuple[str, str, str]:
    """The question, its answer and the details of `Answers`."""
    options = [str(option) for option in task.doc_to_choice(document)]
    question = document.get("question") or document.get("query") if task.multiple_input else task.doc_to_text(document)
    details: dict[str, Any] = {"right": [options[place] for place in right], "options": options}
    if logits is not None:
        details |= {"logits": logits[: len(options)].tolist(), "label": right[0]}
    return str(question or ""), options[chosen], json.dumps(details)


def right_options(task: ConfigurableTask, document: dict[str, Any]) -> list[int]:
    """Returns the correct options of a question; several in TruthfulQA's mc2."""
    if task.config.task == "truthfulqa_mc2":
        return np.flatnonzero(document["mc2_targets"]["labels"]).tolist()
    right: Any = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    choices = task.doc_to_choice(document)
    found = right if isinstance(right, list) else [right]
    return [choices.index(answer) if isinstance(answer, str) else int(answer) for answer in found]


def _grouped(owners: Sequence[int], scores: list[Score]) -> Iterator[tuple[int, list[Score]]]:
    start = 0
    while start < len(owners):
        end = start
        while end < len(owners) and owners[end] == owners[start]:
            end += 1
        yield owners[start], scores[start:end]
        start = end


class Written(NamedTuple):
    """Prompts as tokens, whole and as far as they are read, and the answers to them."""

    whole: list[list[int]]
    contexts: list[list[int]]
    texts: list[Continued]

    def questions(self, asked: Asked, tokens: Float[np.ndarray, "N T"]) -> Questions:
        texts = [str(asked.part.task.doc_to_text(document)) for document in asked.documents]
        answers = [text.text.strip() for text in self.texts]
        return Questions(
            asked.name, asked.numbers, texts, self.contexts, answers, tokens, [text.tokens for text in self.texts]
        )


def write_answers(lm: HarnessLM, asked: Asked, options: dict[str, Any]) -> Written:
    whole = [lm.tok_encode(prompt + lm.word_end) for prompt in asked.prompts]
    room = room_for_context(options["max_new_tokens"], lm.max_length)
    contexts = [
        context[-room:] for context in whole
    ]  # continuations are scored in the context that they were generated in
    written = dict(continue_contexts(lm.lm, contexts, **options))
    return Written(whole, contexts, [written[number] for number in range(len(contexts))])


def judge_texts(how: How, asked: Asked, texts: Sequence[Sequence[str]]) -> Float[np.ndarray, "N K"]:
    """Judgements of K answers to each question, float32. In one process only: a judge may cost money, and may judge
    differently when it is called again."""
    rows = list(zip(asked.prompts, texts, map(references, asked.documents), strict=True))
    return from_first(
        lambda: [[how.judge(prompt, text, right) for text in of_question] for prompt, of_question, right in rows],
        np.zeros((len(texts), len(texts[0]) if texts else 1), np.float32),
    )


def _ask_texts(lm: HarnessLM, how: How, asked: Asked) -> Answers:
    task, documents = asked.part.task, asked.documents
    options = writing(lm, task, how)
    written = write_answers(lm, asked, options)
    whole, contexts, texts = written
    scored = lm.scorer.score([Continuation(*pair) for pair in zip(contexts, (t.tokens for t in texts), strict=True)])
    heads, n = len(lm.scorer.names), len(texts)
    log_probs = np.full((heads, AT_ONCE, options["max_new_tokens"]), -np.inf, np.float32)
    for number, score in enumerate(scored):
        log_probs[:, number, : score.log_probs.shape[1]] = score.log_probs
    there = np.isfinite(log_probs)
    confidence = np.stack([_confidence(how.text, *pair) for pair in zip(log_probs, there, strict=True)])[:, :n]
    given = written.questions(asked, log_probs[0, :n])
    if how.asking is not None and n:
        further = confidences(lm, how.asking, given, options, how.seed, how.log)
        confidence = np.concatenate([confidence, further])
    correct = judge_texts(how, asked, [[text.text] for text in texts])[:, 0]
    harness = [task.process_results(document, [t.text.strip()]) for document, t in zip(documents, texts, strict=True)]
    return Answers(
        confidence.astype(np.float32),
        np.broadcast_to(correct, confidence.shape).copy(),
        np.full(confidence.shape, -1, np.int32),
        np.full(confidence.shape, np.nan, np.float32),
        np.array([str(document.get("category", asked.part.subject)) for document in documents], str),
        _numbers(harness),
        np.array([len(all_of) - len(read) for all_of, read in zip(whole, contexts, strict=True)], np.int32),
        0,
        np.array(given.texts, str),
        np.array(given.answers, str),
        np.array([json.dumps({"right": list(references(document))}) for document in documents], str),
    )


def _numbers(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the metrics that have one number per question."""
    names = [name for name in (rows[0] if rows else {}) if all(np.ndim(row[name]) == 0 for row in rows)]
    return {name: np.array([float(row[name]) for row in rows]) for name in names}
