"""The state of training, and the optimiser."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

OptimizerKind = Literal["adamw", "adafactor"]
Schedule = Literal["cosine", "linear", "constant"]


class TrainState(NamedTuple):
    """What a training step updates.

    Attributes:
        step: int32 scalar, number of steps taken.
        params: trained parameters.
        opt_state: state of the optax transformation.
        carry: state of a `CarryingObjective`, such as running means; otherwise empty.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState
    carry: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Configuration of the optimiser: linear warm-up, schedule of the learning rate, clipping of the gradient.

    Attributes:
        learning_rate: peak learning rate, > 0.
        kind: adamw, or adafactor (Shazeer & Stern 2018, algorithm 4), which factors the second moments of a matrix into
            a row and a column and has no first moment, so that its state takes little memory.
        schedule: after the warm-up: cosine or linear decay to 0, or a constant rate.
        warmup_fraction: fraction of the steps, in [0, 1), in which the rate rises linearly from 0.
        weight_decay: decoupled weight decay, >= 0.
        clip_norm: largest global norm of the gradient, > 0; None: no clipping. `make_train_step` applies it.
        b1, b2: decay rates of Adam's moments.
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
        """Returns the schedule of the learning rate over `steps` steps."""
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
        """Returns the optax transformation for a run of `steps` steps."""
        rate = self.rate(steps)
        if self.kind == "adafactor":
            # Updates are not scaled by the size of the parameters: the learning rate has the same meaning as in AdamW.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(self.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        return optax.adamw(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)


def create_state(params: Any, optimizer: optax.GradientTransformation, carry: Any = ()) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), carry)
