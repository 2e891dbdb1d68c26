"""The figures of a report, each of one or several panels: side by side in a PNG, stacked on a narrow page."""

import functools
import io
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from calibjax import plot
from calibjax.eval.report.command_tables import subjects_name
from calibjax.eval.report.notes import final_candidate, fit_of
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import Row, interval, sets_of, title_of, unit_of
from calibjax.plot import INK, LINES, MARKS, MUTED, legend, style_axes, values_and_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 6  # panels of one set


class Panel(NamedTuple):
    """Axes of a size in inches and `draw(ax=...)`, which draws in them; `note` is a second line of the title."""

    title: str
    note: str
    draw: Callable[..., Any]
    width: float = 3.5
    height: float = 3.1

    def figure(self) -> "Figure":
        """The panel alone, without its title."""
        figure = _figure(self.width, self.height)
        self.draw(ax=figure.subplots())
        return figure


class Drawing(NamedTuple):
    """A figure: the name of its file, a description for screen readers, and its panels."""

    name: str
    description: str
    panels: Sequence[Panel]

    def figure(self) -> "Figure":
        """All panels side by side, with their titles."""
        widths = [panel.width for panel in self.panels]
        figure = _figure(sum(widths), max(panel.height for panel in self.panels) + 0.6)
        axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        for ax, panel in zip(axes, self.panels, strict=True):
            panel.draw(ax=ax)
            title = f"{panel.title}\n{panel.note}".strip()
            ax.set_title(title, color=INK, fontsize=10, parse_math=False)
        return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _style(number: int, label: str) -> dict[str, Any]:
    """Colour, marker and label of a line, the pair its own up to 49; a dollar sign would begin a formula."""
    rounds, place = divmod(number, len(LINES))
    colour, mark = LINES[place], MARKS[(place + rounds) % len(MARKS)]
    return {"color": colour, "marker": mark, "markersize": 4, "label": label.replace("$", r"\$")}


def png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, facecolor="white")
    return buffer.getvalue()


def figures_of(document: Document) -> Iterator[Drawing]:
    for index, (title, results) in enumerate(sets_of(document)):
        suffix = f"-{index}" if index else ""
        yield Drawing(f"reliability{suffix}", f"Reliability diagrams, {title}", reliability_panels(results))
        if "temperatures" in results["methods"].get("ats", {}):
            fitted = fit_of(document).get("temperature")
            histogram = functools.partial(plot.temperature_histogram, results, fitted, method="ats")
            panel = Panel("Temperatures that ATS assigned", "", histogram, 4.6, 2.8)
            yield Drawing(f"temperatures{suffix}", f"Temperatures assigned by ATS, {title}", [panel])
    held_out = document["held_out"]
    yield from _forest(held_out)
    if unit_of(held_out) == "questions":
        panel = Panel("Risk and coverage", "", functools.partial(_risk, held_out), 4.6, 3.2)
        yield Drawing("risk", "Error rate by coverage", [panel])
    if "training" in document:
        yield Drawing("training", "Loss during training", _training_panels(document["training"]))
    if "comparison" in document:
        draw = functools.partial(_frontier, document["comparison"])
        height = 3.0 + 0.18 * len(document["comparison"]["candidates"])
        panel = Panel("NLL and calibration error", "ring: chosen", draw, 4.6, height)
        yield Drawing("frontier", "NLL and calibration error of every loss on sequences not trained on", [panel])
    if "layers" in document:
        yield Drawing("layers", "Calibration of the prediction of every layer", _layer_panels(document))
        yield Drawing("sweep", "Calibration of the model with its residual stream edited", _sweep_panels(document))
        if document["subjects"]:
            yield _subjects("subjects", "Confidence and accuracy of every subject", document["subjects"])
    for name, results in document.get("tasks", {}).items():
        if results["subjects"]:
            text = f"Confidence and accuracy of every subject of {name}, uncalibrated"
            yield _subjects(subjects_name(document, name), text, results["subjects"])
    if "texts" in document:
        panel = Panel("Likelihood and diversity of text", "", functools.partial(_diversity, document), 4.8, 3.6)
        yield Drawing("diversity", "Likelihood and diversity of the text of every model", [panel])


