"""Losses per token: pure functions of `VocabStats`.

Every function returns one unreduced loss per token, float32 `[...]` like the statistics, in nats. Tokens that do not
count have a loss and a gradient of exactly 0; `stats.mean` averages the others. "Reads" lists the fields of `stats`.
Notation: s inverse temperature, z logits (after any soft-cap), q = softmax(s·z), y target, V vocabulary size.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from calibjax.kernels import VocabStats
from calibjax.runtime.arrays import AnyArray


def _masked(loss: Float[Array, "..."], stats: VocabStats) -> Float[Array, "..."]:
    return jnp.where(stats.valid, loss, 0.0)


def _uniform_cross_entropy(stats: VocabStats) -> Float[Array, "..."]:
    """−(1/V) Σ_v log q_v = log_normalizer − s·mean_logit."""
    return stats.require("log_normalizer") - stats.scale * stats.require("mean_logit")


def cross_entropy(stats: VocabStats) -> Float[Array, "..."]:
    """Cross-entropy, −log q_y: a proper score, so its expectation is least exactly at the true probabilities.

    Reads `log_normalizer` and `target_logit`.

    Example:
        >>> from calibjax.kernels import vocab_stats
        >>> z = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
        >>> stats = vocab_stats(z, jnp.eye(3), jnp.array([0]))
        >>> round(float(cross_entropy(stats)[0]), 4)
        0.3567
    """
    return _masked(-stats.log_prob(), stats)


def label_smoothing(stats: VocabStats, beta: float | Float[Array, ""]) -> Float[Array, "..."]:
    """Label smoothing, (1−β)(−log q_y) + β (−1/V Σ_v log q_v) with β in [0, 1]: the target is partly uniform.

    Szegedy et al. 2016, section 7; arXiv 2508.00264, eq. 2. Reads `log_normalizer`, `target_logit` and `mean_logit`.
    """
    target_loss = -stats.log_prob()
    uniform_loss = _uniform_cross_entropy(stats)
    return _masked((1.0 - beta) * target_loss + beta * uniform_loss, stats)


def selective_smoothing(
    stats: VocabStats,
    alpha: float | Float[Array, ""] = 0.5,
    *,
    balanced: bool = False,
    count_ignored: bool = False,
    where: Bool[AnyArray, "..."] | None = None,
) -> Float[Array, "..."]:
    """Selective smoothing, the loss of Adaptive Temperature Scaling (arXiv 2409.19817, section 3).

    −(1−α) log q_y where the base model's most likely token is right, −(α/V) Σ_v log q_v where it is wrong. It is not a
    proper score: its minimum is not the true probability, and α = 0.5 makes the head strongly underconfident.

    Reads `log_normalizer`, `target_logit`, `mean_logit` and `correct`.

    Args:
        alpha: weight α in [0, 1] of the wrong tokens.
        balanced: take the mean over the right tokens and the mean over the wrong ones, and add them with the weights
            w_right = (1−α) n_wrong / m and w_wrong = α n_right / m, where m = (1−α) n_wrong + α n_right and n counts
            tokens of this array. Values are scaled so that their mean over valid tokens is this sum; 0 without both.
        count_ignored: count a token whose label is ignored (−100) as a wrong token with a loss of 0, as
            `SelectiveSmoothingLoss` of the authors' code does (github.com/Johnathan-Xie/adaptive-temperature-scaling,
            commit f144309). It needs `balanced`. By default such a token does not count.
        where: bool `[...]`, False for padding, which never counts.
    """
    if count_ignored and not balanced:
        raise ValueError("count_ignored: expected balanced=True with it, got balanced=False.")
    counts = stats.valid if where is None else stats.valid & where
    right = stats.require("correct")
    alpha = jnp.asarray(alpha, jnp.float32)
    right_weight, wrong_weight = 1.0 - alpha, alpha
    if balanced:
        right_or_wrong = counts
        if count_ignored:
            right_or_wrong = jnp.broadcast_to(True if where is None else where, counts.shape)
        n = jnp.sum(counts).astype(jnp.float32)
        n_right = jnp.sum(counts & right).astype(jnp.float32)
        n_wrong = jnp.sum(right_or_wrong).astype(jnp.float32) - n_right
        right_weight, wrong_weight = _balanced_weights(alpha, n, n_right, n_wrong)
    # Right tokens pass no gradient through the mean: a bias of −inf makes it −inf, and 0·inf would be NaN.
    wrong = stats._replace(mean_logit=jnp.where(right, 0.0, stats.require("mean_logit")))
    loss_if_right = -right_weight * stats.log_prob()
    loss_if_wrong = wrong_weight * _uniform_cross_entropy(wrong)
    loss = jnp.where(right, loss_if_right, loss_if_wrong)
    return jnp.where(counts, loss, 0.0)


def _balanced_weights(alpha: Array, n: Array, n_right: Array, n_wrong: Array) -> tuple[Array, Array]:
    """w_right · n/n_right and w_wrong · n/n_wrong: a mean over n tokens is then the sum of the two weighted means."""
    w_right_m = (1.0 - alpha) * n_wrong
    w_wrong_m = alpha * n_right
    m = w_right_m + w_wrong_m
    right_weight = w_right_m * n / jnp.maximum(m * n_right, 1e-30)
    wrong_weight = w_wrong_m * n / jnp.maximum(m * n_wrong, 1e-30)
    has_both = (n_right > 0) & (n_wrong > 0)
    return jnp.where(has_both, right_weight, 0.0), jnp.where(has_both, wrong_weight, 0.0)


def focal(stats: VocabStats, gamma: float | Float[Array, "..."]) -> Float[Array, "..."]:
    """Focal loss, −(1−q_y)^γ log q_y with γ >= 0 (Lin et al. 2017, eq. 4; for calibration Mukhoti et al. 2020).

    Reads `log_normalizer` and `target_logit`.
    """
    log_prob = jnp.minimum(stats.log_prob(), 0.0)
    # 1 − q from expm1 keeps its digits where q is near 1; the floor keeps the power's gradient finite at q = 1.
    one_minus_prob = jnp.maximum(-jnp.expm1(log_prob), 1e-12)
    return _masked(-(one_minus_prob**gamma) * log_prob, stats)


def sample_dependent_focal(
    stats: VocabStats, *, gamma_below: float = 5.0, gamma_above: float = 3.0
) -> Float[Array, "..."]:
    """Focal loss with a γ that depends on the token: FLSD-53 (Mukhoti et al. 2020, section 4).

    −(1−q_y)^γ log q_y with γ = `gamma_below` where q_y < 0.2, else `gamma_above`; the step in γ is not differentiated.
    Reads `log_normalizer` and `target_logit`.
    """
    gamma = jnp.where(stats.log_prob() < math.log(0.2), gamma_below, gamma_above)
    return focal(stats, gamma)


def brier(stats: VocabStats, doubled: VocabStats) -> Float[Array, "..."]:
    """Brier score over the vocabulary, Σ_v (q_v − [v = y])² = Σ_v q_v² − 2 q_y + 1, in [0, 2]; proper (Brier 1950).

    Its absolute error is about 1e-6, that of a sum of terms of size 1. Reads `log_normalizer` and `target_logit`.

    Args:
        stats: statistics at the scale s.
        doubled: `log_normalizer` of the same tokens at the scale 2s: Σ_v q_v² = exp(lse(2s) − 2 lse(s)).
    """
    log_sum_of_squares = doubled.require("log_normalizer") - 2.0 * stats.require("log_normalizer")
    sum_of_squares = jnp.exp(jnp.minimum(log_sum_of_squares, 0.0))
    target_prob = jnp.exp(jnp.minimum(stats.log_prob(), 0.0))
    return _masked(sum_of_squares - 2.0 * target_prob + 1.0, stats)


def focal_calibration(stats: VocabStats, doubled: VocabStats, gamma: float, weight: float) -> Float[Array, "..."]:
    """Focal loss plus the Brier score, −(1−q_y)^γ log q_y + λ Σ_v (q_v − [v = y])² (Liang et al., arXiv 2410.18321).

    γ = `gamma` and λ = `weight` are >= 0. The second term pulls towards the true probabilities, where the focal loss
    alone does not have its minimum. For `stats` and `doubled` see `brier`.
    """
    return focal(stats, gamma) + weight * brier(stats, doubled)


def top_k_smoothing(stats: VocabStats, top_logits: Float[AnyArray, "... k"], beta: float) -> Float[Array, "..."]:
    """Label smoothing over the k most likely tokens only, (1−β)(−log q_y) + β (−1/k Σ_{v in top k} log q_v).

    It is `TopKSmoothingLoss` in the code of Adaptive Temperature Scaling (arXiv 2409.19817), with k = 5 and β = 0.1.
    The choice of the k tokens is not differentiated. Reads `log_normalizer` and `target_logit`.

    Args:
        top_logits: `[..., k]`, `kernels.top_logits(hidden, unembedding, k, ...).logits`, same bias and soft-cap.
        beta: β in [0, 1].
    """
    target_loss = -stats.log_prob()
    top_k_loss = stats.require("log_normalizer") - stats.scale * jnp.mean(top_logits, axis=-1)
    return _masked((1.0 - beta) * target_loss + beta * top_k_loss, stats)


def z_loss(stats: VocabStats) -> Float[Array, "..."]:
    """z-loss, (log Σ_v exp(s·z_v))²: keeps the logits small (Chowdhery et al. 2022, section 5, with weight 1e-4)."""
    return _masked(jnp.square(stats.require("log_normalizer")), stats)


def confidence_penalty(stats: VocabStats, weight: float) -> Float[Array, "..."]:
    """Cross-entropy minus λ times the entropy, −log q_y − λ H(q) with λ >= 0 (Pereyra et al. 2017, eq. 1).

    Reads `log_normalizer`, `target_logit` and `expected_logit`.
    """
    return _masked(-stats.log_prob() - weight * stats.entropy(), stats)


def top_label(stats: VocabStats) -> Float[Array, "..."]:
    """Log loss of the confidence: −log c where the most likely token is right, −log(1 − c) where it is wrong.

    c = max_v q_v is the one probability that a reliability diagram shows, and this is a proper score for it. At most
    about 16, because c is clipped to 1 − 1e-7. Reads `log_normalizer`, `max_logit` and `correct`.
    """
    log_confidence = jnp.minimum(stats.log_confidence(), -1e-7)
    log_one_minus_confidence = jnp.log(-jnp.expm1(log_confidence))
    log_likelihood = jnp.where(stats.require("correct"), log_confidence, log_one_minus_confidence)
    return _masked(-log_likelihood, stats)


def joint(stats: VocabStats, top_label_weight: float | Float[Array, ""] = 1.0) -> Float[Array, "..."]:
    """Cross-entropy plus w times `top_label`, w >= 0: a proper score of the distribution plus one of the confidence."""
    return cross_entropy(stats) + top_label_weight * top_label(stats)
