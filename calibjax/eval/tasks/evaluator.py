"""One task of lm-eval, from top to bottom: requests, log-likelihoods, confidence under each head, answers."""

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from calibjax import recalibrate
from calibjax.eval.answers.clusters import clusters_of, exact_clusters, find_clustering
from calibjax.eval.answers.confidence import answer_confidence, semantic_confidence, trace_confidence
from calibjax.eval.answers.judges import find_judge, references
from calibjax.eval.answers.probe_features import PROBES, answer_features
from calibjax.eval.answers.registry import CONFIDENCES
from calibjax.eval.answers.self_evaluation import STATED, TWO_WAY, Stated, TwoWay
from calibjax.eval.tasks.answer_files import Answers, OptionTemperature, Samples, read_samples, resumed
from calibjax.eval.tasks.continuation import Continued, continue_contexts, room_for_context
from calibjax.eval.tasks.scoring import Continuation, Score
from calibjax.models.generate import Sampling
from calibjax.recalibrate import Predictions
from calibjax.runtime.arrays import round_up
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import check_same, from_first
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from calibjax.eval.tasks.harness import HarnessLM
    from calibjax.eval.tasks.local_data import BenchmarkTask
    from calibjax.eval.tasks.options import TasksOptions

BATCH = 256  # questions whose log-probabilities are stored at a time
_MAX_CALIBRATION = 1_000  # questions of a part that a temperature or a probe is fitted on, at most
_REPLY_TOKENS = 12
_TOP_K = 15  # most likely tokens of a distribution that confidences read; the default of uqlm
_confidence = jax.jit(answer_confidence, static_argnums=0)


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


class Written(NamedTuple):
    """Answers to a batch: the questions without examples, the tokens of each prompt that the model reads, the number
    of tokens before them that are cut off, and the answers."""

    questions: list[str]
    contexts: list[list[int]]
    cut: list[int]
    answers: list[Continued]

    def texts(self) -> list[str]:
        return [answer.text.strip() for answer in self.answers]


