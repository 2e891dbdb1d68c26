"""Sequences of one fixed length from examples, and their disjoint parts. A row is never on both sides of a split."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from calibjax.data.examples import Example
from calibjax.runtime.arrays import round_up
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Fraction, check_value

Layout = Literal["pack", "pad", "full"]
SplitOrder = Literal["shuffled", "sequential"]
_GROUP = 256  # sequences that are packed together: more give less padding (3% on Alpaca) and take longer


class Sequences(NamedTuple):
    """S sequences of T = seq_len - 1 inputs and their targets, in the order of the source.

    Attributes:
        tokens: inputs, int32 `[S, T]`; 0 in padding.
        targets: token after each input in the same example, int32 `[S, T]`; 0 in padding.
        where: whether the loss includes the target, bool `[S, T]`; False in padding.
        segment_ids: 1, 2, ... for the examples within a sequence, 0 in padding, int32 `[S, T]`.
        positions: 0, 1, ... within each segment, 0 in padding, int32 `[S, T]`.
        source: row of the sequence, or the smallest among rows that packing connects, int32 `[S]`, ascending.
    """

    tokens: Int32[np.ndarray, "S T"]
    targets: Int32[np.ndarray, "S T"]
    where: Bool[np.ndarray, "S T"]
    segment_ids: Int32[np.ndarray, "S T"]
    positions: Int32[np.ndarray, "S T"]
    source: Int32[np.ndarray, " S"]

    def __repr__(self) -> str:
        sequences, length = self.tokens.shape
        return f"Sequences({sequences:,} of {length:,} inputs, {int(np.sum(self.where)):,} targets in the loss)"

    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> field, for the fields of shape `[S, T]`."""
        return {name: field for name, field in self._asdict().items() if name != "source"}

    def take(self, indices: Int[np.ndarray, " n"] | slice) -> "Sequences":
        """The sequences at `indices`."""
        return Sequences(*(field[indices] for field in self))


def check_context(seq_len: int, max_positions: int | None) -> None:
    """Raises `UserError` if `seq_len` exceeds the model's context of `max_positions`; None is no limit."""
    if max_positions is not None and seq_len > max_positions:
        raise UserError(f"seq_len={seq_len} is longer than the model's context of {max_positions} tokens; lower it.")


def check_ids(sequences: Sequences, vocab_size: int, input_ids: int | None = None) -> None:
    """Raises `UserError` if no target counts, or a token (below `input_ids`) or target is outside the vocabulary.

    Tokens in padding count too: attention sums over them with a weight of 0, and 0 times NaN is NaN.
    """
    counted = sequences.where & (sequences.targets != -100)
    if not counted.any():
        raise UserError("sequences: expected at least one target that counts (`where` True, not -100), got none.")
    check_in_vocabulary("tokens (0 in padding)", sequences.tokens, input_ids or vocab_size)
    check_in_vocabulary("targets", sequences.targets[counted], vocab_size)


def check_in_vocabulary(name: str, ids: Int[np.ndarray, "..."], size: int) -> None:
    """Raises `UserError` if an id is not one of the `size` of a model."""
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        hint = "Were they made with the tokenizer of another model, or with a token that only the tokenizer has?"
        raise UserError(f"{name}: expected ids from 0 to {size - 1}, got {outside[0]}. {hint}")


def tokens_needed(seq_len: int, layout: Layout, max_sequences: int | None, is_document: bool) -> int | None:
    """The largest number of tokens of a row of plain text that `make_sequences` uses; None for all of them."""
    if layout == "full" and not is_document:
        return seq_len
    if max_sequences is None:
        return None
    return round_up(max_sequences, _GROUP) * (seq_len - 1) + 1


def make_sequences(
    examples: Iterable[Example], seq_len: int, *, layout: Layout = "pack", max_sequences: int | None = None
) -> Sequences:
    """Cuts examples into sequences of `seq_len` tokens, which is T = seq_len - 1 pairs of input and target.

    - "full": the first `seq_len` tokens of each example, if it has as many; of a document, consecutive full sequences.
    - "pad": every token is predicted once. A longer example continues in the next sequence, whose first input is the
      last target of the previous one. An example with a prompt is cut after its first sequence, because the next one
      would not hold the prompt. The end is padded.
    - "pack": as "pad", but pieces shorter than a sequence are packed by first fit, into 256 sequences at a time;
      `segment_ids` must keep attention within examples.

    A piece without a target in the loss is dropped, such as a prompt whose answer was cut off. Only the first
    `max_sequences` sequences are made, at least 1. Raises `UserError` where none remains.
    """
    if seq_len < 2:
        raise UserError(f"seq_len: expected at least 2 (an input and its target), got {seq_len}.")
    check_value("layout", Layout, layout)
    if max_sequences is not None and max_sequences < 1:
        raise UserError(f"max_sequences: expected at least 1, got {max_sequences}.")
    length = seq_len - 1
    pieces = (piece for example in examples for piece in _cut(example, length, full=layout == "full"))
    groups = _first_fit(pieces, length) if layout == "pack" else ([[piece]] for piece in pieces)
    packed: list[list[_Piece]] = []
    for group in groups:
        packed += group
        if max_sequences is not None and len(packed) >= max_sequences:
            break
    if not packed:
        hint = "Is all of the text empty, or are the prompts longer? Give a larger seq_len."
        if layout == "full":
            hint = "Give a smaller seq_len, or layout='pack'."
        raise UserError(f"no sequence of {seq_len} tokens has anything to predict (layout {layout!r}). {hint}")
    # A row has at most one piece shorter than a sequence, so it is in at most one sequence with other rows: one step to
    # the smallest row of that sequence connects all.
    source = [min(piece.row for piece in sequence) for sequence in packed]
    smallest_row: dict[int, int] = {}
    for first, sequence in zip(source, packed, strict=True):
        for piece in sequence:
            smallest_row[piece.row] = min(smallest_row.get(piece.row, first), first)
    row = np.array([smallest_row[first] for first in source], np.int32)
    order = np.argsort(row, kind="stable")[:max_sequences]
    return _join([packed[place] for place in order], row[order], length)


