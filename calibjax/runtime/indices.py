"""Indices from the host as JAX arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_indices(values: Any) -> jax.Array:
    """Converts to a JAX array, with host integers clipped to the range of int32: JAX would wrap 2³² + 1 to 1.

    An index out of range therefore stays out of range.
    """
    if isinstance(values, jax.Array):
        return values
    values = np.asarray(values)
    if values.dtype.kind in "iu" and values.dtype.itemsize >= 4:
        limits = np.iinfo(np.int32)
        values = np.clip(values, max(limits.min, np.iinfo(values.dtype).min), limits.max).astype(np.int32)
    return jnp.asarray(values)
