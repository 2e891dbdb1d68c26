"""What every metric does first: it checks its arrays, and puts a harmless number where a point does not count."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

_ROUNDING = 1e-5
Metric = TypeVar("Metric", bound=Callable[..., Any])


class Points(NamedTuple):
    """Points of a metric.

    Attributes:
        confidence: float32 `[...]`, in [0, 1] also where a point does not count.
        correct: float32 `[...]`, the same.
        weight: float32 `[...]`, how much each point counts.
        usable: some point counts, none that counts is NaN or outside [0, 1], and the weights are those allowed.
    """

    confidence: Float[Array, "..."]
    correct: Float[Array, "..."]
    weight: Float[Array, "..."]
    usable: Bool[Array, ""]

    def answer(self, value: Array) -> Array:
        """The value, or NaN where there is none."""
        return jnp.where(self.usable, value, jnp.nan)

    def mean(self, value: Float[Array, "..."]) -> Array:
        """Mean of a value per point over the points that count; NaN where there is none."""
        value = jnp.where(self.weight > 0, value * self.weight, 0.0)
        return self.answer(jnp.sum(value) / divisor(jnp.sum(self.weight)))


def divisor(total: Any) -> Any:
    """A total of weights, 1 where it is 0: safe to divide by, whatever the scale of the weights."""
    return _module(total).where(total > 0, total, 1.0)


def _module(array: Any) -> Any:
    """numpy for its own arrays, jax.numpy for all others."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def points(confidence, correct, where, counts: bool = False) -> Points:
    """`Points` of arrays of one shape; `where` None, bool, or weights >= 0, whole numbers where `counts`."""
    confidence, correct = jnp.asarray(confidence), jnp.asarray(correct)
    weight = jnp.ones(confidence.shape, jnp.float32)
    if where is not None:
        weight = jnp.broadcast_to(jnp.asarray(where).astype(jnp.float32), confidence.shape)
    confidence, correct = confidence.astype(jnp.float32), correct.astype(jnp.float32)
    known = _inside(confidence) & _inside(correct)
    # Selected by what is known, not by the weight: the sorts of a bootstrap, mapped over weights, are then done once.
    confidence, correct = (jnp.where(known, jnp.clip(x, 0, 1), 0.0) for x in (confidence, correct))
    usable = jnp.any(weight > 0) & jnp.all(_allowed(weight, counts)) & ~jnp.any((weight > 0) & ~known)
    return Points(confidence, correct, weight, usable)


def _allowed(weight: Any, counts: bool) -> Any:
    """Finite and not below 0; a whole number where `counts`."""
    finite = (weight >= 0) & (weight < np.inf)
    return finite & (weight == _module(weight).floor(weight)) if counts else finite


def _inside(values: Any) -> Any:
    """In [0, 1] but for the rounding of a softmax; False for NaN."""
    return (values >= -_ROUNDING) & (values <= 1 + _ROUNDING)


def metric(*static: str, rank: int = 1, counts: bool = False) -> Callable[[Metric], Metric]:
    """Makes a one-call metric of a function of (confidence, correct, ..., where): checked at the door, then jitted.

    `static`: names of the arguments that are not arrays; `rank` of the first two; `counts`: whether `where` must hold
    whole numbers. Values are checked where they are known, which they are not under an outer `jax.jit`: there a wrong
    one that counts makes the answer NaN.
    """

    def wrap(function: Metric) -> Metric:
        jitted = jax.jit(function, static_argnames=static)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            first, second, *_ = signature.parameters
            check({name: given[name] for name in (first, second)}, given.get("where"), rank, counts)
            return jitted(*args, **kwargs) if len(given[first]) else jnp.float32(jnp.nan)

        return cast(Metric, checked)

    return wrap


def check(arrays: Mapping[str, Any], where: Any = None, rank: int = 1, counts: bool = False) -> None:
    """Raises ValueError where shapes disagree or, outside jit, a point that counts or a weight is invalid."""
    shapes = [np.shape(array) for array in arrays.values()]
    names = " and ".join(arrays)
    if len(set(shapes)) > 1 or len(shapes[0]) != rank:
        raise ValueError(f"{names}: expected the same shape of {rank} axes for each, got {shapes}.")
    if where is not None and np.shape(where) != shapes[0][:1]:
        raise ValueError(f"where: expected one entry for each of {shapes[0][0]} points, got shape {np.shape(where)}.")
    for name, array in arrays.items():
        if np.iscomplexobj(array):
            raise ValueError(f"{name}: expected real numbers in [0, 1], got {np.result_type(array)}.")
    if not all(map(is_known, (*arrays.values(), where))):
        return
    weights = np.ones(shapes[0][:1]) if where is None else np.asarray(where).astype(np.float64)
    bad = ~_allowed(weights, counts)
    if bad.any():
        kind = "whole numbers >= 0, how often each point counts" if counts else "finite weights >= 0"
        reason = " This metric depends on the number of points." if counts else ""
        at = int(np.argmax(bad))
        raise ValueError(f"where: expected {kind}, got {weights[at]:g} at {at} ({bad.sum()} such points).{reason}")
    for name, array in arrays.items():
        values = np.asarray(array)
        bad = (weights > 0) & ~_inside(values).all(axis=tuple(range(1, rank)))
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"{name}: expected numbers in [0, 1], got {values[at]} at {at} ({bad.sum()} such points); "
                "mask what does not count with where=."
            )


def is_known(array: Any) -> bool:
    """Whether the values can be read on the host: not under jit, not on other hosts' devices."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable
