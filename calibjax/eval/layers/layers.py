"""Calibration across layers: the prediction read from each layer, and its calibration (arXiv 2511.00280)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax import metrics
from calibjax.data import Sequences, eval_batches
from calibjax.eval.figures_json import draws_of
from calibjax.kernels import VocabSharding, VocabStats, kl_divergences, vocab_stats
from calibjax.metrics import CalibrationSums, Closed
from calibjax.models import DecoderConfig, LanguageModel, decoder
from calibjax.models.frozen import vocab_sharding
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host

_STATISTICS = ("log_normalizer", "target_logit", "max_logit", "argmax", "expected_logit", "correct")


class Readout(NamedTuple):
    """The rows of the unembedding that predictions are made of, and their token ids, int32, or None for all."""

    unembedding: Float[Array, "R D"]
    bias: Float[Array, " R"] | None
    ids: Int[np.ndarray, " R"] | None = None


def make_readout(lm: LanguageModel, letters: tuple[int, ...] | None = None) -> Readout:
    """The whole vocabulary, or the tokens `letters` alone: the distribution given that one of them follows."""
    bias = lm.unembedding_bias
    if letters is None:
        return Readout(lm.unembedding, bias)
    ids = np.asarray(letters, np.int32)
    return Readout(lm.unembedding[ids], None if bias is None else bias[ids], ids)


def readout_stats(config, readout: Readout, dtype, hidden, batch, statistics) -> VocabStats:
    """Statistics of the distribution over the rows of the readout at hidden states after the final norm."""
    return vocab_stats(
        hidden,
        readout.unembedding.astype(dtype),
        batch["targets"],
        bias=readout.bias,
        softcap=config.logit_softcap,
        where=batch["where"],
        statistics=statistics,
        sharding=readout_sharding(config, readout),
    )


def readout_sharding(config: DecoderConfig, readout: Readout) -> VocabSharding | None:
    """The sharding of the operator over the current mesh (`jax.set_mesh`), if any; letters alone are not sharded."""
    sharding = vocab_sharding(config)
    whole = readout.unembedding.shape[0] == config.vocab_size
    return sharding if sharding is None or whole else dataclasses.replace(sharding, vocab=(), width=())


class LayerOutputs(NamedTuple):
    """N predictions at each of M layers: the embeddings, then the output of each block. In float32, and nats.

    Attributes:
        argmax: int32, the most likely token (its row in the readout).
        log_prob: of the target.
        kl: KL(last layer ‖ this layer).
        group: int32, the sequence of each prediction.
    """

    confidence: Float[np.ndarray, "M N"]
    argmax: Int[np.ndarray, "M N"]
    correct: Bool[np.ndarray, "M N"]
    log_prob: Float[np.ndarray, "M N"]
    entropy: Float[np.ndarray, "M N"]
    kl: Float[np.ndarray, "M N"]
    group: Int[np.ndarray, " N"]


def scored_batch(sequences: Sequences, readout: Readout) -> dict[str, np.ndarray]:
    """The arrays of a batch that is read at its scored positions alone: `[S, K]`, K the most in one sequence.

    `index` are the positions, `where` marks those of the K that exist, `targets` are rows of the readout.
    """
    most = int(sequences.where.sum(axis=1).max())
    index = np.argsort(~sequences.where, axis=1, kind="stable")[:, :most].astype(np.int32)
    where = np.take_along_axis(sequences.where, index, axis=1)
    targets = np.take_along_axis(sequences.targets, index, axis=1)
    if readout.ids is not None:
        order = np.argsort(readout.ids)
        ids = np.where(where, targets, readout.ids[0])
        targets = order[np.searchsorted(readout.ids[order], ids)].astype(np.int32)
    inputs = {name: getattr(sequences, name) for name in ("tokens", "segment_ids", "positions")}
    return {**inputs, "index": index, "where": where, "targets": targets}


def batches_by_length(arrays: dict[str, np.ndarray], batch_size: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Parts of the arrays of `scored_batch`, each with the numbers of its rows; rows that fill up the last have none.

    Rows are of similar length, longest first, cut after the last scored position; widths are powers of two from 64.
    """
    length = arrays["index"].max(axis=1, where=arrays["where"], initial=0) + 1
    order = np.argsort(-length, kind="stable")
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        width = max(64, 1 << int(length[rows[0]] - 1).bit_length())
        part = {name: x[rows] for name, x in arrays.items()}
        part |= {name: part[name][:, :width] for name in ("tokens", "segment_ids", "positions")}
        ((batch, _),) = eval_batches(part, batch_size)
        yield batch, rows


