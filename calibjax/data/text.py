"""Sequences of a text for a model, in one call: what a notebook starts with."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.data.examples import Example
from calibjax.data.formats import recognise
from calibjax.data.load import choose_seq_len, load_sequences
from calibjax.data.sequences import Layout, Sequences, check_context, make_sequences
from calibjax.data.source import read_source
from calibjax.runtime.errors import UserError


def load_text(
    source: str | Path | Sequence[Sequence[int]],
    lm: Any,
    *,
    seq_len: int | None = None,
    layout: Layout = "pack",
    text_column: str | None = None,
    max_sequences: int | None = None,
) -> Sequences:
    """Reads a text, or takes token ids, as sequences of tokens for a model.

    Args:
        source: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id; or lists
            of token ids, one text each, of at least two tokens.
        lm: the `LanguageModel`; its tokenizer and its longest context are used.
        seq_len: tokens per sequence, at least 2; None: a length that holds 95% of the rows with answers, 128 of plain
            text; see `calibjax.data.load.choose_seq_len`.
        layout: "pack", "pad" or "full"; see `calibjax.data.make_sequences`.
        text_column: read this column as plain text; by default the format is recognised.
        max_sequences: keep only the first sequences.

    Returns:
        `Sequences`, S of `seq_len` − 1 inputs and their targets.

    Raises:
        UserError: the source cannot be read, holds nothing to predict, or does not fit the model.
    """
    longest = lm.config.max_positions
    if seq_len is not None:
        check_context(seq_len, longest)
    if isinstance(source, str | Path):
        rows = read_source(source)
        format = recognise(rows, text_column)
        if seq_len is None:
            # In the layout "full" shorter rows are dropped: it has a length of its own.
            seq_len = 128 if layout == "full" else choose_seq_len(rows, format, lm.tokenizer, longest)
        return load_sequences(
            rows,
            lm.tokenizer,
            seq_len=seq_len,
            layout=layout,
            format=format,
            max_sequences=max_sequences,
        )[0]
    seq_len = min(128, longest) if seq_len is None else seq_len
    return make_sequences(_examples(source, lm.config.vocab_size), seq_len, layout=layout, max_sequences=max_sequences)


def _examples(texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[Example]:
    for row, text in enumerate(texts):
        tokens = np.asarray(text)
        if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise UserError(f"text {row}: expected a list of at least two token ids, got {tokens.dtype}{tokens.shape}.")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise UserError(
                f"text {row}: expected token ids from 0 to {vocab_size - 1}, got {tokens.min()} to {tokens.max()}."
            )
        yield Example(tokens.astype(np.int32), np.arange(len(tokens)) > 0, row)
