"""A model with its head: probabilities of any text, heads written to disk and read back, and StableHLO programs."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from tiny import VOCAB, dense_log_probs, make_lm, make_sequences, ragged, random_head

from calibjax import LanguageModel, UserError, calibrated_confidence, calibrated_log_probs, load_head, save_head
from calibjax.heads import FEATURES, FittedHead
from calibjax.models import calibrated

SEQUENCES = ragged(make_sequences(6))
NAMES = ("constant", "all features", "pooled", "transformer")
the_lm = functools.cache(make_lm)


@functools.cache
def the_heads():
    return {
        "constant": FittedHead.constant(the_lm(), np.log(0.3)),
        "all features": random_head(the_lm(), "linear", tuple(FEATURES), log_factor=0.4),
        "pooled": random_head(the_lm(), "mlp", pooling="sequence"),
        "transformer": random_head(the_lm(), "transformer"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_a_distribution_with_the_same_argmax(name):
    got = np.asarray(calibrated_log_probs(the_lm(), SEQUENCES.tokens, the_heads()[name]), np.float64)
    assert got.shape == (*SEQUENCES.tokens.shape, VOCAB)
    np.testing.assert_allclose(np.exp(got).sum(-1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(got.argmax(-1), np.asarray(the_lm().logits(SEQUENCES.tokens)).argmax(-1))
    confidence = calibrated_confidence(the_lm(), SEQUENCES.tokens, the_heads()[name])
    np.testing.assert_allclose(confidence.confidence, np.exp(got.max(-1)), rtol=1e-5)
    np.testing.assert_array_equal(confidence.argmax, got.argmax(-1))
    # The temperature that is returned, with the head's factor, is the one that was used.
    whole = make_sequences(6)._replace(tokens=SEQUENCES.tokens)
    log_scale = -np.log(np.asarray(confidence.temperature, np.float64))
    np.testing.assert_allclose(got, dense_log_probs(the_lm(), whole, log_scale), atol=2e-5)


@pytest.mark.parametrize("name", ["transformer", "pooled"])
def test_segments_do_not_see_each_other(name):
    head, segments = the_heads()[name], SEQUENCES.segment_ids
    packed = calibrated_confidence(the_lm(), SEQUENCES.tokens, head, segment_ids=segments)
    assert not np.asarray(packed.confidence)[segments == 0].any()
    assert (np.asarray(packed.argmax)[segments == 0] == -1).all()
    row = int(np.argmax((segments == 2).sum(axis=1) * (segments == 0).any(axis=1)))
    inside = segments[row] == 2
    alone, own = np.zeros((2, *segments.shape), np.int32)  # of the same shape: no other program
    length = inside.sum()
    alone[0, :length], own[0, :length] = SEQUENCES.tokens[row][inside], 1
    apart = calibrated_confidence(the_lm(), alone, head, segment_ids=own)
    for field in ("argmax", "confidence", "temperature"):
        got, expected = np.asarray(getattr(packed, field))[row][inside], np.asarray(getattr(apart, field))[0, :length]
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=field)
    if name == "transformer":
        logprobs = np.asarray(calibrated_log_probs(the_lm(), SEQUENCES.tokens, head, segment_ids=segments))
        expected = np.asarray(calibrated_log_probs(the_lm(), alone, head, segment_ids=own))[0, :length]
        np.testing.assert_allclose(logprobs[row][inside], expected, atol=2e-5)


def test_ties_stay_with_the_base_model():
    """Rows of the unembedding that are equal, or a rounding apart, under the flattest and the sharpest scale."""
    rng = np.random.default_rng(0)
    base = make_lm(tie_embeddings=False)
    rows = np.repeat(np.asarray(base.params["unembedding"])[:4], 6, axis=0)
    rows *= 1 + rng.integers(-1, 2, rows.shape[:1])[:, None].astype(np.float32) * np.finfo(np.float32).eps
    lm = dataclasses.replace(base, params={**base.params, "unembedding": jnp.asarray(rows)})
    expected = np.asarray(lm.logits(SEQUENCES.tokens)).argmax(-1)
    for scale in (0.05, 0.4, 10.0):
        got = np.asarray(calibrated_log_probs(lm, SEQUENCES.tokens, FittedHead.constant(lm, np.log(scale)))).argmax(-1)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**33])
@pytest.mark.parametrize("call", [calibrated_log_probs, calibrated_confidence])
def test_ids_outside_the_vocabulary(call, bad):
    """Also in padding, from which NaN would reach the other tokens."""
    tokens = SEQUENCES.tokens.astype(np.int64)
    tokens[SEQUENCES.segment_ids == 0] = bad
    for given in (tokens, SEQUENCES._replace(tokens=tokens)):
        with pytest.raises(UserError, match=f"tokens.*: expected ids from 0 to {VOCAB - 1}, got "):
            call(the_lm(), given, the_heads()["constant"])


def test_head_of_another_model():
    """Such as of the same model before it was fine-tuned."""
    tuned = jax.tree.map(lambda x: 1.5 * x, the_lm().params)
    other = the_lm().with_params(tuned)
    fresh = LanguageModel.from_params(the_lm().config, tuned, dtype=the_lm().dtype)
    np.testing.assert_array_equal(other.logits(SEQUENCES.tokens), fresh.logits(SEQUENCES.tokens))
    assert other.fingerprint == fresh.fingerprint
    for call in (calibrated_log_probs, calibrated_confidence):
        with pytest.raises(UserError, match=f"{the_lm().fingerprint[:12]}.*{other.fingerprint[:12]}"):
            call(other, SEQUENCES.tokens, the_heads()["pooled"])


@pytest.mark.parametrize("name", NAMES)
def test_written_and_read_back(tmp_path, name):
    head = dataclasses.replace(the_heads()[name], log_factor=1 / 3)
    save_head(tmp_path / "run" / "head", the_heads()["constant"])  # is replaced as a whole
    save_head(tmp_path / "run" / "head", head, notes={"loss": "joint"})
    for path in (tmp_path / "run", tmp_path / "run" / "head", str(tmp_path / "run")):
        got = load_head(path, the_lm())
        assert (got.config, got.log_factor, got.fingerprint) == (head.config, head.log_factor, head.fingerprint)
        assert jax.tree.structure(got.params) == jax.tree.structure(head.params)
        chex.assert_trees_all_equal(got.params, head.params, strict=True)
    assert json.loads((tmp_path / "run" / "head" / "head.json").read_text())["notes"] == {"loss": "joint"}
    one, other = (calibrated_confidence(the_lm(), SEQUENCES.tokens, h).confidence for h in (got, head))
    np.testing.assert_array_equal(one, other)


MASK = np.arange(7) >= np.array([[4], [0], [2]])


@pytest.mark.parametrize("kind", ["constant", "linear", "mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_program_of_a_head(kind):
    head = random_head(the_lm(), kind, tuple(FEATURES), log_factor=0.1)
    features = np.random.default_rng(0).normal(0, 2, (3, 7, head.config.width)).astype(np.float32)
    got = export.deserialize(bytearray(calibrated.head_program(head))).call(features, MASK)
    segments = MASK.astype(np.int32)
    expected = head.config.build().apply({"params": head.params}, features, where=MASK, segment_ids=segments) + 0.1
    np.testing.assert_allclose(got[MASK], expected[MASK], atol=1e-6)
