"""Forward pass of the frozen model for training and evaluation, from tokens or from stored hidden states."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.heads import Features, HeadArrays, HeadConfig, PerToken, head_features, join_features, logit_covariance
from calibjax.kernels import VocabSharding, VocabStats, vocab_stats
from calibjax.kernels.reference import dense_stats
from calibjax.models import decoder
from calibjax.models.config import DecoderConfig
from calibjax.models.own import FrozenModel, FunctionConfig
from calibjax.nn.kv_cache import Cache
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import constrain_batch, has_axes

Config = DecoderConfig | FunctionConfig
Batch = Mapping[str, Array]
Hidden = Float[Array, "B T D"]


class FrozenArrays(NamedTuple):
    """Arrays of a frozen model, passed to jitted functions as arguments."""

    params: Any
    unembedding: Any  # [V, D]; None if the model gives logits
    covariance: Float[Array, "E E"] | None = None  # `heads.logit_covariance`, if a head reads log_std_logits
    bias: Float[Array, " V"] | None = None  # of the logits


def frozen_arrays(lm: FrozenModel, *head_configs: HeadConfig) -> FrozenArrays:
    """The arrays of `lm` that a step with these heads needs.

    Call it once for all heads of a step: a program shards and gathers each argument, even if two are the same array.
    """
    covariance = None
    reads = {name for config in head_configs for name in config.features} & {"log_std_logits", "argmax_embedding"}
    if reads and lm.unembedding is None:
        raise UserError(f"{min(reads)}: this feature reads the unembedding, and the model gives logits: leave it out.")
    if "log_std_logits" in reads:
        covariance = jax.jit(logit_covariance)(lm.unembedding, lm.unembedding_bias)
    return FrozenArrays(lm.params, lm.unembedding, covariance, lm.unembedding_bias)


def vocab_sharding(config: Config) -> VocabSharding | None:
    """Sharding of the unembedding over the current mesh by `sharding.RULES`; None on one device or for other axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if not has_axes(mesh) or mesh.size == 1:
        return None
    divides = config.hidden_size % mesh.shape["fsdp"] == 0
    return VocabSharding(mesh, width=("fsdp",) if divides else ())


def vocab_options(config: Config, frozen: FrozenArrays) -> dict[str, Any]:
    """Bias, soft-cap and sharding of the logits, as the operators on the vocabulary take them."""
    return {"bias": frozen.bias, "softcap": config.logit_softcap, "sharding": vocab_sharding(config)}


def batch_hidden(config: Config, frozen: FrozenArrays, batch: Batch, dtype: DTypeLike) -> Hidden:
    """Hidden states after the final norm: `batch["hidden"]` if given, else computed by the decoder.

    The decoder reads `tokens`, `segment_ids`, `positions` and, if given, `until` of the batch, all `[B, T]`.
    """
    if "hidden" in batch:
        return batch["hidden"].astype(dtype)
    if isinstance(config, FunctionConfig):
        return jax.lax.stop_gradient(constrain_batch(config(frozen.params, batch)).astype(dtype))
    hidden = decoder.hidden_states(
        config,
        frozen.params,
        batch["tokens"],
        segment_ids=batch.get("segment_ids"),
        positions=batch.get("positions"),
        until=batch.get("until"),
        dtype=dtype,
    )
    return jax.lax.stop_gradient(hidden)


def frozen_features(
    config: Config,
    names: tuple[str, ...],
    frozen: FrozenArrays,
    hidden: Hidden,
    dtype: DTypeLike,
    stats: VocabStats | None = None,
) -> Features:
    """`heads.head_features` of a model; one that gives logits has these in place of `hidden`, `[B, T, V]`."""
    if frozen.unembedding is None:
        return join_features(names, {"hidden_states": hidden}, dense_stats(hidden) if stats is None else stats)
    return head_features(
        names,
        hidden,
        frozen.unembedding.astype(dtype),
        covariance=frozen.covariance,
        stats=stats,
        **vocab_options(config, frozen),
    )


def batch_log_scale(
    config: Config,
    head_config: HeadConfig,
    head_arrays: HeadArrays,
    frozen: FrozenArrays,
    batch: Batch,
    *,
    dtype: DTypeLike = jnp.float32,
    stats: VocabStats | None = None,
) -> PerToken:
    """log_scale of every token of a batch with `hidden` `[B, T, D]`, including the head's factor; see `batch_stats`.

    `stats`: the statistics at s = 1 that the head's features read; if None, they are computed.
    """
    features = frozen_features(config, head_config.features, frozen, batch["hidden"], dtype, stats)
    head: Any = head_config.build()
    where, segment_ids = batch["where"], batch["segment_ids"]
    log_scale = head.apply({"params": head_arrays.params}, features, where=where, segment_ids=segment_ids)
    return log_scale + head_arrays.log_factor


def extend_log_scale(
    config: Config,
    head_config: HeadConfig,
    head_arrays: HeadArrays,
    frozen: FrozenArrays,
    hidden: Hidden,
    segment_ids: Int[Array, "B T"],
    cache: Cache | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> tuple[PerToken, Cache | None]:
    """log_scale of the next tokens of each row after those in the head's `cache`, and the new cache.

    Without a cache nothing comes before. Heads that do not attend have none; those that pool cannot be extended.
    """
    features = frozen_features(config, head_config.features, frozen, hidden, dtype)
    run: Any = functools.partial(head_config.build().apply, {"params": head_arrays.params}, features)
    if head_config.attends:
        log_scale, cache = run(segment_ids=segment_ids, cache=cache, keep=True)
    else:
        log_scale = run()
    return log_scale + head_arrays.log_factor, cache


def batch_stats(
    config: Config,
    head_config: HeadConfig,
    head_arrays: HeadArrays,
    frozen: FrozenArrays,
    batch: Batch,
    *,
    dtype: DTypeLike = jnp.float32,
    statistics: tuple[str, ...] | None = None,
) -> tuple[VocabStats, PerToken]:
    """Frozen forward pass: statistics of a batch at the head's scale, and log_scale `[B, T]` including its factor.

    If a mesh is set (`jax.set_mesh`), tokens and vocabulary are divided according to `vocab_sharding`. The batch has
    `targets` (int), `where` (bool), `segment_ids` (int), and `hidden` `[B, T, D]` or `tokens` and `positions`; all
    others `[B, T]`. `config`, `head_config`, `dtype` and `statistics` are static.
    """
    batch = {**batch, "hidden": batch_hidden(config, frozen, batch, dtype)}
    log_scale = batch_log_scale(config, head_config, head_arrays, frozen, batch, dtype=dtype)
    return stats_at(config, frozen, batch, log_scale, dtype=dtype, statistics=statistics), log_scale


def stats_at(
    config: Config,
    frozen: FrozenArrays,
    batch: Batch,
    log_scale: PerToken,
    *,
    dtype: DTypeLike = jnp.float32,
    statistics: tuple[str, ...] | None = None,
) -> VocabStats:
    """Vocabulary statistics of one batch at these log scales `[B, T]`; for the other arguments see `batch_stats`."""
    hidden = batch_hidden(config, frozen, batch, dtype)
    where = batch["where"]
    if frozen.unembedding is None:
        return dense_stats(hidden, batch["targets"], scale=jnp.exp(log_scale), where=where)
    return vocab_stats(
        hidden,
        frozen.unembedding.astype(dtype),
        batch["targets"],
        scale=jnp.exp(log_scale),
        where=where,
        statistics=statistics,
        **vocab_options(config, frozen),
    )
