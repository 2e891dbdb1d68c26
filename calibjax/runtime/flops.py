"""Operations of a traced program."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def flops(jaxpr: Any) -> float:
    """Operations of the matrix products in a jaxpr, over all devices; 2 for each product of two numbers.

    XLA's own `cost_analysis` counts the body of a loop once, and a model is a loop over its layers. A Pallas kernel
    counts as it declares itself (`pl.CostEstimate`), or else its body for each point of its grid. For `cond`, the most
    expensive branch counts. The body of `shard_map` counts once for each device, and that of a `while_loop` once.
    """
    return sum((_equation_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns), start=0.0)


def _equation_flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot_general"):
        ragged = params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
        terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        # Without a group axis in the second factor, the result has one, and each term belongs to one group.
        groups = 1 if ragged is None or ragged.rhs_group_dimensions else equation.invars[2].aval.shape[-1]
        return 2.0 * terms * math.prod(equation.outvars[0].aval.shape) / groups
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    lists = [value if isinstance(value, tuple | list) else (value,) for value in params.values()]
    inner = [flops(item) for items in lists for item in items if isinstance(item, Jaxpr | ClosedJaxpr)]
    if name == "cond":
        return max(inner)
    if name == "pallas_call":
        return sum(inner) * math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return sum(inner) * params["mesh"].size
    return sum(inner) * (params["length"] if name == "scan" else 1)
