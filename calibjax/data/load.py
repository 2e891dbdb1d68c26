"""Sequences of a text in one call: of rows, with a description; or of a file or token ids for a model."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.data.chat_template import Tokenizer
from calibjax.data.examples import Example, tokenize_rows
from calibjax.data.formats import Format, recognise
from calibjax.data.render import describe_template
from calibjax.data.sequences import Layout, Sequences, check_context, make_sequences, tokens_needed
from calibjax.data.source import Row, Rows, Skipped, read_source
from calibjax.runtime.arrays import as_array
from calibjax.runtime.errors import UserError, quantity


def choose_seq_len(
    rows: Rows, format: Format, tokenizer: Tokenizer, max_positions: int | None, layout: Layout = "pack"
) -> int:
    """A length of sequences that holds 95% of the first 1,000 rows, at most the model's `max_positions`.

    A multiple of 64 from 128 to 1,024; 128 for plain text, cut anywhere, and for "full", which drops shorter rows.
    """
    length = 128
    if not format.is_plain and layout != "full":
        examples = islice(tokenize_rows(rows, format, tokenizer), 1000)
        most = np.percentile([len(example.tokens) for example in examples] or [0], 95)
        length = int(np.clip(np.ceil(most / 64) * 64, 128, 1024))
    return length if max_positions is None else min(length, max_positions)


def load_sequences(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    layout: Layout,
    format: Format | None = None,
    max_sequences: int | None = None,
) -> tuple[Sequences, str]:
    """Recognises the format of rows, unless it is given; see also `tokenize_rows` and `make_sequences`.

    Returns:
        The sequences, and a description: a line with the format, the counts of rows, sequences and tokens, and the chat
        template; and a line on rows that were cut, if any were.
    """
    format = recognise(rows) if format is None else format
    counts, skipped = collections.Counter(), Skipped()
    needed = tokens_needed(seq_len, layout, max_sequences, format.kind == "document")

    def examples() -> Iterator[Example]:
        for example in tokenize_rows(rows, format, tokenizer, max_tokens=needed, skipped=skipped):
            # An example with a prompt is cut after `seq_len` tokens.
            used = example.loss_mask[:seq_len] if example.has_prompt else example.loss_mask
            counts["rows"] += 1
            counts["rows with a target"] += int(used.any())
            counts["rows cut"] += int(len(used) < len(example.tokens))
            counts["targets"] += int(example.loss_mask.sum())
            counts["targets cut"] += int(example.loss_mask[len(used) :].sum())
            yield example

    sequences = make_sequences(examples(), seq_len, layout=layout, max_sequences=max_sequences)
    rows_used, reason = counts["rows with a target"], "nothing to predict"
    if layout == "full":
        rows_used, reason = len(np.unique(sequences.source)), "too short"
    read = f"{quantity(counts['rows'], 'row')} read, {counts['rows'] - rows_used:,} of them dropped ({reason})"
    made = f"{quantity(len(sequences.source), 'sequence')} of {seq_len} tokens ({layout})"
    targets = quantity(int(sequences.where.sum()), "token")
    description = f"{rows.name}: {format}, {read}; {made}, {targets} to predict"
    if template := describe_template(format, tokenizer):
        description += f"; {template}"
    if skipped.count:
        description += f"; {quantity(skipped.count, 'broken row')} skipped, the first: {skipped.first}"
    if counts["rows cut"] and layout != "full":
        fraction = counts["targets cut"] / counts["targets"]
        description += f"\n{counts['rows cut']:,} of these rows are longer than {seq_len} tokens: {fraction:.1%} of "
        description += "the tokens to predict are left out; a larger --seq-len, up to the model's context, reads more"
    return sequences, description


Source = str | Path | Sequence[str] | Sequence[Row] | Sequence[Sequence[int]]


def check_is_model(lm: Any) -> None:
    if not hasattr(lm, "fingerprint"):
        makers = "load_model, LanguageModel.from_params, from_function or from_arrays"
        raise UserError(f"lm: expected a model from {makers}, got {type(lm).__name__}.")


def load_text(
    source: Source,
    lm: Any,
    *,
    seq_len: int | None = None,
    layout: Layout = "pack",
    text_column: str | None = None,
    max_sequences: int | None = None,
) -> Sequences:
    """Reads texts, or takes token ids, as `Sequences` of `seq_len` − 1 inputs and their targets for a model.

    Args:
        source: file, directory or hub id, see `calibjax.data.read_source`; or a list of texts, of rows such as
            `{"messages": [...]}`, or of lists of token ids, one for each text.
        lm: the `LanguageModel`; its tokenizer and its longest context are used.
        seq_len: tokens per sequence, at least 2; by default chosen by `calibjax.data.choose_seq_len`.
        layout: "pack", "pad" or "full"; see `calibjax.data.make_sequences`.
        text_column: read this column as plain text; by default the format is recognised.
        max_sequences: keep only the first sequences.

    Raises:
        UserError: the source cannot be read, holds nothing to predict, or does not fit the model.
    """
    check_is_model(lm)
    longest = lm.config.max_positions
    if seq_len is not None:
        check_context(seq_len, longest)
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable):
            raise UserError(f"source: expected a path, or a list of texts or token ids, got {type(source).__name__}.")
        source = list[Any](source)
    if isinstance(source, str | Path) or all(isinstance(row, str | Mapping) for row in source):
        if isinstance(source, str | Path):
            rows = read_source(source)
        else:
            rows = Rows([{"text": row} if isinstance(row, str) else row for row in source], "the list of texts")
        format = recognise(rows, text_column)
        if seq_len is None:
            seq_len = choose_seq_len(rows, format, lm.tokenizer, longest, layout)
        options: Any = {"layout": layout, "format": format, "max_sequences": max_sequences}
        return load_sequences(rows, lm.tokenizer, seq_len=seq_len, **options)[0]
    if seq_len is None:
        seq_len = min(128, longest)
    vocab_size = lm.config.vocab_size
    examples = []
    for row, text in enumerate(source):
        tokens = as_array(text)
        if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
            got = f"{tokens.dtype} of shape {tokens.shape}"
            raise UserError(f"text {row}: expected two or more token ids, got {got}. One text is [[1, 2, 3]].")
        low, high = tokens.min(), tokens.max()
        if low < 0 or high >= vocab_size:
            raise UserError(f"text {row}: expected token ids from 0 to {vocab_size - 1}, got {low} to {high}.")
        examples.append(Example(tokens.astype(np.int32), np.arange(len(tokens)) > 0, row))
    return make_sequences(examples, seq_len, layout=layout, max_sequences=max_sequences)


def as_sequences(data: Sequences | Source, lm: Any) -> Sequences:
    """Sequences, with `where` False at targets of -100; anything else by `load_text` with its defaults."""
    if not isinstance(data, Sequences):
        return load_text(data, lm)
    return data._replace(where=data.where & (data.targets != -100))
