"""What changes a model's confidence: edits along a direction of the residual stream, and ablations of entropy neurons,
neurons of the last MLPs with a large norm and a small direct effect on the logits."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax import metrics
from calibjax.data import Sequences
from calibjax.eval.layers.bounds import BLOCK_ROWS, centred_gram, through_final_norm
from calibjax.eval.layers.layers import Readout, batches_by_length, readout_stats, residual_at, scored_batch
from calibjax.metrics import CalibrationSums, Closed
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

Recipe = Literal["overconfident", "wrong", "confident"]
_Sets = tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]
ENERGY = 0.01  # fraction of the squared singular values of the unembedding in its effective null space, at most
_ACCURACY_LOSS = 0.01  # the most that the chosen edit may cost
CONTROLS = 5  # sets of other neurons of equal norm
_TINY = np.finfo(np.float64).tiny


def choose_sets(recipe: Recipe, confidence: Float[np.ndarray, " N"], correct: Bool[np.ndarray, " N"]) -> _Sets:
    """The two sets of predictions that define a direction, from the mean residual of the second to the first's.

    - "overconfident": wrong with a confidence above the mean accuracy; against correct.
    - "wrong": wrong against correct.
    - "confident": confidence above its median against the others.
    """
    first, second = ~correct, correct
    if recipe == "confident":
        first = confidence > np.median(confidence)
        second = ~first
    elif recipe == "overconfident":
        first = first & (confidence > correct.mean())
    if not first.any() or not second.any():
        empty = "first" if not first.any() else "second"
        reason = f"none of {len(correct):,} predictions is in the {empty} set of {recipe}"
        raise UserError(f"direction: {reason}; give more text or questions, or another direction.")
    return first, second


class Directions(NamedTuple):
    """A unit vector after each of L blocks, float32.

    Attributes:
        vectors: v_l = (mean of the first set − mean of the second) / its norm, the `gap`.
        length: mean norm of the residuals there: the unit of the strengths in `sweep`.
        counts: predictions in the two sets.
    """

    vectors: Float[np.ndarray, "L D"]
    gap: Float[np.ndarray, " L"]
    length: Float[np.ndarray, " L"]
    counts: tuple[int, int]


@jax.jit(static_argnums=(0, 1))
def _sums_of_batch(config, dtype, params, batch):
    """Σ h of either set `[2, L, D]`, and Σ |h| of all `[L]`."""
    residual = residual_at(config, params, batch, dtype, layers="residual")[1:].astype(jnp.float32)
    where = jnp.stack([batch["first"] & batch["where"], batch["second"] & batch["where"]])
    in_set = jnp.where(where[:, None, :, :, None], residual[None], 0.0)
    sums = jnp.sum(in_set, axis=(2, 3))
    length = jnp.linalg.norm(residual, axis=-1)
    return sums, jnp.sum(jnp.where(batch["where"][None], length, 0.0), axis=(1, 2))


def find_directions(
    lm: LanguageModel, sequences: Sequences, readout: Readout, sets: _Sets, *, batch_size: int, context: RunContext
) -> Directions:
    """The difference of the mean residuals of two sets after every block: the calibration direction of
    arXiv 2511.00280. `sets` are masks of the N predictions, in the order of `LayerOutputs`."""
    arrays = scored_batch(sequences, readout)
    for name, mask in zip(("first", "second"), sets, strict=True):
        arrays[name] = np.zeros(arrays["where"].shape, bool)
        arrays[name][arrays["where"]] = mask
    total = np.zeros((2, lm.config.num_layers, lm.config.hidden_size))
    length = np.zeros(lm.config.num_layers)
    bar = context.bar(title="direction", unit="sequence", total=len(sequences.tokens))
    for batch, rows in batches_by_length(arrays, batch_size):
        sums, lengths = to_host(_sums_of_batch(lm.config, lm.dtype, lm.params, batch))
        total += sums
        length += lengths
        bar.update(len(rows))
    bar.close()
    counts = int(sets[0].sum()), int(sets[1].sum())
    difference = total[0] / counts[0] - total[1] / counts[1]
    gap = np.linalg.norm(difference, axis=-1)
    vectors = difference / np.maximum(gap, _TINY)[:, None]
    fields = (x.astype(np.float32) for x in (vectors, gap, length / len(sets[0])))
    return Directions(*fields, counts=counts)


class NullSpace(NamedTuple):
    """Directions with hardly any effect on the logits: k orthonormal columns, and the expected fraction k/D."""

    basis: Float[np.ndarray, "D k"]
    expected: float

    def fraction(self, vectors: Float[np.ndarray, "*B D"]) -> Float[np.ndarray, "*B"]:
        """|Nᵀ v|² / |v|², in [0, 1]."""
        vectors = vectors.astype(np.float64)
        inside = np.square(vectors @ self.basis).sum(axis=-1)
        return inside / np.maximum(np.square(vectors).sum(axis=-1), _TINY)


def null_space(lm: LanguageModel, energy: float = ENERGY) -> NullSpace:
    """The effective null space of the unembedding: directions that hardly change differences between logits.

    Its basis are the directions of the k smallest singular values of (W − mean row) diag(γ), centred for a LayerNorm.
    Their squares add up to at most `energy` of the sum of all (Stolfo et al. 2024, arXiv 2406.16254, section 3).
    """
    values, vectors = np.linalg.eigh(through_final_norm(lm, centred_gram(lm.unembedding)))
    fraction = np.cumsum(np.maximum(values, 0.0)) / max(values.sum(), _TINY)
    inside = int((fraction <= energy).sum())
    return NullSpace(vectors[:, :inside], inside / len(values))


@jax.jit(static_argnums=(0, 1, 2, 3))
def _edited_batch(config, dtype, bins, closed, params, readout: Readout, edit, batch):
    hidden = residual_at(config, params, batch, dtype, layers="last", edit=edit)
    statistics = ("log_normalizer", "target_logit", "max_logit", "expected_logit", "correct")
    stats = readout_stats(config, readout, dtype, hidden, batch, statistics)
    options = {"bins": bins, "closed": closed, "where": stats.valid}
    confidence, correct = stats.confidence(), stats.require("correct")
    sums = metrics.calibration_sums(confidence, correct, log_prob=stats.log_prob(), **options)
    return sums, jnp.sum(jnp.where(stats.valid, stats.entropy(), 0.0), axis=-1)


def evaluate_edit(
    lm: LanguageModel,
    sequences: Sequences,
    readout: Readout,
    edit: Float[np.ndarray, "L D"],
    *,
    batch_size: int = 16,
    bins: int = 15,
    closed: Closed = "right",
) -> tuple[CalibrationSums, Float[np.ndarray, " S"]]:
    """Sums of the predictions with `edit` added to the residual stream, and the sum of their entropies, nats.

    One group per sequence, float64. All edits share one compiled program; zeros are no edit.
    """
    parts, order = [], []
    for batch, rows in batches_by_length(scored_batch(sequences, readout), batch_size):
        args = (lm.params, readout, jnp.asarray(edit), batch)
        outputs = to_host(_edited_batch(lm.config, lm.dtype, bins, closed, *args))
        parts.append(jax.tree.map(lambda x, rows=rows: np.asarray(x[: len(rows)], np.float64), outputs))
        order.extend(rows)
    place = np.argsort(order)
    return jax.tree.map(lambda *pieces: np.concatenate(pieces)[place], *parts)


class Edit(NamedTuple):
    """c · v_l added after one block; layer 0: no edit."""

    layer: int
    strength: float


UNEDITED = Edit(0, 0.0)


def edit_array(directions: Directions, edit: Edit) -> Float[np.ndarray, "L D"]:
    """The array that the decoder adds: row l − 1 is strength · (mean length there) · v_l, the others zero."""
    rows = np.zeros_like(directions.vectors)
    if edit.layer:
        block = edit.layer - 1
        rows[block] = edit.strength * directions.length[block] * directions.vectors[block]
    return rows


def sweep(
    lm: LanguageModel,
    sequences: Sequences,
    readout: Readout,
    directions: Directions,
    layers: Sequence[int],
    strengths: Sequence[float],
    *,
    context: RunContext,
    **options: Any,
) -> dict[Edit, CalibrationSums]:
    """The sums of `evaluate_edit`, for the unedited model, and for every layer with every strength."""
    edits = [UNEDITED, *(Edit(layer, c) for layer in layers for c in strengths if c)]
    bar = context.bar(edits, title="sweep", unit="edit")
    return {edit: evaluate_edit(lm, sequences, readout, edit_array(directions, edit), **options)[0] for edit in bar}


def choose_edit(sums: dict[Edit, CalibrationSums]) -> Edit:
    """The edit with the smallest ECE among those that lose no more than 0.01 of the accuracy."""
    figures = {edit: metrics.summarise(edit_sums) for edit, edit_sums in sums.items()}
    least = figures[UNEDITED]["accuracy"] - _ACCURACY_LOSS
    errors = {edit: row["ece"] for edit, row in figures.items() if row["accuracy"] >= least}
    return min(errors, key=errors.__getitem__)


class Neuron(NamedTuple):
    """A neuron of the MLP of block `layer` (from 1): |w| of its output weights, Var_v cos(W_v, w), the percentages of
    the MLP's neurons with smaller ones, and the fraction of w in the null space."""

    layer: int
    index: int
    norm: float
    norm_percentile: float
    logit_variance: float
    logit_variance_percentile: float
    null_space_fraction: float


