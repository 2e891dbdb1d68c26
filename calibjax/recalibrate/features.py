"""Methods of hidden states: feature clipping before the unembedding, and local recalibration among like states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import FitReport, log_probs_of
from calibjax.runtime.options import NonNegative, Positive

_CANDIDATES = 48


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
        limits = np.geomspace(largest, smallest, _CANDIDATES).astype(np.float32)
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
    return log_probs_of(jnp.matmul(features, unembedding.T, precision=jax.lax.Precision.HIGHEST))


class LoreState(NamedTuple):
    """The calibration set itself: features over their deviation `[N, D]`, bins and correctness `[N]`; γ and edges."""

    features: np.ndarray
    bin: np.ndarray
    correct: np.ndarray
    deviation: np.ndarray
    bandwidth: np.ndarray
    edges: np.ndarray
    report: FitReport


def fit_lore(
    confidence: Float[np.ndarray, " N"],
    correct: Float[np.ndarray, " N"],
    features: Float[np.ndarray, "N D"],
    *,
    bandwidth: Positive = 0.2,
    bins: int = 15,
) -> LoreState:
    """Local recalibration, LoRe (Luo et al. 2022, section 4): a weighted fraction of right predictions in the same bin.

    q(x) = Σ_i k(x, x_i) y_i / Σ_i k(x, x_i) over the calibration predictions i whose confidence lies in the bin of x's,
    with the Laplacian kernel k(x, x') = exp(−‖φ(x) − φ(x')‖₁ / (D γ)), γ the `bandwidth`. Features φ are divided by
    their standard deviation, so that γ means the same for every model; γ → ∞ is histogram binning with `bins` of equal
    width. Nothing is fitted: each prediction is compared with the whole calibration set: N up to about ten thousand.
    """
    deviation = features.std(axis=0, dtype=np.float64)
    deviation = np.where(deviation > 0, deviation, 1.0).astype(np.float32)
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)
    return LoreState(
        features=features / deviation[None, :],
        bin=np.searchsorted(edges, confidence).astype(np.int32),
        correct=correct,
        deviation=deviation,
        bandwidth=np.asarray(bandwidth, np.float32),
        edges=edges,
        report=FitReport.of(),
    )


def apply_lore(state: LoreState, confidence: Float[Array, " N"], features: Float[Array, "N D"]) -> Float[Array, " N"]:
    """q(x) of every prediction; its own confidence where no calibration prediction lies in its bin."""
    features = features / state.deviation[None, :]
    bins = jnp.searchsorted(jnp.asarray(state.edges), confidence)

    def recalibrate(row: tuple[Array, Array, Array]) -> Array:
        x, bin_, c = row
        distance = jnp.mean(jnp.abs(jnp.asarray(state.features) - x[None, :]), axis=1)
        # Relative to the nearest: far from all of them the weights would vanish together.
        score = jnp.where(state.bin == bin_, -distance / state.bandwidth, -jnp.inf)
        weight = jnp.exp(score - jnp.maximum(jnp.max(score), jnp.finfo(jnp.float32).min))
        total = jnp.sum(weight)
        mean = jnp.sum(weight * state.correct) / jnp.maximum(total, 1e-30)
        return jnp.where((total > 0) & ~jnp.isnan(c), mean, c)

    return jax.lax.map(recalibrate, (features, bins, confidence))