def residual_at(config, params, batch, dtype, *, layers, edit=None) -> Array:
    """Hidden states `[*M, B, K, D]` at the positions of `scored_batch`."""
    layout = {name: batch[name] for name in ("segment_ids", "positions")}
    states = decoder.hidden_states(config, params, batch["tokens"], **layout, layers=layers, dtype=dtype, edit=edit)
    index = jax.lax.expand_dims(batch["index"], [*range(states.ndim - 3), states.ndim - 1])
    return jnp.take_along_axis(states, index, axis=states.ndim - 2)


@jax.jit(static_argnums=(0, 1))
def _layers_of_batch(config, dtype, params, readout: Readout, batch):
    residual = residual_at(config, params, batch, dtype, layers="residual")
    states = decoder.final_norm(config, params, residual, dtype)

    def read_layer(hidden):
        stats = readout_stats(config, readout, dtype, hidden, batch, _STATISTICS)
        argmax, correct, normalizer = map(stats.require, ("argmax", "correct", "log_normalizer"))
        return stats.confidence(), argmax, correct, stats.log_prob(), stats.entropy(), normalizer

    *outputs, normalizer = jax.lax.map(read_layer, states)  # one layer's logits at a time
    kl = kl_divergences(
        states[-1],
        states[:-1],
        readout.unembedding.astype(dtype),
        log_normalizer=normalizer[-1],
        other_log_normalizers=normalizer[:-1],
        bias=readout.bias,
        softcap=config.logit_softcap,
        sharding=readout_sharding(config, readout),
    )
    return (*outputs, jnp.concatenate([kl, jnp.zeros_like(kl[:1])]))


def layer_outputs(
    lm: LanguageModel, sequences: Sequences, readout: Readout, *, batch_size: int, context: RunContext
) -> LayerOutputs:
    """The final norm and the unembedding applied to the residual stream after every layer (the logit lens).

    p_l = softmax(W norm(h_l)), at the scored positions, where h_0 are the embeddings and h_l the output of block l;
    p_L is the model's own prediction (arXiv 2511.00280; nostalgebraist 2020). The logits of a layer are never stored.
    Runs on the current mesh. M is L + 1; with letters, targets must be among them.
    """
    arrays = scored_batch(sequences, readout)
    parts, order = [], []
    bar = context.bar(title="layers", unit="sequence", total=len(sequences.tokens))
    for batch, rows in batches_by_length(arrays, batch_size):
        outputs = to_host(_layers_of_batch(lm.config, lm.dtype, lm.params, readout, batch))
        parts.append([x[:, : len(rows)] for x in outputs])
        order.extend(rows)
        bar.update(len(rows))
    bar.close()
    place = np.argsort(order)
    in_order = [np.concatenate(part, axis=1)[:, place] for part in zip(*parts, strict=True)]
    fields = [field[:, arrays["where"]] for field in in_order]
    return LayerOutputs(*fields, group=np.nonzero(arrays["where"])[0].astype(np.int32))


def settled_layer(agreement: Float[np.ndarray, " M"], fraction: float = 0.9) -> int:
    """The layer at which the decision settles: min {l : a_m ≥ fraction for all m ≥ l}, a_m the fraction of predictions
    whose most likely token at layer m is that of the last layer."""
    below = np.flatnonzero(np.asarray(agreement) < fraction)
    return int(below[-1]) + 1 if len(below) else 0


class Phase(NamedTuple):
    """The confidence-correction phase: layers `settled` to the last, in which only confidence still changes.

    Attributes:
        peak: p, the first of the layers from `settled` with the largest ECE.
        correction: ECE_p − ECE_L with its paired interval, which does not know that p was chosen.
        p_value: of `correction_test`, which does.
        found: p < L and p_value < 0.05: the last layers calibrate a decision that is already made.
    """

    settled: int
    peak: int
    correction: metrics.PairedDifference
    p_value: float
    found: bool


