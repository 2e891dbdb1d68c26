"""Multicalibration: calibrated at every level of confidence within every category, not only over all predictions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.recalibrate.contract import FitReport
from calibjax.runtime.arrays import AnyArray

EVERYONE = -1  # the category of a patch that applies to every prediction
_MAX_PATCHES = 500
_DEVIATIONS = 2.0  # a cell is patched where its residual exceeds this many standard deviations of its sum


class PatchState(NamedTuple):
    """Corrections in their order.

    Where the category is `category` (or `EVERYONE`) and the confidence so far lies in bin `bin` of `bins`, `shift` is
    added and the sum kept in [`margin`, 1 − `margin`].
    """

    category: np.ndarray
    bin: np.ndarray
    shift: np.ndarray
    bins: np.ndarray
    margin: np.ndarray
    report: FitReport


def _bin(confidence: AnyArray, bins: int | AnyArray) -> AnyArray:
    """floor(c · bins), with 1 in the last bin; a numpy array for numpy arrays."""
    return (confidence * bins).astype(np.int32).clip(0, bins - 1)


def fit(confidence: np.ndarray, correct: np.ndarray, categories: np.ndarray, *, bins: int = 10) -> PatchState:
    """Patches the worst cell until none is worse than chance (Hébert-Johnson et al. 2018, arXiv 1711.08513, section 3).

    A cell is one of `bins` bins of the present confidence q within a category, or within all predictions. In each step
    the cell with the largest squared residual, (Σ (correct − q))²/n, among those with |Σ (correct − q)| above 2
    √Σ q(1 − q), is shifted by its mean residual. Each step lowers the Brier score by that residual over N, so that the
    steps end; the test of chance replaces the paper's tolerance. No patch leads beyond 1/(N + 2): log loss is finite.

    A prediction whose category was not in the fit gets only the patches that apply to all predictions. `bins`: number
    of bins of equal width. `report.loss`: the Brier score; `report.iterations`: number of patches.
    """
    names, category_of = np.unique(categories, return_inverse=True)
    everyone = len(names)  # the number of the category that all predictions are in, too
    cells = (everyone + 1) * bins
    q = confidence.copy()
    patches = []
    margin = np.float32(1 / (len(confidence) + 2))
    while len(patches) < _MAX_PATCHES:
        # Each prediction is in two cells: one of its category, and one of all predictions.
        level = np.asarray(_bin(q, bins))
        cell = np.concatenate([category_of * bins + level, everyone * bins + level])
        expected = np.concatenate([q, q]).astype(np.float64)
        observed = np.concatenate([correct, correct])
        count = np.bincount(cell, minlength=cells)
        residual = np.bincount(cell, weights=observed - expected, minlength=cells)
        deviation = np.sqrt(np.bincount(cell, weights=expected * (1 - expected), minlength=cells))
        is_worse_than_chance = np.abs(residual) > np.maximum(_DEVIATIONS * deviation, 1e-3)
        gain = np.where(is_worse_than_chance, residual**2 / np.maximum(count, 1), 0)
        worst = int(np.argmax(gain))
        if gain[worst] <= 0:
            break
        category, bin_ = divmod(worst, bins)
        shift = np.float32(residual[worst] / count[worst])
        in_cell = (level == bin_) & ((category == everyone) | (category_of == category))
        shifted = np.clip(q + shift, margin, 1 - margin)
        q = np.where(in_cell, shifted, q).astype(np.float32)
        patches.append((EVERYONE if category == everyone else names[category], bin_, shift))
    loss = float(np.mean(np.square(q.astype(np.float64) - correct)))
    category, bin_, shift = zip(*patches, strict=True) if patches else ((), (), ())
    return PatchState(
        category=np.array(category, np.int32),
        bin=np.array(bin_, np.int32),
        shift=np.array(shift, np.float32),
        bins=np.asarray(bins, np.int32),
        margin=np.asarray(margin),
        report=FitReport.of(loss, len(patches) < _MAX_PATCHES, len(patches)),
    )


def apply(state: PatchState, confidence: Float[Array, " N"], categories: Int[AnyArray, " N"]) -> Float[Array, " N"]:
    categories = jnp.asarray(categories)

    def patch(q: Array, correction: tuple[Array, Array, Array]) -> tuple[Array, None]:
        category, bin_, shift = correction
        in_cell = (_bin(q, state.bins) == bin_) & ((category == EVERYONE) | (categories == category))
        shifted = jnp.clip(q + shift, state.margin, 1 - state.margin)
        return jnp.where(in_cell, shifted, q), None

    patches = jnp.asarray(state.category), jnp.asarray(state.bin), jnp.asarray(state.shift)
    return jax.lax.scan(patch, confidence, patches)[0]
