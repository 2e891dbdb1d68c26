"""Token-level evaluation: the calibration of next-token probabilities, with and without heads; a sample of tokens."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.data import Sequences, eval_batches
from calibjax.data.chat_template import Tokenizer
from calibjax.data.load import Source, as_sequences
from calibjax.data.pipeline import even_batch_size
from calibjax.data.sequences import check_resamples
from calibjax.eval.figures_json import add_differences, curve_json, draws_of, row_json
from calibjax.heads import FittedHead
from calibjax.kernels import top_logits
from calibjax.kernels.api import hold_logits
from calibjax.kernels.platforms import platform
from calibjax.metrics.binless import GROUPS, NODES
from calibjax.models import LanguageModel
from calibjax.models.calibrated import check_base
from calibjax.models.frozen import batch_hidden, batch_log_scale, batch_stats, frozen_arrays, stats_at, vocab_options
from calibjax.models.own import FrozenModel, check_sequences, place_model
from calibjax.runtime.arrays import ceil_div, round_up
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import batch_shards, context_mesh

TEMPERATURE_EDGES = np.geomspace(0.1, 20.0, 61)
"""Edges of the histogram of temperatures. Those of a head lie in [0.1, 20] by default, before a refitted factor."""


class TokenOutputs(NamedTuple):
    """Per token `[S, T]`, float32; zeros at positions that are not scored. `log_prob` is of the target, nats."""

    confidence: np.ndarray
    argmax: np.ndarray
    temperature: np.ndarray
    log_prob: np.ndarray


class MethodResult(NamedTuple):
    """One method on one set of sequences, in float64.

    Attributes:
        sums: one group per sequence.
        temperatures: counts between `TEMPERATURE_EDGES`; values outside count in the end bins.
        grid: `metrics.grid_sums` of every `GROUPS`-th sequence together.
        tokens: None without `keep_tokens`.
    """

    sums: metrics.CalibrationSums
    temperatures: np.ndarray
    grid: np.ndarray
    tokens: TokenOutputs | None


_STATISTICS = ("log_normalizer", "target_logit", "max_logit", "argmax", "correct")
_CPU_BLOCK, _BLOCK = 128, 1024  # tokens of a product with the vocabulary; on a CPU, their logits are held


@jax.jit(static_argnums=(0, 1, 2, 3, 4), static_argnames="scored_only")
def evaluate_batch(model_config, head_configs, dtype, bins, closed, head_arrays, frozen, batch, scored_only=False):
    """For each method: `CalibrationSums`, `TokenOutputs`, bool `[S, T]` of the tokens that count, `metrics.grid_sums`.

    All methods share the frozen forward pass, and the base model's statistics where heads have features of them. The
    arguments before `head_arrays` and `scored_only` are static: a program is compiled for each of their values.

    Args:
        head_configs: a `HeadConfig` for each method; None is the base model.
        dtype: that of the forward pass.
        bins, closed: number and edges of the bins of confidence.
        head_arrays: `FittedHead.arrays` for each method; those of the base model are not read.
        frozen: the model's arrays, from `frozen_arrays`.
        batch: the arrays of S sequences of T tokens, from `eval_batches`.
        scored_only: multiply only the tokens with `where` by the vocabulary, on CPUs once for all methods; not for
            tokens that are divided over devices.
    """
    shared = {name: batch[name] for name in ("targets", "where", "segment_ids")}
    shared["hidden"] = batch_hidden(model_config, frozen, batch, dtype)  # [S, T, D]
    methods = list(zip(head_configs, head_arrays, strict=True))
    needed_statistics = {statistic for config in head_configs if config for statistic in config.statistics}

    def log_scale_of(config, arrays, tokens, base=None):
        return batch_log_scale(model_config, config, arrays, frozen, tokens, dtype=dtype, stats=base)

    # Heads that read other tokens compute their log scales from all tokens, before these are divided into blocks.
    known_log_scales = []
    for config, arrays in methods:
        reads_others = config and (config.attends or config.pooling == "sequence")
        known_log_scales.append(log_scale_of(config, arrays, shared) if reads_others else None)

    def outputs_of_methods(tokens, log_scales):
        """For each method its outputs per token by name; `log_scales` has None for those to be computed here."""
        if scored_only and platform().name == "cpu":
            unembedding = frozen.unembedding.astype(dtype)
            layer = {"bias": frozen.bias, "softcap": model_config.logit_softcap, "where": tokens["where"]}
            stats_of = hold_logits(tokens["hidden"], unembedding, tokens["targets"], **layer)
        else:
            stats_of = functools.partial(stats_at, model_config, frozen, tokens, dtype=dtype)
        zeros = jnp.zeros(tokens["where"].shape, jnp.float32)
        base: Any = None
        if needed_statistics or None in head_configs:
            base = stats_of(zeros, statistics=tuple(sorted({*_STATISTICS, *needed_statistics})))
        results = []
        for (config, arrays), log_scale in zip(methods, log_scales, strict=True):
            if config is None:
                stats, log_scale = base, zeros
            else:
                if log_scale is None:
                    log_scale = log_scale_of(config, arrays, tokens, base)
                if base is None:
                    stats = base = stats_of(log_scale, statistics=_STATISTICS)
                else:  # the other statistics do not depend on the scale
                    scaled = stats_of(log_scale, statistics=("log_normalizer",))
                    stats = base._replace(log_normalizer=scaled.log_normalizer, scale=scaled.scale)
            outputs = {
                "confidence": stats.confidence(),
                "correct": stats.require("correct"),
                "log_prob": stats.log_prob(),
                "argmax": stats.require("argmax"),
                "valid": stats.valid,
                "log_scale": log_scale,
            }
            results.append(outputs)
        return results

    compute = functools.partial(_in_blocks, outputs_of_methods) if scored_only else outputs_of_methods
    results = []
    for outputs in compute(shared, known_log_scales):
        confidence, correct, valid = outputs["confidence"], outputs["correct"], outputs["valid"]
        binning = {"bins": bins, "closed": closed, "where": valid}
        sums = metrics.calibration_sums(confidence, correct, log_prob=outputs["log_prob"], **binning)
        temperature: Any = jnp.exp(-outputs["log_scale"])
        tokens = TokenOutputs(confidence, outputs["argmax"], temperature, outputs["log_prob"])
        results.append((sums, tokens, valid, metrics.grid_sums(confidence, correct, where=valid)))
    return results


def _in_blocks(function, tokens, log_scales):
    """`function(tokens, log_scales)` at the tokens with `where`, block by block; its outputs `[S, T]` are else 0."""
    where = tokens["where"]  # [S, T]
    width = _CPU_BLOCK if platform().name == "cpu" else _BLOCK
    (indices,) = jnp.nonzero(where.reshape(-1), size=round_up(where.size, width), fill_value=where.size)
    flat = jax.tree.map(lambda x: x.reshape(where.size, *x.shape[2:]), (tokens, log_scales))  # [S · T, ...]

    def outputs_at(index):
        """The outputs [1, width] of the tokens `index`; those beyond the last token are 0."""
        block = jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0)[None], flat)
        return function(*block)

    def step(number, results):
        index = jax.lax.dynamic_slice_in_dim(indices, number * width, width)
        return jax.tree.map(lambda x, new: x.at[index].set(new[0], mode="drop"), results, outputs_at(index))

    shapes = jax.eval_shape(outputs_at, indices[:width])
    results = jax.tree.map(lambda x: jnp.zeros(where.size, x.dtype), shapes)
    results = jax.lax.fori_loop(0, ceil_div(jnp.sum(where), width), step, results)
    return jax.tree.map(lambda x: x.reshape(where.shape), results)


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
    """Evaluates several heads on the tokens of the sequences; the frozen model runs once, on the current mesh.

    `FittedHead.constant(lm)` stands for the uncalibrated model; `keep_tokens` keeps per-token outputs.
    """
    context = context or RunContext()
    names = list(heads)
    configs = tuple(None if head.is_identity else head.config for head in heads.values())
    head_arrays = [head.arrays for head in heads.values()]
    frozen = frozen_arrays(lm, *(config for config in configs if config))
    mesh = context_mesh()
    scored_only = lm.unembedding is not None and (mesh is None or mesh.size == 1)
    parts: dict[str, list[tuple[metrics.CalibrationSums, TokenOutputs | None]]] = {name: [] for name in names}
    histograms = {name: np.zeros(len(TEMPERATURE_EDGES) - 1, np.int64) for name in names}
    bar = context.bar(title=context.title or "evaluation", unit="sequence", total=len(sequences.tokens))
    groups = min(len(sequences.tokens), GROUPS)
    grids = {name: np.zeros((groups, NODES + 1, 2)) for name in names}
    first = 0
    batch_size = even_batch_size(len(sequences.tokens), batch_size)
    static = (lm.config, configs, lm.dtype, bins, closed)
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        outputs_of_batch = to_host(evaluate_batch(*static, head_arrays, frozen, batch, scored_only=scored_only))
        for name, (sums, tokens, valid, grid) in zip(names, outputs_of_batch, strict=True):
            sums = metrics.CalibrationSums(*(np.asarray(x[:real], np.float64) for x in sums))
            inside = np.clip(tokens.temperature[valid], TEMPERATURE_EDGES[0], TEMPERATURE_EDGES[-1])
            histograms[name] += np.histogram(inside, TEMPERATURE_EDGES)[0]
            group = (first + np.arange(real)) % groups
            np.add.at(grids[name], group, np.asarray(grid[:real], np.float64))
            tokens = tokens._replace(temperature=np.where(valid, tokens.temperature, 0))
            real_tokens = TokenOutputs(*(x[:real] for x in tokens)) if keep_tokens else None
            parts[name].append((sums, real_tokens))
        first += real
        bar.update(real)
    bar.close()
    results = {}
    for name in names:
        sums, tokens = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts[name])
        if np.isnan(sums.nll).any():
            raise UserError(f"{name}: the likelihood of some tokens is NaN; check the logits for NaN and infinity.")
        results[name] = MethodResult(sums, histograms[name], grids[name], tokens)
    return results


def results_json(
    results: Mapping[str, MethodResult], *, closed: metrics.Closed = "right", seed: int = 0
) -> dict[str, Any]:
    """The figures of a set as plain data: `{"tokens": n, "methods": {name: {...}}}`.

    Each method: nll, brier, accuracy, confidence, bias, mce, rmsce; `ece` with its 95% interval over sequences, bins
    and edge convention, and `debiased_ece`; `reliability` per bin (null where empty); `curve`
    (`metrics.reliability_curve`); and `temperatures`, the histogram over `TEMPERATURE_EDGES`. `against` holds the
    paired differences of nll, brier and ece from temperature scaling, `against_uncalibrated` from the first method.
    """
    methods: dict[str, dict[str, Any]] = {}
    draws = {name: draws_of(result.sums, seed) for name, result in results.items()}
    for name, result in results.items():
        row = row_json(result.sums, draws[name], closed=closed, seed=seed)
        row["temperatures"] = {"edges": TEMPERATURE_EDGES.round(6).tolist(), "count": result.temperatures.tolist()}
        row["curve"] = curve_json(metrics.curve_from_sums(result.grid, seed=seed))
        methods[name] = row
    sums, first = {name: result.sums for name, result in results.items()}, next(iter(results))
    for field, other in (("against", "temperature"), ("against_uncalibrated", first)):
        if other in results:
            add_differences(methods, sums, draws, field=field, other=other, names=("nll", "brier"), seed=seed)
    return {"tokens": int(metrics.total_sums(sums[first]).points), "methods": methods}


class Evaluation(NamedTuple):
    """What `evaluate` returns; prints as a table.

    Attributes:
        tokens: number of tokens that count.
        results: method -> "ece", "nll" (nats per token) and "brier" (of the most likely token) with 95% intervals.
        document: JSON-able: every figure, as `held_out` of metrics.json.
    """

    tokens: int
    results: dict[str, dict[str, metrics.Interval]]
    document: Mapping[str, Any]

    def __repr__(self) -> str:
        title, names = f"{self.tokens:,} tokens", {"ece": "ECE", "nll": "NLL", "brier": "Brier"}
        width = max(map(len, (title, *self.results)))
        lines = [title.ljust(width) + "".join(f"  {label:<24}" for label in names.values())]
        for method, result in self.results.items():
            intervals = [result[name] for name in names]
            cells = [f"{x.value:.4f} [{x.low:.4f}, {x.high:.4f}]" for x in intervals]
            lines.append(method.ljust(width) + "".join(f"  {cell:<24}" for cell in cells))
        return "\n".join(line.rstrip() for line in lines)


def evaluate(
    lm: FrozenModel,
    data: Sequences | Source,
    heads: FittedHead | Mapping[str, FittedHead] | None = None,
    *,
    batch_size: int = 16,
    bins: int = 15,
    closed: metrics.Closed = "right",
    context: RunContext | None = None,
) -> Evaluation:
    """Calibration of a model on held-out text, uncalibrated and with heads; the model runs once for all of them.

    Args:
        lm: the frozen model: a `LanguageModel`, or one of your own by `from_function` or `from_arrays`.
        data: sequences that no head was fitted on; or what `load_text` takes, with its defaults.
        heads: name -> head, fitted on `lm`; one head is called "head". None: the uncalibrated model alone. The
            document has each method's differences from the head called "temperature", if there is one.
        batch_size: most sequences at a time, rounded up to a multiple of the mesh axes data and fsdp.
        bins: number of equal-width bins of ECE.
        closed: the bin of a confidence on an edge; see `calibjax.metrics`.
        context: seed of the intervals, devices and progress.

    Returns:
        `Evaluation`, with "uncalibrated" first. Intervals treat sequences as the independent units.

    Raises:
        UserError: a head of another model, or called "uncalibrated"; data that cannot be read or do not fit the model.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> evaluation = calibjax.evaluate(lm, texts, context=calibjax.RunContext().silent())
        >>> evaluation.tokens, sorted(evaluation.results["uncalibrated"])
        (760, ['brier', 'ece', 'nll'])
    """
    context = context or RunContext()
    named = dict(heads or {}) if isinstance(heads, Mapping | None) else {"head": heads}
    if "uncalibrated" in named:
        raise UserError("heads: uncalibrated is the name of the base model; give the head another.")
    data = as_sequences(data, lm)
    check_resamples(data, "data")
    check_sequences(lm, data)
    lm = place_model(lm, context.mesh)
    for head in named.values():
        check_base(lm, head)
    named = {"uncalibrated": FittedHead.constant(lm), **named}
    batch_size = round_up(batch_size, batch_shards(context.mesh))
    with jax.set_mesh(context.mesh):
        results = evaluate_tokens(lm, data, named, batch_size=batch_size, bins=bins, closed=closed, context=context)
    document = results_json(results, closed=closed, seed=context.seed)
    intervals = {}
    for name, row in document["methods"].items():
        ece = row["ece"]
        intervals[name] = {"ece": metrics.Interval(ece["value"], ece["low"], ece["high"])}
        intervals[name] |= {key: metrics.Interval(row[key], **row["intervals"][key]) for key in ("nll", "brier")}
    return Evaluation(document["tokens"], intervals, document)


_SAMPLES, _SAMPLE_TOKENS, _ALTERNATIVES = 5, 400, 5  # of the heat map of a report


@jax.jit(static_argnums=(0, 1, 2, 3))
def _sample_batch(model_config, head_config, dtype, count, head_arrays, frozen, batch):
    """Figures of each token under one head, `[S, T]`; of its K = `count` most likely alternatives, `[S, T, K]`."""
    hidden = batch_hidden(model_config, frozen, batch, dtype)
    shared = {**batch, "hidden": hidden}
    statistics = ("log_normalizer", "target_logit", "max_logit", "argmax", "expected_logit")
    options = {"dtype": dtype, "statistics": statistics}
    stats, log_scale = batch_stats(model_config, head_config, head_arrays, frozen, shared, **options)
    top = top_logits(hidden, frozen.unembedding, count, **vocab_options(model_config, frozen))
    log_prob = stats.scale[..., None] * top.logits - stats.require("log_normalizer")[..., None]
    return {
        "argmax": stats.require("argmax"),
        "confidence": stats.confidence(),
        "probability": jnp.exp(stats.log_prob()),
        "entropy": stats.entropy(),
        "temperature": jnp.exp(-log_scale),
        "top_ids": top.ids,
        "top_probability": jnp.exp(log_prob),
    }


def token_sample(
    lm: LanguageModel, sequences: Sequences, before: FittedHead, after: FittedHead, *, batch_size: int = 8
) -> dict[str, Any]:
    """Some sequences, token by token, under two heads, each cut between two words.

    Five sequences, spread evenly over those with enough scored targets, with at most 400 scored tokens in all.

    Returns:
        `{"sequences": [[token, ...], ...]}`. A token has `text`, `scored` (False for a prompt), `start` where it is the
        first of an example, of which a packed sequence has several, and, if scored, `right`;
        `confidence`, `probability` (of this token) and `entropy` (nats), each `[before, after]`; `temperature`
        (after); and `top`, rows of `[text, before, after]` of the five most likely tokens.
    """
    scored = sequences.where.sum(axis=1)
    each = ceil_div(_SAMPLE_TOKENS, _SAMPLES)
    long = np.flatnonzero(scored >= min(each, scored.max()))
    chosen = np.unique(long[np.linspace(0, len(long) - 1, _SAMPLES).round().astype(int)])
    sequences = sequences.take(chosen)
    count = min(_ALTERNATIVES, lm.config.vocab_size)
    outputs = []
    for head in (before, after):
        frozen, parts = frozen_arrays(lm, head.config), []
        for batch, real in eval_batches(sequences.arrays(), batch_size):
            out = to_host(_sample_batch(lm.config, head.config, lm.dtype, count, head.arrays, frozen, batch))
            parts.append(jax.tree.map(lambda x, n=real: x[:n], out))
        outputs.append(jax.tree.map(lambda *x: np.concatenate(x), *parts))
    most = _SAMPLE_TOKENS // len(sequences.tokens)
    rows = []
    for s in range(len(sequences.tokens)):
        real = np.flatnonzero(sequences.segment_ids[s] > 0)
        is_before_last = np.cumsum(sequences.where[s, real]) - sequences.where[s, real] < most
        row = []
        for t in real[is_before_last]:
            row += _sampled_token(lm.tokenizer, sequences, outputs, (s, t))
        rows.append(_whole_words(row))
    return {"sequences": rows}


def _sampled_token(tokenizer, sequences: Sequences, outputs, place: tuple[int, int]) -> list[dict[str, Any]]:
    """The token that is predicted at one place of the sequences, after the first of an example with that token."""
    previous, target = int(sequences.tokens[place]), int(sequences.targets[place])
    token: dict[str, Any] = {"text": text_after(tokenizer, previous, target), "scored": bool(sequences.where[place])}
    if token["scored"]:
        before, after = ({name: x[place] for name, x in figures.items()} for figures in outputs)
        for name in ("confidence", "probability", "entropy"):
            token[name] = [_rounded(before[name]), _rounded(after[name])]
        token["right"] = bool(before["argmax"] == target)
        token["temperature"] = _rounded(after["temperature"])
        texts = [text_after(tokenizer, previous, int(number)) for number in before["top_ids"]]
        pairs = [map(_rounded, figures["top_probability"]) for figures in (before, after)]
        token["top"] = [list(row) for row in zip(texts, *pairs, strict=True)]
    if sequences.positions[place] != 0:
        return [token]
    first = str(tokenizer.decode([previous], skip_special_tokens=True))
    return [{"text": first, "scored": False, "start": True}, token]


def _whole_words(row: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cuts a text to whole words, at its start only where no prompt is there; unchanged if no token begins a word."""
    starts = [place for place, token in enumerate(row) if token["text"][:1].isspace()]
    if not starts:
        return row
    starts_sentence = row[0]["text"][:1].isupper()
    follows_prompt = len(row) > 1 and not row[1]["scored"]
    first = 0 if starts_sentence or follows_prompt else starts[0]
    whole = row[first : starts[-1]]
    return whole if any(token["scored"] for token in whole) else row


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def text_after(tokenizer: Tokenizer, previous: int, *tokens: int, skip_special: bool = False) -> str:
    """The text that tokens add: they are decoded after the previous token, since spaces depend on the tokenizer."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    start, both = str(decode([previous])), str(decode([previous, *tokens]))
    return both[len(start) :] if both.startswith(start) else str(decode([*tokens]))
