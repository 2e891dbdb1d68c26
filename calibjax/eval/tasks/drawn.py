"""What is made of answers and samples beyond the table of `ask_parts`: the data of probes, answers by majority."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax.eval.answers.clusters import clusters_of
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.answers.samples import semantic_confidence
from calibjax.eval.tasks.evaluate import (
    AT_ONCE,
    Answers,
    Asked,
    How,
    Part,
    Written,
    ask_piece,
    calibration_questions,
    judge_texts,
    pieces,
    question_numbers,
    write_answers,
    writing,
)
from calibjax.eval.tasks.evidence import Questions, sampled
from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.hidden import answer_features
from calibjax.recalibrate import sample_agreement
from calibjax.runtime.errors import UserError


class ProbeData(NamedTuple):
    """What probes are fitted on: the features of N answers by name, `[N, F]`, and their targets, `[N]` in [0, 1]."""

    features: dict[str, Float[np.ndarray, "N F"]]
    targets: dict[str, Float[np.ndarray, " N"]]


def probe_data(lm: HarnessLM, parts: Mapping[str, Part], how: How) -> ProbeData:
    """Answers the calibration questions of all parts, for the probes among `how.asking.methods`."""
    asking = how.asking
    assert asking is not None
    probes = [PROBES[name] for name in asking.probed]
    several = [
        ask_piece(lm, name, part, how, piece)
        for name, part in parts.items()
        for piece in pieces(iter(calibration_questions(part.task, how)), AT_ONCE)
    ]
    features: dict[str, list[np.ndarray]] = {probe.feature: [] for probe in probes}
    targets: dict[str, list[np.ndarray]] = {probe.target: [] for probe in probes}
    for asked in several:
        options = writing(lm, asked.part.task, how)
        written = write_answers(lm, asked, options)
        questions = written.questions(asked, np.zeros((len(asked.documents), 0), np.float32))
        for name, value in answer_features(lm.lm, questions.contexts, questions.written, set(features)).items():
            features[name].append(value)
        if "correct" in targets:
            targets["correct"].append(judge_texts(how, asked, [[text] for text in questions.answers])[:, 0])
        if {"agreement", "capability"} & set(targets):
            of_fit = questions._replace(name=f"{questions.name}-fit")
            drawn = [[text for text, _ in row] for row in sampled(lm, asking, of_fit, options, how.seed)]
        if "agreement" in targets:
            pair = clusters_of(asking.same, questions.texts, questions.answers, drawn)
            targets["agreement"].append(np.asarray(semantic_confidence(*map(jnp.asarray, pair))))
        if "capability" in targets:
            targets["capability"].append(judge_texts(how, asked, drawn).mean(axis=1))
    if not several:
        raise UserError(f"--confidence {', '.join(asking.probed)}: {', '.join(parts)} has no questions to fit on.")
    return ProbeData(*({name: np.concatenate(found) for name, found in each.items()} for each in (features, targets)))


def majority_answers(lm: HarnessLM, part: Part, how: How, name: str, counts: Sequence[int]) -> Answers:
    """The greedy answers to a part of a task, and those that most of the first k samples give, for each k.

    Rows are the greedy answer with its length-normalised probability, and for each k the most frequent meaning with its
    fraction of the samples (self-consistency, Wang et al. 2023): its first sample is judged.
    """
    found = []
    numbers = ((number, part.task.eval_docs[number]) for number in question_numbers(part.task, how))
    for piece in pieces(numbers, AT_ONCE):
        asked = ask_piece(lm, name, part, how, piece)
        written, questions, drawn = _drawn(lm, how, asked)
        right = judge_texts(how, asked, drawn)
        assert how.asking is not None
        clusters, _ = clusters_of(how.asking.same, questions.texts, questions.answers, drawn)
        confidence = [np.exp([np.mean(text.log_probs) for text in written.texts])]
        correct = [judge_texts(how, asked, [[text] for text in questions.answers])[:, 0]]
        for count in counts:
            answer, fraction = map(np.asarray, sample_agreement(jnp.asarray(clusters[:, :count])))
            first = (clusters == answer[:, None]).argmax(axis=1)
            confidence.append(fraction)
            correct.append(right[np.arange(len(right)), first])
        shape = len(confidence), len(piece)
        found.append(
            Answers(
                np.stack(confidence).astype(np.float32),
                np.stack(correct).astype(np.float32),
                np.full(shape, -1, np.int32),
                np.full(shape, np.nan, np.float32),
                np.full(len(piece), part.subject),
                {},
                np.array([len(a) - len(b) for a, b in zip(written.whole, written.contexts, strict=True)], np.int32),
                0,
                np.array(questions.texts),
                np.array(questions.answers),
            )
        )
    return Answers.join(found)


def _drawn(lm: HarnessLM, how: How, asked: Asked) -> tuple[Written, Questions, list[list[str]]]:
    """The greedy answers, the questions, and the texts of the samples."""
    assert how.asking is not None
    options = writing(lm, asked.part.task, how)
    written = write_answers(lm, asked, options)
    questions = written.questions(asked, np.zeros((len(asked.documents), 0), np.float32))
    samples = sampled(lm, how.asking, questions, options, how.seed)
    return written, questions, [[text for text, _ in row] for row in samples]
