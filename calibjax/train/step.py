"""The training step: a pure, jitted function that donates its state."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from calibjax.train.state import TrainState

Batch = Mapping[str, Array]


class Objective(Protocol):
    """A loss to minimise: its sum over a micro-batch, and the divisor that makes it a mean.

    Its arguments are the trained parameters, frozen arrays, a batch, and hyper-parameters (float32 scalars, whose
    values can change without recompilation). It returns two float32 scalars: the sum of the loss, and the divisor,
    which is summed over all micro-batches: the number of tokens for a mean over tokens, of sequences for one over them.
    """

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]: ...


class CarryingObjective(Protocol):
    """An `Objective` with a state of its own, which `TrainState.carry` holds.

    Its last argument is that state; it returns the sum of the loss, and a pair of the divisor and the new state.
    """

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array], carry: Any
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Any]]: ...


class StepMetrics(NamedTuple):
    """Float32 scalars of one step: mean loss, number of tokens, global norm of the gradient before clipping."""

    loss: Float[Array, ""]
    tokens: Float[Array, ""]
    grad_norm: Float[Array, ""]


TrainStep = Callable[[TrainState, Any, Batch, Mapping[str, Array]], tuple[TrainState, StepMetrics]]


def make_train_step(
    objective: Objective | CarryingObjective,
    optimizer: optax.GradientTransformation,
    *,
    carrying: bool = False,
    accumulate: int = 1,
    reduction: Literal["mean", "sum"] = "mean",
    clip_norm: float | None = None,
) -> TrainStep:
    """Returns the jitted step `(state, frozen, batch, hyper) -> (state, metrics)`, which donates the given state.

    Args:
        objective: see `Objective`.
        optimizer: optax transformation.
        carrying: the objective is a `CarryingObjective`; the micro-batches update its state in order.
        accumulate: number of micro-batches per batch; a divisor of the batch size. The gradient is that of the mean
            over the whole batch, whatever the numbers of tokens in the micro-batches.
        reduction: "sum" takes the gradient of the sum instead of the mean, so that a batch with more tokens takes a
            larger step. `StepMetrics.loss` is the mean in both cases.
        clip_norm: largest global norm of the gradient, > 0; a larger gradient is scaled to it. None: no clipping.
    """

    def gradients(params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array], carry: Any):
        def loss(params: Any):
            if carrying:
                return cast(CarryingObjective, objective)(params, frozen, batch, hyper, carry)
            value, divisor = cast(Objective, objective)(params, frozen, batch, hyper)
            return value, (divisor, carry)

        (value, (divisor, new)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return ((value, divisor), grads), new

    def step(state: TrainState, frozen: Any, batch: Batch, hyper: Mapping[str, Array]):
        if accumulate == 1:
            ((loss, divisor), grads), carry = gradients(state.params, frozen, batch, hyper, state.carry)
        else:
            micro = jax.tree.map(lambda x: x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:]), dict(batch))
            zeros = (jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, state.params)

            def add(sums, part):
                total, carry = sums
                more, carry = gradients(state.params, frozen, part, hyper, carry)
                return (jax.tree.map(jnp.add, total, more), carry), None

            (((loss, divisor), grads), carry), _ = jax.lax.scan(add, (zeros, state.carry), micro)
        count = jnp.maximum(divisor, 1.0)
        # Mean and clipping are one factor, applied by multiplication: XLA fuses it into every use of the gradients. The
        # result of a division would be stored, as a second copy of all gradients.
        weight = 1.0 / count if reduction == "mean" else jnp.ones(())
        norm = weight * _global_norm(grads)
        if clip_norm is not None:
            weight = weight * jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * weight, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(loss / count, jnp.sum(batch["where"]).astype(jnp.float32), norm)
        return TrainState(state.step + 1, params, opt_state, carry), metrics

    return jax.jit(step, donate_argnums=0)


def _global_norm(tree: Any) -> Float[Array, ""]:
    """√Σ g² over all leaves, as inner products, because XLA's CPU backend would store the squares."""
    return jnp.sqrt(sum(jnp.tensordot(g, g, axes=g.ndim, precision="highest") for g in jax.tree.leaves(tree)))
