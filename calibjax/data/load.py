"""From a source to sequences in one call, with one line to say what was made of it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibjax.data.examples import Example, tokenize_rows
from calibjax.data.formats import recognise
from calibjax.data.sequences import Layout, Sequences, make_sequences
from calibjax.data.source import read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_sequences(
    source: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    layout: Layout,
    text_column: str | None = None,
    prompt_template: str | None = None,
    rows: int | None = None,
    max_sequences: int | None = None,
    split: str | None = None,
    column_optional: bool = False,
) -> tuple[Sequences, str]:
    """Reads, recognises, tokenises and cuts a source.

    Args:
      source: A file, a directory or a Hub id; see `read_source`.
      tokenizer: A tokenizer of `transformers`.
      seq_len: Tokens per sequence; see `make_sequences`.
      layout: "pack", "pad" or "full"; see `make_sequences`.
      text_column: Read this column as plain text; see `recognise`.
      prompt_template: The text of a prompt; see `tokenize_rows`.
      rows: Read only this many first rows.
      max_sequences: Keep only this many first sequences.
      split: See `read_source`.
      column_optional: Where the source has no column `text_column`, recognise it as if none had been named.

    Returns:
      The sequences, and a line that says how they came about.

    Raises:
      UserError: Whatever stands against it, with what to do next.
    """
    data = read_source(source, split=split, rows=rows)
    if column_optional and len(data) and text_column not in data[0]:
        text_column = None
    format = recognise(data, text_column)
    count = _Count()
    examples = count.watch(tokenize_rows(data, format, tokenizer, prompt_template=prompt_template))
    sequences = make_sequences(examples, seq_len, layout=layout, max_sequences=max_sequences)
    kept = len(np.unique(sequences.source)) if layout == "full" else count.predicted
    description = (
        f"{data.name}: {format}, {count.rows:,} of {len(data):,} rows read, {count.rows - kept:,} of them dropped "
        f"({'too short' if layout == 'full' else 'nothing to predict'}); {len(sequences.source):,} sequences of "
        f"{seq_len} tokens ({layout}), {int(sequences.where.sum()):,} tokens to predict"
    )
    return sequences, description


class _Count:
    """Counts examples on their way: all, and those with a token to be predicted."""

    def __init__(self) -> None:
        self.rows = self.predicted = 0

    def watch(self, examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            self.rows += 1
            self.predicted += bool(example.loss_mask.any())
            yield example
