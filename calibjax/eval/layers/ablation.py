"""What entropy neurons do: the model without them, with their output where the logits see it, and without others."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax import metrics
from calibjax.data import Sequences, eval_batches
from calibjax.eval.layers.directions import NullSpace, evaluate_edited
from calibjax.eval.layers.layers import Readout, residual_at, scored_batch
from calibjax.eval.layers.neurons import Neuron, output_weights
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host

CONTROLS = 5
"""Sets of other neurons of equal norm."""


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

    Args:
        lm: the model.
        halves: sequences to find the means on, and to evaluate on.
        read: of the predictions.
        neurons: from `entropy_neurons`; those of other blocks are left out.
        space: from `null_space`.
        context: progress.
        options: batch_size, bins, closed of `evaluate_edit`.
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
        sums, entropy = evaluate_edited(model, held_out, read, edit, **options)
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
    for batch, _ in eval_batches(scored_batch(sequences, read), batch_size):
        total += np.asarray(to_host(_residual_sum(lm.config, lm.dtype, lm.params, batch)), np.float64)
    return total / sequences.where.sum()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _residual_sum(config, dtype, params, batch):
    residual = residual_at(config, params, batch, dtype, layers="residual")[-1].astype(jnp.float32)
    return jnp.sum(jnp.where(batch["where"][..., None], residual, 0.0), axis=(0, 1))
