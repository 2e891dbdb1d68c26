"""The studies of confidence in answers: the table of `study confidence`, and the first line of each."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from calibjax.eval.report.rows import (
    ABSENT,
    TextTable,
    counted,
    figure_of,
    is_higher,
    is_lower,
    short,
    signed,
    title_of,
)
from calibjax.eval.report.schema import TasksDocument

_COLUMNS = ["confidence", "ECE, TS", "ECE, ATS", "ECE, ATS \N{MINUS SIGN} TS", "Brier, ATS \N{MINUS SIGN} TS"]
_FURTHER = ["ECE, uncalibrated", "AUROC, TS", "AUROC, ATS"]


def is_confidence(document: TasksDocument) -> bool:
    """Whether a document is that of `study confidence`."""
    return document.get("run", {}).get("command") == "study confidence"


def confidence_table(document: TasksDocument) -> TextTable:
    """A row for each task and confidence: ECE with temperature scaling (TS) and with ATS, and paired differences.

    Of several fitted heads, `_correction_table`.
    """
    sets: dict[str, Mapping[str, Any]] = {_title(document): document["held_out"], **document["tasks"]}
    if "ats" not in document["held_out"]["methods"]:
        return _correction_table(sets)
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


_CORRECTED = ("ECE", "\N{GREEK CAPITAL LETTER DELTA} ECE [95%]", "Brier", "\N{GREEK CAPITAL LETTER DELTA} Brier [95%]")
_CORRECTED += ("AUROC", "\N{GREEK CAPITAL LETTER DELTA} AUROC [95%]", "debiased ECE")


def _correction_table(sets: Mapping[str, Mapping[str, Any]]) -> TextTable:
    """A row for each confidence and correction, over all tasks (of one task: its own), with paired differences."""
    shown = _shown(sets)
    rows, groups = [], []
    for title, results in shown.items():
        for name in next(iter(shown.values()))["methods"]:
            row = results["methods"][name]
            cells = [title_of(name)]
            for key in ("ece", "brier", "auroc"):
                value, against = figure_of(row, key), row.get("against", {}).get(key)
                cells.append(ABSENT if value is None else short(value, ".3f"))
                cells.append(ABSENT if against is None else signed(against, ".3f"))
            rows.append([*cells, short(row["debiased_ece"], ".3f")])
            groups.append(f"{title}, {counted(results)}")
    return TextTable("", ["correction", *_CORRECTED], rows, (1, 2, 4, 3, 6, 5, 7), groups=tuple(groups))


def _is_joined(title: str) -> bool:
    """Whether a set has the answers to all of several tasks."""
    return title.startswith("all tasks, ")


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
    if "ats" not in document["held_out"]["methods"]:
        return _correction_verdict(document)
    against = cast(Any, document["held_out"]["methods"]["ats"])["against"]["ece"]
    figures = f"{_title(document)}: difference in ECE {signed(against)}"
    if is_lower(against):
        line = f"ATS is better calibrated than temperature scaling ({figures})"
    elif is_higher(against):
        line = f"WARNING: ATS is worse calibrated than temperature scaling ({figures})"
    else:
        line = f"ATS and temperature scaling do not differ beyond noise ({figures})"
    sets: list[Mapping[str, Any]] = [of_set for title, of_set in document["tasks"].items() if not _is_joined(title)]
    rows = [results["methods"]["ats"]["against"] for results in sets]
    counts = {key: [sum(test(row[key]) for row in rows) for test in (is_lower, is_higher)] for key in ("ece", "brier")}
    return (
        f"{line}. Of {len(rows)} pairs of task and confidence, ATS is significantly better in {counts['ece'][0]} and "
        f"worse in {counts['ece'][1]} by ECE, and in {counts['brier'][0]} and {counts['brier'][1]} by Brier score, "
        "not corrected for their number."
    )


def _correction_verdict(document: TasksDocument) -> str:
    """The correction with the lowest Brier score, and whether it beats temperature scaling beyond noise."""
    methods: Mapping[str, Any] = document["held_out"]["methods"]
    scaled = methods["temperature"]
    others: dict[str, Any] = {name: row for name, row in methods.items() if name not in ("uncalibrated", "temperature")}
    best = min(others, key=lambda name: others[name]["brier"])
    against = others[best]["against"]["brier"]
    figures = f"{_title(document)}: Brier score {short(others[best]['brier'])} against {short(scaled['brier'])}"
    p = short(against["holm_p"], ".3f")
    tested = f"{signed(against)}, p = {p} after Holm's correction for {len(methods) - 1} comparisons"
    if is_lower(against) and against["holm_p"] < 0.05:
        line = f"{title_of(best)} is better than temperature scaling ({figures}, {tested})"
    else:
        line = (
            "WARNING: no correction beats temperature scaling beyond noise; of the others the best is "
            f"{title_of(best)} ({figures}, {tested})"
        )
    sets = _shown({_title(document): document["held_out"], **document["tasks"]})
    pairs = [results["methods"][name]["against"]["brier"] for results in sets.values() for name in others]
    return (
        f"{line}. Of {len(pairs)} pairs of confidence and correction, {sum(map(is_lower, pairs))} have a significantly "
        f"lower Brier score than temperature scaling and {sum(map(is_higher, pairs))} a higher one, not corrected for "
        "their number."
    )


def _shown(sets: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """The sets of all tasks together, one for each confidence; those of one task, where there is one."""
    return {title: results for title, results in sets.items() if _is_joined(title)} or sets


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
