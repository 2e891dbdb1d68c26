"""Every recalibrator: against other libraries, against its formula, and under the laws that all of them obey."""

import collections
import dataclasses
import functools
import json
import re
from pathlib import Path

import chex
import jax
import numpy as np
import oracle
import pytest
import recalibration_data
from oracle import EPS, assert_within
from sklearn.isotonic import IsotonicRegression

from calibjax import UserError
from calibjax.recalibrate import (
    METHODS,
    Predictions,
    Recalibrator,
    load,
    optimize,
    parameter_count,
    sample_agreement,
    save,
)

GOLDENS = json.loads((Path(__file__).parents[1] / "recalibration_goldens.json").read_text())
OPTIONS = {
    "matrix": {"off_diagonal": 0.0, "intercept": 0.0},
    "dirichlet": {"off_diagonal": 0.0, "intercept": 0.0},
    "histogram": {"bins": recalibration_data.BINS},
    "scaling_binning": {"bins": recalibration_data.BINS},
}
# What the optimisers of the other libraries leave: they stop at gradients of 1e-5 to 1e-4.
TOLERANCES = {"netcal": 1e-4, "uncertainty-calibration": 1e-4, "betacal": 1e-4, "probmetrics": 2e-4}


def bundle(**options):
    """By default of the shape of `recalibration_data.classes`: programs are compiled once for both."""
    return Predictions(**recalibration_data.bundle(**options))


def described(*arrays):
    return Predictions(**recalibration_data.described(*arrays))


def rows_of(data, index):
    return Predictions(*(v if v is None or f == "unembedding" else v[index] for f, v in data._asdict().items()))


def bundle_for(name, **options):
    """As many rows as the data have that the method is compared on with other libraries: one program for both."""
    return bundle(n=400 if METHODS[name].returns == "log_probs" else 600, **options)


@functools.cache
def fitted(name):
    return METHODS[name].fit(bundle_for(name))


@functools.cache
def applied(name):
    # As users compile it: without optimisations, scores of 1,000 (separable data) are rounded twice, differently.
    return jax.jit(METHODS[name].apply, compiler_options={"xla_backend_optimization_level": 3})


def apply_host(name, state, data):
    """`apply` of host arrays as one program: op by op every operation is compiled alone."""
    return jax.jit(lambda: METHODS[name].apply(state, data))()


def probabilities(name, state, data):
    """What a method gives, as probabilities, float64; checked to be some."""
    method = METHODS[name]
    data = Predictions(**{field: getattr(data, field) for field in method.apply_reads})
    out = np.asarray(applied(name)(state, data))
    assert out.dtype == np.float32
    assert np.isfinite(out).all(), name
    out = out.astype(np.float64)
    if method.returns == "log_probs":
        assert out.shape == (len(out), len(data.logits[0]) if data.logits is not None else len(data.unembedding))
        out = np.exp(out)
        assert_within(out.sum(axis=1), np.ones(len(out)), 20 * EPS * max(10, out.shape[1] ** 0.5), "sum")
    else:
        assert out.shape == (len(getattr(data, method.apply_reads[0])),)
    assert out.min() >= 0, name
    assert out.max() <= 1 + 20 * EPS, name
    return out


@pytest.mark.parametrize(("name", "library"), [(m, lib) for m, libs in GOLDENS["methods"].items() for lib in libs])
def test_other_libraries(name, library):
    confidence, correct = recalibration_data.binary()
    logits, labels = recalibration_data.classes()
    data = Predictions(logits=logits, labels=labels, confidence=confidence, correct=correct)
    state = METHODS[name].fit(data, **OPTIONS.get(name, {}))
    want = np.array(GOLDENS["methods"][name][library])
    got = probabilities(name, state, data)[: len(want)]
    print(f"{name}, {library} {GOLDENS['versions'][library]}: worst difference {np.abs(got - want).max():.1e}")
    assert_within(got, want, TOLERANCES[library], name)
    assert state.report.converged


def unpenalised(x, y, **options):
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000, **options).fit(x, y)


