"""The sections of a report beside calibration on the sets: layers, texts, and the subjects of a benchmark."""

from calibjax.eval.report import layers, subjects, texts
from calibjax.eval.report.rows import Part
from calibjax.eval.report.schema import Document


def parts_of(document: Document) -> list[Part]:
    """The parts of a run in the order of display; `figures` may name some that the run does not have."""
    parts = []
    if "layers" in document:
        figures = ("layers", "sweep", "subjects")
        parts.append(Part("Layers", layers.findings(document), figures, layers.tables(document)))
    if "texts" in document:
        parts.append(Part("Texts", texts.findings(document), ("diversity",), texts.tables(document)))
    if "tasks" in document:
        for name, results in document["tasks"].items():
            if results["subjects"]:
                figures = (subjects.subjects_name(document, name),)
                parts.append(Part(f"Subjects of {name}", [], figures, [subjects.subject_table(document, name)]))
    return parts
