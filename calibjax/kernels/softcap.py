"""The soft-cap of logits, z = cap·tanh(x / cap), and its slope. A cap of None means no soft-cap: z = x."""

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
    """Returns the size of one unit of u in logits."""
    return 1.0 if cap is None else cap
