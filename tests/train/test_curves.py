"""The frozen pass: what it stores, on disk as in memory, after a kill as without one."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import dense_log_probs, make_lm, make_sequences, ragged, silent

from calibjax.heads import FEATURES, HeadConfig, head_features
from calibjax.runtime.errors import UserError
from calibjax.train import curves
from calibjax.train.curves import curves_of, features_of, token_curves

LM = make_lm()
SEQUENCES = ragged(make_sequences(21))
HEAD = HeadConfig(kind="linear", hidden_size=16, features=tuple(FEATURES))
compiled_features = jax.jit(features_of, static_argnums=(0, 2))
compiled_head_features = jax.jit(head_features, static_argnums=0)


def run(directory, keep="disk", lm=LM, sequences=SEQUENCES, **options):
    lines = []
    context = silent(directory, log=lines.append)
    with jax.set_mesh(context.mesh):
        options = {"batch_size": 4, "losses": ("top-k-smoothing",), **options}
        return token_curves(lm, sequences, [HEAD], keep=keep, context=context, **options), lines


@pytest.mark.parametrize(("keep", "dtype"), [("memory", jnp.float32), ("disk", jnp.bfloat16)])
def test_stored_are_features_and_curves_of_the_tokens_that_count(tmp_path, keep, dtype):
    """Against the dense logits in float64, at a scale that is no node; and zeros elsewhere."""
    lm = make_lm(dtype=dtype)
    tokens, lines = run(tmp_path, keep, lm)
    where = SEQUENCES.where
    np.testing.assert_array_equal(tokens.counted, where)
    assert tokens.hash.startswith(f"{lm.fingerprint}-{jnp.dtype(dtype).name}-")
    stats = jax.jit(lambda arrays: curves_of(arrays, tokens.scales).at(0.7))({**tokens.arrays})
    expected = np.take_along_axis(dense_log_probs(lm, SEQUENCES, np.log(0.7)), SEQUENCES.targets[..., None], -1)[..., 0]
    tolerance = {"float32": 2e-5, "bfloat16": 0.2}[jnp.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(stats.log_prob())[where], expected[where], atol=tolerance)
    np.testing.assert_array_equal(np.asarray(stats.log_prob())[~where], 0.0)
    hidden = lm.hidden_states(SEQUENCES.tokens, segment_ids=SEQUENCES.segment_ids, positions=SEQUENCES.positions)
    assert tokens.arrays["hidden_states"].dtype == hidden.dtype
    assert tokens.arrays["top_logits"].shape == (*where.shape, 5)
    features = compiled_features(HEAD, tokens.flat([*tokens.arrays]), tokens.scales)
    whole = compiled_head_features(HEAD.features, hidden, lm.unembedding.astype(dtype))
    np.testing.assert_allclose(features, np.asarray(whole)[where], rtol=tolerance, atol=tolerance)
    assert lines[0].startswith(f"frozen pass: {where.sum()} tokens of 21 sequences; stored ")
    assert ("in memory" in lines[0]) == (keep == "memory")


def test_a_head_that_attends_reads_tokens_that_do_not_count(tmp_path):
    head = HeadConfig(kind="transformer", hidden_size=16, num_heads=2, features=("logit_statistics", "max_logit"))
    tokens = token_curves(LM, SEQUENCES, [head], batch_size=4, context=silent(tmp_path))
    hidden = LM.hidden_states(SEQUENCES.tokens, segment_ids=SEQUENCES.segment_ids, positions=SEQUENCES.positions)
    whole = compiled_head_features(head.features, hidden, LM.unembedding)
    real = SEQUENCES.segment_ids > 0
    assert (real & ~SEQUENCES.where).any()
    got = compiled_features(head, {**tokens.arrays}, tokens.scales)
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(whole)[real], rtol=2e-5, atol=2e-5)


def test_files_are_read_again_only_where_they_are_of_the_same_pass(tmp_path, monkeypatch):
    first = {name: np.array(x) for name, x in run(tmp_path)[0].arrays.items()}
    with monkeypatch.context() as patch:
        patch.setattr(curves._Store, "write", _die)
        chex.assert_trees_all_equal(first, dict(run(tmp_path)[0].arrays))
    changes = (
        {"lm": make_lm(seed=4)},
        {"lm": make_lm(dtype=jnp.bfloat16)},  # its fingerprint is the same
        {"sequences": ragged(make_sequences(21, seed=1))},
        {"batch_size": 2},
        {"losses": ("brier",)},
    )
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(curves._Store, "write", _die)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, **change)


def _die(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("note", ["{", '{"identity": {}, "done": 21}'])
def test_note_that_is_damaged_or_of_another_pass(tmp_path, note):
    first = {name: np.array(x) for name, x in run(tmp_path)[0].arrays.items()}
    (tmp_path / "frozen/note.json").write_text(note)
    chex.assert_trees_all_equal(first, dict(run(tmp_path)[0].arrays))
    assert json.loads((tmp_path / "frozen/note.json").read_text())["done"] == 21


def test_a_killed_pass_resumes_after_the_last_note(tmp_path, monkeypatch):
    """With a note after every batch, a pass that is killed in the fourth computes the first three only once."""
    monkeypatch.setattr(curves, "_SAVE_EVERY", 0.0)
    whole = dict(run(tmp_path / "whole", keep="memory")[0].arrays)
    forward, calls = curves._forward, []

    def count(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # the first call only asks for shapes
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(curves, "_forward", count)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert json.loads((tmp_path / "frozen/note.json").read_text())["done"] == 9
    calls[:] = [None] * 10
    resumed = dict(run(tmp_path)[0].arrays)
    assert len(calls) == 10 + 1 + 4, "batches 4 to 7, of three sequences each"
    chex.assert_trees_all_equal(whole, resumed)


def test_no_room_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^keep: cannot write to .*keep it in memory"):
        run(tmp_path / "file" / "directory")
