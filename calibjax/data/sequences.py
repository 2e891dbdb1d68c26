"""From examples to sequences: arrays of one fixed length, for the model to read and to be scored on."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import grain
import numpy as np
from jaxtyping import Bool, Int, Int32

from calibjax.data.examples import Example
from calibjax.runtime.errors import UserError

Layout = Literal["pack", "pad", "full"]
_LAYOUTS = ("pack", "pad", "full")
# Bins that stand open at once. More leave less padding and take longer; with these, Alpaca's rows leave 3%.
_OPEN_BINS = 256


class Sequences(NamedTuple):
    """S sequences of T = seq_len - 1 inputs and their targets, in the order of the source.

    Attributes:
      tokens: Inputs, int32 [S, T]; 0 in the padding.
      targets: The token after each input, always of the same example, int32 [S, T]; 0 in the padding.
      where: Whether the target is to be predicted, bool [S, T]; False in the padding.
      segment_ids: 1, 2, ... for the examples within a sequence, 0 in the padding, int32 [S, T].
      positions: 0, 1, ... within each segment, 0 in the padding, int32 [S, T].
      source: Sequences with the same number share a row of the source, int32 [S], ascending: the index of the row, or,
        where short rows are packed together, the smallest index of the rows that belong together for that reason.
    """

    tokens: Int32[np.ndarray, "S T"]
    targets: Int32[np.ndarray, "S T"]
    where: Bool[np.ndarray, "S T"]
    segment_ids: Int32[np.ndarray, "S T"]
    positions: Int32[np.ndarray, "S T"]
    source: Int32[np.ndarray, " S"]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns what a step reads: every field `[S, T]`."""
        return {name: field for name, field in self._asdict().items() if name != "source"}

    def take(self, indices: Int[np.ndarray, " n"] | slice) -> "Sequences":
        """Returns the sequences at `indices`."""
        return Sequences(*(field[indices] for field in self))


def check_context(seq_len: int, max_positions: int | None) -> None:
    """Raises `UserError` where sequences of `seq_len` tokens are longer than a model reads (None: no limit)."""
    if max_positions is not None and seq_len > max_positions:
        raise UserError(
            f"seq_len={seq_len} is longer than the model's context of {max_positions} tokens. "
            f"Give seq_len={max_positions} or less."
        )


def make_sequences(
    examples: Iterable[Example],
    seq_len: int,
    *,
    layout: Layout = "pack",
    max_sequences: int | None = None,
) -> Sequences:
    """Cuts examples into sequences of `seq_len` tokens, which is T = seq_len - 1 pairs of input and target.

    - "full": one sequence from the first `seq_len` tokens of each example; shorter examples are dropped. A whole text
      file gives all its full sequences, one after the other.
    - "pad": every token of every example is predicted once; longer examples go on in the next sequence, whose first
      input is the last target of the one before; the end is padded.
    - "pack": as "pad", but the pieces shorter than a sequence share sequences, first fit. No target is ever of another
      example than its input; the model has to be kept from looking across by `segment_ids`.

    A sequence or piece without a token to be predicted is dropped, such as one from a prompt whose answer was cut off.

    Args:
      examples: From `tokenize_rows`; read no further than needed for "pad" and "full".
      seq_len: Tokens per sequence, at least 2.
      layout: "pack", "pad" or "full".
      max_sequences: Keep only this many first sequences, at least 1.

    Returns:
      The sequences, at least one.

    Raises:
      UserError: An argument is out of range, or no sequence remains.
    """
    if seq_len < 2:
        raise UserError(f"seq_len: expected at least 2 (an input and its target), got {seq_len}.")
    if layout not in _LAYOUTS:
        raise UserError(f"layout: expected one of {', '.join(_LAYOUTS)}, got {layout!r}.")
    if max_sequences is not None and max_sequences < 1:
        raise UserError(f"max_sequences: expected at least 1, got {max_sequences}.")
    length = seq_len - 1
    pieces = (piece for example in examples for piece in _cut(example, length, full=layout == "full"))
    sequences = _pack(list(pieces), length) if layout == "pack" else _pad(list(islice(pieces, max_sequences)), length)
    if len(sequences.tokens) == 0:
        raise UserError(
            f"no sequence of {seq_len} tokens has anything to predict (layout {layout!r}). "
            + ("Give a smaller seq_len, or layout='pack'." if layout == "full" else "Is all of the text empty?")
        )
    return sequences.take(slice(max_sequences))


