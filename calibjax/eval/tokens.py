"""Token-level evaluation: the calibration of next-token probabilities, with and without heads."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.data import Sequences, eval_batches
from calibjax.eval.figures_json import curve_json, differences_json, row_json
from calibjax.heads import FittedHead, HeadConfig
from calibjax.metrics.smooth import GROUPS, NODES
from calibjax.models.frozen import batch_hidden, batch_log_scale, freeze, stats_at
from calibjax.models.own import FrozenModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import context_mesh

TEMPERATURE_EDGES = np.geomspace(0.1, 20.0, 61)
"""Edges of the histogram of temperatures. A head's temperatures lie in [1/10, 20], times the refitted factor."""


class TokenOutputs(NamedTuple):
    """Per token `[S, T]`: confidence, argmax (int32), temperature, and log-probability of the target, nats.

    float32; zeros at positions that are not scored (argmax: -1).
    """

    confidence: np.ndarray
    argmax: np.ndarray
    temperature: np.ndarray
    log_prob: np.ndarray


class MethodResult(NamedTuple):
    """One method on one set of sequences.

    Attributes:
        sums: one group per sequence, float64.
        temperatures: int64 counts between `TEMPERATURE_EDGES`; values outside count in the end bins.
        grid: `metrics.grid_sums` of every `GROUPS`-th sequence together, float64.
        tokens: per-token outputs, if `keep_tokens`.
    """

    sums: metrics.CalibrationSums
    temperatures: np.ndarray
    grid: np.ndarray
    tokens: TokenOutputs | None


def identity_head(lm: FrozenModel) -> FittedHead:
    """The head of the base model: temperature 1 for every token."""
    config = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
    return FittedHead(config, {"log_scale": np.zeros((), np.float32)}, 0.0, lm.fingerprint)


_STATISTICS = ("log_normalizer", "target_logit", "max_logit", "argmax", "correct")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), static_argnames="count")
def evaluate_batch(model, configs, dtype, bins, closed, params, factors, frozen, batch, count=None):
    """Sums and outputs of every method on one batch; the frozen forward pass is shared.

    A configuration of None is the base model; its statistics are what the heads' features read, too. `count`: see
    `stats_at`.
    """
    hidden = batch_hidden(model, frozen, batch, dtype)
    shared = {**{name: batch[name] for name in ("targets", "where", "segment_ids")}, "hidden": hidden}
    zeros = jnp.zeros(batch["targets"].shape, jnp.float32)
    read = {statistic for config in configs if config for statistic in config.statistics}
    base = None
    if read or None in configs:
        names = tuple(sorted({*_STATISTICS, *read}))
        base = stats_at(model, frozen, shared, zeros, dtype=dtype, statistics=names, count=count)
    results = []
    for config, head_params, factor in zip(configs, params, factors, strict=True):
        if config is None:
            assert base is not None
            stats, log_scale = base, zeros
        else:
            at_hand = None if config.attends else base  # one that attends reads the features of all tokens
            log_scale = batch_log_scale(model, config, head_params, frozen, shared, dtype, factor, at_hand)
            stats = stats_at(model, frozen, shared, log_scale, dtype=dtype, statistics=_STATISTICS, count=count)
        sums = metrics.calibration_sums(
            stats.confidence(),
            stats.require("correct"),
            log_prob=stats.log_prob(),
            bins=bins,
            closed=closed,
            where=stats.valid,
        )
        tokens = (stats.confidence(), stats.require("argmax"), jnp.exp(-log_scale), stats.log_prob())
        grid = metrics.grid_sums(stats.confidence(), stats.require("correct"), stats.valid)
        results.append((sums, tokens, stats.valid, grid))
    return results


def _is_identity(head: FittedHead) -> bool:
    return head.config.kind == "constant" and not head.log_factor and float(head.params["log_scale"]) == 0.0


_BLOCK = 256  # tokens: batches and sets with nearly as many tokens share a program


