"""Intervals of binned calibration errors (ECE, RMSCE, MCE), which are biased upwards by few points a bin.

A resample adds the bias of the estimate once more, so a percentile interval may lie above the error itself, and above
the estimate. Here an interval holds the errors under which the estimate would not be unusual:

1. The gap of bin b, g_b = Σ (confidence − correctness)/n, has nearly normal noise. Its covariance over bins (and over
   models) is that of sums of independent groups, C = G/(G − 1) Σ_i u_i u_iᵀ/n², u_i = D_i − g n_i, with D_i the sums of
   confidence − correctness of group i and n_i its points.
2. One family of candidate gaps goes through the estimate: |g_b| max(0, 1 − (λ s_b/g_b)²) for λ >= 0 (the non-negative
   garrote, Breiman 1995: gaps within their noise go to 0 first), |g_b| − λ s_b for λ < 0, s_b = C_bb^½.
3. A candidate γ with error θ is kept where the observed estimate lies between the 2.5% and the 97.5% quantile of the
   error of γ + noise (hybrid resampling, Chuang and Lai 2000). The kept θ are the interval; it is widened to the
   estimate where it ends below it. The candidate of which the observed estimate is the median is the debiased estimate.

The target is the error of the population in the same bins: Σ_b |E[(confidence − correctness) 1_b]| for ECE. Coverage is
simulated by `eval/study_intervals.py`; its table is in `docs/metrics.md`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from calibjax.metrics.errors import Norm
from calibjax.metrics.sums import CalibrationSums

_HALVINGS = 24
_FARTHEST = 10.0
"""Standard errors by which gaps are enlarged at most."""


class Interval(NamedTuple):
    """A figure and its interval."""

    value: float
    low: float
    high: float


class ErrorInterval(NamedTuple):
    """A binned calibration error and its interval, low <= value <= high.

    Attributes:
        value: the error of all points (the plug-in estimate).
        low, high: of the population's error in these bins.
        debiased: the error of which `value` is the median estimate, in [low, high].
    """

    value: float
    low: float
    high: float
    debiased: float


class Comparison(NamedTuple):
    """The first figure less the second, on the same points.

    Attributes:
        difference: of the figures of all points.
        low, high: interval of the difference.
        share_lower: of resamples in which the first is lower, an equal one counting half; of binned errors, fraction of
            draws under equal errors whose difference is above the one observed.
        p_value: two-sided, (1 + twice the resamples on the rarer side of 0)/(1 + resamples), at most 1; of binned
            errors, of the draws under equal errors on the rarer side of the difference observed.
    """

    difference: float
    low: float
    high: float
    share_lower: float
    p_value: float


def error_interval(
    sums: CalibrationSums, *, norm: Norm = "l1", resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> ErrorInterval:
    """A binned calibration error with an interval that contains it, and the debiased estimate.

    Args:
        sums: with one leading axis `[G]` of independent groups, or two, `[G, M]`, for the mean error of M models on the
            same points. One group alone has no known noise: the interval is then the value.
        norm: "l1" for ECE, "l2" for RMSCE, "max" for MCE.
        resamples: draws of noise.
        level: coverage, in (0, 1).
        seed: of the noise.

    Returns:
        `ErrorInterval`; NaN where no point counts.

    Raises:
        ValueError: for no group, no draw, or a wrong `level` or `norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> from calibjax.metrics import calibration_sums
        >>> confidence, correct = jnp.full((400, 1), 0.75), jnp.arange(400)[:, None] % 10 < 7
        >>> value, low, high, debiased = error_interval(calibration_sums(confidence, correct))
        >>> f"{value:.2f} [{low:.2f}, {high:.2f}]"
        '0.05 [0.01, 0.09]'
    """
    found = _observe([sums], [1.0], norm, resamples, level, seed)
    if found is None:
        return ErrorInterval(*(float("nan"),) * 4)
    levels = np.zeros(len(found.weights))
    low, debiased, high = found.kept(_tails(level), levels, np.ones_like(levels), (-_FARTHEST, found.most))
    value = float(found.value)
    low, high = min(low, value), max(min(high, 1.0), value)
    return ErrorInterval(value, low, high, min(max(debiased, low), high))


def error_comparison(
    first: CalibrationSums,
    second: CalibrationSums,
    *,
    norm: Norm = "l1",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """The binned error of `first` less that of `second`, over the same groups. Arguments as `error_interval`.

    The gaps of both are first shrunk to their debiased errors; from there the gaps of the one shrink as those of the
    other grow, with noise drawn jointly, and the differences kept are those under which the observed one is usual.
    """
    if len(first.count) != len(second.count):
        raise ValueError(f"the same groups are needed: got {len(first.count)} and {len(second.count)}.")
    found = _observe([first, second], [1.0, -1.0], norm, resamples, level, seed)
    if found is None:
        return Comparison(*(float("nan"),) * 5)
    if _same(first, second):
        return Comparison(0.0, 0.0, 0.0, 0.5, 1.0)
    signs = np.sign(found.weights)
    value = float(found.of(signs > 0).value - found.of(signs < 0).value)
    if value > 0:  # in one order, so that the other gives the negative exactly
        other = error_comparison(second, first, norm=norm, resamples=resamples, level=level, seed=seed)
        return Comparison(-other.difference, -other.high, -other.low, 1 - other.share_lower, other.p_value)
    starts = np.zeros_like(signs)
    for sign in (1, -1):
        one = found.of(signs == sign)
        starts[signs == sign] = one.solve([0.5], np.zeros_like(one.weights), np.ones_like(one.weights), (0, one.most))
    reach = found.most + _FARTHEST
    low, _, high = found.kept(_tails(level), starts, signs, (-reach, reach))

    equal = _bisect(np.array([-reach]), np.array([reach]), lambda t: found.error(starts + signs * t[:, None]) > 0)
    drawn = found.drawn(starts + signs * equal[:, None])[0]
    below, above = int((drawn < value).sum()), int((drawn > value).sum())
    ties = resamples - below - above
    return Comparison(
        value,
        min(low, value),
        max(high, value),
        share_lower=(above + ties / 2) / resamples,
        p_value=min(1.0, (1 + 2 * min(below + ties, above + ties)) / (1 + resamples)),
    )


def _same(first: CalibrationSums, second: CalibrationSums) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("count", "confidence", "correct")
    )


def _tails(level: float) -> list[float]:
    """P(error of candidate and noise <= the one observed) at the low end, the debiased error and the high end."""
    return [(1 + level) / 2, 0.5, (1 - level) / 2]


class _Observed(NamedTuple):
    """Gaps of M models and draws of their noise.

    Attributes:
        gaps: `[M, B]`, Σ (confidence − correctness)/n of each bin.
        scale: `[M, B]`, their standard errors.
        fraction: `[M, B]`, of points in each bin (1 for an empty one, whose gap is 0).
        noise: `[R, M, B]`.
        weights: `[M]`, of the models' errors in the figure.
        norm: of the error.
    """

    gaps: Float[np.ndarray, "M B"]
    scale: Float[np.ndarray, "M B"]
    fraction: Float[np.ndarray, "M B"]
    noise: Float[np.ndarray, "R M B"]
    weights: Float[np.ndarray, " M"]
    norm: Norm

    @property
    def value(self) -> np.ndarray:
        return self._figure(self.gaps)

    @property
    def most(self) -> float:
        """The level at which every gap is 0."""
        moves = self.scale > 0
        return float((np.abs(self.gaps[moves]) / self.scale[moves]).max(initial=0.0)) * (1 + 1e-9)

    def of(self, models: Bool[np.ndarray, " M"]) -> "_Observed":
        """Some models alone, their weights positive."""
        return _Observed(
            *(self.gaps[models], self.scale[models], self.fraction[models], self.noise[:, models]),
            weights=np.abs(self.weights[models]),
            norm=self.norm,
        )

    def candidates(self, levels: Float[np.ndarray, "K M"]) -> Float[np.ndarray, "K M B"]:
        size = np.abs(self.gaps)
        step = levels[..., None] * self.scale
        shrunk = np.maximum(size - np.square(step) / np.where(size > 0, size, 1.0), 0.0)
        return np.where(self.gaps < 0, -1.0, 1.0) * np.where(step > 0, np.where(size > 0, shrunk, 0.0), size - step)

    def error(self, levels: Float[np.ndarray, "K M"]) -> Float[np.ndarray, " K"]:
        """The figure of candidates."""
        return self._figure(self.candidates(levels))

    def drawn(self, levels: Float[np.ndarray, "K M"]) -> Float[np.ndarray, "K R"]:
        """The figure of candidates and noise."""
        return self._figure(self.candidates(levels)[:, None] + self.noise)

    def solve(self, tails: Sequence[float], starts, directions, ends: tuple[float, float]) -> np.ndarray:
        """The steps t in `ends` at which P(drawn <= observed) at level starts + t·directions reaches each tail."""
        wanted = np.asarray(tails)
        low, high = (np.full(len(wanted), end, np.float64) for end in ends)
        value = self.value
        return _bisect(low, high, lambda t: (self.drawn(starts + directions * t[:, None]) <= value).mean(-1) < wanted)

    def kept(self, tails: Sequence[float], starts, directions, ends: tuple[float, float]) -> list[float]:
        """The figures of the candidates at those steps."""
        steps = self.solve(tails, starts, directions, ends)
        return [float(x) for x in self.error(starts + directions * steps[:, None])]

    def _figure(self, gaps: Float[np.ndarray, "*K M B"]) -> Float[np.ndarray, "*K"]:
        size = np.abs(gaps)
        if self.norm == "l1":
            return size.sum(axis=-1) @ self.weights
        if self.norm == "l2":
            return np.sqrt((np.square(size) / self.fraction).sum(axis=-1)) @ self.weights
        return (size / self.fraction).max(axis=-1) @ self.weights


def _observe(
    parts: list[CalibrationSums], signs: list[float], norm: Norm, resamples: int, level: float, seed: int
) -> _Observed | None:
    """Gaps and noise of all models of all parts, each part's errors averaged; None where no point counts."""
    groups = len(np.asarray(parts[0].count))
    if not groups or resamples < 1:
        raise ValueError(f"expected at least one group and one draw, got {groups} and {resamples}.")
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}.")
    if norm not in ("l1", "l2", "max"):
        raise ValueError(f'norm: expected "l1", "l2" or "max", got {norm!r}.')
    counts, apart, points, weights = [], [], [], []
    for sums, sign in zip(parts, signs, strict=True):
        sums = CalibrationSums(*(np.asarray(x, np.float64) for x in sums))
        if sums.count.ndim == 2:
            sums = CalibrationSums(*(x[:, None] for x in sums))
        counts.append(sums.count)
        apart.append(sums.confidence - sums.correct)
        points.append(sums.whole()[0])
        weights += [sign / sums.count.shape[1]] * sums.count.shape[1]
    count, apart, points = (np.concatenate(x, axis=1) for x in (counts, apart, points))  # [G, M, B], [G, M]
    n = points.sum(axis=0)
    if not n.all():
        return None
    gaps = apart.sum(axis=0) / n[:, None]
    fraction = count.sum(axis=0) / n[:, None]

    residual = ((apart - gaps * points[..., None]) / n[:, None]).reshape(groups, -1)
    covariance = residual.T @ residual * (groups / max(groups - 1, 1))
    if groups == 1:
        covariance[:] = 0.0
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # symmetric: the same whatever the vectors' signs
    half = np.random.default_rng(seed).standard_normal((-(-resamples // 2), len(root)))
    noise = np.concatenate([half, -half])[:resamples] @ root
    return _Observed(
        gaps,
        np.sqrt(np.diagonal(covariance)).reshape(gaps.shape),
        np.where(fraction > 0, fraction, 1.0),
        noise.reshape(resamples, *gaps.shape),
        np.asarray(weights),
        norm,
    )


def _bisect(low: np.ndarray, high: np.ndarray, above: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Where `above` turns from True to False between `low` and `high`; `high` where it never does."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        move = above(middle)
        low, high = np.where(move, middle, low), np.where(move, high, middle)
    return high