def reliability_panels(results: Row) -> list[Panel]:
    """A diagram for each method; of many, the base model, temperature scaling and the first of the others."""
    methods: Mapping[str, Any] = results["methods"]
    names = list(methods)
    if len(names) > MOST:
        first = [name for name in ("uncalibrated", results.get("reference", "")) if name in methods]
        names = list(dict.fromkeys([*first, *names]))[:MOST]
    panels = []
    for name in names:
        row = methods[name]
        draw = functools.partial(plot.reliability, row, method=name)
        panels.append(Panel(title_of(name), f"ECE {interval(row['ece'], leading_zero=True)}", draw))
    return panels


def overlay(title: str, rows: Mapping[str, Mapping[str, Any]]) -> Panel:
    """The reliability of several rows in one diagram, a colour for each."""

    def draw(ax: "Axes") -> None:
        for number, (name, row) in enumerate(rows.items()):
            style = _style(number, name)
            plot.reliability(row, label=style["label"], colour=style["color"], ax=ax)
        legend(ax, loc="upper left")

    return Panel(title, "", draw, 4.6, 4.2)


def _forest(results: Row) -> Iterator[Drawing]:
    reference = title_of(results.get("reference", "temperature"))
    panels = []
    for key, title in (("log_loss", "log loss"), ("brier", "Brier"), ("ece", "ECE")):
        differences = {}
        for name, row in results["methods"].items():
            against = row.get("against", {}).get(key)
            if against and name != "uncalibrated":  # far away: the others would lie on one line
                differences[title_of(name)] = (against["difference"], against["low"], against["high"])
        if differences:
            draw = functools.partial(plot.forest, differences, title="difference")
            height = 1.0 + 0.24 * len(differences)
            panels.append(Panel(f"Δ {title} against {reference}", "", draw, 4.4, height))
    if any(panel.height > 1.3 for panel in panels):  # more than one line
        yield Drawing("forest", f"Differences from {reference} with their 95% intervals; left: better", panels)


def _risk(results: Row, ax: "Axes") -> None:
    known = ("temperature", "uncalibrated", "ats")
    names = [*known, *(name for name in results["methods"] if name not in known)]
    for number, name in enumerate(names):
        if name in results["methods"]:
            style = _style(number, title_of(name))
            plot.risk_coverage(results, method=name, label=style["label"], colour=style["color"], ax=ax)
            ax.lines[-1].set_linestyle("--" if number >= len(LINES) else "-")
    legend(ax)


