"""dz, the cotangent of the logits before the soft-cap, from a block of logits and a few values of each token.

All Pallas kernels of the backward pass form it here, by the formula of `contract.Cotangents`, from logits in units of
the soft-cap and from values of the tokens that are scaled once to fit.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.contract import Cotangents, Inputs, Options
from calibjax.kernels.stats import FLOOR, finite, slope_in_units, softcap_unit

LOG2_E = math.log2(math.e)


def token_values(options: Options, inputs: Inputs, cotangents: Cotangents) -> dict[str, Array]:
    """Returns the inputs of `dz_of_logits` except the ids: name -> float32 [N]."""
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

    `z` are logits in units of the soft-cap; `value` maps a name to a per-token value of the block's shape, or None, see
    `token_values`; `hit` says whether a column is that of the k-th one-hot, where "g{k}" has a value. Where known, `p`
    is exp(s z − log_normalizer), `slope` that of the soft-cap at z.
    """
    dz, softmax, centred, uniform = None, value("softmax"), value("centred"), value("uniform")
    if softmax is not None:
        if centred is not None:
            softmax = finite(softmax + centred * jnp.maximum(z - value("expected"), FLOOR))
        dz = (jnp.exp2(z * value("scale") - value("log_normalizer")) if p is None else p) * softmax
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    dz = jnp.zeros_like(z) if dz is None else dz * (slope_in_units(z, options.softcap) if slope is None else slope)
    k = 0
    while (height := value(f"g{k}")) is not None:
        dz = dz + jnp.where(hit(k), height, 0.0)
        k += 1
    return dz
