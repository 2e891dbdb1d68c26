"""Every metric against its float64 formula, under masks, counts, ties, soft targets, NaN and no points at all."""

import functools
import inspect

import jax
import jax.numpy as jnp
import metric_data
import metric_oracle as oracle
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import EPS, assert_within

from calibjax import metrics
from calibjax.metrics._points import points as checked
from calibjax.metrics.local import grouping_parts

N, BINS = 600, 15
EXTREME = (0.0, 1.0, 0.5, 1 / 3, np.finfo(np.float32).tiny, 1 - 6e-8)

ORACLES = {
    "expected_calibration_error": lambda c, y: oracle.binned(c, y, oracle.bins_of(c, BINS)),
    "maximum_calibration_error": lambda c, y: oracle.binned(c, y, oracle.bins_of(c, BINS), "max"),
    "root_mean_square_calibration_error": lambda c, y: oracle.binned(c, y, oracle.bins_of(c, BINS), "l2"),
    "adaptive_calibration_error": lambda c, y: oracle.binned(c, y, oracle.equal_mass_bins(c, BINS)),
    "debiased_calibration_error": lambda c, y: oracle.debiased(c, y, oracle.equal_mass_bins(c, BINS)),
    "calibration_bias": lambda c, y: (c - y).mean(),
    "smooth_ece": oracle.smooth_ece,
    "ks_calibration_error": oracle.kolmogorov_smirnov,
    "brier_score": lambda c, y: ((c - y) ** 2).mean(),
    "negative_log_likelihood": oracle.log_loss,
    "auroc": oracle.auroc,
    "aurc": lambda c, y: oracle.area(c, 1 - y),
    "excess_aurc": lambda c, y: oracle.area(c, 1 - y) - oracle.area(y, 1 - y),
}
sums_of = jax.jit(metrics.calibration_sums)
FEATURED = ("local_calibration_error", "grouping_loss")
COUNTED = (  # two points are more than one: weights are counts
    "adaptive_calibration_error",
    "debiased_calibration_error",
    "aurc",
    "excess_aurc",
    "grouping_loss",
)
SUMS = ("calibration_sums", "grid_sums", "resample_metric")
SCALED = [  # only ratios of weights matter
    name
    for name, value in vars(metrics).items()
    if inspect.isfunction(value) and "where" in inspect.signature(value).parameters and name not in (*COUNTED, *SUMS)
]


@jax.jit
def everything(confidence, correct, features, where):
    """All metrics, compiled once for all tests; arrays float32."""
    values = {name: getattr(metrics, name)(confidence, correct, where=where) for name in ORACLES}
    return values | {name: getattr(metrics, name)(confidence, correct, features, where=where) for name in FEATURED}


def points(kind):
    """(confidence, correct, features), float32, N points."""
    c, y = metric_data.gridded() if kind == "ties" else metric_data.continuous()
    rng = np.random.default_rng(5)
    if kind == "soft":
        y = rng.binomial(8, metric_data.accuracy(c)) / 8
    if kind in ("few values", "extreme"):
        c = rng.integers(0, 9, N) / 8 if kind == "few values" else rng.choice(EXTREME, N)
        y = np.where((c == 0) | (c == 1), c, y)  # a certainty that is wrong has an infinite log loss
    features = rng.normal(size=(N, 3)) + np.asarray(y)[:, None]
    return tuple(np.asarray(x, np.float32) for x in (c, y, features))


def tolerance(name):
    """Sums of N float32 numbers below 1; log loss reaches 7; bandwidths and square roots lose no more here."""
    looser = {"negative_log_likelihood": 100 * EPS, "smooth_ece": 2e-6, "debiased_calibration_error": 100 * EPS}
    return looser.get(name, 20 * EPS)