def _training_panels(training: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    def draw(step: str, value: str, ax: "Axes") -> None:
        for number, (name, curve) in enumerate(training.items()):
            values = curve[value]
            if values:
                ax.plot(curve[step], values, **_style(number, name), markevery=max(1, len(values) // 8))
        ax.set(xlabel="step", ylabel="nats per token")
        style_axes(ax)
        if len(training) > 1:
            legend(ax)

    kinds = (("loss of batches", "step", "loss"), ("NLL of validation data", "validation_step", "validation_nll"))
    return [
        Panel(title, "", functools.partial(draw, step, value), 4.6, 3.0)
        for title, step, value in kinds
        if any(curve[value] for curve in training.values())
    ]


def _frontier(comparison: Row, ax: "Axes") -> None:
    for number, candidate in enumerate(comparison["candidates"]):
        at = candidate["nll"], candidate["calibration_error"]
        ax.plot(*at, **_style(number, candidate["candidate"]), linestyle="none")
        if candidate["candidate"] == final_candidate(comparison):
            ax.plot(*at, "o", markersize=12, markerfacecolor="none", color=INK)
    ax.set(xlabel="NLL, nats per token", ylabel="debiased calibration error")
    ax.margins(0.15)
    style_axes(ax)
    ax.figure.legend(loc="outside lower left", fontsize="small", frameon=False, labelcolor=INK)


def _layer_panels(document: Document) -> list[Panel]:
    def first(ax: "Axes") -> None:
        plot.layers(document, ("accuracy", "confidence"), ax=ax)
        same = [row["agreement"] for row in document["layers"]["curves"]]
        ax.plot(same, **_style(2, "same token as last"), linestyle="--")
        legend(ax)

    errors = functools.partial(plot.layers, document, ("ece", "mce"))
    entropies = functools.partial(plot.layers, document, ("entropy", "kl"))
    drawn = {"Accuracy and confidence": first, "Calibration error": errors, "Entropy and divergence, nats": entropies}
    return [Panel(title, "", draw, 4.0, 3.0) for title, draw in drawn.items()]


def _sweep_panels(document: Document) -> list[Panel]:
    sweep, chosen = document["sweep"], document["direction"]["chosen"]
    base = next(row for row in sweep if row["layer"] == 0)
    blocks = sorted({row["layer"] for row in sweep} - {0})
    edit_key = operator.itemgetter("layer", "strength")

    def draw(name: str, ax: "Axes") -> None:
        for number, block in enumerate(blocks):
            rows = sorted((row for row in sweep if row["layer"] in (0, block)), key=operator.itemgetter("strength"))
            style, strength = _style(number, f"block {block}"), [row["strength"] for row in rows]
            value, low, high = values_and_ends(row["held_out"][name] for row in rows).T
            ax.plot(strength, value, **style)
            if block == chosen["layer"]:
                ax.fill_between(strength, low, high, color=style["color"], alpha=0.2, linewidth=0)
        at = next(row for row in sweep if edit_key(row) == edit_key(chosen))
        ax.plot(at["strength"], at["held_out"][name]["value"], "o", markersize=11, markerfacecolor="none", color=INK)
        ax.axhline(base["held_out"][name]["value"], color=MUTED, linewidth=1, linestyle="--")
        ax.set(xlabel="c, in mean norms of the residual")
        ax.locator_params(axis="x", nbins=5)
        style_axes(ax)
        if blocks:
            legend(ax)

    return [
        Panel(f"{title} (ring: chosen on the other half)", "", functools.partial(draw, name), 4.6, 3.4)
        for name, title in (("ece", "ECE"), ("accuracy", "Accuracy"))
    ]


def _subjects(name: str, description: str, subjects: Sequence[Row]) -> Drawing:
    """Confidence beside accuracy and its interval, a line for each subject, the most overconfident on top."""

    def draw(ax: "Axes") -> None:
        rows, lines = subjects[::-1], range(len(subjects))
        value, low, high = values_and_ends(row["accuracy"] for row in rows).T
        confidence = [row["confidence"] for row in rows]
        ax.hlines(lines, value, confidence, color=MUTED, linewidth=1, linestyle=":")
        ax.hlines(lines, low, high, color=LINES[0], linewidth=4, alpha=0.35)
        ax.plot(value, lines, MARKS[0], color=LINES[0], markersize=5, label="accuracy, 95% interval")
        ax.plot(confidence, lines, MARKS[3], color=LINES[1], markersize=5, label="mean confidence")
        labels = [f"{(row['subject'] or 'no subject')[:32]} ({row['questions']:,})" for row in rows]
        ax.set_yticks(lines, labels, fontsize="small", parse_math=False)
        ax.set(xlim=(0, 1), ylim=(-0.7, len(rows) - 0.3))
        legend(style_axes(ax), loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)

    return Drawing(name, description, [Panel("", "", draw, 4.9, 1 + 0.22 * len(subjects))])


def _diversity(document: Document, ax: "Axes") -> None:
    for number, (name, points) in enumerate(document["texts"].items()):
        at = {temperature: (point["distinct_2"], point["log_prob"]) for temperature, point in points.items()}
        ax.plot(*zip(*at.values(), strict=True), **_style(number, name))
        for temperature, xy in at.items():
            offset = {"xytext": (5, 4), "textcoords": "offset points"}
            ax.annotate(temperature, xy, fontsize=8, color=INK, parse_math=False, **offset)
    ax.set(xlabel="distinct-2 of words (right: more varied)", ylabel="mean log p, nats, pretrained model")
    legend(style_axes(ax))
