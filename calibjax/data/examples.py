"""Examples from rows: token ids and the loss mask."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from calibjax.data.chat_template import Tokenizer
from calibjax.data.formats import Format
from calibjax.data.render import Rendered, render_row
from calibjax.data.source import SKIP_HINT, Row, Rows, Skipped
from calibjax.runtime.errors import UserError
from calibjax.runtime.progress import progress_bar

_log = logging.getLogger(__name__)
_ROWS_PER_CALL = 1000
_CHARACTERS_PER_CALL = 2**20
_PART, _OVERLAP = 2**19, 2**12  # characters of the parts in which a longer text is tokenised
_AGREED = 16  # tokens in which two parts must agree to be joined


class Example(NamedTuple):
    """One row as tokens."""

    tokens: Int32[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]  # whether the loss includes the token; not the first one
    row: int  # index in the source
    is_document: bool = False  # a whole text file

    @property
    def has_prompt(self) -> bool:
        """Whether the loss leaves out more than the first token, such as a prompt."""
        return not self.loss_mask[1:].all()


def tokenize_rows(
    rows: Rows | Sequence[Row],
    format: Format,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Example]:
    """Tokenises rows lazily, in batches of at most 1,000 rows and a million characters; yields one example per row.

    Plain text gives exactly `tokenizer(text)["input_ids"]`, and the loss includes every token but the first. For
    prompts and conversations (see `render_row` for their text), the loss includes the answers of the assistant and the
    special token that ends each of them. If nothing follows the last one, the tokenizer's end token, if any, is added.

    Args:
        tokenizer: a fast one unless the rows are plain text.
        max_tokens: tokens of a row that are needed; the rest of a long plain text is not tokenised.
        skipped: counts the rows that are left out, if `rows.skip_broken`.

    Raises:
        UserError: an option does not apply, or (while iterating) a row does not match the format.
    """
    if not format.is_plain and not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise UserError(f"{name} is not a fast tokenizer, which responses need; text_column reads plain text.")
    if format.score_template_text and (format.prompt_template or format.is_plain or not tokenizer.chat_template):
        raise UserError("score_template_text: no chat template writes these rows; leave it out.")
    source = rows if isinstance(rows, Rows) else Rows(rows, "the data")
    skipped = Skipped() if skipped is None else skipped
    # The output of a chat template already holds the special tokens.
    add_special_tokens = format.is_plain or format.prompt_template is not None or not tokenizer.chat_template

    def rendered() -> Iterator[Rendered]:
        for place, row in source.placed(skipped):
            try:
                yield render_row(row, format, tokenizer, place)
            except UserError as error:
                if not source.skip_broken:
                    raise UserError(f"{error} {SKIP_HINT}") from error
                skipped.add(error)

    def examples() -> Iterator[Example]:
        index = 0
        is_warned = False
        two_starts = [tokenizer.bos_token_id] * 2
        special: set[Any] = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        special |= set(tokenizer.all_special_ids)
        special.discard(tokenizer.unk_token_id)  # it encodes text
        with progress_bar(None, title="tokenising", unit="row", disable=None, leave=False, delay=2) as bar:
            for batch in _batches(rendered()):
                if len(batch) == 1 and tokenizer.is_fast and len(batch[0].text) > 2 * _PART:
                    limit = max_tokens if format.is_plain else None
                    encoded = [_encode_long(batch[0].text, tokenizer, add_special_tokens, limit)]
                else:
                    encoded = _encode(batch, tokenizer, add_special_tokens, offsets=not format.is_plain)
                for item, (tokens, offsets) in zip(batch, encoded, strict=True):
                    if item.answers is None:
                        loss_mask = np.arange(len(tokens)) > 0
                    else:
                        tokens, loss_mask = _find_answers(item, tokens, offsets, special, tokenizer.eos_token_id)
                    if add_special_tokens and not is_warned and tokens[:2].tolist() == two_starts:
                        is_warned = True
                        begins_with = f"row {index} begins with {tokenizer.bos_token}"
                        _log.warning("%s, and the tokenizer adds it: the model reads it twice. Remove it.", begins_with)
                    yield Example(tokens, loss_mask, index, format.kind == "document")
                    index += 1
                bar.update(len(batch))

    return examples()


def _batches(rendered: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    batch: list[Rendered] = []
    characters = 0
    for item in rendered:
        is_full = len(batch) == _ROWS_PER_CALL or characters + len(item.text) > _CHARACTERS_PER_CALL
        if batch and is_full:
            yield batch
            batch, characters = [], 0
        batch.append(item)
        characters += len(item.text)
    if batch:
        yield batch


def _encode(
    rendered: list[Rendered], tokenizer: Tokenizer, add_special_tokens: bool, *, offsets: bool
) -> Iterator[tuple[np.ndarray, Any]]:
    """Token ids `[n]`, and the half-open ranges of characters that they stand for, `[n, 2]`, or None."""
    # verbose=False suppresses warnings about texts beyond the model's context, which are cut into sequences later.
    texts = [item.text for item in rendered]
    options: Any = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": offsets}
    encoded: Any = tokenizer(texts, verbose=False, **options)
    ranges = encoded["offset_mapping"] if offsets else [None] * len(texts)
    for ids, spans in zip(encoded["input_ids"], ranges, strict=True):
        spans = None if spans is None else np.asarray(spans, np.int64).reshape(-1, 2)
        yield np.asarray(ids, np.int32), spans


def _encode_long(
    text: str, tokenizer: Tokenizer, add_special_tokens: bool, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises a text in parts, up to `max_tokens` tokens, with the result of the whole text.

    Parts overlap. In the middle of the overlap both have enough context to give the same tokens, and there they are
    joined; where they differ, a longer overlap is tried.
    """

    def encode(text: str, special: bool = False) -> np.ndarray:
        """Id, start and end of each token, `[n, 3]`."""
        ids, offsets = next(_encode([Rendered(text, None)], tokenizer, special, offsets=True))
        return np.column_stack([ids, offsets])

    before = after = np.zeros((0, 3), np.int64)
    if add_special_tokens:
        before, after = _special_tokens(encode)
    part, parts = encode(text[:_PART]), [before]
    count, end, overlap = len(before), min(_PART, len(text)), _OVERLAP
    while end < len(text) and (max_tokens is None or count + len(part) < max_tokens):
        start = end - overlap
        more = encode(text[start : start + _PART]) + np.array([0, start, start])
        middle = (start + overlap // 2, end - overlap // 4)
        first, last = np.searchsorted(part[:, 1], middle)
        first_more, last_more = np.searchsorted(more[:, 1], middle)
        if last - first >= _AGREED and np.array_equal(part[first:last], more[first_more:last_more]):
            parts.append(part[:first])
            count += int(first)
            part, overlap, end = more[first_more:], _OVERLAP, min(start + _PART, len(text))
        elif (overlap := 4 * overlap) >= _PART:  # such as a single word: it has no boundary to join parts at
            parts, part, after = [], encode(text, add_special_tokens), after[:0]
            break
    tokens = np.concatenate([*parts, part, after])[:max_tokens]
    return tokens[:, 0].astype(np.int32), tokens[:, 1:]


def _special_tokens(encode: Callable[..., np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    plain, whole = encode("a"), encode("a", True)
    for start in range(len(whole) - len(plain) + 1):
        if np.array_equal(whole[start : start + len(plain)], plain):
            return whole[:start], whole[start + len(plain) :]
    raise UserError("the tokenizer changes a text where it adds special tokens: give shorter texts.")


def _find_answers(
    rendered: Rendered, ids: np.ndarray, offsets: np.ndarray, special: set[Any], end_of_sequence: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, with the end of the sequence if it is missing, and whether the loss includes each of them."""
    begin, end = offsets.T
    # Tokenizers that trim offsets give spaces no width: they stand where the token before them ends.
    begin = np.where(begin < end, begin, np.minimum(begin, np.append(0, end[:-1])))
    loss_mask = np.zeros(len(ids), bool)
    for first, last in rendered.answers or ():
        # A token without width, such as a leading space that the tokenizer has inserted, counts as one character.
        inside = (begin < last) & (np.maximum(end, begin + 1) > first)
        after = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else int((begin < first).sum())
        loss_mask |= inside
        # Some templates write a space between an answer and the token that ends it.
        while after < len(ids) and int(ids[after]) not in special:
            if rendered.text[last : end[after]].strip():
                break
            after += 1
        if after < len(ids):
            between = rendered.text[last : max(begin[after], last)]
            loss_mask[after] |= int(ids[after]) in special and not between.strip()
        elif last == len(rendered.text) and end_of_sequence is not None and ids[-1:].tolist() != [end_of_sequence]:
            ids = np.append(ids, np.int32(end_of_sequence))
            loss_mask = np.append(loss_mask, True)
            break  # no answer follows the end of the text
    loss_mask[:1] = False
    return ids, loss_mask
