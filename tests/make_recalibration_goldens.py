"""Writes recalibration_goldens.json: what other libraries make of the data of `recalibration_data.py`.

Run in an environment of its own, for none of these is a dependency of calibjax:

    pip install netcal==1.4.0 uncertainty-calibration==0.1.4 betacal==1.1.0 probmetrics==1.3.0
    python tests/make_recalibration_goldens.py

dirichletcal 0.5 no longer builds; without penalty it is the logistic regression of `recalibrate/test_methods.py`.
"""

import importlib.metadata
import json
from pathlib import Path

import betacal
import calibration
import netcal.binning
import netcal.scaling
import numpy as np
import recalibration_data
import torch
from probmetrics.calibrators.logistic import MatrixScalingCalibrator, SMSCalibrator, VectorScalingCalibrator
from probmetrics.calibrators.temperature_scaling import TemperatureScalingCalibrator
from probmetrics.distributions import CategoricalLogits

ROWS = 12


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    confidence, correct = recalibration_data.binary()
    logits, labels = recalibration_data.classes()
    out = {}

    def keep(method, library, values):
        out.setdefault(method, {})[library] = np.asarray(values, np.float64)[:ROWS].tolist()

    for method, model in {
        "platt": netcal.scaling.LogisticCalibration(),
        "beta": netcal.scaling.BetaCalibration(),
        "isotonic": netcal.binning.IsotonicRegression(),
    }.items():
        keep(method, "netcal", model.fit(confidence, correct).transform(confidence))

    bins = recalibration_data.BINS
    for method, model in {
        "platt": calibration.PlattCalibrator(len(confidence), bins),
        "histogram": calibration.HistogramCalibrator(len(confidence), bins),
        "scaling_binning": calibration.PlattBinnerCalibrator(len(confidence), bins),
    }.items():
        model.train_calibration(confidence, correct)
        keep(method, "uncertainty-calibration", model.calibrate(confidence))

    keep("beta", "betacal", betacal.BetaCalibration("abm").fit(confidence, correct).predict(confidence))

    given = CategoricalLogits(torch.tensor(logits))
    for method, model in {
        "temperature": TemperatureScalingCalibrator(),
        "vector": VectorScalingCalibrator(),
        "matrix": MatrixScalingCalibrator(),
        "structured_matrix": SMSCalibrator(),
    }.items():
        model.fit_torch(given, torch.tensor(labels))
        keep(method, "probmetrics", model.predict_proba_torch(given).get_probs().numpy())

    names = ("netcal", "uncertainty-calibration", "betacal", "probmetrics", "scikit-learn", "torch")
    document = {"versions": {name: importlib.metadata.version(name) for name in names}, "methods": out}
    Path(__file__).with_name("recalibration_goldens.json").write_text(json.dumps(document, indent=1) + "\n")


main()
