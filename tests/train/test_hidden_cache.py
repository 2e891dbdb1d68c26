"""Hidden states kept in memory, on disk, or not at all: the same head, and files used again only where they fit."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import answered, make_lm, make_sequences, ragged, silent

from calibjax.commands.train_ats import fit_ats
from calibjax.runtime.errors import UserError
from calibjax.train import AtsOptions, hidden_cache
from calibjax.train.hidden_cache import sequence_arrays

LM = make_lm()
SEQUENCES = ragged(make_sequences(21))
SIZE = 21 * 10 * 16 * 4


def arrays(directory, mode, lm=LM, sequences=SEQUENCES):
    lines = []
    got, given = sequence_arrays(lm, sequences, mode=mode, batch_size=4, context=silent(directory, log=lines.append))
    return got, given, lines


@pytest.mark.parametrize(("mode", "dtype"), [("memory", jnp.float32), ("disk", jnp.bfloat16)])
def test_kept_are_the_hidden_states(tmp_path, mode, dtype):
    lm = make_lm(dtype=dtype)
    got, given, lines = arrays(tmp_path, mode, lm)
    expected = lm.hidden_states(SEQUENCES.tokens, segment_ids=SEQUENCES.segment_ids, positions=SEQUENCES.positions)
    assert given
    assert got["hidden"].dtype == expected.dtype
    error = np.abs(np.asarray(got["hidden"], np.float64) - np.asarray(expected, np.float64)).max()
    print(f"error {error:.1e}")
    assert error <= {"float32": 1e-5, "bfloat16": 0.1}[jnp.dtype(dtype).name]
    assert set(got) == {"hidden", "targets", "where", "segment_ids"}
    for name in ("targets", "where", "segment_ids"):
        np.testing.assert_array_equal(got[name], getattr(SEQUENCES, name))
    # 21 sequences of 10 tokens of 16 numbers.
    size = f"{SIZE * jnp.dtype(dtype).itemsize / 4 / 2**20:,.1f} MiB"
    assert lines == [f"caching hidden states: {size} ({mode}) for {SEQUENCES.where.sum()} tokens"]


def test_off(tmp_path):
    got, given, lines = arrays(tmp_path, "off")
    assert not given
    assert set(got) == {"tokens", "positions", "targets", "where", "segment_ids"}
    assert "recomputed in every step" in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_readable():
    assert hidden_cache._readable(3 * 2**19) == "1.5 MiB"
    assert hidden_cache._readable(5 * 2**30 // 2) == "2.5 GiB"


@pytest.mark.parametrize(("free", "kept"), [(4 * SIZE, True), (4 * SIZE - 4, False), (0, False)])
def test_auto_takes_a_quarter_of_the_free_memory(tmp_path, monkeypatch, free, kept):
    monkeypatch.setattr(hidden_cache, "host_memory_available", lambda: free)
    _, given, lines = arrays(tmp_path, "auto")
    assert given == kept
    assert ("(memory)" in lines[0]) == kept


def test_auto_decides_once(tmp_path, monkeypatch):
    """A killed run that is started again must not compute otherwise because other programs took the memory."""
    for free in (2**40, 0):
        monkeypatch.setattr(hidden_cache, "host_memory_available", lambda free=free: free)
        assert arrays(tmp_path / "first", "auto")[1]
    for free in (0, 2**40):
        monkeypatch.setattr(hidden_cache, "host_memory_available", lambda free=free: free)
        assert not arrays(tmp_path / "second", "auto")[1]


def test_free_memory_is_what_the_kernel_says():
    free = hidden_cache.host_memory_available()
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < free <= total


def test_file_is_used_again_only_where_it_fits(tmp_path):
    first, _, lines = arrays(tmp_path, "disk")
    assert "found" not in " ".join(lines)
    stamp = (tmp_path / "hidden.bin").stat().st_mtime_ns
    second, _, lines = arrays(tmp_path, "disk")
    assert lines[-1] == f"reusing the hidden states in {tmp_path / 'hidden.bin'}"
    assert (tmp_path / "hidden.bin").stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(first["hidden"], second["hidden"])
    before = np.array(first["hidden"])
    del first, second  # maps of the file that is written over now
    changes = (
        {"lm": make_lm(seed=4)},
        {"sequences": ragged(make_sequences(21, seed=1))},
        {"lm": make_lm(dtype="bfloat16")},
    )
    for change in changes:
        third, _, lines = arrays(tmp_path, "disk", **change)
        assert "found" not in " ".join(lines), change
        assert np.abs(np.asarray(third["hidden"], np.float64) - before).max() > 1e-4


@pytest.mark.parametrize("note", ["", "{", "[]"])
def test_note_that_a_kill_cut_short(tmp_path, note):
    first = np.array(arrays(tmp_path, "disk")[0]["hidden"])
    (tmp_path / "hidden.json").write_text(note)
    second, _, lines = arrays(tmp_path, "disk")
    assert len(lines) == 1
    np.testing.assert_array_equal(first, second["hidden"])
    assert json.loads((tmp_path / "hidden.json").read_text())["shape"] == [21, 10, 16]


def test_killed_while_it_was_written(tmp_path, monkeypatch):
    """The note is written last: without it the file counts for nothing."""

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hidden_cache, "_compute", die)
        with pytest.raises(KeyboardInterrupt):
            arrays(tmp_path, "disk")
    assert (tmp_path / "hidden.bin").stat().st_size == SIZE
    again, _, lines = arrays(tmp_path, "disk")
    assert len(lines) == 1
    np.testing.assert_array_equal(again["hidden"], arrays(tmp_path, "memory")[0]["hidden"])


def test_no_room_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot cache hidden states in .* Use --cache-hidden off or memory"):
        arrays(tmp_path / "file" / "directory", "disk")


def test_the_same_head_whichever(tmp_path):
    sequences, heads = answered(LM, ragged(make_sequences(64))), {}
    for mode in ("memory", "disk", "off"):
        options = AtsOptions(
            head="linear",
            loss="joint",
            epochs=3,
            refit_temperature=False,
            batch_size=8,
            learning_rate=1e-2,
            cache_hidden=mode,
        )
        heads[mode] = fit_ats(LM, sequences, options, silent(tmp_path / mode)).head
    chex.assert_trees_all_equal(heads["memory"].params, heads["disk"].params)
    assert heads["memory"].log_factor == heads["disk"].log_factor
    for one, other in zip(*(jax.tree.leaves(heads[mode].params) for mode in ("memory", "off")), strict=True):
        error = float(jnp.abs(one - other).max())
        print(f"recomputed: off by {error:.1e} of {float(jnp.abs(one).max()):.1e}")
        assert error < 1e-5
    assert abs(heads["memory"].log_factor - heads["off"].log_factor) < 1e-4
