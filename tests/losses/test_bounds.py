"""The bounds of the label-smoothing paper: equality cases, and what no input violates."""

import math

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy
from tiny import make_lm

from calibjax.eval.layers.bounds import model_bound
from calibjax.eval.report.tables import scientific
from calibjax.losses import bounds


@pytest.mark.parametrize(("size", "norm"), [(10, 2.0), (1000, 5.0)])
def test_equality_case(size, norm):
    z = np.full(size, -norm / math.sqrt(size * (size - 1)))
    z[0] = norm * math.sqrt((size - 1) / size)
    p = softmax(z)
    bound = bounds.entropy_lower_bound(norm, size)
    np.testing.assert_allclose(bound.entropy, entropy(p), rtol=1e-12)
    np.testing.assert_allclose(bound.one_minus_confidence, 1 - p[0], rtol=1e-12)
    np.testing.assert_allclose(math.exp(bound.log_entropy), bound.entropy, rtol=1e-12)


def test_no_logits_have_less_entropy():
    rng = np.random.default_rng(0)
    for size, norm in ((2, 3.0), (50, 20.0)):
        z = rng.normal(size=(20_000, size)) * rng.choice([0.1, 1, 10], (20_000, 1))
        z -= z.mean(axis=1, keepdims=True)
        z *= norm / np.linalg.norm(z, axis=1, keepdims=True)
        for bound, logits in (
            (bounds.entropy_lower_bound(norm, size), z),
            (bounds.capped_entropy_lower_bound(2.0, size), 2 * np.tanh(z)),
        ):
            assert bound.entropy <= entropy(softmax(logits, axis=1), axis=1).min() + 1e-12


def test_extremes():
    np.testing.assert_allclose(bounds.entropy_lower_bound(0.0, 7).entropy, math.log(7))
    far = bounds.entropy_lower_bound(5000.0, 100_000)
    assert far.entropy == 0.0
    np.testing.assert_allclose(far.log_entropy, math.log(99_999) - 5000.025 + math.log(5001.025), rtol=1e-6)
    for value in (3.0755e-199, 1.999e-4, 0.01239, 6.2379):  # printed, they are bounds still
        assert 0.99 * value < float(scientific(math.log(value))) <= value
    for arguments in ((1.0, 1), (-1.0, 3), (math.nan, 3)):
        with pytest.raises(ValueError, match="expected"):
            bounds.entropy_lower_bound(*arguments)


@pytest.mark.parametrize("changes", [{}, {"norm": "layer"}, {"logit_softcap": 2.0}], ids=["rms", "layer", "softcap"])
def test_no_input_is_surer_than_a_model_can_be(changes):
    lm = make_lm(**changes)
    rng = np.random.default_rng(2)
    norm = {name: rng.normal(1, 0.3, 16).astype(np.float32) for name in lm.params["final_norm"]}
    lm = lm.from_params(lm.config, {**lm.params, "final_norm": norm})
    bound = model_bound(lm, "tiny")
    # Directions that point at single tokens come closest.
    x = np.concatenate([rng.normal(size=(2000, 16)), np.asarray(lm.unembedding) * norm["scale"]])
    if lm.config.norm == "layer":
        x -= x.mean(axis=1, keepdims=True)
    x *= 4 / np.linalg.norm(x, axis=1, keepdims=True)
    z = (x * norm["scale"] + norm.get("bias", 0)) @ np.asarray(lm.unembedding, np.float64).T
    z = z if lm.config.logit_softcap is None else 2 * np.tanh(z / 2)
    assert entropy(softmax(z, axis=1), axis=1).min() >= bound.bound.entropy
    by_longest_row, by_norm = bound.log_one_minus_confidence, math.log(bound.bound.one_minus_confidence)
    assert math.exp(by_longest_row) <= -np.expm1(log_softmax(z, axis=1).max()) * (1 + 1e-9)
    assert by_longest_row >= by_norm - 1e-6, "the longest row says no less than the spectral norm"
    spread = np.linalg.norm(z - z.mean(1, keepdims=True), axis=1).max()
    assert 0.3 * bound.logit_norm < spread <= bound.logit_norm * (1 + 1e-6) or lm.config.logit_softcap is not None
