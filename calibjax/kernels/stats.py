"""The statistics of a token over the vocabulary, and how sums over two parts of the vocabulary are merged."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Lower limit of differences of logits: its exponential is 0, and its square is still finite.
FLOOR = -1e15


def softcapped(x: Array, cap: float | None) -> Array:
    """z = cap·tanh(x / cap), the soft-cap of logits; x if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def times_slope(g: Array, z: Array, cap: float | None) -> Array:
    """g·∂z/∂x = g·(1 − (z/cap)²), the cotangent of x from the cotangent g of z = softcapped(x)."""
    return g if cap is None else g * (1.0 - jnp.square(z / cap))


def slope_in_units(u: Array, cap: float | None) -> Array | float:
    """The slope ∂z/∂x of the soft-cap from u = z/cap: Pallas kernels work in units of the soft-cap."""
    return 1.0 if cap is None else 1.0 - u * u


def softcap_unit(cap: float | None) -> float:
    """The size of one unit of u = z/cap in logits: the cap."""
    return 1.0 if cap is None else cap


class VocabStats(NamedTuple):
    """Statistics over the vocabulary of z = softcap(h Wᵀ + b), one value per token; every loss is algebra on them.

    All fields have the leading shape `[...]` of the hidden states. p = softmax(s·z) is the model's distribution at the
    inverse temperature s = `scale`. Tokens that are not `valid` (masked, or with target `ignore_index`) hold 0 in every
    float field, -1 in `argmax`, False in `correct`, and pass no gradient. A field that was not requested is None.

    Attributes:
        log_normalizer: log Σ_v exp(s·z_v).
        target_logit: z_y. NaN where a valid token's target lies outside [0, V).
        mean_logit: (1/V) Σ_v z_v.
        max_logit: max_v z_v.
        argmax: int32, the lowest v that attains it. It does not depend on s: no temperature can change it.
        expected_logit: E_p[z] = ∂ log_normalizer / ∂s.
        logit_variance: Var_p[z] = ∂ expected_logit / ∂s. Constant under differentiation.
        correct: bool, argmax = y.
        valid: bool, the token counts.
        scale: s; 1 if the caller gave none.
    """

    log_normalizer: Float[Array, "..."] | None
    target_logit: Float[Array, "..."] | None
    mean_logit: Float[Array, "..."] | None
    max_logit: Float[Array, "..."] | None
    argmax: Int[Array, "..."] | None
    expected_logit: Float[Array, "..."] | None
    logit_variance: Float[Array, "..."] | None
    correct: Bool[Array, "..."] | None
    valid: Bool[Array, "..."]
    scale: Float[Array, "..."]

    def require(self, name: str) -> Array:
        """The field `name`; raises ValueError where it was not requested from `vocab_stats`."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"this needs the statistic {name!r}: add it to vocab_stats(..., statistics=[...]).")
        return value

    def mean(self, values: Float[Array, "..."]) -> Float[Array, ""]:
        """Mean of per-token `values` `[...]`, such as a loss, over the valid tokens; 0 if no token is valid."""
        total = jnp.sum(jnp.where(self.valid, values, 0.0))
        return total / jnp.maximum(jnp.sum(self.valid), 1).astype(total.dtype)

    def log_prob(self) -> Float[Array, "..."]:
        """log p(y) = s·z_y − log_normalizer, in nats; 0 on invalid tokens.

        Where s·max z exceeds float32: 0 for the most likely token and −inf for others, if `max_logit` is there.
        """
        target_logit = self.require("target_logit")
        value = self.scale * target_logit - self.require("log_normalizer")
        if self.max_logit is not None:
            limit = jnp.where(target_logit < self.max_logit, -jnp.inf, 0.0)
            value = self._where_overflowed(self.max_logit, limit, value)
        return jnp.where(self.valid, value, 0.0)

    def log_confidence(self) -> Float[Array, "..."]:
        """max_v log p(v) = s·max z − log_normalizer, in nats, at most 0; 0 on invalid tokens."""
        max_logit = self.require("max_logit")
        value = self.scale * max_logit - self.require("log_normalizer")
        value = self._where_overflowed(max_logit, 0.0, value)
        at_most_0 = jnp.where(value > 0.0, 0.0, value)  # XLA's minimum loses NaN on CPUs
        return jnp.where(self.valid, at_most_0, 0.0)

    def confidence(self) -> Float[Array, "..."]:
        """max_v p(v), in [0, 1]; 0 on invalid tokens."""
        return jnp.where(self.valid, jnp.exp(self.log_confidence()), 0.0)

    def entropy(self) -> Float[Array, "..."]:
        """H(p) = log_normalizer − s·E_p[z], in nats; 0 on invalid tokens."""
        expected_logit = self.require("expected_logit")
        value = self.require("log_normalizer") - self.scale * expected_logit
        return jnp.where(self.valid, self._where_overflowed(expected_logit, 0.0, value), 0.0)

    def _where_overflowed(self, logit: Array, instead: Array | float, value: Array) -> Array:
        """`instead` where s·`logit` exceeds float32 though `logit` is finite, so that p is 0 or 1; else `value`."""
        overflowed = jnp.isinf(self.require("log_normalizer")) & jnp.isfinite(logit)
        return jnp.where(overflowed, instead, value)


STATISTICS = tuple(name for name in VocabStats._fields if name not in ("valid", "scale"))
"""Names that `vocab_stats(statistics=...)` accepts."""

DEFAULT_STATISTICS = tuple(name for name in STATISTICS if name != "logit_variance")


class Moments(NamedTuple):
    """Sums over one piece of the vocabulary for N tokens, relative to the piece's largest logit m to avoid overflow.

    Float32 [N], or [N, K] with `Options.scales` for `weight`, `first` and `second`; a field that is not needed is None.

    Attributes:
        max_logit: m.
        argmax: int32, index in the whole vocabulary of the first logit equal to m.
        weight, first, second: Σ e, Σ e (z − m) and Σ e (z − m)² with e = exp(s (z − m)).
        total: Σ z.
        target: z_y where y lies in this piece, else 0.
        expected_row: [N, D], float32 or the dtype of the hidden states: Σ_{v≠y} e c_v W_v / weight, where
            c_v = 1 − (z_v/cap)² is the slope of the soft-cap. The target's row is left out: where the model is nearly
            certain of the target, it would cancel against the one-hot and leave only rounding errors.
    """

    max_logit: Array
    argmax: Array | None
    weight: Array
    first: Array | None = None
    second: Array | None = None
    total: Array | None = None
    target: Array | None = None
    expected_row: Array | None = None

    def cumulants(self) -> tuple[Array, Array | None, Array | None]:
        """log Σ e, E_p[z] − m and Var_p[z], [N] or [N, K]; None where the sum that it needs is None."""
        shift = None if self.first is None else self.first / self.weight
        variance = None
        if self.second is not None and shift is not None:
            variance = jnp.maximum(self.second / self.weight - shift * shift, 0.0)
        # Without an entry of weight 1 the logits are NaN, which XLA's maximum loses on CPUs, or all −inf.
        log_weight = jnp.where(self.weight > 0.0, jnp.log(self.weight), jnp.nan)
        return log_weight, shift, variance


def moments(
    logits: Float[Array, "N C"],
    scale: Float[Array, " N"] | tuple[float, ...],
    targets: Int[Array, " N"] | None,
    start: Int[Array, ""] | int,
    needed: frozenset[str],
) -> Moments:
    """The moments of the columns `start` to `start + C − 1` of the vocabulary; `needed` names fields of `Moments`.

    A tuple of scales applies to all tokens: see `Options.scales`.
    """
    width = logits.shape[1]
    # Never −inf: a piece whose logits are all −inf has weight 0, not NaN.
    largest = jnp.maximum(jnp.max(logits, axis=1), jnp.finfo(logits.dtype).min)  # [N]
    shifted = jnp.maximum(logits - largest[:, None], FLOOR)  # [N, C]
    argmax = target = None
    if "argmax" in needed:
        argmax = start + first_equal(logits, largest)
    if "target" in needed:
        assert targets is not None
        column = targets - start
        is_inside = (column >= 0) & (column < width)
        column = jnp.clip(column, 0, width - 1)
        target = jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0]
        target = jnp.where(is_inside, target, 0.0)
    if isinstance(scale, tuple):
        weight, first, second = sums_at(scale, shifted)
    else:
        e = jnp.exp(scale[:, None] * shifted)
        weight = jnp.sum(e, axis=1)
        first = jnp.sum(e * shifted, axis=1) if "first" in needed else None
        second = jnp.sum(e * shifted * shifted, axis=1) if "second" in needed else None
    return Moments(
        max_logit=largest,
        argmax=argmax,
        total=jnp.sum(logits, axis=1) if "total" in needed else None,
        target=target,
        weight=weight,
        first=first,
        second=second,
    )


def first_equal(x: Float[Array, "N C"], largest: Float[Array, " N"]) -> Int[Array, " N"]:
    """The first column of each row that is equal to `largest`, or the last column if none is equal.

    For the maximum of a row this is `jnp.argmax`, but faster on CPUs, where XLA does not vectorise argmax.
    """
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == largest[:, None], column, x.shape[1] - 1), axis=1)


def octaves(scales: tuple[float, ...]) -> int:
    """The number of octaves L of K scales: the largest with `scales[k + K/L] == 2 * scales[k]` for every k."""
    count = len(scales)
    for per_octave in range(1, count):
        doubled = tuple(2.0 * scale for scale in scales[:-per_octave])
        if count % per_octave == 0 and scales[per_octave:] == doubled:
            return count // per_octave
    return 1


def sums_at(scales: tuple[float, ...], shifted: Float[Array, "N C"]) -> tuple[Array, Array, Array]:
    """Σ e, Σ e u and Σ e u² with e = exp(s u) and u = `shifted`, float32 [N, K], for each s of the K `scales`.

    If the scales are L `octaves`, only the K/L exponentials of the lowest octave are computed; each of the others is
    the square of the one an octave below. A square doubles the relative error of an exponential and rounds once more.
    """
    levels = octaves(scales)
    lowest = jnp.asarray(scales[: len(scales) // levels], jnp.float32)  # [K/L]

    def step(e: Array, next_scale: Array) -> tuple[Array, Array]:
        terms = []
        power = e
        for _ in range(levels):
            moment = power * shifted
            terms += [power, moment, moment * shifted]
            power = power * power
        # One reduction of all terms reads e and u once. As the loop's carry, e is computed once, not for each term.
        zeros = (jnp.zeros((), jnp.float32),) * len(terms)
        sums = jax.lax.reduce(tuple(terms), zeros, lambda x, y: tuple(map(jnp.add, x, y)), (1,))
        return jnp.exp(next_scale * shifted), jnp.stack(sums)

    _, sums = jax.lax.scan(step, jnp.exp(lowest[0] * shifted), jnp.roll(lowest, -1))  # [K/L, 3 L, N]
    by_level = sums.reshape(len(lowest), levels, 3, -1)
    by_sum = by_level.transpose(2, 3, 1, 0)  # [3, N, L, K/L]: the scales ascend by octave, then as `lowest` does
    weight, first, second = by_sum.reshape(3, shifted.shape[0], len(scales))
    return weight, first, second


def clip_infinities(x: Array) -> Array:
    """`x` with ±infinity replaced by the largest finite numbers, so that 0 times it is 0; NaN stays."""
    largest = jnp.finfo(x.dtype).max
    return jnp.clip(x, -largest, largest)


def inverse_weight(weight: Float[Array, " N"]) -> Float[Array, " N"]:
    """1/weight, and 0 for a piece whose logits are all −inf."""
    return jnp.where(weight > 0.0, 1.0 / jnp.where(weight > 0.0, weight, 1.0), 0.0)


def dense_cumulants(difference: Float[Array, "... V"], s: Array) -> tuple[Array, Array, Array]:
    """log Σ exp(s·d), E[d] and Var[d] of the differences d of the logits from the largest one, [...] each."""
    e = jnp.exp(jnp.broadcast_to(s, difference.shape[:-1])[..., None] * difference)  # [..., V]
    weight = jnp.sum(e, axis=-1)
    mean = jnp.sum(e * difference, axis=-1) / weight
    spread = jnp.square(difference - jax.lax.stop_gradient(mean)[..., None])
    variance = jnp.sum(e * spread, axis=-1) / weight
    return jnp.log(weight), mean, jax.lax.stop_gradient(variance)


def rebase_sums(sums: Mapping[str, Array], delta: Array, ratio: Array) -> dict[str, Array]:
    """The sums Σe ("weight"), Σeu ("first") and Σeu² ("second") for another reference logit: the old one minus `delta`.

    Σe' = r Σe, Σe'u' = r (Σeu + δ Σe), Σe'u'² = r (Σeu² + 2δ Σeu + δ² Σe) with r = exp(s δ), `ratio`.
    """
    weight = sums["weight"]
    new = {"weight": ratio * weight}
    if "first" in sums:
        new["first"] = ratio * (sums["first"] + delta * weight)
    if "second" in sums:
        growth = 2.0 * sums["first"] + delta * weight
        new["second"] = ratio * (sums["second"] + delta * growth)
    return new


def merge(a: Moments, b: Moments, scale: Float[Array, " N"] | Float[Array, "1 K"]) -> Moments:
    """The moments of two disjoint pieces of the vocabulary together; `scale` is what `Options.scales_of_sums` returns.

    Associative and commutative. Sums move to the larger maximum and are added; `expected_row` is averaged by weight.
    """
    largest = jnp.maximum(a.max_logit, b.max_logit)

    def terms(piece: Moments) -> dict[str, Array]:
        present = {name: x for name, x in piece._asdict().items() if x is not None}
        delta = jnp.maximum(piece.max_logit - largest, FLOOR)
        delta = delta if scale.ndim == 1 else delta[:, None]  # [N], or [N, 1] beside [N, K]
        terms = rebase_sums(present, delta, jnp.exp(scale * delta))
        if "expected_row" in present:
            terms["expected_row"] = terms["weight"][:, None] * present["expected_row"]
        return terms | {name: present[name] for name in ("total", "target") if name in present}

    argmax = None
    if a.argmax is not None and b.argmax is not None:
        b_is_first = (b.max_logit == a.max_logit) & (b.argmax < a.argmax)
        argmax = jnp.where((b.max_logit > a.max_logit) | b_is_first, b.argmax, a.argmax)
    sums = jax.tree.map(jnp.add, terms(a), terms(b))
    if "expected_row" in sums:
        sums["expected_row"] = sums["expected_row"] * inverse_weight(sums["weight"])[:, None]
    return Moments(max_logit=largest, argmax=argmax, **sums)
