"""Adaptive Temperature Scaling: what differs from any other training (arXiv 2409.19817)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from calibjax import losses, recalibrate
from calibjax.data import Windows, batches, hold_back
from calibjax.heads import FittedHead, HeadConfig
from calibjax.kernels import VocabStats
from calibjax.models import LanguageModel
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import Frozen, batch_stats, freeze
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import check_batch, local_rows, make_mesh, param_shardings
from calibjax.train.hidden_cache import array_hash, window_arrays
from calibjax.train.loop import train
from calibjax.train.options import AtsOptions, AtsPlan, Trial, make_plan
from calibjax.train.state import OptimizerConfig, create_state
from calibjax.train.step import TrainStep, make_train_step
from calibjax.train.temperature import (
    LikelihoodPass,
    describe_temperature,
    fit_single_temperature,
    likelihood_pass,
    mean_likelihood,
)


class _Loss(NamedTuple):
    """A loss as the command line names it.

    Attributes:
        made_of: functions of `losses`.
        per_token: (statistics, hyper-parameters, the tokens that are no padding) -> the loss, `[B, T]`.
        per_micro_batch: micro-batches weigh alike; False: by their numbers of tokens.
    """

    made_of: tuple[str, ...]
    per_token: Callable[[VocabStats, Mapping[str, Array], Array], Array]
    per_micro_batch: bool = False


_LOSSES: dict[str, _Loss] = {
    "cross-entropy": _Loss(("cross_entropy",), lambda stats, hyper, real: losses.cross_entropy(stats)),
    "joint": _Loss(
        ("cross_entropy", "top_label"),
        lambda stats, hyper, real: losses.cross_entropy(stats) + hyper["top_label_weight"] * losses.top_label(stats),
    ),
    "label-smoothing": _Loss(
        ("label_smoothing",),
        lambda stats, hyper, real: losses.label_smoothing(stats, hyper["alpha"]),
    ),
    "selective": _Loss(
        ("selective_smoothing",),
        lambda stats, hyper, real: losses.selective_smoothing(stats, hyper["alpha"]),
    ),
    "selective-balanced": _Loss(
        ("selective_smoothing",),
        lambda stats, hyper, real: losses.selective_smoothing(stats, hyper["alpha"], balanced=True),
    ),
    "selective-authors": _Loss(
        ("selective_smoothing",),
        lambda stats, hyper, real: losses.selective_smoothing(
            stats, hyper["alpha"], balanced=True, masking="authors", where=real
        ),
        per_micro_batch=True,
    ),
}
"""Name on the command line -> the loss."""


@dataclasses.dataclass(frozen=True)
class AtsObjective:
    """The `Objective` of a temperature head: frozen forward pass, head, statistics, loss. Hashable.

    With the base model frozen only the scale is differentiated, so the step holds the forward pass, one product with
    the unembedding, and the head: no backward product of the unembedding's size.
    """

    model: DecoderConfig
    head: HeadConfig
    loss: str
    dtype: DTypeLike = jnp.float32

    def __call__(
        self, params: Any, frozen: Frozen, batch: Mapping[str, Array], hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        loss = _LOSSES[self.loss]
        needed = tuple(sorted({s for name in loss.made_of for s in losses.REQUIRED_STATISTICS[name]}))
        stats, _ = batch_stats(self.model, self.head, params, frozen, batch, dtype=self.dtype, statistics=needed)
        total = jnp.sum(loss.per_token(stats, hyper, batch["segment_ids"] > 0))
        count = jnp.sum(stats.valid).astype(jnp.float32)
        return (total / jnp.maximum(count, 1.0), jnp.ones(())) if loss.per_micro_batch else (total, count)


class Candidate(NamedTuple):
    """One loss that was tried, and what its head scored on the windows kept from training (per token, nats).

    The scores are NaN where nothing is chosen or refitted, and so nothing was kept from training.
    """

    trial: Trial
    params: Any
    validation_nll: float
    validation_score: float
    refit: recalibrate.TemperatureFit | None


class AtsFit(NamedTuple):
    """What `fit_ats` returns.

    Attributes:
        head: the finished head.
        temperature: the single temperature, as a head.
        report: JSON-able: what was tried, chosen and refitted.
    """

    head: FittedHead
    temperature: FittedHead
    report: dict[str, Any]


def fit_ats(
    lm: LanguageModel,
    windows: Windows,
    options: AtsOptions = AtsOptions(),  # noqa: B008 (frozen)
    *,
    directory: Path,
    mesh: Mesh | None = None,
    seed: int = 0,
    announce: Callable[[str], None] = print,
    quiet: bool = False,
) -> AtsFit:
    """Fits a single temperature and an ATS head to a frozen model.

    Everything is kept in `directory`: killed and called again with the same arguments it goes on where it was and ends
    with the same head, bit for bit.

    Args:
        lm: the frozen model.
        windows: to fit on. A part of them, chosen by `seed`, is kept from training the head where a loss is chosen or
            a temperature refitted; the single temperature is fitted on all of them.
        options: see `AtsOptions`.
        directory: for checkpoints, logs and the cache of hidden states.
        mesh: devices, with the axes of `calibjax.runtime.sharding.AXES`; None: one device. The model is laid out on it
            where it is not yet, and the head and its optimiser with it.
        seed: of the head's start, the order of the windows and the part kept back.
        announce: told in one line each what was done.
        quiet: no progress bars.

    Returns:
        `AtsFit`, its heads on the host.

    Raises:
        UserError: options that do not fit, or a directory with another run.
        NonFiniteLossError: training diverged.
    """
    plan = make_plan(options, lm.config.hidden_size)
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    check_batch(mesh, plan.batch_size, plan.accumulate)
    placed = jax.device_put(lm.params, param_shardings(mesh, lm.params))
    with jax.set_mesh(mesh):
        return _fit(
            dataclasses.replace(lm, params=placed),
            windows,
            plan,
            directory=directory,
            mesh=mesh,
            seed=seed,
            announce=announce,
            quiet=quiet,
        )


def _fit(
    lm: LanguageModel,
    windows: Windows,
    plan: AtsPlan,
    *,
    directory: Path,
    mesh: Mesh,
    seed: int,
    announce: Callable[[str], None],
    quiet: bool,
) -> AtsFit:
    """`fit_ats` of a model that lies on the mesh, which is set."""
    every_row = np.arange(len(windows.tokens))
    chosen_or_refitted = len(plan.trials) > 1 or plan.refit_temperature
    train_rows, validation_rows = every_row, every_row[:0]
    if chosen_or_refitted:
        train_rows, validation_rows = hold_back(windows, plan.validation_fraction, seed)
    arrays, hidden_given = window_arrays(
        lm,
        windows,
        mode=plan.cache_hidden,
        directory=directory,
        batch_size=plan.batch_size,
        announce=announce,
        quiet=quiet,
    )
    frozen = freeze(lm, head=plan.head, hidden_given=hidden_given)

    def scores(params: Any, rows: np.ndarray, top_label_weight: float) -> LikelihoodPass:
        return likelihood_pass(
            lm,
            plan.head,
            params,
            frozen,
            _Rows(arrays, rows),
            plan.batch_size,
            top_label_weight=top_label_weight,
        )

    single, temperature = fit_single_temperature(lm, frozen, arrays, plan.batch_size)
    announce(describe_temperature(single, len(every_row)))

    run = {"windows": array_hash(windows._asdict())}
    candidates = []
    for trial in plan.trials:
        params = train_head(
            lm,
            plan,
            trial,
            frozen,
            _Rows(arrays, train_rows),
            mesh=mesh,
            directory=directory / str(trial),
            seed=seed,
            run=run,
            quiet=quiet,
        )
        if not chosen_or_refitted:
            candidates.append(Candidate(trial, to_host(params), math.nan, math.nan, None))
            continue
        at = scores(params, validation_rows, plan.top_label_weight)
        refit = recalibrate.fit_temperature(at) if plan.refit_temperature else None
        score = refit.nll if refit is not None and _is_significant(refit) else mean_likelihood(at)
        nll = mean_likelihood(scores(params, validation_rows, 0.0))
        candidates.append(Candidate(trial, to_host(params), nll, score, refit))
        announce(f"ATS {trial}: on validation NLL {nll:.4f}, score {score:.4f}")
    best = min(candidates, key=lambda c: c.validation_score)
    if len(candidates) > 1:
        others = ", ".join(f"{c.trial} {c.validation_score:.4f}" for c in candidates if c is not best)
        announce(f"chose {best.trial}: best score on validation, {best.validation_score:.4f} (others: {others})")

    log_factor, refit_report = 0.0, None
    if best.refit is not None:
        significant = _is_significant(best.refit)
        log_factor = best.refit.log_scale if significant else 0.0
        refit_report = {
            "factor": math.exp(best.refit.log_scale),
            "standard_error_of_log": best.refit.standard_error,
            "applied": significant,
        }
        announce(
            f"refit on top: scale x {refit_report['factor']:.4f} (standard error of its log "
            f"{best.refit.standard_error:.4f}): {'applied' if significant else 'not applied, within its noise'}"
        )
    report = {
        "plan": dataclasses.asdict(plan),
        "loss": str(best.trial),
        "score": f"NLL + {plan.top_label_weight:g} x top-label log loss, nats a token",
        "candidates": [
            {"loss": str(c.trial), "validation_nll": c.validation_nll, "validation_score": c.validation_score}
            for c in candidates
            if chosen_or_refitted
        ],
        "refit": refit_report,
        "temperature": single.temperature,
        "windows": {"train": len(train_rows), "validation": len(validation_rows)},
    }
    head = FittedHead(plan.head, best.params, log_factor, lm.fingerprint)
    return AtsFit(head, temperature, report)


def train_head(
    lm: LanguageModel,
    plan: AtsPlan,
    trial: Trial,
    frozen: Frozen,
    arrays: Mapping[str, Any],
    *,
    mesh: Mesh,
    directory: Path,
    seed: int,
    run: Mapping[str, Any],
    quiet: bool = False,
) -> Any:
    """Trains one head with one loss, from where a killed run left it; returns its parameters.

    Args:
        lm: the frozen model.
        plan: the head, optimiser, batches and epochs.
        trial: the loss.
        frozen: the model's arrays, on `mesh`; see `freeze`.
        arrays: of the windows; see `window_arrays`.
        mesh: the one that is set (`jax.set_mesh`).
        directory: for checkpoints and logs.
        seed: of the head's start and the order of the windows.
        run: what else makes this run another, kept with its checkpoints.
        quiet: no progress bar.
    """
    steps = max(1, plan.epochs * len(arrays["targets"]) // plan.batch_size)
    objective = AtsObjective(lm.config, plan.head, trial.loss, lm.dtype)
    optimizer, step_fn = _step_of(objective, plan.optimizer, steps, plan.accumulate)

    def start():
        return create_state(plan.head.init(jax.random.key(seed)), optimizer)

    state = train(
        step_fn,
        jax.jit(start, out_shardings=param_shardings(mesh, jax.eval_shape(start)))(),
        frozen,
        {"alpha": jnp.float32(trial.alpha or 0.0), "top_label_weight": jnp.float32(plan.top_label_weight)},
        batches(arrays, plan.batch_size, seed=seed, epochs=plan.epochs, part=local_rows(mesh, plan.batch_size)),
        steps=steps,
        mesh=mesh,
        directory=directory,
        run={
            "plan": dataclasses.asdict(plan),
            "seed": seed,
            "fingerprint": lm.fingerprint,
            "dtype": str(lm.dtype),
            **run,
            "loss": trial.loss,
            "alpha": trial.alpha,
        },
        description=f"ATS {trial}",
        checkpoint_every=plan.checkpoint_every,
        quiet=quiet,
    )
    return state.params


@functools.lru_cache(maxsize=8)
def _step_of(
    objective: AtsObjective, optimizer: OptimizerConfig, steps: int, accumulate: int
) -> tuple[optax.GradientTransformation, TrainStep]:
    """One program for all fits that differ in data, seed or alpha alone."""
    built = optimizer.build(steps)
    return built, make_train_step(objective, built, accumulate=accumulate, clip_norm=optimizer.clip_norm)


def _is_significant(refit: recalibrate.TemperatureFit) -> bool:
    """Whether the factor is known to be other than 1: within its noise, applying it would only add that noise."""
    return refit.converged and abs(refit.log_scale) > 2.0 * refit.standard_error


class _Rows(Mapping[str, Any]):
    """Some rows of arrays, without a copy of them: hidden states may fill the memory once."""

    def __init__(self, arrays: Mapping[str, np.ndarray], rows: np.ndarray):
        self._arrays = {name: _Selection(array, rows) for name, array in arrays.items()}

    def __getitem__(self, name: str) -> "_Selection":
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class _Selection:
    """array[rows], fetched when it is indexed."""

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self._array, self._rows = array, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self._array[self._rows[index]]
