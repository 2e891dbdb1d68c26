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
from calibjax.kernels.softcap import slope_in_units, softcap_unit
from calibjax.kernels.stats import FLOOR, finite

LOG2_E = math.log2(math.e)


def exact_uniform(options: Options, cotangents: Cotangents) -> Array | None:
    """The uniform part where it is added outside the blocks, which a filter may leave out."""
    return cotangents.uniform if options.filter_threshold and options.softcap is None else None


def token_values(options: Options, inputs: Inputs, cotangents: Cotangents) -> dict[str, Array]:
    """Returns the inputs of `dz_of_logits` except the ids, and "exact" (see `exact_uniform`): name -> float32 [N]."""
    in_logits, exact = softcap_unit(options.softcap), exact_uniform(options, cotangents)
    centred, expected = cotangents.centred, cotangents.expected_logit
    values = {
        "scale": inputs.scale * (LOG2_E * in_logits),
        "log_normalizer": cotangents.log_normalizer * LOG2_E,
        "softmax": cotangents.softmax,
        "centred": None if centred is None else centred * in_logits,
        "expected": None if expected is None else expected / in_logits,
        "uniform": cotangents.uniform if exact is None else None,
        "exact": exact,
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
) -> tuple[Array, Array | None]:
    """dz of one block of logits; 1 where it must be added, else 0, or None without a filter.

    Args:
        options: of the call.
        z: the logits in units of the soft-cap.
        value: name -> per-token value of the block's shape, or None; see `token_values`.
        hit: k -> whether a column of the block is that of the k-th one-hot, where "g{k}" has a value.
        p: exp(s z − log_normalizer), where known.
        slope: of the soft-cap at z, where known.
    """
    dz = counts = None
    softmax, centred = value("softmax"), value("centred")
    if softmax is not None and centred is not None:
        softmax = finite(softmax + centred * jnp.maximum(z - value("expected"), FLOOR))
    if softmax is not None or options.filter_threshold:
        p = jnp.exp2(z * value("scale") - value("log_normalizer")) if p is None else p
        dz = None if softmax is None else p * softmax
        if options.filter_threshold:  # compared so that NaN is never left out
            counts = jnp.where(p < options.filter_threshold, 0.0, 1.0)
    uniform = value("uniform")
    if uniform is not None:
        dz = uniform if dz is None else dz + uniform
    dz = jnp.zeros_like(z) if dz is None else dz * (slope_in_units(z, options.softcap) if slope is None else slope)
    k = 0
    while (height := value(f"g{k}")) is not None:
        g = jnp.where(hit(k), height, 0.0)
        dz = dz + g
        counts = None if counts is None else jnp.where(g == 0.0, counts, 1.0)
        k += 1
    return dz, counts
