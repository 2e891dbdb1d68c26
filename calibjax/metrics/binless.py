"""Calibration errors without bins: smooth ECE and the Kolmogorov-Smirnov error."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from calibjax.metrics._points import Points, divisor, metric, points

_NODES = 2**13
"""Grid intervals of smooth ECE; the smallest bandwidth of the search spans 16 of them."""


def _residual_grid(data: Points) -> Float[Array, " M"]:
    """Σ (confidence − correctness)/n at grid nodes on [0, 1]; a point is split linearly between two nodes."""
    at = data.confidence * _NODES
    node = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, _NODES - 1)
    residual = data.weight * (data.confidence - data.correct) / divisor(jnp.sum(data.weight))
    upper = residual * (at - node)
    return jnp.zeros(_NODES + 1).at[node].add(residual - upper).at[node + 1].add(upper)


def _smoothed_error(waves: Float[Array, " M"], bandwidth: Array) -> Array:
    """∫ |r_σ(t)| dt, where r_σ is the residual smoothed by the reflected Gaussian kernel of standard deviation σ.

    The kernel's eigenfunctions on [0, 1] are cos(π k t), with eigenvalues exp(−(π k σ)²/2).
    """
    k = jnp.arange(_NODES + 1)
    decayed = waves * jnp.exp(-jnp.square(jnp.pi * k * bandwidth) / 2)
    size = jnp.abs(jnp.fft.irfft(decayed, n=2 * _NODES)[: _NODES + 1]) * (2 * _NODES)
    return (jnp.sum(size) - (size[0] + size[-1]) / 2) / _NODES


@metric()
def smooth_ece(confidence, correct, *, bandwidth: float | Array | None = None, where=None):
    """Smooth ECE (Błasiok and Nakkiran 2024, "Smooth ECE: principled reliability diagrams via kernel smoothing").

    smECE_σ = ∫ |(1/n) Σ_i K_σ(t, confidence_i) (confidence_i − correctness_i)| dt over [0, 1], K_σ the Gaussian kernel
    reflected at 0 and 1. The automatic bandwidth is the fixed point σ = smECE_σ. As in the authors' code, ten
    bisections give the smallest multiple of 1/1024 that is not below its own error, and at least 2/1024.

    Args:
        confidence, correct, where: see `expected_calibration_error`.
        bandwidth: σ > 0, or None for the automatic bandwidth.
    """
    data = points(confidence, correct, where)
    grid = _residual_grid(data)
    ends = jnp.array([grid[0], grid[-1]])
    even = jnp.concatenate([2 * ends[:1], grid[1:-1], 2 * ends[1:], grid[-2:0:-1]])
    waves = jnp.fft.rfft(even).real / 2

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        too_small = (middle < 0.001) | (middle < _smoothed_error(waves, middle))
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    if bandwidth is None:
        bandwidth = jax.lax.fori_loop(0, 10, halve, (jnp.float32(0), jnp.float32(1)))[1]
    return data.answer(_smoothed_error(waves, jnp.asarray(bandwidth)))


@metric()
def ks_calibration_error(confidence, correct, *, where=None):
    """Kolmogorov-Smirnov calibration error, max_t |(1/n) Σ_{i: confidence_i <= t} (confidence_i − correctness_i)|.

    Gupta et al. 2021. Points of equal confidence enter the sum together. For the arguments see
    `expected_calibration_error`.

    Example:
        >>> import jax.numpy as jnp
        >>> float(ks_calibration_error(jnp.array([0.25, 0.75]), jnp.array([1, 0])))
        0.375
    """
    data = points(confidence, correct, where)
    order = jnp.argsort(data.confidence)
    key = data.confidence[order]
    reached = jnp.cumsum((data.weight * (data.confidence - data.correct))[order])
    ends = jnp.append(key[1:] != key[:-1], True)
    return data.answer(jnp.max(jnp.where(ends, jnp.abs(reached), 0.0)) / divisor(jnp.sum(data.weight)))
