"""Losses per token and their registry; the long-horizon objective and the bounds are modules of their own."""

from calibjax.losses.per_token import brier as brier
from calibjax.losses.per_token import confidence_penalty as confidence_penalty
from calibjax.losses.per_token import cross_entropy as cross_entropy
from calibjax.losses.per_token import focal as focal
from calibjax.losses.per_token import focal_calibration as focal_calibration
from calibjax.losses.per_token import joint as joint
from calibjax.losses.per_token import label_smoothing as label_smoothing
from calibjax.losses.per_token import sample_dependent_focal as sample_dependent_focal
from calibjax.losses.per_token import selective_smoothing as selective_smoothing
from calibjax.losses.per_token import top_k_smoothing as top_k_smoothing
from calibjax.losses.per_token import top_label as top_label
from calibjax.losses.per_token import z_loss as z_loss
from calibjax.losses.registry import LOSSES as LOSSES
from calibjax.losses.registry import Hyperparameter as Hyperparameter
from calibjax.losses.registry import Loss as Loss
from calibjax.losses.registry import curve_loss as curve_loss
from calibjax.losses.registry import linear_loss as linear_loss
