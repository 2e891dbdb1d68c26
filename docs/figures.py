"""Draws the figures of the pages from their own tables: `python docs/figures.py`. No figure has numbers of its own.

A figure names the tables that it shows. Its file holds a checksum of their numbers, by which tests/test_docs.py notices
a figure that is out of date.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from calibjax.plot import LINES, MARKS, MUTED, legend, style_axes

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "figures"


class Table(NamedTuple):
    """A table of a page: the last heading, the line of text above it, and its cells."""

    section: str
    lead: str
    header: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> list[str]:
        index = self.header.index(name)
        return [row[index] for row in self.rows]


def blank(width: float, height: float) -> Figure:
    """A new figure of this size in inches, without pyplot's global state."""
    return Figure(figsize=(width, height), layout="constrained")


def tables(page: str) -> list[Table]:
    """All tables of a page, in its order."""
    found: list[Table] = []
    section = lead = ""
    lines = iter((ROOT / page).read_text().splitlines())
    for line in lines:
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("|"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.append(Table(section, lead, cells(line), rows))
        elif line.strip() and not line.startswith(("```", "!")):
            lead = line.strip()
    return found


def cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def number(cell: str) -> float:
    """The first number of a cell, such as `.0140 [.012, .018]` or `**3.271**`; NaN where there is none."""
    match = re.search(r"[-+]?\d*\.?\d+", cell.replace(",", ""))
    return float(match[0]) if match else float("nan")


def interval(cell: str) -> tuple[float, float]:
    match = re.search(r"\[([^,\]]+), ([^\]]+)\]", cell)
    return (number(match[1]), number(match[2])) if match else (number(cell), number(cell))


def spread(cell: str) -> float:
    """Half the range of a cell such as `3.324 ±.002`; 0 where it has none."""
    _, found, half = cell.partition("±")
    return number(half) if found else 0.0


# --- the figures ---


def learning_curve(shown: list[Table]):
    """NLL and ECE against the number of tokens, a row for each model, up to what the uncalibrated model has."""
    figure = blank(8.4, 2.9 * len(shown))
    for axes, table in zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True):
        tokens = [number(cell) for cell in table.column("fit tokens")[1:]]
        heads = [name.removesuffix(": NLL") for name in table.header if name.endswith(": NLL")]
        for axis, measure in zip(axes, ("NLL", "ECE"), strict=True):
            columns = [table.column(f"{head}: {measure}") for head in heads]
            base, least = number(columns[0][0]), min(number(cell) for column in columns for cell in column)
            axis.axhline(base, color=MUTED, linestyle=":", label="uncalibrated")
            for head, column, colour, mark in zip(heads, columns, LINES, MARKS, strict=False):
                label = "temperature scaling" if head == "temperature" else head
                values, half = ([read(cell) for cell in column[1:]] for read in (number, spread))
                axis.errorbar(tokens, values, yerr=half, fmt=f"{mark}-", color=colour, markersize=5, label=label)
            margin = (base - least) / 20
            axis.set(xscale="log", xlabel="tokens to fit on", ylabel=f"{measure}, held out", title=table.section)
            axis.set_ylim(least - margin, base + margin)
            style_axes(axis)
    legend(figure.axes[1])
    return figure


def smoothing(shown: list[Table]):
    """Held-out ECE against label smoothing, without and with what is fitted afterwards."""
    figure = blank(9.6, 3.2)
    for axis, table in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        where = table.header.index("ECE")
        for offset, (label, colour, mark) in enumerate(
            zip(("fine-tuned", "+ temperature scaling", "+ ATS"), LINES, MARKS, strict=False)
        ):
            for data, line in (("alpaca", "-"), ("lima", "--")):
                rows = [row for row in table.rows if row[0] == data and row[1] != "not trained"]
                axis.plot(
                    [number(row[1]) for row in rows],
                    [number(row[where + offset]) for row in rows],
                    line,
                    marker=mark,
                    color=colour,
                    markersize=5,
                    label=label if data == "alpaca" else None,
                )
        axis.set(title=table.section, xlabel="label smoothing β")
        style_axes(axis)
    axes = figure.axes
    axes[0].set_ylabel("ECE, held out (dashed: LIMA)")
    legend(axes[-1])
    return figure


