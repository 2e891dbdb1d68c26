"""What is made of answers and samples beyond the table of `ask_parts`: the data of probes, answers by majority."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax.eval.answers.clusters import clusters_of
from calibjax.eval.answers.probes import PROBES
from calibjax.eval.answers.samples import semantic_confidence
from calibjax.eval.tasks.evaluate import (
    AT_ONCE,
    How,
    Part,
    ask_piece,
    calibration_questions,
    judge_texts,
    pieces,
    write_answers,
    writing,
)
from calibjax.eval.tasks.evidence import sampled
from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.hidden import answer_features
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
