"""Losses per token as functions of `VocabStats`; the long-horizon objective and the bounds are modules of their own."""

from calibjax.losses.per_token import (
    REQUIRED_STATISTICS,
    brier,
    confidence_penalty,
    cross_entropy,
    focal,
    focal_calibration,
    label_smoothing,
    sample_dependent_focal,
    selective_smoothing,
    top_k_smoothing,
    top_label,
    valid_tokens,
    z_loss,
)

__all__ = [
    "REQUIRED_STATISTICS",
    "brier",
    "confidence_penalty",
    "cross_entropy",
    "focal",
    "focal_calibration",
    "label_smoothing",
    "sample_dependent_focal",
    "selective_smoothing",
    "top_k_smoothing",
    "top_label",
    "valid_tokens",
    "z_loss",
]
