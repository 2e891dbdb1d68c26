"""The report as one page that asks nothing of anyone: style, script, figures and data are within it."""

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.figures import figures_of, inline_svg, png, svg
from calibjax.eval.report.heatmap import heatmap_html
from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.rows import cells_of, described, remarks, sets_of, unit_of, verdict

TOKENS = "tokens.json"
"""Beside metrics.json: a `token_sample`, where the run made one."""


class Run(NamedTuple):
    """What a run left: its name, the contents of metrics.json, and those of tokens.json or None."""

    name: str
    document: Mapping[str, Any]
    tokens: Mapping[str, Any] | None = None


def write_report(document: Mapping[str, Any], directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts.

    Args:
        document: the contents of `metrics.json`.
        directory: exists; its tokens.json is read where there is one.
    """
    kept = {"reliability", *(name for part in parts_of(document) for name in part.figures)}
    for name, _, figure in figures_of(document):
        if name in kept:
            (directory / f"{name}.png").write_bytes(png(figure))
    file = directory / TOKENS
    tokens = json.loads(file.read_text()) if file.is_file() else None
    (directory / "report.html").write_text(page([Run("", document, tokens)]), encoding="utf-8")


def save_report(runs: Sequence[Run], directory: Path) -> list[str]:
    """Writes `report.html` of one or several runs, and every figure as PNG and SVG; returns the names of the files."""
    files = {"report.html": page(runs).encode()}
    for number, run in enumerate(runs):
        prefix = f"{number + 1}-" if len(runs) > 1 else ""
        for name, _, figure in figures_of(run.document):
            files[f"{prefix}{name}.png"] = png(figure)
            files[f"{prefix}{name}.svg"] = svg(figure, name).encode()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return list(files)


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of several side by side: all tables first, then what each run has to show."""
    first = runs[0].document
    several = len(runs) > 1
    verdicts = [(run.name, verdict(run.document["held_out"])) for run in runs]
    parts = [_paragraph(f"{name}: {line}" if several else line) for name, line in verdicts if line]
    parts.append("<h1>Calibration report</h1>")
    if several:
        parts.append(_overview(runs))
    sections = [_run(run, f"r{number}", several) for number, run in enumerate(runs)]
    parts.append(f'<div class="runs">{"".join(sections)}</div>' if several else "".join(sections))
    tokens = unit_of(first["held_out"]) == "tokens"
    of, per = ("the top token's probability", "token") if tokens else ("the confidence", "row")
    over = first["held_out"].get("clusters", "windows")
    parts.append(
        f"<p>ECE and MCE compare mean confidence and accuracy in equal-width bins of {of}; intervals are 95%, "
        f"over {over}: that of ECE is of the population's ECE in these bins, others are bootstraps. Debiased ECE: "
        "without the bias of few points a bin. In the diagrams a bar is the accuracy of a bin, a dot its mean "
        f"confidence, a whisker the interval of the accuracy. NLL in nats per {per}; Brier score of the prediction "
        "being right.</p>"
    )
    for run in runs:
        details = html.escape(json.dumps(run.document.get("run", {}), indent=2))
        title = html.escape(f"The run {run.name}".strip())
        parts.append(f"<details><summary>{title}</summary><pre>{details}</pre></details>")
    if any(run.tokens for run in runs):
        parts.append(f"<script>{_resource('page.js')}</script>")
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'  # or a browser asks for one
        f"<title>calibjax report</title><style>{_resource('page.css')}</style></head><body>\n{body}\n</body></html>\n"
    )


def _resource(name: str) -> str:
    return resources.files("calibjax.eval.report").joinpath(name).read_text(encoding="utf-8")


def _paragraph(line: str) -> str:
    warning = " warning" if "WARNING" in line else ""
    return f'<p class="verdict{warning}">{html.escape(line)}</p>'


def _run(run: Run, identity: str, several: bool) -> str:
    parts = [f"<h2>{html.escape(run.name)}</h2>"] if several else []
    figures = {name: (text, figure) for name, text, figure in figures_of(run.document)}
    for part in parts_of(run.document):
        parts.append(f"<h2>{part.title}</h2>")
        parts += [f"<p>{html.escape(line)}</p>" for line in part.findings]
        parts += [_figure(figures, name, identity) for name in part.figures]
        parts += [_table(*table) for table in part.tables]
    for index, (title, results) in enumerate(sets_of(run.document)):
        suffix = f"-{index}" if index else ""
        parts.append(_set(title, results, with_verdict=index > 0))
        parts += [_figure(figures, f"{name}{suffix}", identity) for name in ("reliability", "temperatures")]
        if index == 0 and run.tokens:
            parts.append(heatmap_html(run.tokens, f"{identity}-tokens"))
    return f"<section>{''.join(parts)}</section>"


def _set(title: str, results: Mapping[str, Any], *, with_verdict: bool) -> str:
    parts = [f"<h2>{html.escape(title)}</h2>"]
    if with_verdict and verdict(results):
        parts.append(_paragraph(verdict(results)))
    parts.append(f"<p>{html.escape(described(results))}</p>")
    parts.append(_table("", *cells_of(results)))
    parts += [f"<p>{html.escape(line)}.</p>" for line in remarks(results)]
    for kind, word in (("failed", "Failed"), ("left_out", "Left out")):
        for name, reason in results.get(kind, {}).items():
            parts.append(f"<p>{word}: {html.escape(f'{name}: {reason}')}.</p>")
    return "\n".join(parts)


def _overview(runs: Sequence[Run]) -> str:
    """The rows of all runs' held-out sets in one table, by the columns that the first run has."""
    columns = [cells_of(run.document["held_out"]) for run in runs]
    titles = columns[0][0][1:]
    rows = [
        [f"{run.name}: {cells[0]}", *(dict(zip(own, cells, strict=True)).get(title, "") for title in titles)]
        for run, (own, lines) in zip(runs, columns, strict=True)
        for cells in lines
    ]
    return _table("All runs, held out", ["run and method", *titles], rows)


def _table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    caption = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'  # what scrolls must be reachable by keyboard


def _figure(figures: Mapping[str, tuple[str, Any]], name: str, identity: str) -> str:
    if name not in figures:
        return ""
    text, figure = figures[name]
    return f'<figure class="drawing" tabindex="0">{inline_svg(figure, f"{identity}-{name}", text)}</figure>'
