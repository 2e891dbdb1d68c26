"""Feature clipping: hidden states cut off at ±c before the unembedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Method, Predictions, log_probs_of, select

_CANDIDATES = 48


class ClippingState(NamedTuple):
    """c of clip(h, −c, c), float32 scalar."""

    limit: np.ndarray
    report: FitReport


@jax.jit
def _scores(limit: Array, features: Array, unembedding: Array, labels: Array) -> tuple[Array, Array]:
    from calibjax.kernels import vocab_stats  # imports Pallas, which the other methods do not need

    stats = vocab_stats(
        jnp.clip(features, -limit, limit),
        unembedding,
        labels,
        statistics=("log_normalizer", "target_logit", "correct"),
    )
    return -jnp.mean(stats.log_prob()), jnp.mean(stats.require("correct").astype(jnp.float32))


def fit(data: Predictions, where: np.ndarray | None = None, *, accuracy_loss: float = 0.005) -> ClippingState:
    """softmax(clip(h, −c, c) Wᵀ) with the c of least negative log-likelihood (Tao et al. 2025, arXiv 2410.19796).

    c is searched among 48 values in geometric steps, from the largest |h| down to where nearly every entry is cut off.
    Only those count that cost no more than `accuracy_loss` of the accuracy, as the method can change which class is the
    most likely; the largest |h| clips nothing, so there is always one. The logits are never held (`vocab_stats`).

    Args:
        data: with `features`, `unembedding`, `labels`.
        accuracy_loss: fraction of the predictions, >= 0.

    Returns:
        `ClippingState`; `report.converged` is False where the smallest c tried was the best.
    """
    features, unembedding, labels = select(data, ("features", "unembedding", "labels"), where)
    sizes = np.abs(features)
    largest = float(sizes.max())
    smallest = max(float(np.quantile(sizes[:4096], 0.01)) / 10, 1e-3 * largest)
    if largest == 0.0:  # nothing to clip
        limits = np.ones(1, np.float32)
    else:
        limits = np.geomspace(largest, smallest, _CANDIDATES).astype(np.float32)
        limits[0] = largest
    features, unembedding, labels = map(jnp.asarray, (features, unembedding, labels))
    scores = [_scores(jnp.asarray(limit), features, unembedding, labels) for limit in limits]
    nll, accuracy = np.asarray(jax.device_get(scores), np.float64).T
    best = int(np.argmin(np.where(accuracy >= accuracy[0] - accuracy_loss, nll, np.inf)))
    return ClippingState(
        np.asarray(limits[best]), FitReport.of(nll[best], len(limits) == 1 or best < len(limits) - 1, len(limits))
    )


def apply(state: ClippingState, data: Predictions) -> Float[Array, "N K"]:
    """log softmax(clip(h, −c, c) Wᵀ)."""
    features = jnp.clip(jnp.asarray(data.features, jnp.float32), -state.limit, state.limit)
    unembedding = jnp.asarray(data.unembedding, jnp.float32)
    return log_probs_of(jnp.matmul(features, unembedding.T, precision=jax.lax.Precision.HIGHEST))


METHODS = {
    "feature_clipping": Method(fit, apply, ("features", "unembedding", "labels"), "Tao et al. 2025, arXiv 2410.19796"),
}
