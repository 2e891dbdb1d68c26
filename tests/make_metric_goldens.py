"""Writes metric_goldens.json: what other libraries say of the points of `metric_data`.

    pip install torchmetrics netcal relplot uncertainty-calibration scikit-learn glest
    python tests/make_metric_goldens.py

None of them is needed by the tests, which read the file.
"""

import json
from importlib.metadata import version
from pathlib import Path

import calibration
import metric_data
import netcal.metrics
import numpy as np
import relplot
import relplot.metrics
import torch
from glest import GLEstimator
from glest.core import Partitioner
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

PACKAGES = ("torchmetrics", "netcal", "relplot", "uncertainty-calibration", "scikit-learn", "glest")


def sklearn_ece(confidence, correct, bins):
    accuracy, mean = calibration_curve(correct, confidence, n_bins=bins)
    # The counts of the bins that calibration_curve keeps to itself, by its own rule.
    index = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)
    count = np.bincount(index, minlength=bins)
    return float((count[count > 0] / len(confidence) * np.abs(accuracy - mean)).sum())


def relplot_binned(confidence, correct, bins):
    return float(relplot.metrics.binnedECE(confidence, correct, nbins=bins))


def torch_error(confidence, correct, bins, norm, dtype=torch.float64):
    tensors = torch.tensor(confidence, dtype=dtype), torch.tensor(correct)
    return float(binary_calibration_error(*tensors, n_bins=bins, norm=norm))


def fine_relplot(confidence, correct, bandwidth=None):
    relplot.config.smECE_mesh_pts = 200_001
    try:
        if bandwidth is None:
            return float(relplot.smECE(confidence, correct))
        return float(relplot.metrics.smECE_sigma(confidence, correct, bandwidth))
    finally:
        relplot.config.smECE_mesh_pts = 200


def goldens():
    c, y = metric_data.continuous()
    values = {
        "torchmetrics l1": torch_error(c, y, 15, "l1"),
        "torchmetrics l2": torch_error(c, y, 15, "l2"),
        "torchmetrics max": torch_error(c, y, 15, "max"),
        "torchmetrics auroc": float(binary_auroc(torch.tensor(c, dtype=torch.float64), torch.tensor(y))),
        "netcal ECE": float(netcal.metrics.ECE(15).measure(c, y)),
        "netcal MCE": float(netcal.metrics.MCE(15).measure(c, y)),
        "uncertainty-calibration ece": float(calibration.get_ece(c, y, num_bins=15)),
        "uncertainty-calibration ece_em": float(calibration.get_ece_em(c, y, num_bins=15)),
        "uncertainty-calibration debiased": float(calibration.lower_bound_scaling_ce(c, y, num_bins=15)),
        "uncertainty-calibration debiased width": float(
            calibration.lower_bound_scaling_ce(c, y, num_bins=15, binning_scheme=calibration.utils.get_equal_prob_bins)
        ),
        "relplot binnedECE": relplot_binned(c, y, 15),
        "scikit-learn ECE": sklearn_ece(c, y, 15),
    }
    p, labels = metric_data.classes()
    values["uncertainty-calibration marginal"] = float(calibration.get_ece(p, labels, num_bins=15, mode="marginal"))
    c, y = metric_data.gridded()
    values["uncertainty-calibration ece_em ties"] = float(calibration.get_ece_em(c, y, num_bins=15))
    values["torchmetrics auroc ties"] = float(binary_auroc(torch.tensor(c, dtype=torch.float64), torch.tensor(y)))
    values["relplot smECE"] = float(relplot.smECE(c, y))
    values["relplot smECE fine"] = fine_relplot(c, y)
    values["relplot smECE fine 0.05"] = fine_relplot(c, y, 0.05)
    values["relplot smECE fine 0.02"] = fine_relplot(c, y, 0.02)
    c, y, regions = metric_data.grouped()
    estimator = GLEstimator(np.stack([1 - c, c], axis=1), partitioner=Partitioner.from_name(None, n_bins=15))
    estimator.fit(regions[:, None], y, partition=regions)
    # glest's Brier score is the sum over both classes: twice ours.
    values["glest explained"] = float(estimator.GL_uncorrected()) / 2
    values["glest bias"] = float(estimator.GL_bias()) / 2
    values["glest induced"] = float(estimator.GL_induced()) / 2

    c, y = metric_data.edges()
    table = {
        "torchmetrics, float64": torch_error(c, y, 10, "l1"),
        "torchmetrics, float32": torch_error(c, y, 10, "l1", torch.float32),
        "netcal": float(netcal.metrics.ECE(10).measure(c, y)),
        "uncertainty-calibration": float(calibration.get_ece(c, y, num_bins=10)),
        "relplot binnedECE": relplot_binned(c, y, 10),
        "scikit-learn calibration_curve": sklearn_ece(c, y, 10),
    }
    return {
        "data": f"tests/metric_data.py, seed {metric_data.SEED}, N = {metric_data.N}",
        "versions": {name: version(name) for name in PACKAGES},
        "values": values,
        "edges": table,
    }


if __name__ == "__main__":
    file = Path(__file__).parent / "metric_goldens.json"
    file.write_text(json.dumps(goldens(), indent=2) + "\n")
    print(file.read_text())
