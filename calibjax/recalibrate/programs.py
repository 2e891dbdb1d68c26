"""Fitted recalibrators as programs for processes without calibjax: StableHLO by `jax.export`, ONNX by jax2onnx.

Their inputs are the fields of `Predictions` that the method reads, by name; the number of predictions is free, and
so are the number of classes and the width of features where the fitted numbers do not fix them.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array

from calibjax.recalibrate.contract import AXES, INTEGERS
from calibjax.recalibrate.saved import Recalibrator

_PLATFORMS = ("cpu", "cuda", "tpu")
_LEAST = {"n": 1, "k": 2, "d": 1, "c": 1}  # of the sizes that are free
_SIZES: dict[str, Callable[[Any], dict[str, int]]] = {
    "vector": lambda state: {"k": len(state.slope)},
    "one_vs_rest_platt": lambda state: {"k": len(state.slope)},
    "matrix": lambda state: {"k": len(state.intercept)},
    "structured_matrix": lambda state: {"k": len(state.intercept)},
    "dirichlet": lambda state: {"k": len(state.intercept)},
    "g_layers": lambda state: {"k": len(state.inner)},
    "stacking": lambda state: {"c": len(state.weights)},
    "lore": lambda state: {"d": state.features.shape[1]},
    "ats": lambda state: {"d": len(state.params["params"]["gate_up"]["kernel"])},
}


def stablehlo_program(fitted: Recalibrator) -> bytes:
    """A serialized program of the fields that the method reads, in their order."""
    shapes = _shapes(fitted)
    free = sorted({axis for shape in shapes.values() for axis in shape if isinstance(axis, str)})
    scope = export.SymbolicScope([f"{axis} >= {_LEAST[axis]}" for axis in free])
    specs = [
        jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(map(str, shape)), scope=scope), _dtype(field))
        for field, shape in shapes.items()
    ]
    return bytes(export.export(jax.jit(_function(fitted)), platforms=_PLATFORMS)(*specs).serialize())


def onnx_model(fitted: Recalibrator) -> bytes:
    """An ONNX model of the fields that the method reads, by name, to `calibrated`. Needs jax2onnx.

    ONNX has no expm1 and log1p: where p is near 1, the log-probabilities of the other classes by `one_vs_rest_platt`
    are off by up to some hundredths.
    """
    to_onnx: Any = import_module("jax2onnx").to_onnx  # by name: it is not among the requirements
    shapes = _shapes(fitted)
    inputs: list[Any] = [*shapes.values()]
    if any(_dtype(field) != jnp.float32 for field in shapes):
        (n,) = export.symbolic_shape("n")
        inputs = [jax.ShapeDtypeStruct((n,), _dtype(field)) for field in shapes]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # jax2onnx logs its own workings
    try:
        model = to_onnx(_function(fitted), inputs, input_names=[*shapes], output_names=["calibrated"])
    finally:
        logging.disable(before)
    return model.SerializeToString()


def _function(fitted: Recalibrator) -> Callable[..., Array]:
    def calibrated(*fields: Array) -> Array:
        return fitted.method.apply_arrays(fitted.state, *fields)

    return calibrated


def _shapes(fitted: Recalibrator) -> dict[str, tuple[Any, ...]]:
    """Shape of each input: the name of an axis where the state does not fix its size."""
    sizes = _SIZES.get(fitted.name, lambda state: {})(fitted.state)
    return {
        field: tuple(sizes.get(axis, axis) for axis in AXES.get(field, ("n",))) for field in fitted.method.apply_reads
    }


def _dtype(field: str) -> Any:
    return jnp.int32 if field in INTEGERS else jnp.float32
