"""From real data and tokenizers to sequences."""

import gzip
import json

import pytest
from assets import data_path, tokenizer_of

from calibjax.data import Rows, choose_seq_len, load_sequences, read_source, recognise, split_sequences, tokenize_rows


def test_alpaca_outputs_cut_to_128_tokens():
    tokenizer = tokenizer_of("stories260K")
    file = data_path("alpaca_cleaned/alpaca_cleaned.jsonl.gz")
    rows = read_source(file, rows=6000)
    options = {"seq_len": 128, "layout": "full", "format": recognise(rows, "output"), "max_sequences": 1600}
    sequences, description = load_sequences(rows, tokenizer, **options)
    assert sequences.tokens.shape == (1600, 127)
    assert sequences.where.all()
    assert [len(part.tokens) for part in split_sequences(sequences, 0.6)] == [960, 640]

    with gzip.open(file, "rt") as lines:
        texts = [json.loads(line)["output"] for line, _ in zip(lines, range(sequences.source[-1] + 1), strict=False)]
    ids = [row for row in tokenizer(texts, verbose=False)["input_ids"] if len(row) >= 128]
    assert len(ids) == 1600
    for sequence in (0, 1, 777, 1599):
        assert [*sequences.tokens[sequence], sequences.targets[sequence, -1]] == ids[sequence][:128]
    assert "3,569 rows read, 1,969 of them dropped (too short); 1,600 sequences of 128 tokens (full)" in description


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_rows_that_are_cut_keep_their_prompt(layout):
    """Every scored token of a chat is predicted after the whole prompt; the line counts what is left out."""
    tokenizer = tokenizer_of("craftgpt-5M")
    rows = [{"prompt": f"say {n}", "response": "word " * n} for n in range(1, 100, 7)]
    examples = list(tokenize_rows(rows, recognise(rows), tokenizer))
    sequences, description = load_sequences(Rows(rows, "made"), tokenizer, seq_len=24, layout=layout)
    expected, lost = [], 0
    for example in examples:
        expected += example.tokens[:24][example.loss_mask[:24]].tolist()
        lost += int(example.loss_mask[24:].sum())
    assert sorted(sequences.targets[sequences.where].tolist()) == sorted(expected)
    prompts = {tuple(example.tokens[:4].tolist()) for example in examples}
    for tokens, segments, positions in zip(sequences.tokens, sequences.segment_ids, sequences.positions, strict=True):
        for start in range(len(tokens)):
            if segments[start] and positions[start] == 0:
                assert tuple(tokens[start : start + 4].tolist()) in prompts
    cut = sum(len(example.tokens) > 24 for example in examples)
    share = lost / sum(int(example.loss_mask.sum()) for example in examples)
    assert f"\n{cut} of these rows are longer than 24 tokens: {share:.1%} of the tokens to predict" in description


def test_length_that_fits_the_rows():
    tokenizer = tokenizer_of("stories260K")
    rows = [{"prompt": "say", "response": "word " * n} for n in range(0, 200, 2)]
    format = recognise(rows)
    counts = [len(example.tokens) for example in tokenize_rows(rows, format, tokenizer)]
    length = choose_seq_len(Rows(rows, "made"), format, tokenizer, None)
    assert length % 64 == 0
    assert sum(count > length for count in counts) <= 5 < sum(count > length - 64 for count in counts)
    long = [{"prompt": "say", "response": "word " * 3000}]
    text = recognise(rows, "response")
    for some, kind, context, expected in (
        (rows, format, 200, 200),
        (rows[:3], format, None, 128),
        (long, format, None, 1024),
        (rows, text, None, 128),
    ):
        assert choose_seq_len(Rows(some, "made"), kind, tokenizer, context) == expected
