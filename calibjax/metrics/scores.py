"""Proper scores of a confidence, and the row of a table: Brier score and its parts, negative log-likelihood."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlog1py, xlogy

from calibjax.metrics._points import divisor, metric, points
from calibjax.metrics.errors import bias_from_sums, ece_from_sums, mce_from_sums, rmsce_from_sums
from calibjax.metrics.sums import CalibrationSums, SumState, total


@metric()
def brier_score(confidence, correct, *, where=None):
    """Brier score of the top prediction, mean (confidence − correctness)²; float32 scalar in [0, 1], NaN for no point.

    Arguments as `expected_calibration_error`'s.
    """
    data = points(confidence, correct, where)
    return data.mean(jnp.square(data.confidence - data.correct))


@metric()
def negative_log_likelihood(confidence, correct, *, where=None):
    """Mean −[y log c + (1 − y) log(1 − c)] of correctness y under confidence c, nats: the log loss of being right.

    Infinite where a confidence of exactly 0 or 1 (in float32) was wrong. The likelihood of the tokens themselves is
    the `nll` of `calibration_sums(..., log_prob=...)`. Arguments as `expected_calibration_error`'s.

    Example:
        >>> import jax.numpy as jnp
        >>> print(f"{negative_log_likelihood(jnp.array([0.5, 0.5]), jnp.array([1, 0])):.4f}")
        0.6931
    """
    data = points(confidence, correct, where)
    return data.mean(-xlogy(data.correct, data.confidence) - xlog1py(1 - data.correct, -data.confidence))


class BrierParts(NamedTuple):
    """brier = reliability − resolution + uncertainty + within, each a scalar.

    Attributes:
        reliability: Σ_b (n_b/n) (conf_b − acc_b)²: miscalibration, lower is better.
        resolution: Σ_b (n_b/n) (acc_b − acc)²: how far the bins' accuracies spread, higher is better.
        uncertainty: variance of correctness, whatever the confidence; acc (1 − acc) where it is 0 or 1.
        within: what the spread of confidence inside bins adds; 0 where all of a bin are equal.
    """

    reliability: np.ndarray
    resolution: np.ndarray
    uncertainty: np.ndarray
    within: np.ndarray


def brier_parts(sums: CalibrationSums) -> BrierParts:
    """Murphy's (1973) decomposition of the Brier score, with the remainder that bins leave (Stephenson et al. 2008).

    Args:
        sums: with every point in a bin (`closed` "right" or "left"); more bins leave a smaller remainder.

    Raises:
        ValueError: where a point is in no bin.

    Example:
        >>> import jax.numpy as jnp
        >>> from calibjax.metrics import calibration_sums
        >>> sums = calibration_sums(jnp.array([0.75, 0.75, 0.25, 0.25]), jnp.array([1, 0, 0, 0]), bins=2)
        >>> [float(part) for part in brier_parts(sums)]
        [0.0625, 0.0625, 0.1875, 0.0]
    """
    sums = CalibrationSums(*(np.asarray(x, np.float64) for x in sums))
    if sums.dropped.any():
        raise ValueError('brier_parts: some points are in no bin; use sums with closed="right" or "left".')
    points, _, correct, squared = sums.whole()
    share, safe = sums.count / points[..., None], divisor(sums.count)
    accuracy = correct / points
    spread = np.square(sums.correct / safe - accuracy[..., None])
    reliability = np.square(rmsce_from_sums(sums))
    resolution = (share * spread).sum(-1)
    uncertainty = squared / points - np.square(accuracy)
    return BrierParts(
        reliability, resolution, uncertainty, sums.brier / points - (reliability - resolution + uncertainty)
    )


def summarise(sums: CalibrationSums | SumState) -> dict[str, float]:
    """A row of a table: nll, brier, accuracy, confidence, bias, ece, mce, rmsce. ValueError where no point counts.

    `nll` is NaN where some points came without `log_prob`.
    """
    whole = total(sums)
    count, confidence, correct, _ = whole.whole()
    if not count:
        raise ValueError("no token counts: nothing to summarise.")
    return {
        "nll": float(whole.nll / count),
        "brier": float(whole.brier / count),
        "accuracy": float(correct / count),
        "confidence": float(confidence / count),
        "bias": float(bias_from_sums(whole)),
        "ece": float(ece_from_sums(whole)),
        "mce": float(mce_from_sums(whole)),
        "rmsce": float(rmsce_from_sums(whole)),
    }


def compute(state: SumState) -> dict[str, float]:
    """The figures of a stream of batches, in float64 on the host: what `summarise` returns.

    Example:
        >>> import jax.numpy as jnp
        >>> from calibjax.metrics import init, update
        >>> state = update(init(), jnp.array([0.75, 0.75]), jnp.array([1, 0]))
        >>> compute(state)["ece"]
        0.25
    """
    return summarise(state)
