"""Public functions take NumPy arrays as they take JAX's, also as constants of a function under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax import kernels, losses, metrics
from calibjax.eval.answers.registry import CONFIDENCES, Evidence

RNG = np.random.default_rng(0)
HIDDEN, W, BIAS = (RNG.normal(size=shape) for shape in ((2, 5, 8), (33, 8), (33,)))
TARGETS, WHERE = RNG.integers(0, 33, (2, 5)), RNG.random((2, 5)) < 0.7
CONFIDENCE, GROUPS, FEATURES = RNG.random(50), RNG.integers(0, 3, 50), RNG.normal(size=(50, 4))
CORRECT, SUCCESSES = RNG.random(50) < CONFIDENCE, RNG.integers(0, 5, 50)
PROBABILITIES = RNG.dirichlet(np.ones(3), 50)


def divergences(hidden, w, normalizer):
    return kernels.kl_divergences(
        hidden, hidden[None], w, log_normalizer=normalizer, other_log_normalizers=normalizer[None]
    )


def loss(hidden, w, bias, targets, where):
    stats = kernels.vocab_stats(hidden, w, targets, bias=bias)
    return losses.label_smoothing(stats, 0.1), losses.selective_smoothing(stats, where=where)


def consistency(clusters, answer):
    return CONFIDENCES["consistency"](Evidence(clusters=clusters, answer=answer))


CALLS = {
    "cross-entropy": (
        lambda h, w, b, t, m: kernels.linear_cross_entropy(h, w, t, bias=b, where=m),
        (HIDDEN, W, BIAS, TARGETS, WHERE),
    ),
    "losses of statistics": (loss, (HIDDEN, W, BIAS, TARGETS, WHERE)),
    "top logits": (lambda h, w, b, m: kernels.top_logits(h, w, k=3, bias=b, where=m), (HIDDEN, W, BIAS, WHERE)),
    "divergences": (divergences, (HIDDEN, W, RNG.normal(size=(2, 5)))),
    "bins": (lambda x: metrics.bin_index(x, 10, "none"), (CONFIDENCE,)),
    "bins of equal mass": (
        lambda x, w: metrics.equal_mass_index(x, w, 5),
        (CONFIDENCE.astype(np.float32), np.ones(50, np.float32)),
    ),
    "sums": (lambda x, y: metrics.calibration_sums(x, y, bins=5), (CONFIDENCE, CORRECT)),
    "ECE": (metrics.expected_calibration_error, (CONFIDENCE, CORRECT)),
    "classwise": (metrics.classwise_calibration_error, (PROBABILITIES, GROUPS)),
    "local": (metrics.local_calibration_error, (CONFIDENCE, CORRECT, FEATURES)),
    "grouping": (metrics.grouping_loss, (CONFIDENCE, CORRECT, FEATURES)),
    "capability": (lambda x, c: metrics.capability_error(x, c, np.full(50, 5)), (CONFIDENCE, SUCCESSES)),
    "consistency of samples": (consistency, (RNG.integers(0, 3, (7, 5)), RNG.integers(0, 3, 7))),
}


@pytest.mark.parametrize("name", CALLS)
def test_numpy_arrays_give_what_jax_arrays_give(name):
    function, arrays = CALLS[name]
    want = function(*map(jnp.asarray, arrays))
    for got in (function(*arrays), jax.jit(lambda: function(*arrays))()):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6, strict=True), got, want)
