"""Adaptive Temperature Scaling (arXiv 2409.19817): objective, training of the candidates, choice and refit."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from calibjax import recalibrate
from calibjax.data import Sequences, batches, hold_back
from calibjax.heads import HeadConfig
from calibjax.losses import LOSSES, linear_loss
from calibjax.models import LanguageModel
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import Frozen, batch_hidden, batch_log_scale, freeze, vocab_sharding
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import local_rows, param_shardings
from calibjax.train.hidden_cache import array_hash, sequence_arrays
from calibjax.train.loop import train
from calibjax.train.options import AtsPlan, Trial
from calibjax.train.state import OptimizerConfig, create_state
from calibjax.train.step import TrainStep, make_train_step
from calibjax.train.temperature import (
    LikelihoodPass,
    likelihood_pass,
    mean_likelihood,
)


@dataclasses.dataclass(frozen=True)
class AtsObjective:
    """The `Objective` of a temperature head: frozen forward pass, head, statistics, loss. Hashable.

    The base model is frozen, so that only the scale is differentiated: a step consists of the forward pass, one product
    with the unembedding, and the head, without a backward product of the unembedding's size.
    """

    model: DecoderConfig
    head: HeadConfig
    loss: str
    dtype: DTypeLike = jnp.float32

    def __call__(
        self, params: Any, frozen: Frozen, batch: Mapping[str, Array], hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        loss, dtype = LOSSES[self.loss], self.dtype
        hidden = batch_hidden(self.model, frozen, batch, dtype)
        log_scale = batch_log_scale(self.model, self.head, params, frozen, {**batch, "hidden": hidden}, dtype)
        values, counts = linear_loss(
            loss,
            hidden,
            frozen.unembedding.astype(dtype),
            batch["targets"],
            hyper=hyper,
            scale=jnp.exp(log_scale),
            where=batch["where"],
            real=batch["segment_ids"] > 0,
            bias=frozen.bias,
            softcap=self.model.logit_softcap,
            sharding=vocab_sharding(jax.sharding.get_abstract_mesh(), self.model),
        )
        total, count = jnp.sum(values), jnp.sum(counts).astype(jnp.float32)
        return (total / jnp.maximum(count, 1.0), jnp.ones(())) if loss.per_micro_batch else (total, count)


class FitData(NamedTuple):
    """Sequences of a frozen model, split into training and validation rows.

    Attributes:
        arrays: arrays of all sequences, as `batch_stats` reads them; see `sequence_arrays`.
        frozen: arrays of the model.
        train, validation: rows of `arrays`; `validation` is empty if nothing is chosen or refitted.
        hash: hash of the sequences.
    """

    arrays: Mapping[str, np.ndarray]
    frozen: Frozen
    train: np.ndarray
    validation: np.ndarray
    hash: str


class Candidate(NamedTuple):
    """A head trained with one loss, and its scores on validation data, in nats per token (NaN without such data)."""

    trial: Trial
    params: Any
    validation_nll: float
    validation_score: float
    refit: recalibrate.TemperatureFit | None


def prepare(lm: LanguageModel, sequences: Sequences, plan: AtsPlan, context: RunContext) -> FitData:
    """Splits off validation data if a loss is chosen or a temperature refitted, and caches the hidden states."""
    train_rows, validation_rows = np.arange(len(sequences.tokens)), np.arange(0)
    if len(plan.trials) > 1 or plan.refit_temperature:
        train_rows, validation_rows = hold_back(sequences, plan.validation_fraction, context.seed)
    arrays, hidden_given = sequence_arrays(
        lm, sequences, mode=plan.cache_hidden, batch_size=plan.batch_size, context=context
    )
    frozen = freeze(lm, head=plan.head, hidden_given=hidden_given)
    return FitData(arrays, frozen, train_rows, validation_rows, array_hash(sequences._asdict()))


def train_candidate(lm: LanguageModel, data: FitData, plan: AtsPlan, trial: Trial, context: RunContext) -> Candidate:
    """Trains a head with one loss and scores it on validation data, with the refitted temperature if significant."""
    params = train_head(
        lm,
        plan,
        trial,
        data.frozen,
        _Rows(data.arrays, data.train),
        context=context.within(str(trial)),
        identity={"windows": data.hash},
    )
    if not len(data.validation):
        return Candidate(trial, to_host(params), math.nan, math.nan, None)

    def likelihood(top_label_weight: float) -> LikelihoodPass:
        rows = _Rows(data.arrays, data.validation)
        return likelihood_pass(
            lm, plan.head, params, data.frozen, rows, plan.batch_size, top_label_weight=top_label_weight
        )

    score_pass = likelihood(plan.top_label_weight)
    refit = recalibrate.fit_temperature(score_pass) if plan.refit_temperature else None
    score = refit.nll if refit is not None and _is_significant(refit) else mean_likelihood(score_pass)
    nll = mean_likelihood(likelihood(0.0))
    context.log(f"ATS {trial}: on validation NLL {nll:.4f}, score {score:.4f}")
    return Candidate(trial, to_host(params), nll, score, refit)


def choose(candidates: Sequence[Candidate], context: RunContext) -> Candidate:
    """Returns the candidate with the best score on validation data."""
    best = min(candidates, key=lambda c: c.validation_score)
    if len(candidates) > 1:
        others = ", ".join(f"{c.trial} {c.validation_score:.4f}" for c in candidates if c is not best)
        context.log(f"chose {best.trial}: best score on validation, {best.validation_score:.4f} (others: {others})")
    return best


def refitted_log_factor(best: Candidate, context: RunContext) -> tuple[float, dict[str, Any] | None]:
    """Returns the log of the factor applied on top of the head (0 if not significant), and its report."""
    if best.refit is None:
        return 0.0, None
    significant = _is_significant(best.refit)
    factor, error = math.exp(best.refit.log_scale), best.refit.standard_error
    context.log(
        f"refit on top: scale x {factor:.4f} (standard error of its log {error:.4f}): "
        f"{'applied' if significant else 'not applied, within its noise'}"
    )
    report = {"factor": factor, "standard_error_of_log": error, "applied": significant}
    return best.refit.log_scale if significant else 0.0, report


def train_head(
    lm: LanguageModel,
    plan: AtsPlan,
    trial: Trial,
    frozen: Frozen,
    arrays: Mapping[str, Any],
    *,
    context: RunContext,
    identity: Mapping[str, Any],
) -> Any:
    """Trains one head with one loss, from its newest checkpoint if there is one; returns its parameters.

    Args:
        lm: the frozen model.
        plan: the head, optimiser, batches and epochs.
        trial: the loss.
        frozen: the model's arrays, on `context.mesh`, which is set (`jax.set_mesh`); see `freeze`.
        arrays: arrays of the sequences; see `sequence_arrays`.
        context: directory for checkpoints and logs; its seed determines the initial parameters and the batches.
        identity: further description of the run, stored with its checkpoints.
    """
    steps = max(1, plan.epochs * len(arrays["targets"]) // plan.batch_size)
    objective = AtsObjective(lm.config, plan.head, trial.loss, lm.dtype)
    optimizer, step_fn = _step_of(objective, plan.optimizer, steps, plan.accumulate)

    def start():
        return create_state(plan.head.init(jax.random.key(context.seed)), optimizer)

    part = local_rows(context.mesh, plan.batch_size)
    state = train(
        step_fn,
        jax.jit(start, out_shardings=param_shardings(context.mesh, jax.eval_shape(start)))(),
        frozen,
        {"alpha": jnp.float32(trial.alpha or 0.0), "top_label_weight": jnp.float32(plan.top_label_weight)},
        batches(arrays, plan.batch_size, seed=context.seed, epochs=plan.epochs, part=part),
        steps=steps,
        context=context.titled(f"ATS {trial}"),
        identity={
            "plan": dataclasses.asdict(plan),
            "seed": context.seed,
            "fingerprint": lm.fingerprint,
            "dtype": str(lm.dtype),
            **identity,
            "loss": trial.loss,
            "alpha": trial.alpha,
        },
        checkpoint_every=plan.checkpoint_every,
    )
    return state.params


@functools.lru_cache(maxsize=8)
def _step_of(
    objective: AtsObjective, optimizer: OptimizerConfig, steps: int, accumulate: int
) -> tuple[optax.GradientTransformation, TrainStep]:
    """Returns the optimiser and the step: one program for fits that differ only in data, seed or alpha."""
    built = optimizer.build(steps)
    return built, make_train_step(objective, built, accumulate=accumulate, clip_norm=optimizer.clip_norm)


def _is_significant(refit: recalibrate.TemperatureFit) -> bool:
    """Whether the factor differs from 1 by more than two standard errors; applying another one would add its noise."""
    return refit.converged and abs(refit.log_scale) > 2.0 * refit.standard_error


class _Rows(Mapping[str, Any]):
    """Selected rows of arrays, without a copy: hidden states may take most of the memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray):
        self._arrays = {name: _Selection(array, rows) for name, array in arrays.items()}

    def __getitem__(self, name: str) -> "_Selection":
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class _Selection:
    """`array[rows]`, read when it is indexed."""

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self._array, self._rows = array, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self._array[self._rows[index]]
