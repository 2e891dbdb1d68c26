"""Programs in StableHLO, which JAX runs on CPU, GPU and TPU in a process that has no calibjax: `jax.export`.

    from jax import export

    program = export.deserialize(Path("DIR/head.stablehlo").read_bytes())
    log_scale = program.call(features, mask)

Batch and length are symbolic; parameters are constants of the program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Bool, Float, Int

from calibjax.heads import FittedHead, head_features
from calibjax.models import decoder
from calibjax.models.calibrated import check_base, scaled_log_probs
from calibjax.models.frozen import freeze
from calibjax.models.model import LanguageModel
from calibjax.runtime.errors import UserError

_PLATFORMS = ("cpu", "cuda", "tpu")
_LARGEST = 2**30  # bytes of weights; the format holds 2 GiB


def head_program(head: FittedHead) -> bytes:
    """The head alone as a serialized program.

    Its inputs are features (float32 `[B, T, F]`, see `HeadConfig.features`) and mask (bool `[B, T]`, False for
    padding); its output is log_scale (float32 `[B, T]`).
    """

    def log_scale(features: Float[Array, "B T F"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
        return _log_scale(head, features, mask)

    return _serialized(log_scale, None, ("float32", head.config.width), ("bool", None))


def _log_scale(head: FittedHead, features: Float[Array, "B T F"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    segments = mask.astype(jnp.int32)
    log_scale = head.config.build().apply({"params": head.params}, features, where=mask, segment_ids=segments)
    return jnp.asarray(log_scale) + np.float32(head.log_factor)


def model_program(lm: LanguageModel, head: FittedHead) -> bytes:
    """A small model, of at most 1 GiB, with its head as a serialized program.

    Its inputs are tokens (int32 `[B, T]`) and mask (bool `[B, T]`, False for padding), T at most the model's largest
    number of positions. Its outputs are log-probabilities (float32 `[B, T, V]`, see `calibrated_logprobs`) and
    log_scale (float32 `[B, T]`).

    Raises:
        UserError: the head belongs to another model, or the model is larger.
    """
    check_base(lm, head)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    if size > _LARGEST:
        raise UserError(
            f"a program holds at most {_LARGEST >> 20:,} MiB of weights as constants; this model has {size >> 20:,}. "
            "Export the head alone."
        )
    frozen = freeze(lm, head.config)
    options: Any = {"covariance": frozen.covariance, "bias": frozen.bias, "softcap": lm.config.logit_softcap}

    def log_probs(tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> tuple[Array, Array]:
        segments = mask.astype(jnp.int32)
        hidden = decoder.hidden_states(lm.config, lm.params, tokens, segment_ids=segments, dtype=lm.dtype)
        logits = decoder.unembed(lm.config, lm.params, hidden)
        matrix = frozen.unembedding.astype(lm.dtype)
        features = head_features(head.config.features, hidden, matrix, logits=logits, **options)
        log_scale = _log_scale(head, features, mask)
        return scaled_log_probs(logits, log_scale), log_scale

    return _serialized(log_probs, lm.config.max_positions, ("int32", None), ("bool", None))


def _serialized(function: Callable[..., Any], longest: int | None, *inputs: tuple[str, int | None]) -> bytes:
    """The program of a function of arrays [B, T] or [B, T, F], given by dtype and F."""
    limits = ["b >= 1", "t >= 1", *([] if longest is None else [f"t <= {longest}"])]
    batch, length = export.symbolic_shape("b, t", constraints=limits)
    shapes = [
        jax.ShapeDtypeStruct((batch, length) if width is None else (batch, length, width), jnp.dtype(dtype))
        for dtype, width in inputs
    ]
    return bytes(export.export(jax.jit(function), platforms=_PLATFORMS)(*shapes).serialize())
