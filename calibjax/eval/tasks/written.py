"""Written answers: generation, judgement, and confidence from tokens, samples, probes or the model's own words."""

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax.eval.answers.clusters import clusters_of, exact_clusters, find_clustering
from calibjax.eval.answers.confidence import semantic_confidence, trace_confidence
from calibjax.eval.answers.judges import find_judge, references
from calibjax.eval.answers.probe_features import PROBES, answer_features
from calibjax.eval.answers.registry import CONFIDENCES, Evidence
from calibjax.eval.answers.self_evaluation import STATED, TWO_WAY, TwoWayQuestion, read_number
from calibjax.eval.tasks.answer_files import Answers, Sample, load_or_compute, read_samples
from calibjax.eval.tasks.choices import confidences
from calibjax.eval.tasks.continuation import GeneratedText, continue_contexts, room_for_context
from calibjax.eval.tasks.questions import BATCH, Batch, TaskQuestions, harness_metrics
from calibjax.eval.tasks.scoring import Continuation
from calibjax.models.generate import Sampling
from calibjax.runtime.distributed import from_first
from calibjax.runtime.errors import UserError

_REPLY_TOKENS = 12
_TOP_K = 15  # most likely tokens of a distribution that confidences read; the default of uqlm


class WrittenBatch(NamedTuple):
    """Answers to a batch: the questions without examples, the tokens of each prompt that the model reads, the number
    of tokens before them that are cut off, and the answers."""

    questions: list[str]
    contexts: list[list[int]]
    cut: list[int]
    answers: list[GeneratedText]

    def texts(self) -> list[str]:
        return [answer.text.strip() for answer in self.answers]


