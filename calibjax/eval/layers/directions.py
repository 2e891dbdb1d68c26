"""Directions of the residual stream along which a model's confidence changes, and the effect of edits along them."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from calibjax import metrics
from calibjax.data import Sequences
from calibjax.eval.layers.bounds import centred_gram, through_final_norm
from calibjax.eval.layers.layers import Readout, batches_by_length, readout_sharding, residual_at, scored_batch
from calibjax.kernels import vocab_stats
from calibjax.metrics import CalibrationSums, Closed
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

Recipe = Literal["overconfident", "wrong", "confident"]
ENERGY = 0.01
"""Largest fraction of the squared singular values of the unembedding that its effective null space holds."""


def choose_sets(
    recipe: Recipe, confidence: Float[np.ndarray, " N"], correct: Bool[np.ndarray, " N"]
) -> tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """The two sets of predictions that define a direction: from the mean residual of the second to that of the first.

    - "overconfident": wrong with a confidence above the mean accuracy; against correct.
    - "wrong": wrong against correct.
    - "confident": confidence above its median against the others.
    """
    if recipe == "confident":
        first = confidence > np.median(confidence)
        second = ~first
    else:
        first = ~correct & (confidence > correct.mean()) if recipe == "overconfident" else ~correct
        second = correct
    if not first.any() or not second.any():
        empty = "first" if not first.any() else "second"
        others = ", ".join(name for name in get_args(Recipe) if name != recipe)
        raise UserError(
            f"--direction {recipe}: none of {len(correct):,} predictions belongs to the {empty} of its two sets. Give "
            f"more text or questions, or another direction ({others})."
        )
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums_of_batch(config, dtype, params, batch):
    """Σ h of either set `[2, L, D]`, and Σ |h| of all `[L]`."""
    residual = residual_at(config, params, batch, dtype, layers="residual")[1:].astype(jnp.float32)
    where = jnp.stack([batch["first"] & batch["where"], batch["second"] & batch["where"]])
    sums = jnp.sum(jnp.where(where[:, None, :, :, None], residual[None], 0.0), axis=(2, 3))
    length = jnp.linalg.norm(residual, axis=-1)
    return sums, jnp.sum(jnp.where(batch["where"][None], length, 0.0), axis=(1, 2))


def find_directions(
    lm: LanguageModel,
    sequences: Sequences,
    read: Readout,
    sets: tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]],
    *,
    batch_size: int = 16,
    context: RunContext | None = None,
) -> Directions:
    """The difference of the mean residuals of two sets after every block: the calibration direction of
    arXiv 2511.00280. `sets` are masks of the N predictions, in the order of `LayerOutputs`."""
    arrays = scored_batch(sequences, read)
    for name, mask in zip(("first", "second"), sets, strict=True):
        arrays[name] = np.zeros(arrays["where"].shape, bool)
        arrays[name][arrays["where"]] = mask
    total = np.zeros((2, lm.config.num_layers, lm.config.hidden_size))
    length = np.zeros(lm.config.num_layers)
    bar = (context or RunContext()).bar(title="direction", unit="sequence", total=len(sequences.tokens))
    for batch, rows in batches_by_length(arrays, batch_size):
        sums, lengths = to_host(_sums_of_batch(lm.config, lm.dtype, lm.params, batch))
        total, length = total + sums.astype(np.float64), length + lengths.astype(np.float64)
        bar.update(len(rows))
    bar.close()
    counts = int(sets[0].sum()), int(sets[1].sum())
    difference = total[0] / counts[0] - total[1] / counts[1]
    gap = np.linalg.norm(difference, axis=-1)
    vectors = difference / np.maximum(gap, np.finfo(np.float64).tiny)[:, None]
    fields = (x.astype(np.float32) for x in (vectors, gap, length / len(sets[0])))
    return Directions(*fields, counts=counts)


class NullSpace(NamedTuple):
    """Directions with hardly any effect on the logits: unit columns `[D, k]`, and k/D, the expected fraction of a
    random vector in their span."""

    basis: Float[np.ndarray, "D k"]
    expected: float

    def fraction(self, vectors: Float[np.ndarray, "*B D"]) -> Float[np.ndarray, "*B"]:
        """|Nᵀ v|² / |v|², in [0, 1]."""
        inside = np.square(vectors.astype(np.float64) @ self.basis).sum(axis=-1)
        return inside / np.maximum(np.square(vectors.astype(np.float64)).sum(axis=-1), np.finfo(np.float64).tiny)


def null_space(lm: LanguageModel, energy: float = ENERGY) -> NullSpace:
    """The effective null space of the unembedding: after the final norm its vectors change all logits alike or not.

    Of (W − mean row) diag(γ), centred for a LayerNorm, the directions of the k smallest singular values whose squares
    add up to at most `energy` of the sum of all (as in Stolfo et al. 2024, arXiv 2406.16254, section 3).
    """
    values, vectors = np.linalg.eigh(through_final_norm(lm, centred_gram(lm.unembedding)))
    fraction = np.cumsum(np.maximum(values, 0.0)) / max(values.sum(), np.finfo(np.float64).tiny)
    inside = int((fraction <= energy).sum())
    return NullSpace(vectors[:, :inside], inside / len(values))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _edited_batch(config, dtype, bins, closed, params, read: Readout, edit, batch):
    stats = vocab_stats(
        residual_at(config, params, batch, dtype, layers="last", edit=edit),
        read.unembedding.astype(dtype),
        batch["targets"],
        bias=read.bias,
        softcap=config.logit_softcap,
        where=batch["where"],
        statistics=("log_normalizer", "target_logit", "max_logit", "expected_logit", "correct"),
        sharding=readout_sharding(config, read),
    )
    sums = metrics.calibration_sums(
        stats.confidence(),
        stats.require("correct"),
        log_prob=stats.log_prob(),
        bins=bins,
        closed=closed,
        where=stats.valid,
    )
    return sums, jnp.sum(jnp.where(stats.valid, stats.entropy(), 0.0), axis=-1)


def evaluate_edit(
    lm: LanguageModel,
    sequences: Sequences,
    read: Readout,
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
    for batch, rows in batches_by_length(scored_batch(sequences, read), batch_size):
        args = (lm.params, read, jnp.asarray(edit), batch)
        outputs = to_host(_edited_batch(lm.config, lm.dtype, bins, closed, *args))
        parts.append(jax.tree.map(lambda x, rows=rows: np.asarray(x[: len(rows)], np.float64), outputs))
        order.extend(rows)
    place = np.argsort(order)
    return jax.tree.map(lambda *pieces: np.concatenate(pieces)[place], *parts)


class Edit(NamedTuple):
    """c · v_l added after one block; layer 0: no edit."""

    layer: int
    strength: float


def edit_array(directions: Directions, edit: Edit) -> Float[np.ndarray, "L D"]:
    """The array that the decoder adds: row l − 1 is strength · (mean length there) · v_l, the others zero."""
    rows, index = np.zeros_like(directions.vectors), edit.layer - 1
    if edit.layer:
        rows[index] = edit.strength * directions.length[index] * directions.vectors[index]
    return rows


def sweep(
    lm: LanguageModel,
    sequences: Sequences,
    read: Readout,
    directions: Directions,
    layers: Sequence[int],
    strengths: Sequence[float],
    *,
    context: RunContext | None = None,
    **options: Any,
) -> dict[Edit, CalibrationSums]:
    """The sums of `evaluate_edit`, for the unedited model, and for every layer with every strength."""
    edits = [Edit(0, 0.0), *(Edit(layer, c) for layer in layers for c in strengths if c)]
    bar = (context or RunContext()).bar(edits, title="sweep", unit="edit")
    return {edit: evaluate_edit(lm, sequences, read, edit_array(directions, edit), **options)[0] for edit in bar}


def choose_edit(sums: dict[Edit, CalibrationSums], accuracy_loss: float = 0.01) -> Edit:
    """The edit with the smallest ECE among those that lose no more than `accuracy_loss` of the accuracy."""
    rows = {edit: metrics.summarise(own) for edit, own in sums.items()}
    least = rows[Edit(0, 0.0)]["accuracy"] - accuracy_loss
    return min((edit for edit in rows if rows[edit]["accuracy"] >= least), key=lambda edit: rows[edit]["ece"])