def _largest_count(sequences: Sequences, batch_size: int) -> int | None:
    """The most tokens of a batch that count, as a multiple of `_BLOCK`; None on several devices, which hold rows."""
    mesh = context_mesh()
    if mesh is not None and mesh.size > 1:
        return None
    of_sequence = sequences.where.sum(axis=1)
    largest = max(int(of_sequence[i : i + batch_size].sum()) for i in range(0, len(of_sequence), batch_size))
    return -(-max(largest, 1) // _BLOCK) * _BLOCK


def evaluate_tokens(
    lm: FrozenModel,
    sequences: Sequences,
    heads: Mapping[str, FittedHead],
    *,
    batch_size: int = 16,
    bins: int = 15,
    closed: metrics.Closed = "right",
    keep_tokens: bool = False,
    context: RunContext | None = None,
) -> dict[str, MethodResult]:
    """Evaluates several heads on the tokens of the sequences; the frozen model runs once for all of them.

    Runs on the current mesh (`jax.set_mesh`), if any, on which the model was loaded.

    Args:
        lm: the frozen model.
        sequences: S sequences of T positions; only targets with `where` True are scored.
        heads: name -> head; see `identity_head` for the uncalibrated model.
        batch_size: sequences per step.
        bins, closed: of the reliability bins; see `calibjax.metrics`.
        keep_tokens: keep per-token outputs.
        context: progress and its title.

    Returns:
        name -> `MethodResult`.
    """
    context = context or RunContext()
    names = list(heads)
    configs = tuple(None if _is_identity(heads[name]) else heads[name].config for name in names)
    params = [heads[name].params for name in names]
    factors = [jnp.float32(heads[name].log_factor) for name in names]
    frozen = freeze(lm, *(config for config in configs if config))
    count = _largest_count(sequences, batch_size)
    sums_of: dict[str, list[Any]] = {name: [] for name in names}
    outputs: dict[str, list[Any]] = {name: [] for name in names}
    histograms = {name: np.zeros(len(TEMPERATURE_EDGES) - 1, np.int64) for name in names}
    bar = context.bar(title=context.title or "evaluation", unit="sequence", total=len(sequences.tokens))
    groups = min(len(sequences.tokens), GROUPS)
    grids = {name: np.zeros((groups, NODES + 1, 2)) for name in names}
    first = 0
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        evaluated = evaluate_batch(
            lm.config, configs, lm.dtype, bins, closed, params, factors, frozen, batch, count=count
        )
        results = to_host(evaluated)
        for name, (sums, of_tokens, valid, grid) in zip(names, results, strict=True):
            tokens = TokenOutputs(*of_tokens)
            sums_of[name].append(metrics.CalibrationSums(*(np.asarray(x[:real], np.float64) for x in sums)))
            inside = np.clip(tokens.temperature[valid], TEMPERATURE_EDGES[0], TEMPERATURE_EDGES[-1])
            histograms[name] += np.histogram(inside, TEMPERATURE_EDGES)[0]
            np.add.at(grids[name], (first + np.arange(real)) % groups, np.asarray(grid[:real], np.float64))
            if keep_tokens:
                tokens = tokens._replace(temperature=np.where(valid, tokens.temperature, 0))
                outputs[name].append([x[:real] for x in tokens])
        first += real
        bar.update(real)
    bar.close()
    return {
        name: MethodResult(
            sums=jax.tree.map(lambda *parts: np.concatenate(parts), *sums_of[name]),
            temperatures=histograms[name],
            grid=grids[name],
            tokens=TokenOutputs(*(np.concatenate(part) for part in zip(*outputs[name], strict=True)))
            if keep_tokens
            else None,
        )
        for name in names
    }


def results_json(
    results: Mapping[str, MethodResult], *, closed: metrics.Closed = "right", resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """The figures of a set as plain data: `{"tokens": n, "methods": {name: {...}}}`.

    Each method: nll, brier, accuracy, confidence, bias, mce, rmsce; `ece` with its value, 95% interval, bins and edge
    convention, and `debiased_ece` (`metrics.error_interval`, sequences as groups); `reliability` per bin (count, mean
    confidence, accuracy with the low and high end of its bootstrap interval; null where empty); `curve`
    (`metrics.reliability_curve`); and `temperatures`, the histogram over `TEMPERATURE_EDGES`. `against` holds the
    paired differences of nll, brier and ece from temperature scaling, `against_uncalibrated` from the first method.
    """
    methods: dict[str, dict[str, Any]] = {}
    tokens = 0
    for name, result in results.items():
        row = row_json(result.sums, closed=closed, resamples=resamples, seed=seed)
        row["temperatures"] = {
            "edges": [round(float(e), 6) for e in TEMPERATURE_EDGES],
            "count": [int(n) for n in result.temperatures],
        }
        row["curve"] = curve_json(metrics.curve_from_sums(result.grid, seed=seed))
        methods[name] = row
        for field, other in (("against", "temperature"), ("against_uncalibrated", next(iter(results)))):
            if other in results and name != other:
                row[field] = differences_json(result.sums, results[other].sums, resamples=resamples, seed=seed)
        tokens = int(metrics.total(result.sums).whole()[0])
    return {"tokens": tokens, "methods": methods}
