"""The figures of a comparison: one row per method, each compared with temperature scaling; as data, and printed."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from calibjax import metrics
from calibjax.eval.compare.contenders import Outcome, Result
from calibjax.eval.report.rows import ABSENT, binning, figure_of, short, signed, significance_mark, title_of
from calibjax.eval.report.schema import ComparedRow, ComparisonSet, Difference
from calibjax.eval.report.terminal import print_verdict
from calibjax.eval.report.verdicts import comparison_verdict
from calibjax.eval.tokens import accuracy_of_bins, curve_json, ece_json, reliability_json
from calibjax.metrics import CalibrationSums, Closed

SortKey = Literal[
    "ece",
    "debiased_ece",
    "adaptive_ece",
    "smooth_ece",
    "mce",
    "brier",
    "log_loss",
    "nll",
    "auroc",
    "parameters",
    "fit_seconds",
]
_WIDTH = 160  # of the wider table; a narrower terminal wraps its lines
COMPARED = ("ece", "brier", "log_loss", "nll")
"""Figures that are compared with those of temperature scaling, on the same resamples."""


def comparison_json(
    results: Mapping[str, Result],
    *,
    reference: str,
    groups: np.ndarray | None = None,
    bins: int = 15,
    closed: Closed = "right",
    resamples: int = 1000,
    seed: int = 0,
    sort: SortKey = "ece",
) -> dict[str, ComparedRow]:
    """The rows of a comparison, best first: the fields of `results_json` and those that a comparison adds.

    `nll` is the negative log-likelihood of the true class, and null for methods that give a confidence alone;
    `log_loss` is that of correctness (`metrics.negative_log_likelihood`), which all methods have: null where it is
    infinite, because `certain_and_wrong` predictions were given 0 or 1 and were not so. Further: debiased_ece
    (`metrics.error_interval`), adaptive_ece, smooth_ece, auroc; `changed`, the number of predictions that the method
    changed; parameters, fit_seconds. `against` holds, for each of `COMPARED`, the difference from `reference`:
    difference, 95% interval, fraction of resamples in which it is lower, p-value (`metrics.Comparison`).

    Args:
        results: name -> result, with "uncalibrated" among them.
        reference: name of temperature scaling.
        groups: labels `[N]`; points of one group are resampled together.
        bins, closed: of the reliability bins.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        sort: figure to order the rows by.
    """
    options: dict[str, Any] = {"resamples": resamples, "seed": seed}
    binning_of_sums: dict[str, Any] = {"groups": groups, "bins": bins, "closed": closed, "seed": seed}
    resampled = {name: _resample(result.outcome, binning_of_sums, options) for name, result in results.items()}
    base = results["uncalibrated"].outcome
    rows = {
        name: _row(result, resampled[name], base, {"bins": bins, "closed": closed}, options)
        for name, result in results.items()
    }
    for name, result in results.items():
        pair = result.outcome.confidence, result.outcome.correct
        rows[name]["curve"] = curve_json(metrics.reliability_curve(*pair, groups=groups, seed=seed))
    if reference in rows:
        for name, row in rows.items():
            row["against"] = {}
            if name != reference:
                row["against"] = _differences((row, rows[reference]), (resampled[name], resampled[reference]), options)
    return dict(sorted(rows.items(), key=lambda item: _order(item[1], sort)))


class _Resampled(NamedTuple):
    """The sums of a method with its log loss, those with its likelihood or None, and its figures on each resample."""

    sums: CalibrationSums
    likelihood: CalibrationSums | None
    draws: dict[str, np.ndarray]


def _resample(outcome: Outcome, binning_of_sums: Mapping[str, Any], options: Mapping[str, Any]) -> _Resampled:
    def sums_of(log_prob: np.ndarray | None) -> CalibrationSums:
        return metrics.pooled_sums(outcome.confidence, outcome.correct, log_prob=log_prob, **binning_of_sums)

    sums = sums_of(None)
    values = metrics.resample_sums(sums, _scores_and_bins, **options)
    draws = {"brier": values[:, 0], "log_loss": values[:, 1], "bins": values[:, 2:]}
    if outcome.log_prob is None:
        return _Resampled(sums, None, draws)
    likelihood = sums_of(outcome.log_prob)
    draws["nll"] = metrics.resample_sums(likelihood, _scores_and_bins, **options)[:, 1]
    return _Resampled(sums, likelihood, draws)


def _row(
    result: Result, resampled: _Resampled, base: Outcome, convention: dict[str, Any], options: Mapping[str, Any]
) -> ComparedRow:
    outcome, (sums, likelihood, draws) = result.outcome, resampled
    row: dict[str, Any] = metrics.summarise(sums)
    log_loss = row.pop("nll")
    pair = jnp.asarray(outcome.confidence), jnp.asarray(outcome.correct)
    unknown = base.choice is None or outcome.choice is None
    row |= {
        "nll": None if likelihood is None else _finite(metrics.summarise(likelihood)["nll"]),
        "log_loss": _finite(log_loss),
        "certain_and_wrong": _certain_and_wrong(outcome),
        **ece_json(metrics.error_interval(sums, **options), **convention),
        "adaptive_ece": _finite(float(metrics.adaptive_calibration_error(*pair, bins=convention["bins"]))),
        "smooth_ece": _finite(float(metrics.smooth_ece(*pair))),
        "auroc": _finite(float(metrics.auroc(*pair))),
        "changed": 0 if unknown else int((base.choice != outcome.choice).sum()),
        "parameters": result.parameters,
        "fit_seconds": round(result.fit_seconds, 4),
        "reliability": reliability_json(metrics.total(sums), draws["bins"]),
    }
    return cast(ComparedRow, row)


def _differences(
    rows: tuple[ComparedRow, ComparedRow], resampled: tuple[_Resampled, _Resampled], options: Mapping[str, Any]
) -> dict[str, Difference]:
    """The figures of the first row compared with the second's; without those that one of both does not have."""
    first, second = resampled
    ece: Any = metrics.error_comparison(first.sums, second.sums, **options)._asdict()
    out: dict[str, Difference] = {"ece": ece}
    for key in COMPARED:
        one, two = (figure_of(row, key) for row in rows)
        if key != "ece" and one is not None and two is not None and key in first.draws and key in second.draws:
            comparison: Any = metrics.compare_resamples(one - two, first.draws[key], second.draws[key])._asdict()
            out[key] = comparison
    return out