@pytest.mark.parametrize(
    "name", ["platt", "confidence_temperature", "matrix", "dirichlet", "one_vs_rest_platt", "isotonic"]
)
def test_scikit_learn(name):
    confidence, correct = recalibration_data.binary()
    logits, labels = recalibration_data.classes()
    if name == "isotonic":
        confidence = np.round(confidence, 2).astype(np.float32)  # many equal ones
    data = Predictions(logits=logits, labels=labels, confidence=confidence, correct=correct)
    log_p = np.log(oracle.probabilities(logits, np.ones(len(logits))))
    if name in ("platt", "confidence_temperature"):
        x = np.log(confidence / (1 - confidence))[:, None]
        want = unpenalised(x, correct, fit_intercept=name == "platt").predict_proba(x)[:, 1]
    elif name == "isotonic":
        want = IsotonicRegression(out_of_bounds="clip").fit(confidence, correct).predict(confidence)
    elif name == "one_vs_rest_platt":
        x = log_p - np.log1p(-np.exp(log_p))
        one = [unpenalised(x[:, [k]], labels == k).predict_proba(x[:, [k]])[:, 1] for k in range(x.shape[1])]
        want = np.stack(one, axis=1) / np.sum(one, axis=0)[:, None]
    else:
        x = logits if name == "matrix" else log_p
        want = unpenalised(x, labels).predict_proba(x)
    got = probabilities(name, METHODS[name].fit(data, **OPTIONS.get(name, {})), data)
    print(f"{name}: worst difference {np.abs(got - want).max():.1e}")
    assert_within(got, want, 2e-5, name)
    if name == "isotonic":  # between and beyond the points too
        new = np.linspace(0, 1, 997, dtype=np.float32)
        state = METHODS[name].fit(data)
        want = IsotonicRegression(out_of_bounds="clip").fit(confidence, correct).predict(new)
        assert_within(apply_host(name, state, Predictions(confidence=new)), want, 1e-5, "new points")


def test_stacking_is_a_penalised_logistic_regression():
    """Of scikit-learn, whose penalty is λ = 1/(2 C n), with the λ that predicts the left-out folds best."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import PredefinedSplit, cross_val_score

    rng = np.random.default_rng(51)
    skill = rng.normal(size=400)
    confidences = 1 / (1 + np.exp(-2 * (skill[:, None] + rng.normal(size=(400, 3)) * [0.3, 1, 3])))
    confidences[:40, 1] = np.round(confidences[:40, 1])  # exact ones and zeros
    correct = (rng.random(400) < 1 / (1 + np.exp(-skill))).astype(np.float32)
    c = np.clip(confidences, 0.01, 0.99)
    x, ridges = np.log(c / (1 - c)), (1e-9, 1e-3, 1e-2, 1e-1)
    models = [LogisticRegression(C=1 / (2 * ridge * 400), tol=1e-9, max_iter=1000) for ridge in ridges]
    folds = PredefinedSplit(np.random.default_rng(0).permutation(400) % 5)
    scores = [cross_val_score(m, x, correct, cv=folds, scoring="neg_log_loss").sum() for m in models]
    state = METHODS["stacking"].fit(Predictions(confidences=confidences, correct=correct))
    best = int(np.argmax(scores))
    assert_within(state.ridge, ridges[best], 1e-8)
    want = models[best].fit(x, correct).predict_proba(x)[:, 1]
    assert_within(apply_host("stacking", state, Predictions(confidences=confidences)), want, 1e-5, "stacking")


def test_venn_abers_by_its_definition():
    """Isotonic regression (scikit-learn) of the calibration data and the new confidence, as wrong and as right."""
    rng = np.random.default_rng(50)
    confidence = rng.beta(4, 2, 60).round(2)
    correct = (rng.random(60) < confidence**2).astype(np.float32)
    state = METHODS["venn_abers"].fit(Predictions(confidence=confidence, correct=correct))
    new = np.concatenate([np.unique(confidence), rng.random(40), [0.0, 1.0]]).astype(np.float32)

    def added(c, y):
        points = np.append(np.float32(confidence), c), np.append(correct, y)
        return IsotonicRegression().fit(*points).predict([c])[0]

    p0, p1 = (np.array([added(c, y) for c in new]) for y in (0, 1))
    got = apply_host("venn_abers", state, Predictions(confidence=new))
    assert_within(got, p1 / (1 - p0 + p1), 1e-6, "Venn-Abers")


@pytest.mark.parametrize(
    ("name", "confidence", "correct"),
    [
        ("platt", [0.681765079498291, 1.0, 0.2826261520385742], [1, 1, 0.375]),  # a long last step, cut at a bound
        ("platt", [1.0, 0.0], [0.25, 0.875]),  # the first step ends where there is no curvature
        ("beta", [0.9653891921043396, 1.0], [0.75, 0.75]),  # a comes within rounding of its bound
    ],
)
def test_few_points_and_an_optimum_at_the_bounds(name, confidence, correct):
    from scipy import optimize

    data = Predictions(confidence=np.array(confidence), correct=np.array(correct))
    state = METHODS[name].fit(data, clip=2**-24)
    c = np.clip(data.confidence, 2**-24, 1 - 2**-24)
    columns = [np.log(c), -np.log1p(-c), np.ones(len(c))]
    columns = np.stack(columns if name == "beta" else [columns[0] + columns[1], columns[2]])

    def nll(x):
        return np.mean(np.logaddexp(0, x @ columns) - correct * (x @ columns))

    bounds = [(0 if name == "beta" else -16, 16)] * (len(columns) - 1) + [(-16, 16)]
    starts = np.random.default_rng(0).uniform(-1, 1, (20, len(columns)))
    want = min(optimize.minimize(nll, x, bounds=bounds, options={"ftol": 1e-14}).fun for x in starts)
    got = nll(np.array(state[: len(columns)], np.float64))
    print(f"{got - want:.1e} from the least that SciPy finds; reported {float(state.report.loss) - got:.1e} from it")
    assert_within(got, want, 1e-6, "NLL")
    assert_within(state.report.loss, got, 1e-6, "NLL that is reported")


def ill_conditioned(kind, n=60, k=5):
    """Logits of classes that are nearly the same, of very different scales, far from 0, large, huge, or small."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(n, k)) * 2
    if kind == "collinear":
        z[:, 1] = z[:, 0] + 1e-3 * rng.normal(size=n)
    labels = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    if kind == "scaled":
        z *= 10.0 ** rng.uniform(-3, 2, (1, k))
    elif kind == "offset":
        z += 100 * rng.normal(size=(1, k))
    z *= {"large": 30, "saturated": 200, "small": 1e-3}.get(kind, 1)
    return Predictions(logits=z.astype(np.float32), labels=labels)


def nats(name, data):
    """The objective of a method without its penalty, of x = its parameters in a row; float64."""
    z = np.asarray(jax.nn.log_softmax(data.logits) if name == "dirichlet" else data.logits, np.float64)
    k = z.shape[1]

    def loss(x):
        w, b = (x[:k], x[k:]) if name == "vector" else (x[: k * k].reshape(k, k), x[k * k :])
        log_p = jax.nn.log_softmax((z * w[None, :] if name == "vector" else z @ w.T) + b[None, :])
        penalty = 0.0
        if name != "vector":
            penalty = 1e-3 * (((w * (1 - np.eye(k))) ** 2).sum() / (k * (k - 1)) + (b**2).mean())
        return penalty - log_p[np.arange(len(z)), data.labels].mean()

    return loss


@pytest.mark.parametrize("kind", ["collinear", "scaled", "offset", "large", "saturated", "small"])
@pytest.mark.parametrize("name", ["vector", "matrix", "dirichlet"])
def test_a_fit_that_converged_is_at_the_optimum(name, kind):
    """Trust regions with the exact Hessian (SciPy), from where the fit ended, gain nothing."""
    from scipy import optimize

    data = ill_conditioned(kind)
    state = METHODS[name].fit(data)
    x = np.concatenate([np.ravel(part) for part in state[:2]]).astype(np.float64)
    with jax.enable_x64(True):
        loss = nats(name, data)
        f, g, h = (jax.jit(d) for d in (loss, jax.grad(loss), jax.hessian(loss)))
        want = optimize.minimize(f, x, jac=g, hess=h, method="trust-exact", options={"gtol": 1e-12}).fun
        got = float(f(x))
    print(f"{got - want:.1e} above the least that SciPy finds; {state.report}")
    assert state.report.converged
    assert got <= want + 3e-9  # parameters in float32: a flat optimum is known to the square of their rounding
    assert_within(state.report.loss, want, 1e-6, "loss that is reported")


def test_ensemble_temperature_is_the_best_mixture():
    from scipy import optimize

    logits, labels = recalibration_data.classes(gain=6.0)
    labels[::6] = np.random.default_rng(26).integers(0, 4, len(labels[::6]))  # noise, for which the uniform part is
    state = METHODS["ensemble_temperature"].fit(Predictions(logits=logits, labels=labels))
    rows, ones = np.arange(len(logits)), np.ones(len(logits))
    tempered = oracle.probabilities(logits, ones * np.exp(float(state.log_scale)))
    parts = np.stack([tempered, oracle.probabilities(logits, ones), np.full_like(tempered, 1 / 4)])[:, rows, labels]

    def nll(w):
        return -np.log(w @ parts).mean()

    sum_is_one = {"type": "eq", "fun": lambda w: w.sum() - 1}
    want = optimize.minimize(
        nll, np.full(3, 1 / 3), method="SLSQP", bounds=[(0, 1)] * 3, constraints=[sum_is_one], options={"ftol": 1e-12}
    )
    print(state.weights, want.x)
    assert np.sort(state.weights)[1] > 0.02  # a mixture indeed
    assert_within(state.weights.sum(), 1.0, 2 * EPS, "sum")
    assert_within(nll(state.weights.astype(np.float64)), want.fun, 1e-7, "NLL")
    assert_within(state.weights, want.x, 1e-3, "weights")


def test_no_bin_is_empty():
    """What lies beyond many equal confidences, or between two neighbours of float32, has their value."""
    method, half = METHODS["histogram"], np.float32(0.5)
    for b in (np.float32(0.9), np.nextafter(half, np.float32(1)), half + np.float32(2**-23)):
        state = method.fit(Predictions(confidence=np.array([0.5, 0.5, 0.5, b]), correct=np.full(4, 0.75)), bins=4)
        new = np.array([0.1, 0.4, 0.5, 0.5 + 2**-24, 0.6, b, 1.0])
        assert (apply_host("histogram", state, Predictions(confidence=new)) == 0.75).all(), b
    for seed in range(4):  # equal confidences stay in their bin however their scaled values are rounded
        data = verbalised(400, seed)[0]
        binned, scaled = (probabilities(m, METHODS[m].fit(data), data) for m in ("scaling_binning", "platt"))
        assert_within(binned.mean(), scaled.mean(), 1e-6, "mean of the bins' means")


def test_feature_clipping_takes_the_best_limit_that_keeps_accuracy():
    data = bundle(gain=3.0)
    base = (data.logits.argmax(axis=1) == data.labels).mean()
    state = METHODS["feature_clipping"].fit(data, accuracy_loss=0.05)

    def scores(limit):
        z = np.clip(data.features.astype(np.float64), -limit, limit) @ data.unembedding.T
        q = oracle.probabilities(z, np.ones(len(z)))
        return -np.log(q[np.arange(len(z)), data.labels]).mean(), (z.argmax(axis=1) == data.labels).mean()

    nll, accuracy = scores(float(state.limit))
    assert_within(state.report.loss, nll, 1e-5, "NLL")
    assert nll < scores(np.inf)[0] - 0.02
    assert accuracy >= base - 0.05 - 1e-6
    for limit in np.geomspace(0.01, 4, 100):  # no other one is better by more than a step of the search
        other, right = scores(limit)
        assert right < base - 0.05 or other > nll - 0.06, (limit, other, nll)


def test_networks_learn_what_there_is_to_learn():
    """True temperatures that depend on the hidden state: ATS finds them; g-layers undo a shift of the classes."""

    def drawn(seed):
        rng = np.random.default_rng(seed)
        data = bundle(n=3000, seed=seed)
        truth = data.features @ np.random.default_rng(22).normal(size=(4, 5)).T
        labels = (truth + rng.gumbel(size=truth.shape)).argmax(axis=1)
        own = truth * np.exp(0.7 * np.tanh(2 * data.features[:, :1]))
        return described(own, labels, data.features, data.unembedding, data.categories), truth

    (train, _), (test, truth) = drawn(23), drawn(24)
    best = -np.log(oracle.probabilities(truth, np.ones(3000))[np.arange(3000), test.labels]).mean()

    def nll(name, data):
        return -np.log(probabilities(name, METHODS[name].fit(train), data)[np.arange(3000), data.labels]).mean()

    single, ats = nll("temperature", test), nll("mlp_temperature", test)
    print(f"truth {best:.4f}, single {single:.4f}, ATS {ats:.4f}")
    assert ats < best + 0.25 * (single - best)
    train, test = (
        described(d.logits + np.array([[0.0, 3.0, 0.0, -3.0]]), d.labels, d.features, d.unembedding, d.categories)
        for d in (train, test)
    )
    single, layers = nll("temperature", test), nll("g_layers", test)
    print(f"shifted: single {single:.4f}, g-layers {layers:.4f}")
    assert layers < best + 0.4 * (single - best)


def test_multicalibration_within_categories():
    """Two categories, miscalibrated in opposite ways: one curve for both fits neither, patches fit each bin of each."""
    rng = np.random.default_rng(44)

    def drawn(n):
        confidence, category = rng.random(n).astype(np.float32), rng.integers(0, 2, n)
        truth = np.where(category == 1, confidence**3, confidence ** (1 / 3))
        correct = (rng.random(n) < truth).astype(np.float32)
        return Predictions(confidence=confidence, correct=correct, categories=category * 7 + 5), truth

    (train, _), (test, truth) = drawn(4000), drawn(4000)
    error = {}
    for name in ("multicalibration", "histogram"):
        out = probabilities(name, METHODS[name].fit(train), test)
        # Largest gap between mean confidence and mean truth in a category and a tenth of the confidences.
        cells = test.categories * 100 + np.floor(out * 10)
        sizes = {cell: (cells == cell).sum() for cell in np.unique(cells)}
        error[name] = max(abs((out - truth)[cells == c].mean()) for c, size in sizes.items() if size > 100)
    print(error)
    assert error["multicalibration"] < 0.1
    assert error["histogram"] > 0.2
    state = METHODS["multicalibration"].fit(train)
    unknown = test._replace(categories=np.full(4000, 3))
    everyone = state._replace(**{f: getattr(state, f)[state.category == -1] for f in ("category", "bin", "shift")})
    np.testing.assert_array_equal(
        apply_host("multicalibration", state, unknown), apply_host("multicalibration", everyone, unknown)
    )


