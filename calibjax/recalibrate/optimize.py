"""The optimisers of the fits: L-BFGS-B (SciPy) in float64, and Adam on mini-batches for networks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from scipy import linalg, optimize

from calibjax.recalibrate.contract import FitReport
from calibjax.runtime.arrays import ceil_div

_BLOCK = 2**22  # float64 numbers processed at a time: in addition to its data, a fit holds a few times as many
_SEPARATED = 1e-6  # nats per prediction: a fit this good is perfect up to rounding, and its optimum lies at infinity
_MAX_PRECONDITIONED = 512  # largest number of parameters for which an unbounded fit is preconditioned by its Hessian
_HESSIAN_ROWS = 512  # largest number of rows that the Hessian is computed from
_HESSIAN_EVERY = 40  # iterations after which the Hessian is computed again
_RIDGE = 1e-6  # fraction of its diagonal that is added to it
# Of `lbfgs`. ftol and gtol: relative decrease of the objective, largest component of its gradient.
_OPTIONS = {"maxiter": 1000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-9}

Objective = Callable[[np.ndarray], Any]  # x [P] -> (value, gradient [P])
Loss = Callable[[Any, tuple[Array, ...], Any], Float[Array, " N"]]


class Minimum(NamedTuple):
    """Result of a search: x `[P]` in float64, the objective there, whether the tolerances were met, iterations."""

    x: np.ndarray
    value: float
    converged: bool
    iterations: int

    def report(self) -> FitReport:
        """`converged` only at a finite optimum."""
        return FitReport.of(self.value, bool(self.converged and self.value > _SEPARATED), self.iterations)


def lbfgs(objective: Objective, start: np.ndarray, low: Any = -np.inf, high: Any = np.inf, **options: Any) -> Minimum:
    """L-BFGS-B by SciPy, whose `options` replace those of `_OPTIONS`."""
    options = _OPTIONS | options
    options["maxfun"] = 2 * options["maxiter"]
    bounds = optimize.Bounds(low, high)
    end = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Minimum(end.x, float(end.fun), bool(end.success), end.nit)


def preconditioned_lbfgs(objective: Objective, start: np.ndarray, hessian: np.ndarray, **options: Any) -> Minimum:
    """`lbfgs` from `start` in the coordinates v = Lᵀ(x − start), with L Lᵀ = `hessian`, near the Hessian at `start`."""
    lower = np.linalg.cholesky(hessian)

    def to_x(v: np.ndarray) -> np.ndarray:
        return start + linalg.solve_triangular(lower, v, lower=True, trans=1)

    def objective_of_v(v: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(to_x(v))
        return value, linalg.solve_triangular(lower, gradient, lower=True)

    end = lbfgs(objective_of_v, np.zeros_like(start), **options)
    return end._replace(x=to_x(end.x))


def _total(loss: Loss, like: Any, rows: tuple[Array, ...], extra: Any) -> Callable[[Array], Array]:
    """The sum of the loss over the rows, as a function of the parameters as one vector."""
    unravel = ravel_pytree(like)[1]
    return lambda x: jnp.sum(loss(unravel(x), rows, extra))


@jax.jit(static_argnums=0)
def _value_and_grad(loss: Loss, like: Any, x: Array, rows: tuple[Array, ...], extra: Any) -> tuple[Array, Array]:
    return jax.value_and_grad(_total(loss, like, rows, extra))(x)


@jax.jit(static_argnums=0)
def _hessian(loss: Loss, like: Any, x: Array, rows: tuple[Array, ...], extra: Any) -> Array:
    """The Hessian, a column at a time: neither memory nor the program grows with P."""
    gradient = jax.grad(_total(loss, like, rows, extra))
    return jax.lax.map(lambda column: jax.jvp(gradient, (x,), (column,))[1], jnp.eye(x.size, dtype=x.dtype))


def _newton_lbfgs(
    objective: Objective, hessian: Callable[[np.ndarray], np.ndarray], start: np.ndarray, max_iterations: int
) -> Minimum:
    """`preconditioned_lbfgs` with the Hessian of where it stands, computed again after some iterations."""
    best = Minimum(start, np.inf, False, 0)
    while not best.converged and best.iterations < max_iterations:
        matrix = hessian(best.x)
        matrix += np.diag(_RIDGE * np.diag(matrix) + 1e-12)
        steps = min(_HESSIAN_EVERY, max_iterations - best.iterations)
        end = preconditioned_lbfgs(objective, best.x, matrix, maxiter=steps)
        if not end.iterations:  # a Hessian of saturated probabilities, nearly 0, leads nowhere
            end = lbfgs(objective, best.x, maxiter=steps)
        best = end._replace(iterations=best.iterations + end.iterations)
        if not end.iterations:
            break
    return best


def minimize(
    loss: Loss,
    start: Any,
    rows: tuple[np.ndarray, ...],
    extra: Any = (),
    *,
    bounds: tuple[Any, Any] | None = None,
    max_iterations: int = 1000,
) -> tuple[Any, FitReport]:
    """Minimises the mean of `loss` over the rows by L-BFGS-B in float64; returns float32 parameters and a `FitReport`.

    In float32 a likelihood would be known to 1e-7 only, and its optimum to the square root of that. A fit without
    bounds and of at most 512 parameters is preconditioned by the Hessian on a sample of the rows, so that it takes few
    iterations even where curvatures differ by orders of magnitude.

    Args:
        loss: `(params, rows, extra) -> [n]`, convex, one value per row; a penalty is included in each of them. A
            function of a module, not a closure: it is a static argument of `jax.jit`, and calls share its program.
        start: initial parameters, pytree of arrays.
        rows: arrays `[N, ...]` with a common first axis.
        extra: pytree, the third argument of `loss`.
        bounds: pytrees like `start`: lowest and highest values.
    """
    with jax.enable_x64(True):
        pieces = ceil_div(sum(row.size for row in rows), _BLOCK)
        split = [np.array_split(row, pieces) for row in rows]
        blocks = [tuple(map(jnp.asarray, block)) for block in zip(*split, strict=True)]
        in_float64 = jax.tree.map(functools.partial(np.asarray, dtype=np.float64), (start, extra))
        like, extra = jax.device_put(in_float64)

        def value_and_grad(x: np.ndarray) -> tuple[Any, ...]:
            sums = [jax.device_get(_value_and_grad(loss, like, x, block, extra)) for block in blocks]
            values, gradients = zip(*sums, strict=True)
            return sum(values) / len(rows[0]), sum(gradients) / len(rows[0])

        flat, unravel = ravel_pytree(like)
        x = np.asarray(flat)
        if bounds is not None or x.size > _MAX_PRECONDITIONED:
            ends = () if bounds is None else (ravel_pytree(bound)[0] for bound in bounds)
            best = lbfgs(value_and_grad, x, *ends, maxiter=max_iterations)
        else:
            stride = ceil_div(len(rows[0]), _HESSIAN_ROWS)
            sample = tuple(jnp.asarray(row[::stride]) for row in rows)

            def hessian(x: np.ndarray) -> np.ndarray:
                return np.asarray(_hessian(loss, like, x, sample, extra)) / len(sample[0])

            best = _newton_lbfgs(value_and_grad, hessian, x, max_iterations)
        params = unravel(jnp.asarray(best.x))
        params = jax.tree.map(functools.partial(np.asarray, dtype=np.float32), params)
    return params, best.report()


STEPS, BATCH = 2000, 256
_EVAL_EVERY = 50  # steps between evaluations of the held-out loss
_PATIENCE = 300  # steps without a smaller held-out loss after which training stops


@functools.cache
def _optimizer() -> Any:
    import optax

    return optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))


@jax.jit(static_argnums=0)
def _step(loss: Loss, params: Any, opt_state: Any, rows: tuple[Array, ...], extra: Any) -> tuple[Any, Any]:
    import optax

    grad = jax.grad(lambda p: jnp.mean(loss(p, rows, extra)))(params)
    updates, opt_state = _optimizer().update(grad, opt_state)
    return optax.apply_updates(params, updates), opt_state


@jax.jit(static_argnums=0)
def _losses(loss: Loss, params: Any, rows: tuple[Array, ...], extra: Any) -> Array:
    return loss(params, rows, extra)


def descend(
    loss: Loss, start: Any, rows: tuple[np.ndarray, ...], extra: Any = (), *, seed: int = 0
) -> tuple[Any, FitReport]:
    """Trains by Adam on mini-batches and returns the parameters with the least loss on a held-out fifth of the rows.

    The initial parameters are among the candidates: a network that starts as the identity stays the identity where
    training does not help. All batches have one size, so that one program serves any data.

    Arguments as in `minimize`, with `start` in float32; `seed` is that of the split and the batches. The `FitReport` is
    `converged` where the held-out loss stopped falling before the last step.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(rows[0]))
    fifth = max(len(rows[0]) // 5, 1)
    validation, training = shuffled[:fifth], shuffled[fifth:]
    if not len(training):  # a single row
        training = validation
    scored = validation[: 8 * BATCH]
    whole_batches = np.resize(scored, (ceil_div(len(scored), BATCH), BATCH))

    def take(index: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(row[index] for row in rows)

    def score(params: Any) -> float:
        losses = [_losses(loss, params, take(index), extra) for index in whole_batches]
        return float(np.mean(np.concatenate(losses)[: len(scored)]))

    params, opt_state = start, _optimizer().init(start)
    best, best_score, best_step = params, score(params), 0
    for step in range(STEPS):
        batch = take(training[rng.integers(0, len(training), BATCH)])
        params, opt_state = _step(loss, params, opt_state, batch, extra)
        if (step + 1) % _EVAL_EVERY == 0:
            new = score(params)
            if new < best_score:
                best, best_score, best_step = params, new, step + 1
            elif step + 1 - best_step >= _PATIENCE:
                break
    return jax.tree.map(np.asarray, best), FitReport.of(best_score, best_step < STEPS, best_step)
