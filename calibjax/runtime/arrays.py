"""Arrays that public functions take: their type, and indices from the host; sizes in whole blocks and in words."""

import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from calibjax.runtime.errors import UserError

AnyArray = jax.Array | np.ndarray
_Integer = TypeVar("_Integer", int, jax.Array)


def ceil_div(number: _Integer, divisor: int) -> _Integer:
    """The quotient of integers, rounded up: how many blocks of `divisor` hold `number`."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple


def readable_size(size: int) -> str:
    """A number of bytes in MiB, from a tenth of a GiB on in GiB."""
    unit, name = (2**30, "GiB") if abs(size) >= 2**30 / 10 else (2**20, "MiB")
    return f"{size / unit:,.2f} {name}"


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, "not known" for None."""
    return "not known" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def as_array(values: Any) -> np.ndarray:
    """An array, series, frame or tensor on the host: bfloat16 as float32, NA as NaN. `UserError` for masked values."""
    if hasattr(values, "detach"):  # a tensor of torch
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    if np.ma.is_masked(values):
        raise UserError("expected an array without masked values: leave them out, or give where= where there is one.")
    values = np.asarray(values)
    if values.dtype == object and sys.modules.get("pandas") is not None:
        values = np.where(sys.modules["pandas"].isna(values), np.nan, values)  # its NA is no number
    return values.astype(values.dtype.newbyteorder("="), copy=False)  # JAX misreads the bytes of another order


def plain_array(value: Any) -> Any:
    """Lists and arrays of other libraries as `as_array` reads them; an array of JAX, or None, unchanged.

    An array on a mesh with axes of type Explicit is replicated: sorts and sums over its points need no sharding then.
    """
    sharding = None if isinstance(value, Tracer) else getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    is_foreign = hasattr(value, "__array__") and not isinstance(value, jax.Array | np.generic)
    return as_array(value) if is_foreign or isinstance(value, list | tuple) else value


def label_numbers(name: str, labels: Any, count: int) -> np.ndarray:
    """The number of each of `count` labels, `[count]`, from 0 in sorted order. Numbers beside texts are texts.

    Raises `UserError` for a missing label.
    """
    is_list = isinstance(labels, list | tuple)  # NumPy would make the text "nan" of a missing label beside texts
    labels = as_array(np.asarray(labels, object) if is_list else labels)
    if labels.shape != (count,):
        raise UserError(f"{name}: expected one label for each of {count} points, got {labels.shape}.")
    if any(label is None or label != label for label in labels.tolist()):
        raise UserError(f"{name}: expected a label for each point, got none (NaN or None); leave such points out.")
    try:
        return np.unique(labels, return_inverse=True)[1]
    except TypeError:
        return np.unique(labels.astype(str), return_inverse=True)[1]


def as_jax(values: Any) -> jax.Array:
    """Converts to a JAX array, with host integers clipped to the range of int32: JAX would wrap 2³² + 1 to 1.

    An index out of range therefore stays out of range. Raises `UserError` for text.
    """
    if any(isinstance(x, jax.Array) or hasattr(x, "__jax_array__") for x in jax.tree.leaves(values)):
        return jnp.asarray(values)
    values = as_array(values)
    if values.dtype.kind in "SU":
        raise UserError("expected an array of numbers, got text; a model reads token ids: tokenizer(text).input_ids.")
    if values.dtype.kind in "iu" and values.dtype.itemsize >= 4:
        limits = np.iinfo(np.int32)
        values = np.clip(values, max(limits.min, np.iinfo(values.dtype).min), limits.max).astype(np.int32)
    return jnp.asarray(values)