def verbalised(n, seed):
    """Confidences as models word them, 15% of them exactly 1, and the true accuracy, which is far below that."""
    rng = np.random.default_rng(seed)
    values, weights = [0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1], [5, 5, 5, 10, 15, 10, 20, 15, 15]
    confidence = rng.choice(values, n, p=np.array(weights) / 100)
    truth = 0.2 + 0.65 * confidence**2
    return Predictions(confidence=confidence, correct=(rng.random(n) < truth).astype(np.float32)), truth


def test_exact_ones_do_not_spoil_platt_scaling():
    """At 2^-24 their log-odds are 16.6 beside 2.9 of the next value, and the line misses all others."""
    calibration, (test, truth) = verbalised(2000, 40)[0], verbalised(600, 41)
    error = {}
    for name in ("platt", "beta", "confidence_temperature"):
        for clip in (None, 2.0**-24):
            out = probabilities(name, METHODS[name].fit(calibration, clip=clip), test)
            error[name, clip] = np.abs(out - truth).mean()
    print(error)
    assert error["platt", 2.0**-24] > 0.06
    assert error["platt", None] < 0.03
    assert error["platt", None] < error["beta", None] + 0.01
    assert error["beta", None] < error["beta", 2.0**-24]
    assert error["confidence_temperature", None] < error["confidence_temperature", 2.0**-24]
    mirrored = Predictions(confidence=1 - calibration.confidence, correct=1 - calibration.correct)
    assert METHODS["platt"].fit(mirrored).clip == METHODS["platt"].fit(calibration).clip, "exact zeros are like ones"


def test_the_clip_is_an_option():
    data, _ = verbalised(600, 43)
    for name in ("platt", "beta", "confidence_temperature"):
        state = METHODS[name].fit(data, clip=0.02)
        assert state.clip == np.float32(0.02)
        ends = np.array([0.0, 0.01, 0.02, 0.98, 0.99, 1.0], np.float32)
        out = np.asarray(applied(name)(state, Predictions(confidence=ends)))
        assert_within(out[[0, 1, 3, 4]], out[[2, 2, 5, 5]], 4 * EPS, "beyond the clip")
        without = data._replace(confidence=np.minimum(data.confidence, np.float32(0.95)))
        assert METHODS[name].fit(without).clip == np.float32(2.0**-24)
        for clip in (0.0, 0.5, np.nan):
            with pytest.raises(UserError, match="clip: expected"):
                METHODS[name].fit(data, clip=clip)


def scenario(name, kind):
    data = bundle_for(name)
    logits, labels = data.logits, data.labels
    if kind == "extreme":
        values = (0.0, 1.0, -1.0, 50.0, -1e4, 1e30, np.finfo(np.float32).tiny)
        logits = np.random.default_rng(0).choice(values, logits.shape).astype(np.float32)
    elif kind == "one class":
        labels = np.full(len(logits), 2)
    elif kind == "constant":
        logits, features = np.full_like(logits, 1.5), np.ones_like(data.features)
        return described(logits, labels, features, np.ones_like(data.unembedding), data.categories)
    elif kind == "all correct":
        labels = logits.argmax(axis=1)
    elif kind == "all wrong":
        labels = logits.argmin(axis=1)
    data = described(logits, labels, data.features, data.unembedding, data.categories)
    if kind == "edges":
        confidence = data.confidence.copy()
        confidence[::4], confidence[1::4] = 0.0, 1.0
        return data._replace(confidence=confidence, logits=logits * 100)
    return data


@pytest.fixture
def few_steps(monkeypatch):
    """Of networks: what holds at every step of a fit holds at its end."""
    monkeypatch.setattr(optimize, "STEPS", 100)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("kind", ["edges", "extreme", "one class", "constant", "all correct", "all wrong"])
