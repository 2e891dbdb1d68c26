"""The report as one self-contained page: style, script, figures and data are within it, and no request leaves it."""

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.figures import Drawing, figures_of, overlay, png
from calibjax.eval.report.html import Content, Markup, data_script, element, inline_svg, joined, svg
from calibjax.eval.report.html import document as html_document
from calibjax.eval.report.notes import (
    choice_verdict,
    data_of,
    few,
    kept_loss,
    limitations,
    model_of,
    set_verdict,
    usage,
    verdict,
)
from calibjax.eval.report.schema import Document, read_tokens
from calibjax.eval.report.tables import (
    ABSENT,
    Row,
    binning,
    cells_of,
    counted,
    difference_of,
    failures,
    figure_of,
    interval,
    is_higher,
    is_lower,
    pair_of,
    parts_of,
    remarks,
    sets_of,
    title_of,
    unit_of,
)
from calibjax.runtime.command_line import command_line
from calibjax.runtime.files import write_file
from calibjax.runtime.version import __version__

TOKENS = "tokens.json"
"""Beside metrics.json: a `token_sample`, if the run made one."""
_OPEN_SETS = 3  # sets beside the first that are not folded, at most
LOWER = (
    *("ece", "nll", "brier", "log_loss", "mce", "rmsce", "debiased_ece", "adaptive_ece", "smooth_ece"),
    *("exact_error", "aurc", "excess_aurc", "ks_error", "debiased_l2"),
)
"""Figures of which less is better."""
HIGHER = ("auroc", "accuracy")
_MAIN = ("ece", "nll", "brier", "log_loss", "accuracy", "confidence")
_REST = (
    *("against", "mce", "rmsce", "debiased_ece", "adaptive_ece", "smooth_ece", "exact_error", "auroc", "aurc"),
    *("excess_aurc", "ks_error", "debiased_l2", "changed", "parameters", "fit_seconds"),
)
_MINUS = "\N{MINUS SIGN}"
_FIRST = 6
"""Rows of a set that are shown at once; the others are folded."""


class Run(NamedTuple):
    """The name of a run, the contents of its metrics.json and tokens.json, and its date, command line and directory.

    The last four are None or "" where they are not known.
    """

    name: str
    document: Document
    tokens: dict[str, Any] | None = None
    date: str = ""
    command: str = ""
    directory: Path | None = None


