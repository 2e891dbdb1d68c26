"""Splits: in order or at random, and no row on both sides."""

import numpy as np
import pytest

from calibjax.data import Sequences, concatenate, fold_indices, limit_tokens, split_sequences, validation_split
from calibjax.runtime.errors import UserError


def make_sequences(source):
    source = np.asarray(source, np.int32)
    tokens = np.arange(len(source), dtype=np.int32)[:, None]
    ones = np.ones_like(tokens)
    return Sequences(tokens, tokens + 1, ones > 0, ones, np.zeros_like(tokens), source)


@pytest.mark.parametrize(
    ("source", "fraction", "cut"),
    [
        ([0, 0, 0, 0, 1, 1], 0.5, 4),
        ([0, 0, 1, 1, 1, 3], 0.5, 2),
        ([0, 0, 0, 0, 0, 1], 0.2, 5),
        ([7, 7, 7, 7], 0.5, 2),
        (range(1600), 0.6, 960),
    ],
)
def test_cut_moves_to_the_end_of_a_row(source, fraction, cut):
    """In order; of a single row also where rows are drawn."""
    for order in ("sequential", "shuffled") if len(set(source)) == 1 else ("sequential",):
        fit, held_out = split_sequences(make_sequences(source), fraction, order=order)
        assert fit.tokens[:, 0].tolist() == list(range(cut))
        assert held_out.tokens[:, 0].tolist() == list(range(cut, len(source)))


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_rows_are_whole_and_in_order(seed):
    source = np.repeat(np.arange(60), np.random.default_rng(seed).integers(1, 6, 60))
    sequences = make_sequences(source)
    fit, held_out = split_sequences(sequences, 0.6, seed=seed)
    assert not set(fit.source) & set(held_out.source)
    np.testing.assert_array_equal(np.sort(np.concatenate([fit.tokens, held_out.tokens])[:, 0]), np.arange(len(source)))
    assert all((np.diff(part.tokens[:, 0]) > 0).all() for part in (fit, held_out))
    assert abs(len(fit.source) - 0.6 * len(source)) <= 3
    assert fit.source.max() > 40, "rows of the end too"
    again, other = (split_sequences(sequences, 0.6, seed=s)[0] for s in (seed, seed + 1))
    np.testing.assert_array_equal(again.source, fit.source)
    assert not np.array_equal(other.source, fit.source)


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        (range(8), [2, 2, 2, 2]),
        ([3] * 10, [3, 3, 2, 2]),  # one document: consecutive parts
        ([3, 3], [1, 1]),
        ([0] * 9 + [1], None),  # one row fills almost everything
        (np.repeat(np.arange(50), np.random.default_rng(0).integers(1, 9, 50)), None),
    ],
)
def test_folds(source, sizes):
    source = np.asarray(source)
    folds = fold_indices(make_sequences(source), 4, seed=1)
    np.testing.assert_array_equal(np.sort(np.concatenate(folds)), np.arange(len(source)))
    assert 2 <= len(folds) <= 4
    assert all(len(fold) and (np.diff(fold) > 0).all() for fold in folds)
    if len(np.unique(source)) > 1:
        assert sum(len(np.unique(source[fold])) for fold in folds) == len(np.unique(source)), "a row in two folds"
    if sizes is not None:
        assert [len(fold) for fold in folds] == sizes


def test_joined_sets_keep_their_rows_apart():
    joined = concatenate([make_sequences([0, 0, 2]), make_sequences([0, 1])])
    assert joined.source.tolist() == [0, 0, 2, 3, 4]
    assert joined.tokens[:, 0].tolist() == [0, 1, 2, 0, 1]
    longer = make_sequences([0])._replace(tokens=np.zeros((1, 2), np.int32))
    with pytest.raises(UserError, match=r"sequences of one length, got \[2, 3\]"):
        concatenate([make_sequences([0]), longer])
    with pytest.raises(UserError, match="sequences of one length"):
        concatenate([])


@pytest.mark.parametrize("seed", range(5))
def test_hold_back_keeps_rows_whole(seed):
    source = np.repeat(np.arange(40), np.random.default_rng(seed).integers(1, 6, 40))
    sequences = make_sequences(source)
    train, validation = validation_split(sequences, 0.3, seed=seed)
    assert not set(source[train]) & set(source[validation])
    assert 0.3 * len(source) - 6 < len(validation) <= 0.3 * len(source)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(len(source)))
    assert (np.diff(validation) > 0).all()
    np.testing.assert_array_equal(validation_split(sequences, 0.3, seed=seed)[1], validation)
    assert not np.array_equal(validation_split(sequences, 0.3, seed=seed + 5)[1], validation)


@pytest.mark.parametrize(
    ("source", "fraction", "held_back"),
    [
        (range(100), 0.15, 15),
        ([5] * 10, 0.3, 3),
        ([0] * 5 + [1] * 5, 0.2, 5),
        ([0] * 5 + [1] * 5, 0.9, 5),
        ([0, 1, 2, 3] + [4] * 30 + [5, 6, 7, 8, 9, 10], 0.05, 2),  # the long row is drawn first
    ],
)
def test_how_many_are_held_back(source, fraction, held_back):
    train, validation = validation_split(make_sequences(source), fraction, seed=0)
    assert (len(train), len(validation)) == (len(source) - held_back, held_back)


def test_errors():
    sequences = make_sequences(range(5))
    for fraction in (0, 1):
        with pytest.raises(UserError, match="fit_fraction: expected above 0 and below 1"):
            split_sequences(sequences, fraction)
    with pytest.raises(UserError, match=r"fit_fraction=0.1 of 5 sequence\(s\) is none"):
        split_sequences(sequences, 0.1)
    with pytest.raises(UserError, match=r"^validation_fraction=0.9 of 1 sequence\(s\) is none"):
        validation_split(make_sequences([0]), 0.9, seed=0)
    with pytest.raises(UserError, match="folds: expected at least 2 sequences to divide, got 1"):
        fold_indices(make_sequences([0]), 4, seed=0)
    with pytest.raises(UserError, match="seed"):
        validation_split(sequences, 0.5, seed=-1)


@pytest.mark.parametrize("most", [1, 7, 40, 99, 100, 1000])
def test_limit_takes_whole_sequences_in_their_order(most):
    """At most `most` tokens, as many sequences as fit in the order drawn, at least one; all of them as they are."""
    sequences = make_sequences(range(25))
    sequences = sequences._replace(where=np.arange(100).reshape(25, 4) >= 0)
    fewer = limit_tokens(sequences, most, seed=3)
    if most >= 100:
        assert fewer is sequences
    assert (np.diff(fewer.source) > 0).all()
    assert len(fewer.source) == max(min(most, 100) // 4, 1)
    np.testing.assert_array_equal(fewer.source, limit_tokens(sequences, most, seed=3).source)
