"""Fitted recalibrators as programs for processes without calibjax: StableHLO by `jax.export`.

Their inputs are the fields of `Predictions` that the method reads, by name; the number of predictions is free, and
so are the number of classes and the width of features where the fitted numbers do not fix them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from calibjax.recalibrate.contract import AXES, INTEGERS
from calibjax.recalibrate.saved import Recalibrator, named_arrays

_LEAST = {"n": 1, "k": 2, "d": 1, "c": 1}  # of the sizes that are free
_FIXED = {
    **dict.fromkeys(("vector", "one_vs_rest_platt", "matrix", "structured_matrix", "dirichlet"), ("k", "intercept")),
    "g_layers": ("k", "inner"),
    "stacking": ("c", "weights"),
    "mlp_temperature": ("d", "params.params.gate_up.kernel"),
}
"""The axis that a method's state fixes, and the array of the state whose length it is."""


def stablehlo_program(fitted: Recalibrator) -> bytes:
    """A serialized program of the fields that the method reads, in their order."""
    shapes = _shapes(fitted)
    free = sorted(set().union(*shapes.values()) & _LEAST.keys())
    scope = export.SymbolicScope([f"{axis} >= {_LEAST[axis]}" for axis in free])
    specs = []
    for field, axes in shapes.items():
        shape = export.symbolic_shape(", ".join(map(str, axes)), scope=scope)
        specs.append(jax.ShapeDtypeStruct(shape, jnp.int32 if field in INTEGERS else jnp.float32))
    program = jax.jit(functools.partial(fitted.method.apply_arrays, fitted.state))
    return bytes(export.export(program, platforms=("cpu", "cuda", "tpu"))(*specs).serialize())


def _shapes(fitted: Recalibrator) -> dict[str, tuple[Any, ...]]:
    """Shape of each input: the name of an axis where the state does not fix its size."""
    sizes = {}
    if fitted.name in _FIXED:
        axis, name = _FIXED[fitted.name]
        sizes[axis] = len(named_arrays(fitted.state)[name])
    shapes = {}
    for field in fitted.method.apply_reads:
        shapes[field] = tuple(sizes.get(axis, axis) for axis in AXES.get(field, ("n",)))
    return shapes