def write_report(document: Document, directory: Path) -> None:
    """Writes `report.html`, `reliability.png` of the held-out set, and as PNG the figures of the run's parts."""
    names = {"reliability", *(name for part in parts_of(document) for name in part.figures)}
    for drawing in figures_of(document):
        if drawing.name in names:
            write_file(directory / f"{drawing.name}.png", png(drawing.figure()))
    file = directory / TOKENS
    tokens = read_tokens(file) if file.is_file() else None
    run = Run("", document, tokens, datetime.date.today().isoformat(), command_line.get(), directory)
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
    """The page of one run, or of several: one table of all rows and their curves first, then each run."""
    first = runs[0]
    parts = _one(first) if len(runs) == 1 else _several(runs)
    parts.append(glossary(first.document["held_out"]))
    for run in runs:
        options = json.dumps(run.document.get("run", {}), indent=2)
        parts.append(folded(f"All options of the run {run.name}".rstrip(), element("pre", options)))
    box = element("div", "", id="definition", role="tooltip", hidden="")
    title = _subject(first) if len(runs) == 1 else f"{len(runs)} runs"
    title = " \N{MIDDLE DOT} ".join(text for text in (title, "calibjax") if text)
    folder = resources.files("calibjax.eval.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    text = html_document(title, element("main", joined(parts, "\n"), box), style, script)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold, has no encoding


# --- one run ---


def _subject(run: Run) -> str:
    """The model and the data, or the directory where neither is known."""
    options = run.document.get("run", {})
    names = " on ".join(name for name in (model_of(options), data_of(options)) if name)
    return names or (run.directory.name if run.directory else "")


def _one(run: Run) -> list[Content]:
    document, held_out = run.document, run.document["held_out"]
    parts: list[Content] = [
        _header("Calibration report", _subject(run), _facts(run)),
        _paragraph(verdict(document)),
        _paragraph(few(sets_of(document)[0][0], held_out)),
        cards(held_out),
        *_body(run, "r0"),
    ]
    if code := usage(document, run.directory):
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
    return element("p", line, class_="verdict warning" if "WARNING" in line else "verdict") if line else None


def _drawing(drawing: Drawing, identity: str) -> Markup:
    """A figure with its panels side by side, or stacked on a narrow page."""
    panels = []
    for number, panel in enumerate(drawing.panels):
        caption = element("figcaption", element("strong", panel.title), " ", element("span", panel.note))
        text = f"{drawing.description}: {panel.title}" if panel.title else drawing.description
        image = inline_svg(panel.figure(), f"{identity}-{number}", text)
        panels.append(element("figure", caption if panel.title else None, image))
    note = element("p", f"{drawing.description}: {drawing.note}", class_="quiet") if drawing.note else None
    return joined([note, element("div", panels, class_="panels")])


# --- top of the page ---


def _facts(run: Run) -> Markup:
    """Model, data, tokens, date, version and command, as a list."""
    options, held_out = run.document.get("run", {}), run.document["held_out"]
    items = {
        "Model": model_of(options),
        "Data": data_of(options),
        unit_of(held_out).capitalize(): f"{held_out['tokens']:,} held out",
        "Date": run.date,
        "Version": f"calibjax {__version__}",
        "Command": element("code", run.command or "calibjax " + str(options.get("command", "report"))),
    }
    listed = (element("div", element("dt", name), element("dd", value)) for name, value in items.items() if value)
    return element("dl", listed, class_="facts")


def cards(results: Row) -> Markup:
    """ECE, NLL and Brier score before and after, large, with the difference and temperature scaling between them."""
    methods = results["methods"]
    before, after = pair_of(results)
    keys = [("ece", "ECE"), ("nll", "NLL"), ("brier", "Brier")]
    if figure_of(methods[before], "nll") is None or figure_of(methods[after], "nll") is None:
        keys[1] = ("log_loss", "log loss of correctness")
    row = element("div", (_card(results, key, title, before, after) for key, title in keys), class_="cards")
    if before == after:
        return element("div", row)
    change = methods[after]["accuracy"] - methods[before]["accuracy"]
    return element(
        "div",
        row,
        element(
            "p",
            f"Before: {title_of(before)}. After: {title_of(after)}. {results['tokens']:,} {unit_of(results)}, ",
            term("accuracy"),
            f" {methods[after]['accuracy']:.4f}{f' ({change:+.4f}).' if round(change, 4) else ', unchanged.'}",
            class_="quiet",
        ),
    )


def _card(results: Row, key: str, title: str, before: str, after: str) -> Markup | None:
    methods = results["methods"]
    old, new = (figure_of(methods[name], key) for name in (before, after))
    if old is None or new is None:
        return None
    steps: list[Content] = [element("span", f"{old:.4f}", class_="old" if before != after else "new")]
    notes: list[Content] = []
    if before != after:
        steps += [element("span", "→", class_="arrow", aria_label="after"), element("span", f"{new:.4f}", class_="new")]
        percent = f" {100 * (new - old) / old:+.0f}%".replace("-", _MINUS) if old > 0 else None
        notes += [change_of(results, after, key), percent]
    if key == "ece":
        ece = methods[after]["ece"]
        notes.append(element("span", f"{', ' if notes else ''}95% interval [{ece['low']:.4f}, {ece['high']:.4f}]"))
    scalings = ("temperature", "confidence_temperature", "base_temperature")
    middle = next((name for name in scalings if name in methods and name not in (before, after)), None)
    value = None if middle is None else figure_of(methods[middle], key)
    if middle is not None and value is not None:
        notes.append(element("span", f"{title_of(middle)}: {value:.4f}", class_="between"))
    return element(
        "div",
        element("h3", term(title), element("span", " lower is better", class_="quiet")),
        element("p", steps, class_="big"),
        element("p", notes, class_="notes"),
        class_="card",
    )


# --- tables ---


def set_tables(results: Row) -> list[Markup]:
    """The main figures of every method; the others folded, and of many methods those behind the first ones."""
    methods = results["methods"]
    names: list[str] = list(methods)
    shown = names
    if len(names) > _FIRST + 2:
        first = {*names[:_FIRST], pair_of(results)[0], results.get("reference")}
        shown = [name for name in names if name in first]
    parts = [_set_table(results, shown, _MAIN)]
    if others := [name for name in names if name not in shown]:
        parts.append(folded(f"{len(others)} further methods", _set_table(results, others, _MAIN)))
    if any(figure_of(row, key) is not None for row in methods.values() for key in _REST):
        parts.append(folded("All figures", _set_table(results, names, _REST)))
    return parts


def _set_table(results: Row, names: Sequence[str], keys: Sequence[str]) -> Markup:
    methods, before = results["methods"], pair_of(results)[0]
    columns = []
    for key in keys:
        (_, *titles), rows = cells_of(results, (key,))
        for place, title in enumerate(titles, 1):
            texts = dict(zip(methods, (row[place] for row in rows), strict=True))
            if any(text not in (ABSENT, "", "inf") for text in texts.values()):
                columns.append((key, title, texts, best_of(methods, key)))
    rows = [
        [
            title_of(name),
            *(
                [number(texts[name], best=name in best), None if name == before else change_of(results, name, key)]
                for key, _, texts, best in columns
            ),
        ]
        for name in names
    ]
    arrows = {title: "↓" if key in LOWER else "↑" if key in HIGHER else "" for key, title, _, _ in columns}
    return table("", ["method", *(title for _, title, _, _ in columns)], rows, arrows)


def best_of(methods: Row, key: str) -> set[str]:
    """The methods with the best figure; none where all are equal, or no direction is better."""
    values = {name: value for name, row in methods.items() if (value := figure_of(row, key)) is not None}
    if key not in (*LOWER, *HIGHER) or len(set(values.values())) < 2:
        return set()
    best = (max if key in HIGHER else min)(values.values())
    return {name for name, value in values.items() if value == best}


def change_of(results: Row, name: str, key: str) -> Markup | None:
    """The difference of a figure from the row before, with its arrow; None where it rounds to 0.

    It is green or red, and called better or worse, where the interval of the difference excludes 0.
    """
    methods = results["methods"]
    value, other = figure_of(methods[name], key), figure_of(methods[pair_of(results)[0]], key)
    if value is None or other is None or key not in (*LOWER, *HIGHER):
        return None
    text = f"{abs(value - other):.4f}"
    if float(text) == 0:
        return None
    against = difference_of(results, name, key)
    arrow, sign = ("▼", _MINUS) if value < other else ("▲", "+")
    if against is None or not (is_lower(against) or is_higher(against)):
        word = "" if against is None else element("span", " (within noise)", class_="unseen")
        return element("span", f"{arrow} {sign}{text}", word, class_="change")
    word = "better" if (value < other) == (key in LOWER) else "worse"
    spoken = element("span", f" ({word})", class_="unseen")
    return element("span", f"{arrow} {sign}{text}", spoken, class_=f"change {word}")


def number(text: str, *, best: bool = False) -> Markup:
    """A figure; its interval in a line of its own, and bold where it is the best of its column."""
    value, _, ends = text.partition(" [")
    shown = element("strong" if best else "span", value, class_="value")
    return element("span", shown, element("small", f"[{ends}") if ends else None, class_="figure")


def table(
    caption: str, titles: Sequence[str], rows: Sequence[Sequence[Content]], arrows: Mapping[str, str] | None = None
) -> Markup:
    """A table; in a container that is too narrow for its columns each row is a card, with its titles.

    The first cell of a row is its name; `arrows`: title -> "↓" or "↑", the direction that is better.
    """
    plain = [title.replace(" [95% interval]", "") for title in titles]
    head = (
        element("th", term(title), f" {arrow}" if arrow else None, scope="col", role="columnheader")
        for title, arrow in ((title, (arrows or {}).get(full)) for full, title in zip(titles, plain, strict=True))
    )
    body = []
    for name, *cells in rows:
        made = [element("th", name, scope="row", role="rowheader")]
        for title, content in zip(plain[1:], cells, strict=True):
            if isinstance(content, str) and not isinstance(content, Markup) and re.search(r"\d \[.*\]", content):
                content = number(content)
            made.append(element("td", element("div", content), role="cell", data_label=title))
        body.append(element("tr", made, role="row"))
    size = 1 + sum(len(titles) > columns for columns in (3, 5, 8, 10))
    return element(
        "div",
        element(
            "table",
            element("caption", caption) if caption else None,
            element("thead", element("tr", head, role="row"), role="rowgroup"),
            element("tbody", body, role="rowgroup"),
            role="table",
            class_=f"w{size}",
        ),
        class_="table",
    )


def folded(title: Content, *content: Content, opened: bool = False) -> Markup:
    """Content behind a title."""
    return element("details", element("summary", title), content, open="" if opened else None)


# --- definitions ---

_DEFINITIONS = {
    "ECE": "Expected calibration error: the distance between mean confidence and accuracy in bins of confidence, "
    "averaged over predictions. 0 is calibrated. Interval: 95%, of the population's ECE in these bins.",
    "NLL": "Negative log-likelihood of what was observed, in nats per prediction; a proper score: lower is better, and "
    "no recalibration can cheat it.",
    "Brier": "Brier score: the mean of (confidence minus correctness) squared; a proper score.",
    "log loss of correctness": "Negative log-likelihood of the prediction being correct or not, in nats.",
    "accuracy": "Fraction of predictions that are correct. A temperature does not change it.",
    "confidence": "Mean probability that the model gives to its prediction. Above the accuracy: overconfident.",
    "MCE": "Maximum calibration error: the largest distance between confidence and accuracy of a bin.",
    "RMSCE": "Root of the mean squared distance between confidence and accuracy over bins.",
    "debiased ECE": "ECE corrected for the bias of bins with few points.",
    "adaptive ECE": "ECE in bins of equal numbers of points.",
    "smooth ECE": "Calibration error without bins: the residual smoothed by a kernel (Błasiok and Nakkiran 2024).",
    "AUROC": "Probability that a correct prediction has a higher confidence than a wrong one.",
    "AURC": "Area under the risk-coverage curve: mean error rate over all coverages.",
    "excess AURC": "AURC above that of a perfect ranking.",
    "KS error": "Kolmogorov-Smirnov calibration error, without bins.",
    "exact error": "Mean distance between the confidence and the known probability of the synthetic language.",
    "difference": "Difference from the first row; green is better and red is worse, where its 95% interval excludes "
    "0. Without colour it is within the noise, or was not tested.",
    "Δ ECE against temperature scaling": "Paired difference in ECE with its 95% interval.",
    "distinct-2": "Fraction of pairs of words that are different: higher is more varied.",
}


def term(title: str) -> Markup:
    """The title, with its definition on hover, focus and tap where there is one."""
    if title not in _DEFINITIONS:
        return element("span", title)
    return element("span", title, class_="term", tabindex=0, aria_describedby=_id(title))


def glossary(results: Row) -> Markup:
    """All definitions and the conventions of a set, as a list."""
    entries = [(element("dt", name), element("dd", text, id=_id(name))) for name, text in _DEFINITIONS.items()]
    conventions = element("p", _conventions(results))
    return element("section", element("h2", "Definitions"), conventions, element("dl", entries, class_="glossary"))


def _id(key: str) -> str:
    return "d-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in key)


def _conventions(results: Row) -> str:
    ece = next(iter(results["methods"].values()))["ece"]
    confidence = "the top probability of a token" if unit_of(results) == "tokens" else "the confidence"
    return (
        f"ECE and MCE: {ece['bins']} equal-width bins {binning(ece['closed'])} of {confidence}. Intervals are 95%, "
        f"over {results.get('clusters', 'sequences')}. In a reliability diagram a point is the accuracy of a bin at "
        "its mean confidence, with its interval; the curve is a kernel regression with its 95% band; the strip below "
        "is the density of the confidences. Below the diagonal: overconfident."
    )


# --- text coloured by confidence ---

STEPS = 10
"""Colours of the scale; `page.css` has as many, light and dark."""


def heatmap_html(sample: Mapping[str, Any], name: str) -> Markup:
    """The section of the `token_sample` of one run, by a name for ids that is unique on the page."""
    tokens = [token for sequence in sample["windows"] for token in sequence]
    detail = [{key: token[key] for key in token if key != "scored"} if token["scored"] else None for token in tokens]
    scale = (element("span", f"{100 * step // STEPS}%", class_=f"k{step}") for step in range(STEPS))
    toggle = [
        element("button", text, type="button", data_side=side, aria_pressed="false" if side else "true")
        for side, text in enumerate(("Base model", "After calibration"))
    ]
    pairs, number = [], 0
    for place, sequence in enumerate(sample["windows"]):
        sides = (
            element("figure", element("figcaption", title), _text(sequence, side, number), class_=f"tokens side{side}")
            for side, title in enumerate(("Base model", "After calibration"))
        )
        heading = element("h4", f"Sample {place + 1}") if len(sample["windows"]) > 1 else None
        pairs.append(element("div", heading, element("div", sides, class_="sides")))
        number += len(sequence)
    return element(
        "section",
        element("h3", "Held-out text, token by token"),
        element(
            "p",
            "The colour of a token is the model's confidence in its most likely token at that position. ",
            element("span", "Underlined", class_="wrong"),
            ": the most likely token was a different one; ",
            element("span", "with a bar", class_="wrong bold"),
            ": with a confidence above one half. Tokens that are not predicted have no colour. Point at a token, tap "
            "it, or move with Tab and the arrow keys.",
        ),
        element("p", "confidence ", scale, class_="scale", aria_hidden="true"),
        element("div", toggle, class_="toggle"),
        element("div", element("p", "Choose a token."), class_="detail", aria_live="polite"),
        pairs,
        data_script(detail),
        class_="heatmap",
        id=name,
    )


def _text(sequence: Sequence[Row], side: int, number: int) -> Markup:
    """A text whose first token has the given number."""
    parts: list[Content] = []
    stop = 0  # one tab stop in each text; the script moves it with the arrow keys
    for place, token in enumerate(sequence):
        text = token["text"].replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}") or "\N{EMPTY SET}"
        if token.get("start"):
            parts.append(element("span", "next example", class_="boundary") if place else None)
            parts.append(element("span", text) if token["text"] else None)
        elif token["scored"]:
            confidence = token["confidence"][side] if "confidence" in token else math.nan
            names = ["t"]
            if math.isfinite(confidence):
                names.append(f"k{min(max(int(confidence * STEPS), 0), STEPS - 1)}")
            if not token.get("right"):
                names += ["wrong", "bold"] if confidence > 0.5 else ["wrong"]
            parts.append(element("span", text, class_=" ".join(names), data_i=number + place, tabindex=stop))
            stop = -1
        else:
            parts.append(element("span", text))
        if "\n" in token["text"]:
            parts.append(element("br"))
    return element("p", parts)
