"""Plots: what is drawn equals what was given, from arrays and from results; and the smooth curve by its formula."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from report_documents import document
from scipy.stats import norm

from calibjax import metrics, plot
from calibjax.runtime.errors import UserError


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    confidence = rng.beta(2, 2, 3000)
    return confidence, rng.random(3000) < confidence**2


def test_curve_is_kernel_regression_with_the_reflected_kernel(points):
    confidence, correct = points
    curve = metrics.reliability_curve(confidence, correct)
    t, sigma = curve.confidence[:, None], curve.bandwidth
    images = [confidence, -confidence, 2 - confidence]
    weight = sum(norm.pdf(t, image[None, :], sigma) for image in images)
    expected = weight @ correct / weight.sum(axis=1)
    shown = ~np.isnan(curve.accuracy)
    assert shown.sum() > 90
    error = np.abs(curve.accuracy - expected)[shown].max()
    assert error < (1 / 256) ** 2 / sigma**2 / 8  # linear interpolation on the grid
    np.testing.assert_allclose(curve.density, weight.mean(axis=1), rtol=0.02)
    assert ((curve.low <= curve.accuracy) & (curve.accuracy <= curve.high))[shown].all()
    assert metrics.smooth_ece(confidence, correct) > sigma == 0.05
    few = metrics.reliability_curve(np.repeat([0, 0.5, 1], [9, 9, 10]), np.ones(28)).accuracy
    np.testing.assert_array_equal(few[[0, 50, 100]], [np.nan, np.nan, 1])


def test_band_covers_and_groups_widen_it():
    """Of calibrated predictions, whose accuracy by confidence is known: 95% at each point, so 90% of a dozen draws."""
    inside = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        confidence = rng.random(2000)
        curve = metrics.reliability_curve(confidence, rng.random(2000) < confidence, seed=seed)
        middle = slice(20, 81, 10)  # away from the ends, where smoothing has a bias
        inside += list((curve.low <= curve.confidence)[middle] & (curve.confidence <= curve.high)[middle])
    assert np.mean(inside) > 0.85
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(100), 40)
    confidence = rng.random(4000)
    correct = rng.random(100)[group] < 0.5  # all points of a group are alike
    alone, together = (metrics.reliability_curve(confidence, correct, groups=groups) for groups in (None, group))
    assert np.nanmean(together.high - together.low) > 1.5 * np.nanmean(alone.high - alone.low)


def test_reliability(ax, points):
    plot.reliability(*points, bins=10, label="x", ax=ax)
    drawn = next(line for line in ax.lines if line.get_label() == "x")
    np.testing.assert_array_equal(drawn.get_ydata(), metrics.reliability_curve(*points).accuracy)
    assert len(ax.containers[0].lines[0].get_xdata()) == 10
    assert ax.get_ylabel() == "accuracy"
    results = document()
    for given in (results, results["held_out"], results["held_out"]["methods"]["ats"]):
        plot.reliability(given, method="ats", ax=ax)
    np.testing.assert_array_equal(ax.containers[3].lines[0].get_ydata(), [0.25, 0.75])
    with pytest.raises(UserError, match="method: expected one of uncalibrated, temperature, ats"):
        plot.reliability(results, method="platt", ax=ax)
    with pytest.raises(UserError, match="expected results with reliability, mine has none"):
        plot.reliability({"methods": {"mine": {}}}, ax=ax)
    for wrong, error in (((0.5,), "or results"), (([0.5], [1, 0]), "got 1 and 2 "), (([1.5], [1]), "from 1 to 1.5")):
        with pytest.raises(UserError, match=error):
            plot.reliability(*wrong, ax=ax)


def test_temperatures(ax):
    plot.temperature_histogram(document() | {"run": {"fit": {"temperature": 1.5}}}, method="ats", ax=ax)
    assert [line.get_xdata()[0] for line in ax.lines] == [1.0, 1.5]
    values = np.array([[0.5, 2.0], [0.0, 2.0]])
    assert plot.temperature_histogram(values, 1.2, ax=Figure().subplots()).patches[0].get_data().values.sum() == 3
    for wrong, message in (([0.0], "above 0"), ([np.inf], "finite"), (document() | {"run": {"fit": True}}, "mine has")):
        with pytest.raises(UserError, match=message):
            plot.temperature_histogram(wrong, method="mine", ax=ax)


def test_layers(ax):
    plot.layers({"ece": [[0.3, 0.2, 0.4], [0.1, 0.0, 0.2]]}, ax=ax)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [0.3, 0.1])
    assert plot.layers(document(), ax=Figure().subplots()).lines[0].get_ydata().tolist() == [0.3, 0.3]
    with pytest.raises(UserError, match="got that of another command"):
        plot.layers({"schema": 1, "held_out": {}}, ax=ax)
    for curves, name in (({"ece": [0.1]}, "mce"), (document(), "agreement")):
        with pytest.raises(UserError, match=f"expected some of .*, got {name}"):
            plot.layers(curves, (name,), ax=ax)


def test_risk_coverage(ax):
    """Ties are one step: of confidences .9 .5 .5 .1, correct 1 1 0 0."""
    plot.risk_coverage([0.5, 0.9, 0.1, 0.5], [1, 1 + 1e-6, 0, 0], ax=ax)  # rounded beyond 1
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [0.25, 0.75, 1])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0, 1 / 3, 1 / 2])
    plot.risk_coverage(document(), ax=ax)  # bins of 40 and 60 with accuracy .25 and .75
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [0.25, 0.45])


def test_forest(ax):
    first = metrics.PairedDifference(-0.2, -0.3, -0.1, fraction_lower=1.0, p_value=0.01)
    plot.forest({"a": first, "b": (0.1, -0.1, 0.3)}, ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [-0.2, 0.1]
    assert dots[1].get_markerfacecolor() == "none", "its interval holds 0"
    assert "Δ ECE against" in plot.forest(document(), ax=Figure().subplots()).get_xlabel()
    with pytest.raises(UserError, match="at least one difference, found none of nll"):
        plot.forest(document(), "nll", ax=ax)


def test_the_page_of_plots(tmp_path, monkeypatch):
    """The Python of docs/plots.md runs on the results of a run."""
    page = (Path(__file__).parents[1] / "docs" / "plots.md").read_text()
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "metrics.json").write_text(json.dumps(document()))
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec("".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)), scope)
    assert all(ax.get_xlabel() for ax in scope["axes"])
    plt.close(scope["figure"])
