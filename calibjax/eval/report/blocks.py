"""The blocks of a page: facts, cards, tables, definitions, and text coloured by confidence."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.html import Content, Markup, data_script, element
from calibjax.eval.report.notes import data_of, model_of
from calibjax.eval.report.tables import (
    ABSENT,
    Row,
    binning,
    cells_of,
    difference_of,
    figure_of,
    is_higher,
    is_lower,
    pair_of,
    title_of,
    unit_of,
)
from calibjax.runtime.version import __version__

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


# --- top of the page ---


class Origin(NamedTuple):
    """Where the results of a page come from: date and command line, "" where they are not known, and directory."""

    date: str = ""
    command: str = ""
    directory: Path | None = None


def facts(run: Row, tokens: int, unit: str, origin: Origin) -> Markup:
    """Model, data, tokens, date, version and command, as a list."""
    command = origin.command or "calibjax " + str(run.get("command", "report"))
    items = {
        "Model": model_of(run),
        "Data": data_of(run),
        unit.capitalize(): f"{tokens:,} held out",
        "Date": origin.date,
        "Version": f"calibjax {__version__}",
        "Command": element("code", command),
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

    Args:
        caption: above the table; "" for none.
        titles: of the columns.
        rows: cells of each row, the first its name.
        arrows: title -> "↓" or "↑", the direction that is better.
    """
    plain = [title.replace(" [95% interval]", "") for title in titles]
    head = (
        element("th", term(title), f" {arrow}" if arrow else None, scope="col", role="columnheader")
        for title, arrow in ((title, (arrows or {}).get(full)) for full, title in zip(titles, plain, strict=True))
    )
    body = []
    for name, *cells in rows:
        made = [element("th", name, scope="row", role="rowheader")]
        for title, content in zip(plain[1:], map(_cell, cells), strict=True):
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


def _cell(content: Content) -> Content:
    if isinstance(content, str) and not isinstance(content, Markup) and re.search(r"\d \[.*\]", content):
        return number(content)
    return content


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
    """The section of one run.

    Args:
        sample: from `token_sample`.
        name: of the run, unique on the page, for ids; letters, digits and hyphens.

    Returns:
        An element.
    """
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
        text = _visible(token["text"])
        if token.get("start"):
            parts.append(element("span", "next example", class_="boundary") if place else None)
            parts.append(element("span", text) if token["text"] else None)
        elif token["scored"]:
            parts.append(element("span", text, class_=_class(token, side), data_i=number + place, tabindex=stop))
            stop = -1
        else:
            parts.append(element("span", text))
        if "\n" in token["text"]:
            parts.append(element("br"))
    return element("p", parts)


def _class(token: Row, side: int) -> str:
    """The token's colour class, none if its confidence is not finite, and whether it was wrong."""
    confidence = token["confidence"][side] if "confidence" in token else math.nan
    step = []
    if math.isfinite(confidence):
        step.append(f"k{min(max(int(confidence * STEPS), 0), STEPS - 1)}")
    wrong = [] if token.get("right") else ["wrong", *(["bold"] if confidence > 0.5 else [])]
    return " ".join(["t", *step, *wrong])


def _visible(text: str) -> str:
    """The text with line breaks and the empty text as symbols."""
    return text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}") or "\N{EMPTY SET}"
