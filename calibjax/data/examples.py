"""Examples from rows: token ids and the loss mask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from calibjax.data.formats import Format
from calibjax.data.render import Rendered, make_render
from calibjax.runtime.errors import UserError
from calibjax.runtime.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_CALL = 1000
_ROWS_WORTH_A_PROGRESS_BAR = 5000


class Example(NamedTuple):
    """One row as tokens.

    Attributes:
        tokens: token ids, int32 `[n]`.
        loss_mask: whether the loss includes this token, bool `[n]`; False for the first token.
        row: index of the row in the source.
        is_document: whether the row is a whole text file.
    """

    tokens: Int32[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    row: int
    is_document: bool = False


def tokenize_rows(
    rows: Sequence[Mapping[str, Any]],
    format: Format,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_template: str | None = None,
) -> Iterator[Example]:
    """Tokenises rows lazily, in batches of 1,000.

    Plain text gives exactly `tokenizer(text)["input_ids"]`, and the loss includes every token but the first.

    For prompts and conversations (see `make_render` for their text), the loss includes the answers of the assistant and
    the special token that ends each of them. If nothing follows the last answer, the tokenizer's end-of-sequence token
    is appended, if it has one.

    Args:
        rows: result of `read_source`, or any sequence of dicts.
        format: result of `recognise`.
        tokenizer: tokenizer of `transformers`; it must be a fast one unless the rows are plain text.
        prompt_template: format string over the columns of the row, such as "{instruction} {input} ", which replaces the
            chat template. Only for instructions and prompts.

    Returns:
        An iterator over one example per row, in order.

    Raises:
        UserError: if an option does not apply, or (while iterating) a row does not match the format.
    """
    if not format.is_plain and not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which is required to find the tokens of a response. "
            "Use a model with a tokenizer.json, or read one column as plain text (text_column)."
        )
    render = make_render(format, tokenizer, prompt_template)
    # The output of a chat template already holds the special tokens.
    add_special_tokens = format.is_plain or prompt_template is not None or not tokenizer.chat_template

    def examples() -> Iterator[Example]:
        encode = _encode_plain if format.is_plain else _encode_answers
        bar_off = None if len(rows) > _ROWS_WORTH_A_PROGRESS_BAR else True  # None: on a terminal only
        with progress_bar(None, title="tokenising", unit="row", disable=bar_off, total=len(rows), leave=False) as bar:
            for start in range(0, len(rows), _ROWS_PER_CALL):
                indices = range(start, min(start + _ROWS_PER_CALL, len(rows)))
                rendered = [render(index, rows[index]) for index in indices]
                encoded = encode(rendered, tokenizer, add_special_tokens)
                for index, (tokens, loss_mask) in zip(indices, encoded, strict=True):
                    yield Example(tokens, loss_mask, index, format.kind == "document")
                bar.update(len(indices))

    return examples()


def _encode_plain(
    rendered: list[Rendered], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # verbose=False suppresses warnings about texts beyond the model's context, which are cut into sequences later.
    encoded: Any = tokenizer([item.text for item in rendered], add_special_tokens=add_special_tokens, verbose=False)
    for ids in encoded["input_ids"]:
        yield np.asarray(ids, np.int32), np.arange(len(ids)) > 0


def _encode_answers(
    rendered: list[Rendered], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    encoded: Any = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        verbose=False,
    )
    special: set[Any] = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= set(tokenizer.all_special_ids)
    special.discard(tokenizer.unk_token_id)  # it encodes text
    for item, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield _find_answers(item, ids, np.asarray(offsets, np.int64).reshape(-1, 2), special, tokenizer.eos_token_id)


def _find_answers(
    rendered: Rendered, ids: list[int], offsets: Int[np.ndarray, "n 2"], special: set[int], end_of_sequence: Any
) -> tuple[np.ndarray, np.ndarray]:
    begin, end = offsets.T
    loss_mask = np.zeros(len(ids), bool)
    for first, last in rendered.answers or ():
        # A token belongs to the answer if they have a character in common. Some tokens have no width, such as a leading
        # space that the tokenizer has inserted.
        inside = (begin < last) & (np.maximum(end, begin + 1) > first)
        after = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else int((begin < first).sum())
        loss_mask |= inside
        if after < len(ids):
            between = rendered.text[last : max(begin[after], last)]
            loss_mask[after] |= ids[after] in special and not between.strip()
        elif last == len(rendered.text) and end_of_sequence is not None and ids[-1:] != [end_of_sequence]:
            ids, loss_mask = [*ids, end_of_sequence], np.append(loss_mask, True)
            break  # no answer follows the end of the text
    loss_mask[:1] = False
    return np.asarray(ids, np.int32), loss_mask
