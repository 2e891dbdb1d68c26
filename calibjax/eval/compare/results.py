"""The figures of a comparison: one row a method, each set against the single temperature; as data, and printed."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from calibjax import metrics
from calibjax.eval.compare.contenders import Outcome, Result
from calibjax.eval.report import ABSENT, binning, figure_of, title_of
from calibjax.eval.tokens import accuracy_of_bins, ece_json, reliability_json
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
_WIDTH = 160  # of the wider table: a narrower terminal breaks lines, and loses nothing
COMPARED = ("ece", "brier", "log_loss", "nll")
"""Figures that are set against the single temperature, on the same resamples."""


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
) -> dict[str, dict[str, Any]]:
    """The rows of a comparison, best first: the fields of `results_json` and those that a comparison adds.

    `nll` is the negative log-likelihood of the true class, and null for methods that give a confidence alone;
    `log_loss` is that of being right (`metrics.negative_log_likelihood`), which all have: null where it is infinite,
    because `certain_and_wrong` predictions were given 0 or 1 and were not so. Further: debiased_ece
    (`metrics.error_interval`), adaptive_ece, smooth_ece, auroc; `changed`, how many predictions the method
    changed; parameters, fit_seconds. `against` holds, for each of `COMPARED`, the figure less that of `reference`:
    difference, 95% interval, share of resamples in which it is lower, p-value (`metrics.Comparison`).

    Args:
        results: name -> result, with "uncalibrated" among them.
        reference: name of the single temperature.
        groups: labels `[N]`; points of one are resampled together.
        bins, closed: of the reliability bins.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        sort: figure to order the rows by.
    """

    def sums_of(outcome: Outcome, log_prob: np.ndarray | None) -> CalibrationSums:
        return metrics.pooled_sums(
            outcome.confidence, outcome.correct, log_prob=log_prob, groups=groups, bins=bins, closed=closed, seed=seed
        )

    def resampled(outcome: Outcome) -> tuple[dict[str, np.ndarray], CalibrationSums, CalibrationSums | None]:
        """Each score of each resample; the sums with the log loss, and those with the likelihood."""
        sums = sums_of(outcome, None)
        likelihood = None if outcome.log_prob is None else sums_of(outcome, outcome.log_prob)
        values = metrics.resample_sums(sums, _scores_and_bins, resamples=resamples, seed=seed)
        draws: dict[str, np.ndarray] = {**dict(zip(COMPARED[1:3], values.T, strict=False)), "bins": values[:, 2:]}
        if likelihood is not None:
            values = metrics.resample_sums(likelihood, _scores_and_bins, resamples=resamples, seed=seed)
            draws["nll"] = values[:, 1]
        return draws, sums, likelihood

    base = results["uncalibrated"].outcome
    rows, drawn, sums_of_row = {}, {}, {}
    for name, result in results.items():
        outcome = result.outcome
        drawn[name], sums, likelihood = resampled(outcome)
        sums_of_row[name] = sums
        whole = metrics.total(sums)
        row: dict[str, Any] = metrics.summarise(sums)
        log_loss = row.pop("nll")
        pair = jnp.asarray(outcome.confidence), jnp.asarray(outcome.correct)
        changed = 0 if base.choice is None or outcome.choice is None else int((base.choice != outcome.choice).sum())
        row |= {
            "nll": None if likelihood is None else _finite(metrics.summarise(likelihood)["nll"]),
            "log_loss": _finite(log_loss),
            "certain_and_wrong": _certain_and_wrong(outcome),
            **ece_json(metrics.error_interval(sums, resamples=resamples, seed=seed), bins=bins, closed=closed),
            "adaptive_ece": _finite(float(metrics.adaptive_calibration_error(*pair, bins=bins))),
            "smooth_ece": _finite(float(metrics.smooth_ece(*pair))),
            "auroc": _finite(float(metrics.auroc(*pair))),
            "changed": changed,
            "parameters": result.parameters,
            "fit_seconds": round(result.fit_seconds, 4),
            "reliability": reliability_json(whole, drawn[name]["bins"]),
        }
        rows[name] = row
    if reference in rows:
        for name, row in rows.items():
            if name == reference:
                row["against"] = {}
                continue
            ece = metrics.error_comparison(sums_of_row[name], sums_of_row[reference], resamples=resamples, seed=seed)
            compared = {
                key: _against(row, rows[reference], key, drawn[name][key], drawn[reference][key])
                for key in COMPARED
                if key in drawn[name] and key in drawn[reference]
            }
            row["against"] = {"ece": ece._asdict()} | {
                key: value for key, value in compared.items() if value is not None
            }
    return dict(sorted(rows.items(), key=lambda item: _order(item[1], sort)))


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


def _against(row, other, key: str, first: np.ndarray, second: np.ndarray) -> dict[str, float] | None:
    one, two = figure_of(row, key), figure_of(other, key)
    return None if one is None or two is None else metrics.compare_resamples(one - two, first, second)._asdict()


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


def print_comparison(held_out: Mapping[str, Any], sort: SortKey, where: str) -> None:
    """Prints the two tables of a comparison: the figures, and the differences from the single temperature.

    Args:
        held_out: of metrics.json: methods, reference, failed, left_out, unit, tokens.
        sort: what the rows are ordered by.
        where: a few words on the data.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    rows = held_out["methods"]
    reference = held_out["reference"]
    best = {key: _best(rows, key) for key in _SCORES}

    scores = _table(f"{where}: {held_out['tokens']:,} {held_out['unit']}, by {sort}", _SCORES.values())
    for name, row in rows.items():
        cells = [_score(row, key) + _mark(row, key) + ("*" if name in best[key] else " ") for key in _SCORES]
        scores.add_row(title_of(name), *cells, style="bold" if name in best[sort] else None)
    for name, reason in held_out["failed"].items():
        scores.add_row(title_of(name), f"failed: {reason}", style="red")
    console.print(scores)

    differences = _table(
        f"less {title_of(reference)}: difference [95% interval], share of resamples in which it is lower",
        ("ECE", "Brier", "NLL (log loss)", "changed", "parameters", "fit s"),
    )
    for name, row in rows.items():
        against = row.get("against", {})
        likelihood = _difference(against.get("nll"))
        if likelihood == ABSENT and "log_loss" in against:
            likelihood = f"({_difference(against['log_loss'])})"
        differences.add_row(
            title_of(name),
            *(_difference(against.get(key)) for key in ("ece", "brier")),
            likelihood,
            *(f"{row['changed']:,}", f"{row['parameters']:,}", f"{row['fit_seconds']:.2f}"),
        )
    console.print(differences)
    some = next(iter(rows.values()))["ece"]
    console.print(
        f"* best. + significantly lower (better) than {title_of(reference)}, - significantly higher: the 95% interval "
        "of the difference leaves out 0 (paired, not corrected for the number of methods).\n"
        f"ECE, MCE: {some['bins']} equal-width bins {binning(some['closed'])} of the confidence; adaptive: of equal "
        f"mass. Interval: of the population's ECE in these bins, over {held_out['clusters']}; debiased: the ECE "
        "without the bias of few points a bin. Brier, log loss: of the prediction being right. NLL: of the true class, "
        "for methods that give a distribution.\n"
        "changed: predictions that the method changed. fit s: with compilation.",
        style="dim",
    )
    reasons = held_out["left_out"]
    for reason in dict.fromkeys(reasons.values()):
        console.print(f"left out: {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}.")


def _table(title: str, columns) -> Table:
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
    interval = f" [{_short(row['ece']['low'])}, {_short(row['ece']['high'])}]" if key == "ece" else ""
    return f"{_short(value)}{interval}"


def _short(value: float, form: str = ".4f") -> str:
    """Without the zero before the point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def _mark(row: Mapping[str, Any], key: str) -> str:
    against = row.get("against", {}).get(key)
    if against is None:
        return " "
    return "+" if against["high"] < 0 else "-" if against["low"] > 0 else " "


def _difference(against: Mapping[str, float] | None) -> str:
    if against is None:
        return ABSENT
    difference, low, high = (_short(against[key], "+.4f") for key in ("difference", "low", "high"))
    return f"{difference} [{low}, {high}] {against['share_lower']:4.0%}"
