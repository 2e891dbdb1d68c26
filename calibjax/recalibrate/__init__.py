"""Post-hoc maps fitted on held-back data: `METHODS` under one contract, and the single temperature of the trainer."""

from calibjax.recalibrate.agreement import sample_agreement as sample_agreement
from calibjax.recalibrate.contract import FitReport as FitReport
from calibjax.recalibrate.contract import Method as Method
from calibjax.recalibrate.contract import Predictions as Predictions
from calibjax.recalibrate.contract import parameter_count as parameter_count
from calibjax.recalibrate.methods import METHODS as METHODS
from calibjax.recalibrate.temperature import NEEDED_STATISTICS as NEEDED_STATISTICS
from calibjax.recalibrate.temperature import LikelihoodSums as LikelihoodSums
from calibjax.recalibrate.temperature import TemperatureFit as TemperatureFit
from calibjax.recalibrate.temperature import fit_temperature as fit_temperature
from calibjax.recalibrate.temperature import likelihood_sums as likelihood_sums
