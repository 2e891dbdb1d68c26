"""Calibration errors, proper scores and ranking metrics of confidences, with bootstrap intervals and comparisons.

Confidence is the probability of the most likely token, or of the answer given; correctness is 0, 1, or the fraction of
samples that were right. A metric is one call on arrays, `metric(confidence, correct, *, where=None, ...) -> scalar`; it
is pure, jitted, and NaN where no point counts. Metrics that follow from `CalibrationSums` are also computed batch by
batch. `docs/metrics.md` sets definitions and conventions beside those of other libraries.
"""

from calibjax.metrics.binless import (
    ReliabilityCurve,
    curve_from_sums,
    grid_sums,
    ks_calibration_error,
    reliability_curve,
    smooth_ece,
)
from calibjax.metrics.bootstrap import (
    bootstrap_interval,
    compare_resamples,
    metric_interval,
    paired_comparison,
    percentile_interval,
    pooled_sums,
    resample_metric,
    resample_sums,
)
from calibjax.metrics.capability import capability_error, pass_at_k, predicted_pass_at_k, success_fraction
from calibjax.metrics.errors import (
    Norm,
    adaptive_calibration_error,
    bias_from_sums,
    calibration_bias,
    classwise_calibration_error,
    debiased_calibration_error,
    debiased_from_sums,
    ece_from_sums,
    expected_calibration_error,
    groupwise_calibration_error,
    maximum_calibration_error,
    mce_from_sums,
    rmsce_from_sums,
    root_mean_square_calibration_error,
)
from calibjax.metrics.intervals import Comparison, ErrorInterval, Interval, error_comparison, error_interval, holm
from calibjax.metrics.local import GroupingParts, grouping_loss, grouping_parts, local_calibration_error
from calibjax.metrics.ranking import aurc, auroc, ause, excess_aurc, prediction_rejection_ratio
from calibjax.metrics.scores import (
    BrierParts,
    ConfidenceParts,
    brier_parts,
    brier_score,
    confidence_parts,
    negative_log_likelihood,
    summarise,
)
from calibjax.metrics.sums import CalibrationSums, Closed, bin_index, calibration_sums, equal_mass_index, total

__all__ = [
    "BrierParts",
    "CalibrationSums",
    "Closed",
    "Comparison",
    "ConfidenceParts",
    "ErrorInterval",
    "GroupingParts",
    "Interval",
    "Norm",
    "ReliabilityCurve",
    "adaptive_calibration_error",
    "aurc",
    "auroc",
    "ause",
    "bias_from_sums",
    "bin_index",
    "bootstrap_interval",
    "brier_parts",
    "brier_score",
    "calibration_bias",
    "calibration_sums",
    "capability_error",
    "classwise_calibration_error",
    "compare_resamples",
    "confidence_parts",
    "curve_from_sums",
    "debiased_calibration_error",
    "debiased_from_sums",
    "ece_from_sums",
    "equal_mass_index",
    "error_comparison",
    "error_interval",
    "excess_aurc",
    "expected_calibration_error",
    "grid_sums",
    "grouping_loss",
    "grouping_parts",
    "groupwise_calibration_error",
    "holm",
    "ks_calibration_error",
    "local_calibration_error",
    "maximum_calibration_error",
    "mce_from_sums",
    "metric_interval",
    "negative_log_likelihood",
    "paired_comparison",
    "pass_at_k",
    "percentile_interval",
    "pooled_sums",
    "predicted_pass_at_k",
    "prediction_rejection_ratio",
    "reliability_curve",
    "resample_metric",
    "resample_sums",
    "rmsce_from_sums",
    "root_mean_square_calibration_error",
    "smooth_ece",
    "success_fraction",
    "summarise",
    "total",
]
