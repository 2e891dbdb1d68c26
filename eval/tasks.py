"""Calibration of a model's answers to multiple choice, from top to bottom, in one file to read and to adapt.

    python eval/tasks.py --model path/to/model --questions questions.jsonl

A line of the file is {"question": "…", "options": ["…", "…"], "answer": 0}. The prompt lists the options by letter. The
softmax of the model's logits at these letters is its distribution over the options: the largest probability gives the
answer and its confidence. A temperature is fitted on half of the questions and evaluated on the other half.

`calibjax eval tasks` runs MMLU, ARC, TruthfulQA, TriviaQA or any task of lm-eval, with the harness's own prompts. It
adds chat templates, free-text answers and sampling, and resumes a killed run.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import calibjax
from calibjax import recalibrate
from calibjax.data import read_source
from calibjax.models import unembed

LETTERS = "ABCDEFGHIJ"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to evaluate.

    Attributes:
        model: directory or GGUF file of the model.
        questions: file of JSON lines, each with question, options and answer, the number of the right option from 0.
        batch_size: questions per forward pass.
        seed: random seed of the split into halves.
    """

    model: str
    questions: Path
    batch_size: int = 8
    seed: int = 0


def prompt(row: dict[str, Any]) -> str:
    """The question, its options by letter, and the start of the answer."""
    options = [f"{letter}. {option}" for letter, option in zip(LETTERS, row["options"], strict=False)]
    return "\n".join([row["question"], *options, "Answer:"])


def letter_logits(lm: calibjax.LanguageModel, rows: Sequence[dict[str, Any]], batch_size: int) -> np.ndarray:
    """Logits at the letters after each prompt, float32 `[N, K]`; −inf where a question has fewer than K options."""
    encode = lm.tokenizer.encode
    prompts = [encode(prompt(row)) for row in rows]
    option_counts = np.array([len(row["options"]) for row in rows])
    letters = LETTERS[: option_counts.max()]
    letter_ids = np.array([encode(f" {letter}", add_special_tokens=False)[-1] for letter in letters])
    if len(set(letter_ids.tolist())) < option_counts.max():
        raise calibjax.UserError(f"expected at most {len(LETTERS)} options, whose letters end in different tokens.")
    longest = max(map(len, prompts))
    parts = []
    for first in range(0, len(rows), batch_size):
        batch = prompts[first : first + batch_size]
        tokens = np.zeros((batch_size, longest), np.int32)
        segment_ids = np.zeros((batch_size, longest), np.int32)  # 0: padding
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = ids
            segment_ids[row, : len(ids)] = 1
        hidden = lm.hidden_states(tokens, segment_ids=segment_ids)  # [B, T, D]
        last_token = np.array([len(ids) - 1 for ids in batch])
        logits = unembed(lm.config, lm.params, hidden[np.arange(len(batch)), last_token])  # [B, V]
        parts.append(np.asarray(logits[:, letter_ids]))
    is_option = np.arange(len(letters)) < option_counts[:, None]
    return np.where(is_option, np.concatenate(parts), -np.inf)


def main(options: Options) -> calibjax.Comparison:
    rows = [dict(row) for row in read_source(options.questions)]
    if not all({"question", "options", "answer"} <= row.keys() for row in rows):
        raise calibjax.UserError(f"--questions {options.questions}: expected question, options and answer in each row.")
    with jax.set_mesh(calibjax.RunContext().mesh) as mesh:
        lm = calibjax.load_model(options.model, mesh=mesh)
        logits = letter_logits(lm, rows, options.batch_size)
    labels = np.array([row["answer"] for row in rows])
    print(f"{len(rows):,} questions, accuracy {np.mean(logits.argmax(axis=1) == labels):.4f}")
    order = np.random.default_rng(options.seed).permutation(len(rows))
    fit_rows, held_out_rows = np.array_split(order, 2)
    fit = recalibrate.Predictions(logits=logits[fit_rows], labels=labels[fit_rows])
    held_out = recalibrate.Predictions(logits=logits[held_out_rows], labels=labels[held_out_rows])
    comparison = calibjax.compare(fit, held_out, ["temperature"], context=calibjax.RunContext(seed=options.seed))
    print(comparison)
    return comparison


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
