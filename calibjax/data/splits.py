"""Disjoint splits of sequences for fitting, validation and evaluation. A row is never on both sides."""

import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int, Int32

from calibjax.data.sequences import Sequences
from calibjax.runtime.errors import UserError

_SHORTEST_TEXT = 8  # predictions; shorter texts are equal by chance


def split_sequences(sequences: Sequences, fit_fraction: float) -> tuple[Sequences, Sequences]:
    """Splits sequences in their order: the first `int(fit_fraction * S)` for fitting, the rest held out.

    If the cut divides the sequences of one row, it moves to the nearest end of a row. A single row, such as one text
    file, is cut between two sequences.

    Args:
        sequences: S sequences.
        fit_fraction: between 0 and 1, both excluded.

    Returns:
        (fit, held_out), neither empty.

    Raises:
        UserError: if the fraction is out of range or gives an empty part.
    """
    cut = _part_size(fit_fraction, len(sequences.source), "fit_fraction")
    ends = np.flatnonzero(np.diff(_groups(sequences))) + 1
    cut = int(ends[np.argmin(np.abs(ends - cut))])
    return sequences.take(slice(cut)), sequences.take(slice(cut, None))


def count_repeats(fit: Sequences, held_out: Sequences) -> tuple[int, int]:
    """Counts texts of the held-out part that the fitting part has as well, so that they were not held out.

    A text is the part of a row within one sequence. Rows are cut from their start, so equal rows give equal texts.

    Args:
        fit: sequences to fit on.
        held_out: sequences to evaluate on.

    Returns:
        (texts of `held_out` with an equal text in `fit`, texts of `held_out`), of those with at least 8 predictions.
    """
    seen = set(_texts(fit))
    found = [text in seen for text in _texts(held_out)]
    return sum(found), len(found)


def _texts(sequences: Sequences) -> Iterator[bytes]:
    for tokens, targets, segments in zip(sequences.tokens, sequences.targets, sequences.segment_ids, strict=True):
        ends = np.flatnonzero(np.diff(segments, append=0))
        for start, end in zip([0, *(ends[:-1] + 1)], ends + 1, strict=True):
            if segments[start] and end - start >= _SHORTEST_TEXT:
                yield hashlib.blake2b(tokens[start:end].tobytes() + targets[end - 1].tobytes(), digest_size=16).digest()


def hold_back(sequences: Sequences, fraction: float, seed: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """Chooses sequences at random for validation; the rest is for training.

    Whole rows are drawn, at least one, until the next row would exceed `int(fraction * S)` sequences. From a single
    row, such as one text file, sequences are drawn.

    Args:
        sequences: S sequences.
        fraction: fraction of sequences for validation, between 0 and 1, both excluded.
        seed: seed of the draw, an integer >= 0.

    Returns:
        (train, validation): indices into the sequences, ascending, neither empty.

    Raises:
        UserError: if the fraction or seed is out of range, or a part is empty.
    """
    if seed < 0:
        raise UserError(f"seed: expected an integer >= 0, got {seed}.")
    size = _part_size(fraction, len(sequences.source), "fraction")
    _, group, counts = np.unique(_groups(sequences), return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(seed).permutation(len(counts))
    number = int(np.searchsorted(np.cumsum(counts[drawn]), size, side="right"))
    validation = np.isin(group, drawn[: min(max(number, 1), len(counts) - 1)])
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def check_fraction(fraction: float, name: str) -> None:
    """Raises `UserError` with the `name` of the option if a fraction is not between 0 and 1, both excluded."""
    if not 0 < fraction < 1:
        raise UserError(f"{name}: expected a number between 0 and 1, both excluded, got {fraction}.")


def _groups(sequences: Sequences) -> Int32[np.ndarray, " S"]:
    """Group of each sequence: its row, or the sequence itself if all are of one row."""
    source = sequences.source
    return np.arange(len(source), dtype=np.int32) if (source == source[0]).all() else source


def _part_size(fraction: float, total: int, name: str) -> int:
    check_fraction(fraction, name)
    size = int(fraction * total)
    if size == 0:
        raise UserError(
            f"{name}={fraction} of {total} sequence{'s'[: total > 1]} is none. Give more text, a shorter seq_len, or a "
            "larger fraction."
        )
    return size
