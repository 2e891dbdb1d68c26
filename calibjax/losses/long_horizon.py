"""Long Horizon Temperature Scaling (arXiv 2302.03686): weights and loss from token likelihoods of any model.

A temperature on next tokens sharpens one choice at a time. The target here is the distribution of whole sequences

    p_T(x) = p(x)^(1/T) / Z,

which a student q learns from samples of p: up to terms that do not depend on q and up to the factor Z, KL(p_T ‖ q) is
−E_p[p(x)^(1/T − 1) log q(x)], a weighted likelihood. Given the tokens before position i, only the suffix is random, and
with log p(x_i:) = Σ_{j≥i} log p(x_j | x_<j) the weight is

    w_i = exp((1/T − 1) (log p(x_i:) − b_i)).

A baseline b_i that does not depend on the suffix keeps the minimiser. Here b_i sums a baseline of each token's log p
over the suffix, which shifts the minimiser if sequences end early. A horizon (which truncates the suffix) and clipping
always shift it, for less variance. Data that are not samples of p, such as a corpus, give their weighted distribution.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.runtime.errors import UserError

BaselineKind = Literal["none", "scalar", "position"]
Form = Literal["suffix", "next_token"]
Mode = Literal["paper", "authors"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LhtsConfig:
    """Hyper-parameters of the objective. Hashable.

    Attributes:
        horizon: number of tokens of a suffix whose likelihood enters its weight, at least 1; default: all.
        clip: upper bound of log-weights; None disables clipping.
        baseline: of each token's log p: `none`, `scalar` (running mean of all tokens) or `position` (of each position).
        form: `suffix`: w_i weights −log q of the whole suffix, up to the horizon; `next_token`: of its first token.
            Without horizon and clipping, both have the minimiser p_T.
        kl_weight: weight >= 0 of KL(q ‖ p) of every next token, which keeps the student near the scorer and off p_T.
        average: the loss is the mean over all tokens of a batch (`token`), or over its sequences' means (`sequence`).
    """

    horizon: int | None = None
    clip: float | None = None
    baseline: BaselineKind = "position"
    form: Form = "suffix"
    kl_weight: float = 0.0
    average: Literal["token", "sequence"] = "token"


MODES: dict[Mode, LhtsConfig] = {
    "paper": LhtsConfig(),
    "authors": LhtsConfig(horizon=8, clip=3.0, form="next_token", kl_weight=0.05, average="sequence"),
}
"""`paper`: the objective as derived; constants of the paper's experiments may differ. `authors`: the constants and the
average of the authors' code for GPT-2 (github.com/AndyShih12/LongHorizonTemperatureScaling, conf/config_gpt2.yaml and
model_gpt2.py, commit 5c4c39d). Their running means start from a count of 0.001 tokens, ours from 0.
"""


class RunningMean(NamedTuple):
    """Sums of log p and counts of tokens so far for each position; float32 `[T]` each."""

    total: Float[Array, " T"]
    count: Float[Array, " T"]

    @classmethod
    def empty(cls, length: int) -> "RunningMean":
        """The state before any token."""
        return cls(jnp.zeros(length), jnp.zeros(length))

    def update(self, log_p: Float[Array, "B T"], where: Bool[Array, "B T"]) -> "RunningMean":
        """This state and the tokens of a batch for which `where` is True."""
        total = self.total + jnp.sum(jnp.where(where, log_p.astype(jnp.float32), 0.0), axis=0)
        return RunningMean(total, self.count + jnp.sum(where, axis=0).astype(jnp.float32))

    def baseline(self, kind: BaselineKind) -> Float[Array, " T"]:
        """Mean log p of each position, or of all positions if `kind` is "scalar"; 0 without tokens."""
        if kind == "none":
            return jnp.zeros_like(self.total)
        if kind == "position":
            return self.total / jnp.maximum(self.count, 1.0)
        mean = self.total.sum() / jnp.maximum(self.count.sum(), 1.0)
        return jnp.broadcast_to(mean, self.total.shape)


def _suffix_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"] | None, horizon: int | None = None
) -> Float[Array, "B T"]:
    """Σ_{j = i}^{i + horizon − 1} values_j at position i, up to the end of its segment.

    Joined from sums of 1, 2, 4, ... values: a difference of two long sums would lose what is small beside the largest.
    """
    length = values.shape[1]
    segments = jnp.zeros(values.shape, jnp.int32) if segment_ids is None else segment_ids

    def after(sums: Array, distance: int) -> Array:
        same = segments[:, distance:] == segments[:, : length - distance]
        return jnp.pad(jnp.where(same, sums[:, distance:], 0.0), ((0, 0), (0, distance)))

    horizon = min(horizon or length, length)
    total = jnp.zeros_like(values)
    for size in (2**k for k in range(horizon.bit_length())):  # `total` sums horizon % size values, and `values` size
        if horizon & size:
            total = total + after(values, horizon % size)
        values = values + after(values, size)
    return total


def _prefix_sums(
    values: Float[Array, "B T"], segment_ids: Int[Array, "B T"] | None, horizon: int | None = None
) -> Float[Array, "B T"]:
    """Σ_{j = i − horizon + 1}^i values_j at position i, from the start of its segment."""
    backwards = None if segment_ids is None else segment_ids[:, ::-1]
    return _suffix_sums(values[:, ::-1], backwards, horizon)[:, ::-1]


def token_weights(
    log_p: Float[Array, "B T"],
    temperature: Float[Array, " B"] | float,
    objective: LhtsConfig,
    *,
    baseline: Float[Array, " T"] | float = 0.0,
    where: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Weight of each token's −log q in the loss, without gradient; 0 where `where` is False.

    In the form `next_token` it is w_i, log w_i = min(clip, (1/T − 1) Σ_{j ≥ i} (log p_j − b_j)), where the sum ends
    after `horizon` tokens and with the segment. In the form `suffix` it is the sum of the weights of all suffixes that
    hold the token: Σ_i w_i (−Σ_{j ≥ i} log q_j) = −Σ_j log q_j Σ_{i ≤ j} w_i.

    Args:
        log_p: log-probability of each token under the scorer, nats, `[B, T]`.
        temperature: T > 0, of each row or of all rows.
        objective: its horizon, clip and form are read.
        baseline: b, of each position or of all positions.
        where: False for tokens that do not count.
        segment_ids: segments of sequences packed in a row; default: one sequence per row.

    Raises:
        UserError: a temperature that is a Python number is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> log_p = jnp.array([[-2.0, -1, -3, -1, -1]])
        >>> weights = token_weights(log_p, 1 / 3, LhtsConfig(form="next_token"), baseline=-1.5)
        >>> [round(x) for x in jnp.log(weights)[0].tolist()]
        [-1, 0, -1, 2, 1]
    """
    if isinstance(temperature, float | int) and not 0 < temperature < math.inf:
        raise UserError(f"temperature: expected a positive number, got {temperature}.")
    counts = True if where is None else where
    baselines = jnp.broadcast_to(jnp.asarray(baseline, jnp.float32), log_p.shape[1:])
    centred = jnp.where(counts, (log_p - baselines[None, :]).astype(jnp.float32), 0.0)
    sums = _suffix_sums(centred, segment_ids, objective.horizon)
    factor = 1.0 / jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), log_p.shape[:1]) - 1.0
    log_weights = factor[:, None] * sums
    if objective.clip is not None:
        log_weights = jnp.minimum(log_weights, objective.clip)
    weights = jnp.where(counts, jnp.exp(log_weights), 0.0)
    if objective.form == "suffix":
        weights = jnp.where(counts, _prefix_sums(weights, segment_ids, objective.horizon), 0.0)
    return jax.lax.stop_gradient(weights)


