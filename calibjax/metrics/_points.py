"""Input validation and masking shared by all metrics."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from calibjax.runtime.arrays import plain_array

_ROUNDING = 1e-5
Metric = TypeVar("Metric", bound=Callable[..., Any])


class Points(NamedTuple):
    """Validated inputs of a metric, float32: confidence and correctness, 0 where invalid, and weights.

    `usable`: all weights are valid, at least one is positive, and every point of positive weight is valid.
    """

    confidence: Float[Array, "..."]
    correct: Float[Array, "..."]
    weight: Float[Array, "..."]
    usable: Bool[Array, ""]

    def nan_unless_usable(self, value: Array) -> Array:
        """`value`, or NaN if the points are not usable."""
        return jnp.where(self.usable, value, jnp.nan).astype(jnp.float32)  # also with jax_enable_x64

    def mean(self, value: Float[Array, "..."]) -> Array:
        """Weighted mean of a value per point; NaN if the points are not usable."""
        value = jnp.where(self.weight > 0, value * self.weight, 0.0)
        return self.nan_unless_usable(jnp.sum(value) / nonzero(jnp.sum(self.weight)))


def nonzero(total: Any) -> Any:
    """`total`, with 1 in place of 0: a divisor that is safe at any scale of the weights."""
    return array_namespace(total).where(total > 0, total, 1.0)


def array_namespace(array: Any) -> Any:
    """numpy for numpy arrays, jax.numpy for all others."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def weights_of(where: Any, shape: tuple[int, ...]) -> Array:
    """float32 weights of points: `where`, or 1 for each."""
    return jnp.broadcast_to(jnp.asarray(True if where is None else where).astype(jnp.float32), shape)


def points(confidence, correct, where, counts: bool = False) -> Points:
    """Makes `Points`. `where` is None, bool, or weights >= 0, which are whole numbers if `counts`."""
    confidence = jnp.asarray(confidence).astype(jnp.float32)
    correct = jnp.asarray(correct).astype(jnp.float32)
    weight = weights_of(where, confidence.shape)
    is_valid = _inside(confidence) & _inside(correct)
    some_invalid = jnp.any((weight > 0) & ~is_valid)
    usable = jnp.any(weight > 0) & jnp.all(_allowed(weight, counts)) & ~some_invalid

    def clipped(x: Array) -> Array:
        # This does not depend on the weights, so a bootstrap that is mapped over weights sorts only once.
        x = jnp.where(is_valid, x, 0.0)
        return jnp.where(x > 1, 1.0, jnp.where(x < 0, 0.0, x))  # at 0 and 1, `jnp.clip` would halve the gradient

    return Points(clipped(confidence), clipped(correct), weight, usable)


def _allowed(weight: Any, counts: bool) -> Any:
    """Whether each weight is finite, >= 0, and a whole number if `counts`."""
    finite = (weight >= 0) & (weight < np.inf)
    return finite & (weight == array_namespace(weight).floor(weight)) if counts else finite


def _inside(values: Any) -> Any:
    """Whether values are in [0, 1] up to the rounding of a softmax; False for NaN."""
    return (values >= -_ROUNDING) & (values <= 1 + _ROUNDING)


def metric(
    *static: str, rank: int = 1, counts: bool = False, from_sums: Callable | None = None, norm: str | None = None
) -> Callable[[Metric], Metric]:
    """Decorator that validates the inputs of a metric `function(confidence, correct, ..., where)` and jits it.

    Under an outer `jax.jit`, an invalid point of positive weight makes the result NaN.

    Args:
        static: names of the arguments that are not arrays.
        rank: number of axes of the first two arguments.
        counts: whether `where` must hold whole numbers.
        from_sums: the same metric as a function of `CalibrationSums`, an attribute that resampling reads.
        norm: the norm of a binned error, an attribute that intervals read.
    """

    def wrap(function: Metric) -> Metric:
        jitted = jax.jit(function, static_argnames=static)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            values = {name: plain_array(value) for name, value in arguments.items()}
            first, second, *_ = signature.parameters
            check({first: values[first], second: values[second]}, values.get("where"), rank, counts)
            bandwidth = values.get("bandwidth")
            if bandwidth is not None and is_known(bandwidth) and not bandwidth > 0:
                raise ValueError(f"bandwidth: expected a number above 0, got {bandwidth}.")
            return jitted(**values) if len(values[first]) else jnp.float32(jnp.nan)

        vars(checked).update(from_sums=from_sums, norm=norm)
        return cast(Metric, checked)

    return wrap


def check(arrays: Mapping[str, Any], where: Any = None, rank: int | None = 1, counts: bool = False) -> None:
    """Raises ValueError if shapes differ or, outside jit, if a weight or a point of positive weight is invalid.

    `rank`: number of axes, the first of which is over points; None for any number of axes, all over points.
    """
    arrays = {name: plain_array(array) for name, array in arrays.items()}
    where = plain_array(where)
    shapes = [np.shape(array) for array in arrays.values()]
    if len(set(shapes)) > 1 or rank not in (None, len(shapes[0])):
        raise ValueError(f"{' and '.join(arrays)}: expected the same shape with {rank or 'any'} axes, got {shapes}.")
    shape = shapes[0] if rank is None else shapes[0][:1]
    if where is not None and np.shape(where) != shape:
        raise ValueError(f"where: expected one entry for each of {shape[0]} points, got shape {np.shape(where)}.")
    given = arrays if where is None else {**arrays, "where": where}
    for name, array in given.items():
        if np.dtype(array.dtype).kind in "cOSU":
            raise ValueError(f"{name}: expected real numbers, got {array.dtype}.")
    if not all(is_known(array) for array in given.values()):
        return
    weights = np.ones(shape) if where is None else np.asarray(where).astype(np.float64)
    float32 = np.finfo(np.float32)
    sum_may_overflow = weights > float32.max / max(weights.size, 1)
    underflows = (weights > 0) & (weights < float32.tiny)
    bad = ~_allowed(weights, counts) | sum_may_overflow | underflows
    if bad.any():
        kind = "whole numbers >= 0, how often each point counts" if counts else "finite weights >= 0, sums in float32"
        reason = " This metric depends on the number of points." if counts else ""
        raise ValueError(f"where: expected {kind}, got {_first(weights, bad)} ({bad.sum()} such points).{reason}")
    for name, array in arrays.items():
        values = np.asarray(array)
        axes_within_point = tuple(range(weights.ndim, values.ndim))
        bad = (weights > 0) & ~_inside(values).all(axis=axes_within_point)
        if bad.any():
            hint = "use where= to mask points that do not count"
            got = f"{_first(values, bad)} ({bad.sum()} such points)"
            raise ValueError(f"{name}: expected numbers in [0, 1], got {got}; {hint}.")


def _first(values: np.ndarray, bad: np.ndarray) -> str:
    place = np.unravel_index(np.argmax(bad), bad.shape)
    return f"{values[place]} at {', '.join(map(str, place))}"


def is_known(array: Any) -> bool:
    """Whether the host can read the values: they are not traced and not on another host's devices."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable
