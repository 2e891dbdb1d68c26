"""Confidence in answers on last words: a small model ends a sentence of a story whose last word is known.

    python eval/study_answers.py MODEL DATA.jsonl.gz [--questions 300] [--samples 8]

The question is a story up to the last word of one of its sentences; the answer is the first word of two tokens that the
model writes, and right if it is that word. Prints accuracy, and for each confidence AUROC, ECE (15 bins) and Brier
score, uncalibrated and after Platt scaling, fitted on the first half of the questions; all figures are of the second.
"""

import argparse
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

import calibjax
from calibjax import metrics
from calibjax.data.source import read_source
from calibjax.eval.answers.clusters import normalised_clusters
from calibjax.eval.answers.judges import string_match
from calibjax.eval.tasks.continuation import continue_contexts
from calibjax.eval.tasks.evidence import Asking, Questions, confidences
from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tokens import identity_head
from calibjax.recalibrate import METHODS, Predictions

NAMES = ("length_normalised", "minimum", "product", "consistency", "semantic_confidence", "discrete_semantic_entropy")
NAMES += ("semantic_entropy", "p_true", "p_not_none", "verbalised")
NEW_TOKENS, LONGEST = 2, 200


def questions(source: str, tokenizer, count: int) -> list[tuple[str, str]]:
    """(beginning, last word) of the third sentence of each story that has one and fits."""
    # Some tokenizers hold a space at the end of a word, and the text before the last word ends with it then.
    space = " " if len(tokenizer.encode("the ")) <= len(tokenizer.encode("the")) else ""
    found = []
    for row in read_source(source):
        ends = [match.end() for match in re.finditer(r"[.!?]", row["text"])]
        if len(ends) < 3:
            continue
        match = re.fullmatch(r"(.*\s)(\w+)[.!?]", row["text"][: ends[2]], re.DOTALL)
        if match and len(tokenizer.encode(match[1].rstrip())) < LONGEST:
            found.append((match[1].rstrip() + space, match[2]))
        if len(found) == count:
            break
    return found


def first_word(text: str) -> str:
    """The letters that a text begins with."""
    match = re.match(r"\s*(\w+)", text)
    return match[1] if match else ""


def same_first_word(question: str, answers: Sequence[str]) -> Sequence[int]:
    """A clustering: answers with the same first word."""
    return normalised_clusters(question, [first_word(answer) for answer in answers])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    lm = calibjax.load_model(given.model)
    harness = HarnessLM(lm, {"uncalibrated": identity_head(lm)}, batch_size=32)
    asked = questions(given.data, lm.tokenizer, given.questions)
    contexts = [lm.tokenizer.encode(text) for text, _ in asked]
    writing = {"until": [".", "!", "?", ",", '"', "\n"], "max_new_tokens": NEW_TOKENS, "batch_size": 32}
    written = dict(continue_contexts(lm, contexts, **writing))
    answers = [first_word(written[n].text) for n in range(len(asked))]
    correct = np.array([string_match("", answer, [word]) for answer, (_, word) in zip(answers, asked, strict=True)])
    tokens = np.full((len(asked), NEW_TOKENS), -np.inf, np.float32)
    for n in range(len(asked)):
        tokens[n, : len(written[n].log_probs)] = written[n].log_probs
    texts = [text for text, _ in asked]
    of_questions = Questions("last-words", range(len(asked)), texts, contexts, answers, tokens)
    asking = Asking(NAMES, given.samples, 1.0, same_first_word, None)
    values = confidences(harness, asking, of_questions, writing, 0, print)
    fit, new = np.arange(len(asked)) % 2 == 0, np.arange(len(asked)) % 2 == 1
    print(f"{len(asked)} questions, accuracy {correct.mean():.3f}")
    print("| method | AUROC | ECE | Brier | ECE, Platt | Brier, Platt |\n|---|---|---|---|---|---|")
    for name, confidence in zip(NAMES, values, strict=True):
        state = METHODS["platt"].fit(Predictions(confidence=confidence, correct=correct), where=fit)
        after = METHODS["platt"].apply(state, Predictions(confidence=confidence[new]))
        before, right = jnp.asarray(confidence[new]), jnp.asarray(correct[new])
        row = [metrics.auroc(before, right)]
        for q in (before, after):
            row += [metrics.expected_calibration_error(q, right, bins=15), metrics.brier_score(q, right)]
        print(f"| `{name}` | " + " | ".join(f"{float(x):.3f}" for x in row) + " |")


if __name__ == "__main__":
    main()
