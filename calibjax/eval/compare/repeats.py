"""Heads that were fitted with several seeds: means over the seeds, intervals, paired differences."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from calibjax import metrics
from calibjax.data import Sequences
from calibjax.eval.report.schema import StudyRow, StudySet
from calibjax.eval.report.studies import COMPARED
from calibjax.eval.tokens import MethodResult, evaluate_tokens
from calibjax.heads import FittedHead
from calibjax.metrics import CalibrationSums
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext

FIGURES = (*COMPARED, "accuracy", "confidence", "confidence_right", "confidence_wrong")
"""Figures of every row. The last two are the mean confidence of correct and of wrong predictions: a head that
tells them apart changes them in opposite directions, temperature scaling in the same one."""


def evaluate_repeats(
    lm: LanguageModel,
    sequences: Sequences,
    heads: Mapping[str, Sequence[FittedHead]],
    *,
    against: Mapping[str, str],
    batch_size: int = 16,
    bins: int = 15,
    closed: metrics.Closed = "right",
    context: RunContext | None = None,
) -> StudySet:
    """Evaluates heads, each fitted with several seeds, on sequences; arguments of `evaluate_tokens` and `repeats_json`.

    `heads`: name -> the head of each seed.
    """
    flat = {f"{name} {index}": head for name, repeats in heads.items() for index, head in enumerate(repeats)}
    outputs = evaluate_tokens(
        lm,
        sequences,
        flat,
        batch_size=batch_size,
        bins=bins,
        closed=closed,
        keep_tokens=True,
        context=context,
    )
    results = {name: [outputs[f"{name} {index}"] for index in range(len(repeats))] for name, repeats in heads.items()}
    return repeats_json(results, sequences, against=against, bins=bins, closed=closed)


def repeats_json(
    results: Mapping[str, Sequence[MethodResult]],
    sequences: Sequences,
    *,
    against: Mapping[str, str],
    bins: int = 15,
    closed: metrics.Closed = "right",
    resamples: int = 1000,
    seed: int = 0,
) -> StudySet:
    """The figures of a set of sequences as plain data: `{"tokens": n, "windows": s, "methods": {name: row}}`.

    A row holds for each of `FIGURES` `value`, the mean over the seeds; `low` and `high`, a 95% interval of that mean
    over resamples of the sequences, with the heads fixed (of ece `metrics.error_interval`, with its
    `debiased`); and `seeds`, the figure of each seed. `against` holds the name of another row and, for nll, brier and
    ece, the difference of this row's figure from that row's on the same sequences.

    Args:
        results: of `evaluate_tokens` with `keep_tokens`: name -> one result per seed.
        sequences: of the evaluation.
        against: name -> name of the row that it is compared with.
        bins, closed: of the expected calibration error.
        resamples, seed: of the bootstrap over sequences.
    """
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    flat = [result for repeats in results.values() for result in repeats]
    of_head, drawn_of_head = _head_figures(flat, sequences, {"bins": bins, "closed": closed}, options)
    ends = np.cumsum([len(repeats) for repeats in results.values()])[:-1]
    values = dict(zip(results, np.split(of_head, ends), strict=True))
    parts = np.split(drawn_of_head, ends, axis=1)
    draws = {name: part.mean(axis=1) for name, part in zip(results, parts, strict=True)}
    sums = {name: _side_by_side([result.sums for result in repeats]) for name, repeats in results.items()}
    rows: dict[str, StudyRow] = {}
    for name in results:
        mean = values[name].mean(axis=0)
        row: dict[str, Any] = {}
        for index, figure in enumerate(FIGURES):
            low, high = metrics.percentile_interval(draws[name][:, index])
            seeds = [float(value) for value in values[name][:, index]]
            row[figure] = {"value": float(mean[index]), "low": low, "high": high, "seeds": seeds}
        ece = metrics.error_interval(sums[name], **options)
        row["ece"] |= {"low": ece.low, "high": ece.high, "debiased": ece.debiased}
        if name in against:
            other = against[name]
            difference = mean - values[other].mean(axis=0)
            row["against"] = {"name": other} | {
                figure: metrics.compare_resamples(
                    float(difference[index]), draws[name][:, index], draws[other][:, index]
                )._asdict()
                for index, figure in enumerate(COMPARED)
                if figure != "ece"
            }
            row["against"]["ece"] = metrics.error_comparison(sums[name], sums[other], **options)._asdict()
        rows[name] = cast(StudyRow, row)
    return {"tokens": int(sequences.where.sum()), "windows": len(sequences.tokens), "methods": rows}


def _head_figures(
    results: Sequence[MethodResult], sequences: Sequences, convention: dict[str, Any], options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """`FIGURES` of each of H heads on all sequences `[H, figures]`, and on each resample `[resamples, H, figures]`."""
    tokens = [result.tokens for result in results if result.tokens is not None]
    assert len(tokens) == len(results), "evaluate with keep_tokens"
    right = sequences.where & (tokens[0].argmax == sequences.targets)  # no head changes the most likely token

    def of_part(where: np.ndarray) -> CalibrationSums:
        sums = [
            metrics.calibration_sums(jnp.asarray(of_head.confidence), right, **convention, where=jnp.asarray(where))
            for of_head in tokens
        ]
        return _side_by_side(sums)

    parts = [
        (_side_by_side([result.sums for result in results]), _means),
        (of_part(right), _mean_confidence),
        (of_part(sequences.where & ~right), _mean_confidence),
    ]
    whole = [statistic(CalibrationSums(*(x.sum(axis=0) for x in sums))) for sums, statistic in parts]
    drawn = [metrics.resample_sums(*part, **options) for part in parts]
    return np.concatenate(whole, axis=-1), np.concatenate(drawn, axis=-1)


def _side_by_side(sums: Sequence[CalibrationSums]) -> CalibrationSums:
    """Stacks sums of heads, each `[sequences, ...]`, to `[sequences, heads, ...]`, for one common resampling."""
    return CalibrationSums(
        *(np.stack([np.asarray(x, np.float64) for x in field], axis=1) for field in zip(*sums, strict=True))
    )


def _means(sums: CalibrationSums) -> np.ndarray:
    """`FIGURES` but the last two, `[..., 5]`."""
    count, confidence, correct, _ = sums.whole()
    ece = metrics.ece_from_sums(sums)
    return np.stack([sums.nll / count, sums.brier / count, ece, correct / count, confidence / count], axis=-1)


def _mean_confidence(sums: CalibrationSums) -> np.ndarray:
    """`[..., 1]`; NaN if there is no token."""
    count, confidence, _, _ = sums.whole()
    with np.errstate(invalid="ignore", divide="ignore"):
        return (confidence / count)[..., None]
