"""A model and its head together: calibrated probabilities of any text, and the head as a program of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from calibjax.data import Sequences
from calibjax.data.sequences import check_in_vocabulary
from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import decoder
from calibjax.models.frozen import Config, batch_stats, frozen_arrays
from calibjax.models.model import LanguageModel, Tokens
from calibjax.models.own import FrozenModel, check_sequences
from calibjax.runtime.arrays import AnyArray, as_jax
from calibjax.runtime.errors import UserError


class TokenConfidence(NamedTuple):
    """The most likely next token, its calibrated probability, and the temperature used; `[B, T]` each."""

    argmax: Int[Array, "B T"]
    confidence: Float[Array, "B T"]
    temperature: Float[Array, "B T"]


def check_base(lm: FrozenModel, head: FittedHead) -> None:
    """Raises `UserError` for what is not a head, or one that was not fitted on this model."""
    if not isinstance(head, FittedHead):
        raise UserError(f"head: expected a FittedHead (load_head, fit_ats(...).head), got {type(head).__name__}.")
    check_fingerprint(lm, head.fingerprint)


def check_fingerprint(lm: FrozenModel, fingerprint: str) -> None:
    """Raises `UserError` where this is not the fingerprint of the model."""
    if fingerprint != lm.fingerprint:
        models = f"{fingerprint[:12]}..., this one is {lm.fingerprint[:12]}..."
        raise UserError(f"the head was fitted on another base model ({models}). Load that one, or fit a head for this.")


def _batch(lm: FrozenModel, head: FittedHead, tokens, segment_ids) -> dict[str, Array]:
    check_base(lm, head)
    if isinstance(tokens, Sequences):
        if segment_ids is not None:
            raise UserError("segment_ids: sequences have their own; leave them out.")
        check_sequences(lm, tokens)
        return {name: as_jax(x) for name, x in tokens.arrays().items()}
    tokens = as_jax(tokens)
    if tokens.ndim != 2:
        raise UserError(f"tokens: expected integers [B, T], got {tokens.dtype}{list(tokens.shape)}.")
    segment_ids = jnp.ones_like(tokens) if segment_ids is None else as_jax(segment_ids)
    if not isinstance(tokens, Tracer):
        size = getattr(lm.config, "num_inputs", lm.config.vocab_size)
        check_in_vocabulary("tokens (0 in padding)", np.asarray(tokens), size)
    layout = {"segment_ids": segment_ids, "positions": decoder.segment_positions(segment_ids)}
    return {"tokens": tokens, "targets": jnp.zeros_like(tokens), "where": segment_ids > 0, **layout}


@jax.jit(static_argnums=(0, 1, 2))
def _log_probs(model_config: Config, head_config: HeadConfig, dtype, head_arrays, frozen, batch, z) -> Array:
    """log softmax(exp(log_scale) · z), float32; the largest logit stays strictly the largest."""
    _, log_scale = batch_stats(model_config, head_config, head_arrays, frozen, batch, dtype=dtype, statistics=())
    best = jnp.argmax(z, axis=-1, keepdims=True)
    log_probs = jax.nn.log_softmax(jnp.exp(log_scale)[..., None] * z, axis=-1)
    # Rounding can make a near tie a tie, or the other way round.
    top = jnp.take_along_axis(log_probs, best, axis=-1)
    others = jax.lax.broadcasted_iota(best.dtype, z.shape, z.ndim - 1) != best
    return jnp.where(others & (log_probs >= top), jnp.nextafter(top, -jnp.inf), log_probs)


def calibrated_log_probs(
    lm: LanguageModel, tokens: Tokens, head: FittedHead, *, segment_ids: Int[AnyArray, "B T"] | None = None
) -> Float[Array, "B T V"]:
    """Calibrated log-probabilities of the token after each position, log softmax(s_t z_t): float32 `[B, T, V]`, nats.

    `lm.logits(tokens)` always has the same most likely token. Values on padding have no meaning.

    Args:
        lm: the base model.
        tokens: `[B, T]`, integer; or `Sequences`, which mark where texts begin and which targets count.
        head: fitted on `lm`.
        segment_ids: `[B, T]`, 0 for padding; by default all tokens of a row are one sequence.

    Raises:
        UserError: the head belongs to another model, or tokens do not fit the model.
    """
    batch = _batch(lm, head, tokens, segment_ids)
    # A second forward pass by the base model's own program: another one rounds and breaks near ties differently.
    z = lm.logits(tokens, segment_ids=segment_ids)
    frozen = frozen_arrays(lm, head.config)
    return _log_probs(lm.config, head.config, lm.dtype, head.arrays, frozen, batch, z)


@jax.jit(static_argnums=(0, 1, 2))
def _confidence(model_config: Config, head_config: HeadConfig, dtype, head_arrays, frozen, batch) -> TokenConfidence:
    needed = ("log_normalizer", "max_logit", "argmax")
    stats, log_scale = batch_stats(
        model_config, head_config, head_arrays, frozen, batch, dtype=dtype, statistics=needed
    )
    return TokenConfidence(stats.require("argmax"), stats.confidence(), jnp.exp(-log_scale))


def calibrated_confidence(
    lm: FrozenModel, tokens: Tokens, head: FittedHead, *, segment_ids: Int[AnyArray, "B T"] | None = None
) -> TokenConfidence:
    """Calibrated probability of the most likely next token at each position; see `calibrated_log_probs`.

    Where two logits tie to the last digit of float32, the token can be the other one of `lm.logits`.

    Returns:
        `TokenConfidence`, `[B, T]` each: argmax (int32, -1 on padding), confidence (float32 in [0, 1], 0 on padding)
        and temperature (float32 > 0). In `Sequences`, positions whose target does not count are treated as padding.
    """
    batch = _batch(lm, head, tokens, segment_ids)
    frozen = frozen_arrays(lm, head.config)
    return _confidence(lm.config, head.config, lm.dtype, head.arrays, frozen, batch)


def head_program(head: FittedHead) -> bytes:
    """The head as a StableHLO program of `jax.export`, which JAX runs on CPU, GPU and TPU without calibjax.

    Inputs, for any B and T: features (float32 `[B, T, F]`, see `HeadConfig.features`) and mask (bool `[B, T]`, False
    for padding). Output: log_scale (float32 `[B, T]`).
    """

    def log_scale(features: Float[Array, "B T F"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
        segments = mask.astype(jnp.int32)
        scale = head.config.build().apply({"params": head.params}, features, where=mask, segment_ids=segments)
        return jnp.asarray(scale) + np.float32(head.log_factor)

    batch, length = export.symbolic_shape("b, t", constraints=["b >= 1", "t >= 1"])
    features = jax.ShapeDtypeStruct((batch, length, head.config.width), jnp.float32)
    mask = jax.ShapeDtypeStruct((batch, length), jnp.bool_)
    exported = export.export(jax.jit(log_scale), platforms=("cpu", "cuda", "tpu"))(features, mask)
    return bytes(exported.serialize())
