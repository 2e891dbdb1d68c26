"""Bin assignment: equal-width bins with each edge convention, and equal-mass bins."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.runtime.arrays import AnyArray

Closed = Literal["right", "left", "none"]


_FEW = 32  # edges: of more, XLA for CPUs no longer unrolls the comparisons, and takes a hundred times as long


def _search(edges: Array, values: Array, side: str) -> Array:
    """searchsorted: few edges are compared in one fused pass, which is fastest; among many it is a binary search."""
    method = "compare_all" if edges.size <= _FEW else "scan"
    return jnp.searchsorted(edges, values, side=side, method=method).astype(jnp.int32)


def bin_index(confidence: Float[AnyArray, "..."], bins: int, closed: Closed = "right") -> Int[Array, "..."]:
    """Equal-width bin index of each confidence in [0, 1].

    | `closed` | bins | a confidence on an inner edge | 0 and 1 |
    |---|---|---|---|
    | "right" | (lo, hi], the first [0, hi] (Guo et al. 2017, section 2) | lower bin | first, last bin |
    | "left" | [lo, hi), the last [lo, 1] | upper bin | first, last bin |
    | "none" | (lo, hi) | no bin | no bin |

    Args:
        confidence: in [0, 1], any shape and float dtype; edges are the float32 numbers k/bins.
        bins: number of bins >= 1 (ValueError for less).
        closed: edge convention (ValueError for another one).

    Returns:
        int32, same shape: 0 to bins − 1, or `bins` for a confidence in no bin.

    Example:
        >>> import jax.numpy as jnp
        >>> for closed in ("right", "left", "none"):
        ...     print(bin_index(jnp.array([0.0, 0.3, 0.5, 1.0]), 4, closed))
        [0 1 1 3]
        [0 1 2 3]
        [4 1 4 4]
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}.")
    if closed not in ("right", "left", "none"):
        raise ValueError(f'closed: expected "right", "left" or "none", got {closed!r}.')
    # Confidences are compared with float32 edges because floor(confidence·bins) misplaces some of them. NumPy computes
    # the edges because XLA may multiply by 1/bins, and 9 · (1/10) is not 9/10 in float32.
    edges = np.arange(bins + 1, dtype=np.float32) / np.float32(bins)
    confidence = jnp.asarray(confidence).astype(jnp.float32)
    side = "right" if closed == "left" else "left"
    index = _search(jnp.asarray(edges[1:-1]), confidence, side)
    if closed != "none":
        return index
    # `index` is the "right" bin; a confidence on an edge equals one of its two ends.
    ends = jnp.asarray(edges)
    return jnp.where((confidence == ends[index]) | (confidence == ends[index + 1]), bins, index)


def equal_mass_index(confidence: Float[AnyArray, " N"], weight: Float[AnyArray, " N"], bins: int) -> Int[Array, " N"]:
    """Equal-mass bin index, int32 `[N]`: bins hold equal numbers of points, as far as ties allow.

    The n sorted points are cut into `bins` runs; the first n mod bins runs have one point more. Equal confidences stay
    together in the lower run, so the bins do not depend on the order of the points. Confidences are finite, also at
    points of weight 0; weights are whole numbers >= 0, how often each point counts.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}.")
    confidence, weight = jnp.asarray(confidence), jnp.asarray(weight)
    order = jnp.argsort(confidence)
    below = jnp.cumsum(weight[order])
    n = below[-1]
    each = jnp.floor(n / bins)
    k = jnp.arange(1, bins, dtype=jnp.float32)
    last = k * each + jnp.minimum(k, n - each * bins)  # points in the first k runs
    # The last confidence of run k is the first whose cumulative weight reaches `last`.
    at = _search(below, last, "left")
    edges = confidence[order][jnp.minimum(at, len(order) - 1)]
    return _search(edges, confidence, "left")