class WrittenAnswers:
    """Writes answers to a task's questions, judges them, and computes their confidence.

    Attributes:
        probes: name -> parameters of each fitted probe.
    """

    def __init__(self, questions: TaskQuestions):
        self.questions, self.model, self.options = questions, questions.model, questions.options
        self.judge = find_judge(self.options.judge)
        self.clustering = find_clustering(self.options.clustering, self.model.lm)
        self.probes: Mapping[str, Any] = {}

    def answers(self, batch: Batch) -> Answers:
        """Written answers, and their confidence by the probability of their tokens and by the further methods."""
        written = self._write(batch)
        count = len(batch.documents)
        pairs = zip(written.contexts, written.answers, strict=True)
        continuations = [Continuation(context, answer.tokens) for context, answer in pairs]
        top_k = _TOP_K if self._reads("distributions") else 0
        scores = self.model.scorer.score(continuations, top_k)
        shape = (len(self.model.heads), BATCH, self.questions.generation_options(batch.task)["max_new_tokens"])
        log_probs = np.full(shape, -np.inf, np.float32)
        for number, score in enumerate(scores):
            log_probs[:, number, : score.log_probs.shape[1]] = score.log_probs
        confidence = confidences(self.options.text_confidence, log_probs)[:, :count]
        if self.options.further_confidences and count:
            evidence: Evidence = {"tokens": log_probs[0, :count]}
            if top_k:
                width = scores[0].distributions.shape[1]
                distributions = np.full((count, shape[-1], width), -np.inf, np.float32)
                for number, score in enumerate(scores):
                    distributions[number, : score.distributions.shape[2]] = score.distributions[0].T
                evidence["distributions"] = distributions
            confidence = np.concatenate([confidence, self._further_confidences(batch, written, evidence)])
        correct = self._judge(batch, [[answer.text] for answer in written.answers])[:, 0]
        harness = _harness_results(batch.task, batch.documents, [answer.text for answer in written.answers])
        details = [json.dumps({"right": list(references(document))}) for document in batch.documents]
        return Answers(
            confidence=confidence,
            correct=np.broadcast_to(correct, confidence.shape).copy(),
            choice=np.full(confidence.shape, -1, np.int32),
            log_prob=np.full(confidence.shape, np.nan, np.float32),
            subject=batch.subjects(),
            harness=harness_metrics(harness),
            cut=np.array(written.cut, np.int32),
            too_long=0,
            question=np.array(written.questions, str),
            answer=np.array(written.texts(), str),
            details=np.array(details, str),
        )

    def _write(self, batch: Batch) -> WrittenBatch:
        """Greedy answers, with the contexts in which they were generated and will be scored."""
        options = self.questions.generation_options(batch.task)
        whole = [self.model.tok_encode(prompt + self.model.word_end) for prompt in batch.prompts]
        room = room_for_context(options["max_new_tokens"], self.model.max_length)
        contexts = [context[-room:] for context in whole]
        cut = [len(context) - len(read) for context, read in zip(whole, contexts, strict=True)]
        answers = dict(continue_contexts(self.model.lm, contexts, **options))
        questions = [str(batch.task.doc_to_text(document)) for document in batch.documents]
        return WrittenBatch(questions, contexts, cut, [answers[number] for number in range(len(contexts))])

    def _judge(self, batch: Batch, texts: Sequence[Sequence[str]]) -> Float[np.ndarray, "N K"]:
        """Judgements of K answers to each question, in one process only: a judge may cost money, and may vary."""

        def judge() -> list[list[float]]:
            rows = zip(batch.prompts, texts, map(references, batch.documents), strict=True)
            return [[self.judge(prompt, answer, right) for answer in answers] for prompt, answers, right in rows]

        answers = len(texts[0]) if texts else 1
        return from_first(judge, np.zeros((len(texts), answers), np.float32))

    def _reads(self, field: str) -> bool:
        return any(field in CONFIDENCES[name].fields for name in self.options.further_confidences)

    def _further_confidences(self, batch: Batch, written: WrittenBatch, evidence: Evidence) -> Float[np.ndarray, "Q N"]:
        """The further confidences; `evidence`: what the base model gives for the answers' tokens."""
        if self._reads("clusters"):
            evidence |= self._sample_evidence(written, self._samples(batch, written))
        features = self._features(written, {PROBES[name].feature for name in self.questions.probe_names})
        rows = []
        for name in self.options.further_confidences:
            if name in PROBES:
                fitted = self.probes[name]
                evidence["log_odds"] = features[PROBES[name].feature] @ fitted["weights"] + fitted["bias"]
            elif name in TWO_WAY:
                evidence["two_way"] = self._reply_log_probs(TWO_WAY[name], written)
            elif name in STATED:
                evidence["stated"] = self._stated(name, written)
            confidence = CONFIDENCES[name]
            arrays = [evidence[field] for field in confidence.fields]
            rows.append(np.asarray(jax.jit(confidence.function)(*arrays), np.float32))
        return np.stack(rows)

    def _sample_evidence(self, written: WrittenBatch, samples: list[list[Sample]]) -> Evidence:
        texts, sampled = written.texts(), [[sample.text for sample in row] for row in samples]
        clusters, answer = clusters_of(self.clustering, written.questions, texts, sampled)
        exact, first = clusters_of(exact_clusters, written.questions, texts, sampled)
        before = np.maximum.accumulate(np.column_stack([first, exact[:, :-1]]), axis=1)
        return {
            "clusters": clusters,
            "answer": answer,
            "sample_log_probs": np.array([[sample.log_prob for sample in row] for row in samples], np.float32),
            "traces": np.array([[(sample.least, sample.last) for sample in row] for row in samples], np.float32),
            "distinct": exact > before,  # numbered by first appearance: a new one has a larger number
        }

    def _samples(self, batch: Batch, written: WrittenBatch, suffix: str = "") -> list[list[Sample]]:
        """Samples of each question, which depend on nothing but its number, its context and the seed."""
        count, directory, lm = self.options.samples, self.questions.context.directory, self.model
        options = self.questions.generation_options(batch.task)
        calibrated = self.options.sample_calibrated
        head = list(lm.heads.values())[-1] if calibrated or self._reads("traces") else None
        sampling = Sampling(
            temperature=self.options.sampling_temperature,
            key=jax.random.key(self.questions.context.seed),
            num_samples=count,
            prompt_seeds=tuple(batch.numbers),
            calibrated=calibrated,
        )
        options |= {"sampling": sampling, "head": head, "batch_size": max(options["batch_size"] // count, 1)}

        def draw() -> list[list[Sample]]:
            samples: list[list[Sample]] = [[] for _ in batch.numbers]
            for number, continued in continue_contexts(lm.lm, written.contexts, **options):
                mean = float(np.mean(continued.log_probs))
                traces = trace_confidence(continued.confidence)
                samples[number].append(Sample(continued.text.strip(), mean, *traces))
            return samples

        file = None
        if directory is not None and batch.numbers:
            questions = f"{batch.numbers[0]}-{len(batch.numbers)}"  # a run that resumes may have other batches
            file = directory / "answers" / "samples" / f"{batch.part}{suffix}-{questions}.json"
        read = functools.partial(read_samples, questions=len(batch.numbers), count=count)
        return load_or_compute(file, read, draw, lambda samples: {"samples": samples})

    def _features(self, written: WrittenBatch, names: Collection[str]) -> dict[str, Float[np.ndarray, "N F"]]:
        tokens = [answer.tokens for answer in written.answers]
        return answer_features(self.model.lm, written.contexts, tokens, names)

    def _prompts(self, template: str, written: WrittenBatch) -> list[str]:
        pairs = zip(written.questions, written.texts(), strict=True)
        return [self.model.message(template.format(question=question, answer=text)) for question, text in pairs]

    def _reply_log_probs(self, question: TwoWayQuestion, written: WrittenBatch) -> Float[np.ndarray, "N 2"]:
        replies = [question.yes, question.no]
        if self.model.chat is not None:
            replies = [reply.strip() for reply in replies]
        prompts = self._prompts(question.prompt, written)
        requests = [self.model.encode(prompt, reply) for prompt in prompts for reply in replies]
        log_probs = [score.log_probs[0].sum() for score in self.model.scorer.score(requests)]
        return np.array(log_probs, np.float32).reshape(-1, 2)

    def _stated(self, name: str, written: WrittenBatch) -> Float[np.ndarray, " N"]:
        """The confidence that each reply states; NaN where it cannot be read. Logs how many cannot."""
        lm = self.model
        room = room_for_context(_REPLY_TOKENS, lm.max_length)
        contexts = [lm.tok_encode(prompt)[-room:] for prompt in self._prompts(STATED[name], written)]
        options: dict[str, Any] = {"max_new_tokens": _REPLY_TOKENS, "batch_size": lm.scorer.batch_size}
        replies = dict(continue_contexts(lm.lm, contexts, until=["\n"], **options))
        values = [read_number(replies[number].text) for number in range(len(contexts))]
        if unread := values.count(None):
            replies_unread = f"{unread:,} of {len(values):,} replies could not be read"
            self.questions.context.log(f"{name}: {replies_unread}; their confidence is .5")
        return np.array(values, np.float32)  # None becomes NaN

    def probe_data(self, names: Sequence[str]) -> dict[str, tuple[Float[np.ndarray, "N F"], Float[np.ndarray, " N"]]]:
        """Answers the calibration questions: probe -> its features and their targets in [0, 1], of N answers."""
        batches = self.questions.calibration_batches()
        if not batches:
            parts = ", ".join(self.questions.task.parts)
            raise UserError(f"further_confidences: {parts} has no question to fit on; leave out {', '.join(names)}.")
        columns: list[dict[str, np.ndarray]] = []
        needed = {PROBES[name].target for name in names}
        bar = self.questions.calibration_bar(batches)
        for batch in batches:
            written = self._write(batch)
            values = self._features(written, {PROBES[name].feature for name in names})
            if "correct" in needed:
                values["correct"] = self._judge(batch, [[answer.text] for answer in written.answers])[:, 0]
            samples = self._samples(batch, written, "-fit") if needed & {"agreement", "capability"} else []
            texts = [[sample.text for sample in row] for row in samples]
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


def _harness_results(task: Any, documents: Sequence[Any], texts: Sequence[str]) -> list[dict[str, Any]]:
    """What lm-eval measures of each answer after the task's filters: by metric, or "metric,filter" for several."""
    from lm_eval.api.instance import Instance

    pairs = zip(documents, texts, strict=True)
    answers = [Instance("generate_until", document, (), 0, resps=[text]) for document, text in pairs]
    rows: list[dict[str, Any]] = [{} for _ in answers]
    for ensemble in task._filters if answers else ():
        ensemble.apply(answers)
        name = f",{ensemble.name}" if len(task._filters) > 1 else ""
        for row, answer in zip(rows, answers, strict=True):
            results = task.process_results(answer.doc, [answer.filtered_resps[ensemble.name]])
            row |= {metric + name: value for metric, value in results.items()}
    return rows
