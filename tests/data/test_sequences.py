"""Sequences: every token is predicted once, inside its own example, and nothing else is."""

import numpy as np
import pytest

from calibjax.data import Sequences, check_context, make_sequences
from calibjax.data.examples import Example
from calibjax.runtime.errors import UserError


def make_examples(lengths, *, document=False, predicted=0.7):
    """Examples whose tokens name their place: token = 1000 * (row + 1) + position."""
    rng = np.random.default_rng(0)
    for row, n in enumerate(lengths):
        mask = rng.random(n) < predicted
        mask[:1] = False
        yield Example(np.arange(n, dtype=np.int32) + 1000 * (row + 1), mask, row, document)


def check_shapes(sequences: Sequences, seq_len: int):
    shape = sequences.tokens.shape
    assert shape[1] == seq_len - 1
    fields = sequences._asdict()
    assert {name: field.shape for name, field in fields.items()} == dict.fromkeys(fields, shape) | {"source": shape[:1]}
    assert {name: field.dtype for name, field in fields.items()} == dict.fromkeys(fields, np.int32) | {"where": bool}
    assert (np.diff(sequences.source) >= 0).all()
    assert sequences.where.any(axis=1).all()


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_every_token_once_and_within_its_example(layout):
    lengths = np.random.default_rng(1).integers(0, 40, 700)
    examples = list(make_examples(lengths))
    sequences = make_sequences(examples, 17, layout=layout)
    # Of an example with a prompt, only the first sequence is read.
    examples = [Example(e.tokens[:17], e.loss_mask[:17], e.row) if not e.loss_mask[1:].all() else e for e in examples]
    check_shapes(sequences, 17)
    real = sequences.segment_ids > 0
    # Within an example, the target is the next token; never one of another example.
    np.testing.assert_array_equal(sequences.targets[real], sequences.tokens[real] + 1)
    assert (sequences.targets[real] // 1000 == sequences.tokens[real] // 1000).all()
    predicted = sequences.targets[sequences.where]
    expected = np.concatenate([example.tokens[example.loss_mask] for example in examples])
    np.testing.assert_array_equal(np.sort(predicted), np.sort(expected))
    for field in (sequences.tokens, sequences.targets, sequences.where, sequences.positions):
        assert not field[~real].any()
    # A sequence is one run of segments 1, 2, ..., then padding; positions count from 0 in each.
    for tokens, segments, positions in zip(sequences.tokens, sequences.segment_ids, sequences.positions, strict=True):
        number = segments.max()
        np.testing.assert_array_equal(segments[segments > 0], np.sort(segments[segments > 0]))
        assert set(segments[segments > 0]) == set(range(1, number + 1))
        assert not segments[np.argmin(segments > 0) :].any() or (segments > 0).all()
        for segment in range(1, number + 1):
            inside = segments == segment
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            np.testing.assert_array_equal(tokens[inside], tokens[inside][0] + np.arange(inside.sum()))
    if layout == "pad":
        assert sequences.segment_ids.max() == 1
    else:
        assert real.mean() > 0.95


def test_sequences_of_one_row_share_a_source():
    sequences = make_sequences(make_examples([50, 3, 3, 41, 60, 16, 5], predicted=1.0), 17, layout="pack")
    for row in range(7):
        holds = ((sequences.tokens // 1000 == row + 1) & (sequences.segment_ids > 0)).any(axis=1)
        assert len(set(sequences.source[holds])) == 1
    assert len(set(sequences.source)) > 1


def test_full_cuts_and_drops_rows_and_reads_on_in_documents():
    sequences = make_sequences(make_examples([5, 4, 20, 3], predicted=1.0), 5, layout="full")
    check_shapes(sequences, 5)
    np.testing.assert_array_equal(sequences.tokens, [[1000, 1001, 1002, 1003], [3000, 3001, 3002, 3003]])
    np.testing.assert_array_equal(sequences.targets, sequences.tokens + 1)
    np.testing.assert_array_equal(sequences.source, [0, 2])
    sequences = make_sequences(make_examples([10, 4, 14], document=True, predicted=1.0), 5, layout="full")
    np.testing.assert_array_equal(sequences.tokens[:, 0], [1000, 1004, 3000, 3004, 3008])
    np.testing.assert_array_equal(sequences.source, [0, 0, 2, 2, 2])


@pytest.mark.parametrize("layout", ["full", "pad", "pack"])
def test_sequences_without_a_prediction_are_dropped(layout):
    prompt_only = Example(np.arange(12, dtype=np.int32), np.arange(12) >= 9, 0)
    other = Example(np.arange(12, dtype=np.int32), np.arange(12) >= 2, 1)
    sequences = make_sequences([prompt_only, other], 5, layout=layout)
    check_shapes(sequences, 5)
    assert int(sequences.where.sum()) == 3


def test_max_sequences_reads_no_further():
    def endless():
        while True:
            yield from make_examples([20])

    assert len(make_sequences(endless(), 5, layout="full", max_sequences=3).tokens) == 3
    assert len(make_sequences(endless(), 5, layout="pad", max_sequences=7).tokens) == 7
    assert len(make_sequences(make_examples([20] * 9), 5, layout="pack", max_sequences=7).tokens) == 7


def test_errors():
    for lengths, seq_len, options, message in (
        ([5], 1, {}, "seq_len: expected at least 2"),
        ([5], 4, {"layout": "packed"}, "layout: expected one of pack, pad, full; got 'packed'"),
        ([5], 4, {"max_sequences": 0}, "max_sequences: expected at least 1"),
        ([5, 8], 9, {"layout": "full"}, "no sequence of 9 tokens .*smaller seq_len"),
        ([0, 1], 9, {"layout": "pad"}, "no sequence of 9 tokens .*empty"),
    ):
        with pytest.raises(UserError, match=message):
            make_sequences(make_examples(lengths), seq_len, **options)
    check_context(512, 512)
    with pytest.raises(UserError, match=r"seq_len=513 is longer than the model's context of 512 tokens"):
        check_context(513, 512)