@pytest.mark.parametrize("kind", ["plain", "ties", "soft", "few values", "extreme"])
@pytest.mark.parametrize("counted", ["mask", "counts", "fractions"])
def test_against_the_formulas(kind, counted):
    c, y, x = points(kind)
    rng = np.random.default_rng(6)
    times = (rng.uniform(size=N) < 0.7).astype(int) if counted == "mask" else rng.integers(0, 4, N)
    where = (times / 2048 if counted == "fractions" else times).astype(np.float32)
    garbage = [
        np.where(where > 0, c, rng.choice([np.nan, 3e38], N)),
        np.where(where > 0, y, 77),
        np.where(where[:, None] > 0, x, np.inf),
    ]
    got = everything(*garbage, where)
    same = everything(c, y, x, where)
    names = [name for name in (*ORACLES, *FEATURED) if counted != "fractions" or name in SCALED]
    for name in {*ORACLES, *FEATURED} - {*names}:
        assert np.isnan(float(got[name])), name
    c64, y64, x64 = (np.repeat(np.asarray(a, np.float64), times, axis=0) for a in (c, y, x))
    for name in ORACLES.keys() & names:
        assert_within(got[name], ORACLES[name](c64, y64), tolerance(name), name)
    assert_within(got["local_calibration_error"], oracle.local(c64, y64, x64, 1.0).mean(), 20 * EPS, "local")
    for name in {*FEATURED} & {*names}:
        assert float(got[name]) == float(same[name]), name
    permuted = np.random.default_rng(7).permutation(N)
    again = everything(*(a[permuted] for a in (c, y, x, where)))
    for name in ORACLES.keys() & names:
        assert_within(again[name], same[name], 2 * tolerance(name), f"{name}, permuted")


def of_points(name, c, y, x):
    """The metric of the points as a function of `where`; classwise of two classes, groups by a feature's sign."""
    classes = np.stack([c, 1 - c], -1), np.stack([y, 1 - y], -1)
    arrays = classes if name.startswith("classwise") else (c, y, x) if name in FEATURED else (c, y)
    return lambda where: getattr(metrics, name)(*arrays, where=where)


@functools.cache
def remaining():
    """The metrics with weights that `everything` leaves out, of the soft points, compiled once for all tests."""
    names = {*SCALED, *COUNTED} - {*ORACLES, *FEATURED}
    run = jax.jit(lambda where: {name: of_points(name, *points("soft"))(where) for name in sorted(names)})
    return lambda where: run(np.asarray(where, np.float32))


def of_soft_points(where):
    """Every metric with weights, float64 `[...]`, under jit."""
    got = everything(*points("soft"), np.asarray(where, np.float32)) | remaining()(where)
    return {name: np.asarray(value, np.float64) for name, value in got.items()}


def test_only_ratios_of_weights_matter():
    weight = np.random.default_rng(8).exponential(size=N).astype(np.float32)
    want, even = of_soft_points(weight), of_soft_points(np.ones(N))
    for scale in (0.25, 2.0**-40, 2.0**40, 1 / weight.sum(dtype=np.float64)):
        got = of_soft_points(weight * scale)
        for name in SCALED:
            assert (want[name] != even[name]).all()
            assert_within(got[name], want[name], 2 * tolerance(name), f"{name}, x {scale}")
    for constant in (0.25, 1 / N):
        got = of_soft_points(np.full(N, constant))
        for name in SCALED:
            assert_within(got[name], even[name], 2 * tolerance(name), f"{name}, all {constant}")


def test_fractional_counts_are_refused():
    twice, fractional = of_soft_points(np.full(N, 2.0)), np.where(np.arange(N) == 3, 0.25, 1.0)
    refused = of_soft_points(fractional)
    message = r"where: expected whole numbers >= 0, .* got 0\.25 at 3 \(1 such points\)"
    for name in COUNTED:
        assert np.isfinite(twice[name]).all(), name
        assert np.isnan(refused[name]).all(), name
        with pytest.raises(ValueError, match=message):
            of_points(name, *points("soft"))(fractional)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf, 1e300, 1e-40])
def test_invalid_weights(wrong):
    where = np.where(np.arange(N) == 3, wrong, 1.0)
    got = of_soft_points(where)
    for name in (*SCALED, *COUNTED):
        assert wrong == 1e-40 or np.isnan(got[name]).all(), name  # it is a number in float32, of fewer digits
        with pytest.raises(ValueError, match=r"where: expected .* at 3"):
            of_points(name, *points("soft"))(where)


def test_sums_of_any_scale():
    """Metrics of sums, of one batch and of two, in numpy and in jax."""
    c, y, _ = points("soft")
    weight = np.random.default_rng(9).integers(0, 4, N).astype(np.float32)
    log_prob = np.log1p(c) - 1
    in_jax = jax.jit(lambda sums: [metrics.mce_from_sums(sums), metrics.rmsce_from_sums(sums)])

    def figures(weight):
        sums = sums_of(c, y, log_prob=log_prob, where=weight)
        arrays = {"log_prob": log_prob, "where": weight}
        halves = sums_of(*(x.reshape(2, -1) for x in (c, y)), **{name: x.reshape(2, -1) for name, x in arrays.items()})
        return [*metrics.summarise(sums).values(), *metrics.summarise(halves).values(), *in_jax(sums)]

    want = figures(weight)
    for scale in (2.0**-2, 2.0**-40, 2.0**40):
        np.testing.assert_allclose(figures(weight * np.float32(scale)), want, rtol=1e-12, atol=1e-15)
    sums, quarter = (sums_of(c, y, where=w) for w in (weight, weight / 4))
    assert np.isfinite(metrics.debiased_from_sums(sums))
    for fractional in (quarter, metrics.total_sums(quarter)):
        with pytest.raises(ValueError, match="expected sums of whole counts"):
            metrics.debiased_from_sums(fractional)
    assert np.isnan(float(jax.jit(metrics.debiased_from_sums)(quarter)))


