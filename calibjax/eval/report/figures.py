"""The figures of a report: reliability, temperatures, layers, texts; as PNG, SVG, and SVG within a page."""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from calibjax.eval.report.canvas import INK, LINES, MARKS, MUTED, blank, legend, plain
from calibjax.eval.report.markup import Content, Markup, element
from calibjax.eval.report.rows import COLOURS, sets_of, title_of, unit_of
from calibjax.eval.report.schema import AnyRow, AnySet, Document, LayersDocument, LhtsDocument, SubjectRow
from calibjax.eval.report.subjects import subjects_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 6  # reliability diagrams side by side, at most


def figures_of(document: Document) -> Iterator[tuple[str, str, "Figure"]]:
    """(name of a file, description, figure) of every figure of a run."""
    for index, (title, results) in enumerate(sets_of(document)):
        suffix = f"-{index}" if index else ""
        yield f"reliability{suffix}", f"Reliability diagrams, {title}", reliability_figure(results, title)
        temperatures = temperature_figure(results)
        if temperatures is not None:
            yield f"temperatures{suffix}", f"Temperatures assigned by ATS, {title}", temperatures
    if "layers" in document:
        yield "layers", "Calibration of the prediction of every layer", layer_figure(document)
        yield "sweep", "Calibration of the model with its residual stream edited", sweep_figure(document)
        if document["subjects"]:
            yield "subjects", "Confidence and accuracy of every subject", subject_figure(document["subjects"])
    if "tasks" in document:
        for name, results in document["tasks"].items():
            if results["subjects"]:
                text = f"Confidence and accuracy of every subject of {name}, uncalibrated"
                yield subjects_name(document, name), text, subject_figure(results["subjects"])
    if "texts" in document:
        yield "diversity", "Likelihood and diversity of the text of every model", diversity_figure(document)


