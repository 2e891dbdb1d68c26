"""Intervals of binned calibration errors (ECE, RMSCE, MCE), whose plug-in estimates are biased upwards.

Each resample adds this bias again: percentile intervals may lie above the true error and estimate. Ours invert a test:

1. The gap of bin b, g_b = Σ (confidence − correctness)/n, has approximately normal noise. Its covariance over bins (and
   models) is that of sums of independent groups, C = G/(G − 1) Σ_i u_i u_iᵀ/n², u_i = D_i − g n_i, where D_i sums
   confidence − correctness over group i and n_i is its number of points.
2. Candidate gaps form one family that contains the observed gaps: |g_b| max(0, 1 − (λ s_b/g_b)²) for λ >= 0 (the
   non-negative garrote, Breiman 1995: gaps within their noise shrink to 0 first), |g_b| − λ s_b for λ < 0; s_b² = C_bb.
3. A candidate γ with error θ is accepted if the observed estimate lies between the 2.5% and the 97.5% quantile of the
   error of γ + noise (hybrid resampling, Chuang and Lai 2000). The accepted θ form the interval, which is extended to
   the estimate if it ends below it. The debiased estimate is the θ whose median estimate equals the observed one.

For a difference, noise and bias also depend on what is unknown: the sum of both errors and the signs of the gaps. Step
2 is therefore repeated for several families of candidates, whose intervals are united. (Berger and Boos
1994, JASA 89, take the largest p-value over a confidence set for the same reason.) A family has:

a. gaps as observed, or smoothed over neighbouring bins, which corrects signs that noise has changed;
b. starting from both debiased errors or, where the models judge the same answers, once from the lower and once from the
   upper ends of both models' 96% intervals.

The target is the error of the population in the same bins; `docs/metrics.md` has the simulated coverage.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from calibjax.metrics.errors import Norm
from calibjax.metrics.sums import CalibrationSums
from calibjax.runtime.arrays import AnyArray, ceil_div

_HALVINGS = 18
_FARTHEST = 10.0  # largest increase of a gap, in standard errors
_START_LEVEL = 0.96  # coverage of each model's interval, from whose ends the candidates of a difference start
_SHARED = 0.2  # correlation of two models' mean gaps above which they count as judging the same answers
_BANDWIDTH = 2 / 15  # standard deviation of the kernel that smooths gaps, as a fraction of the number of bins
_Levels = Float[np.ndarray, "K M"]  # λ of K candidates, for each of M models
_Direction = Float[np.ndarray, " M"]  # change of the levels of M models per unit of the step t
_Bounds = tuple[float, float]  # the least and the largest step


class Interval(NamedTuple):
    """Value of a metric and its interval."""

    value: float
    low: float
    high: float


class ErrorInterval(NamedTuple):
    """A binned calibration error and its interval, low <= value <= high.

    `value` is the plug-in estimate, the error of all points; `low` and `high` bound the population's error in the same
    bins; `debiased` is the median-unbiased estimate (the error whose median estimate is `value`), in [low, high].
    """

    value: float
    low: float
    high: float
    debiased: float


class PairedDifference(NamedTuple):
    """Difference of a metric between two models on the same points, first − second.

    Attributes:
        difference: first − second on all points.
        low, high: interval of the difference.
        fraction_lower: fraction of resamples in which the first is lower; ties count one half. For binned errors, the
            fraction of draws under equal errors whose difference is above the observed one.
        p_value: two-sided, (1 + 2 × resamples on the rarer side of 0)/(1 + resamples), at most 1. For binned errors,
            draws under equal errors on the rarer side of the observed difference are counted.
    """

    difference: float
    low: float
    high: float
    fraction_lower: float
    p_value: float


def wilson_interval(correct: AnyArray | float, count: AnyArray | int) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95% interval of a proportion, for independent answers (Wilson 1927, doi 10.1080/01621459.1927.10502953).

    `correct` of `count` answers, of one shape; float64 low and high ends, NaN where `count` is. Unlike an interval from
    resamples it is not empty if all answers are right, or all wrong.
    """
    correct, count = np.asarray(correct, np.float64), np.asarray(count, np.float64)
    p, z = correct / count, 1.959963984540054
    divisor = 2 * (count + z**2)
    middle = (2 * count * p + z**2) / divisor
    reach = z / divisor * np.sqrt(4 * count * p * (1 - p) + z**2)
    low = np.where(correct == 0, 0.0, middle - reach)
    high = np.where(correct == count, 1.0, middle + reach)
    return low, high


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values by name, corrected for their number by Holm's step-down method (Holm 1979, Scand. J. Statistics 6).

    With m p-values in ascending order, the corrected p₍ᵢ₎ is max over j <= i of min(1, (m − j + 1) p₍ⱼ₎). Rejecting
    those below a level bounds the probability of any false rejection by that level, even if the tests are dependent.
    NaN stays NaN and does not count; ValueError for a p-value outside [0, 1].

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    for name, p in p_values.items():
        if p < 0 or p > 1:
            raise ValueError(f"{name}: expected a p-value in [0, 1], got {p}.")
    known = sorted((name for name, p in p_values.items() if not np.isnan(p)), key=p_values.__getitem__)
    corrected, largest = dict(p_values), 0.0
    for rank, name in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected


