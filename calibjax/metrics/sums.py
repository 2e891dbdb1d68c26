"""The sums that most metrics follow from: of a batch, of a stream of batches, of everything.

`init`, `update` and `merge` are jitted or mapped like any other function and never recompile for batches of one shape;
`compute` (in `scores`) and `total` end on the host. A batch's sums are float32; those of a stream are kept as two
float32 numbers each (high and low part, Knuth's two-sum), so that counts stay exact up to 2^48 and nothing is lost
however many batches, devices or hosts are merged, in whatever order.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.metrics.bins import Closed, bin_index

_CHUNK = 2**16
"""Points added up in float32 at once: more are added in two floats."""


class CalibrationSums(NamedTuple):
    """Sums over points (tokens, answers). Sums of disjoint points add up field by field.

    Leading axes `[...]` are free: groups that are kept apart (sequences, for a clustered bootstrap).

    Attributes:
        count: `[..., bins]`, points in each confidence bin, or their weight.
        confidence: `[..., bins]`, Σ confidence.
        correct: `[..., bins]`, Σ correctness.
        correct_squared: `[..., bins]`, Σ correctness²; for 0/1 the same as `correct`.
        dropped: `[..., 4]`, the same four sums over points in no bin (with `closed="none"`, on an edge).
        brier: `[...]`, Σ (confidence − correctness)².
        nll: `[...]`, Σ −log p(target), nats; NaN where a point that counts came without log-probability.
    """

    count: Array | np.ndarray
    confidence: Array | np.ndarray
    correct: Array | np.ndarray
    correct_squared: Array | np.ndarray
    dropped: Array | np.ndarray
    brier: Array | np.ndarray
    nll: Array | np.ndarray

    def whole(self) -> tuple[Any, Any, Any, Any]:
        """Points, Σ confidence, Σ correctness and Σ correctness², `[...]` each, with those in no bin."""
        fields = (self.count, self.confidence, self.correct, self.correct_squared)
        count, confidence, correct, squared = (x.sum(-1) + self.dropped[..., i] for i, x in enumerate(fields))
        return count, confidence, correct, squared


_PER_BIN = ("count", "confidence", "correct", "correct_squared", "dropped")


class SumState(NamedTuple):
    """`CalibrationSums` in two floats: high + low, |low| at most half a unit in the last place of high."""

    high: CalibrationSums
    low: CalibrationSums


def init(bins: int = 15) -> SumState:
    """The sums of no points."""
    zero, scalar = jnp.zeros(bins), jnp.zeros(())
    sums = CalibrationSums(zero, zero, zero, zero, dropped=jnp.zeros(4), brier=scalar, nll=scalar)
    return SumState(sums, sums)


def merge(first: SumState, second: SumState) -> SumState:
    """The sums of the points of both. Commutative, and associative to 2^-48."""

    def add(a, a_low, b, b_low):
        total = a + b
        of_b = total - a
        finite = jnp.isfinite(total)  # an infinite sum has no low part
        lost = jnp.where(finite, (a - (total - of_b)) + (b - of_b), 0.0)
        low = a_low + b_low + lost
        high = total + low
        return high, jnp.where(finite, low - (high - total), 0.0)

    pairs = [add(*parts) for parts in zip(*first, *second, strict=True)]
    high, low = zip(*pairs, strict=True)
    return SumState(CalibrationSums(*high), CalibrationSums(*low))


def update(
    state: SumState,
    confidence: Float[Array, " N"],
    correct: Array,
    *,
    log_prob: Float[Array, " N"] | None = None,
    closed: Closed = "right",
    where: Array | None = None,
) -> SumState:
    """The state with the points of one more batch. Arguments as `calibration_sums`; the bins are those of the state.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> step = jax.jit(update, static_argnames="closed")
        >>> state = init(bins=10)
        >>> for _ in range(3):
        ...     state = step(state, jnp.array([0.75, 0.75]), jnp.array([1, 0]))
        >>> print(total(state).count)
        [0. 0. 0. 0. 0. 0. 0. 6. 0. 0.]
    """
    bins = state.high.count.shape[-1]
    return merge(state, _sums(confidence, correct, log_prob, bins, closed, where))


def calibration_sums(
    confidence: Float[Array, "*G N"],
    correct: Array,
    *,
    log_prob: Float[Array, "*G N"] | None = None,
    bins: int = 15,
    closed: Closed = "right",
    where: Bool[Array, "*G N"] | Array | None = None,
) -> CalibrationSums:
    """The sums of the last axis, groups (leading axes) apart.

    Args:
        confidence: in [0, 1], `[..., N]`.
        correct: 0/1 or bool, or the share of correct samples in [0, 1], `[..., N]`.
        log_prob: log-probability of the true target, nats, `[..., N]`; None: not known, and `nll` is NaN.
        bins: number of equal-width bins >= 1.
        closed: edge convention, "right", "left" or "none"; see `bin_index`.
        where: False for points that do not count; or the weight of each, >= 0.

    Returns:
        `CalibrationSums`, float32.
    """
    return _sums(confidence, correct, log_prob, bins, closed, where).high


def _sums(confidence, correct, log_prob, bins: int, closed: Closed, where) -> SumState:
    confidence = jnp.asarray(confidence)
    return sums_of_index(bin_index(confidence, bins, closed), confidence, correct, bins, where, log_prob)


def sums_of_index(
    index: Int[Array, "*G N"], confidence: Float[Array, "*G N"], correct: Array, bins: int, where=None, log_prob=None
) -> SumState:
    """The sums where the bin of each point is given: 0 to bins − 1, or `bins` for none."""
    weight = jnp.ones(confidence.shape, jnp.float32)
    if where is not None:
        weight = jnp.broadcast_to(jnp.asarray(where).astype(jnp.float32), confidence.shape)
    log_prob = jnp.full(confidence.shape, jnp.nan) if log_prob is None else log_prob
    confidence, correct, log_prob = (jnp.asarray(x).astype(jnp.float32) for x in (confidence, correct, log_prob))
    arrays = (index, weight, confidence, correct, log_prob)

    groups, n = confidence.shape[:-1], confidence.shape[-1]
    chunk = max(256, _CHUNK // max(math.prod(groups), 1))
    if n <= chunk:
        sums = _chunk_sums(arrays, bins)
        return SumState(sums, jax.tree.map(jnp.zeros_like, sums))

    padding = [(0, 0)] * len(groups) + [(0, -n % chunk)]  # weight 0
    pieces = tuple(jnp.moveaxis(jnp.pad(x, padding).reshape(*groups, -1, chunk), -2, 0) for x in arrays)

    def add(state: SumState, piece) -> tuple[SumState, None]:
        sums = _chunk_sums(piece, bins)
        return merge(state, SumState(sums, jax.tree.map(jnp.zeros_like, sums))), None

    shapes = jax.eval_shape(lambda pieces: _chunk_sums(tuple(x[0] for x in pieces), bins), pieces)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, SumState(zero, zero), pieces)[0]


def _chunk_sums(arrays: tuple[Array, ...], bins: int) -> CalibrationSums:
    index, weight, confidence, correct, log_prob = arrays
    counts = weight > 0
    member = jax.nn.one_hot(index, bins + 1, dtype=bool)

    def per_bin(value):
        value = jnp.where(counts, value * weight, 0.0)
        return jnp.sum(jnp.where(member, value[..., None], 0.0), axis=-2)

    kinds = [per_bin(x) for x in (jnp.ones_like(confidence), confidence, correct, jnp.square(correct))]
    count, confidences, corrects, squares = (x[..., :bins] for x in kinds)
    return CalibrationSums(
        count,
        confidences,
        corrects,
        squares,
        dropped=jnp.stack([x[..., bins] for x in kinds], axis=-1),
        brier=jnp.sum(jnp.where(counts, weight * jnp.square(confidence - correct), 0.0), axis=-1),
        nll=-jnp.sum(jnp.where(counts, weight * log_prob, 0.0), axis=-1),
    )


def total(sums: CalibrationSums | SumState) -> CalibrationSums:
    """All groups together, in float64 on the host."""
    if isinstance(sums, SumState):
        high, low = total(sums.high), total(sums.low)
        return CalibrationSums(*(a + b for a, b in zip(high, low, strict=True)))
    added = {}
    for name, value in sums._asdict().items():
        value = np.asarray(value, np.float64)
        kept = value.shape[-1:] if name in _PER_BIN else ()
        added[name] = value.reshape(-1, *kept).sum(axis=0)
    return CalibrationSums(**added)
