"""The report as one self-contained page: style, script, figures and data are within it, and no request leaves it."""

import datetime
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.blocks import Origin, cards, facts, folded, glossary, heatmap_html, set_tables, table
from calibjax.eval.report.figures import Drawing, Panel, figures_of, overlay, png
from calibjax.eval.report.html import Content, Markup, element, inline_svg, joined, svg
from calibjax.eval.report.html import document as html_document
from calibjax.eval.report.notes import data_of, few, limitations, model_of, usage
from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.schema import Document, read_tokens
from calibjax.eval.report.tables import (
    Row,
    cells_of,
    counted,
    failures,
    interval,
    pair_of,
    remarks,
    sets_of,
    title_of,
    unit_of,
)
from calibjax.eval.report.verdicts import choice_verdict, kept_loss, set_verdict, verdict
from calibjax.runtime.command_line import command_line
from calibjax.runtime.files import write_file

TOKENS = "tokens.json"
"""Beside metrics.json: a `token_sample`, if the run made one."""
_OPEN_SETS = 3  # sets beside the first that are not folded, at most


class Run(NamedTuple):
    """The name of a run, the contents of its metrics.json, those of its tokens.json or None, and its origin."""

    name: str
    document: Document
    tokens: dict[str, Any] | None = None
    origin: Origin = Origin()