def error_interval(
    sums: CalibrationSums, *, norm: Norm = "l1", resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> ErrorInterval:
    """Binned calibration error with an interval that contains it and a debiased estimate; NaN where no point counts.

    Args:
        sums: leading axis `[G]` of independent groups; or `[G, M]`, for the mean error of M models on the same points.
            The noise of a single group is unknown, so its interval is the value.
        norm: "l1" for ECE, "l2" for RMSCE, "max" for MCE.
        resamples: number of noise draws >= 1.
        level: coverage, in (0, 1).
        seed: of the noise.

    Raises:
        ValueError: for no group, no draw, or an invalid `level` or `norm`.
    """
    observed = _observe([sums], [1.0], norm, resamples, level, seed)
    if observed is None:
        return ErrorInterval(*[np.nan] * 4)
    above, below = _tails(level)
    models = len(observed.weights)
    starts, directions = np.zeros((3, models)), np.ones(models)
    bounds = -_FARTHEST, observed.zeroing_level
    low, debiased, high = observed.errors_at([above, 0.5, below], starts, directions, bounds)
    value = float(observed.value)
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
) -> PairedDifference:
    """Difference of binned errors, `first` − `second`, over the same groups. For the arguments see `error_interval`.

    A candidate is a pair of models with known gaps. The interval holds the differences of those candidates that the
    observed difference does not reject; the p-value is the largest among those with equal errors. From each start, the
    gaps of one model shrink while those of the other grow; noise is drawn jointly for both.

    Raises ValueError as `error_interval`, and for different numbers of groups.
    """
    if len(first.count) != len(second.count):
        raise ValueError(f"expected the same groups in both, got {len(first.count)} and {len(second.count)}.")
    observed = _observe([first, second], [1.0, -1.0], norm, resamples, level, seed)
    if observed is None:
        return PairedDifference(*[np.nan] * 5)
    fields = ("count", "confidence", "correct")
    if all(np.array_equal(getattr(first, field), getattr(second, field)) for field in fields):
        return PairedDifference(0.0, 0.0, 0.0, 0.5, 1.0)
    signs = np.sign(observed.weights)
    value = float(observed.select(signs > 0).value - observed.select(signs < 0).value)
    if value > 0:  # so that swapping the arguments gives exactly the negative
        other = error_comparison(second, first, norm=norm, resamples=resamples, level=level, seed=seed)
        return PairedDifference(-other.difference, -other.high, -other.low, 1 - other.fraction_lower, other.p_value)
    reach = observed.zeroing_level + _FARTHEST
    tails = _tails(_START_LEVEL) if observed.shares_answers(signs) else [0.5]
    ends, fraction_lower, p_value = [], 0.5, 0.0
    for family in (observed, observed.smoothed()):
        starts = family.start_levels(tails, signs)
        pairs = np.repeat(starts, 2, axis=0)  # the low and the high end of each start
        tails_of_pairs = _tails(level) * len(tails)
        ends.append(family.errors_at(tails_of_pairs, pairs, signs, (-reach, reach)))
        for drawn in family.noisy_statistics(family.levels_of_equality(starts, signs, reach)):
            below, above = int((drawn < value).sum()), int((drawn > value).sum())
            fraction_above, p = sign_test(above, below, resamples)
            if p > p_value:
                fraction_lower, p_value = fraction_above, p
    low, high = float(np.min(ends)), float(np.max(ends))
    return PairedDifference(value, min(low, value), max(high, value), fraction_lower, p_value)


