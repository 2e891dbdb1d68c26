"""Tables of a page: the best of each column in bold, differences from the first row, cards where there is no room."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from calibjax.eval.report.glossary import term
from calibjax.eval.report.markup import Content, Markup, element
from calibjax.eval.report.rows import ABSENT, cells_of, figure_of, title_of
from calibjax.eval.report.schema import AnySet

LOWER = (
    *("ece", "nll", "brier", "log_loss", "mce", "rmsce", "debiased_ece", "adaptive_ece", "smooth_ece"),
    *("exact_error", "aurc", "excess_aurc", "ks_error", "debiased_l2"),
)
"""Figures of which less is better."""
HIGHER = ("auroc", "accuracy")
_MAIN = ("ece", "nll", "brier", "log_loss", "accuracy", "confidence")
_REST = (
    *(
        "against",
        "mce",
        "rmsce",
        "debiased_ece",
        "adaptive_ece",
        "smooth_ece",
        "exact_error",
        "auroc",
        "aurc",
        "excess_aurc",
    ),
    *("ks_error", "debiased_l2", "changed", "parameters", "fit_seconds"),
)
MINUS = "\N{MINUS SIGN}"
_FIRST = 6
"""Rows of a set that are shown at once; the others are folded."""


def set_tables(results: AnySet) -> list[Markup]:
    """The main figures of every method; the others folded, and of many methods those behind the first ones."""
    methods: Mapping[str, Any] = results["methods"]
    names = list(methods)
    base = next((name for name in ("uncalibrated", "base", "pretrained") if name in methods), names[0])
    shown = names
    if len(names) > _FIRST + 2:
        kept = {*names[:_FIRST], base, results.get("reference")}
        shown = [name for name in names if name in kept]
    parts = [_set_table(results, shown, _MAIN, base)]
    if len(shown) < len(names):
        others = [name for name in names if name not in shown]
        table = _set_table(results, others, _MAIN, base)
        parts.append(folded(f"{len(others)} further methods", table))
    if any(figure_of(row, key) is not None for row in methods.values() for key in _REST):
        parts.append(folded("All figures", _set_table(results, names, _REST, base)))
    return parts


def _set_table(results: AnySet, names: Sequence[str], keys: Sequence[str], base: str) -> Markup:
    methods: Mapping[str, Any] = results["methods"]
    columns = []
    for key in keys:
        titles, rows = cells_of(results, (key,))
        if any(row[1] not in (ABSENT, "", "inf") for row in rows if len(titles) > 1):
            texts = dict(zip(methods, (row[1] for row in rows), strict=True))
            columns.append((key, titles[1], texts, best_of(methods, key)))
    head = ["method", *(title for _, title, _, _ in columns)]
    body = []
    for name in names:
        cells: list[Content] = [title_of(name)]
        for key, _, texts, best in columns:
            mine, first = figure_of(methods[name], key), figure_of(methods[base], key)
            change = None
            if name != base and mine is not None and first is not None and key in (*LOWER, *HIGHER):
                change = change_of(mine - first, key)
            cells.append([number(texts[name], best=name in best), change])
        body.append(cells)
    arrows = {title: "↓" if key in LOWER else "↑" if key in HIGHER else "" for key, title, _, _ in columns}
    return table("", head, body, arrows)


def best_of(methods: Mapping[str, Any], key: str) -> set[str]:
    """The methods with the best figure; none where all are equal, or no direction is better."""
    values = {name: value for name, row in methods.items() if (value := figure_of(row, key)) is not None}
    if key not in (*LOWER, *HIGHER) or len(set(values.values())) < 2:
        return set()
    best = (max if key in HIGHER else min)(values.values())
    return {name for name, value in values.items() if value == best}


def change_of(difference: float, key: str) -> Markup | None:
    """A difference with its arrow; None where it rounds to 0."""
    text = f"{abs(difference):.4f}"
    if float(text) == 0:
        return None
    better = (difference < 0) == (key in LOWER)
    arrow, sign = ("▼", MINUS) if difference < 0 else ("▲", "+")
    word = "better" if better else "worse"
    return element(
        "span", f"{arrow} {sign}{text}", element("span", f" ({word})", class_="unseen"), class_=f"change {word}"
    )


def number(text: str, *, best: bool = False) -> Markup:
    """A figure; its interval in a line of its own, and bold where it is the best of its column."""
    value, _, interval = text.partition(" [")
    shown = element("strong" if best else "span", value, class_="value")
    return element("span", shown, element("small", f"[{interval}") if interval else None, class_="figure")


def table(
    caption: str, titles: Sequence[str], rows: Sequence[Sequence[Content]], arrows: Mapping[str, str] | None = None
) -> Markup:
    """A table; in a container that is too narrow for its columns each row is a card, with its titles."""
    arrows = arrows or {}
    shown = [re.sub(r" \[95% interval\]", "", title) for title in titles]
    head = element(
        "tr",
        (
            element(
                "th", term(title), f" {arrows[full]}" if arrows.get(full) else None, scope="col", role="columnheader"
            )
            for full, title in zip(titles, shown, strict=True)
        ),
        role="row",
    )
    body = (
        element(
            "tr",
            (
                element("td", element("div", content), role="cell", data_label=title)
                if index
                else element("th", content, scope="row", role="rowheader")
                for index, (title, content) in enumerate(zip(shown, map(_cell, cells), strict=True))
            ),
            role="row",
        )
        for cells in rows
    )
    size = 1 + sum(len(titles) > columns for columns in (3, 5, 8, 10))
    made = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head, role="rowgroup"),
        element("tbody", body, role="rowgroup"),
        role="table",
        class_=f"w{size}",
    )
    return element("div", made, class_="table")


def _cell(content: Content) -> Content:
    if isinstance(content, str) and not isinstance(content, Markup) and re.search(r"\d \[.*\]", content):
        return number(content)
    return content


def folded(title: Content, *content: Content, opened: bool = False) -> Markup:
    """Content behind a title."""
    return element("details", element("summary", title), content, open="" if opened else None)