class _Piece(NamedTuple):
    tokens: Int32[np.ndarray, " t+1"]  # consecutive tokens of an example, 1 <= t <= T: all but the last are inputs
    where: Bool[np.ndarray, " t"]  # whether the loss includes the token after each input
    row: int


def _cut(example: Example, length: int, *, full: bool) -> Iterator[_Piece]:
    stop = len(example.tokens) - 1
    if example.has_prompt:
        stop = min(stop, length)
    if full:
        whole = stop // length * length
        stop = whole if example.is_document else min(whole, length)
    for start in range(0, stop, length):
        end = min(start + length, stop)
        where = example.loss_mask[start + 1 : end + 1]
        if where.any():
            # Copies: views would hold the whole example.
            yield _Piece(example.tokens[start : end + 1].astype(np.int32), where.copy(), example.row)


def _first_fit(pieces: Iterator[_Piece], length: int) -> Iterator[list[list[_Piece]]]:
    """Groups of sequences: a piece goes to the first sequence with room; if none has room, it begins a new group."""
    group: list[list[_Piece]] = []
    free = np.full(_GROUP, length)
    for piece in pieces:
        slot = int(np.argmax(free >= len(piece.where)))
        if free[slot] < len(piece.where):
            yield group
            group, slot, free = [], 0, np.full(_GROUP, length)
        if slot == len(group):
            group.append([])
        group[slot].append(piece)
        free[slot] -= len(piece.where)
    if group:
        yield group


def _join(packed: list[list[_Piece]], source: Int32[np.ndarray, " S"], length: int) -> Sequences:
    shape = len(packed), length
    tokens, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
    where = np.zeros(shape, bool)
    for row, pieces in enumerate(packed):
        end = 0
        for segment, piece in enumerate(pieces, 1):
            start, end = end, end + len(piece.where)
            tokens[row, start:end] = piece.tokens[:-1]
            targets[row, start:end] = piece.tokens[1:]
            where[row, start:end] = piece.where
            segment_ids[row, start:end] = segment
            positions[row, start:end] = np.arange(end - start)
    return Sequences(tokens, targets, where, segment_ids, positions, source)


def split_sequences(
    sequences: Sequences, fit_fraction: float, *, order: SplitOrder = "shuffled", seed: int = 0
) -> tuple[Sequences, Sequences]:
    """Splits S sequences into (fit, held_out), neither empty (else `UserError`). A row is never on both sides.

    `int(fit_fraction * S)` are for fitting, 0 < fit_fraction < 1: rows drawn at random by `seed`, or the first ones
    ("sequential"). The cut is at the nearest end of a row, and sequences keep their order within a part. A single row,
    such as one text file, is always cut between two sequences, its start for fitting.
    """
    check_value("order", SplitOrder, order)
    cut = _part_size(fit_fraction, len(sequences.source), "fit_fraction")
    group, counts = row_groups(sequences)
    drawn = np.arange(len(counts))
    if order == "shuffled" and len(np.unique(sequences.source)) > 1:
        drawn = np.random.default_rng(seed).permutation(len(counts))
    fit = first_groups(group, drawn, cut)
    return sequences.take(np.flatnonzero(fit)), sequences.take(np.flatnonzero(~fit))


def first_groups(group: Int[np.ndarray, " N"], order: Int[np.ndarray, " G"], size: float) -> Bool[np.ndarray, " N"]:
    """True for the first groups in `order`: as many as have a total size nearest to `size`, but never all groups."""
    total_sizes = np.cumsum(np.bincount(group)[order])[:-1]  # of the first 1, 2, ... groups
    count = 1 + int(np.argmin(np.abs(total_sizes - size)))
    return np.isin(group, order[:count])


def check_resamples(sequences: Sequences, name: str) -> None:
    """Raises `UserError` for a single sequence: intervals resample sequences, and those of one have no width."""
    if len(sequences.tokens) < 2:
        raise UserError(f"{name}: expected at least two sequences, got one, which gives no interval. Give more text.")