def sign_test(below: int, above: int, count: int) -> tuple[float, float]:
    """Of `count` draws, the fraction below, ties one half, and the p-value as `PairedDifference` defines it."""
    ties = count - below - above
    rarer = min(below, above) + ties
    fraction_below = (below + ties / 2) / count if count else np.nan
    return fraction_below, min(1.0, (1 + 2 * rarer) / (1 + count))


def _tails(level: float) -> list[float]:
    """P(error of candidate + noise <= observed error) at the low and at the high end."""
    return [(1 + level) / 2, (1 - level) / 2]


class _Observed(NamedTuple):
    """Gaps of M models with draws of their noise. The statistic is a weighted sum of the models' errors."""

    gaps: Float[np.ndarray, "M B"]  # Σ (confidence − correctness)/n of each bin
    noise_size: Float[np.ndarray, "M B"]  # standard errors of the gaps
    fraction: Float[np.ndarray, "M B"]  # of the points that each bin holds
    centre: Float[np.ndarray, "M B"]  # the gaps that candidates shrink and enlarge: observed or smoothed
    noise: Float[np.ndarray, "R M B"]
    weights: Float[np.ndarray, " M"]
    norm: Norm

    @property
    def value(self) -> np.ndarray:
        return self._statistic(self.gaps)

    @property
    def zeroing_level(self) -> float:
        """The least level λ at which `candidates` has shrunk every gap that has noise to 0."""
        moves = self.noise_size > 0
        return float((np.abs(self.centre[moves]) / self.noise_size[moves]).max(initial=0.0)) * (1 + 1e-9)

    def select(self, models: Bool[np.ndarray, " M"]) -> "_Observed":
        fields = {name: getattr(self, name)[models] for name in ("gaps", "noise_size", "fraction", "centre")}
        return self._replace(**fields, noise=self.noise[:, models], weights=np.abs(self.weights[models]))

    def shares_answers(self, signs: Float[np.ndarray, " M"]) -> bool:
        """Whether the noise of two models' mean gaps is correlated, as where they judge the same answers."""
        gaps = self.noise.sum(axis=-1)
        first, second = (gaps[:, signs == sign].mean(axis=1) for sign in (1, -1))
        least_product = _SHARED * np.sqrt((first @ first) * (second @ second))
        return bool(first @ second > least_product)

    def smoothed(self) -> "_Observed":
        """The candidates of gaps that are smoothed over bins. Gaps without noise stay as they are."""
        bins = np.arange(self.gaps.shape[1])
        distance = bins[:, None] - bins
        kernel = np.exp(-0.5 * np.square(distance / (_BANDWIDTH * len(bins))))
        noisy = self.noise_size > 0
        points = np.where(noisy, self.fraction @ kernel, 1.0)
        smooth = self.fraction * (self.gaps @ kernel) / points
        return self._replace(centre=np.where(noisy, smooth, self.gaps))

    def candidates(self, levels: _Levels) -> Float[np.ndarray, "K M B"]:
        """Gaps at each level λ: shrunk to |g| max(0, 1 − (λ s/g)²) where λ > 0, enlarged to |g| − λ s elsewhere."""
        size = np.abs(self.centre)
        step = levels[..., None] * self.noise_size
        is_positive = size > 0
        shrunk = np.maximum(size - np.square(step) / np.where(is_positive, size, 1.0), 0.0)
        shrunk = np.where(is_positive, shrunk, 0.0)
        sign = np.where(self.centre < 0, -1.0, 1.0)
        return sign * np.where(step > 0, shrunk, size - step)

    def noisy_statistics(self, levels: _Levels) -> Float[np.ndarray, "K R"]:
        return self._statistic(self.candidates(levels)[:, None] + self.noise)

    def solve(self, tails: Sequence[float], starts: _Levels, directions: _Direction, bounds: _Bounds) -> np.ndarray:
        """Steps t `[K]` in `bounds` at which P(drawn <= observed) at level starts + t·directions reaches each tail."""
        low, high = (np.full(len(tails), bound, np.float64) for bound in bounds)
        value = self.value

        def is_below(t: np.ndarray) -> np.ndarray:
            drawn = self.noisy_statistics(starts + directions * t[:, None])
            return (drawn <= value).mean(-1) < tails

        return _bisect(low, high, is_below)

    def start_levels(self, tails: Sequence[float], signs: Float[np.ndarray, " M"]) -> _Levels:
        """For each tail the levels at which the error of either model alone, with its noise, reaches that tail."""
        starts = np.zeros((len(tails), len(signs)))
        for sign in (1, -1):
            model = self.select(signs == sign)
            levels = model.solve(tails, np.zeros((len(tails), 1)), np.ones(1), (-_FARTHEST, model.zeroing_level))
            starts[:, signs == sign] = levels[:, None]
        return starts

    def levels_of_equality(self, starts: _Levels, directions: _Direction, reach: float) -> _Levels:
        """Levels starts + t·directions, |t| <= `reach`, at which the statistic is 0."""

        def is_positive(t: np.ndarray) -> np.ndarray:
            return self._statistic(self.candidates(starts + directions * t[:, None])) > 0

        farthest = np.full(len(starts), reach)
        steps = _bisect(-farthest, farthest, is_positive)
        return starts + directions * steps[:, None]

    def errors_at(
        self, tails: Sequence[float], starts: _Levels, directions: _Direction, bounds: _Bounds
    ) -> list[float]:
        steps = self.solve(tails, starts, directions, bounds)
        return self._statistic(self.candidates(starts + directions * steps[:, None])).tolist()

    def _statistic(self, gaps: Float[np.ndarray, "*K M B"]) -> Float[np.ndarray, "*K"]:
        size = np.abs(gaps)
        if self.norm == "l1":
            return size.sum(axis=-1) @ self.weights
        fraction = np.where(self.fraction > 0, self.fraction, 1.0)
        if self.norm == "l2":
            return np.sqrt((np.square(size) / fraction).sum(axis=-1)) @ self.weights
        return (size / fraction).max(axis=-1) @ self.weights


