"""Windows: every token is predicted once, inside its own example, and nothing else is."""

import numpy as np
import pytest

from calibjax.data import Windows, check_context, make_windows
from calibjax.data.examples import Example
from calibjax.runtime.errors import UserError


def make_examples(lengths, *, document=False, predicted=0.7, seed=0):
    """Examples whose tokens name their place: token = 1000 * (row + 1) + position."""
    rng = np.random.default_rng(seed)
    for row, n in enumerate(lengths):
        mask = rng.random(n) < predicted
        mask[:1] = False
        yield Example(np.arange(n, dtype=np.int32) + 1000 * (row + 1), mask, row, document)


def check_shapes(windows: Windows, seq_len: int):
    shape = windows.tokens.shape
    assert shape[1] == seq_len - 1
    for field in (windows.tokens, windows.targets, windows.segment_ids, windows.positions):
        assert field.shape == shape
        assert field.dtype == np.int32
    assert windows.where.shape == shape
    assert windows.where.dtype == bool
    assert windows.source.shape == shape[:1]
    assert windows.source.dtype == np.int32
    assert (np.diff(windows.source) >= 0).all()
    assert windows.where.any(axis=1).all()


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_every_token_once_and_within_its_example(layout):
    lengths = np.random.default_rng(1).integers(0, 40, 700)
    examples = list(make_examples(lengths))
    windows = make_windows(examples, 17, layout=layout)
    check_shapes(windows, 17)
    real = windows.segment_ids > 0
    # Within an example, the target is the next token; never one of another example.
    np.testing.assert_array_equal(windows.targets[real], windows.tokens[real] + 1)
    assert (windows.targets[real] // 1000 == windows.tokens[real] // 1000).all()
    predicted = windows.targets[windows.where]
    expected = np.concatenate([example.tokens[example.loss_mask] for example in examples])
    np.testing.assert_array_equal(np.sort(predicted), np.sort(expected))
    for field in (windows.tokens, windows.targets, windows.where, windows.positions):
        assert not field[~real].any()
    # A window is one run of segments 1, 2, ..., then padding; positions count from 0 in each.
    for tokens, segments, positions in zip(windows.tokens, windows.segment_ids, windows.positions, strict=True):
        number = segments.max()
        np.testing.assert_array_equal(segments[segments > 0], np.sort(segments[segments > 0]))
        assert set(segments[segments > 0]) == set(range(1, number + 1))
        assert not segments[np.argmin(segments > 0) :].any() or (segments > 0).all()
        for segment in range(1, number + 1):
            inside = segments == segment
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            np.testing.assert_array_equal(tokens[inside], tokens[inside][0] + np.arange(inside.sum()))
    if layout == "pad":
        assert windows.segment_ids.max() == 1
    else:
        assert real.mean() > 0.95


def test_windows_of_one_row_share_a_source():
    windows = make_windows(make_examples([50, 3, 3, 41, 60, 16, 5], predicted=1.0), 17, layout="pack")
    for row in range(7):
        holds = ((windows.tokens // 1000 == row + 1) & (windows.segment_ids > 0)).any(axis=1)
        assert len(set(windows.source[holds])) == 1
    assert len(set(windows.source)) > 1


def test_pack_is_deterministic():
    first, second = (make_windows(make_examples(range(2, 60)), 33, layout="pack") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pack_keeps_the_order_of_a_document():
    windows = make_windows(make_examples([500], document=True, predicted=1.0), 9, layout="pack")
    assert (np.diff(windows.tokens[:, 0]) == 8).all()


def test_pad_overlaps_by_one_token():
    windows = make_windows(make_examples([8], predicted=1.0), 5, layout="pad")
    np.testing.assert_array_equal(windows.tokens, [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 0]])
    np.testing.assert_array_equal(windows.targets, [[1001, 1002, 1003, 1004], [1005, 1006, 1007, 0]])
    np.testing.assert_array_equal(windows.where, [[1, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(windows.segment_ids, [[1, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(windows.positions, [[0, 1, 2, 3], [0, 1, 2, 0]])
    np.testing.assert_array_equal(windows.source, [0, 0])


def test_full_cuts_and_drops():
    windows = make_windows(make_examples([5, 4, 20, 3], predicted=1.0), 5, layout="full")
    check_shapes(windows, 5)
    np.testing.assert_array_equal(windows.tokens, [[1000, 1001, 1002, 1003], [3000, 3001, 3002, 3003]])
    np.testing.assert_array_equal(windows.targets, windows.tokens + 1)
    np.testing.assert_array_equal(windows.source, [0, 2])


def test_full_documents_read_on():
    windows = make_windows(make_examples([10, 4, 14], document=True, predicted=1.0), 5, layout="full")
    np.testing.assert_array_equal(windows.tokens[:, 0], [1000, 1004, 3000, 3004, 3008])
    np.testing.assert_array_equal(windows.source, [0, 0, 2, 2, 2])


@pytest.mark.parametrize("layout", ["full", "pad", "pack"])
def test_windows_without_a_prediction_are_dropped(layout):
    prompt_only = Example(np.arange(12, dtype=np.int32), np.arange(12) >= 9, 0)
    other = Example(np.arange(12, dtype=np.int32), np.arange(12) >= 2, 1)
    windows = make_windows([prompt_only, other], 5, layout=layout)
    check_shapes(windows, 5)
    assert int(windows.where.sum()) == (3 if layout == "full" else 3 + 10)


def test_max_windows_reads_no_further():
    def endless():
        while True:
            yield from make_examples([20])

    assert len(make_windows(endless(), 5, layout="full", max_windows=3).tokens) == 3
    assert len(make_windows(endless(), 5, layout="pad", max_windows=7).tokens) == 7
    assert len(make_windows(make_examples([20] * 9), 5, layout="pack", max_windows=7).tokens) == 7


def test_errors():
    with pytest.raises(UserError, match="seq_len: expected at least 2"):
        make_windows(make_examples([5]), 1)
    with pytest.raises(UserError, match="layout: expected one of pack, pad, full, got 'packed'"):
        make_windows(make_examples([5]), 4, layout="packed")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max_windows: expected at least 1"):
        make_windows(make_examples([5]), 4, max_windows=0)
    with pytest.raises(UserError, match=r"no window of 9 tokens .*smaller seq_len"):
        make_windows(make_examples([5, 8]), 9, layout="full")
    for layout in ("pad", "pack"):
        with pytest.raises(UserError, match=r"no window of 9 tokens .*empty"):
            make_windows(make_examples([0, 1]), 9, layout=layout)


def test_check_context():
    check_context(512, 512)
    check_context(10**6, None)
    with pytest.raises(
        UserError, match=r"seq_len=513 is longer than the model's context of 512 tokens. Give seq_len=512"
    ):
        check_context(513, 512)