def reliability_figure(results: AnySet, title: str) -> "Figure":
    """Reliability diagrams side by side, one per method: accuracy against confidence, and the histogram below.

    Whiskers are 95% bootstrap intervals of a bin's accuracy, where the document has them. Nothing global is touched.
    """
    methods = results["methods"]
    lines = -(-len(methods) // _ACROSS)
    columns = -(-len(methods) // lines)
    size = 4.2 if lines == 1 else 3.2
    figure = blank(size * columns, (size + 0.7) * lines)
    axes = figure.subplots(2 * lines, columns, height_ratios=[4, 1] * lines, sharey="row", squeeze=False)
    for unused in range(len(methods), lines * columns):
        for axis in axes[-2:, unused % columns]:
            axis.set_axis_off()
    for index, (name, row) in enumerate(methods.items()):
        line, column = divmod(index, columns)
        upper, lower = axes[2 * line : 2 * line + 2, column]
        _reliability_panel(upper, lower, name, row)
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel(unit_of(results), fontsize="small")
    predictions = "next-token predictions" if unit_of(results) == "tokens" else unit_of(results)
    text = f"{title}: reliability of {results['tokens']:,} {predictions}"
    figure.suptitle(text, fontsize=11, parse_math=False, color=INK)
    return figure


def _reliability_panel(upper: "Axes", lower: "Axes", name: str, row: AnyRow) -> None:
    """The diagram of one method in the upper axis, and the histogram of its confidence in the lower one."""
    colour = COLOURS.get(name.partition("-")[0], MUTED)
    bins = row["reliability"]
    width = 1 / len(bins["count"])
    left = [i * width for i in range(len(bins["count"]))]
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle="--")
    bands = [bins.get(end, [None] * len(left)) for end in ("low", "high")]
    for x, confidence, accuracy, low, high in zip(left, bins["confidence"], bins["accuracy"], *bands, strict=True):
        if accuracy is None or confidence is None:
            continue
        upper.bar(x, accuracy, width, align="edge", color=colour, alpha=0.8, edgecolor="none")
        upper.plot([x + width / 2, x + width / 2], [accuracy, confidence], color=INK, linewidth=1, linestyle=":")
        upper.plot(x + width / 2, confidence, marker=".", color=INK, markersize=5)
        if low is not None and high is not None:
            reach = [[max(accuracy - low, 0)], [max(high - accuracy, 0)]]
            upper.errorbar(x + width / 2, accuracy, reach, color=INK, linewidth=1, capsize=width * 40)
    upper.set(xlim=(0, 1), ylim=(0, 1))
    upper.set_title(f"{title_of(name)}\nECE {row['ece']['value']:.4f}", color=INK)
    upper.tick_params(labelbottom=False)
    lower.bar(left, bins["count"], width, align="edge", color=colour, alpha=0.5, edgecolor="none")
    lower.set(xlim=(0, 1), yscale="symlog")
    lower.set_xlabel("confidence")
    for axis in (upper, lower):
        plain(axis)


def temperature_figure(results: AnySet) -> "Figure | None":
    """Histogram of the temperatures that ATS assigned to the held-out tokens; None without such a row."""
    row = results["methods"].get("ats")
    if row is None or "temperatures" not in row:
        return None
    edges, count = row["temperatures"]["edges"], row["temperatures"]["count"]
    figure = blank(6.3, 2.6)
    axis = figure.subplots()
    axis.stairs(count, edges, fill=True, color=COLOURS["ats"], alpha=0.8)
    axis.axvline(1.0, color=MUTED, linewidth=1, linestyle="--")
    axis.set(xscale="log", xlabel="temperature of a token (1: unchanged)", ylabel="tokens")
    ticks = (0.1, 0.25, 0.5, 1, 2, 4, 10, 20)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    plain(axis)
    return figure


def layer_figure(document: LayersDocument) -> "Figure":
    """Accuracy and confidence, calibration errors, and entropy and divergence of every layer, with intervals.

    A dotted line marks where the decision settles; a confidence-correction phase, if there is one, is shaded.
    """
    curves, phase = document["layers"]["curves"], document["layers"]["phase"]
    layer = [row["layer"] for row in curves]
    figure = blank(12.6, 3.6)
    panels = (
        ("accuracy and confidence", (("accuracy", "accuracy"), ("confidence", "confidence"))),
        ("calibration error", (("ece", "ECE"), ("mce", "MCE"))),
        ("nats", (("entropy", "entropy"), ("kl", "KL from the last layer"))),
    )
    for axis, (label, series) in zip(figure.subplots(1, 3), panels, strict=True):
        for (name, title), colour, mark in zip(series, LINES, MARKS, strict=False):
            values, low, high = ([row[name][key] for row in curves] for key in ("value", "low", "high"))
            axis.plot(layer, values, color=colour, marker=mark, markersize=4, label=title)
            axis.fill_between(layer, low, high, color=colour, alpha=0.2, linewidth=0)
        if label.startswith("accuracy"):
            same = [row["agreement"] for row in curves]
            axis.plot(
                layer, same, color=LINES[2], marker=MARKS[2], markersize=4, linestyle="--", label="same token as last"
            )
        axis.axvline(phase["settled"], color=MUTED, linewidth=1.5, linestyle=":")
        if phase["found"]:
            axis.axvspan(phase["peak"], layer[-1], color=MUTED, alpha=0.2, linewidth=0)
        axis.set(xlabel="layer (0: embeddings)", ylabel=label, ylim=(0, None))
        axis.xaxis.get_major_locator().set_params(integer=True)
        plain(axis)
        legend(axis)
    return figure


def sweep_figure(document: LayersDocument) -> "Figure":
    """ECE and accuracy by the strength of the edit, one line per block, on the held-out half."""
    sweep, chosen = document["sweep"], document["direction"]["chosen"]
    base = next(row for row in sweep if row["layer"] == 0)
    layers = sorted({row["layer"] for row in sweep} - {0})
    figure = blank(10.5, 3.8)
    for axis, (name, label) in zip(figure.subplots(1, 2), (("ece", "ECE"), ("accuracy", "accuracy")), strict=True):
        for number, layer in enumerate(layers):
            rows = [row for row in sweep if row["layer"] == layer]
            rows = sorted([*rows, base], key=lambda row: row["strength"])
            colour = LINES[number % len(LINES)]
            values = [row["held_out"][name]["value"] for row in rows]
            strength = [row["strength"] for row in rows]
            mark = MARKS[number % len(MARKS)]
            axis.plot(strength, values, color=colour, marker=mark, markersize=4, label=f"block {layer}")
            if layer == chosen["layer"]:
                low, high = ([row["held_out"][name][end] for row in rows] for end in ("low", "high"))
                axis.fill_between(strength, low, high, color=colour, alpha=0.2, linewidth=0)
        at = next(row for row in sweep if (row["layer"], row["strength"]) == (chosen["layer"], chosen["strength"]))
        axis.plot(at["strength"], at["held_out"][name]["value"], "o", markersize=11, markerfacecolor="none", color=INK)
        axis.axhline(base["held_out"][name]["value"], color=MUTED, linewidth=1, linestyle="--")
        axis.set(xlabel="c, in mean norms of the residual (ring: chosen on the other half)", ylabel=label)
        plain(axis)
    legend(figure.axes[0])
    return figure


def subject_figure(subjects: Sequence[SubjectRow]) -> "Figure":
    """Confidence beside accuracy and its interval, a line for each subject, the most overconfident on top."""
    rows = subjects[::-1]
    figure = blank(8.5, 1 + 0.22 * len(rows))
    axis = figure.subplots()
    line = range(len(rows))
    value, low, high = ([row["accuracy"][key] for row in rows] for key in ("value", "low", "high"))
    confidence = [row["confidence"] for row in rows]
    axis.hlines(line, value, confidence, color=MUTED, linewidth=1, linestyle=":")
    axis.hlines(line, low, high, color=LINES[0], linewidth=4, alpha=0.35)
    axis.plot(value, line, MARKS[0], color=LINES[0], markersize=5, label="accuracy, 95% interval")
    axis.plot(confidence, line, MARKS[3], color=LINES[1], markersize=5, label="mean confidence")
    axis.set_yticks(
        line, [f"{row['subject'] or 'no subject'} ({row['questions']:,})" for row in rows], fontsize="small"
    )
    axis.set(xlim=(0, 1), ylim=(-0.7, len(rows) - 0.3))
    plain(axis)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small", frameon=False, labelcolor=INK)
    return figure


def diversity_figure(document: LhtsDocument) -> "Figure":
    """Mean log p by distinct-2, a line for each model through its myopic temperatures."""
    figure = blank(7, 4.8)
    axis = figure.subplots()
    for number, (name, points) in enumerate(document["texts"].items()):
        x, y = ([point[key] for point in points.values()] for key in ("distinct_2", "log_prob"))
        colour, mark = LINES[number % len(LINES)], MARKS[number % len(MARKS)]
        axis.plot(x, y, color=colour, marker=mark, markersize=5, label=name)
        for temperature, *at in zip(points, x, y, strict=True):
            axis.annotate(temperature, (at[0], at[1]), textcoords="offset points", xytext=(5, 4), fontsize=8, color=INK)
    axis.set(xlabel="distinct-2 of words (right: more varied)", ylabel="mean log p under the pretrained model, nats")
    plain(axis)
    legend(axis)
    return figure


# --- as files ---


def png(figure: "Figure") -> bytes:
    """The figure as PNG on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, facecolor="white")
    return buffer.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """A complete SVG document with its text as text; `name` seeds its ids, so that equal figures are equal files."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue().decode()


def inline_svg(figure: "Figure", name: str, description: str) -> Markup:
    """An element for a page: ids of its own, the colours of the page, and no reference to anything outside.

    It is rebuilt from the parsed tree of the drawing, so that no text in it can become markup. Styles become
    attributes, since the page's policy allows no inline styles. An empty drawing before it has the smallest legible
    width: on a phone the figure shrinks to that width, then scrolls.

    Args:
        figure: to be drawn.
        name: unique on the page; letters, digits and hyphens.
        description: text for screen readers.
    """
    text = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", svg(figure, name))
    root = ElementTree.fromstring(text)
    width = figure.get_figwidth() * 72
    root.attrib.pop("height")
    root.attrib["width"] = f"{width:.0f}pt"
    label = {"role": "img", "aria-label": description}
    room = element("svg", class_="room", width=f"{0.6 * width:.0f}pt", height=0, aria_hidden="true")
    return room + _svg_element(root, name, label)


_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_LEFT_OUT = ("metadata", "style")


def _svg_element(node: ElementTree.Element, name: str, more: Mapping[str, str] | None = None) -> Markup:
    attributes = dict(more or {})
    for full, value in node.attrib.items():
        attribute = full.rpartition("}")[2]
        styled = _attributes_of_style(value) if attribute == "style" else {attribute: value}
        attributes |= {key: _on_page(key, text, name) for key, text in styled.items()}
    content: list[Content] = [node.text]
    for child in node:
        if child.tag.rpartition("}")[2] not in _LEFT_OUT:
            content.append(_svg_element(child, name))
        content.append(child.tail)
    return element(node.tag.rpartition("}")[2], content, **attributes)


def _attributes_of_style(style: str) -> dict[str, str]:
    """A style as presentation attributes; matplotlib 3.10 writes the font shorthand."""
    pairs = (pair.partition(":") for pair in style.split(";") if pair.strip())
    out = {key.strip(): value.strip() for key, _, value in pairs}
    font = re.fullmatch(r"(?:(italic|oblique) )?(?:([\w-]+) )?([\d.]+px) (.*)", out.pop("font", ""))
    if font:
        fields = zip(("font-style", "font-weight", "font-size", "font-family"), font.groups(), strict=True)
        out |= {key: value for key, value in fields if value}
    return out


def _on_page(attribute: str, value: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{value}"
    if attribute == "href" or value.startswith("url(#"):
        return value.replace("#", f"#{name}-", 1)
    return {INK: "currentColor", MUTED: "var(--muted)"}.get(value, value)
