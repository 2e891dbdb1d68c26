"""Cross-fitting: heads predict the sequences that they were not trained on, and a head is chosen by these predictions.

The sequences are divided into folds of whole rows (or, where several sets are given, one fold per set). A head trained
without a fold predicts it, so that choosing a loss and refitting the temperature cost no training data.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from calibjax import metrics, recalibrate
from calibjax.data import eval_batches
from calibjax.models import LanguageModel
from calibjax.models.frozen import Frozen, batch_hidden, batch_log_scale, stats_at
from calibjax.runtime.distributed import to_host
from calibjax.train.options import AtsPlan
from calibjax.train.temperature import likelihood_pass

SHRINKAGES = (0.0, 0.25, 0.5, 0.75)
"""Fractions of the way from a head's log scales to temperature scaling's, tried where several sets are given."""
SHRINKAGES_OF_ONE_SET = SHRINKAGES[:2]
"""Those of one set, whose text cannot measure how a head carries to another: the way carries better at little cost on
the set itself; more than a quarter of it carries better still, but raises ECE there."""
_ERRORS = 2.0
"""Standard errors beyond which a difference is not noise."""
_EQUAL = 0.1
"""Part of temperature scaling's calibration error by which those of two losses may differ and count as equal."""


class Shrinkage(NamedTuple):
    """How far log scales may be moved towards temperature scaling.

    Attributes:
        towards: fold -> log 1/T of temperature scaling, fitted without the fold.
        fractions: of the way, that are tried, ascending; the first is 0.
        most: take the largest that does not raise ECE beyond noise; else, of these, the one with the lowest NLL.
    """

    towards: Callable[[int], float]
    fractions: Sequence[float]
    most: bool = False


class FitData(NamedTuple):
    """A frozen model and sequences, divided into folds.

    Attributes:
        lm: the model.
        arrays: arrays of all sequences, as `batch_stats` reads them; see `sequence_arrays`.
        frozen: arrays of the model.
        folds: rows of `arrays` of each fold; empty if nothing is chosen or refitted.
        hash: hash of the sequences.
    """

    lm: LanguageModel
    arrays: Mapping[str, np.ndarray]
    frozen: Frozen
    folds: Sequence[Int[np.ndarray, " n"]]
    hash: str


class Score(NamedTuple):
    """A method on the sequences of some folds, predicted out of fold.

    Attributes:
        name: the loss, or "temperature scaling".
        log_scales: fold -> log 1/T of each of its tokens, without shrinkage and refit, float32 `[n, T]`.
        refit: the factor fitted on top; None without one.
        sums: of each sequence, with the shrinkage, and with the refit if it is applied.
        shrinkage: fraction of the way to temperature scaling by which the log scales are moved.
    """

    name: str
    log_scales: Mapping[int, Float[np.ndarray, "n T"]]
    refit: recalibrate.TemperatureFit | None
    sums: metrics.CalibrationSums
    shrinkage: float = 0.0

    @property
    def log_factor(self) -> float:
        """The log of the refitted factor; 0 if it is within its noise."""
        return self.refit.log_scale if self.refit is not None and is_significant(self.refit) else 0.0

    @property
    def calibration_error(self) -> float:
        """Debiased L2 calibration error of the most likely token; see `metrics.debiased_from_sums`."""
        return float(metrics.debiased_from_sums(metrics.total(self.sums)))

    def mean(self, figure: str) -> float:
        """`nll` or `brier` per token."""
        return float(getattr(self.sums, figure).sum() / self.sums.whole()[0].sum())

    def beats(self, other: "Score") -> bool:
        """Whether NLL and Brier are lower than the other's beyond noise, and ECE is not higher beyond noise.

        NLL and Brier: paired over sequences, by more than two standard errors. ECE: `metrics.error_comparison`.
        """
        lower = all(
            difference < -_ERRORS * error
            for difference, error in (_difference(self.sums, other.sums, figure) for figure in ("nll", "brier"))
        )
        return lower and not metrics.error_comparison(self.sums, other.sums).low > 0

    def as_json(self, reference: "Score") -> dict[str, Any]:
        """Its figures, and whether it beats `reference`."""
        return {
            "loss": self.name,
            **{figure: self.mean(figure) for figure in ("nll", "brier")},
            "ece": float(metrics.ece_from_sums(metrics.total(self.sums))),
            "calibration_error": self.calibration_error,
            "factor": math.exp(self.log_factor),
            "shrinkage": self.shrinkage,
            "beats_temperature": self.beats(reference),
        }