def entropy_neurons(
    lm: LanguageModel, space: NullSpace, *, layers: int = 1, count: int = 5, largest: float = 0.25
) -> list[Neuron]:
    """The neurons with the smallest direct effect on the logits among those with the largest norms.

    With w = diag(γ) w_out (centred for a LayerNorm), the direct effect of a neuron is Var_v (W_v · w / (|W_v| |w|)),
    the variance over the vocabulary: a constant added to all logits changes no probability (Stolfo et al., 2024,
    arXiv 2406.16254, section 3; Gurnee et al., 2024, arXiv 2401.12181). In each of the last `layers` blocks, the
    candidates are the fraction `largest` of the neurons by |w|; the `count` with the smallest variance are returned.
    """
    if lm.config.mixture is not None:
        raise UserError(f"entropy neurons: {lm.config.family} is a mixture of experts; choose a model with one MLP.")
    gain = np.asarray(lm.params["final_norm"]["scale"], np.float64) + lm.config.norm_offset
    mean, gram = _unit_moments(lm.unembedding)
    chosen = []
    for layer in range(lm.config.num_layers - layers, lm.config.num_layers):
        written = output_weights(lm, layer)
        norm = np.linalg.norm(written, axis=1)
        effect = _unit_rows(written * gain[None, :])
        mean_square = np.einsum("nd,de,ne->n", effect, gram, effect, optimize=True)
        variance = np.maximum(mean_square - (effect @ mean) ** 2, 0)
        candidates = np.argsort(-norm)[: max(1, int(largest * len(norm)))]
        for index in candidates[np.argsort(variance[candidates])][:count]:
            neuron = Neuron(
                layer=layer + 1,
                index=int(index),
                norm=float(norm[index]),
                norm_percentile=_percentile(norm, index),
                logit_variance=float(variance[index]),
                logit_variance_percentile=_percentile(variance, index),
                null_space_fraction=float(space.fraction(written[index])),
            )
            chosen.append(neuron)
    return chosen