def rows_of(shown: list[Table], label: Callable[[Table], str], measures: tuple[str, str]):
    """A line for each row of the tables: two measures, with the intervals that they have."""
    lines = max(len(table.rows) for table in shown)
    figure = blank(9.6, len(shown) * (1.0 + 0.24 * lines))
    axes = figure.subplots(len(shown), 2, sharey="row", squeeze=False)
    for of_table, table in zip(axes, shown, strict=True):
        names = [row[0] for row in table.rows if row[0] != "uncalibrated"]
        height = np.arange(len(names))[::-1]
        for axis, measure in zip(of_table, measures, strict=True):
            column = next(name for name in table.header if name.startswith(measure))
            values = {row[0]: cell for row, cell in zip(table.rows, table.column(column), strict=True)}
            shown_cells = [values[name] for name in names]
            ends = [interval(cell) for cell in shown_cells]
            axis.hlines(height, [low for low, _ in ends], [high for _, high in ends], color=LINES[0])
            axis.plot([number(cell) for cell in shown_cells], height, "o", color=LINES[0], markersize=4)
            axis.axvline(number(values["temperature scaling"]), color=MUTED, linestyle="--", linewidth=1)
            axis.set_xlabel(f"{measure} (uncalibrated: {values['uncalibrated'].split()[0]})")
            style_axes(axis)
        of_table[0].set_yticks(height, names, fontsize="small")
        of_table[0].set_title(label(table), loc="left", fontsize="medium")
    return figure


def alpha(shown: list[Table]):
    """NLL and ECE against the weight of three losses; dashed: temperature scaling."""
    figure = blank(9.6, 3.0 * len(shown))
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for of_table, table in zip(axes, shown, strict=True):
        weights = [number(row[0]) for row in table.rows]
        scaled = re.search(r"temperature scaling: NLL ([\d.]+), ECE ([\d.]+)", table.lead)
        assert scaled
        for column, measure in enumerate(("NLL", "ECE")):
            axis = of_table[column]
            for index, (loss, colour, mark) in enumerate(
                zip(("label-smoothing", "selective", "selective-balanced"), LINES, MARKS, strict=False)
            ):
                values = [number(row[1 + 2 * index + column]) for row in table.rows]
                axis.plot(weights, values, f"{mark}-", color=colour, markersize=5, label=loss)
            axis.axhline(float(scaled[1 + column]), color=MUTED, linestyle="--", linewidth=1)
            axis.set(xlabel="alpha", ylabel=f"{measure}, held out", title=table.lead.split(" (")[0])
            style_axes(axis)
    legend(axes[0, 0])
    return figure


def ats(shown: list[Table]):
    """Held-out ECE of every run, a line each."""
    figure = blank(8.6, 0.9 + 0.42 * len(shown))
    axis = figure.subplots()
    height = np.arange(len(shown))[::-1]
    for offset, (method, colour, mark) in enumerate(
        zip(("uncalibrated", "temperature scaling", "ATS"), LINES[1::-1] + LINES[2:], MARKS, strict=False)
    ):
        found = [next(row for row in table.rows if row[1] == method) for table in shown]
        cell = [row[table.header.index("ECE [95% interval]")] for row, table in zip(found, shown, strict=True)]
        ends = [interval(text) for text in cell]
        place = height + 0.2 - 0.2 * offset
        axis.hlines(place, [low for low, _ in ends], [high for _, high in ends], color=colour)
        axis.plot([number(text) for text in cell], place, mark, color=colour, markersize=5, label=method)
    axis.set_yticks(height, [table.section.replace("`", "") for table in shown], fontsize="small")
    axis.set_xlabel("ECE, held out, with 95% interval")
    style_axes(axis)
    legend(axis)
    return figure


def variety(shown: list[Table]):
    """Likelihood against variety at myopic temperatures 1 to 0, a curve for each model."""
    figure = blank(9.6, 3.3)
    for axis, table in zip(figure.subplots(1, len(shown)), shown, strict=True):
        for row, colour, mark in zip(table.rows, LINES, MARKS, strict=False):
            points = [[number(part) for part in cell.split(",")] for cell in row[1:]]
            axis.plot(
                [p[1] for p in points], [p[0] for p in points], f"{mark}-", color=colour, markersize=4, label=row[0]
            )
        axis.set(title=table.section, xlabel="distinct-2")
        style_axes(axis)
    figure.axes[0].set_ylabel("log p of a token")
    legend(figure.axes[0])
    return figure


