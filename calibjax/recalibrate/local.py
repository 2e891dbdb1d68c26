"""LoRe: how often predictions of like confidence and like hidden state were right."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport, Method, Predictions, select


class LocalState(NamedTuple):
    """The calibration set itself: features over their deviation `[N, D]`, bins `[N]`, correctness `[N]`; γ, edges."""

    features: np.ndarray
    bin: np.ndarray
    correct: np.ndarray
    deviation: np.ndarray
    bandwidth: np.ndarray
    edges: np.ndarray
    report: FitReport


def fit(data: Predictions, where: np.ndarray | None = None, *, bandwidth: float = 0.2, bins: int = 15) -> LocalState:
    """Local recalibration, LoRe (Luo et al. 2022, section 4): a weighted fraction of right predictions in the same bin.

    q(x) = Σ_i k(x, x_i) y_i / Σ_i k(x, x_i) over the calibration predictions i whose confidence lies in the bin of x's,
    with the Laplacian kernel k(x, x') = exp(−‖φ(x) − φ(x')‖₁ / (D γ)). Features φ are divided by their standard
    deviation, so that γ means the same for every model; γ → ∞ is histogram binning. Nothing is fitted: the state is the
    calibration set, and every prediction is compared with all of it (N D operations each): keep N within some ten
    thousand.

    Args:
        data: with `confidence`, `correct`, `features`.
        bandwidth: γ > 0.
        bins: of equal width.

    Example:
        >>> confidence, correct = np.array([0.9] * 4), np.array([1, 1, 1, 0])
        >>> data = Predictions(confidence=confidence, correct=correct, features=np.zeros((4, 2)))
        >>> apply(fit(data), data).tolist()
        [0.75, 0.75, 0.75, 0.75]
    """
    confidence, correct, features = select(data, ("confidence", "correct", "features"), where)
    deviation = features.std(axis=0, dtype=np.float64)
    deviation = np.where(deviation > 0, deviation, 1.0).astype(np.float32)
    edges = np.arange(1, bins, dtype=np.float32) / np.float32(bins)
    return LocalState(
        features=features / deviation[None, :],
        bin=np.searchsorted(edges, confidence).astype(np.int32),
        correct=correct,
        deviation=deviation,
        bandwidth=np.asarray(bandwidth, np.float32),
        edges=edges,
        report=FitReport.of(),
    )


def apply(state: LocalState, data: Predictions) -> Float[Array, " N"]:
    """q(x) of every prediction; its own confidence where no calibration prediction lies in its bin."""
    confidence = jnp.asarray(data.confidence, jnp.float32)
    features = jnp.asarray(data.features, jnp.float32) / state.deviation[None, :]
    own_bin = jnp.searchsorted(jnp.asarray(state.edges), confidence)

    def one(row: tuple[Array, Array, Array]) -> Array:
        x, bin_, c = row
        distance = jnp.mean(jnp.abs(jnp.asarray(state.features) - x[None, :]), axis=1)
        # Relative to the nearest: far from all of them the weights would vanish together.
        score = jnp.where(state.bin == bin_, -distance / state.bandwidth, -jnp.inf)
        weight = jnp.exp(score - jnp.maximum(jnp.max(score), jnp.finfo(jnp.float32).min))
        total = jnp.sum(weight)
        return jnp.where((total > 0) & ~jnp.isnan(c), jnp.sum(weight * state.correct) / jnp.maximum(total, 1e-30), c)

    return jax.lax.map(one, (features, own_bin, confidence))


METHODS = {
    "lore": Method(fit, apply, ("confidence", "correct", "features"), "Luo et al. 2022, arXiv 2102.10809"),
}
