"""Calibration of a model's answers to multiple choice, from top to bottom, in one file to read and to adapt.

    python eval/tasks.py --model path/to/model --questions questions.jsonl

A line of the file is {"question": "…", "options": ["…", "…"], "answer": 0}. The model scores the letter of each option
after the prompt; the distribution over the letters is its answer and its confidence. Half of the questions fit a
temperature, the other half are evaluated.

`calibjax eval tasks` asks MMLU, ARC, TruthfulQA, TriviaQA or any task of lm-eval with the harness's own prompts, chat
templates, written answers and samples, and resumes.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import calibjax
from calibjax import recalibrate
from calibjax.commands.parser import parse_script

LETTERS = "ABCDEFGHIJ"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to evaluate.

    Attributes:
        model: directory or GGUF file of the model.
        questions: JSON lines.
        batch_size: questions of one pass.
        seed: of the halves.
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
    """Logits of the letters after each prompt, `[N, K]`; −inf where a question has fewer options."""
    encode = lm.tokenizer.encode
    letters = np.array([encode(f" {letter}", add_special_tokens=False)[-1] for letter in LETTERS])
    most = max(len(row["options"]) for row in rows)
    texts = [encode(prompt(row)) for row in rows]
    width = max(map(len, texts))
    logits = np.full((len(rows), most), -np.inf, np.float32)
    for first in range(0, len(rows), batch_size):
        part = texts[first : first + batch_size]
        tokens, segments = np.zeros((2, batch_size, width), np.int32)
        for number, text in enumerate(part):
            tokens[number, : len(text)], segments[number, : len(text)] = text, 1
        hidden = lm.hidden_states(tokens, segment_ids=segments)
        last = np.array([len(text) - 1 for text in part])
        scores = hidden[np.arange(len(part)), last] @ lm.unembedding[letters].T
        for number, row in enumerate(rows[first : first + batch_size]):
            options = len(row["options"])
            logits[first + number, :options] = np.asarray(scores[number, :options], np.float32)
    return logits


def main(options: Options) -> calibjax.Comparison:
    rows = [json.loads(line) for line in options.questions.read_text().splitlines() if line.strip()]
    with jax.set_mesh(calibjax.RunContext().mesh) as mesh:
        lm = calibjax.load_model(options.model, mesh=mesh)
        logits = letter_logits(lm, rows, options.batch_size)
    labels = np.array([row["answer"] for row in rows])
    print(f"{len(rows):,} questions, accuracy {np.mean(logits.argmax(axis=1) == labels):.4f}")
    order = np.random.default_rng(options.seed).permutation(len(rows))
    fit, held_out = (
        recalibrate.Predictions(logits=logits[half], labels=labels[half]) for half in np.array_split(order, 2)
    )
    comparison = calibjax.compare(fit, held_out, ["temperature"], context=calibjax.RunContext(seed=options.seed))
    print(comparison)
    return comparison


if __name__ == "__main__":
    main(parse_script(Options))
