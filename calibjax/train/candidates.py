"""The candidates of a fit of ATS: a head, a loss and a decay each, fitted without each fold and to all sequences."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from calibjax.data import batches, eval_batches
from calibjax.heads import HeadConfig
from calibjax.losses import LOSSES, curve_loss
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import local_rows, param_shardings
from calibjax.train.cross_fit import SET_SHRINKAGES, SHRINKAGE, CandidateScore, score, shrink, within_noise_of_best
from calibjax.train.curves import TokenCurves, curves_of, features_of
from calibjax.train.loop import train
from calibjax.train.options import AtsPlan, Trial
from calibjax.train.solve import Design, fit_token_temperature, head_params, make_design, predict, solve
from calibjax.train.step import Batch, OptimizerConfig, TrainStep, create_state, make_train_step

_MIN_RELATIVE_GAIN = 0.02  # a decay that adds less than 2% to the gain over temperature scaling is the last one tried


class Candidate(NamedTuple):
    """A head, the loss that it is fitted with, and its decay."""

    head: HeadConfig
    trial: Trial
    decay: float

    def __str__(self) -> str:
        if self.head.kind == "constant" or not self.is_solved:
            return f"{self.head.kind}, {self.trial}"
        decay = f", decay {self.decay:g}" if self.head.reads_states else ""
        return f"{' + '.join(self.head.features).replace('_', ' ')}, {self.trial}{decay}"

    @property
    def is_solved(self) -> bool:
        return self.trial.is_solved(self.head)


@dataclasses.dataclass
class CandidateFits:
    """All fits of one call of `fit_ats` to the same tokens: without each fold, and to all of them.

    `temperature_log_scale` is log s of temperature scaling. With `by_set`, each fold is one of the sets. `scores`: by
    name of the candidate. `solutions`: by head and left-out fold, the last solution, from which the next fit starts.
    """

    tokens: TokenCurves
    plan: AtsPlan
    context: RunContext
    folds: Sequence[np.ndarray]
    temperature_log_scale: float
    by_set: bool
    designs: dict[HeadConfig, Design] = dataclasses.field(default_factory=dict)
    solutions: dict[tuple[HeadConfig, int], np.ndarray] = dataclasses.field(default_factory=dict)
    scores: dict[str, CandidateScore] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fold(self) -> Int[np.ndarray, " N"]:
        """The fold of each token that counts."""
        fold = np.zeros(len(self.tokens.source), np.int32)
        for number, rows in enumerate(self.folds):
            fold[rows] = number
        return np.repeat(fold, self.tokens.counted.sum(axis=1))

    def candidates(self) -> list[Candidate]:
        """The candidates for the first loss, the simplest first: by head, and by falling decay."""
        return [candidate for head in self.plan.heads for candidate in self._decay_candidates(head)]

    def _decay_candidates(self, head: HeadConfig) -> list[Candidate]:
        decays = self.plan.decays if head.kind == "linear" and head.reads_states else (0.0,)
        return [Candidate(head, self.plan.trials[0], decay) for decay in decays]

    @functools.cached_property
    def baseline(self) -> CandidateScore:
        return score(self.tokens, "temperature scaling", self._baseline_log_scale, refit=False)

    def choose(self) -> tuple[CandidateScore, dict[str, Any]]:
        """Chooses a candidate as `AtsOptions` describes; returns its score, and all scores as JSON.

        If that loss does not beat temperature scaling, the candidate with the lowest NLL of those that do is chosen.
        """
        baseline = self.baseline
        for head in self.plan.heads:
            self._score_decays(head)
        simplest = within_noise_of_best([*self.scores.values()], baseline)[0]
        losses = [self._score_once(simplest.candidate._replace(trial=trial)) for trial in self.plan.trials]
        best = min(within_noise_of_best(losses, baseline), key=lambda scored: scored.calibration_error)
        others = sorted(self.scores.values(), key=lambda scored: scored.mean("nll"))
        beating = (scored for scored in (best, *others) if scored.beats(baseline))
        chosen = next(beating, None) if self.plan.may_keep_temperature else best
        rows = [scored.as_json(baseline) for scored in (baseline, *self.scores.values())]
        if chosen is None:
            self.context.log("WARNING: no head beats temperature scaling beyond noise: temperature scaling is kept")
            return baseline, {"candidates": rows, "chosen": []}
        nll = f"NLL {chosen.mean('nll'):.4f} (temperature scaling {baseline.mean('nll'):.4f})"
        brier = f"Brier {chosen.mean('brier'):.4f} ({baseline.mean('brier'):.4f})"
        error = f"calibration error {chosen.calibration_error:.4f} ({baseline.calibration_error:.4f})"
        self.context.log(f"chose {chosen.candidate}: {nll}, {brier}, {error}")
        return chosen, {"candidates": rows, "chosen": [baseline.as_json(baseline), chosen.as_json(baseline)]}

    def _score_decays(self, head: HeadConfig) -> None:
        """Scores a head with ever smaller decays, until one hardly adds to the gain: then the best decay is near."""
        previous = None
        for candidate in self._decay_candidates(head):
            if not candidate.is_solved and self.scores and not self._is_promising(candidate):
                continue
            scored = self._score_once(candidate)
            if previous is not None and scored.gain(previous) < _MIN_RELATIVE_GAIN * previous.gain(self.baseline):
                break
            previous = scored

    def _score_once(self, candidate: Candidate) -> CandidateScore:
        name = str(candidate)
        if name not in self.scores:
            most = len(self.candidates()) + len(self.plan.trials) - 1
            self.context.log(f"fit {len(self.scores) + 1} of up to {most}: {name}")
            self.scores[name] = self._cross_fit(candidate)
        return self.scores[name]

    def _is_promising(self, candidate: Candidate) -> bool:
        """Whether a head that is trained in steps has a lower NLL on the first fold than the best candidate so far."""
        best = min(self.scores.values(), key=lambda scored: scored.mean("nll"))
        in_fold = self.fold == 0
        log_scale = best.log_scale.copy()
        log_scale[in_fold] = shrink(self._predict(candidate, 0), self._baseline_log_scale[in_fold], SHRINKAGE)

        def on_fold(candidate: Any, log_scale: np.ndarray) -> CandidateScore:
            # All tokens are scored, by a program that is compiled already, and the sums of the fold are taken.
            scored = score(self.tokens, candidate, log_scale, refit=False)
            sums = jax.tree.map(lambda x: x[self.folds[0]], scored.sums)
            return scored._replace(sums=sums)

        scored = on_fold(candidate, log_scale)
        difference, error = scored.difference(on_fold(best.candidate, best.log_scale), "nll")
        is_lower = difference < -error
        compared = f"NLL {scored.mean('nll'):.4f}, {difference:+.4f} ± {error:.4f} against {best.candidate}"
        verdict = "tried on all" if is_lower else "left out"
        self.context.log(f"{scored.candidate}: on the first fold {compared}: {verdict}")
        return is_lower

    def fit_to_all(self, candidate: Candidate) -> Any:
        if not candidate.is_solved:
            return self._train(candidate, self.tokens, left_out=None)
        design = self._design(candidate.head)
        return head_params(design, solve(design, candidate.trial, candidate.decay))

    @functools.cached_property
    def _baseline_log_scale(self) -> Float[np.ndarray, " N"]:
        """log s of each token by temperature scaling, fitted to the other sets.

        With one set it is fitted to all rows, because leaving out a fold hardly changes it.
        """
        if not self.by_set:
            return np.full(len(self.fold), self.temperature_log_scale, np.float32)
        ends = np.cumsum([len(rows) for rows in self.folds])
        others = [np.setdiff1d(np.arange(ends[-1]), rows) for rows in self.folds]
        fitted = [fit_token_temperature(self.tokens.take(rows)).log_scale for rows in others]
        return np.array(fitted, np.float32)[self.fold]

    def _cross_fit(self, candidate: Candidate) -> CandidateScore:
        """Predicts each fold by a head fitted to the others; shrinks the predictions towards temperature scaling."""
        log_scale = np.zeros(len(self.fold), np.float32)
        for fold in range(len(self.folds)):
            log_scale[self.fold == fold] = self._predict(candidate, fold)
        refit = self.plan.refit_temperature
        scores = []
        for shrinkage in SET_SHRINKAGES if self.by_set else (SHRINKAGE,):
            shrunk = shrink(log_scale, self._baseline_log_scale, shrinkage)
            scores.append(score(self.tokens, candidate, shrunk, refit=refit, shrinkage=shrinkage))
        best = min(scores, key=lambda scored: scored.mean("nll"))
        proper = f"NLL {best.mean('nll'):.4f}, Brier {best.mean('brier'):.4f}"
        self.context.log(f"{best.candidate}: out of fold {proper}, calibration error {best.calibration_error:.4f}")
        return best

    def _predict(self, candidate: Candidate, fold: int) -> Float[np.ndarray, " n"]:
        """Log s of the tokens of a fold, by a head fitted to the others."""
        if candidate.is_solved:
            design = self._design(candidate.head)
            key = (candidate.head, fold)
            weights = (self.fold != fold).astype(np.float32)
            solution = solve(design, candidate.trial, candidate.decay, weights, self.solutions.get(key))
            self.solutions[key] = solution
            return predict(design, solution)[self.fold == fold]
        others = np.setdiff1d(np.arange(len(self.tokens.source)), self.folds[fold])
        params = self._train(candidate, self.tokens.take(others), left_out=fold)
        fold_tokens = self.tokens.take(self.folds[fold])
        parts = []
        for batch, real_rows in eval_batches(fold_tokens.arrays, self.plan.batch_size):
            log_scale = to_host(_log_scale(candidate.head, fold_tokens.scales, params, batch))
            parts.append(log_scale[:real_rows])
        return np.concatenate(parts)[fold_tokens.counted]

    def _design(self, head: HeadConfig) -> Design:
        if head not in self.designs:
            self.designs[head] = make_design(self.tokens, head, self.temperature_log_scale)
        return self.designs[head]

    def _train(self, candidate: Candidate, tokens: TokenCurves, *, left_out: int | None) -> Any:
        context = self.context
        rows = len(tokens.source)
        if left_out is not None:
            context = context.within("folds", str(left_out))
            rows = min(len(self.tokens.source) - len(fold) for fold in self.folds)
        context = context.within(str(candidate).replace(", ", "-"))
        return train_head(tokens, self.plan, candidate.head, candidate.trial, rows=rows, context=context)


@dataclasses.dataclass(frozen=True)
class AtsObjective:
    """The `Objective` of a temperature head on the arrays of `TokenCurves`; `frozen` is not read. Hashable."""

    head: HeadConfig
    loss: str
    scales: tuple[float, ...]

    def __call__(
        self, params: Any, frozen: Any, batch: Mapping[str, Array], hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        loss = LOSSES[self.loss]
        real = batch["segment_ids"] > 0
        curves = curves_of(batch, self.scales)
        scale = jnp.exp(_log_scale(self.head, self.scales, params, batch))
        values, counts = curve_loss(loss, curves, scale, hyper=hyper, where=batch["where"], real=real)
        total = jnp.sum(values)
        count = jnp.sum(counts).astype(jnp.float32)
        if loss.per_micro_batch:
            return total / jnp.maximum(count, 1.0), jnp.ones(())
        return total, count


@jax.jit(static_argnums=(0, 1))
def _log_scale(head: HeadConfig, scales: tuple[float, ...], params: Any, batch: Batch) -> Float[Array, "B T"]:
    features = features_of(head, batch, scales)
    apply = head.build().apply
    return jnp.asarray(apply({"params": params}, features, where=batch["where"], segment_ids=batch["segment_ids"]))


def train_head(
    tokens: TokenCurves, plan: AtsPlan, head: HeadConfig, trial: Trial, *, rows: int | None = None, context: RunContext
) -> Any:
    """Trains one head with one loss in steps, from its newest checkpoint if there is one; returns its parameters.

    `rows` is the number of sequences that the number of steps is computed from, by default all of `tokens`; folds that
    pass one number share a compiled program. The seed of `context` determines the initial parameters and the batches.
    """
    steps = max(1, plan.epochs * (rows or len(tokens.source)) // plan.batch_size)
    optimizer, step_fn = _compiled_step(
        AtsObjective(head, trial.loss, tokens.scales), plan.optimizer, steps, plan.accumulate
    )

    def start():
        return create_state(head.init(jax.random.key(context.seed)), optimizer)

    part = local_rows(context.mesh, plan.batch_size)
    state = train(
        step_fn,
        jax.jit(start, out_shardings=param_shardings(context.mesh, jax.eval_shape(start)))(),
        (),
        {"alpha": jnp.float32(trial.alpha or 0.0)},
        batches(tokens.arrays, plan.batch_size, seed=context.seed, epochs=plan.epochs, part=part),
        steps=steps,
        context=context.titled(f"ATS {trial}"),
        identity={
            "plan": dataclasses.asdict(plan),
            "head": dataclasses.asdict(head),
            "seed": context.seed,
            "tokens": tokens.hash,
            "rows": array_hash({"source": tokens.source}),
            "loss": trial.loss,
            "alpha": trial.alpha,
        },
        checkpoint_every=plan.checkpoint_every,
    )
    return state.params


@functools.lru_cache(maxsize=8)
def _compiled_step(
    objective: AtsObjective, optimizer: OptimizerConfig, steps: int, accumulate: int
) -> tuple[optax.GradientTransformation, TrainStep]:
    """The optimiser and the step: one program for fits that differ only in data, seed or alpha."""
    built = optimizer.build(steps)
    return built, make_train_step(objective, built, accumulate=accumulate, clip_norm=optimizer.clip_norm)