def _scores_and_bins(sums: CalibrationSums) -> np.ndarray:
    """Brier score and log loss of each resample, and the accuracy of each bin."""
    points = sums.whole()[0]
    scores = np.stack([sums.brier / points, sums.nll / points], axis=-1)
    return np.concatenate([scores, accuracy_of_bins(sums)], axis=1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _certain_and_wrong(outcome: Outcome) -> int:
    c, y = outcome.confidence, outcome.correct
    return int((((c <= 0) & (y > 0)) | ((c >= 1) & (y < 1))).sum())


def _order(row: Mapping[str, Any], sort: SortKey) -> tuple[bool, float]:
    value = figure_of(row, sort)
    return (True, 0.0) if value is None else (False, -value if sort == "auroc" else value)


# --- printed ---

_SCORES = {
    "ece": "ECE [95% interval]",
    "debiased_ece": "debiased",
    "adaptive_ece": "adaptive",
    "smooth_ece": "smooth",
    "mce": "MCE",
    "brier": "Brier",
    "log_loss": "log loss",
    "nll": "NLL",
    "auroc": "AUROC",
}
assert set(_SCORES) <= set(get_args(SortKey))


def print_comparison(held_out: ComparisonSet, where: str) -> None:
    """Prints the verdict and the two tables of a comparison: the figures, and the differences from the reference.

    Args:
        held_out: of metrics.json.
        where: a few words on the data.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    print_verdict(console, comparison_verdict(held_out))
    console.print(_score_table(held_out, where))
    console.print(_difference_table(held_out))
    console.print(_conventions(held_out), style="dim")
    reasons = held_out["left_out"]
    for reason in dict.fromkeys(reasons.values()):
        console.print(f"left out: {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}.")


def _score_table(held_out: ComparisonSet, where: str) -> Table:
    rows, sort = held_out["methods"], held_out["sort"]
    best = {key: _best(rows, key) for key in _SCORES}
    table = _table(f"{where}: {held_out['tokens']:,} {held_out['unit']}, by {sort}", _SCORES.values())
    for name, row in rows.items():
        cells = [_score(row, key) + _mark(row, key) + ("*" if name in best[key] else " ") for key in _SCORES]
        table.add_row(title_of(name), *cells, style="bold" if name in best.get(sort, ()) else None)
    for name, reason in held_out["failed"].items():
        table.add_row(title_of(name), f"failed: {reason}", style="red")
    return table


def _difference_table(held_out: ComparisonSet) -> Table:
    table = _table(
        f"Δ against {title_of(held_out['reference'])}: difference [95% interval], fraction of resamples in which it is "
        "lower",
        ("ECE", "Brier", "NLL (log loss)", "changed", "parameters", "fit s"),
    )
    for name, row in held_out["methods"].items():
        against = row.get("against", {})
        likelihood = _difference(against.get("nll"))
        if likelihood == ABSENT and "log_loss" in against:
            likelihood = f"({_difference(against['log_loss'])})"
        table.add_row(
            title_of(name),
            *(_difference(against.get(key)) for key in ("ece", "brier")),
            likelihood,
            *(f"{row['changed']:,}", f"{row['parameters']:,}", f"{row['fit_seconds']:.2f}"),
        )
    return table


def _conventions(held_out: ComparisonSet) -> str:
    some = next(iter(held_out["methods"].values()))["ece"]
    return (
        f"* best. + significantly lower (better) than {title_of(held_out['reference'])}, - significantly higher: the "
        "95% interval of the difference excludes 0 (paired, not corrected for the number of methods).\n"
        f"ECE, MCE: {some['bins']} equal-width bins {binning(some['closed'])} of the confidence; adaptive: bins of "
        f"equal mass. Interval: of the population's ECE in these bins, over {held_out['clusters']}; debiased: ECE "
        "corrected for the bias of bins with few points. Brier, log loss: of the prediction being correct. NLL: of the "
        "true class, for methods that give a distribution.\n"
        "changed: predictions that the method changed. fit s: with compilation."
    )


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _best(rows: Mapping[str, Mapping[str, Any]], key: str) -> set[str]:
    values = {name: value for name, row in rows.items() if (value := figure_of(row, key)) is not None}
    if not values:
        return set()
    first = (max if key == "auroc" else min)(values.values())
    return {name for name, value in values.items() if value == first}


def _score(row: Mapping[str, Any], key: str) -> str:
    value = figure_of(row, key)
    if value is None:
        return "inf" if key == "log_loss" else ABSENT
    interval = f" [{short(row['ece']['low'])}, {short(row['ece']['high'])}]" if key == "ece" else ""
    return f"{short(value)}{interval}"


def _mark(row: Mapping[str, Any], key: str) -> str:
    against = row.get("against", {}).get(key)
    return " " if against is None else significance_mark(against)


def _difference(against: Difference | None) -> str:
    return ABSENT if against is None else f"{signed(against)} {against.get('share_lower', math.nan):4.0%}"