def score(
    data: FitData,
    plan: AtsPlan,
    name: str,
    log_scales: Mapping[int, Float[np.ndarray, "n T"]],
    *,
    refit: bool,
) -> Score:
    """Scores out-of-fold predictions, with a temperature refitted on top if `refit`.

    The refit minimises the log loss of the most likely token: that of the target would keep the bias of the confidence
    that the best temperature of the whole distribution has.
    """
    rows = np.concatenate([data.folds[fold] for fold in log_scales])
    arrays = {**select(data.arrays, rows), "log_scale": np.concatenate(list(log_scales.values()))}
    fit = None
    if refit:
        fit = recalibrate.fit_temperature(
            likelihood_pass(data.lm, data.frozen, arrays, plan.batch_size, top_label=True)
        )
    scored = Score(name, log_scales, fit, metrics.CalibrationSums(*[np.zeros(0)] * 7))
    parts = []
    for batch, real in eval_batches(arrays, plan.batch_size):
        sums = to_host(_sums(data.lm.config, data.lm.dtype, data.frozen, batch, jnp.float32(scored.log_factor)))
        parts.append(metrics.CalibrationSums(*(np.asarray(x[:real], np.float64) for x in sums)))
    return scored._replace(sums=jax.tree.map(lambda *of: np.concatenate(of), *parts))


def ranked(candidates: Iterable[Score], reference: Score) -> list[Score]:
    """The candidates whose NLL and Brier score are below those of `reference`, by ascending calibration error.

    Errors within a tenth of that of `reference` from the lowest count as equal: their candidates are ordered by NLL,
    because to choose among them by the error would be to choose by noise.
    """
    lower = [c for c in candidates if all(c.mean(figure) < reference.mean(figure) for figure in ("nll", "brier"))]
    least = min((c.calibration_error for c in lower), default=0.0) + _EQUAL * reference.calibration_error

    def order(candidate: Score) -> tuple[float, float]:
        return max(candidate.calibration_error, least), candidate.mean("nll")

    return sorted(lower, key=order)


def predict(data: FitData, plan: AtsPlan, params: Any, fold: int) -> Float[np.ndarray, "n T"]:
    """The head's log 1/T of every token of a fold, float32."""
    parts = []
    for batch, real in eval_batches(select(data.arrays, data.folds[fold]), plan.batch_size):
        parts.append(to_host(_log_scale(data.lm.config, plan.head, data.lm.dtype, params, data.frozen, batch))[:real])
    return np.concatenate(parts)


def other_folds(data: FitData, fold: int) -> Int[np.ndarray, " m"]:
    """All rows but those of a fold, ascending."""
    return np.sort(np.concatenate([rows for other, rows in enumerate(data.folds) if other != fold]))


def is_significant(refit: recalibrate.TemperatureFit) -> bool:
    """Whether the factor differs from 1 by more than two standard errors; applying another one would add its noise."""
    return refit.converged and abs(refit.log_scale) > _ERRORS * refit.standard_error


def select(arrays: Mapping[str, np.ndarray], rows: Int[np.ndarray, " n"]) -> dict[str, Any]:
    """Selected rows of arrays, without a copy: hidden states may take most of the memory."""
    return {name: _Selection(array, rows) for name, array in arrays.items()}


class _Selection:
    """`array[rows]`, read when it is indexed."""

    def __init__(self, array: np.ndarray, rows: np.ndarray):
        self._array, self._rows = array, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._array[self._rows[index]]


def _difference(first: metrics.CalibrationSums, second: metrics.CalibrationSums, figure: str) -> tuple[float, float]:
    """Mean difference per token, first − second, and its standard error over sequences."""
    count = first.whole()[0]
    paired = getattr(first, figure) - getattr(second, figure)
    mean = paired.sum() / count.sum()
    groups = len(count)
    spread = np.square(paired - mean * count).sum() * groups / max(groups - 1, 1)
    return float(mean), math.sqrt(spread) / float(count.sum())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _log_scale(config, head, dtype, params, frozen, batch):
    batch = {**batch, "hidden": batch_hidden(config, frozen, batch, dtype)}
    return batch_log_scale(config, head, params, frozen, batch, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(config, dtype, frozen, batch, log_factor):
    stats = stats_at(config, frozen, batch, batch["log_scale"] + log_factor, dtype=dtype)
    return metrics.calibration_sums(
        stats.confidence(), stats.require("correct"), log_prob=stats.log_prob(), where=stats.valid
    )
