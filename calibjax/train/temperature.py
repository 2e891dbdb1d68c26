"""The likelihood of sequences as a function of one factor on all scales, and temperature scaling."""

import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax import recalibrate
from calibjax.data import eval_batches
from calibjax.heads import MAX_SCALE, MIN_SCALE, FittedHead, HeadConfig
from calibjax.models import LanguageModel
from calibjax.models.frozen import Frozen, stats_at
from calibjax.runtime.distributed import to_host

LikelihoodPass = Callable[[Float[Array, ""]], Iterator[recalibrate.LikelihoodSums]]
"""A pass over the data with every scale multiplied by e^u: maps u (float32 scalar) to the sums of each batch."""


def _likelihood_of_batch(model, dtype, top_label, frozen, batch, log_factor):
    log_scale = batch.get("log_scale", jnp.zeros(batch["targets"].shape, jnp.float32)) + log_factor
    stats = stats_at(model, frozen, batch, log_scale, dtype=dtype, statistics=recalibrate.NEEDED_STATISTICS)
    return recalibrate.likelihood_sums(stats, top_label=top_label)


_likelihood = jax.jit(_likelihood_of_batch, static_argnums=(0, 1, 2))


def likelihood_pass(
    lm: LanguageModel,
    frozen: Frozen,
    arrays: Mapping[str, np.ndarray],
    batch_size: int,
    *,
    top_label: bool = False,
) -> LikelihoodPass:
    """Returns the likelihood of sequences as a function of a factor on every scale; on the current mesh.

    Args:
        lm: the model.
        frozen: arrays of the model; see `freeze`.
        arrays: arrays of the sequences, as `batch_stats` reads them, and `log_scale` `[S, T]`; without it the scales
            are 1.
        batch_size: sequences per step.
        top_label: see `recalibrate.likelihood_sums`.
    """

    def sums_at(u: Float[Array, ""]) -> Iterator[recalibrate.LikelihoodSums]:
        for batch, _ in eval_batches(arrays, batch_size):
            yield to_host(_likelihood(lm.config, lm.dtype, top_label, frozen, batch, u))

    return sums_at


def fit_single_temperature(
    lm: LanguageModel, frozen: Frozen, arrays: Mapping[str, np.ndarray], batch_size: int
) -> tuple[recalibrate.TemperatureFit, FittedHead]:
    """Fits temperature scaling, within the bounds of every head; arguments as in `likelihood_pass`."""
    sums_at = likelihood_pass(lm, frozen, arrays, batch_size)
    fit = recalibrate.fit_temperature(sums_at, bounds=(math.log(MIN_SCALE), math.log(MAX_SCALE)))
    head = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
    return fit, FittedHead(head, {"log_scale": jnp.asarray(fit.log_scale, jnp.float32)}, 0.0, lm.fingerprint)


def describe_temperature(fit: recalibrate.TemperatureFit, sequences: int) -> str:
    """Returns a log line that describes the fit."""
    note = "" if fit.converged else " (no finite optimum: the bound was used)"
    return (
        f"temperature scaling: {fit.temperature:.4f} on {sequences:,} sequences: NLL {fit.nll_before:.4f} -> "
        f"{fit.nll:.4f}{note}"
    )
