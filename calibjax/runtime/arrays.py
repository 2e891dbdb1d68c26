"""The type of the arrays that public functions take."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
"""An array of JAX or of NumPy."""
