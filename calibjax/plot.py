"""Plots of calibration: matplotlib axes in, axes out, from arrays or from the results of a run.

Results are what `calibjax.evaluate` returned, the contents of a metrics.json, one of its sets, or one row of a set.
`ax` are the axes to draw in, by default pyplot's current ones. Nothing global is changed. Arrays out of range, and
results without the method or the figures that are drawn, raise `UserError`.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from calibjax.runtime.arrays import as_array
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["forest", "layers", "reliability", "risk_coverage", "temperature_histogram"]

INK, MUTED = "#1c2530", "#7a838c"  # text, and fainter
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")  # Okabe and Ito's
MARKS = ("o", "s", "^", "D", "v", "P", "X")  # of lines, so that colour is not the only difference
_BLUE, _ORANGE, _GREEN = LINES[:3]
_COLOURS = {
    **dict.fromkeys(("uncalibrated", "base", "pretrained"), _ORANGE),
    **dict.fromkeys(("ats", "head", "fine_tuned", "edited", "lhts"), _GREEN),
    **dict.fromkeys(("base_temperature", "partition"), LINES[4]),
    "fine_tuned_temperature": LINES[5],
}
_NAMES = {"ece": "ECE", "mce": "MCE", "nll": "NLL", "kl": "KL from the last layer", "log_loss": "log loss"}
Figures = Mapping[str, Any]
"""Figures by name, as metrics.json holds them."""


def reliability(
    confidence: Any,
    correct: Any = None,
    *,
    method: str | None = None,
    bins: int = 15,
    label: str | None = None,
    colour: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Accuracy by confidence: a smooth curve with its 95% band, bins with whiskers, and the density below.

    Points: a bin's accuracy at its mean confidence, overconfident below the diagonal; see `metrics.reliability_curve`.

    Args:
        confidence: `[N]`, in [0, 1]; or results (see the module), which hold the intervals.
        correct: `[N]`, 0 or 1, or fractions of correct samples. None with results.
        method: which of the results' methods, such as "ats"; by default the last that has the figures.
        bins: number of points, equal-width bins closed on the right; results have their own.
        label, colour: of the curve; by default the colour of the method in a report.
    """
    ax = _axes(ax)
    if correct is None:
        name, row = _row(confidence, method, "reliability")
        points, curve = row["reliability"], row.get("curve")
    else:
        name, (points, curve) = method or "", _from_points(confidence, correct, bins)
    colour = colour or _method_colour(name)
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--")
    marks: Any = {"color": colour, "label": label}
    if curve is not None:
        marks = {"color": INK}
        at = np.linspace(0, 1, len(curve["accuracy"]))
        accuracy, low, high, density = (_numbers(curve[key]) for key in ("accuracy", "low", "high", "density"))
        ax.fill_between(at, 0.13 * density / max(density.max(), 1e-30), color=colour, alpha=0.28, linewidth=0)
        ax.fill_between(at, low, high, color=colour, alpha=0.22, linewidth=0)
        ax.plot(at, accuracy, color=colour, linewidth=2, label=label)
    x, y, low, high = (_numbers(points[key]) for key in ("confidence", "accuracy", "low", "high"))
    reach = np.nan_to_num(np.stack([y - low, high - y]).clip(min=0))
    ax.errorbar(x, y, reach, fmt="o", linewidth=1, markersize=3.5, capsize=2, **marks)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    return style_axes(ax)


