"""Feature clipping: hidden states are clipped before the unembedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import FitReport, log_probs_of
from calibjax.runtime.options import NonNegative


class ClippingState(NamedTuple):
    """c of clip(h, −c, c), float32 scalar."""

    limit: np.ndarray
    report: FitReport


@jax.jit
def _scores(limit: Array, features: Array, unembedding: Array, labels: Array) -> tuple[Array, Array]:
    from calibjax.kernels import vocab_stats  # imports Pallas, which the other methods do not need

    stats = vocab_stats(
        jnp.clip(features, -limit, limit), unembedding, labels, statistics=("log_normalizer", "target_logit", "correct")
    )
    return -jnp.mean(stats.log_prob()), jnp.mean(stats.require("correct").astype(jnp.float32))


def fit_clipping(
    features: Float[np.ndarray, "N D"],
    unembedding: Float[np.ndarray, "K D"],
    labels: Int[np.ndarray, " N"],
    *,
    accuracy_loss: NonNegative = 0.005,
) -> ClippingState:
    """softmax(clip(h, −c, c) Wᵀ) with the c of least negative log-likelihood (Tao et al. 2025, arXiv 2410.19796).

    c is searched among 48 values in geometric steps, from the largest |h| down to where nearly every entry is cut off.
    Clipping can change which class is the most likely: a value that costs more than `accuracy_loss` of the accuracy is
    left out. The largest |h| clips nothing, so one value is always left. The logits are never held (`vocab_stats`).
    `report.converged` is False where the smallest c tried was the best.
    """
    sizes = np.abs(features)
    largest = float(sizes.max())
    smallest = max(float(np.quantile(sizes[:4096], 0.01)) / 10, 1e-3 * largest)
    if largest == 0.0:  # nothing to clip
        limits = np.ones(1, np.float32)
    else:
        limits = np.geomspace(largest, smallest, 48).astype(np.float32)
        limits[0] = largest
    arrays = [jnp.asarray(x) for x in (features, unembedding, labels)]
    scores = [_scores(jnp.asarray(limit), *arrays) for limit in limits]
    nll, accuracy = np.asarray(jax.device_get(scores), np.float64).T
    best = int(np.argmin(np.where(accuracy >= accuracy[0] - accuracy_loss, nll, np.inf)))
    converged = len(limits) == 1 or best < len(limits) - 1
    return ClippingState(np.asarray(limits[best]), FitReport.of(nll[best], converged, len(limits)))


def apply_clipping(
    state: ClippingState, features: Float[Array, "N D"], unembedding: Float[Array, "K D"]
) -> Float[Array, "N K"]:
    """log softmax(clip(h, −c, c) Wᵀ)."""
    features = jnp.clip(features, -state.limit, state.limit)
    return log_probs_of(jnp.matmul(features, unembedding.T, precision="highest"))
