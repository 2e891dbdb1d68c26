"""How far confidence is from the truth: sums that merge exactly, and the errors computed from them.

Confidence is the probability of the most likely token (or of the answer given), correctness whether it was right.
Equal-width bins over [0, 1]; a confidence exactly on an inner edge goes to the bin below it with `closed="right"`
(bins (lo, hi], the first one closed at 0 too: Guo et al. 2017, section 2) and to the bin above it with `closed="left"`
(bins [lo, hi), the last one closed at 1 too). All functions can be jitted with `bins` and `closed` static.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Closed = Literal["right", "left"]


class CalibrationSums(NamedTuple):
    """Sums over tokens from which every figure of a table follows. Sums of disjoint tokens add up field by field.

    Leading axes `[...]` are free: groups that are kept apart (windows, for a clustered bootstrap). Device sums are
    float32 and exact for up to 2^24 tokens a group; across groups and batches they are added in float64 on the host.

    Attributes:
        count: `[..., bins]`, tokens in each confidence bin.
        confidence: `[..., bins]`, Σ confidence.
        correct: `[..., bins]`, Σ correctness.
        brier: `[...]`, Σ (confidence − correctness)².
        nll: `[...]`, Σ −log p(target), nats.
    """

    count: Array | np.ndarray
    confidence: Array | np.ndarray
    correct: Array | np.ndarray
    brier: Array | np.ndarray
    nll: Array | np.ndarray


def bin_index(confidence: Float[Array, "..."], bins: int, closed: Closed = "right") -> Array:
    """The bin, 0 to bins − 1, of each confidence in [0, 1]; int32, same shape."""
    if closed not in ("right", "left"):
        raise ValueError(f'closed: expected "right" or "left", got {closed!r}.')
    # Edges are the float32 numbers k/bins, compared exactly: floor(confidence·bins) would misplace some of them.
    # Divided by numpy: XLA may multiply by 1/bins instead, and 9 · (1/10) is not 9/10 in float32.
    edges = jnp.asarray(np.arange(1, bins, dtype=np.float32) / np.float32(bins))
    return jnp.searchsorted(edges, confidence.astype(jnp.float32), side="left" if closed == "right" else "right")


def calibration_sums(
    confidence: Float[Array, "*G N"],
    correct: Array,
    *,
    log_prob: Float[Array, "*G N"] | None = None,
    bins: int = 15,
    closed: Closed = "right",
    where: Bool[Array, "*G N"] | None = None,
) -> CalibrationSums:
    """The sums of the last axis, groups (leading axes) apart.

    Args:
        confidence: in [0, 1], `[..., N]`.
        correct: 0/1 or bool, or the share of correct samples in [0, 1], `[..., N]`.
        log_prob: log-probability of the true target, nats, `[..., N]`; None leaves `nll` 0.
        bins: number of equal-width bins >= 1.
        closed: edge convention, "right" or "left".
        where: False for tokens that do not count.

    Returns:
        `CalibrationSums`, float32.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}.")
    confidence, correct = jnp.asarray(confidence), jnp.asarray(correct).astype(jnp.float32)
    where = jnp.ones(confidence.shape, bool) if where is None else jnp.broadcast_to(where, confidence.shape)
    member = jax.nn.one_hot(bin_index(confidence, bins, closed), bins, dtype=jnp.float32)
    member = jnp.where(where[..., None], member, 0.0)
    confidence = jnp.where(where, confidence.astype(jnp.float32), 0.0)
    correct = jnp.where(where, correct, 0.0)
    nll = jnp.zeros(confidence.shape[:-1], jnp.float32)
    if log_prob is not None:
        nll = -jnp.sum(jnp.where(where, log_prob, 0.0), axis=-1, dtype=jnp.float32)
    return CalibrationSums(
        count=jnp.sum(member, axis=-2),
        confidence=jnp.sum(member * confidence[..., None], axis=-2),
        correct=jnp.sum(member * correct[..., None], axis=-2),
        brier=jnp.sum(jnp.square(confidence - correct), axis=-1),
        nll=nll,
    )


def total(sums: CalibrationSums) -> CalibrationSums:
    """All groups together, in float64 on the host."""
    last = {"count": 1, "confidence": 1, "correct": 1, "brier": 0, "nll": 0}
    added = {}
    for name, value in sums._asdict().items():
        value = np.asarray(value, np.float64)
        added[name] = value.reshape(-1, *value.shape[value.ndim - last[name] :]).sum(axis=0)
    return CalibrationSums(**added)


def _gaps(sums: CalibrationSums):
    """Per bin: |mean confidence − accuracy| (0 for an empty bin), and its share of the tokens."""
    count = sums.count
    xp = np if isinstance(count, np.ndarray) else jnp
    safe = xp.maximum(count, 1)
    gap = xp.abs(sums.confidence - sums.correct) / safe
    share = count / xp.maximum(count.sum(axis=-1, keepdims=True), 1)
    return xp, gap, share


