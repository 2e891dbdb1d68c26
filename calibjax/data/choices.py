"""Sequences from multiple-choice questions, whose answer is one letter predicted at one position."""

import itertools
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from calibjax.data.chat_template import Tokenizer
from calibjax.data.examples import Example
from calibjax.data.sequences import Sequences, make_sequences
from calibjax.data.source import Row, Rows, Skipped, is_text, with_names
from calibjax.runtime.errors import UserError

# Texts before the letter: the first one after which every letter is a single token is used.
_CUES = ("Answer: ", "Answer:", "Answer ", "Answer")
_LETTERS = string.ascii_uppercase
_CONTEXT = ("context", "passage", "article")
_QUESTION = ("question", "question_stem")
_COLUMNS = (*_QUESTION, *_CONTEXT, "choices", "options", "answer", "answerKey", "answer_idx", "subject", *_LETTERS)


class _Question(NamedTuple):
    place: str  # of the row, for messages
    text: str  # up to the cue
    answer: int  # index of the right choice
    choices: int  # number of choices
    subject: str


class Choices(NamedTuple):
    """Tokenised multiple-choice questions."""

    sequences: Sequences  # one per question; `where` is True only at its last input, whose target is the right letter
    letters: tuple[int, ...]  # token ids of the letters, in the order of the choices
    cue: str  # text before the letter
    subjects: tuple[str, ...]  # subject of each question, from the column "subject"; "" if there is none
    too_long: int  # number of questions dropped because they exceed the model's context
    read: int  # number of questions
    skipped: Skipped  # rows that were left out, if `rows.skip_broken`


def is_multiple_choice(rows: Rows) -> bool:
    """Whether rows have the columns question, choices (or options, or A, B, ...) and answer (or answerKey)."""
    row = with_names(rows.first, _COLUMNS)
    has_choices = "choices" in row or "options" in row or {"A", "B"} <= row.keys()
    return has_choices and any(name in row for name in _QUESTION) and ("answer" in row or "answerKey" in row)


def choice_sequences(
    rows: Rows, tokenizer: Tokenizer, max_tokens: int, *, limit: int | None = None, seed: int = 0
) -> Choices:
    """Renders questions without few-shot examples, and samples from those that fit the model's context.

    A question is `"{question}\\nA. {choice}\\nB. {choice}\\n...\\nAnswer: "` and a letter, the common format of MMLU
    (Hendrycks et al. 2021, arXiv 2009.03300). Where a letter is not a single token, space, colon or both are left out.

    Args:
        rows: with the columns question (or question_stem), choices (or options) and answer (or answerKey), and
            optionally subject and context (or passage, article), which is written before the question. Choices are a
            list, or ARC's {"text": [...], "label": [...]}, or columns A, B, ...; every row has the same number of them.
            The answer is the index of the right choice, from 0, or its label: A, B, ..., or ARC's.
        max_tokens: largest number of inputs of the model; longer questions are dropped.
        limit: number of questions to draw at random by `seed`, in the order of the rows; by default all.

    Raises:
        UserError: a row is not a question, a letter is never a single token, or no question is short enough.
    """
    questions: list[_Question] = []
    skipped = Skipped()
    for place, named in rows.placed(skipped):
        row = with_names(named, _COLUMNS)
        count = questions[0].choices if questions else 0
        try:
            questions.append(_question(row, place, count))
        except UserError as error:
            if not rows.skip_broken:
                raise
            skipped.add(error)
    if not questions:
        raise UserError(f"{rows.name}: no row can be read; the first: {skipped.first}")
    cue, letters = _letter_ids(tokenizer, questions[0].choices)
    texts = [question.text + cue + _LETTERS[question.answer] for question in questions]
    encoded: Any = tokenizer(texts, verbose=False)
    ids = [np.asarray(tokens, np.int32) for tokens in encoded["input_ids"]]
    short = np.flatnonzero([len(tokens) - 1 <= max_tokens for tokens in ids])
    if not len(short):
        shortest = min(map(len, ids)) - 1
        context = f"the model's context of {max_tokens} tokens (the shortest has {shortest})"
        raise UserError(f"{rows.name}: every question is longer than {context}.")
    chosen = short
    if limit is not None and limit < len(short):
        chosen = np.sort(np.random.default_rng(seed).choice(short, limit, replace=False))
    examples = []
    for number in chosen:
        tokens = ids[number]
        if tokens[-1] != letters[questions[number].answer]:
            raise UserError(f"{questions[number].place}: the last token of the question is not the letter.")
        is_last = np.arange(len(tokens)) == len(tokens) - 1
        examples.append(Example(tokens, is_last, int(number)))
    sequences = make_sequences(examples, max(len(example.tokens) for example in examples), layout="pad")
    subjects = tuple(questions[number].subject for number in chosen)
    too_long = len(ids) - len(short)
    return Choices(sequences, letters, cue, subjects, too_long, read=len(ids), skipped=skipped)


def _labelled_choices(row: Row) -> tuple[Any, list[str]]:
    """The choices of a row, unchecked, and the labels by which its answer may name them."""
    columns = itertools.takewhile(lambda letter: row.get(letter) not in (None, ""), _LETTERS)
    choices = row.get("choices", row.get("options", [row[letter] for letter in columns]))
    if not isinstance(choices, Mapping):
        return choices, list(_LETTERS)
    default_labels = _LETTERS if "text" in choices else choices  # ARC's are lists; in MedQA's, labels are the keys
    labels = [str(label) for label in choices.get("label") or default_labels]
    return choices.get("text") or list(choices.values()), labels


def _question(row: Row, place: str, count: int) -> _Question:
    """The question of a row, which must have `count` choices, unless that is 0."""
    choices, labels = _labelled_choices(row)
    answer = row.get("answer_idx", row.get("answer", row.get("answerKey")))
    if str(answer) in labels:
        answer = labels.index(str(answer))
    elif isinstance(answer, str) and answer.isdecimal():
        answer = int(answer)
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= 26:
        raise UserError(f"{place}, column 'choices': expected a list of 2 to 26 answers, got {str(choices)[:60]!r}.")
    count = count or len(choices)
    if len(choices) != count or not isinstance(answer, int) or not 0 <= answer < count:
        expected = f"{count} choices, as in the first row, and an answer from 0 to {count - 1}"
        raise UserError(f"{place}: expected {expected}; got {len(choices)} and {answer!r}.")
    question = [*(row[name] for name in _CONTEXT if row.get(name)), row.get("question", row.get("question_stem"))]
    parts = [*question, *choices]
    if not all(isinstance(part, str | int | float) and is_text(str(part)) for part in parts):
        raise UserError(f"{place}: expected Unicode text in question, context and choices, got {ascii(parts)[:60]}.")
    lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False)]
    text = "\n".join([*map(str, question), *lines, ""])
    return _Question(place, text, answer, count, subject=str(row.get("subject", "")))


def _letter_ids(tokenizer: Tokenizer, count: int) -> tuple[str, tuple[int, ...]]:
    names = _LETTERS[:count]
    for cue in _CUES:
        encoded: Any = tokenizer([cue + letter for letter in names])
        ids = encoded["input_ids"]
        letters = tuple(int(tokens[-1]) for tokens in ids)
        has_unknown = tokenizer.unk_token_id is not None and tokenizer.unk_token_id in letters
        beginnings = {tuple(tokens[:-1]) for tokens in ids}
        if len(beginnings) == 1 and len(set(letters)) == count and not has_unknown:
            return cue, letters
    raise UserError(f"The tokenizer does not write {', '.join(names)} after {_CUES[1]!r} as one token each.")
