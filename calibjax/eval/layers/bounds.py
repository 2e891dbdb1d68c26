"""How small the entropy of a model's next-token distribution can get, from its final norm and unembedding alone."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from calibjax.losses.bounds import EntropyBound, capped_entropy_lower_bound, entropy_lower_bound
from calibjax.models import LanguageModel
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

BLOCK_ROWS = 16_384  # rows of the unembedding that are in float32 at a time


@dataclasses.dataclass(frozen=True)
class ModelBound:
    """The smallest entropy that the last layer of a model can express.

    Attributes:
        spectral_norm: largest singular value of the unembedding minus its mean row, times the final norm's scale.
        logit_norm: the largest norm of the logits minus their mean.
        bound: the smallest entropy under it and under the soft-cap.
        log_one_minus_confidence: log of the smallest 1 − max p, from the longest row instead of the spectral norm.
    """

    model: str
    vocab_size: int
    hidden_size: int
    spectral_norm: float
    logit_norm: float
    softcap: float | None
    bound: EntropyBound
    log_one_minus_confidence: float

    def to_json(self) -> dict[str, Any]:
        bound = {**self.bound._asdict(), "uniform_entropy": math.log(self.vocab_size)}
        return {**dataclasses.asdict(self), "bound": bound}


def model_bound(lm: LanguageModel, name: str) -> ModelBound:
    """The least entropy that a model can express, over all inputs (arXiv 2508.00264, eq. 5).

    A final RMSNorm gives h = γ ⊙ x with |x| ≤ √D, so that logits minus their mean have a norm of at most
    s = σ_max((W − mean row) diag(γ)) √D; a LayerNorm's x sums to 0, and its bias b adds |(W − mean row) b|. A soft-cap
    keeps the logits within ±cap, which gives a second bound; the larger one counts.

    The spectral norm is a loose bound where one row matters. By Jensen's inequality Σ_{u≠v} e^{z_u − z_v} is at least
    (V−1) e^{−(z_v − mean of the others)}, and z_v − mean z ≤ |(W_v − mean row) diag(γ)| √D, so the longest such row
    bounds the confidence of any prediction; it is never looser than the bound by the spectral norm.
    """
    if lm.unembedding_bias is not None:
        family = lm.config.family
        raise UserError(f"{name} adds a bias to its logits ({family}), which the bound leaves out; choose another.")
    width, vocab_size = lm.config.hidden_size, lm.config.vocab_size
    softcap = lm.config.logit_softcap
    is_layer_norm = lm.config.norm == "layer"
    norm = dict(lm.params["final_norm"])
    norm["scale"] = norm["scale"] + lm.config.norm_offset
    gram = centred_gram(lm.unembedding)
    (largest,) = scipy.linalg.eigvalsh(through_final_norm(lm, gram), subset_by_index=[width - 1, width - 1])
    spectral_norm = math.sqrt(max(float(largest), 0.0))
    logit_norm = spectral_norm * math.sqrt(width)
    if is_layer_norm:
        bias = np.asarray(norm["bias"], np.float64)
        logit_norm += math.sqrt(max(float(bias @ gram @ bias), 0.0))
    bounds = [entropy_lower_bound(logit_norm, vocab_size)]
    # tanh brings logits closer to each other, so what bounds the gap of uncapped ones holds for capped ones too.
    gap = float(_longest_row(lm.unembedding, norm, is_layer_norm)) * vocab_size / (vocab_size - 1)
    if softcap is not None:
        gap = min(gap, 2 * softcap)
        bounds.append(capped_entropy_lower_bound(softcap, vocab_size))
    log_ratio = math.log(vocab_size - 1) - gap
    return ModelBound(
        model=name,
        vocab_size=vocab_size,
        hidden_size=width,
        spectral_norm=spectral_norm,
        logit_norm=logit_norm,
        softcap=softcap,
        bound=max(bounds, key=lambda bound: bound.log_entropy),
        log_one_minus_confidence=float(log_ratio - np.logaddexp(0.0, log_ratio)),
    )


@jax.jit
def _add_gram(gram: Array, rows: Array, mean: Array) -> Array:
    centred = rows.astype(jnp.float32) - mean[None, :]
    return gram + jnp.matmul(centred.T, centred, precision="highest")


def through_final_norm(lm: LanguageModel, gram: Float[np.ndarray, "D D"]) -> Float[np.ndarray, "D D"]:
    """A bilinear form G of hidden states after the final norm, as one of residuals before it divided by their length:
    diag(γ) G diag(γ), and for a LayerNorm, which subtracts the mean, that between centred vectors; float64."""
    scale = np.asarray(lm.params["final_norm"]["scale"], np.float64) + lm.config.norm_offset
    scaled = scale[:, None] * gram * scale[None, :]
    if lm.config.norm == "layer":
        scaled = scaled - scaled.mean(axis=0, keepdims=True)
        scaled = scaled - scaled.mean(axis=1, keepdims=True)
    return scaled


def centred_gram(unembedding: Float[Array, "V D"]) -> Float[np.ndarray, "D D"]:
    """G = Σ_v (W_v − mean)(W_v − mean)ᵀ, so that |logits − their mean|² = hᵀ G h; summed in float32, as float64."""
    vocab_size, width = unembedding.shape
    mean = jnp.mean(unembedding, axis=0, dtype=jnp.float32)
    gram = jnp.zeros((width, width), jnp.float32)
    for start in range(0, vocab_size, BLOCK_ROWS):
        gram = _add_gram(gram, unembedding[start : start + BLOCK_ROWS], mean)
    return np.asarray(to_host(gram), np.float64)


@jax.jit(static_argnums=2)
def _longest_row(unembedding: Array, norm: Mapping[str, Array], centred: bool) -> Float[Array, ""]:
    """max_v |(W_v − mean row) diag(γ)| √D, plus the term of a LayerNorm's bias: the largest z_v − mean z."""
    rows = unembedding.astype(jnp.float32) - jnp.mean(unembedding, axis=0, dtype=jnp.float32)[None, :]
    scaled = rows * norm["scale"].astype(jnp.float32)[None, :]
    if centred:
        scaled = scaled - jnp.mean(scaled, axis=1, keepdims=True)
    length = jnp.linalg.norm(scaled, axis=1) * math.sqrt(rows.shape[1])
    if centred:
        length = length + jnp.abs(jnp.matmul(rows, norm["bias"].astype(jnp.float32), precision="highest"))
    return jnp.max(length)