def ece_from_sums(sums: CalibrationSums):
    """Expected calibration error Σ_b (n_b/n) |conf_b − acc_b| over the last axis; shape `[...]`, in [0, 1]."""
    _, gap, share = _gaps(sums)
    return (gap * share).sum(axis=-1)


def mce_from_sums(sums: CalibrationSums):
    """Maximum calibration error max_b |conf_b − acc_b| over non-empty bins; shape `[...]`, in [0, 1]."""
    _, gap, _ = _gaps(sums)
    return gap.max(axis=-1)


def rmsce_from_sums(sums: CalibrationSums):
    """Root-mean-square calibration error (Σ_b (n_b/n) (conf_b − acc_b)²)^½; shape `[...]`, in [0, 1]."""
    xp, gap, share = _gaps(sums)
    return xp.sqrt((gap * gap * share).sum(axis=-1))


def expected_calibration_error(confidence, correct, *, bins: int = 15, closed: Closed = "right", where=None):
    """Expected calibration error, Σ_b (n_b/n) |mean confidence_b − accuracy_b| (Guo et al. 2017, eq. 3).

    Args:
        confidence: `[N]` in [0, 1].
        correct: `[N]`, 0/1, bool, or shares in [0, 1].
        bins: equal-width bins.
        closed: which bin an inner edge belongs to, "right" (the one below) or "left" (the one above).
        where: `[N]` bool, False for tokens that do not count.

    Returns:
        float32 scalar in [0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> float(expected_calibration_error(jnp.array([0.75, 0.75]), jnp.array([1, 0]), bins=10))
        0.25
    """
    return ece_from_sums(calibration_sums(confidence, correct, bins=bins, closed=closed, where=where))


def maximum_calibration_error(confidence, correct, *, bins: int = 15, closed: Closed = "right", where=None):
    """Maximum calibration error, max_b |mean confidence_b − accuracy_b| over non-empty bins. Arguments as ECE's."""
    return mce_from_sums(calibration_sums(confidence, correct, bins=bins, closed=closed, where=where))


def root_mean_square_calibration_error(confidence, correct, *, bins: int = 15, closed: Closed = "right", where=None):
    """Root-mean-square calibration error, (Σ_b (n_b/n) (mean confidence_b − accuracy_b)²)^½. Arguments as ECE's."""
    return rmsce_from_sums(calibration_sums(confidence, correct, bins=bins, closed=closed, where=where))


def brier_score(confidence, correct, *, where=None):
    """Brier score of the top prediction, mean (confidence − correctness)²; float32 scalar in [0, 1]."""
    sums = calibration_sums(confidence, correct, bins=1, where=where)
    return sums.brier / jnp.maximum(sums.count[..., 0], 1)


def negative_log_likelihood(log_prob: Float[Array, " N"], *, where=None):
    """Mean −log p(target) in nats over the tokens that count. `log_prob` float, `[N]`."""
    where = jnp.ones(log_prob.shape, bool) if where is None else where
    return -jnp.sum(jnp.where(where, log_prob, 0.0), dtype=jnp.float32) / jnp.maximum(jnp.sum(where), 1)


def summarise(sums: CalibrationSums) -> dict[str, float]:
    """A row of a table: nll, brier, accuracy, confidence, ece, mce, rmsce. ValueError where no token counts."""
    whole = total(sums)
    tokens = whole.count.sum()
    if not tokens:
        raise ValueError("no token counts: nothing to summarise.")
    return {
        "nll": float(whole.nll / tokens),
        "brier": float(whole.brier / tokens),
        "accuracy": float(whole.correct.sum() / tokens),
        "confidence": float(whole.confidence.sum() / tokens),
        "ece": float(ece_from_sums(whole)),
        "mce": float(mce_from_sums(whole)),
        "rmsce": float(rmsce_from_sums(whole)),
    }


def bootstrap_interval(
    sums: CalibrationSums, statistic=ece_from_sums, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of the sums, resampling whole groups (clusters) with replacement.

    Tokens of one window are not independent, the windows nearly are: resampling groups keeps the interval honest.

    Args:
        sums: with one leading axis `[G]` of groups.
        statistic: function of `CalibrationSums` `[R, bins]` -> `[R]`.
        resamples: number of bootstrap samples.
        level: coverage in (0, 1).
        seed: of the generator.

    Returns:
        (low, high).
    """
    groups = np.asarray(sums.count).shape[0]
    rng = np.random.default_rng(seed)
    fields = {name: np.asarray(value, np.float64) for name, value in sums._asdict().items()}
    values, step = [], max(1, 2**24 // max(groups, 1))  # at most 128 MiB of draws at once
    for first in range(0, resamples, step):
        draws = rng.multinomial(groups, np.full(groups, 1.0 / groups), size=min(step, resamples - first))
        draws = draws.astype(np.float64)
        resampled = CalibrationSums(**{name: np.tensordot(draws, value, axes=(1, 0)) for name, value in fields.items()})
        values.append(np.asarray(statistic(resampled)))
    low, high = np.quantile(np.concatenate(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
