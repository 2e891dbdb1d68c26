"""Agreement with other libraries: golden values of `make_metric_goldens.py`, scikit-learn live, and the page on it."""

import json
from pathlib import Path

import metric_data
import pytest
from oracle import assert_within

from calibjax import metrics
from calibjax.metrics._points import points
from calibjax.metrics.local import grouping_parts

HERE = Path(__file__).parents[1]
GOLDEN = json.loads((HERE / "metric_goldens.json").read_text())
PAGE = (HERE.parent / "docs" / "metrics.md").read_text()
MILLIONTH = 1e-6

CONTINUOUS, TIES = metric_data.continuous(), metric_data.gridded()
ECE = ("torchmetrics l1", "netcal ECE", "uncertainty-calibration ece", "relplot binnedECE", "scikit-learn ECE")
WIDTH = "uncertainty-calibration debiased width"


def debiased_from_sums(confidence, correct):
    return metrics.debiased_from_sums(metrics.calibration_sums(confidence, correct))


@pytest.mark.parametrize(
    ("metric", "data", "goldens"),
    [
        (metrics.expected_calibration_error, CONTINUOUS, ECE),
        (metrics.root_mean_square_calibration_error, CONTINUOUS, ["torchmetrics l2"]),
        (metrics.maximum_calibration_error, CONTINUOUS, ["torchmetrics max", "netcal MCE"]),
        (metrics.adaptive_calibration_error, CONTINUOUS, ["uncertainty-calibration ece_em"]),
        (metrics.adaptive_calibration_error, TIES, ["uncertainty-calibration ece_em ties"]),
        (metrics.debiased_calibration_error, CONTINUOUS, ["uncertainty-calibration debiased"]),
        (debiased_from_sums, CONTINUOUS, [WIDTH]),
        (metrics.auroc, CONTINUOUS, ["torchmetrics auroc"]),
        (metrics.auroc, TIES, ["torchmetrics auroc ties"]),
        (metrics.classwise_calibration_error, metric_data.classes(), ["uncertainty-calibration marginal"]),
    ],
)
def test_golden_values(metric, data, goldens):
    for golden in goldens:
        assert_within(metric(*data), GOLDEN["values"][golden], MILLIONTH, golden)


def test_golden_smooth_ece():
    """relplot sums over 200 places and interpolates on a grid of 1/1000; refined to 200,001 places the grid is left.

    Linear interpolation in steps h of a function of curvature f/σ² is off by about f h²/(8 σ²): 3e-4 f at h = 1/1000,
    σ = 0.02, with either sign; of the integral less than a tenth of that remains.
    """
    c, y = TIES
    value = metrics.smooth_ece(c, y)
    assert_within(value, GOLDEN["values"]["relplot smECE fine"], MILLIONTH, "automatic bandwidth")
    assert_within(value, GOLDEN["values"]["relplot smECE"], 2e-3 * float(value), "as relplot is installed")
    for bandwidth, error in ((0.05, 2e-6), (0.02, 5e-6)):
        wanted = GOLDEN["values"][f"relplot smECE fine {bandwidth}"]
        assert_within(metrics.smooth_ece(c, y, bandwidth=bandwidth), wanted, error, f"bandwidth {bandwidth}")


def test_golden_grouping_parts():
    c, y, regions = metric_data.grouped()
    explained, bias, _ = grouping_parts(points(c, y, None), regions, 3, 15)
    assert_within(explained, GOLDEN["values"]["glest explained"], MILLIONTH, "explained")
    assert_within(bias, GOLDEN["values"]["glest bias"], MILLIONTH, "bias")


def test_edges_are_as_the_table_says():
    c, y = metric_data.edges()
    ours = {
        f'`closed="{closed}"`': float(metrics.expected_calibration_error(c, y, bins=10, closed=closed))
        for closed in ("right", "left", "none")
    }
    libraries = GOLDEN["edges"]
    for library in ("uncertainty-calibration", "scikit-learn calibration_curve"):
        assert_within(ours['`closed="right"`'], libraries[library], MILLIONTH, library)
    assert_within(ours['`closed="left"`'], libraries["torchmetrics, float32"], MILLIONTH, "torchmetrics, float32")
    assert ours['`closed="none"`'] == 0.0
    for name, value in {**libraries, **ours}.items():
        row = next((line for line in PAGE.splitlines() if line.startswith(f"| {name} ")), "")
        assert f"| {value:.4f} |" in row, f"docs/metrics.md: the row of {name} should give {value:.4f}: {row!r}"


def test_page_names_the_versions_and_values():
    for name, version in GOLDEN["versions"].items():
        assert f"{name} {version}" in PAGE, f"{name} {version}"
    for name, value in GOLDEN["values"].items():
        assert f"{value:.6f}" in PAGE, f"{name}: {value:.6f}"
