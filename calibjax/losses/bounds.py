"""What theory says of label smoothing and of how sure a language model can get (arXiv 2508.00264, section 4)."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class LogitDistance(NamedTuple):
    """The mean distance of the logits from the largest, and the two numbers it must lie between; float32, per token."""

    lower: Float[Array, "..."]
    distance: Float[Array, "..."]
    upper: Float[Array, "..."]


def logit_distance_bounds(
    log_normalizer: Float[Array, "..."],
    mean_logit: Float[Array, "..."],
    max_logit: Float[Array, "..."],
    vocab_size: int,
) -> LogitDistance:
    """How far label smoothing lets logits spread: H(u, p) − log V ≤ (1/V) Σ_v (max z − z_v) ≤ H(u, p).

    H(u, p) = −(1/V) Σ_v log p_v = lse − mean z is the part of the smoothed loss with weight β, u the uniform
    distribution: pressing it down presses the distances down (arXiv 2508.00264, eq. 4, after Liu et al. 2022,
    proposition 1). With the Kullback-Leibler divergence KL(u‖p) = H(u, p) − log V in place of the cross-entropy, as
    they write it, the upper bound does not hold.

    Args:
        log_normalizer, mean_logit, max_logit: of `vocab_stats` at scale 1, per token.
        vocab_size: V.

    Returns:
        `LogitDistance`.
    """
    cross_entropy = log_normalizer - mean_logit
    return LogitDistance(cross_entropy - math.log(vocab_size), max_logit - mean_logit, cross_entropy)


def smoothed_optimum(frequencies: Float[Array, "... V"], label_smoothing: float) -> Float[Array, "... V"]:
    """The distribution that minimises the smoothed loss where next tokens come with given frequencies.

    (1−β) f + β/V. It is the maximum a posteriori estimate, where `cross_entropy` gives the maximum likelihood f:
    β weighs a symmetric Dirichlet prior with concentration `prior_concentration` for each token seen (arXiv 2508.00264,
    section 4.1).

    Args:
        frequencies: non-negative, summing to 1 over the last axis.
        label_smoothing: β in [0, 1].
    """
    return (1.0 - label_smoothing) * frequencies + label_smoothing / jnp.shape(frequencies)[-1]


def prior_concentration(label_smoothing: float, vocab_size: int, count: float = 1.0) -> float:
    """The α of the symmetric Dirichlet prior under which `smoothed_optimum` is the mode of the posterior of n tokens.

    α = 1 + n β / ((1−β) V): the mode (n_v + α − 1) / (n + V (α − 1)) is then (1−β) n_v/n + β/V.

    Args:
        label_smoothing: β in [0, 1).
        vocab_size: V.
        count: n, tokens seen.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected a number from 0 up to but not 1, got {label_smoothing}.")
    return 1.0 + count * label_smoothing / ((1.0 - label_smoothing) * vocab_size)


class EntropyBound(NamedTuple):
    """The least entropy that logits can have, and where.

    Attributes:
        entropy: nats, of the distribution with the largest possible top probability.
        log_entropy: its logarithm, which stays finite where the entropy is too small for a float.
        miss: 1 − the top probability there; no prediction can be surer.
    """

    entropy: float
    log_entropy: float
    miss: float


def entropy_lower_bound(norm: float, vocab_size: int) -> EntropyBound:
    """The least entropy of softmax(z) over all z with Σ z_v = 0 and |z| ≤ s, in nats.

    arXiv 2508.00264, eq. 5, after Zhai et al. 2023, theorem 3.1.
    It is reached where one logit is s √((V−1)/V) and all others −s/√(V(V−1)): with the gap g = s √(V/(V−1)) and
    r = (V−1) e^−g, H = log(1 + r) + g r/(1 + r).

    Args:
        norm: s ≥ 0, of the logits less their mean.
        vocab_size: V ≥ 2.
    """
    _check(norm, vocab_size)
    return _one_against_all(norm * math.sqrt(vocab_size / (vocab_size - 1)), vocab_size)


def capped_entropy_lower_bound(softcap: float, vocab_size: int) -> EntropyBound:
    """The least entropy of softmax(z) over all z within ±`softcap`: one logit at the cap, all others at minus it."""
    _check(softcap, vocab_size)
    return _one_against_all(2.0 * softcap, vocab_size)


def _check(size: float, vocab_size: int) -> None:
    if vocab_size < 2:
        raise ValueError(f"vocab_size: expected at least 2, got {vocab_size}.")
    if not 0 <= size < math.inf:
        raise ValueError(f"expected a finite bound of the logits, at least 0, got {size}.")


def _one_against_all(gap: float, vocab_size: int) -> EntropyBound:
    log_ratio = math.log(vocab_size - 1) - gap
    # log(1 + r) and r/(1 + r) from log r, which may be far below what a float holds.
    log_one_plus = float(np.logaddexp(0.0, log_ratio))
    log_miss = log_ratio - log_one_plus
    log_terms = [math.log(log_one_plus) if log_one_plus > 0 else log_ratio]
    if gap > 0:
        log_terms.append(math.log(gap) + log_miss)
    log_entropy = float(np.logaddexp.reduce(log_terms))
    return EntropyBound(math.exp(log_entropy), log_entropy, math.exp(log_miss))
