"""Multiple-choice questions: what the model reads, and where it answers."""

import string

import numpy as np
import pytest

from calibjax.data import Rows, choice_sequences, is_multiple_choice
from calibjax.runtime.errors import UserError


def character_tokenizer(merges=(), characters=(*string.printable,)):
    """One token a character; each of `merges` is a token of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *characters, *merges])}
    pairs = [tuple(piece) for piece in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated") if not merges else None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


QUESTIONS = [
    {"question": "Where?", "choices": ["here", "there", "no"], "answer": 2, "subject": "places"},
    {"question": "When is it that one may ask such a long thing?", "choices": ["now", "then", "no"], "answer": 0},
    {"Question": "Who?", "choices": ["I", "you", "no"], "answer": 1, "Subject": "people"},
]
ROWS = Rows(QUESTIONS, "made")


@pytest.mark.parametrize(("merges", "cue"), [((), "Answer: "), ((" B",), "Answer:")])
def test_what_is_asked(merges, cue):
    """With another cue where a letter melts into the space."""
    tokenizer = character_tokenizer(merges)
    broken = Rows(lambda: iter([*ROWS.every(), ("row 3", UserError("is broken"))]), "made", skip_broken=True)
    questions = choice_sequences(broken, tokenizer, 200)
    vocabulary = tokenizer.get_vocab()
    assert (questions.letters, questions.cue) == (tuple(vocabulary[letter] for letter in "ABC"), cue)
    assert questions.subjects == ("places", "", "people")
    assert (questions.too_long, questions.read, questions.skipped.count) == (0, 3, 1)
    sequences = questions.sequences
    np.testing.assert_array_equal(sequences.where.sum(axis=1), 1)
    np.testing.assert_array_equal(sequences.targets[sequences.where], [vocabulary[letter] for letter in "CAB"])
    tokens = sequences.tokens[0][sequences.segment_ids[0] > 0]
    assert "".join(tokenizer.convert_ids_to_tokens(tokens)) == f"Where?\nA. here\nB. there\nC. no\n{cue}"
    assert np.flatnonzero(sequences.where[0]).tolist() == [len(tokens) - 1]
    arc = {"choices": {"text": ["here", "there", "no"], "label": [1, 2, 3]}, "answerKey": "3"}
    columns = {"A": "here", "b": "there", "C": "no", "D": ""}
    medqa = {"options": {"A": "here", "B": "there", "C": "no"}, "answer": "no", "answer_idx": "C"}
    race = {"Options": ["here", "there", "no"], "answer": "C"}
    for form in (arc, arc | {"answerKey": 3}, columns | {"answer": "C"}, medqa, race):
        form = {"question_stem" if form is arc else "question": "Where?", **form}  # OpenBookQA's
        rows = Rows([form, {"article": "He left.", **form}], "made")
        assert is_multiple_choice(rows)
        read = choice_sequences(rows, tokenizer, 200).sequences
        after = tokenizer("He left.\n")["input_ids"]
        np.testing.assert_array_equal(read.tokens[0][read.segment_ids[0] > 0], tokens)
        np.testing.assert_array_equal(read.tokens[1], [*after, *tokens])
        np.testing.assert_array_equal(read.targets[read.where], [vocabulary["C"]] * 2)


def test_questions_that_are_too_long_are_counted_and_some_are_drawn():
    tokenizer = character_tokenizer()
    questions = choice_sequences(ROWS, tokenizer, 45)
    assert questions.too_long == 1
    np.testing.assert_array_equal(questions.sequences.source, [0, 2])
    assert questions.sequences.tokens.shape[1] <= 45
    width = questions.sequences.tokens.shape[1]
    assert choice_sequences(ROWS, tokenizer, width).too_long == 1, "a question of exactly so many tokens fits"
    drawn = [choice_sequences(ROWS, tokenizer, 200, limit=1, seed=seed).sequences.source[0] for seed in range(20)]
    assert set(drawn) == {0, 1, 2}
    with pytest.raises(UserError, match=r"every question is longer than the model.s context of 5 tokens"):
        choice_sequences(ROWS, tokenizer, 5)


def test_what_is_no_question():
    assert is_multiple_choice(ROWS)
    assert not is_multiple_choice(Rows([{"text": "x"}], "made"))
    tokenizer = character_tokenizer()
    for changes, message in (
        ({"choices": "abc"}, "column 'choices': expected a list of 2 to 26"),
        ({"answer": 3}, "row 1 .*: expected 3 choices.* answer from 0 to 2; got 3 and 3"),
        ({"choices": ["x", "y"]}, "got 2 and 1"),
        ({"Question": None}, "row 1 .*: expected Unicode text .* got .None"),
        ({"choices": ["x", {"text": "y"}, "z"]}, "expected Unicode text .* got .*text"),
    ):
        rows = Rows([QUESTIONS[0], {**QUESTIONS[2], **changes}], "made")
        with pytest.raises(UserError, match=message):
            choice_sequences(rows, tokenizer, 200)
        skipping = Rows(rows.every, "made", skip_broken=True)
        assert choice_sequences(skipping, tokenizer, 200).skipped.count == 1
    with pytest.raises(UserError, match="does not write A, B, C after 'Answer:' as one token each"):
        choice_sequences(ROWS, character_tokenizer(characters=string.ascii_lowercase), 200)
