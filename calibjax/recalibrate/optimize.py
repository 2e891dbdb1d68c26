"""The two optimisers of the fits: Newton's method or BFGS in float64, and Adam on mini-batches for networks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from calibjax.recalibrate.contract import FitReport
from calibjax.recalibrate.solvers import Found, bfgs, finished, newton

_BLOCK = 2**22  # numbers of float64 at a time: what a fit holds beside its data, a few times over
_SEPARATED = 1e-6  # nats a prediction: a fit this good is perfect up to rounding, and its optimum lies at infinity
_NEWTON, _SCALED = 8, 512  # parameters: at most, for Newton's method, and for the Hessian at the start
_EXACT = 128  # parameters, at most, for Newton's method after L-BFGS-B
_BEFORE, _AFTER = 200, 100  # iterations, at most, of L-BFGS-B and of that method
_SAMPLE = 512  # rows of that Hessian, about

Loss = Callable[[Any, tuple[Array, ...], Any], Float[Array, " N"]]


def _total(loss: Loss, like: Any, rows: tuple[Array, ...], extra: Any) -> Callable[[Array], Array]:
    """The sum of the loss over the rows, of the parameters as one vector."""
    unravel = ravel_pytree(like)[1]
    return lambda x: jnp.sum(loss(unravel(x), rows, extra))


@functools.partial(jax.jit, static_argnums=0)
def _slope(loss: Loss, like: Any, x: Array, rows: tuple[Array, ...], extra: Any) -> tuple[Array, Array]:
    """Value and gradient `[P]` at x `[P]`."""
    return jax.value_and_grad(_total(loss, like, rows, extra))(x)


@functools.partial(jax.jit, static_argnums=0)
def _curvature(loss: Loss, like: Any, x: Array, rows: tuple[Array, ...], extra: Any) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian `[P, P]` at x. Linearised once: the exponentials serve all columns."""
    value_and_grad = jax.value_and_grad(_total(loss, like, rows, extra))
    gradient, along, value = jax.linearize(lambda x: value_and_grad(x)[::-1], x, has_aux=True)
    return value, gradient, jax.vmap(along)(jnp.eye(x.size, dtype=x.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _hessian(loss: Loss, like: Any, x: Array, rows: tuple[Array, ...], extra: Any) -> tuple[Array]:
    """The Hessian at x, a column at a time: neither memory nor the program grows with P."""
    slope = jax.grad(_total(loss, like, rows, extra))
    columns = jnp.eye(x.size, dtype=x.dtype)
    return (jax.lax.map(lambda column: jax.jvp(slope, (x,), (column,))[1], columns),)


def minimize(
    loss: Loss,
    start: Any,
    rows: tuple[np.ndarray, ...],
    extra: Any = (),
    *,
    bounds: tuple[Any, Any] | None = None,
    max_iterations: int = 1000,
) -> tuple[Any, FitReport]:
    """The parameters with the least mean of `loss` over the rows, all in float64.

    A likelihood in float32 is known to 1e-7, and its optimum to the root of that: too little to tell whether a fit
    converged, or to compare with another library. So float64, with the derivatives from JAX, on the default device.

    Up to 8 parameters by Newton's method: their Hessian costs hardly more than the gradient. Up to 512 without bounds
    by BFGS that begins with the Hessian of a sample: a quarter of the iterations; with fewer than four rows for each
    it would be that of the penalty. More, or where these do not end, by L-BFGS-B. That may take a direction of little
    curvature for the optimum, so up to 128 parameters Newton's method follows.

    Args:
        loss: `(params, rows, extra) -> [n]`, per prediction, twice differentiable; a penalty is added to every one. A
            module's function, not a closure: one program serves all calls of the same shapes.
        start: pytree of arrays.
        rows: arrays with a common first axis.
        extra: pytree that `loss` also gets.
        bounds: pytrees like `start`: lowest and highest values.
        max_iterations: at most.

    Returns:
        (parameters in float32, as numpy; the report).
    """

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)

    n = len(rows[0])
    pieces = -(-sum(row.size for row in rows) // _BLOCK)
    with jax.enable_x64(True):
        x = flat(start)
        low, high = (-np.inf, np.inf) if bounds is None else map(flat, bounds)
        like, extra = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (start, extra)))

        def at(program: Callable, x: Any, parts: Any) -> tuple[Any, ...]:
            """Means over the rows of all parts."""
            sums = [jax.device_get(program(loss, like, x, part, extra)) for part in parts]
            return tuple(sum(leaves) / sum(len(part[0]) for part in parts) for leaves in zip(*sums, strict=True))

        blocks = list(zip(*(map(jnp.asarray, np.array_split(row, pieces)) for row in rows), strict=True))

        def slope(x: np.ndarray) -> tuple[Any, ...]:
            return at(_slope, x, blocks)

        def curved(x: np.ndarray) -> tuple[Any, ...]:
            return (*slope(x), lambda: at(_hessian, x, blocks)[0])

        found = Found(x, np.inf, False, 0)
        if x.size <= _NEWTON:
            found = newton(lambda x: at(_curvature, x, blocks), x, low, high, max_iterations)
        elif bounds is None and x.size <= min(_SCALED, n // 4):
            sample = [tuple(jnp.asarray(row[:: -(-n // _SAMPLE)]) for row in rows)]
            found = bfgs(slope, lambda x: at(_hessian, x, sample)[0], x, max_iterations)
        if found.converged or x.size <= _NEWTON or x.size > _EXACT:
            found = finished(found, slope, low, high, max_iterations)
        else:
            most = min(max_iterations, found.iterations + _BEFORE)
            found = finished(found, slope, low, high, most)
            found = newton(curved, found.x, low, high, min(max_iterations, most + _AFTER), found.iterations)
    leaves, treedef = jax.tree.flatten(start)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    parts = zip(np.split(found.x.astype(np.float32), ends), leaves, strict=True)
    params = treedef.unflatten([part.reshape(np.shape(leaf)) for part, leaf in parts])
    return params, report_of(found)


def report_of(found: Found) -> FitReport:
    """The report of a search for the least mean loss."""
    finite_optimum = found.value > _SEPARATED
    return FitReport.of(found.value, bool(found.converged and finite_optimum), found.iterations)


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
