"""Adaptive Temperature Scaling (arXiv 2409.19817): the objective, and heads trained on all sequences or on folds."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from calibjax import metrics
from calibjax.data import Sequences, batches, check_ids, concatenate, divide
from calibjax.heads import FittedHead, HeadConfig
from calibjax.losses import LOSSES, linear_loss
from calibjax.models import LanguageModel
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import Frozen, batch_hidden, batch_log_scale, freeze, vocab_sharding
from calibjax.runtime.context import RunContext
from calibjax.runtime.sharding import local_rows, param_shardings
from calibjax.train.cross_fit import (
    SHRINKAGES,
    SHRINKAGES_OF_ONE_SET,
    FitData,
    Score,
    Shrinkage,
    is_significant,
    other_folds,
    predict,
    ranked,
    score,
    select,
)
from calibjax.train.hidden_cache import array_hash, sequence_arrays
from calibjax.train.loop import train
from calibjax.train.options import AtsPlan, Trial
from calibjax.train.state import OptimizerConfig, create_state
from calibjax.train.step import TrainStep, make_train_step
from calibjax.train.temperature import fit_single_temperature


class AtsFit(NamedTuple):
    """What `calibjax.fit_ats` returns.

    Attributes:
        head: the fitted head.
        temperature: temperature scaling, as a head.
        report: JSON-able: what was chosen and refitted.
        comparison: JSON-able: the losses of `--loss auto` on sequences that they were not fitted on; None without it.
    """

    head: FittedHead
    temperature: FittedHead
    report: dict[str, Any]
    comparison: dict[str, Any] | None = None

    @property
    def heads(self) -> dict[str, FittedHead]:
        """Temperature scaling and the fitted head by name, as `calibjax.evaluate` takes them."""
        return {"temperature": self.temperature, "ats": self.head}

    def __repr__(self) -> str:
        return f"AtsFit({self.head!r}, loss {self.report['loss']}, temperature {self.report['temperature']:.4g})"


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


def prepare(lm: LanguageModel, sets: Mapping[str, Sequences], plan: AtsPlan, context: RunContext) -> FitData:
    """Divides the sequences into folds if a loss is chosen or a temperature refitted, and caches the hidden states."""
    sequences = concatenate(list(sets.values()))
    check_ids(sequences, lm.config.vocab_size)
    folds: list[np.ndarray] = []
    if plan.auto or plan.refit_temperature:
        if len(sets) > 1:
            ends = np.cumsum([len(of_set.tokens) for of_set in sets.values()])
            folds = np.split(np.arange(ends[-1]), ends[:-1])
        else:
            folds = divide(sequences, plan.folds, context.seed)
    arrays, hidden_given = sequence_arrays(
        lm, sequences, mode=plan.cache_hidden, batch_size=plan.batch_size, context=context
    )
    frozen = freeze(lm, plan.head, hidden_given=hidden_given)
    return FitData(lm, arrays, frozen, folds, array_hash(sequences._asdict()))


def cross_fit(
    data: FitData,
    plan: AtsPlan,
    trial: Trial,
    folds: Iterable[int],
    context: RunContext,
    *,
    known: Score | None = None,
    shrinkage: Shrinkage,
) -> Score:
    """Predicts each of `folds` by a head trained on all other folds; returns the score on these and on `known` ones.

    The predictions are shrunk towards temperature scaling by one of the fractions of `shrinkage` that do not raise ECE
    beyond noise.
    """
    log_scales = dict(known.log_scales if known is not None else {})
    smallest = min(len(other_folds(data, fold)) for fold in range(len(data.folds)))
    for fold in folds:
        if fold not in log_scales:
            params = train_head(
                *(data.lm, plan, trial, data.frozen, select(data.arrays, other_folds(data, fold))),
                context=context.within(f"folds/{fold}/{trial}"),
                identity={"windows": data.hash, "fold": fold},
                rows=smallest,
            )
            log_scales[fold] = predict(data, plan, params, fold)
    tried = []
    for fraction in shrinkage.fractions:
        shrunk = {fold: shrink(of_fold, shrinkage.towards(fold), fraction) for fold, of_fold in log_scales.items()}
        scored = score(data, plan, str(trial), shrunk, refit=plan.refit_temperature)
        tried.append(scored._replace(log_scales=log_scales, shrinkage=fraction))
    harmless = [of for of in tried if not of.shrinkage or not metrics.error_comparison(of.sums, tried[0].sums).low > 0]
    best = harmless[-1] if shrinkage.most else min(harmless, key=lambda scored: scored.mean("nll"))
    note = f", shrunk by {best.shrinkage:g}" if best.shrinkage else ""
    context.log(
        f"ATS {trial}: predicted out of fold, {len(log_scales)} of {len(data.folds)} folds, "
        f"NLL {best.mean('nll'):.4f}, Brier {best.mean('brier'):.4f}, calibration error "
        f"{best.calibration_error:.4f}{note}"
    )
    return best


def shrink(log_scale: Any, towards: float, shrinkage: float) -> Any:
    """Log scales moved towards another one, by a fraction of the distance."""
    return (1 - shrinkage) * log_scale + np.float32(shrinkage * towards)


def shrink_head(params: Any, towards: float, shrinkage: float) -> Any:
    """The parameters of the head whose log scales, before they are clipped, are `shrink` of the given head's."""
    if "output" not in params:  # one temperature
        return jax.tree.map(lambda x: shrink(x, towards, shrinkage), params)
    kernel, bias = params["output"]["kernel"], params["output"]["bias"]
    output = {"kernel": np.float32(1 - shrinkage) * kernel, "bias": shrink(bias, towards, shrinkage)}
    return {**params, "output": output}


