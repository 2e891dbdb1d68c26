"""The calibration errors against a plain loop over bins, and against scikit-learn where conventions agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import EPS, assert_within

from calibjax import metrics

ERRORS = {
    "ece": metrics.expected_calibration_error,
    "mce": metrics.maximum_calibration_error,
    "rmsce": metrics.root_mean_square_calibration_error,
}


sums_of = jax.jit(metrics.calibration_sums, static_argnames=("bins", "closed"))
brier_score = jax.jit(metrics.brier_score)


def loop(confidence, correct, bins, closed):
    """ECE, MCE, RMSCE and the counts: one bin after the other, edges the float32 numbers k/bins, sums in float64."""
    c = np.asarray(confidence, np.float32)
    edges = np.array([np.float32(k) / np.float32(bins) for k in range(bins + 1)], np.float32)
    ece = mce = square = 0.0
    counts = []
    for b in range(bins):
        if closed == "right":
            inside = (c <= edges[b + 1]) & ((c > edges[b]) | (b == 0))
        else:
            inside = (c >= edges[b]) & ((c < edges[b + 1]) | (b == bins - 1))
        counts.append(int(inside.sum()))
        if inside.any():
            gap = abs(c[inside].astype(np.float64).mean() - np.asarray(correct, np.float64)[inside].mean())
            ece, mce, square = ece + gap * inside.mean(), max(mce, gap), square + gap**2 * inside.mean()
    return {"ece": ece, "mce": mce, "rmsce": square**0.5}, counts


def tokens(n=400, bins=15, seed=0):
    """Confidences of which a third lie exactly on edges, 0 and 1 among them; overconfident correctness."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(size=n).astype(np.float32)
    k = rng.integers(0, bins + 1, n // 3)
    confidence[: n // 3] = k.astype(np.float32) / np.float32(bins)
    confidence[:2] = [0.0, 1.0]
    return confidence, (rng.uniform(size=n) < confidence**1.5).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("bins", "closed"))
def errors(confidence, correct, bins, closed, where=None):
    return {name: f(confidence, correct, bins=bins, closed=closed, where=where) for name, f in ERRORS.items()}


@pytest.mark.parametrize(("bins", "closed"), [(1, "right"), (10, "left"), (15, "right")])
def test_against_the_loop(bins, closed):
    confidence, correct = tokens(bins=bins)
    want, counts = loop(confidence, correct, bins, closed)
    sums = sums_of(confidence, correct, bins=bins, closed=closed)
    np.testing.assert_array_equal(sums.count, counts)
    for got in (errors(confidence, correct, bins, closed), metrics.summarise(sums)):
        for name, value in want.items():
            # Sums of some 400 numbers below 1; the root of a small sum of squares loses no more than that here.
            assert_within(got[name], value, 20 * EPS, name)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_edges_are_the_float32_numbers(jitted):
    """Each edge and its float32 neighbours: the compiler must not round edges anew."""
    for bins in (6, 10, 15, 100) if jitted else (10,):
        edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)
        below, above = np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1))
        for closed, on_edge in (("right", 0), ("left", 1)):
            run = functools.partial(metrics.bin_index, bins=bins, closed=closed)
            got = (jax.jit(run) if jitted else run)(jnp.asarray(np.stack([below, edges, above])))
            k = np.arange(bins - 1)
            np.testing.assert_array_equal(got, [k, k + on_edge, k + 1], f"{bins} bins, closed {closed}")
    ends = metrics.bin_index(jnp.array([0.0, 1.0]), 15, "right")
    np.testing.assert_array_equal(ends, [0, 14])
    np.testing.assert_array_equal(metrics.bin_index(jnp.array([0.0, 1.0]), 15, "left"), [0, 14])


def test_wrong_options():
    with pytest.raises(ValueError, match="bins: expected at least 1"):
        sums_of(np.ones(3, np.float32), np.ones(3), bins=0)
    with pytest.raises(ValueError, match="closed: expected"):
        metrics.bin_index(jnp.ones(3), 10, "both")


def test_merged_sums_are_those_of_everything():
    confidence, correct = tokens(240)
    log_prob = np.log(confidence + 0.1)
    whole = sums_of(confidence, correct, log_prob=log_prob)
    grouped = sums_of(*(x.reshape(8, 30) for x in (confidence, correct)), log_prob=log_prob.reshape(8, 30))
    parts = [
        sums_of(confidence[part], correct[part], log_prob=log_prob[part]) for part in (slice(0, 17), slice(17, 240))
    ]
    added = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x), *parts)
    for merged in (metrics.total(grouped), added):
        for name, x, y in zip(whole._fields, whole, merged, strict=True):
            assert_within(x, y, 240 * EPS, name)
            if name in ("count", "correct"):
                np.testing.assert_array_equal(x, y)
    for name, value in metrics.summarise(grouped).items():
        assert_within(value, metrics.summarise(whole)[name], 60 * EPS, name)


def test_many_groups_keep_every_token():
    """Beyond 2^24 tokens float32 cannot count by ones; across groups the sums are float64."""
    groups = 3
    each = np.float32(2**24 - 1)
    sums = metrics.CalibrationSums(
        count=np.array([[each, 1]] * groups, np.float32),
        confidence=np.array([[each / 2, 1]] * groups, np.float32),
        correct=np.array([[each, 0]] * groups, np.float32),
        correct_squared=np.array([[each, 0]] * groups, np.float32),
        dropped=np.zeros((groups, 4), np.float32),
        brier=np.full(groups, 0.1, np.float32),
        nll=np.full(groups, each, np.float32),
    )
    whole = metrics.total(sums)
    assert whole.count.dtype == np.float64
    np.testing.assert_array_equal(whole.count, [3 * (2**24 - 1), 3])
    assert whole.nll == 3 * (2**24 - 1)
    assert whole.brier.shape == ()
    many = metrics.total(metrics.CalibrationSums(*(np.ones((2**16, 3)) * 257,) * 5, *(np.ones(2**16),) * 2))
    np.testing.assert_array_equal(many.count, 257.0 * 2**16)
    ece = metrics.summarise(sums)["ece"]
    assert_within(ece, (2**24 - 1) / 2**24 * 0.5 + 1 / 2**24, 1e-15, "ECE")


def test_percentiles_beside_an_infinity():
    values = np.append(np.arange(100.0), np.inf)
    np.testing.assert_allclose(metrics.percentile_interval(values, 0.9), (5, 95))
    assert metrics.percentile_interval(values, 0.999)[1] == np.inf
