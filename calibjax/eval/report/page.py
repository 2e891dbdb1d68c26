"""The report as one self-contained page: style, script, figures and data are within it, and no request leaves it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.figures import Drawing, Panel, figures_of, overlay
from calibjax.eval.report.glossary import glossary
from calibjax.eval.report.head import Origin, cards, data_of, facts, model_of, pair_of
from calibjax.eval.report.heatmap import heatmap_html
from calibjax.eval.report.markup import Content, Markup, element, joined
from calibjax.eval.report.markup import document as html_document
from calibjax.eval.report.notes import few, limitations, usage
from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.rows import UNCONVERGED, Part, cells_of, described, remarks, sets_of, title_of, unit_of
from calibjax.eval.report.schema import AnySet, Document, StudyDocument, TokenSample, read_tokens
from calibjax.eval.report.studies import study_figures, study_tables
from calibjax.eval.report.svg import inline_svg, png, svg
from calibjax.eval.report.tables import folded, set_tables, table
from calibjax.eval.report.verdicts import choice_verdict, kept_loss, set_verdict, study_verdict, verdict
from calibjax.runtime.command_line import command_line
from calibjax.runtime.files import write_file

TOKENS = "tokens.json"
"""Beside metrics.json: a `token_sample`, if the run made one."""
_OPEN_SETS = 3  # sets beside the first that are not folded, at most


class Run(NamedTuple):
    """The name of a run, the contents of its metrics.json, those of its tokens.json or None, and its origin."""

    name: str
    document: Document
    tokens: TokenSample | None = None
    origin: Origin = Origin()


def write_report(document: Document, directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts.

    Args:
        document: the contents of `metrics.json`.
        directory: exists; its tokens.json is read if there is one.
    """
    written = {"reliability", *(name for part in parts_of(document) for name in part.figures)}
    for drawing in figures_of(document):
        if drawing.name in written:
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


