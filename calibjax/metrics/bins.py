"""Which bin a confidence belongs to: bins of equal width with every convention for their edges, and of equal mass."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Closed = Literal["right", "left", "none"]


def _search(edges: Array, values: Array, side: str) -> Array:
    """Few against many: comparing all is one fused pass."""
    return jnp.searchsorted(edges, values, side=side, method="compare_all").astype(jnp.int32)


def bin_index(confidence: Float[Array, "..."], bins: int, closed: Closed = "right") -> Int[Array, "..."]:
    """The equal-width bin of each confidence in [0, 1].

    | `closed` | bins | a confidence on an inner edge | 0 and 1 |
    |---|---|---|---|
    | "right" | (lo, hi], the first [0, hi] (Guo et al. 2017, section 2) | bin below | first, last bin |
    | "left" | [lo, hi), the last [lo, 1] | bin above | first, last bin |
    | "none" | (lo, hi) | no bin | no bin |

    Args:
        confidence: in [0, 1], any shape and float dtype; edges are the float32 numbers k/bins.
        bins: at least 1.
        closed: edge convention.

    Returns:
        int32, same shape: 0 to bins − 1, or `bins` for a confidence in no bin.

    Raises:
        ValueError: for a wrong `bins` or `closed`.

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
    # Compared exactly with the float32 numbers: floor(confidence·bins) would misplace some of them.
    # Divided by numpy: XLA may multiply by 1/bins instead, and 9 · (1/10) is not 9/10 in float32.
    edges = np.arange(bins + 1, dtype=np.float32) / np.float32(bins)
    confidence = confidence.astype(jnp.float32)
    side = "right" if closed == "left" else "left"
    index = _search(jnp.asarray(edges[1:-1]), confidence, side)
    if closed != "none":
        return index
    # A confidence on an edge k/bins is the upper or the lower end of the bin that "right" gives it.
    ends = jnp.asarray(edges)
    return jnp.where((confidence == ends[index]) | (confidence == ends[index + 1]), bins, index)


def equal_mass_index(confidence: Float[Array, " N"], weight: Float[Array, " N"], bins: int) -> Int[Array, " N"]:
    """The bin of each confidence where all bins hold as many points as ties allow.

    The n sorted points are cut into `bins` runs, the first n mod bins of them longer by one; equal confidences stay
    together, in the lower run (so the bins depend on the values alone, not on the order of the points).

    Args:
        confidence: finite float32, also at points that do not count.
        weight: how often each point counts, whole numbers; 0 for not at all.
        bins: at least 1.

    Returns:
        int32 `[N]`, 0 to bins − 1.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}.")
    order = jnp.argsort(confidence)
    below = jnp.cumsum(weight[order])
    n = below[-1]
    each = jnp.floor(n / bins)
    k = jnp.arange(1, bins, dtype=jnp.float32)
    last = k * each + jnp.minimum(k, n - each * bins)  # points in the first k runs
    # The last confidence of run k is the first whose cumulated weight reaches `last`.
    at = _search(below, last, "left")
    edges = confidence[order][jnp.minimum(at, len(order) - 1)]
    return _search(edges, confidence, "left")
