"""Coverage of the 95% intervals of differences of ECE, and p-values under the null, by simulation.

    python tests/campaigns/intervals.py --points 300 1500 5000 20000 --draws 500

The true difference is that of 4 million points, in the same 15 bins. Two models judge the same answers, with gaps of
constant and of changing sign, with equal errors, and with none; or each its own. docs/metrics.md has the figures.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from calibjax import metrics

PAIRS = {
    # name: (accuracy at c, first confidence, second confidence, whether both judge the same answers)
    "temperature against raw": (lambda c: c - 0.02, lambda c: c, lambda c: c**1.3, True),
    "constant gaps": (lambda c: c - 0.05, lambda c: c, lambda c: np.clip(c - 0.02, 0, 1), True),
    "calibrated against raw": (lambda c: c, lambda c: c, lambda c: c**0.7, True),
    "equal errors": (lambda c: c, lambda c: np.clip(c + 0.04, 0, 1), lambda c: np.clip(c - 0.04, 0, 1), True),
    "own answers, equal": (lambda c: c - 0.05, lambda c: c, lambda c: c, False),
    "own answers, calibrated": (lambda c: c, lambda c: c, lambda c: c, False),
}


def population(rng, points, accuracy, same):
    """Confidences of the raw model and the answers of both models, `[N]` each."""
    c = np.clip(rng.beta(3, 1.2, points), 0.03, 0.97)
    answers = [rng.random(points) < np.clip(accuracy(c), 0, 1) for _ in range(1 if same else 2)]
    return c, answers[0], answers[-1]


@jax.jit
def sums_of(confidence, correct):
    return metrics.calibration_sums(confidence[:, None], correct[:, None])


def true_error(confidence, accuracy, c, bins=15):
    """ECE of the population, from the expected accuracy instead of drawn answers."""
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(place, confidence - np.clip(accuracy(c), 0, 1), bins)
    return np.abs(gaps).sum() / len(c)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[300, 1500, 5000, 20000])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    given = parser.parse_args()
    print("| pair | n | true difference | covered | p < .05 | seconds |\n|---|---|---|---|---|---|")
    for name in given.pairs:
        accuracy, first, second, same = PAIRS[name]
        c = np.clip(np.random.default_rng(0).beta(3, 1.2, 4_000_000), 0.03, 0.97)
        truth = true_error(first(c), accuracy, c) - true_error(second(c), accuracy, c)
        for points in given.points:
            began, covered, rejected = time.monotonic(), 0, 0
            for draw in range(given.draws):
                rng = np.random.default_rng([draw, points])
                c, *answers = population(rng, points, accuracy, same)
                pairs = zip((first, second), answers, strict=True)
                sums = [sums_of(jnp.asarray(confidence(c)), jnp.asarray(right)) for confidence, right in pairs]
                compared = metrics.error_comparison(*sums, seed=draw)
                covered += compared.low <= truth <= compared.high
                rejected += compared.p_value < 0.05
            rates = f"{covered / given.draws:.1%} | {rejected / given.draws:.1%}"
            print(f"| {name} | {points:,} | {truth:+.4f} | {rates} | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