@pytest.mark.parametrize("name", METHODS)
def test_hard_data(name, kind):
    """Finite probabilities, whatever the data; where there is no finite optimum, it is said."""
    data = scenario(name, kind)
    state = METHODS[name].fit(data)
    chex.assert_tree_all_finite(state._replace(report=()))
    out = probabilities(name, state, data)
    if name in ("platt", "beta") and kind in ("all correct", "all wrong"):
        assert not state.report.converged
        assert_within(out, data.correct, 1e-4, "certain")
    if name in ("isotonic", "histogram") and kind in ("all correct", "all wrong"):
        assert_within(out, data.correct, EPS, "certain")
    if name == "temperature" and kind in ("all correct", "all wrong", "constant"):
        assert not state.report.converged
    if METHODS[name].keeps_argmax:
        assert (out[np.arange(len(out)), data.logits.argmax(axis=1)] >= out.max(axis=1) - 4 * EPS).all()


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_no_probability_above_one(name, level):
    """Exactly: also of separable data, whose scores reach 1,000, and however XLA contracts the arithmetic."""
    method, data = METHODS[name], bundle_for(name)
    far = data._replace(logits=data.logits * 400, features=data.features * 400, confidence=np.round(data.confidence))
    options = {"xla_backend_optimization_level": 0}
    apply = applied(name) if level else jax.jit(method.apply, compiler_options=options)
    out = np.asarray(apply(fitted(name), Predictions(**{field: getattr(far, field) for field in method.apply_reads})))
    assert out.max() <= (0 if method.returns == "log_probs" else 1)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", METHODS)
def test_laws(name):
    method, data, state = METHODS[name], bundle_for(name), fitted(name)
    out = probabilities(name, state, data)
    if method.returns == "log_probs":
        same = out.argmax(axis=1) == data.logits.argmax(axis=1)
        assert same.all() or not method.keeps_argmax
    elif name in ("confidence_temperature", "platt", "beta", "isotonic", "venn_abers", "scaling_binning"):
        assert (np.diff(out[np.argsort(data.confidence)]) >= -2 * EPS).all()
    sizes = {jax.tree_util.keystr(path): np.size(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert parameter_count(state) == sum(size for path, size in sizes.items() if "report" not in path) >= 1

    # Rows masked out count for nothing, whatever they hold; ten rows are enough.
    keep = np.arange(len(out)) % (len(out) // 10) == 1
    spoilt = {f: np.array(getattr(data, f)) for f in method.fit_reads}
    for field, value in spoilt.items():
        if field != "unembedding":
            value[~keep] = -7 if np.issubdtype(value.dtype, np.integer) else np.nan
    masked, subset = method.fit(Predictions(**spoilt), where=keep), method.fit(rows_of(data, keep))
    chex.assert_trees_all_equal(masked, subset)
    chex.assert_tree_all_finite(subset._replace(report=()))
    probabilities(name, subset, data)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "logits" in method.fit_reads])
def test_options_that_are_impossible(name, tmp_path):
    """One more option, of logit −inf, changes nothing where it is accepted; elsewhere it is refused."""
    method, data = METHODS[name], bundle_for(name)
    more = data._replace(logits=np.pad(data.logits, ((0, 0), (0, 1)), constant_values=-np.inf))
    if not method.accepts_impossible:
        with pytest.raises(UserError, match="logits: row 0 holds -inf, expected finite values"):
            method.fit(more)
        save(tmp_path / "fitted", Recalibrator(name, fitted(name)))
        with pytest.raises(UserError, match="logits: row 0 holds -inf"):
            load(tmp_path / "fitted")(data._replace(logits=np.where(np.eye(4)[data.labels] > 0, 0, -np.inf)))
        return
    state, expected = method.fit(more), fitted(name)
    chex.assert_trees_all_close(state, expected, rtol=1e-4, atol=1e-5)
    got, without = (np.asarray(apply_host(name, expected, d)) for d in (more, data))
    np.testing.assert_allclose(got[:, :-1], without, rtol=1e-6, atol=1e-6)
    assert (got[:, -1] == -np.inf).all()
    with pytest.raises(UserError, match=r"labels: row 3 is an option whose logit is -inf"):
        method.fit(more._replace(labels=np.where(np.arange(len(data.labels)) == 3, data.logits.shape[1], data.labels)))


@pytest.mark.parametrize("name", METHODS)
def test_a_calibrated_model_stays_near_what_it_is(name):
    data = bundle_for(name, seed=27, gain=1.0)
    n = len(data.logits)
    before = oracle.probabilities(data.logits, np.ones(n))
    if METHODS[name].returns == "log_probs":
        # Rows alike have labels in proportion: each class gets the rows that its probabilities add up to.
        order = np.lexsort((before[:, 1], before[:, 0].round(1)))
        level = (np.arange(n) * 0.6180339887 + 0.5) % 1
        labels = np.empty(n, np.int64)
        labels[order] = (before[order].cumsum(axis=1) < level[:, None]).sum(axis=1)
        data = data._replace(labels=labels.clip(0, 3))
    else:
        before = data.confidence
        data = data._replace(correct=before)  # as a fraction of attempts
    error = np.abs(probabilities(name, METHODS[name].fit(data), data) - before).mean()
    print(f"{name}: moved by {error:.4f} on average")
    assert error < 0.03


@pytest.mark.parametrize(
    ("name", "k"),  # the ensemble fits and applies a temperature; docstrings have two classes
    [("ensemble_temperature", 256000), ("feature_clipping", 256000), ("vector", 8000), ("vector", 2), ("g_layers", 2)],
)
def test_label_sets_small_and_large(name, k):
    rng = np.random.default_rng(29)
    features, unembedding = rng.normal(size=(4, 3)), rng.normal(size=(k, 3))
    logits, labels = (features @ unembedding.T).astype(np.float32), rng.integers(0, k, 4)
    data = Predictions(logits=logits, labels=labels, features=features, unembedding=unembedding)
    assert probabilities(name, METHODS[name].fit(data), data).shape == (4, k)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.max_classes])
