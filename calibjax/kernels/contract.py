"""The contract between the operator and its implementations: what a pass over the vocabulary receives and returns.

All Pallas kernels form dz, the cotangent of the logits before the soft-cap, by `dz_of_logits`, from logits in units of
the soft-cap and from values of the tokens that are scaled once to fit.

z = softcap(h Wᵀ + b), p = softmax(s·z), c_v = 1 − (z_v/cap)² (1 without a soft-cap).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import FLOOR, Moments, clip_infinities, slope_in_units, softcap_unit


class Options(NamedTuple):
    """Static options of both passes; see `vocab_stats`.

    With `scales`, K that all tokens have, `weight`, `first` and `second` of `Moments` are [N, K]; no backward pass.
    """

    softcap: float | None = None
    precision: jax.lax.PrecisionLike = None
    chunk_size: int | None = None
    save_logits: bool = False
    scales: tuple[float, ...] | None = None

    def scales_of_sums(self, inputs: "Inputs") -> Array:
        """The s of the sums over the vocabulary: [N], or [1, K] where all tokens have the same scales."""
        return inputs.scale if self.scales is None else jnp.asarray(self.scales, jnp.float32)[None, :]

    def matmul(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        """The product of two matrices over one dimension of each, in float32."""
        dimensions = (((contract[0],), (contract[1],)), ((), ()))
        return jax.lax.dot_general(a, b, dimensions, precision=self.precision, preferred_element_type=jnp.float32)


class Inputs(NamedTuple):
    """N tokens and the unembedding that scores them. In `Implementation.check` all are `jax.ShapeDtypeStruct`."""

    hidden: Array  # [N, D]
    unembedding: Array  # [V, D], of the dtype of `hidden`
    bias: Array | None  # float32 [V]
    scale: Array  # float32 [N], s
    targets: Array | None  # int32 [N]; a target outside [0, V) matches nothing
    valid: Array | None  # bool [N]; a token that does not count may hold anything; if None, all count

    def masked(self) -> "Inputs":
        """The same with hidden states of 0 where a token does not count."""
        if self.valid is None:
            return self
        return self._replace(hidden=jnp.where(self.valid[:, None], self.hidden, 0))


class Cotangents(NamedTuple):
    """Coefficients of the cotangent of h Wᵀ + b, one row of V for each token; None is zero:

        c_v (p_v (softmax + centred (z_v − E)) + uniform) + Σ_k [v = ids_k] g_k,   p_v = exp(s z_v − log_normalizer).

    Attributes:
        log_normalizer: float32 [N], of the whole vocabulary; inf for invalid tokens, so that p = 0.
        softmax, centred, uniform: float32 [N].
        expected_logit: float32 [N], E = E_p[z]; given with `centred`.
        one_hots: pairs of ids int32 [N] and g float32 [N], which includes c_v; ids outside [0, V) match nothing.
        expected_row: `Moments.expected_row` [N, D] of the whole vocabulary, as the forward pass returned it; `sharded`
            has one term per device instead, with an axis of devices in front. If given, the softmax part of dh is
            `softmax`·`expected_row`, except for the target's, which is in `one_hots`.
        saved: as the forward pass returned it; if None, the logits are computed again.
    """

    log_normalizer: Array
    softmax: Array | None
    centred: Array | None
    expected_logit: Array | None
    uniform: Array | None
    one_hots: tuple[tuple[Array, Array], ...]
    expected_row: Array | None = None
    saved: Any = None

    def hidden_is_closed(self, options: Options) -> bool:
        """dh needs no logits: the softmax part is absent or known, and the uniform part has no factor c_v."""
        known = self.expected_row is not None or self.softmax is None
        return known and self.centred is None and (self.uniform is None or options.softcap is None)

    def in_range_of(self, dtype: Any) -> tuple["Cotangents", Array | None]:
        """For float16 the coefficients times a factor, so that dz does not underflow, and the factor; else None."""
        coefficients = (self.softmax, self.centred, self.uniform, [g for _, g in self.one_hots])
        given = jax.tree.leaves(coefficients)
        if dtype != jnp.float16 or not given:
            return self, None
        sizes = jnp.abs(jax.lax.stop_gradient(jnp.stack(given)))
        largest = jnp.max(sizes, initial=0.0, where=jnp.isfinite(sizes))  # NaN and infinity stay in their rows
        factor = _LARGEST_IN_FLOAT16 / jnp.clip(largest, 1e-30, 1e30)
        softmax, centred, uniform, at_one_hots = jax.tree.map(lambda g: g * factor, coefficients)
        one_hots = tuple((ids, g) for (ids, _), g in zip(self.one_hots, at_one_hots, strict=True))
        return self._replace(softmax=softmax, centred=centred, uniform=uniform, one_hots=one_hots), factor


LOG2_E = math.log2(math.e)
_LARGEST_IN_FLOAT16 = 1024.0  # coefficient of p: its products with s p (z − E), at most some log V, do not overflow
SMALLEST_SAVED = 2.0**-120  # smallest exponential that is saved; under a soft-cap the slope, in place of smaller ones


def token_values(options: Options, inputs: Inputs, cotangents: Cotangents) -> dict[str, Array]:
    """The per-token values that `dz_of_logits` reads, except the ids: name -> float32 [N]."""
    in_logits = softcap_unit(options.softcap)
    centred, expected = cotangents.centred, cotangents.expected_logit
    values = {
        "scale": inputs.scale * (LOG2_E * in_logits),
        "log_normalizer": cotangents.log_normalizer * LOG2_E,
        "softmax": cotangents.softmax,
        "centred": None if centred is None else centred * in_logits,
        "expected": None if expected is None else expected / in_logits,
        "uniform": cotangents.uniform,
        **{f"g{k}": g for k, (_, g) in enumerate(cotangents.one_hots)},
    }
    return {name: value for name, value in values.items() if value is not None}


def dz_of_logits(
    options: Options,
    z: Array,
    value: Callable[[str], Any],
    hit: Callable[[int], Array],
    p: Array | None = None,
    slope: Array | float | None = None,
) -> Array:
    """dz of one block of logits.

    `z` are logits in units of the soft-cap. `value` maps a name of `token_values` to its values in the block's shape,
    or to None. `hit(k)` marks the column of the k-th one-hot, for each k that has a value "g{k}". `slope`, the slope of
    the soft-cap at z, and `p` = exp(s z − log_normalizer) are computed unless given.
    """
    softmax, centred, uniform = value("softmax"), value("centred"), value("uniform")
    dz = None
    if softmax is not None:
        if centred is not None:
            softmax = clip_infinities(softmax + centred * jnp.maximum(z - value("expected"), FLOOR))
        p = jnp.exp2(z * value("scale") - value("log_normalizer")) if p is None else p
        dz = p * softmax
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    slope = slope_in_units(z, options.softcap) if slope is None else slope
    dz = jnp.zeros_like(z) if dz is None else dz * slope
    k = 0
    while (coefficient := value(f"g{k}")) is not None:
        dz = dz + jnp.where(hit(k), coefficient, 0.0)
        k += 1
    return dz


class Gradients(NamedTuple):
    """Gradients, in float32 or in the dtype of their array; a gradient that is not wanted is None."""

    hidden: Array | None = None
    unembedding: Array | None = None
    bias: Array | None = None


class Implementation:
    """Two passes over the vocabulary; hashable, because it is a static argument.

    Attributes:
        gives_expected_row: `forward` can give `Moments.expected_row`.
        gradients_are_separate: dh and dW are computed by separate passes, each of which recomputes the logits. To save
            one pass, dh comes out of the forward pass where both are wanted and no logits are saved.
        accumulates: `backward` takes `into`.
        is_dense: `compute` writes the formula out, for JAX to differentiate, and there are no passes.
    """

    gives_expected_row = True
    gradients_are_separate = False
    accumulates = False
    is_dense = False

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        """Describes for `explain` how a call runs; raises NotImplementedError with the reason if it cannot run."""
        raise NotImplementedError

    def compute(self, options: Options, statistics: frozenset[str], inputs: Inputs) -> dict[str, Array]:
        """The `statistics` by name, where `is_dense`; see `operator.compute`."""
        raise NotImplementedError

    def forward(self, options: Options, needed: frozenset[str], save: bool, inputs: Inputs) -> tuple[Moments, Any]:
        """The moments of the whole vocabulary, with any value for invalid tokens; `needed` names their optional fields.

        With `save`, the second result is what `backward` uses instead of computing the logits again; else None.
        """
        raise NotImplementedError

    def backward(
        self, options: Options, wanted: frozenset[str], inputs: Inputs, cotangents: Cotangents, into: Gradients | None
    ) -> Gradients:
        """The gradients that `wanted` names. Invalid tokens add nothing, even with NaN in `hidden`.

        `into`: float32 gradients in unembedding and bias from earlier tokens, which these tokens are added to; or None.
        """
        raise NotImplementedError

    def saved_bytes(self, itemsize: int) -> float:
        """Bytes that `forward` saves per logit; `itemsize`: bytes of one number of a hidden state."""
        return 4.0


def first_order(static: int) -> Callable[..., Any]:
    """Decorator of a pass by Pallas kernels, its first `static` arguments static: second derivatives raise an error."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        checked = jax.custom_jvp(run, nondiff_argnums=tuple(range(static)))

        @checked.defjvp
        def _differentiated(*_: Any) -> Any:
            raise NotImplementedError("second derivatives: not in Pallas kernels. Pass implementation='chunked'.")

        return lambda *arguments: checked(*arguments)

    return decorate


def padded(x: Array | None, length: int, value: float = 0) -> Any:
    """`x` with its first axis padded at the end with `value`; a mask is padded with False."""
    if x is None or x.shape[0] == length:
        return x
    padding = [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=value)


class Refs(dict[str, Any]):
    """The references of a Pallas kernel as attributes by name; a name without a reference gives None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)
