"""Long Horizon Temperature Scaling (arXiv 2302.03686): weights and loss from likelihoods, whatever model they are of.

A temperature on every next token sharpens one choice at a time. What is wanted is the whole sequence's distribution

    p_T(x) = p(x)^(1/T) / Z,

and a student q learns it from samples of p: KL(p_T ‖ q) is, up to what does not depend on q, and up to the factor Z,
−E_p[p(x)^(1/T − 1) log q(x)], a likelihood with weights. For one position i and what went before it, only the suffix is
left open, and with log p(x_i:) = Σ_{j≥i} log p(x_j | x_<j) the weight is

    w_i = exp((1/T − 1) (log p(x_i:) − b_i)).

A baseline b_i that does not depend on x_i: multiplies the loss of position i by a constant: it moves no minimiser. Here
it is a baseline of each token's log p, summed over the tokens of the suffix; so it does move the minimiser where
sequences end early, towards lengths whose tokens are likelier than the baseline. A horizon, which cuts the suffix off,
and clipping move it in any case, for less variance.

Data that are not samples of p, such as a corpus, give the weighted distribution of the data in place of p_T.
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
Mode = Literal["paper", "official"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Horizon:
    """What is free in the objective. Hashable.

    Attributes:
        horizon: tokens of a suffix, from its first, whose likelihood counts, at least 1; None: to the end.
        clip: largest log-weight, a number; a larger one becomes it. None: no clipping.
        baseline: of each token's log p: none; the running mean over all tokens; or that of each position.
        form: `suffix`: w_i weights −log q of the whole suffix, as far as the horizon; `next_token`: of its first token.
            Without horizon and clipping both have the minimiser p_T.
        kl_weight: of KL(q ‖ p) of every next token, at least 0: it holds the student near the scorer, and off p_T.
        average: `token`: the loss is the mean over all tokens of a batch; `sequence`: over the means of its sequences,
            so that a short one weighs as much as a long one.
    """

    horizon: int | None = None
    clip: float | None = None
    baseline: BaselineKind = "position"
    form: Form = "suffix"
    kl_weight: float = 0.0
    average: Literal["token", "sequence"] = "token"

    def check(self) -> None:
        """Raises `UserError` where a value is out of range."""
        ranges = {
            "horizon": (self.horizon is None or self.horizon >= 1, "at least 1"),
            "clip": (self.clip is None or not math.isnan(self.clip), "a number"),
            "kl_weight": (0 <= self.kl_weight < math.inf, "at least 0"),
        }
        for name, (right, expected) in ranges.items():
            if not right:
                raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}.")


MODES: dict[Mode, Horizon] = {
    "paper": Horizon(),
    "official": Horizon(
        horizon=8, clip=3.0, baseline="position", form="next_token", kl_weight=0.05, average="sequence"
    ),
}
"""`paper`: the objective as derived: the likelihood of the whole suffix, no clipping, no further term. We had its
abstract and the authors' code, not the sections on experiments: constants that may be used there are not in this.
`official`: the constants and the average of the authors' code for GPT-2
(github.com/AndyShih12/LongHorizonTemperatureScaling, conf/config_gpt2.yaml and model_gpt2.py, commit 5c4c39d). Their
running means count from 0.001 tokens, ours from 0: after n tokens of a position their baseline is 1/(1 + 0.001/n) of
ours.
"""


class RunningMean(NamedTuple):
    """Sums of log p and numbers of tokens so far, of each position; float32 `[T]` each."""

    total: Float[Array, " T"]
    count: Float[Array, " T"]

    @classmethod
    def empty(cls, length: int) -> "RunningMean":
        """Of no tokens yet."""
        return cls(jnp.zeros(length), jnp.zeros(length))

    def update(self, log_p: Float[Array, "B T"], where: Bool[Array, "B T"]) -> "RunningMean":
        """With the tokens of a batch, of those that count."""
        return RunningMean(
            self.total + jnp.sum(jnp.where(where, log_p.astype(jnp.float32), 0.0), axis=0),
            self.count + jnp.sum(where, axis=0).astype(jnp.float32),
        )

    def baseline(self, kind: BaselineKind) -> Float[Array, " T"]:
        """The mean log p of each position, or that of all positions at each; 0 where there was no token."""
        if kind == "none":
            return jnp.zeros_like(self.total)
        total, count = self
        if kind == "scalar":
            total, count = jnp.broadcast_to(total.sum(), total.shape), jnp.broadcast_to(count.sum(), count.shape)
        return total / jnp.maximum(count, 1.0)


def suffix_sums(
    values: Float[Array, "B T"],
    *,
    where: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    horizon: int | None = None,
) -> Float[Array, "B T"]:
    """Sums of each position's value and those after it: Σ_{j = i}^{i + horizon − 1} values_j.

    Args:
        values: `[B, T]`.
        where: values that count; None: all.
        segment_ids: sums end where a position's segment does; None: at the end of the row.
        horizon: number of values in a sum, at least 1; None: all.

    Returns:
        float32 `[B, T]`.

    Example:
        >>> import jax.numpy as jnp
        >>> suffix_sums(jnp.array([[-2.0, -1, -3, -1, -1]])).tolist()
        [[-8.0, -6.0, -5.0, -2.0, -1.0]]
        >>> suffix_sums(jnp.array([[-2.0, -1, -3, -1, -1]]), horizon=2).tolist()
        [[-3.0, -4.0, -4.0, -2.0, -1.0]]
    """
    values = values.astype(jnp.float32)
    if where is not None:
        values = jnp.where(where, values, 0.0)
    segments = jnp.zeros(values.shape, jnp.int32) if segment_ids is None else segment_ids
    last = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)), constant_values=True)

    def add(later: tuple[Array, Array], here: tuple[Array, Array]) -> tuple[Array, Array]:
        (after, ended), (value, ends) = later, here
        return jnp.where(ends, value, after + value), ended | ends

    sums, _ = jax.lax.associative_scan(add, (values, last), reverse=True, axis=1)
    if horizon is None or horizon >= values.shape[1]:
        return sums
    beyond = jnp.pad(sums[:, horizon:], ((0, 0), (0, horizon)))
    same = jnp.pad(segments[:, horizon:] == segments[:, :-horizon], ((0, 0), (0, horizon)))
    return sums - jnp.where(same, beyond, 0.0)


def log_weights(
    log_p: Float[Array, "B T"],
    temperature: Float[Array, " B"] | float,
    *,
    baseline: Float[Array, " T"] | float = 0.0,
    where: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    horizon: int | None = None,
    clip: float | None = None,
) -> Float[Array, "B T"]:
    """log w_i = (1/T − 1) Σ_{j ≥ i} (log p_j − b_j), as far as the horizon, and clip at most.

    Args:
        log_p: of each token under the scorer, nats, `[B, T]`.
        temperature: T > 0, of each row or of all.
        baseline: b, of each position or of all.
        where: tokens that count; None: all.
        segment_ids: of the sequences packed in a row; None: one sequence a row.
        horizon: tokens of a suffix that count, at least 1; None: all.
        clip: largest value; None: none.

    Returns:
        float32 `[B, T]`.

    Raises:
        UserError: a temperature or horizon, given as a Python number, is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> log_p = jnp.array([[-2.0, -1, -3, -1, -1]])
        >>> [round(x) for x in log_weights(log_p, 1 / 3, baseline=-1.5)[0].tolist()]
        [-1, 0, -1, 2, 1]
    """
    if isinstance(temperature, float | int) and not 0 < temperature < math.inf:
        raise UserError(f"temperature: expected a positive number, got {temperature}.")
    if horizon is not None and horizon < 1:
        raise UserError(f"horizon: expected at least 1, got {horizon}.")
    baselines = jnp.broadcast_to(jnp.asarray(baseline, jnp.float32), log_p.shape[1:])
    sums = suffix_sums(log_p - baselines[None, :], where=where, segment_ids=segment_ids, horizon=horizon)
    factor = 1.0 / jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), log_p.shape[:1]) - 1.0
    result = factor[:, None] * sums
    return result if clip is None else jnp.minimum(result, clip)


def token_weights(
    log_p: Float[Array, "B T"],
    temperature: Float[Array, " B"] | float,
    objective: Horizon,
    *,
    baseline: Float[Array, " T"] | float = 0.0,
    where: Bool[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """The factor of each token's −log q in the loss; a constant under differentiation.

    In the suffix form token j belongs to all suffixes that begin at or before it, and its factor is the sum of their
    weights: Σ_i w_i (−Σ_{j ≥ i} log q_j) = −Σ_j log q_j Σ_{i ≤ j} w_i.

    Args:
        log_p, temperature, baseline, where, segment_ids: as in `log_weights`.
        objective: horizon, clip and form; its baseline's kind is the caller's affair.

    Returns:
        float32 `[B, T]`, 0 where tokens do not count.
    """
    weights = jnp.exp(
        log_weights(
            log_p,
            temperature,
            baseline=baseline,
            where=where,
            segment_ids=segment_ids,
            horizon=objective.horizon,
            clip=objective.clip,
        )
    )
    if where is not None:
        weights = jnp.where(where, weights, 0.0)
    if objective.form == "suffix":
        backwards = None if segment_ids is None else segment_ids[:, ::-1]
        weights = suffix_sums(weights[:, ::-1], segment_ids=backwards, horizon=objective.horizon)[:, ::-1]
        if where is not None:
            weights = jnp.where(where, weights, 0.0)
    return jax.lax.stop_gradient(weights)


def long_horizon_loss(
    log_q: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    kl: Float[Array, "B T"] | None = None,
    kl_weight: float = 0.0,
    where: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """−w_i log q_i + kl_weight · KL_i of every token, unreduced.

    Args:
        log_q: of each token under the student, nats, `[B, T]`.
        weights: of `token_weights`.
        kl: of `reverse_kl`, or None.
        kl_weight: of it.
        where: tokens that count; None: all.

    Returns:
        float32 `[B, T]`, 0 where tokens do not count.
    """
    loss = -weights * log_q
    if kl is not None:
        loss = loss + kl_weight * kl
    return loss if where is None else jnp.where(where, loss, 0.0)


def sequence_weights(where: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None) -> Float[Array, "B T"]:
    """1/n of every token that counts, n the number of such tokens in its sequence; 0 of the others.

    Σ w ℓ is the sum of the sequences' means of ℓ, and Σ w the number of sequences in which a token counts.

    Args:
        where: tokens that count.
        segment_ids: of the sequences packed in a row; None: one sequence a row.

    Returns:
        float32 `[B, T]`.

    Example:
        >>> import jax.numpy as jnp
        >>> sequence_weights(jnp.array([[True, True, False, True]]), jnp.array([[1, 1, 1, 2]])).tolist()
        [[0.5, 0.5, 0.0, 1.0]]
    """
    ones = where.astype(jnp.float32)
    backwards = None if segment_ids is None else segment_ids[:, ::-1]
    before = suffix_sums(ones[:, ::-1], segment_ids=backwards)[:, ::-1]
    count = suffix_sums(ones, segment_ids=segment_ids) + before - ones
    return jnp.where(where, 1.0 / jnp.maximum(count, 1.0), 0.0)


def reverse_kl(student: Float[Array, "*B V"], scorer: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(q ‖ p) = Σ_v q_v (log q_v − log p_v) of next-token distributions, from logits `[..., V]`; nats, float32."""
    log_q = jax.nn.log_softmax(student.astype(jnp.float32))
    log_p = jax.nn.log_softmax(scorer.astype(jnp.float32))
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
