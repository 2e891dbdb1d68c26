"""Losses per token: pure functions of `VocabStats`.

Every function returns the loss of each token in nats, float32 in the shape `[...]` of the statistics, unreduced. Tokens
that do not count have a loss and a gradient of exactly 0; `stats.mean` averages the others. "Reads": fields of `stats`.
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
    """−log q_y: a proper score, least in expectation exactly at the true probabilities.

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
    """(1−β)(−log q_y) + β (−1/V Σ_v log q_v), β in [0, 1] (Szegedy et al. 2016, section 7; arXiv 2508.00264, eq. 2).

    Reads `log_normalizer`, `target_logit` and `mean_logit`.
    """
    hard = -stats.log_prob()
    return _masked((1.0 - beta) * hard + beta * _uniform_cross_entropy(stats), stats)


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
    proper score: its minimum is not the true probability, and with α = 0.5 the head is driven far under-confident.

    Reads `log_normalizer`, `target_logit`, `mean_logit` and `correct`.

    Args:
        alpha: weight α in [0, 1] of the wrong tokens.
        balanced: average the right and the wrong tokens apart, then add the two means with the weights
            w_right = (1−α) n_wrong / m and w_wrong = α n_right / m, m = (1−α) n_wrong + α n_right. n counts tokens in
            the array given. Values are scaled so that their mean over all valid tokens is this loss. It is 0 if there
            are no right tokens or no wrong ones.
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
        not_padding = jnp.broadcast_to(True if where is None else where, counts.shape)
        known = not_padding if count_ignored else counts  # right or wrong
        n, n_right, n_known = (jnp.sum(x).astype(jnp.float32) for x in (counts, counts & right, known))
        right_weight, wrong_weight = _balanced_weights(alpha, n, n_right, n_known - n_right)
    # Right tokens pass no gradient through the mean: a bias of −inf makes it −inf, and 0·inf would be NaN.
    wrong = stats._replace(mean_logit=jnp.where(right, 0.0, stats.require("mean_logit")))
    loss_if_right = -right_weight * stats.log_prob()
    loss_if_wrong = wrong_weight * _uniform_cross_entropy(wrong)
    loss = jnp.where(right, loss_if_right, loss_if_wrong)
    return jnp.where(counts, loss, 0.0)


def _balanced_weights(alpha: Array, n: Array, n_right: Array, n_wrong: Array) -> tuple[Array, Array]:
    """Weights of a right and a wrong token, whose mean over n tokens is the balanced loss; 0 without one of a kind."""
    # w_right = right/m and w_wrong = wrong/m weight the two means. The caller's mean divides by n: a factor n/n_right
    # makes it the mean over the right tokens alone.
    right, wrong = (1.0 - alpha) * n_wrong, alpha * n_right
    m = right + wrong
    both = (n_right > 0) & (n_wrong > 0)
    right_weight = right * n / jnp.maximum(m * n_right, 1e-30)
    wrong_weight = wrong * n / jnp.maximum(m * n_wrong, 1e-30)
    return jnp.where(both, right_weight, 0.0), jnp.where(both, wrong_weight, 0.0)


def focal(stats: VocabStats, gamma: float | Float[Array, "..."]) -> Float[Array, "..."]:
    """−(1−q_y)^γ log q_y, γ >= 0 (Lin et al. 2017, eq. 4; for calibration Mukhoti et al. 2020).

    Reads `log_normalizer` and `target_logit`.
    """
    log_prob = jnp.minimum(stats.log_prob(), 0.0)
    # 1 − q from expm1 keeps its digits where q is near 1; the floor keeps the power's gradient finite at q = 1.
    one_minus_prob = jnp.maximum(-jnp.expm1(log_prob), 1e-12)
    return _masked(-(one_minus_prob**gamma) * log_prob, stats)


def sample_dependent_focal(
    stats: VocabStats, *, gamma_below: float = 5.0, gamma_above: float = 3.0
) -> Float[Array, "..."]:
    """FLSD-53, the focal loss with a focusing γ that adapts to the token (Mukhoti et al. 2020, section 4).

    −(1−q_y)^γ log q_y with γ = `gamma_below` where q_y < 0.2, else `gamma_above`; the step in γ is not differentiated.
    Reads `log_normalizer` and `target_logit`.
    """
    gamma = jnp.where(stats.log_prob() < math.log(0.2), gamma_below, gamma_above)
    return focal(stats, gamma)