def _percentile(values: Float[np.ndarray, " N"], index: int) -> float:
    """The percentage of the values that are smaller than the one at `index`."""
    return float(100 * (values < values[index]).mean())


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
    for start in range(0, vocab_size, BLOCK_ROWS):
        rows = to_host(unembedding[start : start + BLOCK_ROWS].astype(jnp.float32))
        rows = _unit_rows(rows.astype(np.float64))
        mean += rows.sum(axis=0)
        gram += rows.T @ rows
    return mean / vocab_size, gram / vocab_size


def _unit_rows(vectors: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)


def ablate(
    lm: LanguageModel,
    halves: tuple[Sequences, Sequences],
    readout: Readout,
    neurons: Sequence[Neuron],
    space: NullSpace,
    *,
    batch_size: int,
    context: RunContext,
    **options: Any,
) -> list[dict[str, Any]]:
    """Figures of the second half with the entropy neurons of the last block changed (arXiv 2406.16254, section 4).

    - mean-ablated: their output is replaced by its mean over the predictions of the first half;
    - rotated: what they write loses its part in the null space of the unembedding and keeps its norm, so that it acts
      on the logits directly (models without a norm after the MLP only);
    - equal norm: mean-ablated other neurons of the same MLP, the nearest in norm; `CONTROLS` sets of as many.
    """
    fit, held_out = halves
    depth, width = lm.config.num_layers, lm.config.hidden_size
    entropy_indices = np.array([neuron.index for neuron in neurons if neuron.layer == depth])
    written = output_weights(lm, depth - 1)
    no_edit = np.zeros((depth, width), np.float32)
    mean = _mean_output(lm, fit, readout, batch_size)

    def mean_ablated(indices: Int[np.ndarray, " n"]) -> tuple[LanguageModel, Float[np.ndarray, "L D"]]:
        zeroed = _with_rows(lm, indices, np.zeros((len(indices), width)))
        edit = no_edit.copy()
        edit[-1] = mean - _mean_output(zeroed, fit, readout, batch_size)
        return zeroed, edit

    changed = {"none": lambda: (lm, no_edit), "mean-ablated": lambda: mean_ablated(entropy_indices)}
    if lm.config.norm_placement == "pre":
        rows_outside = rotated(written[entropy_indices], space)
        changed["rotated"] = lambda: (_with_rows(lm, entropy_indices, rows_outside), no_edit)
    for number, indices in enumerate(equal_norm(np.linalg.norm(written, axis=1), entropy_indices)):
        changed[f"equal norm {number + 1}"] = functools.partial(mean_ablated, indices)
    rows: list[dict[str, Any]] = []
    for name in context.bar(list(changed), title="ablation", unit="set"):
        model, edit = changed[name]()
        sums, entropy = evaluate_edit(model, held_out, readout, edit, batch_size=batch_size, **options)
        figures = metrics.summarise(sums)
        row = {"name": name, "entropy": float(entropy.sum() / sums.points.sum())}
        row |= {key: figures[key] for key in ("confidence", "accuracy", "ece", "nll")}
        rows.append(row)
    return rows