def count_repeats(fit: Sequences, held_out: Sequences) -> tuple[int, int]:
    """The number of texts of the held-out part that are in the fitting part as well, and the number of all its texts.

    A text is the part of a row within one sequence, of at least 8 predictions: shorter ones are equal by chance.
    """
    seen = set(_texts(fit))
    repeated = [text in seen for text in _texts(held_out)]
    return sum(repeated), len(repeated)


def _texts(sequences: Sequences) -> Iterator[bytes]:
    for tokens, targets, segments in zip(sequences.tokens, sequences.targets, sequences.segment_ids, strict=True):
        ends = np.flatnonzero(np.diff(segments, append=0)) + 1
        starts = [0, *ends[:-1]]
        for start, end in zip(starts, ends, strict=True):
            if segments[start] and end - start >= 8:
                content = tokens[start:end].tobytes() + targets[end - 1].tobytes()
                yield hashlib.blake2b(content, digest_size=16).digest()


def fold_indices(sequences: Sequences, folds: int, *, seed: int) -> list[Int[np.ndarray, " n"]]:
    """Divides at least 2 sequences into 2 to `folds` folds of about equal size, none empty; returns ascending indices.

    Rows are drawn at random by `seed`; a row is in the fold in which it starts. A single row is cut into equal parts.
    """
    total = len(sequences.source)
    if total < 2:
        raise UserError(f"folds: expected at least 2 sequences to divide, got {total}. Give more text.")
    if (sequences.source == sequences.source[0]).all():
        return [part for part in np.array_split(np.arange(total), folds) if len(part)]
    _, group, counts = np.unique(sequences.source, return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(seed).permutation(len(counts))
    starts = np.zeros(len(counts), np.int64)
    starts[drawn] = np.cumsum(counts[drawn]) - counts[drawn]
    fold = starts * folds // total
    if (fold == fold[0]).all():
        fold[drawn[-1]] = 1  # the last row starts a fold of its own where one row fills the rest
    return [np.flatnonzero(fold[group] == number) for number in np.unique(fold)]


def limit_tokens(sequences: Sequences, max_tokens: int, *, seed: int) -> Sequences:
    """Sequences drawn at random, in their order, with at most `max_tokens` that count; at least one sequence."""
    counts = sequences.where.sum(axis=1)
    if counts.sum() <= max_tokens:
        return sequences
    order = np.random.default_rng(seed).permutation(len(counts))
    count = max(int(np.searchsorted(np.cumsum(counts[order]), max_tokens, side="right")), 1)
    return sequences.take(np.sort(order[:count]))


def concatenate(sets: list[Sequences]) -> Sequences:
    """Joins sets of sequences of one length; rows of different sets stay different."""
    lengths = {sequences.tokens.shape[1] for sequences in sets}
    if len(lengths) != 1:
        raise UserError(f"sets: expected sequences of one length, got {sorted(length + 1 for length in lengths)}.")
    first_row = 0
    sources = []
    for sequences in sets:
        sources.append(sequences.source + np.int32(first_row))
        first_row = int(sources[-1].max()) + 1
    joined = Sequences(*(np.concatenate(fields) for fields in zip(*sets, strict=True)))
    return joined._replace(source=np.concatenate(sources))


def validation_split(
    sequences: Sequences, fraction: float, *, seed: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """Draws sequences for validation by `seed` >= 0: (train, validation), ascending indices, neither empty.

    Whole rows are drawn until the next row would exceed `int(fraction * S)` sequences, 0 < fraction < 1. Rows that are
    longer than that are left to training; if all are, the shortest is drawn. From a single row, such as one text file,
    sequences are drawn. Raises `UserError` where a part is empty.
    """
    if seed < 0:
        raise UserError(f"seed: expected an integer >= 0, got {seed}.")
    size = _part_size(fraction, len(sequences.source), "validation_fraction")
    group, counts = row_groups(sequences)
    drawn = np.random.default_rng(seed).permutation(len(counts))
    drawn = drawn[np.argsort(np.maximum(counts[drawn], size), kind="stable")]  # those that are too long come last
    number = int(np.searchsorted(np.cumsum(counts[drawn]), size, side="right"))
    validation = np.isin(group, drawn[: min(max(number, 1), len(counts) - 1)])
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def row_groups(sequences: Sequences) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " G"]]:
    """Group of each sequence, and the sizes of the groups: a row is a group, or each sequence if there is one row."""
    source = sequences.source
    if (source == source[0]).all():
        source = np.arange(len(source))
    _, group, counts = np.unique(source, return_inverse=True, return_counts=True)
    return group, counts


def _part_size(fraction: float, total: int, name: str) -> int:
    """`fraction` of `total` sequences, rounded down; raises `UserError` where that is none."""
    check_value(name, Fraction, fraction)
    size = int(fraction * total)
    if not size:
        hint = "Give more text, shorter sequences, or a larger fraction."
        raise UserError(f"{name}={fraction} of {total} sequence(s) is none. {hint}")
    return size
