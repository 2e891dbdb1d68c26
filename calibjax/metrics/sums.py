"""Bins of confidences, and sums over points that most metrics follow from.

`calibration_sums` is a pure JAX function that gives the float32 sums of a batch. Sums of disjoint points add up field
by field; `total_sums` adds them in float64 on the host, so that many batches lose no digits.
"""

import math
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.metrics._points import check, weights_of
from calibjax.runtime.arrays import AnyArray, plain_array
from calibjax.runtime.options import Closed

_CHUNK = 2**8  # points that are added in plain float32; the sums of chunks are added in two floats
_FEW_EDGES = 32  # with more, XLA for CPUs no longer unrolls the comparisons: a hundred times slower


def _search(edges: Array, values: Array, side: str) -> Array:
    """`searchsorted`: compares few edges in one fused pass, which is fastest, and searches many by bisection."""
    method = "compare_all" if edges.size <= _FEW_EDGES else "scan"
    return jnp.searchsorted(edges, values, side=side, method=method).astype(jnp.int32)


def bin_index(confidence: Float[AnyArray, "..."], bins: int, closed: Closed = "right") -> Int[Array, "..."]:
    """Equal-width bin index of each confidence in [0, 1].

    | `closed` | bins | a confidence on an inner edge | 0 and 1 |
    |---|---|---|---|
    | "right" | (lo, hi], the first [0, hi] (Guo et al. 2017, section 2) | lower bin | first, last bin |
    | "left" | [lo, hi), the last [lo, 1] | upper bin | first, last bin |
    | "none" | (lo, hi) | no bin | no bin |

    Args:
        confidence: in [0, 1], any shape and float dtype; not checked: NaN is in the last bin.
        bins: number of bins >= 1; the edges are the float32 numbers k/bins.
        closed: edge convention; ValueError for another one, as for no bin.

    Returns:
        int32, same shape: 0 to bins − 1, or `bins` for a confidence in no bin.
    """
    if bins < 1 or bins % 1:
        raise ValueError(f"bins: expected a whole number, at least 1, got {bins}.")
    if closed not in get_args(Closed):
        raise ValueError(f'closed: expected "right", "left" or "none", got {closed!r}.')
    # Confidences are compared with float32 edges because floor(confidence·bins) misplaces some of them. NumPy computes
    # the edges because XLA may multiply by 1/bins, and 9 · (1/10) is not 9/10 in float32.
    edges = np.arange(bins + 1, dtype=np.float32) / np.float32(bins)
    confidence = jnp.asarray(plain_array(confidence)).astype(jnp.float32)
    confidence = jnp.clip(confidence, 0.0, 1.0)  # rounding beyond an end is that end
    side = "right" if closed == "left" else "left"
    index = _search(jnp.asarray(edges[1:-1]), confidence, side)
    if closed != "none":
        return index
    edges_below = _search(jnp.asarray(edges), confidence, "left")
    edges_up_to = _search(jnp.asarray(edges), confidence, "right")
    return jnp.where(edges_below < edges_up_to, bins, index)


def equal_mass_index(confidence: Float[AnyArray, " N"], weight: Float[AnyArray, " N"], bins: int) -> Int[Array, " N"]:
    """Equal-mass bin index, int32 `[N]`: bins hold equal numbers of points, as far as ties allow.

    The n sorted points are cut into `bins` runs; the first n mod bins runs have one point more. Equal confidences stay
    together in the lower run, so the bins do not depend on the order of the points. Confidences are finite, also where
    the weight is 0. Weights are whole numbers >= 0: how often each point counts.
    """
    if bins < 1 or bins % 1:
        raise ValueError(f"bins: expected a whole number, at least 1, got {bins}.")
    confidence, weight = (jnp.asarray(plain_array(x)) for x in (confidence, weight))
    weight = weight.astype(jnp.float32)
    order = jnp.argsort(confidence)
    below = jnp.cumsum(weight[order])
    n = below[-1]
    per_run = jnp.floor(n / bins)
    k = jnp.arange(1, bins, dtype=jnp.float32)
    last = k * per_run + jnp.minimum(k, n - per_run * bins)  # points in the first k runs: 3, 5 of 7 in 3 bins
    # The last confidence of run k is the first whose cumulative weight reaches `last`.
    at = _search(below, last, "left")
    edges = confidence[order][jnp.minimum(at, len(order) - 1)]
    return _search(edges, confidence, "left")


class CalibrationSums(NamedTuple):
    """Sums over points (tokens, answers); leading axes `[...]` are separate groups, such as sequences.

    Attributes:
        count: `[..., bins]`, number (or weight) of the points in each confidence bin.
        confidence: `[..., bins]`, Σ confidence.
        correct: `[..., bins]`, Σ correctness.
        correct_squared: `[..., bins]`, Σ correctness²; equals `correct` if correctness is 0 or 1.
        dropped: `[..., 4]`, the four sums above over points in no bin (on an edge, with `closed="none"`).
        brier: `[...]`, Σ (confidence − correctness)².
        nll: `[...]`, Σ −log p(target), nats; NaN if a point that counts has no log-probability. `pooled_sums` without
            log-probabilities has here the log loss of correctness, Σ −y log c − (1 − y) log(1 − c).
    """

    count: AnyArray
    confidence: AnyArray
    correct: AnyArray
    correct_squared: AnyArray
    dropped: AnyArray
    brier: AnyArray
    nll: AnyArray

    @property
    def points(self) -> Any:
        """The number (or weight) of all points, including those in no bin; `[...]`."""
        return self.count.sum(-1) + self.dropped[..., 0]

    def totals(self) -> tuple[Any, ...]:
        """Count, Σ confidence, Σ correctness, Σ correctness² of all points, including those in no bin; `[...]` each."""
        fields = (self.count, self.confidence, self.correct, self.correct_squared)
        return tuple(x.sum(-1) + self.dropped[..., i] for i, x in enumerate(fields))