def layer_curves(shown: list[Table]):
    """Accuracy, confidence and ECE of every layer."""
    figure = blank(10.4, 3.4)
    for axis, table in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        for name, colour, mark in zip(("accuracy", "confidence", "ECE"), LINES, MARKS, strict=False):
            axis.plot([number(cell) for cell in table.column(name)], f"{mark}-", color=colour, markersize=4, label=name)
        axis.set(xlabel="layer", xticks=range(len(table.rows)))
        axis.set_title(table.section.split(",")[0].replace(" on ", "\non "), fontsize="small")
        style_axes(axis)
    legend(figure.axes[0])
    return figure


def costs(shown: list[Table]):
    """CPU time of jobs relative to the forward pass."""
    figure = blank(7.6, 2.6)
    for axis, table in zip(figure.subplots(1, len(shown)), shown, strict=True):
        jobs = table.column("job")
        values = [number(cell) for cell in table.column("CPU time")]
        axis.barh(np.arange(len(jobs))[::-1], values, color=LINES[0])
        axis.set_yticks(np.arange(len(jobs))[::-1], jobs, fontsize="small")
        axis.axvline(1, color=MUTED, linestyle="--", linewidth=1)
        axis.set_xlabel("CPU time, forward pass = 1")
        axis.set_title(table.lead.split("; ")[2].split(":")[0], fontsize="small")
        style_axes(axis)
    return figure


def scaling(shown: list[Table]):
    """Lower bounds of a step against the number of devices: of the same batch, and of a sequence on each device."""
    (table,) = shown
    figure = blank(8.4, 3.2)
    for axis, objective in zip(figure.subplots(1, 2, sharey=True), ("ats", "sft"), strict=True):
        rows = sorted((row for row in table.rows if row[0] == objective), key=lambda row: number(row[1]))
        same, each = [row for row in rows if row[2] == "256"], [row for row in rows if row[1] == row[2]]
        for line, chosen, batch in (("-", same, "256 sequences"), ("--", each, "a sequence on each device")):
            for name, colour, mark in zip(("operations", "moved"), LINES, MARKS, strict=False):
                values = [number(row[table.header.index(name)]) for row in chosen]
                devices = [number(row[1]) for row in chosen]
                axis.plot(devices, values, f"{mark}{line}", color=colour, markersize=5, label=f"{name}, {batch}")
        axis.set(xlabel="devices", title=f"{objective}, Llama-3.1-8B", yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 16, 64, 256], ["4", "16", "64", "256"])
        style_axes(axis)
    figure.axes[0].set_ylabel("milliseconds, lower bound")
    legend(figure.axes[1])
    return figure


def operators(shown: list[Table]):
    """Time of losses relative to optax, per task: the first table of the page."""
    (table,) = shown
    figure = blank(8.6, 3.0)
    axis = figure.subplots()
    rows = table.rows[:4]
    for offset, name in enumerate(table.header[2:]):
        values = [number(cell) if cell.endswith("x") else np.nan for cell in (row[2 + offset] for row in rows)]
        axis.bar(np.arange(len(rows)) + 0.16 * offset, values, 0.15, color=LINES[offset], label=name.strip("`"))
    axis.axhline(1, color=MUTED, linestyle="--", linewidth=1)
    axis.set_xticks(np.arange(len(rows)) + 0.32, [row[0].split(" (")[0] for row in rows], fontsize="small")
    axis.set_ylabel("time, optax = 1")
    style_axes(axis)
    legend(axis)
    return figure


