"""Text, chat and tables to batches: source -> rows -> examples -> sequences -> batches."""

from calibjax.data.choices import Choices, choice_sequences, is_multiple_choice
from calibjax.data.examples import Example, tokenize_rows
from calibjax.data.formats import Format, recognise
from calibjax.data.load import choose_seq_len, load_sequences
from calibjax.data.pipeline import batches, eval_batches
from calibjax.data.sequences import (
    Sequences,
    check_context,
    check_ids,
    concatenate,
    count_repeats,
    divide,
    hold_back,
    limit_tokens,
    make_sequences,
    split_sequences,
)
from calibjax.data.source import Rows, is_hub_id, read_source
from calibjax.data.table import read_table, split_table

__all__ = [
    "Choices",
    "Example",
    "Format",
    "Rows",
    "Sequences",
    "batches",
    "check_context",
    "check_ids",
    "choice_sequences",
    "choose_seq_len",
    "concatenate",
    "count_repeats",
    "divide",
    "eval_batches",
    "hold_back",
    "is_hub_id",
    "is_multiple_choice",
    "limit_tokens",
    "load_sequences",
    "make_sequences",
    "read_source",
    "read_table",
    "recognise",
    "split_sequences",
    "split_table",
    "tokenize_rows",
]
