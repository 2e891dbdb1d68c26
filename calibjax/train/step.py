"""One training step: pure, jitted once, its state donated."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from calibjax.train.state import TrainState

Batch = Mapping[str, Array]


class Objective(Protocol):
    """What is minimised: the sum of a loss over the tokens that count, or its mean.

    Called with what is trained, frozen arrays, a batch and hyper-parameters (float32 scalars: a change of their value
    compiles nothing anew); returns the sum of the loss and what the sum over all micro-batches is divided by, float32
    scalars: the number of tokens for a mean over tokens, the number of sequences for a mean over sequences.
    """

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]: ...


class CarryingObjective(Protocol):
    """An `Objective` that keeps something from batch to batch, in the state of training.

    Called with that too; returns the sum of the loss, and beside it the divisor and what is kept from here on.
    """

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array], carry: Any
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Any]]: ...


class StepMetrics(NamedTuple):
    """Float32 scalars of one step: mean loss, number of tokens, global norm of the gradient unclipped."""

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
    """The jitted step (state, frozen, batch, hyper) -> (state, metrics); the state given is donated.

    Args:
        objective: see `Objective`.
        optimizer: of the trained parameters.
        carrying: the objective is a `CarryingObjective`; it goes through the micro-batches one after the other.
        accumulate: micro-batches, one after the other, that a batch is cut into; divides the batch size. The gradient
            is that of the objective's mean over the whole batch: over all its tokens, however they fall into the
            micro-batches, where the objective divides by their number.
        reduction: "sum" leaves the gradient that of the sum, so that a batch with more tokens moves the parameters
            further; the loss of the metrics is the mean in either case.
        clip_norm: largest global norm of the gradient, > 0; a longer one is shortened to it. None: no clipping.
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
        # One factor for mean and clipping, and a product: the compiler repeats it wherever the gradient is used; of a
        # quotient it would hold a second copy of all gradients.
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
    """√Σ g² over all leaves, as inner products: XLA's CPU backend would hold the squares."""
    return jnp.sqrt(sum(jnp.tensordot(g, g, axes=g.ndim, precision="highest") for g in jax.tree.leaves(tree)))
