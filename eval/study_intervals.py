"""Coverage of the intervals of binned calibration errors and of their differences, by simulation.

    python eval/study_intervals.py --draws 500 [--table errors|differences|norms] [--points 500 2000 20000]

Confidence c is Beta(1.2, 0.8). A point is correct with probability p = c − k c: the gaps of all bins have one sign, and
the ECE is E[k c] in any bins. k is constant, or non-zero above c = 0.8 only ("3 bins"; no gap elsewhere). In
sequences of 10 tokens p is multiplied by 1 + 0.7 s (1 − c), s = ±1 for each sequence. 15 bins of equal width (lo, hi]
or of equal mass; 400 draws of noise for an interval.

Differences are of two maps of c (`PAIRS`) with the same answers or with answers of their own. Gaps of one sign: c as
above is correct with probability 0.7 c, and the confidences are 0.7 c + e c/E[c], where e is the ECE. Gaps that change
sign: c is Beta(3, 1.2), correct with probability c or c − 0.02, and the confidences are powers of c. The two powers of
"equal" rows have the same ECE.

"percentiles" are those of resampled errors; the resamples are drawn from the normal distribution of the gaps.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import beta

from calibjax import metrics
from calibjax.metrics import CalibrationSums
from calibjax.metrics.bootstrap import POOLS
from calibjax.metrics.errors import Norm

POINTS = (500, 2_000, 20_000)
ERRORS = (0.0, 0.005, 0.02, 0.05, 0.15)
BINS, TOKENS, ABOVE = 15, 10, 0.8
RESAMPLES = 400
MEAN = 0.6  # of c
MEAN_ABOVE = MEAN * float(beta.sf(ABOVE, 2.2, 0.8))  # E[c; c > 0.8]


def gap(c: np.ndarray, ece: float, few: bool) -> np.ndarray:
    """k c."""
    return c * np.where(c > ABOVE, ece / MEAN_ABOVE, 0.0) if few else c * ece / MEAN


class Pair(NamedTuple):
    """Two models whose confidences are maps of one c ~ Beta(`shape`)."""

    name: str
    shape: tuple[float, float]
    accuracy: Callable[[np.ndarray], np.ndarray]
    models: tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def linear(error: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda c: 0.7 * c + gap(c, error, False)


def power(exponent: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda c: c**exponent


def lowered(c: np.ndarray) -> np.ndarray:
    return np.maximum(c - 0.02, 0.0)


ONE_SIGN = ((0.0, 0.0), (0.0, 0.02), (0.02, 0.02), (0.005, 0.05), (0.05, 0.15))
PAIRS = (
    *(Pair(f"ECE {a:g}, {b:g}", (1.2, 0.8), linear(0.0), (linear(a), linear(b))) for a, b in ONE_SIGN),
    Pair("c, c^1.3", (3, 1.2), lowered, (power(1), power(1.3))),
    Pair("c, c^0.8", (3, 1.2), lowered, (power(1), power(0.8))),
    Pair("calibrated, c^1.3", (3, 1.2), power(1), (power(1), power(1.3))),
    Pair("equal c^1.15, c^0.8612", (3, 1.2), power(1), (power(1.15), power(0.8612))),
    Pair("equal c^1.05, c^0.9513", (3, 1.2), power(1), (power(1.05), power(0.9513))),
)


def confidences(
    rng: np.random.Generator, points: int, sequences: bool, shape: tuple[float, float] = (1.2, 0.8)
) -> tuple[np.ndarray, np.ndarray]:
    """c `[groups, tokens]`, and the factor on its probability of being correct."""
    tokens = TOKENS if sequences or points > POOLS else 1  # independent points are pooled, as the library does
    c = rng.beta(*shape, size=(points // tokens, tokens))
    sign = rng.choice([-1.0, 1.0], size=(len(c), 1)) if sequences else 0.0
    return c, 1 + 0.7 * sign * (1 - c)


def sums_of(confidence: np.ndarray, correct: np.ndarray, equal_mass: bool = False) -> CalibrationSums:
    """`CalibrationSums` `[groups, BINS]` of points `[groups, tokens]`."""
    groups, tokens = confidence.shape
    c, y = confidence.ravel(), correct.ravel().astype(np.float64)
    ends = np.sort(c)[len(c) * np.arange(1, BINS) // BINS - 1] if equal_mass else np.arange(1, BINS) / BINS
    cell = np.repeat(np.arange(groups), tokens) * BINS + np.searchsorted(ends, c)
    count, of_c, of_y = (np.bincount(cell, x, groups * BINS).reshape(groups, BINS) for x in (np.ones_like(c), c, y))
    zero = np.zeros(groups)
    return CalibrationSums(count, of_c, of_y, of_y, np.zeros((groups, 4)), zero, zero)


def error_of(sums: CalibrationSums, norm: Norm) -> float:
    whole = CalibrationSums(*(np.asarray(x).sum(axis=0, keepdims=True) for x in sums))
    from_sums = {"l1": metrics.ece_from_sums, "l2": metrics.rmsce_from_sums, "max": metrics.mce_from_sums}
    return float(from_sums[norm](whole)[0])


@functools.cache
def true_error(ece: float, few: bool, norm: Norm) -> float:
    """Of the population, in bins of equal width; c at the midpoints of 100,000 quantiles."""
    c = beta.ppf((np.arange(100_000) + 0.5) / 100_000, 1.2, 0.8)[None]
    return error_of(sums_of(c, c - gap(c, ece, few)), norm)


def percentiles(models: Sequence[CalibrationSums], signs: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """(low, high) of the signed sum of the models' resampled ECE."""
    points = models[0].count.sum(axis=1, keepdims=True)
    apart = np.concatenate([sums.confidence - sums.correct for sums in models], axis=1)
    gaps = apart.sum(axis=0) / points.sum()
    residual = (apart - gaps * points) / points.sum()
    drawn = np.abs(rng.multivariate_normal(gaps, residual.T @ residual, size=RESAMPLES, method="eigh"))
    figures = drawn.reshape(RESAMPLES, len(models), BINS).sum(axis=2) @ np.asarray(signs)
    return np.quantile(figures, [0.025, 0.975])


