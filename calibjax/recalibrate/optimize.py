"""The two optimisers of the fits: L-BFGS in float64 for a few parameters, Adam on mini-batches for networks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport

_BLOCK = 2**22  # numbers of float64 at a time: what a fit holds beside its data, a few times over
_SEPARATED = 1e-6  # nats a prediction: a fit this good is perfect up to rounding, and its optimum lies at infinity

Loss = Callable[[Any, tuple[Array, ...], Any], Float[Array, " N"]]


@functools.partial(jax.jit, static_argnums=0)
def _value_and_grad(loss: Loss, params: Any, rows: tuple[Array, ...], extra: Any) -> tuple[Array, Any]:
    return jax.value_and_grad(lambda p: jnp.sum(loss(p, rows, extra)))(params)


def minimize(
    loss: Loss,
    start: Any,
    rows: tuple[np.ndarray, ...],
    extra: Any = (),
    *,
    bounds: tuple[Any, Any] | None = None,
    max_iterations: int = 1000,
) -> tuple[Any, FitReport]:
    """The parameters with the least mean of `loss` over the rows, by L-BFGS-B (SciPy), all in float64.

    A likelihood in float32 is known to 1e-7, and its optimum to the root of that: too little to tell whether a fit
    converged, or to compare with another library. So float64, with the derivative from JAX, on the default device.

    Args:
        loss: `(params, rows, extra) -> [n]`, per prediction; a penalty is added to every one. A module's function, not
            a closure: one program serves all calls of the same shapes.
        start: pytree of arrays.
        rows: arrays with a common first axis.
        extra: pytree that `loss` also gets.
        bounds: pytrees like `start`: lowest and highest values.
        max_iterations: at most.

    Returns:
        (parameters in float32, as numpy; the report).
    """
    from scipy import optimize

    n = len(rows[0])
    pieces = -(-sum(row.size for row in rows) // _BLOCK)
    leaves, treedef = jax.tree.flatten(start)
    shapes, sizes = [np.shape(leaf) for leaf in leaves], [np.size(leaf) for leaf in leaves]

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)

    def unravel(x: np.ndarray) -> Any:
        parts = np.split(x, np.cumsum(sizes)[:-1])
        return treedef.unflatten([part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

    with jax.enable_x64(True):
        extra = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), extra)
        blocks = list(zip(*(map(jnp.asarray, np.array_split(row, pieces)) for row in rows), strict=True))

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = 0.0, np.zeros_like(x)
            for block in blocks:
                part, grad = jax.device_get(_value_and_grad(loss, unravel(x), block, extra))
                value, slope = value + float(part), slope + flat(grad)
            return value / n, slope / n

        limits = None if bounds is None else list(zip(flat(bounds[0]), flat(bounds[1]), strict=True))
        options = {"maxiter": max_iterations, "maxfun": 2 * max_iterations, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-8}
        found = optimize.minimize(objective, flat(start), jac=True, method="L-BFGS-B", bounds=limits, options=options)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), unravel(found.x))
    finite_optimum = found.fun > _SEPARATED
    return params, FitReport.of(found.fun, bool(found.success and finite_optimum), found.nit)


STEPS, BATCH = 2000, 256
_LOOK, _PATIENCE = 50, 300  # steps between looks at the loss kept from training; without a better one before it stops


@functools.cache
def _optimizer() -> Any:
    import optax

    return optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))


@functools.partial(jax.jit, static_argnums=0)
def _step(loss: Loss, params: Any, moments: Any, rows: tuple[Array, ...], extra: Any) -> tuple[Any, Any]:
    import optax

    grad = jax.grad(lambda p: jnp.mean(loss(p, rows, extra)))(params)
    updates, moments = _optimizer().update(grad, moments)
    return optax.apply_updates(params, updates), moments


@functools.partial(jax.jit, static_argnums=0)
def _mean(loss: Loss, params: Any, rows: tuple[Array, ...], extra: Any) -> Array:
    return jnp.mean(loss(params, rows, extra))


def descend(
    loss: Loss,
    start: Any,
    rows: tuple[np.ndarray, ...],
    extra: Any = (),
    *,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> tuple[Any, FitReport]:
    """Adam on mini-batches, and of what it passes through, that with the least loss on a fifth kept from training.

    The start is among what it passes through, so a network that starts as the identity is kept where training harms.
    Batches have one size, whatever the number of rows: one program for all data.

    Args:
        loss: as for `minimize`.
        start: pytree of float32 arrays.
        rows: arrays with a common first axis.
        extra: pytree that `loss` also gets.
        seed: of the split and the batches.
        groups: int `[N]`; rows of one group stay together in the split (where there are at least two groups).

    Returns:
        (parameters as numpy, the report: `converged` is that the loss kept from training no longer fell at the end).
    """
    rng = np.random.default_rng(seed)
    n = len(rows[0])
    if groups is None or groups.min() == groups.max():
        shuffled, fifth = rng.permutation(n), max(n // 5, 1)
        validation, training = shuffled[:fifth], shuffled[fifth:]
    else:
        names = rng.permutation(np.unique(groups))
        kept = np.isin(groups, names[: max(len(names) // 5, 1)])
        validation, training = rng.permutation(np.flatnonzero(kept)), np.flatnonzero(~kept)
    if not len(training):  # a single row
        training = validation
    # Whole batches, rows repeated in turn to fill them.
    tests = validation[: 8 * BATCH]
    tests = np.resize(tests, (-(-len(tests) // BATCH), BATCH))

    def take(index: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(row[index] for row in rows)

    def score(params: Any) -> float:
        return float(np.mean([_mean(loss, params, take(index), extra) for index in tests]))

    params, moments = start, _optimizer().init(start)
    best, best_score, best_step = params, score(params), 0
    for step in range(STEPS):
        params, moments = _step(loss, params, moments, take(training[rng.integers(0, len(training), BATCH)]), extra)
        if (step + 1) % _LOOK == 0:
            new = score(params)
            if new < best_score:
                best, best_score, best_step = params, new, step + 1
            elif step + 1 - best_step >= _PATIENCE:
                break
    return jax.tree.map(np.asarray, best), FitReport.of(best_score, best_step < STEPS, best_step)
