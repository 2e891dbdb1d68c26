"""What every way to fine-tune a model shares: options of the optimisation, and the run from first to last step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from calibjax.data import batches, eval_batches
from calibjax.models import decoder
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import check_batch, local_rows, param_shardings
from calibjax.train.loop import Evaluation, train
from calibjax.train.state import OptimizerConfig, OptimizerKind, Schedule, TrainState, create_state
from calibjax.train.step import CarryingObjective, Objective, make_train_step

Ranges = dict[str, tuple[bool, str]]
"""Of options: name -> whether its value is in range, and what was expected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How weights are optimised.

    Attributes:
        epochs: passes over the sequences.
        batch_size: sequences a step.
        accumulate: micro-batches a step.
        optimizer: adamw, or adafactor, which keeps hardly any state.
        learning_rate: peak; by default 2e-5.
        schedule: linear or cosine decay to 0, or constant.
        warmup_fraction: of the steps.
        weight_decay: decoupled.
        clip_norm: largest norm of the gradient; None: no clipping.
        remat: what of a block the backward pass computes anew: full, all but its matrix products (dots), or none.
        validation_fraction: of the sequences, kept from training; the likelihood of their tokens is logged every epoch.
        checkpoint_every: steps between checkpoints.
    """

    epochs: int = 2
    batch_size: int = 16
    accumulate: int = 1
    optimizer: OptimizerKind = "adamw"
    learning_rate: float | None = None
    schedule: Schedule = "linear"
    warmup_fraction: float = 0.03
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    remat: decoder.Remat = "full"
    validation_fraction: float = 0.05
    checkpoint_every: int = 200

    def ranges(self) -> Ranges:
        """Every option whose range does not depend on the devices."""
        left = self.batch_size % self.accumulate if self.accumulate >= 1 else 1
        return {
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "accumulate": (not left, f"a divisor of --batch-size {self.batch_size}"),
            "learning_rate": (self.learning_rate is None or 0 < self.learning_rate < math.inf, "positive"),
            "warmup_fraction": (0 <= self.warmup_fraction < 1, "at least 0 and below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "positive"),
            "validation_fraction": (0 < self.validation_fraction < 1, "between 0 and 1"),
            "checkpoint_every": (self.checkpoint_every >= 1, "at least 1"),
        }

    def check(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` where a value is out of range, or batches do not divide among the devices of `mesh`."""
        for name, (right, expected) in self.ranges().items():
            if not right:
                raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}.")
        check_batch(mesh, self.batch_size, self.accumulate)

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return self.learning_rate or 2e-5

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.rate,
            kind=self.optimizer,
            schedule=self.schedule,
            warmup_fraction=self.warmup_fraction,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )


def first_state(params: Any, optimizer: optax.GradientTransformation, carry: Any = None) -> TrainState:
    """The state that `tune` starts from: parameters in float32, whatever they were."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return create_state(params, optimizer, () if carry is None else carry)


def tune(
    objective: Objective | CarryingObjective,
    likelihood: Objective,
    source: list[Any],
    frozen: Any,
    train_arrays: Mapping[str, np.ndarray],
    validation_arrays: Mapping[str, np.ndarray],
    options: TuningOptions,
    *,
    context: RunContext,
    identity: dict[str, Any],
    carry: Any = None,
    reduction: Literal["mean", "sum"] = "mean",
    title: str = "fine-tuning",
    consume: bool = False,
) -> tuple[Any, int, dict[str, float]]:
    """Trains parameters in float32, with checkpoints and logs in `context.directory`.

    Args:
        objective: what is minimised.
        likelihood: of the tokens that count; evaluated on what was kept for validation.
        source: a list of one tree, the parameters to start from, placed on `context.mesh`; it is emptied, so that they
            can be freed.
        frozen: arrays that both read.
        train_arrays, validation_arrays: of sequences, one row each.
        options: of the optimisation.
        context, identity, title: as in `train`; the seed is that of the order of the sequences.
        carry: what a `CarryingObjective` starts from; None: the objective is none.
        reduction: as in `make_train_step`.
        consume: give the parameters of `source` up in place of a copy.

    Returns:
        The parameters, the number of steps, and the last evaluation.
    """
    rows = len(next(iter(train_arrays.values())))
    steps = max(1, options.epochs * rows // options.batch_size)
    optimizer = options.optimizer_config.build(steps)

    def start(params: Any) -> TrainState:
        return first_state(params, optimizer, carry)

    shardings = param_shardings(context.mesh, jax.eval_shape(start, source[0]))
    state = jax.jit(start, out_shardings=shardings, donate_argnums=0 if consume else ())(source.pop())
    jitted = jax.jit(likelihood)

    def evaluate(params: Any) -> dict[str, float]:
        sums = []
        for batch, _ in eval_batches(validation_arrays, options.batch_size):
            sums.append(jitted(params, frozen, batch, {}))
        loss, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
        return {"validation_nll": float(loss / count)}

    with jax.set_mesh(context.mesh):
        state = train(
            make_train_step(
                objective,
                optimizer,
                carrying=carry is not None,
                accumulate=options.accumulate,
                reduction=reduction,
                clip_norm=options.clip_norm,
            ),
            state,
            frozen,
            {},
            batches(
                train_arrays,
                options.batch_size,
                seed=context.seed,
                epochs=options.epochs,
                part=local_rows(context.mesh, options.batch_size),
            ),
            steps=steps,
            context=context,
            identity=identity,
            title=title,
            checkpoint_every=options.checkpoint_every,
            evaluation=Evaluation(evaluate, every=max(1, steps // options.epochs)),
        )
        final = evaluate(state.params)
    return state.params, steps, final