def test_too_many_classes_are_refused(name):
    limit = METHODS[name].max_classes
    with pytest.raises(UserError, match=f"at most {limit:,} classes, got {limit + 1:,}; take temperature"):
        METHODS[name].fit(Predictions(logits=np.zeros((2, limit + 1)), labels=np.zeros(2, int)))


@pytest.mark.parametrize("name", ["platt", "beta", "isotonic", "histogram"])
def test_shares_of_attempts_count_as_so_many_attempts(name):
    rng = np.random.default_rng(30)
    confidence, wins = rng.random(150).astype(np.float32), rng.integers(0, 5, 150)
    share = Predictions(confidence=confidence, correct=wins / 4)
    one_by_one = Predictions(confidence=confidence.repeat(4), correct=(np.arange(4)[None, :] < wins[:, None]).ravel())
    got, want = (probabilities(name, METHODS[name].fit(data), one_by_one) for data in (share, one_by_one))
    assert_within(got, want, 1e-5, name)


@pytest.mark.parametrize("name", METHODS)
def test_saved_and_loaded(tmp_path, name):
    """Every state comes back bit for bit, and gives a row alone what it gives it among others, to the last bit:

    a threshold found on a table is compared with confidences of single predictions.
    """
    state = fitted(name)
    save(tmp_path / "x", Recalibrator(name, state, {"data": "x.csv"}))
    back, data = load(tmp_path / "x"), bundle(n=1500, seed=4)
    assert (back.name, back.notes, type(back.state)) == (name, {"data": "x.csv"}, type(state))
    assert jax.tree.structure(back.state) == jax.tree.structure(state)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), back.state, state)
    files = ("state.safetensors", "recalibrator.json", "checksums.json")
    assert {file.name for file in (tmp_path / "x").iterdir()} == {*files}
    together = back(data)
    for rows in ([7], [1400], range(1333), range(1499, -1, -1), [3] * 9):
        np.testing.assert_array_equal(back(rows_of(data, np.array(rows))), together[np.array(rows)])


def test_one_call_on_new_data(tmp_path):
    save(tmp_path / "x", Recalibrator("platt", fitted("platt")))
    data, platt = bundle(seed=33), load(tmp_path / "x")
    np.testing.assert_array_equal(platt(data), platt(confidence=data.confidence))
    with pytest.raises(UserError, match="platt reads confidence: the predictions have no confidence"):
        platt(logits=data.logits)
    save(tmp_path / "x", Recalibrator("vector", fitted("vector")))  # replaces what is there
    assert load(tmp_path / "x")(data).shape == data.logits.shape
    for name, field in (("vector", "logits"), ("stacking", "confidences"), ("mlp_temperature", "features")):
        other = data._replace(**{field: getattr(data, field)[:, 1:]})
        with pytest.raises(UserError, match=rf"{name}: expected as many classes.* {field} \[400, \d\]"):
            Recalibrator(name, fitted(name), {})(other)
    with pytest.raises(UserError, match="one row per prediction"):
        Recalibrator("multicalibration", fitted("multicalibration"), {})(data._replace(categories=data.categories[:9]))


@pytest.mark.parametrize("file", ["state.safetensors", "recalibrator.json", "checksums.json"])
def test_damage_is_refused(tmp_path, file):
    save(tmp_path / "x", Recalibrator("platt", fitted("platt")))
    content = (tmp_path / "x" / file).read_bytes()
    (tmp_path / "x" / file).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(UserError, match=r"damaged or edited|cannot be read"):
        load(tmp_path / "x")
    (tmp_path / "x" / file).unlink()
    with pytest.raises(UserError, match=r"missing|found none"):
        load(tmp_path / "x")


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].returns == "confidence"])
def test_confidences_that_are_none(tmp_path, name):
    """NaN stays NaN in its row alone; one call on the host refuses it, and what lies outside [0, 1]."""
    data, reads = bundle_for(name), METHODS[name].apply_reads
    fields = {field: getattr(data, field) for field in reads}

    def with_row_8(value):
        confidence = fields[reads[0]].copy()
        confidence[8] = value
        return {**fields, reads[0]: confidence}

    good, got = (np.asarray(applied(name)(fitted(name), Predictions(**d))) for d in (fields, with_row_8(np.nan)))
    others = np.arange(len(good)) != 8
    assert np.isnan(got[8])
    np.testing.assert_array_equal(got[others], good[others])
    save(tmp_path / "x", Recalibrator(name, fitted(name)))
    assert load(tmp_path / "x")(**with_row_8(1 + 1e-6)).max() <= 1
    for value in (np.nan, -0.5, 1.5):
        with pytest.raises(UserError, match=f"{reads[0]}: row 8 holds"):
            load(tmp_path / "x")(**with_row_8(value))


