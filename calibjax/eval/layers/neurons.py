"""Entropy neurons: neurons of the last MLPs with a large norm and a small direct effect on the logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax.eval.layers.directions import NullSpace
from calibjax.models import LanguageModel
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

_ROWS = 16_384  # of the unembedding, in float32, at a time


class Neuron(NamedTuple):
    """One neuron of an MLP.

    Attributes:
        layer: of its block, from 1.
        index: in the MLP, from 0.
        norm: |w| of its output weights w.
        norm_percentile: percentage of the MLP's neurons with a smaller norm.
        logit_variance: Var_v cos(W_v, w).
        logit_variance_percentile: likewise.
        null_space_share: of w; see `NullSpace.fraction`.
    """

    layer: int
    index: int
    norm: float
    norm_percentile: float
    logit_variance: float
    logit_variance_percentile: float
    null_space_share: float

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain data."""
        return self._asdict()


def entropy_neurons(
    lm: LanguageModel, space: NullSpace, *, layers: int = 1, count: int = 5, largest: float = 0.25
) -> list[Neuron]:
    """The neurons with the smallest direct effect on the logits among those with the largest norms.

    With w = diag(γ) w_out (centred for a LayerNorm), the direct effect of a neuron is Var_v (W_v · w / (|W_v| |w|)),
    the variance over the vocabulary: a constant added to all logits changes no probability (Stolfo et al., 2024,
    arXiv 2406.16254, section 3; Gurnee et al., 2024, arXiv 2401.12181). Of the `largest` share by |w| of each MLP, the
    `count` with the smallest variance. If the block normalises the MLP's output, its scale is included in w.

    Args:
        lm: the model.
        space: from `null_space`.
        layers: number of the last blocks, from 1 to L.
        count: neurons of each.
        largest: fraction of each MLP's neurons, by norm, to choose from.
    """
    if not 1 <= layers <= lm.config.num_layers:
        raise UserError(f"layers: expected 1 to {lm.config.num_layers}, the model's blocks, got {layers}.")
    if lm.config.mixture is not None:
        raise UserError(f"entropy neurons: {lm.config.family} is a mixture of experts; choose a model with one MLP.")
    gain = np.asarray(lm.params["final_norm"]["scale"], np.float64) + lm.config.norm_offset
    mean, gram = _unit_moments(lm.unembedding)
    chosen = []
    for layer in range(lm.config.num_layers - layers, lm.config.num_layers):
        written = output_weights(lm, layer)
        norm = np.linalg.norm(written, axis=1)
        effect = written * gain[None, :]
        effect = effect / np.maximum(np.linalg.norm(effect, axis=1), np.finfo(np.float64).tiny)[:, None]
        variance = np.maximum(np.einsum("nd,de,ne->n", effect, gram, effect, optimize=True) - (effect @ mean) ** 2, 0)
        candidates = np.argsort(-norm)[: max(1, int(largest * len(norm)))]
        for index in candidates[np.argsort(variance[candidates])][:count]:
            chosen.append(
                Neuron(
                    layer + 1,
                    int(index),
                    float(norm[index]),
                    float(100 * (norm < norm[index]).mean()),
                    float(variance[index]),
                    float(100 * (variance < variance[index]).mean()),
                    float(space.fraction(written[index])),
                )
            )
    return chosen


def output_weights(lm: LanguageModel, layer: int) -> Float[np.ndarray, "neurons D"]:
    """What each neuron of the MLP of block `layer` (from 0) writes, float64.

    Times the scale of a norm of the MLP's output, if there is one; centred for a LayerNorm, which removes the mean.
    """
    written = np.asarray(to_host(lm.params["layers"]["mlp"]["down"]["kernel"][layer]), np.float64)
    if lm.config.norm_placement != "pre":
        after = lm.params["layers"]["mlp_post_norm"]["scale"][layer]
        written = written * (np.asarray(after, np.float64) + lm.config.norm_offset)[None, :]
    return written - written.mean(axis=1, keepdims=True) if lm.config.norm == "layer" else written


def _unit_moments(unembedding: Float[Array, "V D"]) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "D D"]]:
    """Mean of u_v and of u_v u_vᵀ over the vocabulary, u_v = W_v / |W_v|; float64, some rows at a time."""
    vocab_size, width = unembedding.shape
    mean, gram = np.zeros(width), np.zeros((width, width))
    for start in range(0, vocab_size, _ROWS):
        rows = np.asarray(to_host(unembedding[start : start + _ROWS].astype(jnp.float32)), np.float64)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1), np.finfo(np.float64).tiny)[:, None]
        mean, gram = mean + rows.sum(axis=0), gram + rows.T @ rows
    return mean / vocab_size, gram / vocab_size