class TaskEvaluator:
    """Evaluates a model on one task, by resolved options (`TasksOptions.resolved`).

    The harness's own metrics are of the first head of the model; samples are saved in the context's directory.

    Attributes:
        probe_names: probes among the confidences.
        option_temperature: temperature scaling over the options, if it is fitted.
        probes: name -> parameters of each fitted probe.
    """

    def __init__(
        self, model: "HarnessLM", name: str, task: "BenchmarkTask", options: "TasksOptions", context: RunContext
    ):
        self.model, self.name, self.task, self.options, self.context = model, name, task, options, context
        self.judge, self.clustering = find_judge(options.judge), find_clustering(options.clustering, model.lm)
        written = all(part.OUTPUT_TYPE == "generate_until" for part in task.parts.values())
        self.probe_names = [method for method in options.further_confidences if method in PROBES and written]
        self.option_temperature: OptionTemperature | None = None
        self.probes: Mapping[str, Any] = {}

    # Requests.

    def check(self) -> None:
        """Raises `UserError` for parts that cannot be evaluated with these options, model and data."""
        for task in self.task.parts.values():
            kind, name, shots = task.OUTPUT_TYPE, task.config.task, self.shots(task)
            if self.options.fit and kind != "multiple_choice":
                raise UserError(f"fit: it fits a temperature over options, and the task {name} has none.")
            if kind not in ("multiple_choice", "generate_until"):
                raise UserError(f"task {name}: expected multiple choice or free text, got {kind}.")
            split = _example_split(task)
            evaluated = task.config.test_split or task.config.validation_split
            listed = task.fewshot_cfg.samples
            examples = 0 if split is None or split == evaluated else len(task.dataset[split])
            examples = len(listed() if callable(listed) else listed) if listed else examples
            if shots > examples:
                raise UserError(f"shots: expected at most the {examples} examples of the task {name}, got {shots}.")
            if kind == "generate_until":
                room_for_context(self.generation_options(task)["max_new_tokens"], self.model.max_length)

    def shots(self, task: "ConfigurableTask") -> int:
        shots = self.options.shots_for(self.name)
        return task.config.num_fewshot or 0 if shots is None else shots

    def question_numbers(self, task: "ConfigurableTask") -> list[int]:
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
        """The documents of `calibration_split`, or else of the task, and the indices of up to 1,000 of them, which are
        fitted on and not asked."""
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

    def requests(self, part: str, documents: Any, numbers: Sequence[int]) -> Iterator[Batch]:
        """Yields the questions of a part, in batches; those with an option that is too long to be read are left out."""
        task, lm = self.task.parts[part], self.model
        subject = str(task.config.task_alias or part) if len(self.task.parts) > 1 else ""
        # Written answers take long: few at a time, so that progress shows and little is lost where a run is killed.
        size = BATCH if task.OUTPUT_TYPE == "multiple_choice" else min(lm.scorer.batch_size, BATCH)
        for start in range(0, len(numbers), size):
            chosen = list(numbers[start : start + size])
            task.set_fewshot_seed(self.context.seed)
            questions = [documents[number] for number in chosen]
            prompts = [lm.prompt(task, question, self.shots(task)) for question in questions]
            check_same([str(len(chosen)), *prompts], f"the questions of {task.config.task}")
            options: list[list[Continuation]] = []
            if task.OUTPUT_TYPE == "multiple_choice":
                for question, prompt in zip(questions, prompts, strict=True):
                    requests: Any = task.construct_requests(question, prompt, apply_chat_template=lm.chat is not None)
                    options.append([lm.encode(*request.args) for request in requests])
                longest = [max(len(option.tokens) for option in question) for question in options]
                readable = [place for place, length in enumerate(longest) if length <= lm.max_length]
                questions, prompts, options = ([x[place] for place in readable] for x in (questions, prompts, options))
            yield Batch(part, task, subject, chosen, questions, prompts, options)

    def _calibration_batches(self) -> list[Batch]:
        parts = self.task.parts.items()
        return [batch for name, task in parts for batch in self.requests(name, *self.calibration_questions(task))]

    def _calibration_bar(self, batches: Sequence[Batch]) -> Any:
        total = sum(len(batch.documents) for batch in batches)
        return self.context.bar(title=f"{self.name}: calibration questions", unit="question", total=total)

    # Answers.

    def answers(self, parts: Collection[str], tick: Callable[[int], Any]) -> Iterator[tuple[str, Answers]]:
        """Asks the questions of some parts and yields the answers to each part, in any order.

        Small parts are scored together: a batch has one shape however few questions are in it. `tick` is called with
        the number of questions done.
        """

        def choose(batches: Sequence[Batch]) -> list[Answers]:
            tick(sum(len(batch.numbers) - len(batch.documents) for batch in batches))  # too long to be asked
            return [self._chosen(*scored) for scored in self._score_options(batches, tick)]

        def write(batch: Batch) -> Answers:
            result = self._written(batch)
            tick(len(batch.numbers))
            return result

        together: list[Batch] = []
        for part in parts:
            task = self.task.parts[part]
            numbers = self.question_numbers(task)
            batches = self.requests(part, task.eval_docs, numbers)
            if task.OUTPUT_TYPE != "multiple_choice":
                yield part, Answers.join([write(batch) for batch in batches])
            elif len(numbers) > BATCH:
                yield part, Answers.join([choose([batch])[0] for batch in batches])
            else:
                if sum(len(batch.numbers) for batch in together) + len(numbers) > BATCH:
                    yield from zip([batch.part for batch in together], choose(together), strict=True)
                    together = []
                together += batches
        yield from zip([batch.part for batch in together], choose(together), strict=True)

    # Multiple choice.

    def _score_options(
        self, batches: Sequence[Batch], tick: Callable[[int], Any] = lambda _: None
    ) -> Iterator[tuple[Batch, list[list[Score]], Float[np.ndarray, "M _ K"]]]:
        """Yields each batch, the scores of its options, and their log-likelihoods under each head, padded with −inf:
        sums over their tokens, or means (`options_per_token`). `tick` is called with 1 for each scored question."""
        questions = [options for batch in batches for options in batch.options]
        continuations = [option for options in questions for option in options]
        question_of = [number for number, options in enumerate(questions) for _ in options]
        longest = max((len(option.tokens) for option in continuations), default=0)
        if longest > 1 and self.options.option_confidence == "full_vocabulary":
            problem = "among everything the model could write, the probability of a text is near 0 and says nothing"
            hint = "the option confidence `options` compares the options"
            self.context.log(f"WARNING: options of up to {longest} tokens: {problem}; {hint}")
        unscored = [len(options) for options in questions]
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

    def _confidences(self, method: Any, log_probs: Float[np.ndarray, "M _ K"]) -> Float[np.ndarray, "M _"]:
        return np.stack([_confidence(method, head_log_probs) for head_log_probs in log_probs])

    def _chosen(self, batch: Batch, scores: list[list[Score]], log_probs: Float[np.ndarray, "M _ K"]) -> Answers:
        """The most likely options and their confidence."""
        task, method = batch.task, self.options.option_confidence
        count = len(batch.documents)
        if self.option_temperature is not None:
            log_probs = np.asarray(self.option_temperature.scales, np.float32)[:, None, None] * log_probs
        confidence = self._confidences(method, log_probs)[:, :count]
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
            subject=_subjects(batch),
            harness=_numbers(harness),
            cut=np.array([max(score.cut for score in option_scores) for option_scores in scores], np.int32),
            too_long=len(batch.numbers) - count,
            question=question,
            answer=answer,
            details=details,
        )

    def fit_option_temperature(self) -> OptionTemperature:
        """Fits temperature scaling over the options to each head but the first, on the calibration questions that have
        one right option: s minimises the mean of −log softmax(s a)_right over the options' log-likelihoods a."""
        rows, labels = [], []
        batches = self._calibration_batches()
        bar = self._calibration_bar(batches)
        for batch, _, log_probs in self._score_options(batches, bar.update):
            for number, document in enumerate(batch.documents):
                right = right_options(batch.task, document)
                if len(right) == 1:
                    rows.append(log_probs[:, number])
                    labels.append(right[0])
        bar.close()
        parts = self.task.parts
        if not labels:
            raise UserError(f"fit: no calibration question of {', '.join(parts)} has exactly one right option.")
        width = max(row.shape[1] for row in rows)
        rows = [np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-np.inf) for row in rows]
        scales = [1.0]
        for logits in np.stack(rows, axis=1)[1:]:
            state = recalibrate.METHODS["temperature"].fit(Predictions(logits=logits, labels=np.asarray(labels)))
            scales.append(float(np.exp(state.log_scale)))
        splits = {self.calibration_split(task) for task in parts.values()}
        source = "a fifth of the questions, which are not asked"
        if None not in splits:
            source = ", ".join(sorted(map(str, splits)))
        return OptionTemperature(tuple(scales), len(labels), source)

    # Written answers.

    def generation_options(self, task: "ConfigurableTask") -> dict[str, Any]:
        """The arguments of `continue_contexts` for an answer: greedy, whatever the task requests."""
        requested: dict[str, Any] = dict(task.config.generation_kwargs or {})
        if self.options.max_new_tokens is not None:
            requested = {name: value for name, value in requested.items() if not name.startswith("max_")}
            requested["max_gen_toks"] = self.options.max_new_tokens
        return {**self.model.generation_options(requested), "sampling": Sampling()}

    def _write(self, batch: Batch) -> Written:
        """Greedy answers, with the contexts in which they were generated and will be scored."""
        options = self.generation_options(batch.task)
        whole = [self.model.tok_encode(prompt + self.model.word_end) for prompt in batch.prompts]
        room = room_for_context(options["max_new_tokens"], self.model.max_length)
        contexts = [context[-room:] for context in whole]
        cut = [len(context) - len(read) for context, read in zip(whole, contexts, strict=True)]
        answers = dict(continue_contexts(self.model.lm, contexts, **options))
        questions = [str(batch.task.doc_to_text(document)) for document in batch.documents]
        return Written(questions, contexts, cut, [answers[number] for number in range(len(contexts))])

    def _judge(self, batch: Batch, texts: Sequence[Sequence[str]]) -> Float[np.ndarray, "N K"]:
        """Judgements of K answers to each question, in one process only: a judge may cost money, and may vary."""
        rows = list(zip(batch.prompts, texts, map(references, batch.documents), strict=True))
        return from_first(
            lambda: [[self.judge(prompt, answer, right) for answer in answers] for prompt, answers, right in rows],
            np.zeros((len(texts), len(texts[0]) if texts else 1), np.float32),
        )

    def _written(self, batch: Batch) -> Answers:
        """Written answers, and their confidence by the probability of their tokens and by the further methods."""
        written = self._write(batch)
        count = len(batch.documents)
        pairs = zip(written.contexts, written.answers, strict=True)
        continuations = [Continuation(context, answer.tokens) for context, answer in pairs]
        top_k = _TOP_K if self._reads("distributions") else 0
        scores = self.model.scorer.score(continuations, top_k)
        shape = (len(self.model.heads), BATCH, self.generation_options(batch.task)["max_new_tokens"])
        log_probs = np.full(shape, -np.inf, np.float32)
        for number, score in enumerate(scores):
            log_probs[:, number, : score.log_probs.shape[1]] = score.log_probs
        confidence = self._confidences(self.options.text_confidence, log_probs)[:, :count]
        if self.options.further_confidences and count:
            evidence = {"tokens": log_probs[0, :count]}
            if top_k:
                distributions = np.full((count, shape[-1], scores[0].distributions.shape[1]), -np.inf, np.float32)
                for number, score in enumerate(scores):
                    distributions[number, : score.distributions.shape[2]] = score.distributions[0].T
                evidence["distributions"] = distributions
            confidence = np.concatenate([confidence, self._further_confidences(batch, written, evidence)])
        correct = self._judge(batch, [[answer.text] for answer in written.answers])[:, 0]
        texts, documents = written.texts(), batch.documents
        process = batch.task.process_results
        return Answers(
            confidence=confidence,
            correct=np.broadcast_to(correct, confidence.shape).copy(),
            choice=np.full(confidence.shape, -1, np.int32),
            log_prob=np.full(confidence.shape, np.nan, np.float32),
            subject=_subjects(batch),
            harness=_numbers([process(document, [text]) for document, text in zip(documents, texts, strict=True)]),
            cut=np.array(written.cut, np.int32),
            too_long=0,
            question=np.array(written.questions, str),
            answer=np.array(texts, str),
            details=np.array([json.dumps({"right": list(references(document))}) for document in documents], str),
        )

    def _reads(self, field: str) -> bool:
        """Whether a further confidence reads this field of `Evidence`."""
        return any(field in CONFIDENCES[name].fields for name in self.options.further_confidences)

    def _further_confidences(
        self, batch: Batch, written: Written, evidence: dict[str, Any]
    ) -> Float[np.ndarray, "Q N"]:
        """The further confidences; `evidence` holds fields of `Evidence`, of the base model for the answers' tokens."""
        texts = written.texts()
        if self._reads("clusters"):
            samples = self._samples(batch, written)
            sampled = [[text for text, *_ in row] for row in samples]
            clusters, answer = clusters_of(self.clustering, written.questions, texts, sampled)
            numbers = np.array([[values for _, *values in row] for row in samples], np.float32)
            evidence |= {"clusters": clusters, "answer": answer}
            evidence |= {"sample_log_probs": numbers[..., 0], "traces": numbers[..., 1:]}
            evidence["distinct"] = _is_new(*clusters_of(exact_clusters, written.questions, texts, sampled))
        features = self._features(written, {PROBES[name].feature for name in self.probe_names})
        rows = []
        for name in self.options.further_confidences:
            if name in PROBES:
                fitted = self.probes[name]
                evidence["log_odds"] = features[PROBES[name].feature] @ fitted["weights"] + fitted["bias"]
            elif name in TWO_WAY:
                evidence["two_way"] = self._reply_log_probs(TWO_WAY[name], written)
            elif name in STATED:
                evidence["stated"] = self._stated(name, STATED[name], written)
            confidence = CONFIDENCES[name]
            arrays = [evidence[field] for field in confidence.fields]
            rows.append(np.asarray(jax.jit(confidence.function)(*arrays), np.float32))
        return np.stack(rows)

    def _samples(self, batch: Batch, written: Written, suffix: str = "") -> Samples:
        """Samples of each question, which depend on nothing but its number, its context and the seed."""
        count, directory, lm = self.options.samples, self.context.directory, self.model
        options = self.generation_options(batch.task)
        calibrated = self.options.sample_calibrated
        head = list(lm.heads.values())[-1] if calibrated or self._reads("traces") else None
        sampling = Sampling(
            temperature=self.options.sampling_temperature,
            key=jax.random.key(self.context.seed),
            count=count,
            prompt_seeds=tuple(batch.numbers),
            calibrated=calibrated,
        )
        options |= {"sampling": sampling, "head": head, "batch_size": max(options["batch_size"] // count, 1)}

        def draw() -> Samples:
            samples: Samples = [[] for _ in batch.numbers]
            for number, continued in continue_contexts(lm.lm, written.contexts, **options):
                mean = float(np.mean(continued.log_probs))
                traces = trace_confidence(continued.confidence)
                samples[number].append((continued.text.strip(), mean, *traces))
            return samples

        file = None
        if directory is not None and batch.numbers:
            file = directory / "answers" / "samples" / f"{batch.part}{suffix}-{batch.numbers[0]}.json"
        read = functools.partial(read_samples, questions=len(batch.numbers), count=count)
        return resumed(file, read, draw, lambda samples: {"samples": samples})

    def _features(self, written: Written, names: Collection[str]) -> dict[str, Float[np.ndarray, "N F"]]:
        tokens = [answer.tokens for answer in written.answers]
        return answer_features(self.model.lm, written.contexts, tokens, names)

    def _prompts(self, template: str, written: Written) -> list[str]:
        """Prompts that show the model its own answers."""
        pairs = zip(written.questions, written.texts(), strict=True)
        return [self.model.message(template.format(question=question, answer=text)) for question, text in pairs]

    def _reply_log_probs(self, question: TwoWay, written: Written) -> Float[np.ndarray, "N 2"]:
        """The log-probabilities of the reply for an answer and of the reply against it."""
        replies = [question.yes, question.no]
        if self.model.chat is not None:
            replies = [reply.strip() for reply in replies]
        prompts = self._prompts(question.prompt, written)
        scores = self.model.scorer.score([self.model.encode(prompt, reply) for prompt in prompts for reply in replies])
        return np.array([score.log_probs[0].sum() for score in scores], np.float32).reshape(-1, 2)

    def _stated(self, name: str, question: Stated, written: Written) -> Float[np.ndarray, " N"]:
        """The confidence that each reply states; NaN where it cannot be read. Logs how many cannot."""
        lm = self.model
        room = room_for_context(_REPLY_TOKENS, lm.max_length)
        contexts = [lm.tok_encode(prompt)[-room:] for prompt in self._prompts(question.prompt, written)]
        options: dict[str, Any] = {"max_new_tokens": _REPLY_TOKENS, "batch_size": lm.scorer.batch_size}
        replies = dict(continue_contexts(lm.lm, contexts, until=["\n"], **options))
        values = [question.read(replies[number].text) for number in range(len(contexts))]
        if unread := values.count(None):
            self.context.log(f"{name}: {unread:,} of {len(values):,} replies could not be read; their confidence is .5")
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def probe_data(self, names: Sequence[str]) -> dict[str, tuple[Float[np.ndarray, "N F"], Float[np.ndarray, " N"]]]:
        """Answers the calibration questions: probe -> its features and their targets in [0, 1], of N answers."""
        batches = self._calibration_batches()
        if not batches:
            parts = ", ".join(self.task.parts)
            raise UserError(f"further_confidences: {parts} has no questions to fit {', '.join(names)} on.")
        columns: list[dict[str, np.ndarray]] = []
        needed = {PROBES[name].target for name in names}
        bar = self._calibration_bar(batches)
        for batch in batches:
            written = self._write(batch)
            values = self._features(written, {PROBES[name].feature for name in names})
            if "correct" in needed:
                values["correct"] = self._judge(batch, [[answer.text] for answer in written.answers])[:, 0]
            samples = self._samples(batch, written, "-fit") if needed & {"agreement", "capability"} else []
            texts = [[text for text, *_ in row] for row in samples]
            if "agreement" in needed:
                clusters = clusters_of(self.clustering, written.questions, written.texts(), texts)
                values["agreement"] = np.asarray(semantic_confidence(*map(jnp.asarray, clusters)))
            if "capability" in needed:
                values["capability"] = self._judge(batch, texts).mean(axis=1)
            columns.append(values)
            bar.update(len(batch.documents))
        bar.close()
        joined = {key: np.concatenate([part[key] for part in columns]) for key in columns[0]}
        return {name: (joined[PROBES[name].feature], joined[PROBES[name].target]) for name in names}


def _set_aside(count: int, seed: int) -> Int[np.ndarray, " n"]:
    """A fifth of `count` questions, drawn at random, to fit on."""
    return np.sort(np.random.default_rng((seed, 1)).choice(count, count // 5, replace=False))


def _is_new(clusters: Int[np.ndarray, "N K"], answer: Int[np.ndarray, " N"]) -> np.ndarray:
    """Whether a sample differs from the answer and from all samples before it, bool `[N, K]`.

    Clusters are numbered by first appearance, so that a new one has a larger number than all before it.
    """
    before = np.maximum.accumulate(np.column_stack([answer, clusters[:, :-1]]), axis=1)
    return clusters > before


def _example_split(task: "ConfigurableTask") -> str | None:
    splits = (task.fewshot_cfg.split, task.config.training_split, task.config.validation_split)
    return next((split for split in splits if split and split != task.config.test_split), None)


def right_options(task: "ConfigurableTask", document: dict[str, Any]) -> list[int]:
    """Indices of the correct options of a question; several in TruthfulQA's mc2."""
    if task.config.task == "truthfulqa_mc2":
        return np.flatnonzero(document["mc2_targets"]["labels"]).tolist()
    right: Any = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    choices = task.doc_to_choice(document)
    answers = right if isinstance(right, list) else [right]
    return [choices.index(answer) if isinstance(answer, str) else int(answer) for answer in answers]


def _subjects(batch: Batch) -> np.ndarray:
    return np.array([str(document.get("category", batch.subject)) for document in batch.documents], str)


def _numbers(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Name -> values, of the metrics that have one number for each question."""
    names = [name for name in (rows[0] if rows else {}) if all(np.ndim(row[name]) == 0 for row in rows)]
    return {name: np.array([float(row[name]) for row in rows]) for name in names}
