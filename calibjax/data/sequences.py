"""Sequences of one fixed length from examples."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from calibjax.data.examples import Example
from calibjax.runtime.errors import UserError

Layout = Literal["pack", "pad", "full"]
_LAYOUTS = ("pack", "pad", "full")
# Number of open bins. More bins give less padding and take longer; with 256, padding is 3% on Alpaca.
_OPEN_BINS = 256


class Sequences(NamedTuple):
    """S sequences of T = seq_len - 1 inputs and their targets, in the order of the source.

    Attributes:
        tokens: inputs, int32 `[S, T]`; 0 in padding.
        targets: token after each input in the same example, int32 `[S, T]`; 0 in padding.
        where: whether the loss includes the target, bool `[S, T]`; False in padding.
        segment_ids: 1, 2, ... for the examples within a sequence, 0 in padding, int32 `[S, T]`.
        positions: 0, 1, ... within each segment, 0 in padding, int32 `[S, T]`.
        source: group of the sequence, int32 `[S]`, ascending. Sequences that hold tokens of one row are in one group.
            It is the index of the row, or the smallest index among rows that are connected by packing.
    """

    tokens: Int32[np.ndarray, "S T"]
    targets: Int32[np.ndarray, "S T"]
    where: Bool[np.ndarray, "S T"]
    segment_ids: Int32[np.ndarray, "S T"]
    positions: Int32[np.ndarray, "S T"]
    source: Int32[np.ndarray, " S"]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the fields `[S, T]` by name, which a step reads."""
        return {name: field for name, field in self._asdict().items() if name != "source"}

    def take(self, indices: Int[np.ndarray, " n"] | slice) -> "Sequences":
        """Returns the sequences at `indices`."""
        return Sequences(*(field[indices] for field in self))


def check_context(seq_len: int, max_positions: int | None) -> None:
    """Raises `UserError` if `seq_len` exceeds the model's context of `max_positions` (None: no limit)."""
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

    - "full": one sequence from the first `seq_len` tokens of each example; shorter examples are dropped. A document is
      cut into consecutive full sequences.
    - "pad": every token of every example is predicted once. A longer example continues in the next sequence, whose
      first input is the last target of the previous one. The end is padded.
    - "pack": as "pad", but pieces shorter than a sequence are packed by first fit. A target always belongs to the
      example of its input; `segment_ids` must keep attention within examples.

    A sequence or piece without a target in the loss is dropped, such as a prompt whose answer was cut off.

    Args:
        examples: result of `tokenize_rows`; "pad" and "full" read only as many as needed.
        seq_len: tokens per sequence, at least 2.
        layout: "pack", "pad" or "full".
        max_sequences: keep only the first `max_sequences` sequences, at least 1.

    Returns:
        The sequences, at least one.

    Raises:
        UserError: if an argument is out of range, or no sequence remains.
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
    pairs: Int32[np.ndarray, "t 3"]  # input, target, whether the loss includes it; 1 <= t <= T
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
    # Each token carries its row, so that the rows of a packed sequence are known.
    elements = [
        {"pair": np.column_stack([piece.pairs, np.full(len(piece.pairs), piece.row, np.int32)])} for piece in pieces
    ]
    import grain

    stream = grain.MapDataset.source(elements).to_iter_dataset(grain.ReadOptions(num_threads=0))
    packed = list(
        grain.experimental.FirstFitPackIterDataset(
            stream, length_struct={"pair": length}, num_packing_bins=_OPEN_BINS, shuffle_bins=False
        )
    )
    pairs, segment_ids, positions = (
        np.stack([sequence[key] for sequence in packed]) for key in ("pair", "pair_segment_ids", "pair_positions")
    )
    source = _row_groups(pairs[..., 3], segment_ids > 0)
    order = np.argsort(source, kind="stable")
    return _sequences(*(array[order] for array in (pairs, segment_ids, positions, source)))


def _row_groups(rows: Int32[np.ndarray, "S T"], real: Bool[np.ndarray, "S T"]) -> Int32[np.ndarray, " S"]:
    """Returns for each sequence the smallest row among those that sequences connect to its rows.

    A row has at most one piece shorter than a sequence, so it is in at most one sequence with other rows. One step from
    a row to the smallest row of that sequence is therefore enough.
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
