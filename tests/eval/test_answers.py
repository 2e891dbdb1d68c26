"""The confidence of an answer against float64 loops, scipy's entropy among them."""

import math
from collections import Counter

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

from calibjax.eval.answers.confidence import WORDS, answer_confidence

RNG = np.random.default_rng(0)
LOG_PROBS = RNG.uniform(-9, -0.1, (50, 6)).astype(np.float32)
LOG_PROBS[RNG.random(LOG_PROBS.shape) < 0.3] = -np.inf  # nothing there
LOG_PROBS[0] = -np.inf
SAMPLES = RNG.integers(0, 4, LOG_PROBS.shape)
SAMPLES[1] = 3


def one(how, values):
    """Of one answer, in float64, from what is there."""
    if not len(values):
        return 0.0
    if how in ("agreement", "entropy", "first_second"):
        shares = np.array([n for _, n in Counter(values.tolist()).most_common()]) / len(values)
        return {
            "agreement": shares[0],
            "first_second": shares[0] - (shares[1] if len(shares) > 1 else 0),
            "entropy": 1 - scipy.stats.entropy(shares) / math.log(len(shares)) if len(shares) > 1 else 1.0,
        }[how]
    p, q = np.exp(values.astype(np.float64)), scipy.special.softmax(values.astype(np.float64))
    return {
        "options": q.max,
        "options_per_token": q.max,
        "margin": lambda: -np.diff(np.sort(np.append(q, 0))[::-1])[0],
        "negentropy": lambda: 1 - scipy.stats.entropy(q, base=len(q)) if len(q) > 1 else 1.0,
        "full_vocabulary": p.max,
        "arithmetic_mean": p.mean,
        "product": p.prod,
        "minimum": p.min,
        "length_normalised": lambda: scipy.stats.gmean(p),
    }[how]()


@pytest.mark.parametrize("how", WORDS)
def test_confidences(how):
    values = SAMPLES if how in ("agreement", "entropy", "first_second") else LOG_PROBS
    got = np.asarray(jax.jit(answer_confidence, static_argnums=0)(how, values))
    want = [one(how, row[row > -np.inf]) for row in values]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected one of options, options_per_token"):
        answer_confidence("mean", LOG_PROBS)  # pyright: ignore[reportArgumentType]