class Choice(NamedTuple):
    """What `choose_trial` found.

    Attributes:
        trial: the loss to train with; None: temperature scaling, which no head beats.
        score: of the chosen loss on all folds; None if nothing was predicted out of fold.
        comparison: JSON-able: temperature scaling and every loss on the folds that were compared first, and the chosen
            loss on all folds; None if there was one loss.
    """

    trial: Trial | None
    score: Score | None
    comparison: dict[str, Any] | None


def choose_trial(data: FitData, plan: AtsPlan, log_scale: float, context: RunContext, *, by_set: bool) -> Choice:
    """Chooses, out of fold, the first loss of `ranked` that beats temperature scaling.

    All losses predict the first fold, or every set (`by_set`). The best of them predicts all folds. If it does not beat
    temperature scaling there (`Score.beats`), the next one is tried; if none does, temperature scaling is kept.
    """
    if not data.folds:
        return Choice(plan.trials[0], None, None)
    folds = range(len(data.folds))

    @functools.cache
    def fitted(fold: int) -> float:
        """Of temperature scaling without a set. A fold of rows hardly moves it: there it is that of all rows."""
        if not by_set:
            return log_scale
        others = select(data.arrays, other_folds(data, fold))
        return fit_single_temperature(data.lm, data.frozen, others, plan.batch_size)[0].log_scale

    @functools.cache
    def reference(folds: Sequence[int]) -> Score:
        shape = data.arrays["targets"].shape[1:]
        log_scales = {fold: np.full((len(data.folds[fold]), *shape), fitted(fold), np.float32) for fold in folds}
        return score(data, plan, "temperature scaling", log_scales, refit=False)

    shrinkage = Shrinkage(fitted, SHRINKAGES if by_set else SHRINKAGES_OF_ONE_SET, most=not by_set)
    fit = functools.partial(cross_fit, data, plan, context=context, shrinkage=shrinkage)
    if not plan.auto:
        return Choice(plan.trials[0], fit(plan.trials[0], folds), None)

    first = folds if by_set else folds[:1]
    tried = {str(trial): fit(trial, first) for trial in plan.trials}
    scaling = reference(first)
    comparison: dict[str, Any] = {
        "candidates": [of.as_json(scaling) for of in (scaling, *tried.values())],
        "chosen": [],
    }
    for candidate in ranked(tried.values(), scaling):
        trial = next(trial for trial in plan.trials if str(trial) == candidate.name)
        whole = candidate if by_set else fit(trial, folds, known=candidate)
        comparison["chosen"] = [of.as_json(reference(folds)) for of in (reference(folds), whole)]
        if comparison["chosen"][-1]["beats_temperature"]:
            context.log(
                f"chose {trial}: it beats temperature scaling, with the lowest calibration error or one close to it "
                f"({whole.calibration_error:.4f} against {reference(folds).calibration_error:.4f})"
            )
            return Choice(trial, whole, comparison)
    context.log("WARNING: no head beats temperature scaling beyond noise: the head that is kept is temperature scaling")
    return Choice(None, None, comparison)


def describe_refit(best: Score, context: RunContext) -> dict[str, Any] | None:
    """Logs and describes the factor applied on top of the head; None without one."""
    if best.refit is None:
        return None
    factor, error, applied = math.exp(best.refit.log_scale), best.refit.standard_error, is_significant(best.refit)
    context.log(
        f"refit on top: scale x {factor:.4f} (standard error of its log {error:.4f}): "
        f"{'applied' if applied else 'not applied, within its noise'}"
    )
    return {"factor": factor, "standard_error_of_log": error, "applied": applied}


def train_head(
    lm: LanguageModel,
    plan: AtsPlan,
    trial: Trial,
    frozen: Frozen,
    arrays: Mapping[str, Any],
    *,
    context: RunContext,
    identity: Mapping[str, Any],
    rows: int | None = None,
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
        rows: rows that the number of steps follows from, at most those of `arrays`, so that heads of folds of almost
            one size share a program; None: those of `arrays`.
    """
    steps = max(1, plan.epochs * (rows or len(arrays["targets"])) // plan.batch_size)
    objective = AtsObjective(lm.config, plan.head, trial.loss, lm.dtype)
    optimizer, step_fn = _step_of(objective, plan.optimizer, steps, plan.accumulate)

    def start():
        return create_state(plan.head.init(jax.random.key(context.seed)), optimizer)

    part = local_rows(context.mesh, plan.batch_size)
    state = train(
        step_fn,
        jax.jit(start, out_shardings=param_shardings(context.mesh, jax.eval_shape(start)))(),
        frozen,
        {"alpha": jnp.float32(trial.alpha or 0.0)},
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
