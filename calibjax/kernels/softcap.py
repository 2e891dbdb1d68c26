"""The soft-cap of logits, z = cap·tanh(x / cap), and its slope. Everywhere cap None stands for no soft-cap: z = x."""

import jax.numpy as jnp
from jaxtyping import Array


def softcapped(x: Array, cap: float | None) -> Array:
    """cap·tanh(x / cap)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def times_slope(g: Array, z: Array, cap: float | None) -> Array:
    """g·∂z/∂x = g·(1 − (z/cap)²)."""
    return g if cap is None else g * (1.0 - jnp.square(z / cap))


def slope_in_units(u: Array, cap: float | None) -> Array | float:
    """∂z/∂x from u = z/cap: Pallas kernels work in units of the soft-cap."""
    return 1.0 if cap is None else 1.0 - u * u


def softcap_unit(cap: float | None) -> float:
    """What one unit of u is in logits."""
    return 1.0 if cap is None else cap