class _Piece(NamedTuple):
    pairs: Int32[np.ndarray, "t 3"]  # input, target, whether it is to be predicted; 1 <= t <= T
    row: int


def _cut(example: Example, length: int, *, full: bool) -> Iterator[_Piece]:
    pairs = np.stack([example.tokens[:-1], example.tokens[1:], example.loss_mask[1:]], axis=1).astype(np.int32)
    stop = len(pairs)
    if full:
        stop = stop // length * length if example.is_document else length * (stop >= length)
    for start in range(0, stop, length):
        piece = pairs[start : min(start + length, stop)]
        if piece[:, 2].any():
            yield _Piece(piece, example.row)


def _pad(pieces: Sequence[_Piece], length: int) -> Sequences:
    pairs = np.zeros((len(pieces), length, 3), np.int32)
    lengths = np.array([len(piece.pairs) for piece in pieces], np.int32)
    for index, piece in enumerate(pieces):
        pairs[index, : len(piece.pairs)] = piece.pairs
    real = (np.arange(length, dtype=np.int32) < lengths[:, None]).astype(np.int32)
    positions = np.arange(length, dtype=np.int32) * real
    return _sequences(pairs, real, positions, np.array([piece.row for piece in pieces], np.int32))


def _pack(pieces: Sequence[_Piece], length: int) -> Sequences:
    if not pieces:
        return _pad(pieces, length)
    # The row travels with each token, so that a packed sequence tells which rows it holds.
    elements = [
        {"pair": np.column_stack([piece.pairs, np.full(len(piece.pairs), piece.row, np.int32)])} for piece in pieces
    ]
    stream = grain.MapDataset.source(elements).to_iter_dataset(grain.ReadOptions(num_threads=0))
    packed = list(
        grain.experimental.FirstFitPackIterDataset(
            stream, length_struct={"pair": length}, num_packing_bins=_OPEN_BINS, shuffle_bins=False
        )
    )
    pairs, segment_ids, positions = (
        np.stack([sequence[key] for sequence in packed]) for key in ("pair", "pair_segment_ids", "pair_positions")
    )
    source = _share_rows(pairs[..., 3], segment_ids > 0)
    order = np.argsort(source, kind="stable")
    return _sequences(*(array[order] for array in (pairs, segment_ids, positions, source)))


def _share_rows(rows: Int32[np.ndarray, "S T"], real: Bool[np.ndarray, "S T"]) -> Int32[np.ndarray, " S"]:
    """Returns for each sequence the smallest of the rows that sequences tie together with its own.

    A row has at most one piece shorter than a sequence, so it shares at most one sequence with other rows, and one step
    from the row to the smallest row there is enough.
    """
    smallest = np.where(real, rows, np.iinfo(np.int32).max).min(axis=1)
    leader = np.full(rows.max() + 1, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(leader, rows[real], np.broadcast_to(smallest[:, None], rows.shape)[real])
    return leader[smallest]


def _sequences(
    pairs: Int32[np.ndarray, "S T k"],
    segment_ids: Int32[np.ndarray, "S T"],
    positions: Int32[np.ndarray, "S T"],
    source: Int32[np.ndarray, " S"],
) -> Sequences:
    tokens, targets, where = (np.ascontiguousarray(pairs[..., k]) for k in range(3))
    return Sequences(tokens, targets, where.astype(bool), segment_ids, positions, source)