def calibration_sums(
    confidence: Float[AnyArray, "*G N"],
    correct: AnyArray,
    *,
    log_prob: Float[AnyArray, "*G N"] | None = None,
    bins: int = 15,
    closed: Closed = "right",
    where: Bool[AnyArray, "*G N"] | AnyArray | None = None,
) -> CalibrationSums:
    """Float32 sums over the last axis; leading axes are groups. Raises ValueError as `expected_calibration_error`.

    Args:
        confidence: `[..., N]`, in [0, 1].
        correct: `[..., N]`, 0/1 or bool, or the fraction of correct samples in [0, 1].
        log_prob: `[..., N]`, log-probability of the target, nats. If None, `nll` is NaN.
        bins, closed: as in `bin_index`.
        where: `[..., N]`, False for points that do not count; or weights >= 0.
    """
    confidence, correct, log_prob, where = map(plain_array, (confidence, correct, log_prob, where))
    weight = weights_of(where, np.shape(confidence))
    check({"confidence": confidence, "correct": correct}, weight, rank=None)
    return sums_of_index(bin_index(confidence, bins, closed), confidence, correct, bins, weight, log_prob)


def sums_of_index(
    index: Int[AnyArray, "*G N"],
    confidence: Float[AnyArray, "*G N"],
    correct: AnyArray,
    bins: int,
    where=None,
    log_prob=None,
) -> CalibrationSums:
    """`calibration_sums` with the bin of each point given: 0 to bins − 1, or `bins` for none."""
    weight = weights_of(where, confidence.shape)
    log_prob = jnp.full(confidence.shape, jnp.nan) if log_prob is None else log_prob
    confidence, correct, log_prob = (jnp.asarray(x).astype(jnp.float32) for x in (confidence, correct, log_prob))
    arrays = (jnp.asarray(index), weight, confidence, correct, log_prob)
    groups, n = confidence.shape[:-1], confidence.shape[-1]
    chunk = max(64, _CHUNK // max(math.prod(groups), 1))
    if n <= chunk:
        return _chunk_sums(arrays, bins)
    padding = [(0, 0)] * len(groups) + [(0, -n % chunk)]  # weight 0
    in_chunks = (jnp.pad(x, padding).reshape(*groups, -1, chunk) for x in arrays)
    pieces = tuple(jnp.moveaxis(x, -2, 0) for x in in_chunks)

    def add(pairs, piece):
        """Adds a chunk to (high, low) pairs of float32 (Knuth's two-sum), so that no digits are lost over chunks."""
        sums = _chunk_sums(piece, bins)
        return [_two_sum(high, low, x) for (high, low), x in zip(pairs, sums, strict=True)], None

    shapes = jax.eval_shape(lambda pieces: _chunk_sums(tuple(x[0] for x in pieces), bins), pieces)
    zeros = [(jnp.zeros(x.shape, x.dtype),) * 2 for x in shapes]
    sums, _ = jax.lax.scan(add, zeros, pieces)
    return CalibrationSums(*(high for high, _ in sums))


def _two_sum(high: Any, low: Any, x: Any) -> tuple[Array, Array]:
    total = high + x
    added = total - high
    finite = jnp.isfinite(total)  # an infinite sum has no low part
    low = low + jnp.where(finite, (high - (total - added)) + (x - added), 0.0)
    high = total + low
    return high, jnp.where(finite, low - (high - total), 0.0)


def _chunk_sums(arrays: tuple[Array, ...], bins: int) -> CalibrationSums:
    """Sums per bin as one product with the members of the bins: a reduction for each is three times slower on CPU."""
    index, weight, confidence, correct, log_prob = arrays
    counts = weight > 0
    member = jax.nn.one_hot(index, bins + 1, dtype=jnp.float32, axis=-2)
    values = jnp.stack([jnp.ones_like(confidence), confidence, correct, jnp.square(correct)], axis=-1)
    values = jnp.where(counts[..., None], values * weight[..., None], 0.0)
    sums = jnp.matmul(member, values, precision="highest")  # [..., bins + 1, 4]
    return CalibrationSums(
        *jnp.moveaxis(sums[..., :bins, :], -1, 0),
        dropped=sums[..., bins, :],
        brier=jnp.sum(jnp.where(counts, weight * jnp.square(confidence - correct), 0.0), axis=-1),
        nll=-jnp.sum(jnp.where(counts, weight * log_prob, 0.0), axis=-1),
    )


def total_sums(sums: CalibrationSums) -> CalibrationSums:
    """Adds up all leading axes, in float64 on the host."""
    added = {}
    for name, value in sums._asdict().items():
        value = np.asarray(value, np.float64)
        bins = () if name in ("brier", "nll") else value.shape[-1:]
        added[name] = value.reshape(-1, *bins).sum(axis=0)
    return CalibrationSums(**added)
