"""What a run of a benchmark keeps so that it resumes, once killed: answers, fitted temperatures, and of which model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.data.write import write_rows
from calibjax.eval.tasks.evaluate import Answers, Calibration
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.runtime.checksums import array_digests, json_digest, seal, unseal
from calibjax.runtime.distributed import on_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import new_file, read_json, write_file


def claim_answers(out: Path | None, lm: LanguageModel, heads: Mapping[str, FittedHead]) -> None:
    """Writes of which model and heads the answers and samples in `out` are, or finds that they are of the same.

    Raises:
        UserError: the directory of the model or of a head holds other weights than when `out` was begun.
    """
    if out is None:
        return
    of_heads = {name: json_digest([head.log_factor, array_digests(head.params)]) for name, head in heads.items()}
    own, file = {"base_fingerprint": lm.fingerprint, "heads": of_heads}, out / "model.json"

    def claim() -> None:
        if not file.is_file():
            write_file(file, json.dumps(own, indent=2) + "\n")
            return
        try:
            same = read_json(file) == own
        except ValueError as error:
            raise UserError(f"{file}: not readable ({error}). Choose another --out, or remove this one.") from error
        if not same:
            raise UserError(
                f"--out {out}: its answers are of a model or head with other weights. Choose another directory, or "
                "remove this one."
            )

    on_first(claim)


def write_answers(file: Path, answers: Answers) -> None:
    """Keeps the answers to a part of a task."""
    file.parent.mkdir(exist_ok=True)
    fields: dict[str, Any] = {name: value for name, value in answers._asdict().items() if name != "harness"}
    fields |= {f"harness_{name}": value for name, value in answers.harness.items()}
    with new_file(file) as fresh:
        np.savez_compressed(fresh, **fields)


def write_rows_of(file: Path, names: Sequence[str], answers: Answers) -> None:
    """Writes the answers to a task as a table that `compare` and `decide` read, a question a line.

    `confidence` and `correct` are those of the first method; each method has a column of its confidence by its name,
    and where it chooses otherwise than the first, all have `correct_NAME`.
    """
    details = [json.loads(text or "{}") for text in answers.details.tolist()]
    if not all("label" in row for row in details):
        details = [{key: row[key] for key in ("right", "options") if key in row} for row in details]
    columns: dict[str, Any] = {"question": answers.question, "answer": answers.answer}
    if all(answers.subject):
        columns["category"] = answers.subject
    columns |= {"confidence": answers.confidence[0], "correct": answers.correct[0]}
    columns |= dict(zip(names, answers.confidence, strict=True))
    if (answers.correct != answers.correct[0]).any():
        columns |= {f"correct_{name}": of for name, of in zip(names, answers.correct, strict=True)}
    lists = {name: (x if x.dtype.kind == "U" else x.astype(np.float64)).tolist() for name, x in columns.items()}
    rows = [dict(zip(lists, cells, strict=True)) for cells in zip(*lists.values(), strict=True)]
    write_rows(file, lambda: iter([{**row, **more} for row, more in zip(rows, details, strict=True)]))


def read_answers(file: Path) -> Answers:
    """What `write_answers` wrote; raises `UserError` if the file is damaged."""
    try:
        with np.load(file) as held:
            fields = {name: held[name] for name in Answers._fields if name in held.files}
            for name in {"question", "answer", "details"} - set(fields):  # of a run before there were any
                fields[name] = np.full(fields["confidence"].shape[1], "")
            harness = {name.removeprefix("harness_"): held[name] for name in held.files if name.startswith("harness_")}
        answers = Answers(**{**fields, "too_long": int(fields["too_long"])}, harness=harness)
        _check(answers)
        return answers
    except Exception as error:  # of zipfile, zlib, tokenize and numpy, as of an array that fits no memory
        raise UserError(f"{file}: not answers ({error}). Remove this file to ask its questions again.") from error


def _check(answers: Answers) -> None:
    """Raises `ValueError` unless there is a row for each method, and probabilities are probabilities."""
    shape = np.shape(answers.confidence)
    rows = (answers.confidence, answers.correct, answers.choice, answers.log_prob)
    columns = (
        answers.subject,
        answers.cut,
        answers.question,
        answers.answer,
        answers.details,
        *answers.harness.values(),
    )
    if len(shape) != 2 or any(row.shape != shape or row.dtype.kind not in "fi" for row in rows):
        raise ValueError("expected numbers of every method and question")
    if any(column.shape != shape[1:] for column in columns):
        raise ValueError(f"expected columns of {shape[1]} questions")
    if not all((value >= 0).all() and (value <= 1 + 1e-6).all() for value in rows[:2]):
        raise ValueError("expected confidences and judgements from 0 to 1")


def write_fit(file: Path, fit: Calibration) -> None:
    """Keeps a temperature over the options."""
    file.parent.mkdir(exist_ok=True)
    write_file(file, json.dumps(seal(fit._asdict())) + "\n")


def read_fit(file: Path) -> Calibration:
    """What `write_fit` wrote; raises `UserError` if the file is damaged."""
    try:
        found = Calibration(**unseal(read_json(file)))
        return found._replace(scales=tuple(map(float, found.scales)))
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: not a fitted temperature ({error}). Remove this file to fit it again.") from error
