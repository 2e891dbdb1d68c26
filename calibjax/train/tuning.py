"""Fine-tuning, whatever the objective: options of the optimisation, and the run from the first to the last step."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from calibjax.data import Sequences, batches, eval_batches, validation_split
from calibjax.models import decoder
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import vocab_sharding
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, Fraction, NonNegative, Positive, Range, check_options, to_json
from calibjax.runtime.sharding import AnyMesh, check_batch, local_rows, param_shardings
from calibjax.train import step
from calibjax.train.loop import Validation, train


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Options of the optimisation.

    Attributes:
        epochs: passes over the sequences.
        batch_size: sequences per step.
        accumulate: micro-batches per step.
        optimizer: adamw, or adafactor, whose state takes little memory.
        learning_rate: peak learning rate; by default 2e-5.
        schedule: linear or cosine decay to 0, or constant.
        warmup_fraction: fraction of the steps in which the learning rate rises.
        weight_decay: decoupled weight decay.
        clip_norm: largest norm of the gradient; None disables clipping.
        remat: what the backward pass recomputes of a block: all (full), all but its matrix products (dots), or none.
        validation_fraction: fraction of the sequences kept from training; their likelihood is logged every epoch.
        checkpoint_every: steps between checkpoints.
    """

    epochs: Count = 2
    batch_size: BatchSize = 16
    accumulate: Count = 1
    optimizer: step.OptimizerKind = "adamw"
    default_rate: ClassVar[float] = 2e-5
    learning_rate: Positive | None = None
    schedule: step.Schedule = "linear"
    warmup_fraction: Annotated[float, Range(0, 1, open="high")] = 0.03
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = 1.0
    remat: decoder.Remat = "full"
    validation_fraction: Fraction = 0.05
    checkpoint_every: Count = 200

    def check(self, mesh: AnyMesh) -> None:
        """Raises `UserError` if a value is out of range or batches do not divide among the devices of `mesh`."""
        check_options(self)
        check_batch(mesh, self.batch_size, self.accumulate)

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return self.learning_rate or self.default_rate

    @property
    def optimizer_config(self) -> step.OptimizerConfig:
        return step.OptimizerConfig(
            learning_rate=self.rate,
            kind=self.optimizer,
            schedule=self.schedule,
            warmup_fraction=self.warmup_fraction,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )


def check_dense(config: DecoderConfig, remedy: str) -> None:
    """Raises `UserError` for a mixture of experts: the loss that balances the load of experts is not implemented."""
    if config.mixture is not None:
        raise UserError(f"{config.family} is a mixture of experts, whose weights are frozen here; {remedy}.")


def batch_states(model: DecoderConfig, params: Any, batch: step.Batch, **options: Any) -> Float[Array, "B T D"]:
    layout = {name: batch[name] for name in ("segment_ids", "positions")}
    return decoder.hidden_states(model, params, batch["tokens"], **layout, **options)


def over_vocabulary(
    function: Any, model: DecoderConfig, params: Any, hidden: Float[Array, "B T D"], batch: step.Batch, **options: Any
) -> Any:
    """`vocab_stats`, `linear_cross_entropy` or a function like them, at a batch's targets, in the dtype of `hidden`."""
    return function(
        hidden,
        decoder.unembedding(model, params).astype(hidden.dtype),
        batch["targets"],
        bias=decoder.unembedding_bias(params),
        softcap=model.logit_softcap,
        where=batch["where"],
        sharding=vocab_sharding(model),
        **options,
    )


def first_state(params: Any, optimizer: optax.GradientTransformation, carry: Any = ()) -> step.TrainState:
    """The state that `tune` starts from, with float32 parameters."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return step.create_state(params, optimizer, carry)


def tune(
    objective: step.Objective | step.CarryingObjective,
    nll_objective: step.Objective,
    initial_params: Callable[[], decoder.Params],
    frozen: Any,
    sequences: Sequences,
    options: TuningOptions,
    *,
    per_sequence: Mapping[str, np.ndarray] = MappingProxyType({}),
    context: RunContext,
    identity: dict[str, Any],
    carry: Any = (),
    reduction: Literal["mean", "sum"] = "mean",
    donate: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Trains parameters in float32 on a part of the sequences; returns them and the report.

    `nll_objective`, the negative log-likelihood, is evaluated on the other part. `initial_params` returns the initial
    parameters, placed on `context.mesh`; they are freed after they are copied, or donated if `donate`. `per_sequence`:
    further arrays of a batch, one row per sequence. `carry`: initial state of a `CarryingObjective`. The other
    arguments are those of `train` and `make_train_step`.
    """
    arrays = {**sequences.arrays(), **per_sequence}
    train_rows, validation_rows = validation_split(sequences, options.validation_fraction, seed=context.seed)
    train_arrays = {name: x[train_rows] for name, x in arrays.items()}
    validation_arrays = {name: x[validation_rows] for name, x in arrays.items()}
    counts = {"train": len(train_rows), "validation": len(validation_rows)}
    steps = max(1, options.epochs * counts["train"] // options.batch_size)
    optimizer = options.optimizer_config.build(steps)
    start = functools.partial(first_state, optimizer=optimizer, carry=carry)
    params = initial_params()
    shardings = param_shardings(context.mesh, jax.eval_shape(start, params))
    state = jax.jit(start, out_shardings=shardings, donate_argnums=0 if donate else ())(params)
    del params
    sum_and_count = jax.jit(nll_objective)

    def evaluate(params: Any) -> dict[str, float]:
        parts = eval_batches(validation_arrays, options.batch_size)
        sums = [sum_and_count(params, frozen, batch, {}) for batch, _ in parts]
        loss, count = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
        return {"validation_nll": float(loss / count)}

    part = local_rows(context.mesh, options.batch_size)
    step_fn = step.make_train_step(
        objective, optimizer, accumulate=options.accumulate, reduction=reduction, clip_norm=options.clip_norm
    )
    with jax.set_mesh(context.mesh):
        state = train(
            step_fn,
            state,
            frozen,
            {},
            batches(train_arrays, options.batch_size, seed=context.seed, epochs=options.epochs, part=part),
            steps=steps,
            context=context,
            identity={"options": to_json(options), "seed": context.seed, **identity},
            checkpoint_every=options.checkpoint_every,
            validation=Validation(evaluate, every=max(1, steps // options.epochs)),
        )
        final = evaluate(state.params)
    trained = f"{steps:,} steps on {counts['train']:,} sequences"
    validated = f"validation NLL {final['validation_nll']:.4f} on {counts['validation']:,}"
    context.log(f"{context.title}: {trained}; {validated}")
    return state.params, {"options": to_json(options), "steps": steps, "sequences": counts, **final}