def test_resampling_refuses_weights():
    c, y, _ = points("plain")
    masked = np.arange(N) % 2 > 0
    same = [metrics.metric_interval(metrics.brier_score, c, y, where=w, resamples=9) for w in (masked, masked * 1.0)]
    assert same[0] == same[1]
    with pytest.raises(ValueError, match="where: expected True or False"):
        metrics.metric_interval(metrics.auroc, c, y, where=masked / 4, resamples=9)
    with pytest.raises(ValueError, match="where: expected True or False"):
        metrics.paired_comparison(metrics.brier_score, (c, y), (c, y), where=masked * 2, resamples=9)


def test_nothing_to_say():
    """No point, or a NaN that counts: NaN under jit, an error outside it; one class has no AUROC."""
    c, y, x = points("plain")
    none = everything(c, y, x, np.zeros(N, np.float32))
    wrong = [everything(np.where(np.arange(N) == 3, bad, c), y, x, np.ones(N, np.float32)) for bad in (np.nan, 1.1)]
    for name in (*ORACLES, *FEATURED):
        assert all(np.isnan(float(values[name])) for values in (none, *wrong)), name
    for constant in (0, 1):
        one_class = everything(c, np.full(N, constant, np.float32), x, np.ones(N, np.float32))
        assert all(np.isfinite(float(value)) != (name == "auroc") for name, value in one_class.items()), one_class
    assert everything._cache_size() == 1, "compiled again"
    with pytest.raises(ValueError, match=r"confidence: expected numbers in \[0, 1\], got nan at 1"):
        metrics.auroc(np.array([0.5, np.nan]), np.array([1, 0]))
    for dtype in (complex, object, str):
        with pytest.raises(ValueError, match=r"confidence: expected real numbers, got (complex128|object|<U)"):
            metrics.auroc(np.array([0.5, 0.5]).astype(dtype), np.array([0, 1]))
    for function in (metrics.smooth_ece, metrics.calibration_sums, metrics.grid_sums):
        with pytest.raises(ValueError, match=r"correct: expected numbers in \[0, 1\], got 2(.0)? at 0"):
            function(np.array([0.5, 0.5]), np.array([2, 0]))
    with pytest.raises(ValueError, match="expected the same shape"):
        metrics.brier_score(np.array([0.5, 0.5]), np.array([1]))
    with pytest.raises(ValueError, match="where: expected one entry for each of 2 points"):
        metrics.brier_score(np.array([0.5, 0.5]), np.array([1, 0]), where=np.ones(3))
    assert np.isnan(float(metrics.brier_score(np.zeros(0), np.zeros(0))))


def test_options():
    for name, option in (
        ("local_calibration_error", {"bandwidth": -1.0}),
        ("local_calibration_error", {"bins": 1.5}),
        ("smooth_ece", {"bandwidth": 0.0}),
        ("adaptive_calibration_error", {"bins": 0}),
        ("expected_calibration_error", {"bins": 0}),
        ("expected_calibration_error", {"closed": "both"}),
    ):
        extra = [np.zeros((2, 1))] if name in FEATURED else []
        with pytest.raises(ValueError, match=f"{next(iter(option))}: expected"):
            getattr(metrics, name)(np.array([0.5, 0.5]), np.array([1, 0]), *extra, **option)
    with pytest.raises(ValueError, match="features: expected"):
        metrics.grouping_loss(np.array([0.5, 0.5]), np.array([1, 0]), np.zeros(2))


@pytest.mark.parametrize("closed", ["left", "none"])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_norms_and_open_bins(norm, closed):
    c, y, _ = points("few values")  # multiples of 1/8: every second one on an edge
    name = {"l1": "expected", "l2": "root_mean_square", "max": "maximum"}[norm]
    got = getattr(metrics, f"{name}_calibration_error")(c, y, bins=4, closed=closed)
    assert_within(got, oracle.binned(c.astype(np.float64), y, oracle.bins_of(c, 4, closed), norm), 20 * EPS)