def correction_phase(
    sums: list[CalibrationSums], agreement: np.ndarray, fraction: float = 0.9, *, seed: int = 0
) -> Phase:
    """Detects the phase of arXiv 2511.00280 (abstract and figure 1): layers after accuracy has settled, in which the
    calibration error rises and falls again. `sums` are of each layer, over the same groups, `[G, bins]`."""
    settled = settled_layer(agreement, fraction)
    last = len(sums) - 1
    errors = [float(metrics.ece_from_sums(metrics.total_sums(layer_sums))) for layer_sums in sums]
    peak = settled + int(np.argmax(errors[settled:]))
    correction = metrics.error_comparison(sums[peak], sums[last], seed=seed)
    p_value = correction_test(sums[settled:], seed=seed)
    return Phase(settled, peak, correction, p_value, bool(peak < last and p_value < 0.05))


def correction_test(sums: list[CalibrationSums], *, resamples: int = 1000, seed: int = 0) -> float:
    """P-value of the null hypothesis that none of the layers before the last has a larger ECE than the last.

    With D_l = ECE_l − ECE_L and its bootstrap standard error σ_l over groups, the statistic is max_l D_l/σ_l, compared
    with max_l (D*_l − D_l)/σ_l of resamples D*, in which all layers are drawn together: the choice of the layer is
    corrected for, and so is their dependence (the maximum of Westfall and Young 1993, and of White 2000). `sums` are
    those of the layers to choose from, then of the last. 1 if there is nothing to choose from, or a single group.
    """
    if len(sums) < 2 or len(sums[0].count) < 2:
        return 1.0
    stacked = CalibrationSums(*(np.stack(parts, axis=1) for parts in zip(*sums, strict=True)))
    drawn = metrics.resample_sums(stacked, resamples=resamples, seed=seed)
    drawn = drawn[:, :-1] - drawn[:, -1:]
    errors = metrics.ece_from_sums(CalibrationSums(*(np.sum(part, axis=0) for part in stacked)))
    drop = np.asarray(errors[:-1] - errors[-1], np.float64)
    spread = np.maximum(drawn.std(axis=0), np.finfo(np.float64).tiny)
    reached = np.max((drawn - drop) / spread, axis=1) >= np.max(drop / spread)
    return float((1 + reached.sum()) / (1 + resamples))


def layers_json(
    outputs: LayerOutputs, *, bins: int = 15, closed: Closed = "right", settled_fraction: float = 0.9, seed: int = 0
) -> dict[str, Any]:
    """The curves as plain data: `{"curves": [row of each layer], "phase": {...}}`.

    A row holds accuracy, confidence, ece, mce, nll, entropy and kl, each as `interval_figures` has it, over sequences,
    and `agreement`, the fraction of predictions equal to the last layer's.
    """
    options: dict[str, Any] = {"groups": outputs.group, "bins": bins, "closed": closed, "seed": seed}
    correct = outputs.correct.astype(np.float32)

    def sums_of(layer: int, log_prob: np.ndarray) -> CalibrationSums:
        return metrics.pooled_sums(outputs.confidence[layer], correct[layer], log_prob=log_prob, **options)

    sums = [sums_of(layer, log_prob) for layer, log_prob in enumerate(outputs.log_prob)]
    agreement = (outputs.argmax == outputs.argmax[-1:]).mean(axis=1)
    rows: list[dict[str, Any]] = []
    for layer, layer_sums in enumerate(sums):
        row = {
            "layer": layer,
            "agreement": float(agreement[layer]),
            **interval_figures(layer_sums, ("accuracy", "confidence", "nll", "ece", "mce"), seed),
        }
        for name, values in (("entropy", outputs.entropy), ("kl", outputs.kl)):
            row[name] = interval_figures(sums_of(layer, -values[layer]), ("nll",), seed)["nll"]
        rows.append(row)
    phase = correction_phase(sums, agreement, settled_fraction, seed=seed)
    phase_json = {**phase._asdict(), "correction": phase.correction._asdict(), "settled_fraction": settled_fraction}
    return {"curves": rows, "phase": phase_json}


def interval_figures(sums: CalibrationSums, names: Sequence[str], seed: int = 0) -> dict[str, dict[str, float]]:
    """Figures of `metrics.summarise`, each as `{"value", "low", "high"}` with its 95% interval over groups."""
    values = metrics.summarise(sums)
    drawn = draws_of(sums, seed)
    figures = {}
    for name in names:
        if name in ("ece", "mce"):
            error = metrics.error_interval(sums, norm="l1" if name == "ece" else "max", seed=seed)
            low, high = error.low, error.high
        else:
            low, high = metrics.percentile_interval(drawn[name])
        figures[name] = {"value": values[name], "low": low, "high": high}
    return figures
