"""From real data and tokenizers to sequences."""

import gzip
import json

import pytest
from assets import data_path, model_path

from calibjax.data import load_sequences, read_source, recognise, split_sequences


def tokenizer_of(name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(name))


def test_alpaca_outputs_cut_to_128_tokens():
    tokenizer = tokenizer_of("stories260K")
    file = data_path("alpaca_cleaned/alpaca_cleaned.jsonl.gz")
    rows = read_source(file, rows=6000)
    sequences, description = load_sequences(
        rows, tokenizer, seq_len=128, layout="full", format=recognise(rows, "output"), max_sequences=1600
    )
    assert sequences.tokens.shape == (1600, 127)
    assert sequences.where.all()
    fit, held_out = split_sequences(sequences, 0.6)
    assert (len(fit.tokens), len(held_out.tokens)) == (960, 640)

    with gzip.open(file, "rt") as lines:
        texts = [json.loads(line)["output"] for line, _ in zip(lines, range(sequences.source[-1] + 1), strict=False)]
    ids = [row for row in tokenizer(texts, verbose=False)["input_ids"] if len(row) >= 128]
    assert len(ids) == 1600
    for sequence in (0, 1, 777, 1599):
        assert [*sequences.tokens[sequence], sequences.targets[sequence, -1]] == ids[sequence][:128]
    assert description == (
        f"{file}: plain text (column output), 3,569 rows read, 1,969 of them dropped (too short); "
        "1,600 sequences of 128 tokens (full), 203,200 tokens to predict"
    )


def test_document_split_between_sequences():
    sequences, description = load_sequences(
        read_source(data_path("wikitext2/test.txt.gz")),
        tokenizer_of("stories260K"),
        seq_len=256,
        layout="full",
        max_sequences=50,
    )
    assert (sequences.tokens[1:, 0] == sequences.targets[:-1, -1]).all()
    fit, held_out = split_sequences(sequences, 0.6)
    assert (len(fit.tokens), len(held_out.tokens)) == (30, 20)
    assert "whole documents" in description


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_chat_from_file(tmp_path, layout):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "i am fine."}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 5)
    sequences, description = load_sequences(
        read_source(tmp_path / "chat.jsonl"), tokenizer_of("craftgpt-5M"), seq_len=64, layout=layout
    )
    assert len(sequences.tokens) == (5 if layout == "pad" else 1)
    assert int(sequences.where.sum()) == 5 * 5  # four tokens and the end
    assert "chat (column messages), 5 rows read, 0 of them dropped" in description