def long_horizon_loss(
    log_q: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    kl: Float[Array, "B T"] | None = None,
    kl_weight: float = 0.0,
    where: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """−w_i log q_i + kl_weight · KL_i of every token, nats, with `token_weights` and `reverse_kl`; 0 off `where`."""
    loss = -weights * log_q
    if kl is not None:
        loss = loss + kl_weight * kl
    return loss if where is None else jnp.where(where, loss, 0.0)


def sequence_weights(where: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
    """Weights 1/n of tokens that count, with n such tokens in their sequence; 0 for the others.

    Σ w ℓ is the sum over sequences of the mean of ℓ, and Σ w is the number of sequences with a token that counts.

    Example:
        >>> import jax.numpy as jnp
        >>> sequence_weights(jnp.array([[True, True, False, True]]), jnp.array([[1, 1, 1, 2]])).tolist()
        [[0.5, 0.5, 0.0, 1.0]]
    """
    ones = where.astype(jnp.float32)
    count = _suffix_sums(ones, segment_ids) + _prefix_sums(ones, segment_ids) - ones
    return jnp.where(where, 1.0 / jnp.maximum(count, 1.0), 0.0)


def reverse_kl(student: Float[Array, "*B V"], scorer: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(q ‖ p) = Σ_v q_v (log q_v − log p_v) of next-token distributions, from logits `[..., V]`; nats, float32."""
    log_q = jax.nn.log_softmax(student.astype(jnp.float32))
    log_p = jax.nn.log_softmax(scorer.astype(jnp.float32))
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