def brier(stats: VocabStats, doubled: VocabStats) -> Float[Array, "..."]:
    """Σ_v (q_v − [v = y])², the Brier score over the whole vocabulary, 0 to 2 (Brier 1950). A proper score.

    Its absolute error is about 1e-6: it is a difference of numbers of size 1. Reads `log_normalizer`, `target_logit`.

    Args:
        stats: statistics at the scale s.
        doubled: `log_normalizer` of the same tokens at the scale 2s: Σ_v q_v² = exp(lse(2s) − 2 lse(s)).
    """
    excess = doubled.require("log_normalizer") - 2.0 * stats.require("log_normalizer")
    squares = jnp.exp(jnp.minimum(excess, 0.0))
    target = jnp.exp(jnp.minimum(stats.log_prob(), 0.0))
    return _masked(squares - 2.0 * target + 1.0, stats)


def focal_calibration(stats: VocabStats, doubled: VocabStats, gamma: float, weight: float) -> Float[Array, "..."]:
    """−(1−q_y)^γ log q_y + λ Σ_v (q_v − [v = y])²: focal loss and `brier` (Liang et al. 2024, arXiv 2410.18321).

    γ = `gamma` and λ = `weight` are >= 0. The second term pulls towards the true probabilities, which are not the
    minimum of the focal loss alone. For `stats` and `doubled` see `brier`.
    """
    return focal(stats, gamma) + weight * brier(stats, doubled)


def top_k_smoothing(stats: VocabStats, top_logits: Float[AnyArray, "... k"], beta: float) -> Float[Array, "..."]:
    """(1−β)(−log q_y) + β (−1/k Σ_{v in top k} log q_v): label smoothing over the k most likely tokens only.

    It is `TopKSmoothingLoss` in the code of Adaptive Temperature Scaling (arXiv 2409.19817), where k = 5, β = 0.1.
    The choice of the k tokens is not differentiated. Reads `log_normalizer` and `target_logit`.

    Args:
        top_logits: `[..., k]`, `kernels.top_logits(hidden, unembedding, k, ...).logits`, same bias and soft-cap.
        beta: β in [0, 1].
    """
    uniform = stats.require("log_normalizer") - stats.scale * jnp.mean(top_logits, axis=-1)
    return _masked(-(1.0 - beta) * stats.log_prob() + beta * uniform, stats)


def z_loss(stats: VocabStats) -> Float[Array, "..."]:
    """`log_normalizer`², the penalty on log Σ_v exp(s·z_v) (Chowdhery et al. 2022, section 5; weight 1e-4 there)."""
    return _masked(jnp.square(stats.require("log_normalizer")), stats)


def confidence_penalty(stats: VocabStats, weight: float) -> Float[Array, "..."]:
    """−log q_y − λ H(q), λ >= 0: cross-entropy minus λ times the entropy (Pereyra et al. 2017, eq. 1).

    Reads `log_normalizer`, `target_logit` and `expected_logit`.
    """
    return _masked(-stats.log_prob() - weight * stats.entropy(), stats)


def top_label(stats: VocabStats) -> Float[Array, "..."]:
    """Log loss of the confidence: −log c where the most likely token is right, −log(1 − c) where it is wrong.

    c = max_v q_v is the one probability that a reliability diagram shows, and this is a proper score for it. At most
    about 16, because c is clipped to 1 − 1e-7. Reads `log_normalizer`, `max_logit` and `correct`.
    """
    log_confidence = jnp.minimum(stats.log_confidence(), -1e-7)
    log_miss = jnp.log(-jnp.expm1(log_confidence))
    return _masked(-jnp.where(stats.require("correct"), log_confidence, log_miss), stats)


def joint(stats: VocabStats, top_label_weight: float | Float[Array, ""] = 1.0) -> Float[Array, "..."]:
    """−log q_y + w·`top_label`, w >= 0: a proper score of the whole distribution plus one of the confidence."""
    return cross_entropy(stats) + top_label_weight * top_label(stats)
