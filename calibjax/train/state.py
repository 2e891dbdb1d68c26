"""What training carries from step to step, and the optimiser that moves it."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
        step: int32 scalar, steps taken.
        params: what is trained.
        opt_state: of the optax transformation.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with gradient clipping, linear warm-up and cosine decay to 0.

    Attributes:
        learning_rate: peak, > 0.
        warmup_fraction: of all steps, in [0, 1); the rate rises linearly from 0.
        weight_decay: decoupled, >= 0.
        clip_norm: largest global norm of the gradient, > 0.
        b1, b2: of Adam.
    """

    learning_rate: float = 2e-3
    warmup_fraction: float = 0.1
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999

    def build(self, steps: int) -> optax.GradientTransformation:
        """The optax transformation for a run of `steps` steps."""
        warmup = int(self.warmup_fraction * steps)
        start = 0.0 if warmup else self.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(start, self.learning_rate, warmup, max(steps, warmup + 1))
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(schedule, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay),
        )


def create_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
