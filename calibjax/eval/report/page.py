"""The report as one self-contained page: `page.html` with page.css and page.js; no request leaves it.

The template escapes every value that it fills in. Only this module builds `Markup`, and it escapes a run's data first.
"""

import base64
import datetime
import functools
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup

from calibjax.eval.report import notes, tables
from calibjax.eval.report.command_tables import parts_of
from calibjax.eval.report.figures import Drawing, figures_of, overlay, png
from calibjax.eval.report.schema import Document, read_tokens
from calibjax.eval.report.tables import ABSENT, Row, differs, figure_of, interval, pair_of, title_of
from calibjax.runtime.files import write_file
from calibjax.runtime.options import command_line
from calibjax.runtime.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ARROWS = {"lower": "↓", "higher": "↑", "": ""}
_MAIN_FIGURES = ("ece", "nll", "brier", "log_loss", "accuracy", "confidence")
_OTHER_FIGURES = tuple(dict.fromkeys(column.key for column in tables.COLUMNS if column.key not in _MAIN_FIGURES))
_BETTER_DIRECTION = {column.key: column.better for column in tables.COLUMNS if column.better}
_MINUS = "\N{MINUS SIGN}"
_SHOWN_ROWS = 6  # rows of a set that are shown at once; the others are folded


class Run(NamedTuple):
    """The name of a run, the contents of its metrics.json and tokens.json, its date, command line and directory."""

    name: str
    document: Document
    tokens: dict[str, Any] | None = None
    date: str = ""
    command: str = ""
    directory: Path | None = None


