"""Quintic Hermite interpolation: a function of the scale from its value, slope and curvature at K nodes.

Between two neighbouring nodes, a distance h apart, the interpolant is the polynomial of degree five that has the value,
slope and curvature of f at both nodes. It is C² everywhere. The errors of its value, slope and curvature are at most

    h⁶ M / 46080,   √5 h⁵ M / 30000,   h⁴ M / 1920,   M = max |f⁽⁶⁾| between the nodes

(Birkhoff and Priver 1967). f = log Σ exp(s·u) has |f⁽⁶⁾| ≤ 720 R⁶/π⁵ where all u lie in an interval of length R
(Borel-Carathéodory in the disc of radius π/R around s, where Σ exp(s·u) has no root).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.kernels.platforms import platform


class Jet(NamedTuple):
    """A function and its first two derivatives."""

    value: Array
    slope: Array
    curvature: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@jax.jit(static_argnums=0, inline=True)
def interpolate(nodes: tuple[float, ...], jets: Jet, scale: Float[Array, "..."]) -> Jet:
    """Value, slope and curvature of the interpolant at `scale`, [...] each.

    Differentiable in `scale`: the derivative of the value is exactly the slope returned, and that of the slope exactly
    the curvature. `nodes`: K ascending scales. `jets`: f at the nodes, [..., K] each, constant under differentiation.
    """
    table = np.asarray(nodes, scale.dtype)  # [K]
    # The scale lies between the nodes `lower` and `lower` + 1; beyond the ends, take the first or the last interval.
    lower = jnp.searchsorted(table[1:-1], scale, side="right", method="compare_all")  # [...]
    left = Jet(*(_take_last(x, lower) for x in jets))
    right = Jet(*(_take_last(x, lower + 1) for x in jets))
    start, end = jnp.asarray(table)[lower], jnp.asarray(table)[lower + 1]
    is_below, is_above = scale < table[0], scale > table[-1]
    below = extrapolate(left, jnp.where(is_below, scale - start, 0.0))
    between = _hermite(start, left, end, right, jnp.clip(scale, start, end))
    above = extrapolate(right, jnp.where(is_above, scale - end, 0.0))

    def select(below: Array, between: Array, above: Array) -> Array:
        return jnp.select([is_below, is_above], [below, above], between)

    return jax.tree.map(select, below, between, above)


@interpolate.defjvp
def _interpolate_jvp(nodes: tuple[float, ...], primals: tuple[Jet, Array], tangents: tuple[Jet, Array]):
    jets, scale = primals
    _, d_scale = tangents
    jet = interpolate(nodes, jets, scale)
    _, d_curvature = jax.jvp(lambda s: interpolate.__wrapped__(nodes, jets, s).curvature, (scale,), (d_scale,))
    return jet, Jet(jet.slope * d_scale, jet.curvature * d_scale, d_curvature)


def _take_last(x: Float[Array, "... K"], index: Array) -> Array:
    """x[..., index] for an index [...] per token: by a masked sum on TPUs, where a gather is serial over tokens."""
    if platform().name == "tpu":
        column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        return jnp.sum(jnp.where(column == index[..., None], x, 0.0), axis=-1)
    return jnp.take_along_axis(x, index[..., None], axis=-1, mode="promise_in_bounds")[..., 0]


def _hermite(start: Array, left: Jet, end: Array, right: Jet, scale: Array) -> Jet:
    """The polynomial of degree five with the jet `left` at `start` and `right` at `end`; at a scale between the two."""
    h = end - start
    t = (scale - start) / h
    # Derivatives in t at both ends: first d, second e.
    d0, d1 = left.slope * h, right.slope * h
    e0, e1 = left.curvature * (h * h), right.curvature * (h * h)
    rise = right.value - left.value
    # The part of the rise that slopes and curvatures do not explain, of order h⁵. Where it is small, little cancels.
    excess = rise - 0.5 * (d0 + d1) - (e0 - e1) / 12.0
    slope_change = d1 - d0
    a2 = 0.5 * e0
    a3 = 10.0 * excess + slope_change - (2.0 * e0 + e1) / 3.0
    a4 = -15.0 * excess - 0.5 * slope_change + 0.25 * (e0 + e1)
    a5 = 6.0 * excess
    value = _polynomial(t, left.value, d0, a2, a3, a4, a5)
    slope = _polynomial(t, d0, 2.0 * a2, 3.0 * a3, 4.0 * a4, 5.0 * a5)
    curvature = _polynomial(t, 2.0 * a2, 6.0 * a3, 12.0 * a4, 20.0 * a5)
    return Jet(value, slope / h, curvature / (h * h))


def _polynomial(t: Array, *coefficients: Array) -> Array:
    """Σ_k c_k tᵏ, by Horner's rule."""
    *lower, total = coefficients
    for coefficient in reversed(lower):
        total = coefficient + t * total
    return total


def extrapolate(jet: Jet, distance: Array) -> Jet:
    """f and two derivatives at a signed distance δ before the first node (δ < 0) or after the last one (δ > 0); convex.

    Before the first node it is the parabola f + f' δ + f'' δ²/2. After the last it is f + f' (1 − exp(−g δ))/g with
    g = f''/−f': C², and exact where all logits but the largest are equal, which is nearly so at large scales. It must
    stay above 0, the limit of log Σ exp(s·u) for one largest logit; else g is −f'/f, and the curvature has a step.
    """
    f, slope, curvature = jet
    is_falling = slope < 0.0
    descent = jnp.where(is_falling, -slope, 1.0)  # −f'
    g = jnp.maximum(curvature / descent, descent / jnp.maximum(f, 1e-30))
    g = jnp.where(is_falling, jnp.minimum(g, 1e30), 0.0)
    g_delta = jnp.maximum(g * distance, 1e-30)
    decay = jnp.exp(-g_delta)
    mean_decay = -jnp.expm1(-g_delta) / g_delta  # of exp(−g t) over t from 0 to δ
    exponential = f + slope * distance * mean_decay
    above = Jet(exponential, slope * decay, g * descent * decay)
    parabola = f + distance * (slope + 0.5 * distance * curvature)
    below = Jet(parabola, slope + distance * curvature, curvature)
    return jax.tree.map(functools.partial(jnp.where, distance > 0.0), above, below)