def holds(low: float, truth: float, high: float) -> bool:
    return low - 1e-9 <= truth <= high + 1e-9


def one_error(rng, draws: int, points: int, ece: float, few: bool, sequences: bool, mass: bool, norm: Norm = "l1"):
    """Means over draws: covered, inside, estimate, debiased, width, covered by percentiles (of ECE alone)."""
    truth = ece if norm == "l1" else true_error(ece, few, norm)
    rows = []
    for number in range(draws):
        c, factor = confidences(rng, points, sequences)
        sums = sums_of(c, rng.random(c.shape) < (c - gap(c, ece, few)) * factor, mass)
        value, low, high, debiased = metrics.error_interval(sums, norm=norm, resamples=RESAMPLES, seed=number)
        below, above = percentiles([sums], [1.0], rng)
        rows.append(
            (holds(low, truth, high), low <= value <= high, value, debiased, high - low, holds(below, truth, above))
        )
    return np.mean(rows, axis=0)


@functools.cache
def true_difference(pair: Pair) -> float:
    """Of the population's ECE; c at the midpoints of 100,000 quantiles."""
    c = beta.ppf((np.arange(100_000) + 0.5) / 100_000, *pair.shape)[None]
    one, other = (error_of(sums_of(model(c), pair.accuracy(c)), "l1") for model in pair.models)
    return one - other


def one_difference(rng, draws: int, points: int, pair: Pair, sequences: bool, own: bool):
    """Means over draws: covered, inside, difference, width, p < 0.05, covered by percentiles."""
    truth, rows = true_difference(pair), []
    for number in range(draws):
        c, factor = confidences(rng, points, sequences, pair.shape)
        answers = [rng.random(c.shape) < pair.accuracy(c) * factor for _ in pair.models]
        models = [sums_of(model(c), answers[own * i]) for i, model in enumerate(pair.models)]
        difference, low, high, _, p_value = metrics.error_comparison(*models, resamples=RESAMPLES, seed=number)
        below, above = percentiles(models, [1.0, -1.0], rng)
        rows.append(
            (
                *(holds(low, truth, high), low <= difference <= high, difference, high - low, p_value < 0.05),
                holds(below, truth, above),
            )
        )
    return np.mean(rows, axis=0)