def write_report(document: Document, directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts."""
    names = {"reliability"}.union(*(part.figures for part in parts_of(document)))
    for drawing in figures_of(document):
        if drawing.name in names:
            write_file(directory / f"{drawing.name}.png", png(drawing.figure()))
    run = Run("", document, read_tokens(directory), datetime.date.today().isoformat(), command_line.get(), directory)
    write_file(directory / "report.html", page([run]))


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
    """The page of one run, or of several: one table of all rows and their curves first, then each run.

    Its content security policy names style and script by their hashes: nothing else is loaded, and nothing else runs.
    """
    template, style, script = _files()
    allowed = f"img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    values = {"runs": runs, "policy": policy, "style": Markup(style), "script": Markup(script)}
    try:
        text = template.render({**_GLOBALS, **values})
    except jinja2.UndefinedError as error:
        raise LookupError(str(error)) from error
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold, has no encoding


@functools.cache
def _files() -> tuple[jinja2.Template, str, str]:
    folder = resources.files("calibjax.eval.report")
    html, style, script = (folder.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(autoescape=True, **options).from_string(html), style, script


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- the sections of a run ---


def subject(run: Run) -> str:
    """The model and the data, or the directory where neither is known."""
    options = run.document.get("run", {})
    names = " on ".join(name for name in (notes.model_of(options), notes.data_of(options)) if name)
    return names or (run.directory.name if run.directory else "")


def heading(title: str, results: Row) -> str:
    shown = {"held out": "Held out", "all tasks": "All tasks"}.get(title, title)
    return f"{shown}: {tables.counted(results)}"


def facts_of(run: Run) -> dict[str, str]:
    options, held_out = run.document.get("run", {}), run.document["held_out"]
    return {
        "Model": notes.model_of(options),
        "Data": notes.data_of(options),
        tables.unit_of(held_out).capitalize(): f"{held_out['tokens']:,} held out",
        "Date": run.date,
        "Version": f"calibjax {__version__}",
        "Command": run.command or "calibjax " + str(options.get("command", "report")),
    }


class Change(NamedTuple):
    """A difference from the row before: its arrow and digits, "better", "worse" or "", and words for screen readers."""

    text: str
    verdict: str
    spoken: str


def change_of(results: Row, name: str, key: str) -> Change | None:
    """The difference of a figure from the row before, with its arrow; None where it rounds to 0.

    It is green or red, and called better or worse, where the interval of the difference excludes 0.
    """
    methods, before = results["methods"], pair_of(results)[0]
    value, other = figure_of(methods[name], key), figure_of(methods[before], key)
    if value is None or other is None or key not in _BETTER_DIRECTION:
        return None
    digits = f"{abs(value - other):.4f}"
    if float(digits) == 0:
        return None
    text = f"▼ {_MINUS}{digits}" if value < other else f"▲ +{digits}"
    row = methods[name]
    against = row.get("against_uncalibrated", {}).get(key)
    if against is None and before == results.get("reference"):
        against = row.get("against", {}).get(key)
    if against is None:
        return Change(text, "", "")
    if not differs(against):
        return Change(text, "", "within noise")
    word = "better" if (value < other) == (_BETTER_DIRECTION[key] == "lower") else "worse"
    return Change(text, word, word)


def cards_of(results: Row) -> Iterator[dict[str, Any]]:
    """ECE, NLL (or log loss of correctness) and Brier score before and after, where a set has them."""
    methods = results["methods"]
    before, after = pair_of(results)
    keys = [("ece", "ECE"), ("nll", "NLL"), ("brier", "Brier")]
    if figure_of(methods[before], "nll") is None or figure_of(methods[after], "nll") is None:
        keys[1] = ("log_loss", "log loss of correctness")
    scalings = ("temperature", "confidence_temperature", "base_temperature")
    scaling = next((name for name in scalings if name in methods and name not in (before, after)), None)
    for key, title in keys:
        old, new = figure_of(methods[before], key), figure_of(methods[after], key)
        if old is None or new is None:
            continue
        card = {"title": title, "old": "", "new": f"{new:.4f}", "change": None, "scaled": ""}
        noted = []
        if before != after:
            card |= {"old": f"{old:.4f}", "change": change_of(results, after, key)}
            if old > 0:
                noted.append(f"{100 * (new - old) / old:+.1f}%".replace("-", _MINUS))
        if key == "ece":
            ece = methods[after]["ece"]
            noted.append(f"95% interval of {new:.4f}: [{ece['low']:.4f}, {ece['high']:.4f}]")
        scaled = figure_of(methods[scaling], key) if scaling else None
        if scaling and scaled is not None:
            card["scaled"] = f"{title_of(scaling)}: {scaled:.4f}"
        yield card | {"note": ", ".join(noted)}


class Cell(NamedTuple):
    """A figure, its interval, whether it is the best of its column, and its difference from the row before."""

    value: str
    ends: str = ""
    best: bool = False
    change: Change | None = None


def cell_of(text: str | Cell) -> str | Cell:
    """The cell of a figure with an interval, whose ends stand in a line of their own; anything else is unchanged."""
    if isinstance(text, str) and re.search(r"\d \[.*\]", text):
        return _split_interval(text)
    return text


def _split_interval(text: str, **fields: Any) -> Cell:
    value, _, ends = text.partition(" [")
    return Cell(value, f"[{ends}" if ends else "", **fields)


def set_tables(results: Row) -> list[dict[str, Any]]:
    """The main figures of every method; other figures are folded, as are the methods after the first of many."""
    methods = results["methods"]
    names: list[str] = list(methods)
    shown = names
    if len(names) > _SHOWN_ROWS + 2:
        first = {*names[:_SHOWN_ROWS], pair_of(results)[0], results.get("reference")}
        shown = [name for name in names if name in first]
    others = [name for name in names if name not in shown]
    parts = [_set_table("", results, shown, _MAIN_FIGURES)]
    if others:
        parts.append(_set_table(f"{len(others)} further methods", results, others, _MAIN_FIGURES))
    if any(figure_of(row, key) is not None for row in methods.values() for key in _OTHER_FIGURES):
        parts.append(_set_table("All figures", results, names, _OTHER_FIGURES))
    return parts


def _set_table(title: str, results: Row, names: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    methods, before = results["methods"], pair_of(results)[0]
    columns, arrows = ["method"], {}
    rows: dict[str, list[Any]] = {name: [title_of(name)] for name in names}
    shown = _columns([results], keys)
    shown.sort(key=lambda column: keys.index(column.key))
    for column in shown:
        texts = {name: column.text(row) for name, row in methods.items()}
        if set(texts.values()) <= {ABSENT, "inf"}:
            continue
        columns.append(column.title)
        arrows[column.title] = _ARROWS[column.better]
        best = best_of(methods, column.key)
        for name in names:
            change = None if name == before else change_of(results, name, column.key)
            rows[name].append(_split_interval(texts[name], best=name in best, change=change))
    return {"title": title, "columns": columns, "rows": list(rows.values()), "arrows": arrows}


def best_of(methods: Row, key: str) -> set[str]:
    """The methods with the best figure; none where all are equal, or no direction is better."""
    if key not in _BETTER_DIRECTION:
        return set()
    values = {name: figure_of(row, key) for name, row in methods.items()}
    known = {value for value in values.values() if value is not None}
    if len(known) < 2:
        return set()
    best = max(known) if _BETTER_DIRECTION[key] == "higher" else min(known)
    return {name for name, value in values.items() if value == best}


def _columns(sets: Sequence[Row], keys: Sequence[str]) -> list[tables.Column]:
    return [column for column in tables.columns_of(sets) if column.key in keys]


def domains_of(sets: Sequence[tuple[str, Row]]) -> dict[str, Any]:
    """Before and after on every further set: one table, and a diagram each."""
    columns = ["", tables.unit_of(sets[0][1]), "accuracy", "ECE", "Brier"]
    several = any(len(set(pair_of(results))) > 1 for _, results in sets)
    if several:
        columns[3:] = ["ECE before", "ECE after", "Brier before", "Brier after"]
    rows, panels = [], []
    for title, results in sets:
        methods, pair = results["methods"], pair_of(results)
        both = [methods[name] for name in (pair if several else pair[:1])]
        eces = [interval(row["ece"], leading_zero=True) for row in both]
        briers = [f"{row['brier']:.4f}" for row in both]
        accuracy = f"{both[-1]['accuracy']:.4f}"
        rows.append([title, f"{results['tokens']:,}", accuracy, *eces, *briers])
        panels.append(overlay(title, {title_of(name): methods[name] for name in pair}))
    return {"columns": columns, "rows": rows, "drawing": Drawing("domains", "Reliability before and after", panels)}


def candidates_of(comparison: Row) -> list[list[str]]:
    """What was compared to choose the head and its loss."""
    rows = []
    for candidate in comparison["candidates"]:
        name = candidate["candidate"]
        chosen = " (chosen)" if name == notes.final_candidate(comparison) else ""
        figures = [candidate[key] for key in ("nll", "brier", "ece", "calibration_error")]
        rows.append([name + chosen, *(f"{figure:.4f}" for figure in figures)])
    return rows


def comparison_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Several runs in one table of the main figures and one diagram of their curves."""
    befores, afters, rows = {}, {}, []
    shown = _columns([run.document["held_out"] for run in runs], ("ece", "nll", "brier", "accuracy", "confidence"))
    for run in runs:
        options, held_out = run.document.get("run", {}), run.document["held_out"]
        methods, (before, after) = held_out["methods"], pair_of(held_out)
        befores[run.name] = methods[before]
        if after != before:
            afters[run.name] = methods[after]
        origin = [run.name, notes.model_of(options), notes.data_of(options)]
        for name, row in methods.items():
            rows.append([*origin, title_of(name), *(column.text(row) for column in shown)])
    panels = [overlay(title, methods) for title, methods in (("Before", befores), ("After", afters)) if methods]
    drawing = Drawing("runs", "Reliability of all runs", panels)
    columns = ["run", "model", "data", "method", *(column.title for column in shown)]
    return {"columns": columns, "rows": rows, "drawing": drawing}


def conventions_of(runs: Sequence[Run]) -> list[str]:
    """The conventions of the figures, after the names of the runs that have them where they differ."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(notes.conventions(run.document["held_out"]), []).append(run.name)
    if len(names) == 1:
        return list(names)
    return [f"{', '.join(run_names)}: {line}" for line, run_names in names.items()]


# --- text coloured by confidence ---


class Span(NamedTuple):
    """A piece of text, its class, number and tab index of the token if it is a predicted one; whether its line ends."""

    text: str
    kind: str = ""
    number: int | None = None
    tab: int = 0
    ends: bool = False


def token_data(sample: Mapping[str, Any]) -> Markup:
    """The tokens of a `token_sample` as JSON that cannot end a script element; null if not predicted, or for NaN."""
    detail = []
    for token in itertools.chain.from_iterable(sample["sequences"]):
        figures = {key: value for key, value in token.items() if key != "scored"}
        detail.append(figures if token["scored"] else None)
    without_nan = json.loads(json.dumps(detail), parse_constant=lambda _: None)
    return Markup(json.dumps(without_nan).translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"}))


def colours_of(sample: Mapping[str, Any]) -> Iterator[tuple[list[Span], list[Span]]]:
    """Every sequence of a `token_sample`, before and after; tokens are numbered through."""
    number = 0
    for sequence in sample["sequences"]:
        yield _spans(sequence, 0, number), _spans(sequence, 1, number)
        number += len(sequence)


def _spans(sequence: Sequence[Row], side: int, first: int) -> list[Span]:
    spans = []
    tab = 0  # one tab stop in each text; the script moves it with the arrow keys
    for number, token in enumerate(sequence, first):
        text = token["text"].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}") or "\N{EMPTY SET}"
        ends = "\n" in token["text"]
        if token.get("start"):
            if number > first:
                spans.append(Span("next example", "boundary"))
            if token["text"]:
                spans.append(Span(text, ends=ends))
        elif token["scored"]:
            confidence = token["confidence"][side]
            kind = "t"
            if math.isfinite(confidence):
                kind += f" k{min(max(int(confidence * 10), 0), 9)}"
            if not token["right"]:
                kind += " wrong bold" if confidence > 0.5 else " wrong"
            spans.append(Span(text, kind, number, tab, ends))
            tab = -1
        else:
            spans.append(Span(text, ends=ends))
    return spans


def svg(figure: "Figure", name: str) -> str:
    """A complete SVG document with its text as text; `name` seeds its ids, so that equal figures are equal files."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    not_xml = "[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]"
    return re.sub(not_xml, "\N{REPLACEMENT CHARACTER}", buffer.getvalue().decode())


def image_of(figure: "Figure") -> str:
    """The address of a drawing for the page: an image, in which no script runs and which loads nothing."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(figure, 'calibjax').encode()).decode()}"


_FUNCTIONS = (subject, heading, facts_of, cards_of, set_tables, cell_of, domains_of, candidates_of, comparison_of)
_FUNCTIONS += (conventions_of, token_data, colours_of, image_of, figures_of, pair_of, parts_of, title_of)
_GLOBALS = {"json": json, "notes": notes, "tables": tables, **{function.__name__: function for function in _FUNCTIONS}}
