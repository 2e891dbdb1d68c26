"""Sequences from rows in one call, with a one-line description."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from calibjax.data.examples import Example, tokenize_rows
from calibjax.data.formats import Format, recognise
from calibjax.data.render import describe_template
from calibjax.data.sequences import Layout, Sequences, make_sequences, tokens_needed
from calibjax.data.source import Rows, Skipped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_sequences(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    layout: Layout,
    format: Format | None = None,
    max_sequences: int | None = None,
) -> tuple[Sequences, str]:
    """Recognises the format of rows, tokenises them and makes sequences.

    Args:
        rows: result of `read_source`.
        tokenizer: tokenizer of `transformers`.
        seq_len: tokens per sequence; see `make_sequences`.
        layout: "pack", "pad" or "full"; see `make_sequences`.
        format: result of `recognise`; None: recognised here.
        max_sequences: keep only the first `max_sequences` sequences.

    Returns:
        The sequences, and a one-line description with the format, the counts of rows, sequences, tokens and skipped
        rows, and the chat template.

    Raises:
        UserError: as for `recognise`, `tokenize_rows` and `make_sequences`.
    """
    format = recognise(rows) if format is None else format
    count, skipped = _Count(), Skipped()
    tokenised = tokenize_rows(
        rows,
        format,
        tokenizer,
        max_tokens=tokens_needed(seq_len, layout, max_sequences, format.kind == "document"),
        skipped=skipped,
    )
    examples = count.watch(tokenised)
    sequences = make_sequences(examples, seq_len, layout=layout, max_sequences=max_sequences)
    kept = len(np.unique(sequences.source)) if layout == "full" else count.predicted
    description = (
        f"{rows.name}: {format}, {count.rows:,} rows read, {count.rows - kept:,} of them dropped "
        f"({'too short' if layout == 'full' else 'nothing to predict'}); {len(sequences.source):,} sequences of "
        f"{seq_len} tokens ({layout}), {int(sequences.where.sum()):,} tokens to predict"
    )
    if template := describe_template(format, tokenizer):
        description += f"; {template}"
    if skipped.count:
        description += f"; {skipped.count:,} broken rows skipped, the first: {skipped.first}"
    return sequences, description


class _Count:
    """Counts the examples that pass through `watch`: all, and those with a token in the loss."""

    def __init__(self) -> None:
        self.rows = self.predicted = 0

    def watch(self, examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            self.rows += 1
            self.predicted += bool(example.loss_mask.any())
            yield example
