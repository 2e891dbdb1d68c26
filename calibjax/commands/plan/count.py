"""Floating-point operations of a traced program: those of its matrix products, with loops as often as they run."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def flops(jaxpr: Any, turns: int = 1) -> float:
    """Operations of the matrix products in a jaxpr, over all devices; 2 for each product of two numbers.

    XLA's own `cost_analysis` counts the body of a loop once, and a model is a loop over its layers. A Pallas kernel
    counts as it declares itself (`pl.CostEstimate`), or else its body for each point of its grid, also for those that
    it passes over when it runs. Of several branches the largest one counts, and what runs within `shard_map` counts
    once for each device.

    Args:
        jaxpr: as `jax.make_jaxpr` or `jitted.trace(...).jaxpr` have it.
        turns: how often a `while_loop` runs whose length is not in the jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def layers(x, w):
        ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
        >>> flops(jax.make_jaxpr(layers)(jnp.ones((2, 3)), jnp.ones((3, 3))))  # 5 layers of 2 · 2 · 3 · 3
        180.0
    """
    return sum((_of(eqn, turns) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns), start=0.0)


def _of(eqn: Any, turns: int) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * terms * math.prod(eqn.outvars[0].aval.shape)
    if name == "ragged_dot_general":
        dimensions = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dimensions.dot_dimension_numbers
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        products = terms * math.prod(eqn.outvars[0].aval.shape)
        # Without a group axis in the second factor, the result has one, and each term belongs to one group.
        groups = 1 if dimensions.rhs_group_dimensions else eqn.invars[2].aval.shape[-1]
        return 2.0 * products / groups
    if name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        if estimate is None:
            return float(math.prod(eqn.params["grid_mapping"].grid)) * flops(eqn.params["jaxpr"], turns)
        return float(estimate.flops)
    inner = [flops(jaxpr, turns) for jaxpr in _jaxprs(eqn.params)]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return eqn.params["length"] * sum(inner)
    if name == "while":
        return turns * sum(inner)
    if name == "shard_map":
        return eqn.params["mesh"].size * sum(inner)
    return sum(inner)


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item
