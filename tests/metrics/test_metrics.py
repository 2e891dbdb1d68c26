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


def test_against_scikit_learn():
    calibration, skm = pytest.importorskip("sklearn.calibration"), pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    confidence = rng.uniform(size=300).astype(np.float32)  # none on an edge: there the conventions differ
    correct = rng.uniform(size=300) < confidence**2
    sums = sums_of(confidence, correct, bins=10)
    brier = skm.brier_score_loss(correct, confidence.astype(np.float64))
    assert_within(brier_score(confidence, correct), brier, 20 * EPS, "Brier")
    accuracy, mean = calibration.calibration_curve(correct, confidence.astype(np.float64), n_bins=10)
    assert (np.asarray(sums.count) > 0).all()
    assert_within(sums.correct / sums.count, accuracy, 20 * EPS, "accuracy of the bins")
    assert_within(sums.confidence / sums.count, mean, 20 * EPS, "confidence of the bins")
    ece = (np.asarray(sums.count) / 300 * np.abs(accuracy - mean)).sum()
    assert_within(errors(confidence, correct, 10, "right")["ece"], ece, 20 * EPS, "ECE")


def test_masks_and_empty_bins():
    confidence, correct = tokens(60, 7)
    where = np.arange(60) % 3 != 0
    dirty = np.where(where, confidence, np.nan)
    want, counts = loop(confidence[where], correct[where], 7, "right")
    got = errors(dirty, correct, 7, "right", where)
    for name, value in want.items():
        assert_within(got[name], value, 20 * EPS, name)
    sums = sums_of(dirty, correct, bins=7, where=where, log_prob=np.log(dirty + 0.5))
    np.testing.assert_array_equal(sums.count, counts)
    assert_within(sums.nll, -np.log(confidence[where].astype(np.float64) + 0.5).sum(), 60 * EPS, "nll")
    brier = ((confidence[where].astype(np.float64) - correct[where]) ** 2).mean()
    assert_within(brier_score(dirty, correct, where=where), brier, 20 * EPS, "Brier")
    # Certain and wrong: an infinite loss, where it counts.
    one_counts = metrics.negative_log_likelihood(np.float32([1, 0.5]), np.array([0, 1]), where=np.array([False, True]))
    assert_within(one_counts, np.log(2), 20 * EPS, "log loss")

    one_bin = errors(np.full(4, 0.95, np.float32), np.array([1, 1, 1, 0]), 10, "right")  # nine bins empty
    for name in ERRORS:
        assert_within(one_bin[name], 0.95 - 0.75, 4 * EPS, name)
    nothing = errors(np.zeros(4, np.float32), np.zeros(4), 10, "right", np.zeros(4, bool))
    assert all(np.isnan(float(x)) for x in nothing.values()), nothing
    with pytest.raises(ValueError, match="expected at least one point that counts"):
        metrics.summarise(sums_of(np.ones(3, np.float32), np.ones(3), where=np.zeros(3, bool)))


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


def test_soft_correctness():
    """Correctness as the share of correct samples: as if every sample were a token of its own."""
    share = np.array([0.0, 0.25, 0.5, 1.0], np.float32)
    confidence = np.array([0.1, 0.3, 0.9, 0.95], np.float32)
    samples = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0], [1, 1, 1, 1]])
    want, _ = loop(np.repeat(confidence, 4), samples.ravel(), 5, "right")
    got = errors(confidence, share, 5, "right")
    for name, value in want.items():
        assert_within(got[name], value, 10 * EPS, name)
    assert_within(brier_score(confidence, share), ((confidence.astype(np.float64) - share) ** 2).mean(), EPS)


def clusters(groups, size, own, seed=0):
    """`[G, N]` tokens of accuracy 0.7 at confidence 0.8; `own`: the share of groups' variance in correctness."""
    rng = np.random.default_rng(seed)
    accuracy = np.where(rng.uniform(size=(groups, 1)) < 0.7, 0.7 + 0.3 * own, 0.7 - 0.7 * own)
    correct = rng.uniform(size=(groups, size)) < accuracy
    return sums_of(np.full((groups, size), 0.8, np.float32), correct, bins=10)


def test_bootstrap_interval():
    independent, clustered = clusters(200, 20, 0.0), clusters(200, 20, 0.9)
    low, high = metrics.bootstrap_interval(independent, resamples=400)
    assert (low, high) == metrics.bootstrap_interval(independent, resamples=400)
    assert (low, high) != metrics.bootstrap_interval(independent, resamples=400, seed=1)
    value = metrics.summarise(independent)["ece"]
    assert low < value < high
    # One bin: the ECE is |0.8 − accuracy|, of standard error (0.7·0.3/4000)^½; 400 resamples know it to about 10 %.
    half = 1.96 * (0.7 * 0.3 / 4000) ** 0.5
    assert_within((high - low) / 2, half, 0.25 * half, "half width")
    wide = np.subtract(*metrics.bootstrap_interval(clustered, resamples=400)[::-1])
    print(f"independent {high - low:.4f}, clustered {wide:.4f}")
    assert wide > 2 * (high - low)
    narrow = np.subtract(*metrics.bootstrap_interval(independent, resamples=400, level=0.5)[::-1])
    assert narrow < 0.6 * (high - low)
    one = metrics.bootstrap_interval(independent, lambda s: s.correct.sum(-1) / s.count.sum(-1), resamples=50)
    assert one[0] < 0.7 + 0.03
    assert one[1] > 0.7 - 0.03


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
