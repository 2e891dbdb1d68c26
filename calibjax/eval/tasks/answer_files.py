"""The answers to a task, and the files of a run: a killed run resumes from them, and other commands read the tables."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from calibjax.data.write import write_rows
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.runtime.checksums import array_digests, json_digest, seal, unseal
from calibjax.runtime.distributed import on_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import json_text, new_file, read_json, write_file

Value = TypeVar("Value")
_PER_METHOD = ("confidence", "correct", "choice", "log_prob")
_PER_QUESTION = ("subject", "cut", "question", "answer", "details")
COLUMNS = ("question", "answer", "category", "confidence", "correct", "right", "options", "logits", "label")
"""Columns of a table of answers beside the confidence of each method."""


class Sample(NamedTuple):
    """A sampled answer: its text, the mean log-probability of its tokens, and its `trace_confidence`."""

    text: str
    log_prob: float
    least: float
    last: float


class Answers(NamedTuple):
    """Answers to N questions with M confidences: one per head, and for written answers one per further method.

    Attributes:
        confidence, correct: float32.
        choice: int32, the chosen option; -1 for written answers, which no head changes.
        log_prob: float32, nats, of the right option in the distribution that the confidence is read from; NaN for
            written answers and where several options are right.
        subject: "" where a question has none.
        harness: metric of the harness -> its values for the first head.
        cut: tokens at the start of the prompt that the model could not read.
        too_long: number of questions left out because an option is longer than the model reads.
        question, answer: texts: the question without examples, and the answer of the first head.
        details: JSON: `right`, the right answers; of multiple choice also `options`, and where one is right and the
            confidence is among the options, their log-likelihoods `logits` under the first head, and its `label`.
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

    @classmethod
    def join(cls, parts: Sequence["Answers"], methods: int | None = None) -> "Answers":
        """Concatenates answers; `methods`: how many of the M rows to keep, from the first."""
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _PER_QUESTION}
        for name in _PER_METHOD:
            columns[name] = np.concatenate([getattr(part, name)[:methods] for part in parts], axis=1)
        measured = [part.harness for part in parts if part.harness]  # a part without questions has no metrics
        first = measured[0] if measured else {}
        names = [name for name in first if all(name in values for values in measured)]
        harness = {name: np.concatenate([values[name] for values in measured]) for name in names}
        return cls(**columns, harness=harness, too_long=sum(part.too_long for part in parts))


class OptionTemperature(NamedTuple):
    """Temperature scaling over the options: the factor of each head, the number of questions, and their source."""

    scales: tuple[float, ...]
    questions: int
    source: str

    def __str__(self) -> str:
        temperatures = " and ".join(f"{1 / scale:.9g}" for scale in self.scales[1:])
        at_bound = min(self.scales) < 1.01 * math.exp(-6)
        bound = ", the largest: no sign of the right option" if at_bound else ""
        fitted = f"fitted on {self.questions:,} questions ({self.source})"
        return f"temperature over the options {temperatures}{bound}, {fitted}"


def claim_answers(directory: Path, lm: LanguageModel, heads: Mapping[str, FittedHead], settings: Any = None) -> None:
    """Records model, heads and `settings` (JSON-able) of the answers in `directory`; `UserError` if it has others."""
    digests = {name: json_digest([head.log_factor, array_digests(head.params)]) for name, head in heads.items()}
    model = {"base_fingerprint": lm.fingerprint, "dtype": str(lm.dtype)}
    identity = {**model, "heads": digests, "settings": settings}
    file = directory / "model.json"

    def claim() -> None:
        if not file.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            write_file(file, json_text(identity))
            return
        try:
            same = read_json(file) == identity
        except ValueError as error:
            raise UserError(f"{file}: not readable ({error}). Choose another directory, or remove this one.") from error
        if not same:
            different = "its answers are of a model or head with other weights or dtype, other options or questions"
            raise UserError(f"{directory}: {different}. Choose another directory, or remove this one.")

    on_first(claim)


def load_or_compute(
    file: Path | None, read: Callable[[Path], Value], compute: Callable[[], Value], to_json: Callable[[Value], Any]
) -> Value:
    """The value in `file` if it exists; otherwise computes and writes it. Without a file, only computes it."""
    if file is not None and on_first(file.is_file):
        return read(file)
    value = compute()
    if file is not None:
        on_first(functools.partial(write_sealed, file, to_json(value)))
    return value


def write_sealed(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(seal(value)) + "\n")


def write_answers(file: Path, answers: Answers) -> None:
    file.parent.mkdir(exist_ok=True)
    fields = answers._asdict()
    fields |= {f"harness_{name}": value for name, value in fields.pop("harness").items()}
    with new_file(file) as out:
        np.savez_compressed(out, **fields)


def read_answers(file: Path) -> Answers:
    """Reads what `write_answers` wrote; raises `UserError` if the file is damaged."""
    try:
        with np.load(file) as arrays:
            fields: dict[str, Any] = {name: arrays[name] for name in Answers._fields if name != "harness"}
            prefix = "harness_"
            harness = {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
        return Answers(**{**fields, "too_long": int(fields["too_long"])}, harness=harness)
    except Exception as error:  # of zipfile, zlib, tokenize and numpy, as of an array that fits no memory
        raise UserError(f"{file}: not answers ({error}). Remove this file to ask its questions again.") from error


def write_table(file: Path, names: Sequence[str], answers: Answers) -> None:
    """Writes a line per question, for `compare` and `decide`: `confidence` and `correct` of the first method, the
    confidence of each, and `correct_NAME` where methods choose differently."""
    details = [json.loads(text) for text in answers.details.tolist()]
    if not all("label" in row for row in details):
        details = [{key: row[key] for key in ("right", "options") if key in row} for row in details]
    columns: dict[str, Any] = {"question": answers.question, "answer": answers.answer}
    if all(answers.subject):
        columns["category"] = answers.subject
    columns |= {"confidence": answers.confidence[0], "correct": answers.correct[0]}
    columns |= dict(zip(names, answers.confidence, strict=True))
    if (answers.correct != answers.correct[0]).any():
        columns |= {f"correct_{name}": correct for name, correct in zip(names, answers.correct, strict=True)}
    lists = [x.tolist() if x.dtype.kind == "U" else x.astype(np.float64).tolist() for x in columns.values()]
    rows = []
    for *cells, more in zip(*lists, details, strict=True):
        rows.append(dict(zip(columns, cells, strict=True)) | more)
    write_rows(file, lambda: iter(rows))


def read_fit(file: Path) -> OptionTemperature:
    """Reads a fitted temperature; raises `UserError` if the file is damaged."""
    try:
        fit = OptionTemperature(**unseal(read_json(file)))
        return fit._replace(scales=tuple(map(float, fit.scales)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: not a fitted temperature ({error}). Remove this file to fit it again.") from error


def read_samples(file: Path, questions: int, count: int) -> list[list[Sample]]:
    """Reads `count` samples of each question; raises `UserError` if the file is damaged or has another number."""
    try:
        rows = [[Sample(*sample) for sample in row] for row in unseal(read_json(file))["samples"]]
        if [len(row) for row in rows] != [count] * questions:
            raise ValueError("another number of samples")
    except (KeyError, TypeError, ValueError) as error:
        expected = f"expected {count} samples of each of {questions} questions"
        raise UserError(f"{file}: {expected} ({error}). Remove this file to draw them again.") from error
    return rows
