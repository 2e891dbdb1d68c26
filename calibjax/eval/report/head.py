"""The top of a page: what was measured, on what and when, and the main figures before and after."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.eval.report.glossary import term
from calibjax.eval.report.markup import Content, Markup, element
from calibjax.eval.report.rows import figure_of, title_of, unit_of, winner
from calibjax.eval.report.schema import AnySet
from calibjax.eval.report.tables import MINUS, change_of
from calibjax.runtime.version import __version__

BEFORE = ("uncalibrated", "base", "pretrained")
AFTER = ("ats", "fine_tuned", "edited", "lhts", "temperature")


class Origin(NamedTuple):
    """Where the results of a page come from: date and command line, "" where they are not known, and directory."""

    date: str = ""
    command: str = ""
    directory: Path | None = None


def pair_of(results: AnySet | Mapping[str, Any]) -> tuple[str, str]:
    """The names of the rows before and after: of a comparison its winner, else what the run fitted."""
    names = list(results["methods"])
    before = next((name for name in BEFORE if name in names), names[0])
    if "sort" in results:
        return before, winner(results)  # pyright: ignore[reportArgumentType]
    after = next((name for key in AFTER for name in names if name.partition("-")[0] == key), before)
    return before, after


def facts(run: Mapping[str, Any], tokens: int, unit: str, origin: Origin) -> Markup:
    """Model, data, tokens, date, version and command, as a list."""
    command = origin.command or "calibjax " + str(run.get("command", "report"))
    known = {
        "Model": model_of(run),
        "Data": data_of(run),
        unit.capitalize(): f"{tokens:,} held out",
        "Date": origin.date,
        "Version": f"calibjax {__version__}",
        "Command": element("code", command),
    }
    items = (element("div", element("dt", name), element("dd", value)) for name, value in known.items() if value)
    return element("dl", items, class_="facts")


def model_of(run: Mapping[str, Any]) -> str:
    """The short name of the model of a run."""
    made = "small decoder" if run.get("command") == "quickstart" else ""
    return _short(run.get("model")) or made


def data_of(run: Mapping[str, Any]) -> str:
    """The short name of the data of a run."""
    made = "a synthetic language" if run.get("command") == "quickstart" else ""
    keys = ("tasks",) if run.get("tasks") else ("data", "table", "domains", "mmlu")
    given = (_short(run.get(key)) for key in keys)
    return ", ".join(name for name in given if name) or made


def _short(value: Any) -> str:
    """The name of a file or directory without its folders and endings."""
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return re.sub(r"\.(jsonl|json|csv|parquet|txt|npz)(\.gz)?$", "", Path(str(value)).name) if value else ""


def cards(results: AnySet) -> Markup:
    """ECE, NLL and Brier score before and after, large, with the difference and temperature scaling between them."""
    methods: Mapping[str, Any] = results["methods"]
    before, after = pair_of(results)
    keys = [("ece", "ECE"), ("nll", "NLL"), ("brier", "Brier")]
    if figure_of(methods[before], "nll") is None or figure_of(methods[after], "nll") is None:
        keys[1] = ("log_loss", "log loss of correctness")
    made = [_card(methods, key, title, before, after) for key, title in keys]
    count = f"{results['tokens']:,} {unit_of(results)}"
    accuracy = element(
        "p", "Before: ", title_of(before), ". After: ", title_of(after), f". {count}, ", term("accuracy"),
        f" {methods[after]['accuracy']:.4f}", _accuracy_change(methods[before], methods[after]), class_="quiet",
    )  # fmt: skip
    return element("div", element("div", made, class_="cards"), accuracy if before != after else None)


def _accuracy_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    difference = after["accuracy"] - before["accuracy"]
    return ", unchanged." if round(difference, 4) == 0 else f" ({difference:+.4f})."


def _card(methods: Mapping[str, Any], key: str, title: str, before: str, after: str) -> Markup | None:
    old, new = (figure_of(methods[name], key) for name in (before, after))
    if old is None or new is None:
        return None
    steps: list[Content] = [element("span", f"{old:.4f}", class_="old" if before != after else "new")]
    notes: list[Content] = []
    if before != after:
        steps += [element("span", "→", class_="arrow", aria_label="after"), element("span", f"{new:.4f}", class_="new")]
        notes.append(change_of(new - old, key))
        if old > 0:
            notes.append(f" {100 * (new - old) / old:+.0f}%".replace("-", MINUS))
    if key == "ece":
        ece = methods[after]["ece"]
        notes.append(element("span", f"{', ' if notes else ''}95% interval [{ece['low']:.4f}, {ece['high']:.4f}]"))
    middle = next(
        (name for name in ("temperature", "confidence_temperature", "base_temperature") if name in methods), None
    )
    if middle is not None and middle not in (before, after):
        value = figure_of(methods[middle], key)
        notes.append(None if value is None else element("span", f"{title_of(middle)}: {value:.4f}", class_="between"))
    return element(
        "div",
        element("h3", term(title), element("span", " lower is better", class_="quiet")),
        element("p", steps, class_="big"),
        element("p", notes, class_="notes"),
        class_="card",
    )