def test_what_cannot_be_saved_or_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "own", dataclasses.replace(METHODS["beta"], fit_arrays=lambda *_: None))
    wrong = [("platt", fitted("beta"), "PlattState"), ("platt", 3, "PlattState"), ("own", fitted("beta"), "return ann")]
    for name, state, declared in wrong:
        with pytest.raises(UserError, match=f"the fit of {name} .*{declared}.*, got a {type(state).__name__}"):
            save(tmp_path / "x", Recalibrator(name, state))
    with pytest.raises(UserError, match="'plat': expected one of"):
        save(tmp_path / "x", Recalibrator("plat", fitted("platt")))
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "head.json").touch()
    with pytest.raises(UserError, match=r"calibjax\.load_head reads it"):
        load(tmp_path / "head")


@pytest.mark.usefixtures("few_steps")
def test_a_second_fit_compiles_nothing():
    programs = (optimize._value_and_grad, optimize._hessian, optimize._step, optimize._losses)
    names = ("platt", "vector", "matrix", "g_layers", "mlp_temperature")
    for name in names:
        METHODS[name].fit(bundle())
    before = [program._cache_size() for program in programs]
    for name in names:
        METHODS[name].fit(bundle(seed=31))
    assert [program._cache_size() for program in programs] == before
    assert min(before) > 0


def test_agreement():
    rng = np.random.default_rng(32)
    answers, counts = rng.integers(0, 4, (50, 7)), rng.random((50, 7)) < 0.8
    counts[3] = False
    answer, confidence = jax.tree.map(np.asarray, jax.jit(sample_agreement)(answers, where=counts))
    for row, mask, got, share in zip(answers, counts, answer, confidence, strict=True):
        votes = collections.Counter(row[mask].tolist()).most_common(1)
        if votes:
            assert int(got) == votes[0][0]
        assert_within(share, votes[0][1] / mask.sum() if votes else 0.0, EPS)
    with pytest.raises(UserError, match="answers: expected 32-bit integers"):
        sample_agreement([[2**32 + 1, 1]])


def test_mistakes_are_named():
    fit = METHODS["platt"].fit
    c, y = np.full(5, 0.5), np.ones(5)
    for message, data, where in (
        ("needs correct", Predictions(confidence=c), None),
        ("one row per prediction", Predictions(confidence=c, correct=y[:4]), None),
        ("expected 1 axes", Predictions(confidence=c[None], correct=y), None),
        ("confidence: row 2 holds 1.5, expected 0 to 1", Predictions(confidence=[0, 1, 1.5, 2, 0], correct=y), None),
        ("correct: row 0 holds -1", Predictions(confidence=c, correct=-y), None),
        ("confidence: row 1 holds nan", Predictions(confidence=[0, np.nan, 0, 0, 0], correct=y), None),
        ("no prediction counts", Predictions(confidence=c, correct=y), np.zeros(5, bool)),
        ("where: expected bool", Predictions(confidence=c, correct=y), np.ones(5)),
        ("masked", Predictions(confidence=np.ma.masked_array(c, y > 0), correct=y), None),
        ("confidence: expected real numbers, got complex128", Predictions(confidence=c + 2j, correct=y), None),
    ):
        with pytest.raises(UserError, match=message):
            fit(data, where)
    z = np.zeros((3, 4))
    for message, labels in (("row 1 holds 4, expected 0 to K - 1", [3, 4, 0]), ("expected integers", [0.0, 0, 0])):
        with pytest.raises(UserError, match=f"labels: {message}"):
            METHODS["vector"].fit(Predictions(logits=z, labels=np.array(labels)))
    with pytest.raises(UserError, match="expected features"):
        METHODS["feature_clipping"].fit(Predictions(features=z, unembedding=np.zeros((2, 3)), labels=np.zeros(3, int)))


def test_the_document_has_a_row_for_every_method():
    text = (Path(__file__).parents[2] / "docs" / "recalibration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+)", text.split("## Side by side")[0], flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(METHODS)
    assert all(reads in METHODS[name].apply_reads for name, reads in rows)
