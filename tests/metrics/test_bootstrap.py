"""Bootstrap intervals and paired comparisons of arrays; sums of batches; pass@k."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from oracle import EPS, assert_within
from scipy import stats

from calibjax import metrics
from calibjax.metrics.bootstrap import POOLS

sums_of = jax.jit(metrics.calibration_sums, static_argnames=("bins", "closed"))


def answers(n, seed=0, shift=0.1):
    """Confidence in [.2, .9], accuracy lower by `shift`."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.2, 0.9, n).astype(np.float32)
    return confidence, (rng.uniform(size=n) < confidence - shift).astype(np.float32)


@pytest.mark.parametrize("n", [500, 3 * POOLS + 1], ids=["points", "pools"])
def test_interval_of_a_mean(n):
    c, y = answers(n)
    value, low, high = metrics.metric_interval(metrics.brier_score, c, y, resamples=2000)
    loss = (c.astype(np.float64) - y) ** 2
    half = 1.96 * loss.std() / n**0.5
    assert_within(value, loss.mean(), 1e-6, "value")
    # 2,000 resamples know a 2.5% quantile to some 0.06 of a standard deviation, 3% of half an interval.
    assert_within([low, high], [loss.mean() - half, loss.mean() + half], 0.1 * half, "interval")


def test_sums_and_points_give_the_same_resamples():
    c, y = answers(400)
    groups = np.array([f"question {k // 4}" for k in range(400)])
    where = np.arange(400) % 7 > 0
    options = {"groups": groups, "where": where, "resamples": 40, "seed": 3}
    fast = metrics.resample_metric(metrics.brier_score, c, y, **options)
    slow = metrics.resample_metric(lambda *points, where: metrics.brier_score(*points, where=where), c, y, **options)
    assert_within(slow, fast, 20 * EPS, "a function that the bootstrap cannot take from sums")
    # And by hand: the groups' own sums, drawn by the same generator.
    group = np.unique(groups[where], return_inverse=True)[1]
    loss = np.bincount(group, (c[where].astype(np.float64) - y[where]) ** 2)
    drawn = np.random.default_rng(3).multinomial(100, np.full(100, 0.01), size=40)
    assert_within(fast, drawn @ loss / (drawn @ np.bincount(group)), 1e-12, "by hand")
    assert not np.allclose(fast, metrics.resample_metric(metrics.brier_score, c, y, **{**options, "seed": 4}))


def test_paired_comparison():
    c, y = answers(2000)
    repaired = c - np.float32(0.1)
    ece = metrics.expected_calibration_error
    better = metrics.paired_comparison(ece, (repaired, y), (c, y), resamples=500)
    assert_within(better.difference, float(ece(repaired, y)) - float(ece(c, y)), 0)
    assert better.low < better.difference < better.high < 0, better
    assert better.fraction_lower > 0.99
    assert better.p_value < 0.02
    worse = metrics.paired_comparison(ece, (c, y), (repaired, y), resamples=500)
    other = [-better.high, -better.low, 1 - better.fraction_lower, better.p_value]
    assert_within([worse.low, worse.high, worse.fraction_lower, worse.p_value], other, 1e-12, "the other way")
    same = metrics.paired_comparison(ece, (c, y), (c, y), resamples=50)
    assert same == (0.0, 0.0, 0.0, 0.5, 1.0)
    assert metrics.paired_comparison(metrics.brier_score, (c, y), (c, y), resamples=50) == same, "of percentiles, too"
    # Pairing takes away what both have in common: Brier scores of two models on the same answers.
    close = (np.clip(c - np.float32(0.01), 0, 1), y)
    paired = metrics.paired_comparison(metrics.brier_score, close, (c, y), resamples=500)
    single = metrics.metric_interval(metrics.brier_score, c, y, resamples=500)
    assert paired.high - paired.low < 0.2 * (single.high - single.low)
    with pytest.raises(ValueError, match="the same points"):
        metrics.paired_comparison(ece, (c, y), (c[1:], y[1:]))


def test_comparison_of_sums():
    c, y = answers(2000)
    first, second = (sums_of(x.reshape(200, 10), y.reshape(200, 10)) for x in (c - 0.1, c))
    of_sums = metrics.error_comparison(first, second, resamples=200)
    arrays = ((c - np.float32(0.1), y), (c, y))
    groups = np.arange(2000) // 10
    of_arrays = metrics.paired_comparison(metrics.expected_calibration_error, *arrays, groups=groups, resamples=200)
    for name, a, b in zip(of_sums._fields, of_sums, of_arrays, strict=True):
        assert_within(a, b, 40 * EPS, name)


def test_wrong_options():
    c, y = answers(10)
    missing = [([1, label] * 5, "NaN or None") for label in (np.nan, None, pd.NA)]
    for groups, message in (([1, 2], "one label"), *missing):
        with pytest.raises(ValueError, match=f"groups: expected .*{message}"):
            metrics.resample_metric(metrics.brier_score, c, y, groups=groups)
    with pytest.raises(ValueError, match="at least one point"):
        metrics.resample_metric(metrics.brier_score, c, y, where=np.zeros(10, bool))
    with pytest.raises(ValueError, match="level: expected"):
        metrics.metric_interval(metrics.brier_score, c, y, level=95, resamples=5)


def add_up(batches):
    return metrics.CalibrationSums(*map(np.stack, zip(*batches, strict=True)))


