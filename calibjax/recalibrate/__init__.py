"""Post-hoc maps fitted on held-out data: `METHODS` under one contract, and the temperature scaling of the trainer."""

from calibjax.recalibrate.agreement import fit_daca, sample_agreement
from calibjax.recalibrate.contract import FitReport, Method, Predictions, parameter_count
from calibjax.recalibrate.methods import METHODS
from calibjax.recalibrate.saved import Recalibrator, load, save
from calibjax.recalibrate.temperature import (
    NEEDED_STATISTICS,
    LikelihoodSums,
    TemperatureFit,
    fit_temperature,
    likelihood_sums,
)

__all__ = [
    "METHODS",
    "NEEDED_STATISTICS",
    "FitReport",
    "LikelihoodSums",
    "Method",
    "Predictions",
    "Recalibrator",
    "TemperatureFit",
    "fit_daca",
    "fit_temperature",
    "likelihood_sums",
    "load",
    "parameter_count",
    "sample_agreement",
    "save",
]
