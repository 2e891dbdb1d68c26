"""Metrics, fits and sets against netcal, relplot, torchmetrics and MAPIE as they are installed, on fresh random data.

    pip install netcal relplot torchmetrics mapie      # in an environment of its own
    PYTHONPATH=. python tests/campaigns/libraries.py --cases 100 --seed 0

Prints the largest difference of each pair, beside the limit that it must keep.
"""

import argparse
import collections
import sys
import time
import warnings
from importlib.metadata import version

import netcal.binning
import netcal.metrics
import netcal.scaling
import numpy as np
import relplot
import relplot.metrics
import torch
from mapie.classification import SplitConformalClassifier
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from calibjax import metrics
from calibjax.eval.answers.decisions import option_sets, set_threshold
from calibjax.recalibrate import METHODS, Predictions

LIMITS = collections.defaultdict(lambda: 2e-6, {"relplot smECE": 2e-3, "mapie sets": 0.0})
"""By library and figure. relplot's smECE is read from a mesh of 200 points; fits stop at gradients of 1e-4."""
LIMITS |= {f"netcal {name}": 1e-3 for name in ("platt", "beta", "confidence_temperature")}


class Fixed:
    """A classifier for MAPIE whose probabilities are its inputs."""

    def __init__(self, classes):
        self.classes_ = np.arange(classes)

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return np.asarray(x)

    def predict(self, x):
        return np.asarray(x).argmax(axis=1)

    def __sklearn_is_fitted__(self):
        return True


def pairs(rng):
    """(name, ours, theirs) of one draw of the data."""
    n, bins = int(rng.integers(200, 3000)), int(rng.integers(5, 30))
    c = rng.beta(rng.uniform(0.8, 4), rng.uniform(0.8, 2), n).clip(1e-4, 1 - 1e-4).astype(np.float32)
    y = (rng.random(n) < c ** rng.uniform(0.6, 1.8)).astype(np.int64)
    wide = torch.tensor(c, dtype=torch.float64), torch.tensor(y)
    for norm in ("l1", "l2", "max"):
        ours = metrics.expected_calibration_error(c, y, bins=bins, norm=norm)
        yield f"torchmetrics {norm}", ours, binary_calibration_error(*wide, n_bins=bins, norm=norm)
    yield "torchmetrics auroc", metrics.auroc(c, y), binary_auroc(*wide)
    yield "netcal ECE", metrics.expected_calibration_error(c, y, bins=bins), netcal.metrics.ECE(bins).measure(c, y)
    largest = metrics.expected_calibration_error(c, y, bins=bins, norm="max")
    yield "netcal MCE", largest, netcal.metrics.MCE(bins).measure(c, y)
    yield "relplot smECE", metrics.smooth_ece(c, y), relplot.smECE(np.float64(c), y)
    data = Predictions(confidence=c, correct=np.float32(y))
    fits = {"platt": netcal.scaling.LogisticCalibration(), "beta": netcal.scaling.BetaCalibration()}
    fits |= {"isotonic": netcal.binning.IsotonicRegression()}
    for name, theirs in fits.items():
        ours = METHODS[name].apply(METHODS[name].fit(data), data)
        yield f"netcal {name}", ours, theirs.fit(np.float64(c), y).transform(np.float64(c))
    classes, risk = int(rng.integers(3, 8)), float(rng.choice([0.05, 0.1, 0.2]))
    p = rng.dirichlet(np.full(classes, 0.6), 400).astype(np.float32).astype(np.float64)
    p /= p.sum(axis=1, keepdims=True)
    labels = (p.cumsum(axis=1) < rng.random((400, 1))).sum(axis=1).clip(0, classes - 1)
    method = SplitConformalClassifier(
        Fixed(classes), confidence_level=1 - risk, conformity_score="lac", prefit=True
    ).conformalize(p[:200], labels[:200])
    sets = method.predict_set(p[200:])[1][:, :, 0]
    threshold = set_threshold(p[:200], labels[:200], risk)
    right = p[np.arange(200), labels[:200]]
    between = (p[200:] >= threshold) & (p[200:] < right[right >= threshold].min())  # ours is a short decimal just below
    yield "mapie sets", option_sets(p[200:], threshold) & ~between, sets


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    print({name: version(name) for name in ("netcal", "relplot", "torchmetrics", "mapie")}, flush=True)
    largest, count, off, began = collections.defaultdict(float), collections.Counter(), 0, time.monotonic()
    for number in range(given.cases):
        if time.monotonic() - began > 60 * given.minutes:
            break
        for name, ours, theirs in pairs(np.random.default_rng([given.seed, number])):
            size = float(np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max())
            largest[name], count[name] = max(largest[name], size), count[name] + 1
            if not size <= LIMITS[name]:
                off += 1
                print(f"off: case {number}: {name}: {size:.3g}", flush=True)
    for name, size in largest.items():
        print(f"{name:<28}{count[name]:>5} cases, largest difference {size:.2e}, limit {LIMITS[name]:.0e}")
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
