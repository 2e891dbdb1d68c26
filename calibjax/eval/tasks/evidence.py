"""Evidence on written answers beyond their tokens: samples of other answers, and what the model says of its own."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from calibjax.eval.answers.asked import STATED, TWO_WAY
from calibjax.eval.answers.clusters import Clustering, clusters_of, cosine_clusters
from calibjax.eval.answers.methods import METHODS, Evidence
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.tasks.continuation import Continued, HeadSampling, continue_contexts
from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.hidden import answer_features
from calibjax.eval.tasks.scoring import Continuation
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.models.generate import Sampling
from calibjax.runtime.checksums import seal, unseal
from calibjax.runtime.distributed import on_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json, write_file

_REPLY_TOKENS = 12
_WIDTH = 16  # texts to embed are padded to a multiple of this


class Asking(NamedTuple):
    """Which confidences in written answers are computed, and how.

    Attributes:
        methods: names, of `WRITTEN`.
        samples: answers sampled for each question, K.
        temperature: of the samples.
        same: which answers mean the same.
        folder: where the samples are kept, so that a killed run resumes; None: nowhere.
        head: sample from its calibrated distribution; None: from that of the base model.
        probes: name -> parameters of each probe among the methods (`calibjax.train.probes`).
    """

    methods: tuple[str, ...]
    samples: int
    temperature: float
    same: Clustering
    folder: Path | None
    head: FittedHead | None = None
    probes: Mapping[str, Any] = {}

    @property
    def probed(self) -> list[str]:
        """The probes among the methods."""
        return [name for name in self.methods if name in PROBES]


class Questions(NamedTuple):
    """N questions of a part of a task, with their written answers.

    Attributes:
        name: of the part.
        numbers: of the questions in the task's data.
        texts: the questions, without examples.
        contexts: tokens of the prompts.
        answers: the answers.
        tokens: log-probability of each token of the answers, `[N, T]`, −inf where there is none.
        written: ids of the tokens of the answers.
    """

    name: str
    numbers: Sequence[int]
    texts: Sequence[str]
    contexts: Sequence[Sequence[int]]
    answers: Sequence[str]
    tokens: Float[np.ndarray, "N T"]
    written: Sequence[Sequence[int]]


def confidences(
    lm: HarnessLM, asking: Asking, questions: Questions, writing: dict[str, Any], seed: int, log: Callable[[str], None]
) -> Float[np.ndarray, "Q N"]:
    """The confidences of `asking.methods` in the answers of some questions.

    Args:
        lm: the model; samples and replies are those of the base model.
        asking, questions: see there.
        writing: arguments of `continue_contexts` for the answers of the task.
        seed: of the samples; each question has samples of its own, whatever other questions are asked.
        log: called with a line on replies that could not be read.
    """
    reads = {field for name in asking.methods for field in METHODS[name].reads}
    known: dict[str, Any] = {"tokens": questions.tokens}
    if "clusters" in reads:
        samples = sampled(lm, asking, questions, writing, seed)
        texts = [[text for text, _ in row] for row in samples]
        known["clusters"], known["answer"] = clusters_of(asking.same, questions.texts, questions.answers, texts)
        known["sample_log_probs"] = np.array([[mean for _, mean in row] for row in samples], np.float32)
    found = []
    features = answer_features(
        lm.lm, questions.contexts, questions.written, {PROBES[name].feature for name in asking.probed}
    )
    for name in asking.methods:
        if name in PROBES:
            fitted = asking.probes[name]
            known["probed"] = features[PROBES[name].feature] @ fitted["weights"] + fitted["bias"]
        if name in TWO_WAY:
            known["asked"] = _two_way(lm, name, questions)
        if name in STATED:
            known["stated"] = _stated(lm, name, questions, log)
        method = METHODS[name]
        evidence = Evidence(**{field: known[field] for field in method.reads})
        found.append(np.asarray(_jitted(name)(evidence), np.float32))
    return np.stack(found)


@functools.cache
def _jitted(name: str) -> Callable[[Evidence], Any]:
    return jax.jit(METHODS[name].function)


def sampled(
    lm: HarnessLM, asking: Asking, questions: Questions, writing: dict[str, Any], seed: int
) -> list[list[tuple[str, float]]]:
    """K samples of each question: text, and mean log-probability of its tokens. Read from a file if they are there."""
    file = None
    if asking.folder is not None and questions.numbers:
        file = asking.folder / f"{questions.name}-{questions.numbers[0]}.json"
        if on_first(file.is_file):
            return _kept(file, len(questions.numbers), asking.samples)
    options = {**writing, "batch_size": max(writing["batch_size"] // asking.samples, 1)}
    given: dict[str, Any] = {
        "temperature": asking.temperature,
        "key": jax.random.key(seed),
        "count": asking.samples,
        "numbers": tuple(questions.numbers),
    }
    sampling = Sampling(**given) if asking.head is None else HeadSampling(**given, head=asking.head)
    drawn: list[list[Continued]] = [[] for _ in questions.numbers]
    for number, continued in continue_contexts(lm.lm, questions.contexts, **{**options, "sampling": sampling}):
        drawn[number].append(continued)
    rows = [[(one.text.strip(), float(np.mean(one.log_probs))) for one in row] for row in drawn]
    if file is not None:

        def keep() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(seal({"samples": rows})))

        on_first(keep)
    return rows


def _kept(file: Path, questions: int, samples: int) -> list[list[tuple[str, float]]]:
    """The samples in a file of `sampled`; raises `UserError` if it is damaged or of other numbers."""
    try:
        rows = [[(text, float(mean)) for text, mean in row] for row in unseal(read_json(file))["samples"]]
        if [len(row) for row in rows] != [samples] * questions:
            raise ValueError("another number of samples")
        if not all(isinstance(text, str) and -math.inf < mean <= 0 for row in rows for text, mean in row):
            raise ValueError("not a text and its mean log-probability")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: expected {samples} samples of each of {questions} questions ({error}). Remove this file to draw "
            "them again."
        ) from error
    return rows


def _prompts(lm: HarnessLM, prompt: str, questions: Questions) -> list[str]:
    pairs = zip(questions.texts, questions.answers, strict=True)
    return [lm.message(prompt.format(question=text, answer=answer.strip())) for text, answer in pairs]


def _two_way(lm: HarnessLM, name: str, questions: Questions) -> Float[np.ndarray, "N 2"]:
    """Log-probability of the reply for an answer and of that against it; the longest contexts lose their start."""
    asked = TWO_WAY[name]
    pairs = [
        lm.encode(prompt, reply if lm.chat is None else reply.strip())
        for prompt in _prompts(lm, asked.prompt, questions)
        for reply in (asked.yes, asked.no)
    ]
    scores = lm.scorer.score([Continuation(*pair) for pair in pairs])
    return np.array([score.log_probs[0].sum() for score in scores], np.float32).reshape(-1, 2)


def _stated(lm: HarnessLM, name: str, questions: Questions, log: Callable[[str], None]) -> Float[np.ndarray, " N"]:
    """The confidence in each reply; NaN for those that cannot be read, which are counted."""
    asked = STATED[name]
    contexts = [lm.tok_encode(prompt) for prompt in _prompts(lm, asked.prompt, questions)]
    options = {"max_new_tokens": _REPLY_TOKENS, "max_length": lm.max_length, "batch_size": lm.scorer.batch_size}
    replies = dict(continue_contexts(lm.lm, contexts, until=["\n"], **options))
    values = [asked.read(replies[number].text) for number in range(len(contexts))]
    unread = sum(value is None for value in values)
    if unread:
        log(f"{name}: {unread:,} of {len(values):,} replies could not be read; their confidence is .5")
    return np.array([np.nan if value is None else value for value in values], np.float32)


def hidden_clustering(lm: LanguageModel, threshold: float = 0.9) -> Clustering:
    """A clustering by the cosine of the mean hidden states of the answers, after the last layer of a model."""

    def clusters(question: str, answers: Sequence[str]) -> list[int]:
        ids = [lm.tokenizer.encode(text, add_special_tokens=False) or [0] for text in answers]
        width = -(-max(map(len, ids)) // _WIDTH) * _WIDTH
        tokens, segments = np.zeros((2, len(ids), width), np.int32)
        for row, own in enumerate(ids):
            tokens[row, : len(own)], segments[row, : len(own)] = own, 1
        hidden = np.asarray(lm.hidden_states(tokens, segment_ids=segments), np.float64)
        means = (hidden * segments[..., None]).sum(axis=1) / segments.sum(axis=1, keepdims=True)
        return cosine_clusters(means, threshold).tolist()

    return clusters