def test_local_calibration_error_between_its_limits():
    c, y, x = points("plain")
    c64 = c.astype(np.float64)
    wide = metrics.local_calibration_error(c, y, x, bandwidth=1e6)
    assert_within(wide, oracle.binned(c64, y, oracle.bins_of(c, BINS)), 5e-6, "wide")
    narrow = metrics.local_calibration_error(c, y, x, bandwidth=1e-6)
    assert_within(narrow, np.abs(c64 - y).mean(), 20 * EPS, "narrow")
    assert_within(metrics.smooth_ece(c, y, bandwidth=np.inf), abs((c64 - y).mean()), 20 * EPS, "smooth ECE, wide")


def test_grouping_loss_is_found_and_not_invented():
    """Accuracy is confidence ± 0.2 by the sign of a feature: calibrated, and the grouping loss is 0.04."""
    rng = np.random.default_rng(0)
    n = 20_000
    c = rng.uniform(0.2, 0.8, n).astype(np.float32)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    hidden = rng.uniform(size=n) < c + 0.2 * np.sign(x[:, 0])
    plain = rng.uniform(size=n) < c
    got, none = (float(metrics.grouping_loss(c, y, x)) for y in (hidden, plain))
    print(f"grouping loss {got:.4f} of 0.04, {none:.5f} of 0")
    # A lower bound: fitted on some 1,100 points a bin, the cut is turned by about 0.2 and puts 6% on the wrong side,
    # which leaves (1 − 0.12)² of it. Noise: 15 differences of accuracy, each of some (1/1100)^½, squared and debiased.
    assert 0.028 < got < 0.041
    assert abs(none) < 0.002


def test_grouping_parts_are_their_formulas():
    """Between regions, less the noise of their means; and what a line through each bin explains, less its chance."""
    c, y, regions = metric_data.grouped()
    bins, explained, bias, induced = oracle.bins_of(c, 5), 0.0, 0.0, 0.0
    for b in range(5):
        inside = bins == b
        n, mean = inside.sum(), y[inside].mean()
        for region in range(3):
            own = y[inside & (regions == region)]
            explained += len(own) * (own.mean() - mean) ** 2
            bias += own.var(ddof=1)
        bias -= y[inside].var(ddof=1)
        line = np.polyval(np.polyfit(c[inside], y[inside], 1), c[inside])
        induced += n * (line.var() - ((y[inside] - line) ** 2).mean() / (n - 2))
    got = jax.jit(lambda c, y: grouping_parts(checked(c, y, None), regions, 3, 5))(c, y)
    assert_within(got, np.array([explained, bias, induced]) / len(c), 10 * EPS)


def test_classwise():
    p, labels = metric_data.classes()
    where = np.arange(N) % 3 > 0
    errors = [oracle.binned(p[where, k], labels[where] == k, oracle.bins_of(p[where, k], BINS)) for k in range(4)]
    got = metrics.classwise_calibration_error(np.where(where[:, None], p, np.nan), labels, where=where)
    assert_within(got, np.mean(errors), 20 * EPS, "labels")
    shares = metrics.classwise_calibration_error(p, np.eye(4)[labels], where=where)
    assert_within(shares, np.mean(errors), 20 * EPS, "shares")


@pytest.mark.parametrize("bad", [4, -1, 2**32 + 1, np.nan, 0.5])
def test_a_label_that_no_class_has(bad):
    p, labels = metric_data.classes()
    labels = np.where(np.arange(N) == 7, bad, labels)
    with pytest.raises(ValueError, match=r"labels: expected .* at 7 "):
        metrics.classwise_calibration_error(p, labels)
    where = np.arange(N) != 7
    got = metrics.classwise_calibration_error(p, labels, where=where)
    assert got == metrics.classwise_calibration_error(p, np.where(where, labels, 0), where=where)


