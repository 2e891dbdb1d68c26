"""Entropy neurons: neurons of the last MLPs with a large norm and a small direct effect on the logits; ablations."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax import metrics
from calibjax.data import Sequences
from calibjax.eval.layers.directions import NullSpace, evaluate_edit
from calibjax.eval.layers.layers import Readout, batches_by_length, residual_at, scored_batch
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

CONTROLS = 5
"""Sets of other neurons of equal norm."""
_ROWS = 16_384  # of the unembedding, in float32, at a time


class Neuron(NamedTuple):
    """A neuron of the MLP of block `layer` (from 1): |w| of its output weights, Var_v cos(W_v, w), the percentages of
    the MLP's neurons with smaller ones, and the fraction of w in the null space."""

    layer: int
    index: int
    norm: float
    norm_percentile: float
    logit_variance: float
    logit_variance_percentile: float
    null_space_share: float


def entropy_neurons(
    lm: LanguageModel, space: NullSpace, *, layers: int = 1, count: int = 5, largest: float = 0.25
) -> list[Neuron]:
    """The neurons with the smallest direct effect on the logits among those with the largest norms.

    With w = diag(γ) w_out (centred for a LayerNorm), the direct effect of a neuron is Var_v (W_v · w / (|W_v| |w|)),
    the variance over the vocabulary: a constant added to all logits changes no probability (Stolfo et al., 2024,
    arXiv 2406.16254, section 3; Gurnee et al., 2024, arXiv 2401.12181). Of the `largest` share by |w| of each MLP, the
    `count` with the smallest variance, in each of the last `layers` blocks. If the block normalises the MLP's output,
    its scale is included in w.
    """
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
    """What each neuron of the MLP of block `layer` (from 0) writes, through a norm of its output, float64."""
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


def ablate(
    lm: LanguageModel,
    halves: tuple[Sequences, Sequences],
    read: Readout,
    neurons: Sequence[Neuron],
    space: NullSpace,
    *,
    context: RunContext | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Figures of the held-out half with the entropy neurons of the last block changed (arXiv 2406.16254, section 4).

    - mean-ablated: their output is replaced by its mean over the predictions of the first half;
    - rotated: what they write loses its part in the null space of the unembedding and keeps its norm, so that it acts
      on the logits directly (models without a norm after the MLP only);
    - equal norm: mean-ablated other neurons of the same MLP, the nearest in norm; `CONTROLS` sets of as many.

    `halves` are the sequences to find the means on and to evaluate on; `options` batch_size, bins and closed.
    """
    fit, held_out = halves
    depth, width = lm.config.num_layers, lm.config.hidden_size
    own = np.array([neuron.index for neuron in neurons if neuron.layer == depth])
    written = output_weights(lm, depth - 1)
    nothing = np.zeros((depth, width), np.float32)
    batch_size = options.get("batch_size", 16)
    mean = _mean_output(lm, fit, read, batch_size)

    def without(indices: Int[np.ndarray, " n"]) -> tuple[LanguageModel, Float[np.ndarray, "L D"]]:
        zeroed = _with_rows(lm, indices, np.zeros((len(indices), width)))
        edit = nothing.copy()
        edit[-1] = mean - _mean_output(zeroed, fit, read, batch_size)
        return zeroed, edit

    changed = {"none": lambda: (lm, nothing), "mean-ablated": lambda: without(own)}
    if lm.config.norm_placement == "pre":
        changed["rotated"] = lambda: (_with_rows(lm, own, rotated(written[own], space)), nothing)
    for number, indices in enumerate(equal_norm(np.linalg.norm(written, axis=1), own)):
        changed[f"equal norm {number + 1}"] = functools.partial(without, indices)
    rows: list[dict[str, Any]] = []
    for name in (context or RunContext()).bar(list(changed), title="ablation", unit="set"):
        model, edit = changed[name]()
        sums, entropy = evaluate_edit(model, held_out, read, edit, **options)
        figures = metrics.summarise(sums)
        row = {"name": name, "entropy": float(entropy.sum() / sums.whole()[0].sum())}
        row |= {key: figures[key] for key in ("confidence", "accuracy", "ece", "nll")}
        rows.append(row)
    return rows


def rotated(written: Float[np.ndarray, "n D"], space: NullSpace) -> Float[np.ndarray, "n D"]:
    """Vectors without their part in the null space, with their norm; a vector that lies in it becomes 0."""
    outside = written - (written @ space.basis) @ space.basis.T
    norm = np.linalg.norm(outside, axis=1, keepdims=True)
    scale = np.linalg.norm(written, axis=1, keepdims=True) / np.maximum(norm, np.finfo(np.float64).tiny)
    return np.where(norm > 1e-9 * np.abs(written).max(), outside * scale, 0.0)


def equal_norm(norms: Float[np.ndarray, " N"], own: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, " n"]]:
    """Up to `CONTROLS` disjoint sets of n other neurons, each the nearest in norm to one of `own` that is left."""
    left = np.delete(np.arange(len(norms)), own)
    sets = []
    for _ in range(min(CONTROLS, len(left) // max(len(own), 1))):
        chosen = []
        for index in own:
            nearest = np.argmin(np.abs(norms[left] - norms[index]))
            chosen.append(left[nearest])
            left = np.delete(left, nearest)
        sets.append(np.array(chosen))
    return sets


def _with_rows(lm: LanguageModel, indices: Int[np.ndarray, " n"], rows: Float[np.ndarray, "n D"]) -> LanguageModel:
    """The model whose last MLP has other output weights."""
    layers = lm.params["layers"]
    kernel: Array = layers["mlp"]["down"]["kernel"]
    kernel = kernel.at[-1, indices].set(jnp.asarray(rows, kernel.dtype))
    mlp = {**layers["mlp"], "down": {**layers["mlp"]["down"], "kernel": kernel}}
    return dataclasses.replace(lm, params={**lm.params, "layers": {**layers, "mlp": mlp}})


def _mean_output(lm: LanguageModel, sequences: Sequences, read: Readout, batch_size: int) -> Float[np.ndarray, " D"]:
    """Mean residual after the last block, float64."""
    total = np.zeros(lm.config.hidden_size)
    for batch, _ in batches_by_length(scored_batch(sequences, read), batch_size):
        total += np.asarray(to_host(_residual_sum(lm.config, lm.dtype, lm.params, batch)), np.float64)
    return total / sequences.where.sum()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _residual_sum(config, dtype, params, batch):
    residual = residual_at(config, params, batch, dtype, layers="residual")[-1].astype(jnp.float32)
    return jnp.sum(jnp.where(batch["where"][..., None], residual, 0.0), axis=(0, 1))
