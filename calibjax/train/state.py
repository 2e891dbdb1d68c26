"""What training carries from step to step, and the optimiser that moves it."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

OptimizerKind = Literal["adamw", "adafactor"]
Schedule = Literal["cosine", "linear", "constant"]


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
        step: int32 scalar, steps taken.
        params: what is trained.
        opt_state: of the optax transformation.
        carry: what the objective keeps from batch to batch, such as running means; most keep nothing.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState
    carry: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimiser with gradient clipping, linear warm-up, and a schedule down to 0.

    Attributes:
        learning_rate: peak, > 0.
        kind: adamw, or adafactor, whose second moments of a matrix are a row and a column (Shazeer & Stern 2018,
            algorithm 4): no first moment, and hardly any memory beside the gradients.
        schedule: after the warm-up: cosine or linear decay to 0, or constant.
        warmup_fraction: of all steps, in [0, 1); the rate rises linearly from 0.
        weight_decay: decoupled, >= 0.
        clip_norm: largest global norm of the gradient, > 0; None: no clipping. The step clips (`make_train_step`).
        b1, b2: of Adam.
    """

    learning_rate: float = 2e-3
    kind: OptimizerKind = "adamw"
    schedule: Schedule = "cosine"
    warmup_fraction: float = 0.1
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.999

    def rate(self, steps: int) -> optax.Schedule:
        """The learning rate at each of `steps` steps."""
        warmup = int(self.warmup_fraction * steps)
        left = max(steps - warmup, 1)
        after = {
            "cosine": lambda: optax.cosine_decay_schedule(self.learning_rate, left),
            "linear": lambda: optax.linear_schedule(self.learning_rate, 0.0, left),
            "constant": lambda: optax.constant_schedule(self.learning_rate),
        }[self.schedule]()
        if not warmup:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, self.learning_rate, warmup), after], [warmup])

    def build(self, steps: int) -> optax.GradientTransformation:
        """The optax transformation for a run of `steps` steps."""
        rate = self.rate(steps)
        if self.kind == "adafactor":
            # Without steps relative to the parameters: a learning rate would mean something else than in AdamW.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        return optax.adamw(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)


def create_state(params: Any, optimizer: optax.GradientTransformation, carry: Any = ()) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), carry)
