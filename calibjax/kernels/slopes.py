"""dz, the derivative in the logits before the soft-cap, from a block of logits and a few values of each token.

dz_v = c_v (exp(s z_v − lse)(weight + tilt (z_v − E)) + uniform) + Σ_k [v = ids_k] g_k (see `operator.Signal`), with
c_v = 1 − (z_v/cap)². All Pallas kernels of the backward pass form it so, from logits in units of the soft-cap and from
values of the tokens that are scaled once to fit.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.operator import Call, Signal
from calibjax.kernels.stats import FLOOR

LOG2_E = math.log2(math.e)


def unit_of_logits(call: Call) -> float:
    """What one unit of the logits that a kernel works with is in logits."""
    return 1.0 if call.softcap is None else call.softcap


def slope(call: Call, z: Array) -> Array | float:
    """∂ softcap(x)/∂x = 1 − (z/cap)², from z/cap."""
    return 1.0 if call.softcap is None else 1.0 - z * z


def apart_of(call: Call, signal: Signal) -> Array | None:
    """The uniform part where it is added apart from the blocks, which a filter may leave out."""
    return signal.uniform if call.filter_threshold and call.softcap is None else None


def values_of_tokens(call: Call, signal: Signal) -> dict[str, Array]:
    """What `slope_of_logits` asks for but for the ids, and "apart" (see `apart_of`): name -> float32 [N]."""
    in_logits, apart = unit_of_logits(call), apart_of(call, signal)
    values = {
        "scale": signal.scale * (LOG2_E * in_logits),
        "log_normalizer": signal.log_normalizer * LOG2_E,
        "weight": signal.weight,
        "tilt": None if signal.tilt is None else signal.tilt * in_logits,
        "expected": None if signal.expected is None else signal.expected / in_logits,
        "uniform": signal.uniform if apart is None else None,
        "apart": apart,
        **{f"g{k}": g for k, (_, g) in enumerate(signal.one_hots)},
    }
    return {name: value for name, value in values.items() if value is not None}


def slope_of_logits(call: Call, z: Array, value, hit, p: Array | None = None) -> tuple[Array, Array | None]:
    """dz of one piece of logits; 1 where it must be added, else 0, or None without a filter.

    `value(name)` gives a per-token value of the piece's shape, or None; `hit(k)`, where "g{k}" has a value, whether a
    column of the piece is that of the k-th one-hot; `p` is exp(s z − lse), where known.
    """
    dz = counts = None
    weight, tilt = value("weight"), value("tilt")
    if weight is not None and tilt is not None:
        weight = weight + tilt * jnp.maximum(z - value("expected"), FLOOR)
    if weight is not None or call.filter_threshold:
        p = jnp.exp2(z * value("scale") - value("log_normalizer")) if p is None else p
        dz = None if weight is None else p * weight
        if call.filter_threshold:  # compared so that NaN is never left out
            counts = jnp.where(p < call.filter_threshold, 0.0, 1.0)
    uniform = value("uniform")
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    dz = jnp.zeros_like(z) if dz is None else dz * slope(call, z)
    k = 0
    while (height := value(f"g{k}")) is not None:
        g = jnp.where(hit(k), height, 0.0)
        dz = dz + g
        counts = None if counts is None else jnp.where(g == 0.0, counts, 1.0)
        k += 1
    return dz, counts
