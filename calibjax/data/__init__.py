"""Text and chat to batches of tokens: source -> rows -> examples -> windows -> batches."""

from calibjax.data.choices import Choices as Choices
from calibjax.data.choices import choice_windows as choice_windows
from calibjax.data.choices import is_multiple_choice as is_multiple_choice
from calibjax.data.examples import Example as Example
from calibjax.data.examples import tokenize_rows as tokenize_rows
from calibjax.data.formats import Format as Format
from calibjax.data.formats import recognise as recognise
from calibjax.data.load import load_windows as load_windows
from calibjax.data.pipeline import batches as batches
from calibjax.data.pipeline import eval_batches as eval_batches
from calibjax.data.source import Rows as Rows
from calibjax.data.source import read_source as read_source
from calibjax.data.splits import check_fraction as check_fraction
from calibjax.data.splits import hold_back as hold_back
from calibjax.data.splits import split_windows as split_windows
from calibjax.data.table import read_table as read_table
from calibjax.data.table import split_table as split_table
from calibjax.data.windows import Layout as Layout
from calibjax.data.windows import Windows as Windows
from calibjax.data.windows import check_context as check_context
from calibjax.data.windows import make_windows as make_windows
