"""What the kinds of runs have to show beside calibration on their sets of text or questions."""

from collections.abc import Mapping
from typing import Any

from calibjax.eval.report import layers, subjects, texts
from calibjax.eval.report.rows import Part


def parts_of(document: Mapping[str, Any]) -> list[Part]:
    """The parts of a run, in the order in which they are shown; figures that a run lacks are named all the same."""
    parts = []
    if "layers" in document:
        figures = ("layers", "sweep", "subjects")
        parts.append(Part("Layers", layers.findings(document), figures, layers.tables(document)))
    if "texts" in document:
        parts.append(Part("Texts", texts.findings(document), ("diversity",), texts.tables(document)))
    for name, results in document.get("tasks", {}).items():
        if results["subjects"]:
            figures = (subjects.subjects_name(document, name),)
            parts.append(Part(f"Subjects of {name}", [], figures, [subjects.subject_table(document, name)]))
    return parts
