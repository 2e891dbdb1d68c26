"""From real data and tokenizers to windows."""

import gzip
import json

import pytest
from assets import data_path, model_path
from transformers import AutoTokenizer

from calibjax.data import load_windows, split_windows


def tokenizer_of(name):
    return AutoTokenizer.from_pretrained(model_path(name))


def test_alpaca_outputs_cut_to_128_tokens():
    tokenizer = tokenizer_of("stories260K")
    file = data_path("alpaca_cleaned/alpaca_cleaned.jsonl.gz")
    windows, description = load_windows(
        file, tokenizer, seq_len=128, layout="full", text_column="output", rows=6000, max_windows=1600
    )
    assert windows.tokens.shape == (1600, 127)
    assert windows.where.all()
    fit, held_out = split_windows(windows, 0.6)
    assert (len(fit.tokens), len(held_out.tokens)) == (960, 640)

    with gzip.open(file, "rt") as lines:
        texts = [json.loads(line)["output"] for line, _ in zip(lines, range(windows.source[-1] + 1), strict=False)]
    ids = [row for row in tokenizer(texts, verbose=False)["input_ids"] if len(row) >= 128]
    assert len(ids) == 1600
    for window in (0, 1, 777, 1599):
        assert [*windows.tokens[window], windows.targets[window, -1]] == ids[window][:128]
    assert description == (
        f"{file}: plain text (column output), 3,569 of 6,000 rows read, 1,969 of them dropped (too short); "
        "1,600 windows of 128 tokens (full), 203,200 tokens to predict"
    )


def test_document_split_between_windows():
    windows, description = load_windows(
        data_path("wikitext2/test.txt.gz"),
        tokenizer_of("stories260K"),
        seq_len=256,
        layout="full",
        max_windows=50,
    )
    assert (windows.tokens[1:, 0] == windows.targets[:-1, -1]).all()
    fit, held_out = split_windows(windows, 0.6)
    assert (len(fit.tokens), len(held_out.tokens)) == (30, 20)
    assert "whole documents" in description


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_chat_from_file(tmp_path, layout):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "i am fine."}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 5)
    windows, description = load_windows(tmp_path / "chat.jsonl", tokenizer_of("craftgpt-5M"), seq_len=64, layout=layout)
    assert len(windows.tokens) == (5 if layout == "pad" else 1)
    assert int(windows.where.sum()) == 5 * 5  # four tokens and the end
    assert "chat (column messages), 5 of 5 rows read, 0 of them dropped" in description