def test_inputs_of_other_precision():
    """bfloat16 is taken exactly as float32; float64 beyond float32 is rounded to it, 1 being in the last bin."""
    c = jnp.asarray(metric_data.continuous()[0], jnp.bfloat16)
    y = metric_data.continuous()[1]
    assert metrics.brier_score(c, y) == metrics.brier_score(c.astype(jnp.float32), y)
    assert float(metrics.brier_score(np.array([1 + 1e-6, -1e-6]), np.array([1, 0]))) == 0.0  # rounding
    near = np.array([1 - 1e-12, 1 - 1e-12])
    np.testing.assert_array_equal(metrics.bin_index(jnp.asarray(near), 10, "right"), [9, 9])
    for ends in (near, np.array([1 + 1e-6, -1e-6])):
        np.testing.assert_array_equal(metrics.bin_index(ends, 10, "none"), [10, 10])
    assert [float(metrics.negative_log_likelihood(near, np.array([1, y]))) for y in (0, 1)] == [np.inf, 0.0]
    slopes = jax.grad(metrics.negative_log_likelihood)(jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0]))
    np.testing.assert_array_equal(slopes, [-0.5, 0.5])
    for error in (metrics.root_mean_square_calibration_error, metrics.debiased_calibration_error):
        np.testing.assert_array_equal(jax.grad(error)(jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])), [0, 0])
    index = metrics.equal_mass_index(np.linspace(0, 1, 200), np.full(200, 7, np.uint8), 10)  # the sum exceeds 255
    np.testing.assert_array_equal(np.bincount(index), np.full(10, 20))


def test_indices_of_every_dtype():
    """Labels: unsigned, bool, and of points that a traced `where` may leave out."""
    rng = np.random.default_rng(50)
    c = rng.random(200).astype(np.float32)
    y, p = rng.random(200) < c, np.stack([1 - c, c], axis=1)
    error = functools.partial(metrics.classwise_calibration_error, p)
    for dtype in (bool, np.uint8, np.uint16, np.int8, np.int64, np.uint64):
        assert error(y.astype(dtype)) == error(y * 1), dtype
    where = np.arange(200) < 150
    got = jax.vmap(lambda where: error(y * 1, where=where))(np.stack([where, ~where]))
    assert_within(got[0], error(y * 1, where=where), 4 * EPS, "where under vmap")


def test_grouping_loss_of_features_that_are_not_finite():
    rng = np.random.default_rng(51)
    c, x = rng.random(100), rng.normal(size=(100, 3))
    for bad in (np.nan, np.inf):
        broken = np.where(np.arange(100)[:, None] == 7, bad, x)
        assert np.isnan(metrics.grouping_loss(c, c > 0.5, broken))
        with jax.numpy_dtype_promotion("strict"):
            assert np.isfinite(metrics.grouping_loss(c, c > 0.5, broken, where=np.arange(100) != 7))


@pytest.mark.parametrize("metric", [metrics.expected_calibration_error, metrics.smooth_ece, metrics.auroc])
def test_what_numpy_reads(metric):
    """Lists, columns of pandas with an index of their own, tensors of PyTorch, another byte order, and arrays on a mesh
    as `jax.make_mesh` makes it by default give what arrays give. Masked values are not read as data."""
    import pandas
    import torch

    confidence, correct = np.linspace(0, 1, 24), np.arange(24) % 2
    wanted = metric(confidence, correct, where=correct >= 0)
    half = torch.tensor(confidence).bfloat16().requires_grad_()
    metrics.metric_interval(metric, half, torch.tensor(correct), resamples=2)
    assert metrics.reliability_curve(half, torch.tensor(correct)).bandwidth >= 0.02
    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        assert metric(confidence, correct).dtype == metrics.capability_error(np.float32(confidence), correct, 2).dtype
    swapped, column = lambda x: x.astype(x.dtype.newbyteorder()), lambda x: pandas.Series(x, index=range(5, 29))
    for convert in (list, tuple, swapped, column, torch.tensor):
        got = metric(convert(confidence), convert(correct), where=convert(correct >= 0))
        np.testing.assert_array_equal(got, wanted)
    masked = np.ma.masked_array(correct, correct > 0)
    for name in ("confidence", "correct", "where", "groups"):
        with pytest.raises(ValueError, match="masked"):
            metrics.metric_interval(metric, **{"confidence": confidence, "correct": correct, name: masked})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    placed = jax.device_put((np.float32(confidence), correct), NamedSharding(mesh, PartitionSpec("data")))
    assert_within(metric(*placed), wanted, tolerance(metric.__name__), "on a mesh")
    sums = [metrics.calibration_sums(*arrays, bins=5, closed="none") for arrays in (placed, (confidence, correct))]
    jax.tree.map(np.testing.assert_array_equal, *sums)
    with jax.set_mesh(mesh):
        assert_within(metric(*placed), wanted, tolerance(metric.__name__), "on the current mesh")


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
            np.testing.assert_array_equal(metrics.bin_index(jnp.array([0.0, 1.0]), bins, closed), [0, bins - 1])
