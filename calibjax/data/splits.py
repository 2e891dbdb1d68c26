"""Disjoint splits of sequences for fitting, validation and evaluation. A row is never on both sides."""

import hashlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from calibjax.data.sequences import Sequences
from calibjax.runtime.errors import UserError

SplitOrder = Literal["shuffled", "sequential"]


def split_sequences(
    sequences: Sequences, fit_fraction: float, *, order: SplitOrder = "shuffled", seed: int = 0
) -> tuple[Sequences, Sequences]:
    """Splits S sequences into (fit, held_out), neither empty. A row is never on both sides.

    `int(fit_fraction * S)` are for fitting; the cut is at the nearest end of a row, and sequences keep their order
    within a part. A single row, such as one text file, is always cut between two sequences, its start for fitting.

    Args:
        sequences: S sequences.
        fit_fraction: between 0 and 1, both excluded.
        order: "shuffled": rows are drawn at random for fitting; "sequential": the first rows are for fitting.
        seed: seed of "shuffled", an integer >= 0.

    Raises:
        UserError: the fraction is out of range or gives an empty part.
    """
    cut = _part_size(fit_fraction, len(sequences.source), "fit_fraction")
    group, counts = _groups(sequences)
    drawn = np.arange(len(counts))
    if order == "shuffled" and len(np.unique(sequences.source)) > 1:
        drawn = np.random.default_rng(seed).permutation(len(counts))
    fit = first_groups(group, drawn, cut)
    return sequences.take(np.flatnonzero(fit)), sequences.take(np.flatnonzero(~fit))


def first_groups(group: Int[np.ndarray, " N"], order: Int[np.ndarray, " G"], size: float) -> Bool[np.ndarray, " N"]:
    """The elements of the first of at least two groups in this order, up to the end of a group nearest to `size`."""
    ends = np.cumsum(np.bincount(group)[order])[:-1]
    return np.isin(group, order[: 1 + int(np.argmin(np.abs(ends - size)))])


def count_repeats(fit: Sequences, held_out: Sequences) -> tuple[int, int]:
    """Counts texts of the held-out part that the fitting part has as well; returns their number and that of all texts.

    A text is the part of a row within one sequence, of at least 8 predictions: shorter ones are equal by chance. Rows
    are cut from their start, so equal rows give equal texts.
    """
    seen = set(_texts(fit))
    repeated = [text in seen for text in _texts(held_out)]
    return sum(repeated), len(repeated)


def _texts(sequences: Sequences) -> Iterator[bytes]:
    for tokens, targets, segments in zip(sequences.tokens, sequences.targets, sequences.segment_ids, strict=True):
        ends = np.flatnonzero(np.diff(segments, append=0))
        for start, end in zip([0, *(ends[:-1] + 1)], ends + 1, strict=True):
            if segments[start] and end - start >= 8:
                yield hashlib.blake2b(tokens[start:end].tobytes() + targets[end - 1].tobytes(), digest_size=16).digest()


def divide(sequences: Sequences, folds: int, seed: int) -> list[Int[np.ndarray, " n"]]:
    """Divides at least 2 sequences into folds of about equal size. All sequences of one row are in one fold.

    Rows are drawn at random by `seed`; a row belongs to the fold in which it starts. A single row, such as one text
    file, is divided into consecutive parts. Returns the ascending indices of 2 to `folds` folds, none empty.
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
    last = starts[drawn[-1]]  # the last row starts a fold of its own if one row fills the rest
    fold = np.minimum(starts * folds // total, folds - 1)
    if (fold == fold[0]).all():
        fold[starts == last] = 1
    return [np.flatnonzero(fold[group] == each) for each in np.unique(fold)]


def limit_tokens(sequences: Sequences, most: int, seed: int) -> Sequences:
    """Sequences drawn at random, in their order, with at most `most` tokens that count; at least one sequence."""
    counts = sequences.where.sum(axis=1)
    if counts.sum() <= most:
        return sequences
    order = np.random.default_rng(seed).permutation(len(counts))
    within = max(int(np.searchsorted(np.cumsum(counts[order]), most, side="right")), 1)
    return sequences.take(np.sort(order[:within]))


def concatenate(sets: list[Sequences]) -> Sequences:
    """Joins sets of sequences of one length; rows of different sets stay different."""
    lengths = {each.tokens.shape[1] for each in sets}
    if len(lengths) != 1:
        raise UserError(f"sets: expected sequences of one length, got {sorted(length + 1 for length in lengths)}.")
    first, sources = 0, []
    for each in sets:
        sources.append(each.source + np.int32(first))
        first = int(sources[-1].max()) + 1
    joined = (np.concatenate(fields) for fields in zip(*sets, strict=True))
    return Sequences(*joined)._replace(source=np.concatenate(sources))


def hold_back(sequences: Sequences, fraction: float, seed: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """Draws sequences for validation by `seed` >= 0: (train, validation), ascending indices, neither empty.

    Whole rows are drawn, at least one, until the next row would exceed `int(fraction * S)` sequences, 0 < fraction < 1.
    From a single row, such as one text file, sequences are drawn.

    Raises:
        UserError: the fraction or seed is out of range, or a part is empty.
    """
    if seed < 0:
        raise UserError(f"seed: expected an integer >= 0, got {seed}.")
    size = _part_size(fraction, len(sequences.source), "validation_fraction")
    group, counts = _groups(sequences)
    drawn = np.random.default_rng(seed).permutation(len(counts))
    number = int(np.searchsorted(np.cumsum(counts[drawn]), size, side="right"))
    validation = np.isin(group, drawn[: min(max(number, 1), len(counts) - 1)])
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def check_fraction(fraction: float, name: str) -> None:
    """Raises `UserError` with the `name` of the option if a fraction is not between 0 and 1, both excluded."""
    if not 0 < fraction < 1:
        raise UserError(f"{name}: expected a number between 0 and 1, both excluded, got {fraction}.")


def _groups(sequences: Sequences) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " G"]]:
    """Group of each sequence, its row or the sequence itself if all are of one row, and the sizes of the groups."""
    source = sequences.source
    source = np.arange(len(source)) if (source == source[0]).all() else source
    return np.unique(source, return_inverse=True, return_counts=True)[1:]


def _part_size(fraction: float, total: int, name: str) -> int:
    check_fraction(fraction, name)
    if not int(fraction * total):
        hint = "Give more text, shorter sequences, or a larger fraction."
        raise UserError(f"{name}={fraction} of {total} sequence{'s'[: total > 1]} is none. {hint}")
    return int(fraction * total)
