"""Cross-fitting: heads predict the sequences that they were not fitted on, and a head is chosen by these predictions.

The sequences are divided into folds of whole rows (or, where several sets are given, one fold per set). A head fitted
without a fold predicts it, so that choosing a head and refitting the temperature cost no training data.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax import metrics, recalibrate
from calibjax.kernels import VocabCurves
from calibjax.runtime.distributed import to_host
from calibjax.train.curves import TokenCurves, curves_of
from calibjax.train.solve import likelihood_sums_at

SHRINKAGE = 0.25  # fraction of the way to temperature scaling by which log scales are moved, see train/RESULTS.md
SET_SHRINKAGES = (0.25, 0.5, 0.75)  # tried where several sets are given: each is predicted by heads of the others
_ALLOWED_LOSS = 0.1  # fraction of the gain over temperature scaling that a simpler or better calibrated head may lose
_NOISE = 2.0  # standard errors beyond which a difference is not noise


class CandidateScore(NamedTuple):
    """Out-of-fold predictions of one candidate, and how good they are.

    Attributes:
        candidate: what made the predictions, or its name.
        log_scale: log 1/T of each token that counts, float32 `[N]`, with the shrinkage, without the refit.
        refit: the factor fitted on top; None without one.
        sums: sums of each sequence, with the refit if it is applied.
        shrinkage: fraction of the way to temperature scaling by which the log scales were moved.
    """

    candidate: Any
    log_scale: Float[np.ndarray, " N"]
    refit: recalibrate.TemperatureFit | None
    sums: metrics.CalibrationSums
    shrinkage: float = 0.0

    @property
    def log_factor(self) -> float:
        """The log of the refitted factor, if it is applied; otherwise 0."""
        return _applied(self.refit)

    @property
    def calibration_error(self) -> float:
        """Debiased L2 calibration error of the most likely token (`metrics.debiased_from_sums`)."""
        return float(metrics.debiased_from_sums(metrics.total_sums(self.sums)))

    def mean(self, score_name: str) -> float:
        """Mean of `nll` or `brier` over the tokens that count."""
        return float(getattr(self.sums, score_name).sum() / self.sums.points.sum())

    def gain(self, other: "CandidateScore") -> float:
        """How much lower the NLL per token is than the other's."""
        return other.mean("nll") - self.mean("nll")

    def difference(self, other: "CandidateScore", score_name: str) -> tuple[float, float]:
        """Mean difference per token from the other's `nll` or `brier`, and its standard error over sequences."""
        count = self.sums.points
        paired = getattr(self.sums, score_name) - getattr(other.sums, score_name)
        mean = paired.sum() / count.sum()
        groups = len(count)
        spread = np.square(paired - mean * count).sum() * groups / max(groups - 1, 1)
        return float(mean), math.sqrt(spread) / float(count.sum())

    def beats(self, other: "CandidateScore") -> bool:
        """Whether NLL and Brier are lower by more than two standard errors, and ECE is not higher beyond noise."""
        differences = [self.difference(other, score_name) for score_name in ("nll", "brier")]
        are_lower = all(difference < -_NOISE * error for difference, error in differences)
        return are_lower and not metrics.error_comparison(self.sums, other.sums).low > 0

    def as_json(self, reference: "CandidateScore") -> dict[str, Any]:
        """The figures of the candidate, and whether it beats `reference`."""
        return {
            "candidate": str(self.candidate),
            **{score_name: self.mean(score_name) for score_name in ("nll", "brier")},
            "ece": float(metrics.ece_from_sums(metrics.total_sums(self.sums))),
            "calibration_error": self.calibration_error,
            "factor": math.exp(self.log_factor),
            "shrinkage": self.shrinkage,
            "beats_temperature": self.beats(reference),
        }


def score(
    tokens: TokenCurves, candidate: Any, log_scale: Float[np.ndarray, " N"], *, refit: bool, shrinkage: float = 0.0
) -> CandidateScore:
    """Scores out-of-fold predictions that are already shrunk, with a temperature fitted on top if `refit`.

    The refit minimises the log loss of whether the most likely token is right: the target's would bias confidence.
    """
    fit = recalibrate.fit_temperature(likelihood_sums_at(tokens, log_scale, top_label=True)) if refit else None
    refitted = tokens.spread(log_scale + np.float32(_applied(fit)))
    sums = to_host(_sums(curves_of(tokens.arrays, tokens.scales), refitted))
    sums = metrics.CalibrationSums(*(np.asarray(x, np.float64) for x in sums))
    return CandidateScore(candidate, log_scale, fit, sums, shrinkage)


def _applied(refit: recalibrate.TemperatureFit | None) -> float:
    """The refitted log factor if it is more than two standard errors from 0, else 0: a smaller one would add noise."""
    if refit is None or not refit.converged or abs(refit.log_scale) <= _NOISE * refit.standard_error:
        return 0.0
    return refit.log_scale


@jax.jit
def _sums(curves: VocabCurves, log_scale: Float[Any, "S T"]) -> metrics.CalibrationSums:
    stats = curves.at(jnp.exp(log_scale))
    return metrics.calibration_sums(
        stats.confidence(), stats.require("correct"), log_prob=stats.log_prob(), where=stats.valid
    )


def shrink(log_scale: Any, towards: Any, shrinkage: float) -> Any:
    """Log scales moved a fraction of the way towards others; 0 leaves them, 1 gives the others."""
    return np.float32((1 - shrinkage) * log_scale + shrinkage * towards)


def within_noise_of_best(candidates: Sequence[CandidateScore], baseline: CandidateScore) -> list[CandidateScore]:
    """The candidates whose NLL is within noise of the lowest: higher by at most one standard error of the difference,
    or a tenth of the best one's gain over `baseline`, temperature scaling."""
    best = min(candidates, key=lambda candidate: candidate.mean("nll"))
    allowed = _ALLOWED_LOSS * best.gain(baseline)
    differences = [candidate.difference(best, "nll") for candidate in candidates]
    is_within = [difference <= max(error, allowed) for difference, error in differences]
    return [candidate for candidate, within in zip(candidates, is_within, strict=True) if within]
