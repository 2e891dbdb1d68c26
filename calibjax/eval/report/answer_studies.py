"""The studies of confidence in answers: the table of `study confidence`, and the first line of each."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from calibjax.eval.report.rows import ABSENT, TextTable, counted, is_higher, is_lower, short, signed
from calibjax.eval.report.schema import TasksDocument

_COLUMNS = ["confidence", "ECE, TS", "ECE, ATS", "ECE, ATS \N{MINUS SIGN} TS", "Brier, ATS \N{MINUS SIGN} TS"]
_FURTHER = ["ECE, uncalibrated", "AUROC, TS", "AUROC, ATS"]


def is_confidence(document: TasksDocument) -> bool:
    """Whether a document is that of `study confidence`."""
    return document.get("run", {}).get("command") == "study confidence"


def confidence_table(document: TasksDocument) -> TextTable:
    """A row for each task and confidence: ECE with temperature scaling (TS) and with ATS, and paired differences."""
    sets: dict[str, Mapping[str, Any]] = {_title(document): document["held_out"], **document["tasks"]}
    rows, groups = [], []
    for title, results in sets.items():
        task, _, confidence = title.rpartition(", ")
        base, scaled, ats = (results["methods"][name] for name in ("uncalibrated", "temperature", "ats"))
        against = ats["against"]
        eces = (short(row["ece"]["value"], ".3f") for row in (scaled, ats))
        aurocs = (ABSENT if row["auroc"] is None else short(row["auroc"], ".3f") for row in (scaled, ats))
        differences = (signed(against[key], ".3f") for key in ("ece", "brier"))
        rows.append([confidence, *eces, *differences, short(base["ece"]["value"], ".3f"), *aurocs])
        groups.append(f"{task}, {counted(results)}")
    return TextTable("", [*_COLUMNS, *_FURTHER], rows, (3, 4, 1, 2), groups=tuple(groups))


def _title(document: TasksDocument) -> str:
    """The task, or all tasks, and the confidence of the first set."""
    return document["held_out"].get("title", "")


def study_verdict(document: TasksDocument) -> str:
    """The first line of a study of answers; "" for a document of `eval tasks`."""
    by_command: dict[str, Callable[[TasksDocument], str]] = {
        "study confidence": _confidence_verdict,
        "study samples": _samples_verdict,
    }
    command = document.get("run", {}).get("command", "")
    return by_command[command](document) if command in by_command else ""


def _confidence_verdict(document: TasksDocument) -> str:
    against = cast(Any, document["held_out"]["methods"]["ats"])["against"]["ece"]
    figures = f"{_title(document)}: difference in ECE {signed(against)}"
    if is_lower(against):
        line = f"ATS is better calibrated than temperature scaling ({figures})"
    elif is_higher(against):
        line = f"WARNING: ATS is worse calibrated than temperature scaling ({figures})"
    else:
        line = f"ATS and temperature scaling do not differ beyond noise ({figures})"
    sets: list[Mapping[str, Any]] = list(document["tasks"].values())
    rows = [results["methods"]["ats"]["against"] for results in sets]
    counts = {key: [sum(test(row[key]) for row in rows) for test in (is_lower, is_higher)] for key in ("ece", "brier")}
    return (
        f"{line}. Of {len(rows)} pairs of task and confidence, ATS is significantly better in {counts['ece'][0]} and "
        f"worse in {counts['ece'][1]} by ECE, and in {counts['brier'][0]} and {counts['brier'][1]} by Brier score, "
        "not corrected for their number."
    )


def _samples_verdict(document: TasksDocument) -> str:
    results: Mapping[str, Any] = document["held_out"]
    few, *more = [name for name in results["methods"] if name.endswith(" samples")]
    last = more[-1] if more else few
    rows: list[Mapping[str, Any]] = [results["methods"][name] for name in (few, last, "greedy")]
    eces = [short(row["ece"]["value"]) for row in rows]
    rights = [short(row["accuracy"], ".3f") for row in rows]
    rest = f"The greedy answer has ECE {eces[2]} and accuracy {rights[2]}."
    if last == few:
        return f"{few}: ECE {eces[0]}, accuracy {rights[0]}. {rest}"
    against = rows[1]["against"]["ece"]
    figures = f"ECE {eces[1]} against {eces[0]}, difference {signed(against)}; accuracy {rights[1]} against {rights[0]}"
    if is_lower(against):
        line = f"More samples are better calibrated: {last} against {few}"
    elif is_higher(against):
        line = f"WARNING: more samples are worse calibrated: {last} against {few}"
    else:
        line = f"WARNING: {last} are not better calibrated than {few} beyond noise"
    return f"{line} ({figures}). {rest}"
