"""Calibration errors, proper scores and ranking metrics of confidences, with bootstrap intervals and comparisons.

Confidence is the probability of the most likely token, or of the answer given; correctness is 0, 1, or the fraction of
samples that were right. A metric is one call on arrays, `metric(confidence, correct, *, where=None, ...) -> scalar`; it
is pure, jitted, and NaN where no point counts. Metrics that follow from `CalibrationSums` are also computed batch by
batch. `docs/metrics.md` compares definitions and conventions with other libraries.
"""

from calibjax.metrics.binless import ReliabilityCurve as ReliabilityCurve
from calibjax.metrics.binless import curve_from_sums as curve_from_sums
from calibjax.metrics.binless import grid_sums as grid_sums
from calibjax.metrics.binless import ks_calibration_error as ks_calibration_error
from calibjax.metrics.binless import reliability_curve as reliability_curve
from calibjax.metrics.binless import smooth_ece as smooth_ece
from calibjax.metrics.bootstrap import compare_resamples as compare_resamples
from calibjax.metrics.bootstrap import metric_interval as metric_interval
from calibjax.metrics.bootstrap import paired_comparison as paired_comparison
from calibjax.metrics.bootstrap import percentile_interval as percentile_interval
from calibjax.metrics.bootstrap import pooled_sums as pooled_sums
from calibjax.metrics.bootstrap import resample_metric as resample_metric
from calibjax.metrics.bootstrap import resample_sums as resample_sums
from calibjax.metrics.errors import Norm as Norm
from calibjax.metrics.errors import adaptive_calibration_error as adaptive_calibration_error
from calibjax.metrics.errors import bias_from_sums as bias_from_sums
from calibjax.metrics.errors import calibration_bias as calibration_bias
from calibjax.metrics.errors import classwise_calibration_error as classwise_calibration_error
from calibjax.metrics.errors import debiased_calibration_error as debiased_calibration_error
from calibjax.metrics.errors import debiased_from_sums as debiased_from_sums
from calibjax.metrics.errors import ece_from_sums as ece_from_sums
from calibjax.metrics.errors import expected_calibration_error as expected_calibration_error
from calibjax.metrics.errors import maximum_calibration_error as maximum_calibration_error
from calibjax.metrics.errors import mce_from_sums as mce_from_sums
from calibjax.metrics.errors import rmsce_from_sums as rmsce_from_sums
from calibjax.metrics.errors import root_mean_square_calibration_error as root_mean_square_calibration_error
from calibjax.metrics.intervals import ErrorInterval as ErrorInterval
from calibjax.metrics.intervals import Interval as Interval
from calibjax.metrics.intervals import PairedDifference as PairedDifference
from calibjax.metrics.intervals import error_comparison as error_comparison
from calibjax.metrics.intervals import error_interval as error_interval
from calibjax.metrics.intervals import holm as holm
from calibjax.metrics.local import grouping_loss as grouping_loss
from calibjax.metrics.local import local_calibration_error as local_calibration_error
from calibjax.metrics.ranking import aurc as aurc
from calibjax.metrics.ranking import auroc as auroc
from calibjax.metrics.ranking import excess_aurc as excess_aurc
from calibjax.metrics.scores import brier_score as brier_score
from calibjax.metrics.scores import capability_error as capability_error
from calibjax.metrics.scores import negative_log_likelihood as negative_log_likelihood
from calibjax.metrics.scores import success_fraction as success_fraction
from calibjax.metrics.scores import summarise as summarise
from calibjax.metrics.sums import CalibrationSums as CalibrationSums
from calibjax.metrics.sums import bin_index as bin_index
from calibjax.metrics.sums import calibration_sums as calibration_sums
from calibjax.metrics.sums import equal_mass_index as equal_mass_index
from calibjax.metrics.sums import total_sums as total_sums
from calibjax.runtime.options import Closed as Closed
