"""Sums over points that most metrics follow from.

`calibration_sums` is a pure JAX function that gives the float32 sums of a batch. Sums of disjoint points add up field
by field; `total` adds them in float64 on the host, so that many batches lose no digits.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.metrics.bins import Closed, bin_index
from calibjax.runtime.arrays import AnyArray

_CHUNK = 2**14
"""Most points that are added in plain float32. The sums of chunks are added in two floats."""


class CalibrationSums(NamedTuple):
    """Sums over points (tokens, answers). Sums of disjoint points add up field by field.

    Leading axes `[...]` are separate groups, such as the sequences of a clustered bootstrap.

    Attributes:
        count: `[..., bins]`, number (or weight) of the points in each confidence bin.
        confidence: `[..., bins]`, Σ confidence.
        correct: `[..., bins]`, Σ correctness.
        correct_squared: `[..., bins]`, Σ correctness²; equals `correct` if correctness is 0 or 1.
        dropped: `[..., 4]`, the four sums above over points in no bin (on an edge, with `closed="none"`).
        brier: `[...]`, Σ (confidence − correctness)².
        nll: `[...]`, Σ −log p(target), nats; NaN if a point that counts has no log-probability.
    """

    count: AnyArray
    confidence: AnyArray
    correct: AnyArray
    correct_squared: AnyArray
    dropped: AnyArray
    brier: AnyArray
    nll: AnyArray

    def whole(self) -> tuple[Any, Any, Any, Any]:
        """Count, Σ confidence, Σ correctness and Σ correctness² of all points, also those in no bin; `[...]` each."""
        fields = (self.count, self.confidence, self.correct, self.correct_squared)
        count, confidence, correct, squared = (x.sum(-1) + self.dropped[..., i] for i, x in enumerate(fields))
        return count, confidence, correct, squared


def calibration_sums(
    confidence: Float[AnyArray, "*G N"],
    correct: AnyArray,
    *,
    log_prob: Float[AnyArray, "*G N"] | None = None,
    bins: int = 15,
    closed: Closed = "right",
    where: Bool[AnyArray, "*G N"] | AnyArray | None = None,
) -> CalibrationSums:
    """Sums over the last axis; leading axes are separate groups.

    Args:
        confidence: in [0, 1], `[..., N]`.
        correct: 0/1 or bool, or the fraction of correct samples in [0, 1], `[..., N]`.
        log_prob: log-probability of the target, nats, `[..., N]`. None: unknown, `nll` is NaN.
        bins, closed: see `bin_index`.
        where: `[..., N]`, False for points that do not count; or weights >= 0.

    Returns:
        `CalibrationSums`, float32.

    Example:
        >>> import jax.numpy as jnp
        >>> batches = [calibration_sums(jnp.array([0.75, 0.25]), jnp.array([1, 0]), bins=4) for _ in range(3)]
        >>> print(total(CalibrationSums(*map(jnp.stack, zip(*batches)))).count)
        [3. 0. 3. 0.]
    """
    confidence = jnp.asarray(confidence)
    return sums_of_index(bin_index(confidence, bins, closed), confidence, correct, bins, where, log_prob)


def sums_of_index(
    index: Int[AnyArray, "*G N"],
    confidence: Float[AnyArray, "*G N"],
    correct: AnyArray,
    bins: int,
    where=None,
    log_prob=None,
) -> CalibrationSums:
    """`calibration_sums` with the bin of each point given: 0 to bins − 1, or `bins` for none."""
    weight = jnp.ones(confidence.shape, jnp.float32)
    if where is not None:
        weight = jnp.broadcast_to(jnp.asarray(where).astype(jnp.float32), confidence.shape)
    log_prob = jnp.full(confidence.shape, jnp.nan) if log_prob is None else log_prob
    confidence, correct, log_prob = (jnp.asarray(x).astype(jnp.float32) for x in (confidence, correct, log_prob))
    arrays = (jnp.asarray(index), weight, confidence, correct, log_prob)

    groups, n = confidence.shape[:-1], confidence.shape[-1]
    chunk = max(64, _CHUNK // max(math.prod(groups), 1))
    if n <= chunk:
        return _chunk_sums(arrays, bins)

    padding = [(0, 0)] * len(groups) + [(0, -n % chunk)]  # weight 0
    pieces = tuple(jnp.moveaxis(jnp.pad(x, padding).reshape(*groups, -1, chunk), -2, 0) for x in arrays)

    def add(pairs, piece):
        """Adds a chunk to (high, low) pairs of float32 (Knuth's two-sum), so that no digits are lost over chunks."""
        return [_two_sum(high, low, x) for (high, low), x in zip(pairs, _chunk_sums(piece, bins), strict=True)], None

    shapes = jax.eval_shape(lambda pieces: _chunk_sums(tuple(x[0] for x in pieces), bins), pieces)
    zeros = [(jnp.zeros(x.shape, x.dtype),) * 2 for x in shapes]
    return CalibrationSums(*(high for high, _ in jax.lax.scan(add, zeros, pieces)[0]))


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
    kinds = jnp.stack([jnp.ones_like(confidence), confidence, correct, jnp.square(correct)], axis=-1)
    kinds = jnp.where(counts[..., None], kinds * weight[..., None], 0.0)
    kinds = jnp.matmul(member, kinds, precision=jax.lax.Precision.HIGHEST)
    return CalibrationSums(
        *jnp.moveaxis(kinds[..., :bins, :], -1, 0),
        dropped=kinds[..., bins, :],
        brier=jnp.sum(jnp.where(counts, weight * jnp.square(confidence - correct), 0.0), axis=-1),
        nll=-jnp.sum(jnp.where(counts, weight * log_prob, 0.0), axis=-1),
    )


def total(sums: CalibrationSums) -> CalibrationSums:
    """Adds up all leading axes, in float64 on the host."""
    added = {}
    for name, value in sums._asdict().items():
        value = np.asarray(value, np.float64)
        bins = () if name in ("brier", "nll") else value.shape[-1:]
        added[name] = value.reshape(-1, *bins).sum(axis=0)
    return CalibrationSums(**added)