def write_report(document: Document, directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts.

    Args:
        document: the contents of `metrics.json`.
        directory: exists; its tokens.json is read if there is one.
    """
    names = {"reliability", *(name for part in parts_of(document) for name in part.figures)}
    for drawing in figures_of(document):
        if drawing.name in names:
            write_file(directory / f"{drawing.name}.png", png(drawing.figure()))
    file = directory / TOKENS
    tokens = read_tokens(file) if file.is_file() else None
    origin = Origin(datetime.date.today().isoformat(), command_line.get(), directory)
    write_file(directory / "report.html", page([Run("", document, tokens, origin)]))


def save_report(runs: Sequence[Run], directory: Path) -> list[str]:
    """Writes `report.html` of one or several runs, and every figure as PNG and SVG; returns the names of the files."""
    files = {"report.html": page(runs).encode()}
    for number, run in enumerate(runs):
        prefix = f"{number + 1}-" if len(runs) > 1 else ""
        for drawing in figures_of(run.document):
            figure = drawing.figure()
            files[f"{prefix}{drawing.name}.png"] = png(figure)
            files[f"{prefix}{drawing.name}.svg"] = svg(figure, drawing.name).encode()
    for name, content in files.items():
        write_file(directory / name, content)
    return list(files)


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several: one table of all rows and their curves first, then each run."""
    first = runs[0]
    parts = _one(first) if len(runs) == 1 else _several(runs)
    parts.append(glossary(first.document["held_out"]))
    parts += [_details(run.document.get("run", {}), f"All options of the run {run.name}".rstrip()) for run in runs]
    return _document(_subject(first) if len(runs) == 1 else f"{len(runs)} runs", parts)


def _document(title: str, parts: Sequence[Content]) -> str:
    box = element("div", "", id="definition", role="tooltip", hidden="")
    body = element("main", joined(parts, "\n"), box)
    title = " \N{MIDDLE DOT} ".join(text for text in (title, "calibjax") if text)
    text = html_document(title, body, _resource("page.css"), _resource("page.js"))
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold, has no encoding


def _resource(name: str) -> str:
    return resources.files("calibjax.eval.report").joinpath(name).read_text(encoding="utf-8")


# --- one run ---


def _subject(run: Run) -> str:
    """The model and the data, or the directory where neither is known."""
    options = run.document.get("run", {})
    names = " on ".join(name for name in (model_of(options), data_of(options)) if name)
    return names or (run.origin.directory.name if run.origin.directory else "")


def _one(run: Run) -> list[Content]:
    document, held_out = run.document, run.document["held_out"]
    listed = facts(document.get("run", {}), held_out["tokens"], unit_of(held_out), run.origin)
    parts: list[Content] = [
        _header("Calibration report", _subject(run), listed),
        _paragraph(verdict(document)),
        _paragraph(few(sets_of(document)[0][0], held_out)),
        cards(held_out),
        *_body(run, "r0"),
    ]
    if code := usage(document, run.origin.directory):
        button = element("button", "Copy", type="button", class_="copy")
        parts += [element("h2", "Use it"), element("div", button, element("pre", element("code", code)), class_="code")]
    return [
        *parts,
        element("h2", "Limitations"),
        element("ul", (element("li", line) for line in limitations(document))),
    ]


def _header(kind: str, subject: str, listed: Markup) -> Markup:
    return element("header", element("p", kind, class_="kind"), element("h1", subject or "calibjax"), listed)


def _body(run: Run, identity: str) -> list[Content]:
    """The sets, parts and figures of a run, the main set first."""
    document = run.document
    drawings = {drawing.name: drawing for drawing in figures_of(document)}
    ids = {name: f"{identity}-f{place}" for place, name in enumerate(drawings)}
    (title, held_out), *others = sets_of(document)

    def draw(*names: str) -> list[Content]:
        return [_drawing(drawings[name], ids[name]) for name in names if name in drawings]

    parts: list[Content] = [element("h2", _heading(title, held_out)), _set(held_out)]
    parts += draw("reliability", "forest", "risk", "temperatures")
    if run.tokens:
        parts.append(heatmap_html(run.tokens, f"{identity}-tokens"))
    if others:
        parts += [element("h2", "Tasks" if "tasks" in document else "Other domains"), _domains(others, identity)]
    for title, results in others:
        opened = len(others) <= _OPEN_SETS
        parts.append(folded(_heading(title, results), _paragraph(set_verdict(results)), _set(results), opened=opened))
    for part in parts_of(document):
        parts += [element("h2", part.title), *(element("p", line) for line in part.findings), *draw(*part.figures)]
        parts += [folded(each.title, table("", each.columns, each.rows)) for each in part.tables]
    if "training" in document or "comparison" in document:
        parts += [element("h2", "Training"), *draw("training")]
    if "comparison" in document:
        comparison = document["comparison"]
        parts += [element("p", choice_verdict(comparison)), *draw("frontier"), _losses(comparison)]
    return parts


def _heading(title: str, results: Row) -> str:
    shown = {"held out": "Held out", "all tasks": "All tasks"}.get(title, title)
    return f"{shown}: {counted(results)}"


def _set(results: Row) -> Markup:
    definition = f"{counted(results)}; confidence: {results['confidence']}" if "confidence" in results else None
    lines = [definition, *(f"{line}." for line in remarks(results)), *failures(results)]
    quiet = [element("p", line, class_="quiet") for line in lines if line]
    return joined([*quiet[: definition is not None], *set_tables(results), *quiet[definition is not None :]], "\n")


def _domains(sets: Sequence[tuple[str, Row]], identity: str) -> Markup:
    """Before and after on every further set: one table, and a diagram each."""
    pairs = [pair_of(results) for _, results in sets]
    several = any(before != after for before, after in pairs)
    rows, panels = [], []
    for (title, results), pair in zip(sets, pairs, strict=True):
        methods = results["methods"]
        both = [methods[name] for name in (pair if several else pair[:1])]
        eces = [interval(row["ece"], zero=True) for row in both]
        briers = [f"{row['brier']:.4f}" for row in both]
        rows.append([title, f"{results['tokens']:,}", f"{both[-1]['accuracy']:.4f}", *eces, *briers])
        panels.append(overlay(title, {title_of(name): methods[name] for name in dict.fromkeys(pair)}))
    whens = (" before", " after") if several else ("",)
    columns = ["", unit_of(sets[0][1]), "accuracy", *(f"{name}{when}" for name in ("ECE", "Brier") for when in whens)]
    drawing = Drawing("domains", "Reliability before and after", panels)
    warnings = [_paragraph(few(title, results)) for title, results in sets]
    return joined([*warnings, table("", columns, rows), _drawing(drawing, f"{identity}-domains")], "\n")


def _losses(comparison: Row) -> Markup:
    """What was compared to choose the loss."""
    chosen = kept_loss(comparison)
    rows = [
        [
            each["loss"] + (" (chosen)" if each["loss"] == chosen else ""),
            *(f"{each[key]:.4f}" for key in ("nll", "brier", "ece", "calibration_error")),
        ]
        for each in comparison["candidates"]
    ]
    return table("", ["loss", "NLL", "Brier", "ECE", "debiased calibration error"], rows)


# --- several runs ---


def _several(runs: Sequence[Run]) -> list[Content]:
    """The verdicts, one table of the main figures, the curves in one diagram, and each run folded."""
    lines = [(run.name, verdict(run.document)) for run in runs]
    overlays, rows, titles = [], [], []
    for title, place in (("Before", 0), ("After", 1)):
        sets = {run.name: run.document["held_out"] for run in runs}
        overlays.append(overlay(title, {name: set_["methods"][pair_of(set_)[place]] for name, set_ in sets.items()}))
    for run in runs:
        options = run.document.get("run", {})
        titles, cells = cells_of(run.document["held_out"], ("ece", "nll", "brier", "accuracy", "confidence"))
        rows += [[run.name, model_of(options), data_of(options), *line] for line in cells]
    return [
        _header("Calibration report", f"{len(runs)} runs", element("p", ", ".join(run.name for run in runs))),
        *(_paragraph(f"{name}: {line}") for name, line in lines if line),
        element("h2", "All runs, held out"),
        table("", ["run", "model", "data", *titles], rows),
        _drawing(Drawing("runs", "Reliability of all runs", overlays), "runs"),
        *(
            folded(run.name, cards(run.document["held_out"]), *_body(run, f"r{number}"), opened=True)
            for number, run in enumerate(runs)
        ),
    ]


# --- what they share ---


def _paragraph(line: str) -> Content:
    if not line:
        return None
    return element("p", line, class_="verdict warning" if "WARNING" in line else "verdict")


def _drawing(drawing: Drawing, identity: str) -> Markup:
    """A figure with its panels side by side, or stacked on a narrow page."""
    panels = (_panel(panel, drawing, f"{identity}-{number}") for number, panel in enumerate(drawing.panels))
    note = element("p", f"{drawing.description}: {drawing.note}", class_="quiet") if drawing.note else None
    return joined([note, element("div", panels, class_="panels")])


def _panel(panel: Panel, drawing: Drawing, identity: str) -> Markup:
    caption = element("figcaption", element("strong", panel.title), " ", element("span", panel.note))
    text = f"{drawing.description}: {panel.title}" if panel.title else drawing.description
    return element("figure", caption if panel.title else None, inline_svg(panel.figure(), identity, text))


def _details(value: Any, title: str) -> Markup:
    return folded(title, element("pre", json.dumps(value, indent=2)))
