"""`vocab_curves`: the statistics of a frozen model's tokens as functions of the scale, in one pass over the vocabulary.

The logits z of a frozen model never change; only the scale s does. With m = max z and u = z − m ≤ 0,

    f(s) = log Σ_v exp(s·u_v),   f' = E_p[z] − m ≤ 0,   f'' = Var_p[z] ≥ 0,   log_normalizer = s·m + f(s).

f is smooth and convex. f, f' and f'' at K scales determine it in between by quintic Hermite interpolation
(`interpolation`), and every loss is algebra on f, f' and constants of the token: no fit of a head depends on V or D.
"""

import dataclasses
import itertools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import api, interpolation, reference
from calibjax.kernels.operator import masked
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import STATISTICS, VocabStats
from calibjax.kernels.top_k import top_logits
from calibjax.runtime.arrays import AnyArray

SCALES = tuple(2.0**octave * 2.0 ** (k / 4) for octave, k in itertools.product(range(-3, 3), range(4)))
"""The default scales: 24 from 1/8 to 6.73, four an octave, each the double of the one four before."""
DOUBLED_SCALES = (*SCALES, *(4.0 * scale for scale in SCALES[-8:]))
"""Scales to 26.9, two octaves more, for losses that read the statistics at 2 s too: a head's s is at most 10."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VocabCurves:
    """The statistics of each token at K scales; `at` interpolates them to any.

    A pytree whose arrays all begin with the leading shape `[...]` of the hidden states; `scales` is static. Constants
    under differentiation. Tokens that are not `valid` hold 0 in float fields, -1 in `argmax` and False in `correct`.

    Attributes:
        log_weight: float32 `[..., K]`, f(s) = log Σ_v exp(s (z_v − max z)), at least 0.
        expected_difference: float32 `[..., K]`, f'(s) = E_p[z] − max z, at most 0.
        logit_variance: float32 `[..., K]`, f''(s) = Var_p[z].
        target_logit, mean_logit, max_logit, argmax, correct: as in `VocabStats`; first and last None without targets.
        top_logits: float32 `[..., k]`, the largest logits, largest first; None where none were requested.
        valid: bool `[...]`, the token counts.
        scales: K inverse temperatures, rising.
    """

    log_weight: Float[Array, "... K"]
    expected_difference: Float[Array, "... K"]
    logit_variance: Float[Array, "... K"]
    target_logit: Float[Array, "..."] | None
    mean_logit: Float[Array, "..."]
    max_logit: Float[Array, "..."]
    argmax: Int[Array, "..."]
    correct: Bool[Array, "..."] | None
    top_logits: Float[Array, "... k"] | None
    valid: Bool[Array, "..."]
    scales: tuple[float, ...] = dataclasses.field(metadata={"static": True})

    def at(self, scale: Float[AnyArray, "..."] | float) -> VocabStats:
        """The statistics at inverse temperature s > 0, `[...]` or a scalar, without the vocabulary.

        Differentiable in `scale`, as `vocab_stats`, by the derivatives of the interpolated function. Beyond the first
        and the last of `scales` f continues as `interpolation.extrapolate` describes.

        Example:
            >>> import jax.numpy as jnp
            >>> curves = vocab_curves(jnp.log(jnp.array([[0.7, 0.2, 0.1]])), jnp.eye(3), jnp.array([0]))
            >>> [round(float(curves.at(s).log_prob()[0]), 4) for s in (1.0, 1.5)]
            [-0.3567, -0.1879]
        """
        scale = api.as_scale(scale, self.valid.shape)
        jets = interpolation.Jet(self.log_weight, self.expected_difference, self.logit_variance)
        safe_scale = jnp.where(self.valid, scale, 1.0)
        f, slope, curvature = interpolation.interpolate(self.scales, jax.lax.stop_gradient(jets), safe_scale)
        values = {
            "log_normalizer": safe_scale * self.max_logit + f,
            "expected_logit": self.max_logit + slope,
            "logit_variance": jnp.maximum(jax.lax.stop_gradient(curvature), 0.0),
        }
        values = {name: masked(self.valid, value) for name, value in values.items()}
        constants = {name: getattr(self, name) for name in STATISTICS if name not in values}
        return VocabStats(**values, **constants, valid=self.valid, scale=scale)


def vocab_curves(
    hidden: Float[AnyArray, "*B D"],
    unembedding: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "*B"] | None = None,
    *,
    scales: tuple[float, ...] = SCALES,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[AnyArray, "*B"] | None = None,
    ignore_index: int = -100,
    top_k: int = 0,
    sharding: VocabSharding | None = None,
    **execution: Unpack[api.Execution],
) -> VocabCurves:
    """Statistics of the logits z = softcap(h Wᵀ + b) at K scales, without holding all logits.

    One product N·D·V and, for each logit, three sums and an exponential at each of the K scales, or at K/L of them
    where the scales are L octaves (`stats.octaves`). For frozen models: the result is a constant under differentiation.

    Args:
        hidden, unembedding, targets, bias, softcap, where, ignore_index, sharding: as in `vocab_stats`.
        scales: at least two finite inverse temperatures above 0, rising.
        top_k: how many of the largest logits to return, 0 to V; they take a product and a pass of their own.
        execution: implementation, chunk_size and precision, as in `vocab_stats`.

    Returns:
        `VocabCurves`, float32. Tokens that do not count hold 0, even with NaN in their hidden state.

    Raises:
        ValueError: for shapes, dtypes or options that do not fit.
        NotImplementedError: where the implementation named cannot run this call here, or none can.

    Example:
        >>> import jax.numpy as jnp
        >>> curves = vocab_curves(jnp.ones((2, 4)), jnp.eye(3, 4), jnp.array([0, -100]), scales=(0.5, 1.0, 2.0))
        >>> curves.log_weight.shape, [round(float(x), 4) for x in curves.at(0.7).log_prob()]
        ((2, 3), [-1.0986, 0.0])
    """
    scales = tuple(float(scale) for scale in scales)
    are_rising = all(0 < a < b < math.inf for a, b in itertools.pairwise(scales))
    if len(scales) < 2 or not are_rising:
        raise ValueError(f"scales: expected at least two finite numbers above 0, rising, got {scales}.")
    if execution.get("save_logits"):
        raise ValueError("save_logits: it changes a backward pass, and vocab_curves has none; leave it out.")
    if not 0 <= top_k <= unembedding.shape[0]:
        raise ValueError(f"top_k: expected 0 to the vocabulary size {unembedding.shape[0]}, got {top_k}.")
    need_targets = {"target_logit", "correct"}
    statistics = tuple(name for name in STATISTICS if targets is not None or name not in need_targets)
    arrays = api.Arrays(hidden, unembedding, targets, bias, where)
    dispatch, arrays = api.prepare(arrays, softcap, statistics, sharding, execution, scales)
    arrays = jax.lax.stop_gradient(arrays)
    values, valid = api.run_call(dispatch, arrays, api.as_scale(None, arrays.hidden.shape[:-1]), ignore_index)
    top = None
    if top_k:
        options: Any = {"bias": arrays.bias, "softcap": softcap, "where": valid, "sharding": sharding}
        top = top_logits(arrays.hidden, arrays.unembedding, top_k, **options).logits
    return _curves(dict.fromkeys(STATISTICS) | values, top, valid, scales)


def dense_curves(
    logits: Float[Array, "... V"], targets: Int[Array, "..."], scales: tuple[float, ...], top_k: int
) -> VocabCurves:
    """`vocab_curves` of logits z `[..., V]`; one scale after another, each with several arrays of that size."""
    z, values, valid = reference.dense_statistics(logits, targets, jnp.ones(targets.shape, jnp.float32), None, scales)
    top = masked(valid, jax.lax.top_k(z, top_k)[0]) if top_k else None
    return _curves(values, top, valid, scales)


def _curves(values: dict[str, Any], top: Array | None, valid: Array, scales: tuple[float, ...]) -> VocabCurves:
    values = {"log_weight": values.pop("log_normalizer"), "expected_difference": values.pop("expected_logit"), **values}
    return VocabCurves(**values, top_logits=top, valid=valid, scales=scales)
