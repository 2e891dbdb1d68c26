"""The likelihood of sequences as a function of one factor on all scales, and temperature scaling."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax import recalibrate
from calibjax.data import eval_batches
from calibjax.heads import MAX_SCALE, MIN_SCALE, FittedHead, HeadConfig
from calibjax.models import LanguageModel
from calibjax.models.frozen import Frozen, batch_stats
from calibjax.runtime.distributed import to_host

LikelihoodPass = Callable[[Float[Array, ""]], Iterator[recalibrate.LikelihoodSums]]
"""A pass over the data with every scale multiplied by e^u: maps u (float32 scalar) to the sums of each batch."""


def _likelihood_of_batch(model, head, dtype, top_label_weight, params, frozen, batch, log_factor):
    stats, _ = batch_stats(
        model,
        head,
        params,
        frozen,
        batch,
        dtype=dtype,
        log_factor=log_factor,
        statistics=recalibrate.NEEDED_STATISTICS,
    )
    return recalibrate.likelihood_sums(stats, top_label_weight)


_likelihood = jax.jit(_likelihood_of_batch, static_argnums=(0, 1, 2, 3))


def likelihood_pass(
    lm: LanguageModel,
    head: HeadConfig,
    params: Mapping[str, Any],
    frozen: Frozen,
    arrays: Mapping[str, np.ndarray],
    batch_size: int,
    *,
    top_label_weight: float = 0.0,
) -> LikelihoodPass:
    """Returns the likelihood of sequences under a head as a function of a factor on every scale; on the current mesh.

    Args:
        lm: the model.
        head, params: the head.
        frozen: arrays of the model; see `freeze`.
        arrays: arrays of the sequences, as `batch_stats` reads them.
        batch_size: sequences per step.
        top_label_weight: weight of `losses.top_label`, which is added to the negative log-likelihood.
    """

    def sums_at(u: Float[Array, ""]) -> Iterator[recalibrate.LikelihoodSums]:
        for batch, _ in eval_batches(arrays, batch_size):
            sums = _likelihood(lm.config, head, lm.dtype, top_label_weight, params, frozen, batch, u)
            yield to_host(sums)

    return sums_at


def mean_likelihood(sums_at: LikelihoodPass) -> float:
    """Returns the mean negative log-likelihood per token at factor 1, in nats."""
    parts = list(sums_at(jnp.float32(0.0)))
    return float(sum(part.nll.sum(dtype=np.float64) for part in parts) / sum(part.count.sum() for part in parts))


def fit_single_temperature(
    lm: LanguageModel, frozen: Frozen, arrays: Mapping[str, np.ndarray], batch_size: int
) -> tuple[recalibrate.TemperatureFit, FittedHead]:
    """Fits temperature scaling, within the bounds of every head; arguments as in `likelihood_pass`."""
    head = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
    identity = {"log_scale": jnp.zeros((), jnp.float32)}
    sums_at = likelihood_pass(lm, head, identity, frozen, arrays, batch_size)
    fit = recalibrate.fit_temperature(sums_at, bounds=(math.log(MIN_SCALE), math.log(MAX_SCALE)))
    return fit, FittedHead(head, {"log_scale": jnp.asarray(fit.log_scale, jnp.float32)}, 0.0, lm.fingerprint)


def describe_temperature(fit: recalibrate.TemperatureFit, sequences: int) -> str:
    """Returns a log line that describes the fit."""
    note = "" if fit.converged else " (no finite optimum: the bound was used)"
    return (
        f"temperature scaling: {fit.temperature:.4f} on {sequences:,} sequences: NLL {fit.nll_before:.4f} -> "
        f"{fit.nll:.4f}{note}"
    )