def temperature_histogram(
    temperatures: Any, fitted: float | None = None, *, method: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Histogram of the temperatures of tokens, on a logarithmic axis, with the one of temperature scaling marked.

    Args:
        temperatures: any shape, 0 where a token does not count; or results, of which `method` is read, or the last.
        fitted: temperature of temperature scaling; by default read from the results, if they have it.
    """
    ax = _axes(ax)
    if isinstance(_set(temperatures), Mapping):
        row = _row(temperatures, method, "temperatures")[1]
        if fitted is None and isinstance(temperatures, Mapping):
            fitted = temperatures.get("run", {}).get("fit", {}).get("temperature")
        edges, count = (np.asarray(row["temperatures"][key]) for key in ("edges", "count"))
    else:
        values = as_array(temperatures).astype(np.float64).ravel()
        values = values[values > 0]
        if not len(values) or np.isinf(values).any():
            raise UserError("temperature_histogram: expected finite temperatures, at least one above 0.")
        count, edges = np.histogram(np.log(values), 40)
        edges = np.exp(edges)
    ax.stairs(count, edges, fill=True, color=_GREEN, alpha=0.8)
    ax.axvline(1.0, color=MUTED, linewidth=1, linestyle="--", label="1: unchanged")
    if fitted is not None:
        ax.axvline(fitted, color=_BLUE, linewidth=2, label=f"temperature scaling: {fitted:.3g}")
    full = np.flatnonzero(count)
    shown = [1.0, fitted or 1.0, edges[full[0]], edges[full[-1] + 1]]
    low, high = min(shown) / 1.15, max(shown) * 1.15
    ax.set(xscale="log", xlim=(low, high), xlabel="temperature of a token", ylabel="tokens")
    grid = (0.1, 0.25, 0.5, 1, 2, 4, 10, 20) if high / low > 6 else (0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4, 6)
    ticks = [t for t in grid if low <= t <= high]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    return legend(style_axes(ax), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def layers(curves: Figures, figures: Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Figures of the prediction read from each layer, with their 95% bands.

    For results, a dotted line marks the layer where the decision settles; a confidence-correction phase is shaded.

    Args:
        curves: the metrics.json of `eval layers`; or figure -> `[L + 1]`, or `[L + 1, 3]`: value, low, high.
        figures: by default all, but of results accuracy and confidence; these also have ece, mce, entropy, kl.
    """
    ax = _axes(ax)
    phase, last = None, 0
    if "schema" in curves and "layers" not in curves:
        raise UserError("layers: expected the metrics.json of eval layers, got that of another command.")
    if "layers" in curves:
        rows, phase = curves["layers"]["curves"], curves["layers"]["phase"]
        figures = figures or ("accuracy", "confidence")
        shown = [name for name in figures if isinstance(rows[0].get(name), Mapping)]
        curves = {name: values_and_ends(row[name] for row in rows) for name in shown}
    for name, colour, mark in zip(figures or curves, itertools.cycle(LINES), itertools.cycle(MARKS), strict=False):
        if name not in curves:
            raise UserError(f"layers: expected some of {', '.join(curves)}, got {name}.")
        values = _numbers(curves[name])
        layer = np.arange(len(values))
        last = max(last, len(values) - 1)
        if values.ndim > 1:
            ax.fill_between(layer, values[:, 1], values[:, 2], color=colour, alpha=0.2, linewidth=0)
            values = values[:, 0]
        ax.plot(layer, values, color=colour, marker=mark, markersize=4, label=_NAMES.get(name, name))
    if phase is not None:
        ax.axvline(phase["settled"], color=MUTED, linewidth=1.5, linestyle=":")
        if phase["found"]:
            ax.axvspan(phase["peak"], last, color=MUTED, alpha=0.2, linewidth=0)
    ax.set(xlabel="layer (0: embeddings)", ylim=(0, None))
    ax.locator_params(axis="x", integer=True)
    return legend(style_axes(ax))


def risk_coverage(
    confidence: Any,
    correct: Any = None,
    *,
    method: str | None = None,
    label: str | None = None,
    colour: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Error rate of the most confident predictions, by their fraction of all predictions.

    For the arguments see `reliability`. For results the curve has a point for each bin.
    """
    ax = _axes(ax)
    if correct is None:
        name, row = _row(confidence, method, "reliability")
        count, accuracy = (_numbers(row["reliability"][key])[::-1] for key in ("count", "accuracy"))
        full = count > 0
        count, right = count[full], (count * accuracy)[full]
    else:
        name = method or ""
        points, right = _points(confidence, correct)
        _, step, count = np.unique(-points, return_inverse=True, return_counts=True)  # equal confidences are one step
        right = np.bincount(step, right)
    covered = np.cumsum(count)
    marker = "." if correct is None else None
    error = 1 - np.cumsum(right) / covered
    ax.plot(covered / count.sum(), error, color=colour or _method_colour(name), marker=marker, label=label)
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="coverage, most confident first", ylabel="error rate")
    return style_axes(ax)


def forest(differences: Figures, figure: str = "ece", *, title: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Differences from a reference, one line each with its 95% interval; filled where the interval excludes 0.

    Args:
        differences: name -> (difference, low, high), drawn from the top; or results with differences from a reference.
        figure: which difference of the results: ece, brier, log_loss or nll.
        title: of the horizontal axis.
    """
    ax = _axes(ax)
    results = _set(differences)
    if "methods" in results:
        rows = {name: row.get("against", {}).get(figure) for name, row in results["methods"].items()}
        differences = {name: (row["difference"], row["low"], row["high"]) for name, row in rows.items() if row}
        title = title or f"Δ {_NAMES.get(figure, figure)} against {results.get('reference', 'temperature')}"
    if not differences:
        raise UserError(f"forest: expected at least one difference, found none of {figure}.")
    lines = np.arange(len(differences))[::-1]
    for line, (value, low, high, *_) in zip(lines, differences.values(), strict=True):
        colour, fill = MUTED, "none"
        if low > 0 or high < 0:
            colour = fill = _GREEN if high < 0 else _ORANGE
        ax.plot([low, high], [line, line], color=colour, linewidth=2)
        ax.plot(value, line, "o", color=colour, markersize=6, markerfacecolor=fill)
    ax.axvline(0, color=MUTED, linewidth=1, linestyle="--")
    ax.set_yticks(lines, [name.replace("_", " ") for name in differences], fontsize="small", parse_math=False)
    ax.set(ylim=(-0.7, len(lines) - 0.3), xlabel=title or "difference")
    ax.locator_params(axis="x", nbins=5)
    return style_axes(ax)


def style_axes(ax: "Axes") -> "Axes":
    """Hides all spines but the left and the bottom one, and colours these as a report expects."""
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    ax.tick_params(color=MUTED, labelcolor=INK)
    for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
        label.set_color(INK)
    return ax


def legend(ax: "Axes", **options: Any) -> "Axes":
    ax.legend(fontsize="small", frameon=False, labelcolor=INK, **options)
    return ax


def values_and_ends(figures: Iterable[Figures]) -> np.ndarray:
    """Value, low and high of N figures, `[N, 3]`."""
    return _numbers([[figure["value"], figure["low"], figure["high"]] for figure in figures])


def _axes(ax: "Axes | None") -> "Axes":
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    return ax


def _set(results: Any) -> Any:
    """The set of results: of an `Evaluation`, of a metrics.json, or itself."""
    results = getattr(results, "document", results)
    return results.get("held_out", results) if isinstance(results, Mapping) else results


def _method_colour(method: str) -> str:
    """The colour of a method in a report; `lhts-T0.9` has the colour of `lhts`."""
    return _COLOURS.get(method.partition("-")[0], _BLUE)


def _row(results: Any, method: str | None, figure: str) -> tuple[str, Figures]:
    results = _set(results)
    if not isinstance(results, Mapping):
        raise UserError("expected confidence and correct, or results (of calibjax.evaluate, or of a metrics.json).")
    rows = results.get("methods", {method or "": results})
    having = [name for name, row in rows.items() if figure in row]
    name = (having or [*rows])[-1] if method is None else method
    if name not in rows:
        raise UserError(f"method: expected one of {', '.join(rows)}, got {name!r}.")
    if figure not in rows[name]:
        raise UserError(f"expected results with {figure}, {name or 'this row'} has none.")
    return name, rows[name]


def _points(confidence: Any, correct: Any) -> tuple[np.ndarray, np.ndarray]:
    confidence, correct = (as_array(x).astype(np.float64).ravel() for x in (confidence, correct))
    both = np.append(confidence, correct)
    fits = len(confidence) == len(correct) > 0
    if not fits or not ((both >= -1e-5) & (both <= 1 + 1e-5)).all():
        got = f"{len(confidence)} and {len(correct)} from {both.min(initial=1):g} to {both.max(initial=0):g}"
        raise UserError(f"confidence, correct: expected as many numbers of each, in [0, 1]; got {got}.")
    return np.clip(confidence, 0, 1), np.clip(correct, 0, 1)  # as metrics, which take 1e-5 for rounding


def _from_points(confidence: Any, correct: Any, bins: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from calibjax import metrics
    from calibjax.metrics.intervals import wilson_interval

    confidence, correct = _points(confidence, correct)
    sums = metrics.total_sums(metrics.calibration_sums(confidence, correct, bins=bins))
    n = np.where(np.asarray(sums.count) > 0, sums.count, np.nan)
    low, high = wilson_interval(sums.correct, n)
    points = {"confidence": sums.confidence / n, "accuracy": sums.correct / n, "low": low, "high": high}
    return points, metrics.reliability_curve(confidence, correct)._asdict()


def _numbers(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float64)  # NaN for None