def _observe(
    parts: list[CalibrationSums], signs: list[float], norm: Norm, resamples: int, level: float, seed: int
) -> _Observed | None:
    """Gaps and noise of all models in `parts`. Errors are averaged within a part. None if some model has no points."""
    if any(np.ndim(sums.count) not in (2, 3) for sums in parts):
        raise ValueError("expected sums with a leading axis of groups: take pooled_sums, or sums of each sequence.")
    groups = len(np.asarray(parts[0].count))
    if not groups or resamples < 1:
        raise ValueError(f"expected at least one group and one draw, got {groups} and {resamples}.")
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}.")
    if norm not in ("l1", "l2", "max"):
        raise ValueError(f'norm: expected "l1", "l2" or "max", got {norm!r}.')
    by_model, weights = [], []
    for part, sign in zip(parts, signs, strict=True):
        part = CalibrationSums(*(np.asarray(x, np.float64) for x in part))
        if part.count.ndim == 2:
            part = CalibrationSums(*(x[:, None] for x in part))
        models = part.count.shape[1]
        by_model.append(part)
        weights += [sign / models] * models
    sums = CalibrationSums(*(np.concatenate(x, axis=1) for x in zip(*by_model, strict=True)))  # [G, M, ...]
    excess = sums.confidence - sums.correct  # D_i of each model and bin
    points = sums.points  # n_i
    n = points.sum(axis=0)
    if not n.all():
        return None
    gaps = excess.sum(axis=0) / n[:, None]
    fraction = sums.count.sum(axis=0) / n[:, None]

    residual = (excess - gaps * points[..., None]) / n[:, None]  # u_i / n
    residual = residual.reshape(groups, -1)
    covariance = residual.T @ residual * (groups / max(groups - 1, 1))
    if groups == 1:
        covariance[:] = 0.0
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # symmetric: whatever the signs of the vectors
    half = np.random.default_rng(seed).standard_normal((ceil_div(resamples, 2), len(root)))
    noise = np.concatenate([half, -half])[:resamples] @ root  # antithetic draws: each with both signs
    return _Observed(
        gaps=gaps,
        noise_size=np.sqrt(np.diagonal(covariance)).reshape(gaps.shape),
        fraction=fraction,
        centre=gaps,
        noise=noise.reshape(resamples, *gaps.shape),
        weights=np.asarray(weights),
        norm=norm,
    )


def _bisect(low: np.ndarray, high: np.ndarray, above: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Bisects for the point where `above` changes from True to False; `high` if it never does."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        move = above(middle)
        low, high = np.where(move, middle, low), np.where(move, high, middle)
    return high