def predicted(shown: list[Table]):
    """Predicted over fastest measured time of every shape, against its number of tokens; a column for each chip."""
    figure = blank(8.6, 3.2)
    for axis, table, chip in zip(figure.subplots(1, 2, sharey=True), shown, ("TPU v6e", "TPU7x"), strict=True):
        tokens = np.array([number(row[0].split(", ")[0]) for row in table.rows])
        kinds = [name for name in table.header if name.endswith(", ratio")]
        for offset, (name, colour, mark) in enumerate(zip(kinds, LINES, MARKS, strict=False)):
            ratios = [number(cell) for cell in table.column(name)]
            label = name.removesuffix(", ratio")
            label = label if label == "forward" else f"both passes, {label}"
            axis.plot(tokens * 1.12**offset, ratios, mark, color=colour, markersize=4, alpha=0.8, label=label)
        axis.axhline(1, color=MUTED, linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            2.0 ** np.arange(10, 16), ["1,024", "2,048", "4,096", "8,192", "16,384", "32,768"], fontsize="small"
        )
        axis.set(xlabel="tokens", title=chip)
        style_axes(axis)
        legend(axis)
    figure.axes[0].set_ylabel("predicted / fastest measured")
    figure.axes[0].set_ylim(0, None)
    return figure


def performance(shown: list[Table]):
    """Their time over ours, a bar for each work."""
    (table,) = shown
    names = [f"{row[0]}, {row[1]}".replace("`", "") for row in table.rows]
    values = np.array([number(cell) for cell in table.column("their time / ours")])
    figure = blank(8.6, 0.24 * len(names) + 0.6)
    axis = figure.subplots()
    places = np.arange(len(names))[::-1]
    axis.barh(places, values - 1, left=1, color=[LINES[0] if value >= 1 else LINES[1] for value in values])
    axis.margins(y=0.02)
    axis.set_xscale("log")
    axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axis.set_yticks(places, names, fontsize="small")
    axis.axvline(1, color=MUTED, linewidth=1)
    axis.set_xlabel("their time / ours")
    style_axes(axis)
    return figure


def _in(section: str) -> Callable[[Table], bool]:
    return lambda table: table.section.startswith(section)


def _study(section: str) -> Callable[[Table], bool]:
    return lambda table: table.section.startswith(section) and "held out" in table.lead and table.header[0] == ""


def _model(table: Table) -> str:
    return table.lead.split(",")[0]


def _rows(shown: list[Table]):
    return rows_of(shown, _model, ("NLL", "ECE"))


STUDIES = "docs/studies.md"
FIGURES: dict[str, tuple[str, Callable[[Table], bool], Callable[[list[Table]], Any]]] = {
    "data": ("docs/guides/data.md", lambda table: table.header[0] == "fit tokens", learning_curve),
    "smoothing": (STUDIES, lambda table: table.header[0] == "trained on", smoothing),
    "losses": (STUDIES, _study("Which loss"), _rows),
    "alpha": (STUDIES, _in("How much does the weight"), alpha),
    "pooling": (STUDIES, _study("A temperature for each token"), _rows),
    "heads": (STUDIES, _study("Which head"), _rows),
    "ats": ("train/RESULTS.md", lambda table: table.header[:2] == ["set", "method"], ats),
    "lhts": ("docs/lhts.md", lambda table: "myopic 0.7" in table.header, variety),
    "layers": ("docs/layers.md", lambda table: table.header[0] == "layer", layer_curves),
    "evaluation": ("eval/RESULTS.md", lambda table: table.header[0] == "job", costs),
    "scaling": ("docs/plan.md", lambda table: "operations' part if nothing is hidden" in table.header, scaling),
    "performance": ("docs/performance.md", lambda table: "their time / ours" in table.header, performance),
    "predicted": ("kernels/RESULTS.md", lambda table: table.header[0] == "N, D, V", predicted),
    "operators": ("kernels/RESULTS.md", lambda table: "optax" in table.header and "tokamax" in table.header, operators),
}
"""Name of a file -> its page, the tables of the page that it shows, and how it is drawn."""


def selected(name: str) -> list[Table]:
    page, wanted, _ = FIGURES[name]
    found = [table for table in tables(page) if wanted(table)]
    assert found, name
    return found[:1] if name == "operators" else found


def checksum(shown: list[Table]) -> str:
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def main() -> None:
    import matplotlib as mpl

    OUT.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "calibjax", "font.size": 9}):
        for name, (_, _, draw) in FIGURES.items():
            shown = selected(name)
            figure = draw(shown)
            figure.savefig(OUT / f"{name}.svg", metadata={"Date": None, "Description": checksum(shown)})


if __name__ == "__main__":
    main()
