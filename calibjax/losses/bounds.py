"""Bounds on entropy and confidence (arXiv 2508.00264, section 4)."""

import math
from typing import NamedTuple

import numpy as np


class EntropyBound(NamedTuple):
    """Smallest entropy of bounded logits in nats, its logarithm, which does not underflow, and 1 − max p there."""

    entropy: float
    log_entropy: float
    one_minus_confidence: float


def entropy_lower_bound(norm: float, vocab_size: int) -> EntropyBound:
    """Smallest entropy of softmax(z) over all z with Σ z_v = 0 and |z| ≤ s, in nats.

    Eq. 5, after Zhai et al. 2023, theorem 3.1. It is attained if one logit is s √((V−1)/V) and all others
    −s/√(V(V−1)): with the gap g = s √(V/(V−1)) and r = (V−1) e^−g, H = log(1 + r) + g r/(1 + r).
    """
    return _one_against_all(norm, math.sqrt(vocab_size / max(vocab_size - 1, 1)), vocab_size)


def capped_entropy_lower_bound(softcap: float, vocab_size: int) -> EntropyBound:
    """Smallest entropy of softmax(z) over |z_v| ≤ softcap: one logit is `softcap`, all others −`softcap`."""
    return _one_against_all(softcap, 2.0, vocab_size)


def _one_against_all(size: float, gap_of_size: float, vocab_size: int) -> EntropyBound:
    if vocab_size < 2:
        raise ValueError(f"vocab_size: expected at least 2, got {vocab_size}.")
    if not 0 <= size < math.inf:
        raise ValueError(f"expected a finite bound of the logits >= 0, got {size}.")
    gap = size * gap_of_size
    log_ratio = math.log(vocab_size - 1) - gap
    # log(1 + r) and r/(1 + r) from log r, because r may underflow.
    log_one_plus = float(np.logaddexp(0.0, log_ratio))
    log_one_minus_confidence = log_ratio - log_one_plus
    log_entropy = math.log(log_one_plus) if log_one_plus > 0 else log_ratio
    if gap > 0:
        log_entropy = float(np.logaddexp(log_entropy, math.log(gap) + log_one_minus_confidence))
    return EntropyBound(math.exp(log_entropy), log_entropy, math.exp(log_one_minus_confidence))
