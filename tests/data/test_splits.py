"""Splits: in order or at random, and no row on both sides."""

import numpy as np
import pytest

from calibjax.data import Sequences, hold_back, split_sequences
from calibjax.runtime.errors import UserError


def make_sequences(source):
    source = np.asarray(source, np.int32)
    tokens = np.arange(len(source), dtype=np.int32)[:, None]
    return Sequences(
        tokens, tokens + 1, np.ones_like(tokens, bool), np.ones_like(tokens), np.zeros_like(tokens), source
    )


def test_first_fraction_in_order():
    fit, held_out = split_sequences(make_sequences(range(1600)), 0.6)
    np.testing.assert_array_equal(fit.tokens[:, 0], np.arange(960))
    np.testing.assert_array_equal(held_out.tokens[:, 0], np.arange(960, 1600))


@pytest.mark.parametrize(
    ("source", "fraction", "cut"),
    [
        ([0, 0, 0, 0, 1, 1], 0.5, 4),
        ([0, 1, 1, 1, 1, 1], 0.5, 1),
        ([0, 0, 1, 1, 1, 3], 0.5, 2),
        ([0, 0, 0, 0, 0, 1], 0.2, 5),
        ([7, 7, 7, 7], 0.5, 2),
        ([0, 1, 2], 0.9, 2),
    ],
)
def test_cut_moves_to_the_end_of_a_row(source, fraction, cut):
    fit, held_out = split_sequences(make_sequences(source), fraction)
    assert len(fit.source) == cut
    assert len(held_out.source) == len(source) - cut


def test_hold_back_is_seeded_and_a_partition():
    sequences = make_sequences(range(100))
    train, validation = hold_back(sequences, 0.15, seed=3)
    assert len(validation) == 15
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(100))
    np.testing.assert_array_equal(hold_back(sequences, 0.15, seed=3)[1], validation)
    assert not np.array_equal(hold_back(sequences, 0.15, seed=4)[1], validation)
    assert (np.diff(validation) > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_hold_back_keeps_rows_whole(seed):
    source = np.repeat(np.arange(40), np.random.default_rng(seed).integers(1, 6, 40))
    train, validation = hold_back(make_sequences(source), 0.3, seed)
    assert not set(source[train]) & set(source[validation])
    assert 0.3 * len(source) - 6 < len(validation) <= 0.3 * len(source)


def test_hold_back_of_one_document():
    train, validation = hold_back(make_sequences([5] * 10), 0.3, seed=0)
    assert (len(train), len(validation)) == (7, 3)


def test_hold_back_of_two_rows_leaves_neither_empty():
    for fraction in (0.2, 0.9):
        train, validation = hold_back(make_sequences([0] * 5 + [1] * 5), fraction, seed=0)
        assert (len(train), len(validation)) == (5, 5)


def test_errors():
    sequences = make_sequences(range(5))
    for fraction in (0, 1, -0.1, 1.5):
        with pytest.raises(UserError, match="fit_fraction: expected a number between 0 and 1"):
            split_sequences(sequences, fraction)
    with pytest.raises(UserError, match=r"fit_fraction=0.1 of 5 sequences is none"):
        split_sequences(sequences, 0.1)
    with pytest.raises(UserError, match="of 1 sequence is none"):
        hold_back(make_sequences([0]), 0.9, 0)
    with pytest.raises(UserError, match="seed"):
        hold_back(sequences, 0.5, -1)
