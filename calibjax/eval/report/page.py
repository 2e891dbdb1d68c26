"""The report as one self-contained page: style, script, figures and data are within it, and no request leaves it."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.figures import figures_of, inline_svg, png, svg
from calibjax.eval.report.heatmap import heatmap_html
from calibjax.eval.report.markup import Content, Markup, element, joined
from calibjax.eval.report.markup import document as html_document
from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.rows import cells_of, described, remarks, sets_of, unit_of
from calibjax.eval.report.schema import AnySet, Document, TokenSample, read_tokens
from calibjax.eval.report.verdicts import set_verdict, verdict
from calibjax.runtime.files import write_file

TOKENS = "tokens.json"
"""Beside metrics.json: a `token_sample`, if the run made one."""


class Run(NamedTuple):
    """The name of a run, the contents of its metrics.json, and those of its tokens.json or None."""

    name: str
    document: Document
    tokens: TokenSample | None = None


def write_report(document: Document, directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts.

    Args:
        document: the contents of `metrics.json`.
        directory: exists; its tokens.json is read if there is one.
    """
    written = {"reliability", *(name for part in parts_of(document) for name in part.figures)}
    for name, _, figure in figures_of(document):
        if name in written:
            write_file(directory / f"{name}.png", png(figure))
    file = directory / TOKENS
    tokens = read_tokens(file) if file.is_file() else None
    write_file(directory / "report.html", page([Run("", document, tokens)]))


def save_report(runs: Sequence[Run], directory: Path) -> list[str]:
    """Writes `report.html` of one or several runs, and every figure as PNG and SVG; returns the names of the files."""
    files = {"report.html": page(runs).encode()}
    for number, run in enumerate(runs):
        prefix = f"{number + 1}-" if len(runs) > 1 else ""
        for name, _, figure in figures_of(run.document):
            files[f"{prefix}{name}.png"] = png(figure)
            files[f"{prefix}{name}.svg"] = svg(figure, name).encode()
    for name, content in files.items():
        write_file(directory / name, content)
    return list(files)


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side: one table of all rows first, then a section for each run."""
    several = len(runs) > 1
    verdicts = [(run.name, verdict(run.document)) for run in runs]
    parts = [_paragraph(f"{name}: {line}" if several else line) for name, line in verdicts if line]
    parts.append(element("h1", "Calibration report"))
    if several:
        parts.append(_overview(runs))
    sections = [_run(run, f"r{number}", several) for number, run in enumerate(runs)]
    parts += [element("div", sections, class_="runs")] if several else sections
    parts.append(element("p", _conventions(runs[0].document["held_out"])))
    for run in runs:
        details = json.dumps(run.document.get("run", {}), indent=2)
        title = f"The run {run.name}".strip()
        parts.append(element("details", element("summary", title), element("pre", details)))
    script = _resource("page.js") if any(run.tokens for run in runs) else None
    return html_document("calibjax report", joined(parts, "\n"), _resource("page.css"), script)


def _conventions(results: AnySet) -> str:
    tokens = unit_of(results) == "tokens"
    of, per = ("the top token's probability", "token") if tokens else ("the confidence", "row")
    over = results.get("clusters", "sequences")
    return (
        f"ECE and MCE compare mean confidence and accuracy in equal-width bins of {of}; intervals are 95%, over "
        f"{over}: that of ECE is of the population's ECE in these bins, others are bootstrap intervals. Debiased ECE: "
        "corrected for the bias of bins with few points. In the diagrams a bar is the accuracy of a bin, a dot its "
        f"mean confidence, a whisker the interval of the accuracy. NLL in nats per {per}; Brier score of the "
        "prediction being correct."
    )


def _resource(name: str) -> str:
    return resources.files("calibjax.eval.report").joinpath(name).read_text(encoding="utf-8")


def _paragraph(line: str) -> Markup:
    return element("p", line, class_="verdict warning" if "WARNING" in line else "verdict")


def _run(run: Run, identity: str, several: bool) -> Markup:
    parts: list[Content] = [element("h2", run.name)] if several else []
    figures = {
        name: (f"{identity}-f{number}", text, figure)
        for number, (name, text, figure) in enumerate(figures_of(run.document))
    }
    for part in parts_of(run.document):
        parts.append(element("h2", part.title))
        parts += [element("p", line) for line in part.findings]
        parts += [_figure(figures, name) for name in part.figures]
        parts += [_table(table.title, table.columns, table.rows) for table in part.tables]
    for index, (title, results) in enumerate(sets_of(run.document)):
        suffix = f"-{index}" if index else ""
        parts.append(_set(title, results, with_verdict=index > 0))
        parts += [_figure(figures, f"{name}{suffix}") for name in ("reliability", "temperatures")]
        if index == 0 and run.tokens:
            parts.append(heatmap_html(run.tokens, f"{identity}-tokens"))
    return element("section", parts)


def _set(title: str, results: AnySet, *, with_verdict: bool) -> Markup:
    parts = [element("h2", title)]
    if with_verdict and set_verdict(results):
        parts.append(_paragraph(set_verdict(results)))
    parts.append(element("p", described(results)))
    parts.append(_table("", *cells_of(results)))
    parts += [element("p", f"{line}.") for line in remarks(results)]
    for kind, word in (("failed", "Failed"), ("left_out", "Left out")):
        for name, reason in results.get(kind, {}).items():
            parts.append(element("p", f"{word}: {name}: {reason}."))
    return joined(parts, "\n")


def _overview(runs: Sequence[Run]) -> Markup:
    """The rows of all held-out sets in one table, with the columns of the first run."""
    columns = [cells_of(run.document["held_out"]) for run in runs]
    titles = columns[0][0][1:]
    rows = [
        [f"{run.name}: {cells[0]}", *(dict(zip(own, cells, strict=True)).get(title, "") for title in titles)]
        for run, (own, lines) in zip(runs, columns, strict=True)
        for cells in lines
    ]
    return _table("All runs, held out", ["run and method", *titles], rows)


def _table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = element("tr", (element("th", title, scope="col") for title in titles))
    body = (element("tr", (element("td", cell) for cell in cells)) for cells in rows)
    title = element("caption", caption) if caption else None
    table = element("table", title, element("thead", head), element("tbody", body))
    return element("div", table, class_="wide", tabindex=0)  # a scrolling region must be reachable by keyboard


def _figure(figures: Mapping[str, tuple[str, str, Any]], name: str) -> Markup | None:
    if name not in figures:
        return None
    identity, text, figure = figures[name]
    return element("figure", inline_svg(figure, identity, text), class_="drawing", tabindex=0)