def test_batches_count_beyond_float32():
    """300 batches of 60,001 points: more than 2^24, by an odd number."""
    c, y = answers(60_001)
    step = jax.jit(metrics.calibration_sums)
    first, programs = step(c, y, log_prob=-c), step._cache_size()
    batches = add_up([first, step(c, y, log_prob=-c)] * 150)
    whole = metrics.total_sums(batches)
    assert whole.count.sum() == 300 * 60_001
    assert whole.correct.sum() == 300 * int(y.sum())
    c64 = c.astype(np.float64)
    for name, got, want in (
        ("Σ confidence", whole.confidence.sum(), 300 * c64.sum()),
        ("Σ nll", whole.nll, 300 * c64.sum()),
        ("Σ brier", whole.brier, 300 * ((c64 - y) ** 2).sum()),
    ):
        assert_within(got / want, 1.0, 10 * EPS, name)  # the rounding of one batch's sums, and no more
    once = metrics.summarise(step(c, y, log_prob=-c))
    for name, value in metrics.summarise(batches).items():
        assert_within(value, once[name], 20 * EPS, name)
    assert step._cache_size() == programs, "compiled again"


def test_long_sums_lose_no_digits():
    """Chunks are added in two floats: in one, 2^24 and 1 are 2^24. Nor are equal points rounded alike."""
    n = 40 * 256
    weight = np.zeros(n, np.float32)
    weight[::256] = 1
    weight[0] = 2**24
    c = np.full(n, 0.7, np.float32)
    sums = jax.jit(metrics.calibration_sums)(c, np.ones(n), log_prob=-c, where=weight)
    for got, each in ((sums.count[10], 1.0), (sums.correct[10], 1.0), (sums.confidence[10], c[0]), (sums.nll, c[0])):
        want = float(each) * (2**24 + 39)
        assert_within(got, want, EPS * want, "sum")
    for metric in (metrics.expected_calibration_error, metrics.smooth_ece):
        assert_within(metric(np.full(10**5, 0.9), np.arange(10**5) % 5 > 0), 0.1, 40 * EPS, metric.__name__)


def test_likelihood_of_batches():
    """NaN if some point that counts has no log-probability; infinite if one has probability 0."""
    c, y = np.array([0.5, 0.5], np.float32), np.array([1, 0])
    known = sums_of(c, y, log_prob=np.log(c))
    assert metrics.summarise(known)["nll"] == pytest.approx(np.log(2))
    unknown = sums_of(c, y)
    for sums in (unknown, add_up([known, unknown]), add_up([unknown, known])):
        values = metrics.summarise(sums)
        assert np.isnan(values.pop("nll"))
        assert np.isfinite(list(values.values())).all()
    masked = add_up([known, sums_of(c, y, where=np.zeros(2, bool))])
    assert metrics.summarise(masked)["nll"] == pytest.approx(np.log(2))
    infinite = sums_of(c, y, log_prob=np.array([-np.inf, -1.0]))
    for sums in (infinite, add_up([infinite, known]), add_up([known, infinite])):
        assert metrics.summarise(sums)["nll"] == np.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("wrong", "finite_low"), [(1, True), (100, False)])
def test_interval_of_an_infinite_likelihood(wrong, finite_low):
    """One certain and wrong answer of 200 is left out of (1 - 1/200)^200 = 37% of the resamples, 100 of none."""
    c = np.full(200, 0.75, np.float32)
    c[:wrong] = 1.0
    y = np.arange(200) % 4 > 0
    y[:wrong] = False
    value, low, high = metrics.metric_interval(metrics.negative_log_likelihood, c, y, resamples=400)
    assert (value, high) == (np.inf, np.inf)
    if finite_low:
        certain = metrics.metric_interval(metrics.negative_log_likelihood, c[1:], y[1:], resamples=400)
        assert certain.low < low < certain.high
    else:
        assert low == np.inf
    drawn = metrics.resample_metric(metrics.negative_log_likelihood, c, y, resamples=400)
    assert np.isinf(drawn).mean() == pytest.approx(0.63 if finite_low else 1, abs=0.08)
    with_itself = metrics.paired_comparison(metrics.negative_log_likelihood, (c, y), (c, y), resamples=50)
    assert np.isnan(with_itself.difference)
    half = np.full_like(c, 0.5)
    against = metrics.paired_comparison(metrics.negative_log_likelihood, (half, y), (c, y), resamples=50)
    assert against.difference == against.low == -np.inf
    assert against.fraction_lower >= 0.5


def test_open_bins_keep_their_dropped_points():
    sums = sums_of(jnp.array([0.0, 0.3, 0.5, 1.0]), jnp.array([0, 1, 1, 0]), bins=2, closed="none")
    np.testing.assert_array_equal(sums.count, [1, 0])
    np.testing.assert_array_equal(sums.dropped, [3, 1.5, 1, 1])
    row = metrics.summarise(sums)
    assert_within(row["ece"], 0.7 / 4, 1e-7)
    assert (row["accuracy"], row["confidence"]) == (0.5, pytest.approx(0.45, abs=1e-7))


def test_capability_error_is_unbiased():
    """Its expectation over all numbers of successes, with their binomial probabilities, is (confidence - q)^2."""
    for n, q, confidence in ((2, 0.3, 0.9), (5, 0.5, 0.5), (8, 0.95, 0.2)):
        successes = np.arange(n + 1)
        got = np.asarray(metrics.capability_error(jnp.full(n + 1, confidence), successes, n), np.float64)
        expectation = (stats.binom.pmf(successes, n, q) * got).sum()
        assert_within(expectation, (confidence - q) ** 2, 4 * EPS, f"n = {n}")
    assert np.isnan(float(metrics.capability_error(0.5, 1, 1)))
    np.testing.assert_array_equal(metrics.success_fraction([1, 0, 0], jnp.array([4, 2, 0])), [0.25, 0, np.nan])
    with pytest.raises(ValueError, match="successes: expected 0 to samples"):
        metrics.success_fraction([4], [3])