def rotated(written: Float[np.ndarray, "n D"], space: NullSpace) -> Float[np.ndarray, "n D"]:
    """Vectors without their part in the null space, with their norm; a vector that lies in it becomes 0."""
    outside = written - (written @ space.basis) @ space.basis.T
    norm = np.linalg.norm(outside, axis=1, keepdims=True)
    scale = np.linalg.norm(written, axis=1, keepdims=True) / np.maximum(norm, _TINY)
    return np.where(norm > 1e-9 * np.abs(written).max(), outside * scale, 0.0)


def equal_norm(norms: Float[np.ndarray, " N"], neurons: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, " n"]]:
    """Up to `CONTROLS` disjoint sets of n other neurons: for each of `neurons` the one left that is nearest in norm."""
    left = np.delete(np.arange(len(norms)), neurons)
    sets = []
    for _ in range(min(CONTROLS, len(left) // max(len(neurons), 1))):
        chosen = []
        for index in neurons:
            nearest = np.argmin(np.abs(norms[left] - norms[index]))
            chosen.append(left[nearest])
            left = np.delete(left, nearest)
        sets.append(np.array(chosen))
    return sets


def _with_rows(lm: LanguageModel, indices: Int[np.ndarray, " n"], rows: Float[np.ndarray, "n D"]) -> LanguageModel:
    layers = lm.params["layers"]
    kernel: Array = layers["mlp"]["down"]["kernel"]
    kernel = kernel.at[-1, indices].set(jnp.asarray(rows, kernel.dtype))
    mlp = {**layers["mlp"], "down": {**layers["mlp"]["down"], "kernel": kernel}}
    return dataclasses.replace(lm, params={**lm.params, "layers": {**layers, "mlp": mlp}})


def _mean_output(lm: LanguageModel, sequences: Sequences, readout: Readout, batch_size: int) -> Float[np.ndarray, " D"]:
    total = np.zeros(lm.config.hidden_size)
    for batch, _ in batches_by_length(scored_batch(sequences, readout), batch_size):
        total += to_host(_residual_sum(lm.config, lm.dtype, lm.params, batch))
    return total / sequences.where.sum()


@jax.jit(static_argnums=(0, 1))
def _residual_sum(config, dtype, params, batch):
    residual = residual_at(config, params, batch, dtype, layers="residual")[-1].astype(jnp.float32)
    return jnp.sum(jnp.where(batch["where"][..., None], residual, 0.0), axis=(0, 1))