def percent(*values: float) -> str:
    return " | ".join(f"{100 * value:.1f}" for value in values)


def short(*values: float) -> str:
    return " | ".join(f"{value:.4f}".replace("0.", ".") for value in values)


def errors_table(draws: int, sizes: Sequence[int]) -> None:
    """Coverage in four settings; the other figures are of the first, equal width and points ("inside": of all)."""
    print(
        "| n | true ECE | gaps | width, points | width, sequences | mass, points | mass, sequences | inside |", end=""
    )
    print(" estimate | debiased | width of interval | percentiles, points |\n" + "|---" * 12 + "|")
    for points in sizes:
        for ece in ERRORS:
            for few in (False, True) if ece else (False,):
                settings = [(sequences, mass) for mass in (False, True) for sequences in (False, True)]
                found = [
                    one_error(
                        np.random.default_rng((points, int(ece * 1e4), few, i)), draws, points, ece, few, *setting
                    )
                    for i, setting in enumerate(settings)
                ]
                first, where = found[0], "3 bins" if few else "everywhere" if ece else "none"
                print(f"| {points:,} | {ece:g} | {where} | {percent(*(row[0] for row in found))}", end=" | ")
                print(
                    f"{percent(min(row[1] for row in found))} | {short(*first[2:5])} | {percent(first[5])} |",
                    flush=True,
                )


def norms_table(draws: int, sizes: Sequence[int]) -> None:
    """RMSCE and MCE, equal width, points."""
    print("| n | ECE | gaps | RMSCE covered | true | estimate | MCE covered | true | estimate |\n" + "|---" * 9 + "|")
    for points in sizes:
        for ece, few in ((0.0, False), (0.02, False), (0.02, True), (0.15, False), (0.15, True)):
            cells = []
            for norm in ("l2", "max"):
                rng = np.random.default_rng((points, int(ece * 1e4), few, 7))
                row = one_error(rng, draws, points, ece, few, False, False, norm)
                cells.append(f"{percent(row[0])} | {short(true_error(ece, few, norm), row[2])}")
            where = "3 bins" if few else "everywhere" if ece else "none"
            print(f"| {points:,} | {ece:g} | {where} | {' | '.join(cells)} |", flush=True)


def differences_table(draws: int, sizes: Sequence[int]) -> None:
    """Coverage of the difference of two models' ECE."""
    print("| n | models | answers | points | sequences | inside | true | difference | width of interval |", end="")
    print(" p < .05, points | percentiles, points |\n" + "|---" * 11 + "|")
    for points in sizes:
        for number, pair in enumerate(PAIRS):
            for own in (False, True):
                if not own and pair.name in ("ECE 0, 0", "ECE 0.02, 0.02"):
                    continue  # the same confidence for the same answers
                found = [
                    one_difference(np.random.default_rng((points, number, own, i)), draws, points, pair, sequences, own)
                    for i, sequences in enumerate((False, True))
                ]
                first, which = found[0], "own" if own else "the same"
                print(f"| {points:,} | {pair.name} | {which}", end=" | ")
                print(f"{percent(*(row[0] for row in found), min(row[1] for row in found))}", end=" | ")
                print(f"{short(true_difference(pair), *first[2:4])} | {percent(*first[4:6])} |", flush=True)


TABLES = {"errors": errors_table, "differences": differences_table, "norms": norms_table}


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated coverage of intervals of calibration errors.")
    parser.add_argument("--draws", type=int, default=500, help="simulated sets of each row")
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--points", type=int, nargs="+", default=list(POINTS))
    options = parser.parse_args()
    for name in options.table:
        TABLES[name](options.draws, options.points)


if __name__ == "__main__":
    main()
