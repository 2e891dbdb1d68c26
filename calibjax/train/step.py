"""The training step (pure, jitted, donates its state), the training state and the optimiser."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Batch = Mapping[str, Array]
OptimizerKind = Literal["adamw", "adafactor"]
Schedule = Literal["cosine", "linear", "constant"]


class TrainState(NamedTuple):
    """What a training step updates."""

    step: Int[Array, ""]  # int32, number of steps taken
    params: Any
    opt_state: optax.OptState
    carry: Any = ()  # state of a `CarryingObjective`, such as running means


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Configuration of the optimiser.

    Attributes:
        learning_rate: peak learning rate, > 0.
        kind: adamw, or adafactor (Shazeer & Stern 2018, algorithm 4), which factors the second moments of a matrix into
            a row and a column and has no first moment, so that its state takes little memory.
        schedule: after the warm-up: cosine or linear decay to 0, or a constant rate.
        warmup_fraction: fraction of the steps, in [0, 1), in which the rate rises linearly from 0.
        weight_decay: decoupled weight decay, >= 0.
        clip_norm: largest global norm of the gradient, > 0; None disables clipping. `make_train_step` applies it.
    """

    learning_rate: float = 2e-3
    kind: OptimizerKind = "adamw"
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.1
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def rate_schedule(self, steps: int) -> optax.Schedule:
        warmup = int(self.warmup_fraction * steps)
        decay_steps = max(steps - warmup, 1)
        after = {
            "cosine": lambda: optax.cosine_decay_schedule(self.learning_rate, decay_steps),
            "linear": lambda: optax.linear_schedule(self.learning_rate, 0.0, decay_steps),
            "constant": lambda: optax.constant_schedule(self.learning_rate),
        }[self.schedule]()
        if not warmup:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, self.learning_rate, warmup), after], [warmup])

    def build(self, steps: int) -> optax.GradientTransformation:
        rate = self.rate_schedule(steps)
        if self.kind == "adafactor":
            # Updates are not scaled by the size of the parameters: the learning rate has the same meaning as in AdamW.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        return optax.adamw(rate, weight_decay=self.weight_decay)


def create_state(params: Any, optimizer: optax.GradientTransformation, carry: Any = ()) -> TrainState:
    """The state before the first step; `carry` is what the objective keeps between steps."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), carry)


class Objective(Protocol):
    """A loss to minimise: its sum over a micro-batch, and the divisor that makes it a mean.

    `hyper` are float32 scalars, whose values can change without recompilation. Both results are float32 scalars, added
    up over micro-batches; the divisor is the number of tokens, or of sequences, that the mean is over.
    """

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]: ...


class CarryingObjective(Protocol):
    """An `Objective` with a state, `TrainState.carry`: its last argument, and returned with the divisor, updated."""

    def __call__(
        self, params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array], carry: Any
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Any]]: ...


class StepMetrics(NamedTuple):
    """Float32 scalars of one step: mean loss, number of tokens, global norm of the gradient before clipping."""

    loss: Float[Array, ""]
    tokens: Float[Array, ""]
    grad_norm: Float[Array, ""]


class _Gradients(NamedTuple):
    """Loss, divisor and gradients of a micro-batch, or their sums over several, and the objective's last state."""

    loss: Float[Array, ""]
    divisor: Float[Array, ""]
    grads: Any
    carry: Any


TrainStep = Callable[[TrainState, Any, Batch, Mapping[str, Array]], tuple[TrainState, StepMetrics]]


def make_train_step(
    objective: Objective | CarryingObjective,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    reduction: Literal["mean", "sum"] = "mean",
    clip_norm: float | None = None,
) -> TrainStep:
    """The jitted step `(state, frozen, batch, hyper) -> (state, metrics)`, which donates its state.

    Args:
        objective: an `Objective`; or, if `TrainState.carry` holds arrays that batches update, a `CarryingObjective`.
        optimizer: optax transformation.
        accumulate: number of micro-batches per batch; a divisor of the batch size. The gradient is that of the mean
            over the whole batch, whatever the numbers of tokens in the micro-batches.
        reduction: "sum" takes the gradient of the sum instead of the mean; `StepMetrics.loss` is always the mean.
        clip_norm: largest global norm of the gradient, > 0; None disables clipping.
    """

    def gradients(params: Any, frozen: Any, batch: Batch, hyper: Mapping[str, Array], carry: Any) -> _Gradients:
        def loss(params: Any):
            if jax.tree.leaves(carry):
                return cast(CarryingObjective, objective)(params, frozen, batch, hyper, carry)
            value, divisor = cast(Objective, objective)(params, frozen, batch, hyper)
            return value, (divisor, carry)

        (value, (divisor, new_carry)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return _Gradients(value, divisor, grads, new_carry)

    def step(state: TrainState, frozen: Any, batch: Batch, hyper: Mapping[str, Array]):
        if accumulate == 1:
            sums = gradients(state.params, frozen, batch, hyper, state.carry)
        else:
            micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), dict(batch))
            zeros = jax.tree.map(jnp.zeros_like, state.params)

            def add(sums: _Gradients, part: Batch) -> tuple[_Gradients, None]:
                new = gradients(state.params, frozen, part, hyper, sums.carry)
                grads = jax.tree.map(jnp.add, sums.grads, new.grads)
                return _Gradients(sums.loss + new.loss, sums.divisor + new.divisor, grads, new.carry), None

            start = _Gradients(jnp.zeros(()), jnp.zeros(()), zeros, state.carry)
            sums, _ = jax.lax.scan(add, start, micro)
        count = jnp.maximum(sums.divisor, 1.0)
        # Mean and clipping are one factor, applied by multiplication: XLA fuses it into every use of the gradients. The
        # result of a division would be stored, as a second copy of all gradients.
        weight = 1.0 / count if reduction == "mean" else jnp.ones(())
        # As inner products, because XLA's CPU backend would store the squares.
        squares = [jnp.tensordot(g, g, axes=g.ndim, precision="highest") for g in jax.tree.leaves(sums.grads)]
        norm = weight * jnp.sqrt(sum(squares))
        if clip_norm is not None:
            weight = weight * jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * weight, sums.grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(sums.loss / count, jnp.sum(batch["where"]).astype(jnp.float32), norm)
        return TrainState(state.step + 1, params, opt_state, sums.carry), metrics

    return jax.jit(step, donate_argnums=0)
