"""Text, chat and tables to batches: source -> rows -> examples -> sequences -> batches."""

from calibjax.data.choices import Choices as Choices
from calibjax.data.choices import choice_sequences as choice_sequences
from calibjax.data.choices import is_multiple_choice as is_multiple_choice
from calibjax.data.examples import Example as Example
from calibjax.data.examples import tokenize_rows as tokenize_rows
from calibjax.data.formats import Format as Format
from calibjax.data.formats import recognise as recognise
from calibjax.data.load import choose_seq_len as choose_seq_len
from calibjax.data.load import load_sequences as load_sequences
from calibjax.data.pipeline import batches as batches
from calibjax.data.pipeline import eval_batches as eval_batches
from calibjax.data.sequences import Sequences as Sequences
from calibjax.data.sequences import check_context as check_context
from calibjax.data.sequences import check_ids as check_ids
from calibjax.data.sequences import concatenate as concatenate
from calibjax.data.sequences import count_repeats as count_repeats
from calibjax.data.sequences import fold_indices as fold_indices
from calibjax.data.sequences import limit_tokens as limit_tokens
from calibjax.data.sequences import make_sequences as make_sequences
from calibjax.data.sequences import split_sequences as split_sequences
from calibjax.data.sequences import validation_split as validation_split
from calibjax.data.source import Rows as Rows
from calibjax.data.source import is_hub_id as is_hub_id
from calibjax.data.source import read_source as read_source
from calibjax.data.table import read_table as read_table
from calibjax.data.table import split_table as split_table
