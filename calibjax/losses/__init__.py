"""Losses per token and their registry; the long-horizon objective and the bounds are modules of their own."""

from calibjax.losses.per_token import (
    brier,
    calibrated_reward,
    confidence_penalty,
    cross_entropy,
    focal,
    focal_calibration,
    joint,
    label_smoothing,
    sample_dependent_focal,
    selective_smoothing,
    top_k_smoothing,
    top_label,
    z_loss,
)
from calibjax.losses.registry import LOSSES, Hyperparameter, Loss, curve_loss, linear_loss

__all__ = [
    "LOSSES",
    "Hyperparameter",
    "Loss",
    "brier",
    "calibrated_reward",
    "confidence_penalty",
    "cross_entropy",
    "curve_loss",
    "focal",
    "focal_calibration",
    "joint",
    "label_smoothing",
    "linear_loss",
    "sample_dependent_focal",
    "selective_smoothing",
    "top_k_smoothing",
    "top_label",
    "z_loss",
]