def write_study(document: StudyDocument, directory: Path) -> list[str]:
    """Writes the page of a study and every figure as PNG into a directory; returns the names of the files."""
    drawings = list(study_figures(document))
    for drawing in drawings:
        write_file(directory / f"{drawing.name}.png", png(drawing.figure()))
    run = document.get("run", {})
    origin = Origin(datetime.date.today().isoformat(), command_line.get(), directory)
    tokens = sum(of_set["tokens"] for of_set in document["sets"].values())
    parts: list[Content] = [
        _header(
            "Study",
            document["question"],
            facts({"command": f"study {document['study']}", **run}, tokens, "tokens", origin),
        ),
        _paragraph(study_verdict(document)),
        *(_drawing(drawing, f"s{number}") for number, drawing in enumerate(drawings)),
        element(
            "p",
            "Means over seeds, ± half their range; [95% intervals] over sequences, for the heads as fitted. + "
            "significantly lower (better) than the row compared with, - significantly higher: the interval of the "
            "paired difference excludes 0, not corrected for the number of rows.",
        ),
        *(table(each.title, each.columns, each.rows) for each in study_tables(document)),
        _details(document.get("run", {}), "All options"),
    ]
    write_file(directory / "report.html", _document("calibjax study", parts))
    return ["report.html", *(f"{drawing.name}.png" for drawing in drawings)]


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several: one table of all rows and their curves first, then each run."""
    first = runs[0].document["held_out"]
    parts = _one(runs[0]) if len(runs) == 1 else _several(runs)
    parts.append(glossary(first))
    parts += [_details(run.document.get("run", {}), f"All options of the run {run.name}".rstrip()) for run in runs]
    return _document("calibjax report", parts)


def _document(title: str, parts: Sequence[Content]) -> str:
    box = element("div", "", id="definition", role="tooltip", hidden="")
    body = element("main", joined(parts, "\n"), box)
    text = html_document(title, body, _resource("page.css"), _resource("page.js"))
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold, has no encoding


def _resource(name: str) -> str:
    return resources.files("calibjax.eval.report").joinpath(name).read_text(encoding="utf-8")


# --- one run ---


def _one(run: Run) -> list[Content]:
    document, held_out = run.document, run.document["held_out"]
    told: Mapping[str, Any] = document.get("run", {})
    subject = " on ".join(name for name in (model_of(told), data_of(told)) if name)
    parts: list[Content] = [
        _header("Calibration report", subject, facts(told, held_out["tokens"], unit_of(held_out), run.origin)),
        _paragraph(verdict(document)),
        _paragraph(few(sets_of(document)[0][0], held_out)),
        cards(held_out),
    ]
    parts += _body(run, "r0")
    code = usage(document, run.origin)
    if code:
        button = element("button", "Copy", type="button", class_="copy")
        parts += [element("h2", "Use it"), element("div", button, element("pre", element("code", code)), class_="code")]
    parts += [element("h2", "Limitations"), element("ul", (element("li", line) for line in limitations(document)))]
    return parts


def _header(kind: str, subject: str, known: Markup) -> Markup:
    return element("header", element("p", kind, class_="kind"), element("h1", subject or "calibjax"), known)


def _body(run: Run, identity: str) -> list[Content]:
    """The sets, parts and figures of a run, the main set first."""
    document = run.document
    drawings = {drawing.name: drawing for drawing in figures_of(document)}
    sets = sets_of(document)
    others = sets[1:]

    def draw(name: str) -> Content:
        return _drawing(drawings[name], f"{identity}-{name_of(name)}") if name in drawings else None

    order = list(drawings)

    def name_of(name: str) -> str:
        return f"f{order.index(name)}"

    parts: list[Content] = [element("h2", title_of_set(*sets[0])), _set(*sets[0]), draw("reliability"), draw("forest")]
    parts += [draw("risk"), draw("temperatures")]
    if run.tokens:
        parts.append(heatmap_html(run.tokens, f"{identity}-tokens"))
    if others:
        parts += [element("h2", "Tasks" if "tasks" in document else "Other domains"), _domains(others, identity)]
        for title, results in others:
            opened = len(others) <= _OPEN_SETS
            shown = _paragraph(set_verdict(results)), _set(title, results)
            parts.append(folded(title_of_set(title, results), *shown, opened=opened))
    for part in parts_of(document):
        parts.append(_part(part, draw))
    parts.append(_training(document, draw))
    return parts


def title_of_set(title: str, results: AnySet) -> str:
    """The heading of a set."""
    shown = {"held out": "Held out", "all tasks": "All tasks"}.get(title, title)
    return f"{shown}: {results['tokens']:,} {unit_of(results)}"


def _set(title: str, results: AnySet) -> Markup:
    known = element("p", described(results), class_="quiet") if "confidence" in results else None
    parts: list[Content] = [known, *set_tables(results)]
    parts += [element("p", f"{line}.", class_="quiet") for line in remarks(results)]
    unconverged = dict.fromkeys(results.get("not_converged", ()), UNCONVERGED)
    for found, word in (
        (results.get("failed", {}), "Failed"),
        (unconverged, "Not converged"),
        (results.get("left_out", {}), "Left out"),
    ):
        for reason in dict.fromkeys(found.values()):
            names = ", ".join(name for name in found if found[name] == reason)
            parts.append(element("p", f"{word}: {names}: {reason}.", class_="quiet"))
    return joined(parts, "\n")


def _domains(sets: Sequence[tuple[str, AnySet]], identity: str) -> Markup:
    """Before and after on every further set: one table, and a diagram each."""
    rows, panels, warnings = [], [], []
    pairs = [dict.fromkeys(pair_of(results)) for _, results in sets]
    several = any(len(pair) > 1 for pair in pairs)
    for (title, results), pair in zip(sets, pairs, strict=True):
        methods: Mapping[str, Any] = results["methods"]
        both = [methods[name] for name in pair]
        both = both * 2 if several and len(both) == 1 else both
        values = [f"{row['ece']['value']:.4f} [{row['ece']['low']:.4f}, {row['ece']['high']:.4f}]" for row in both]
        briers = [f"{row['brier']:.4f}" for row in both]
        rows.append([title, f"{results['tokens']:,}", f"{both[-1]['accuracy']:.4f}", *values, *briers])
        panels.append(overlay(title, {title_of(name): methods[name] for name in pair}))
        warnings.append(_paragraph(few(title, results)))
    figures = [f"{name} {when}" if several else name for name in ("ECE", "Brier") for when in ("before", "after")]
    columns = ["", unit_of(sets[0][1]), "accuracy", *dict.fromkeys(figures)]
    drawing = Drawing("domains", "Reliability before and after", panels)
    return joined([*warnings, table("", columns, rows), _drawing(drawing, f"{identity}-domains")], "\n")


def _part(part: Part, draw: Any) -> Markup:
    tables = [folded(of_table.title, table("", of_table.columns, of_table.rows)) for of_table in part.tables]
    findings = (element("p", line) for line in part.findings)
    return joined([element("h2", part.title), findings, (draw(name) for name in part.figures), tables], "\n")


def _training(document: Document, draw: Any) -> Content:
    """Curves, and what was compared to choose the loss."""
    comparison = document.get("comparison")
    if "training" not in document and comparison is None:
        return None
    parts: list[Content] = [element("h2", "Training"), draw("training")]
    if comparison is not None:
        kept = kept_loss(comparison)
        rows = [
            [each["loss"] + (" (chosen)" if each["loss"] == kept else ""), *(f"{each[key]:.4f}" for key in _COMPARED)]
            for each in comparison["candidates"]
        ]
        columns = ["loss", "NLL", "Brier", "ECE", "debiased calibration error"]
        parts += [element("p", choice_verdict(comparison)), draw("frontier"), table("", columns, rows)]
    return joined(parts, "\n")


_COMPARED = ("nll", "brier", "ece", "calibration_error")


# --- several runs ---


def _several(runs: Sequence[Run]) -> list[Content]:
    lines = [(run.name, verdict(run.document)) for run in runs]
    overlays = []
    for title, place in (("Before", 0), ("After", 1)):
        rows = {run.name: run.document["held_out"]["methods"][pair_of(run.document["held_out"])[place]] for run in runs}
        overlays.append(overlay(title, rows))
    return [
        _header("Calibration report", f"{len(runs)} runs", element("p", ", ".join(run.name for run in runs))),
        *(_paragraph(f"{name}: {line}") for name, line in lines if line),
        element("h2", "All runs, held out"),
        _overview(runs),
        _drawing(Drawing("runs", "Reliability of all runs", overlays), "runs"),
        *(
            folded(run.name, cards(run.document["held_out"]), *_body(run, f"r{number}"), opened=True)
            for number, run in enumerate(runs)
        ),
    ]


def _overview(runs: Sequence[Run]) -> Markup:
    """The main figures of all rows, with the model and the data of their run."""
    keys = ("ece", "nll", "brier", "accuracy", "confidence")
    rows = []
    titles: list[str] = []
    for run in runs:
        told: Mapping[str, Any] = run.document.get("run", {})
        titles, lines = cells_of(run.document["held_out"], keys)
        rows += [[run.name, model_of(told), data_of(told), *cells] for cells in lines]
    return table("", ["run", "model", "data", *titles], rows)


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
