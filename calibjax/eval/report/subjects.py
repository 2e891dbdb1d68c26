"""The subjects of a benchmark as a table: accuracy, and confidence and calibration error with each method."""

import re
from collections.abc import Mapping
from typing import Any

from calibjax.eval.report.layers import interval
from calibjax.eval.report.rows import TextTable, title_of


def subjects_name(document: Mapping[str, Any], task: str) -> str:
    """Of the figure of a task's subjects: by the task's name, or its number where that cannot be in a file's name."""
    fits = re.fullmatch(r"\w[\w.-]{,79}", task, re.ASCII)
    return f"subjects-{task if fits else list(document['tasks']).index(task)}"


def subject_table(document: Mapping[str, Any], task: str) -> TextTable:
    """A row for every subject of a task, the most over-confident as the model is first."""
    results = document["tasks"][task]
    methods = list(results["methods"])
    columns = [f"{what}, {title_of(name)}" for name in methods for what in ("confidence", "ECE")]
    rows = [
        [
            row["subject"],
            f"{row['questions']:,}",
            interval(row["accuracy"]),
            *(
                cell
                for name in methods
                for cell in (f"{row['methods'][name]['confidence']:.3f}", interval(row["methods"][name]["ece"]))
            ),
        ]
        for row in results["subjects"]
    ]
    title = f"subjects of {task} [95% interval: of the accuracy Wilson's, of the ECE over questions]"
    return TextTable(title, ["subject", "questions", "accuracy, uncalibrated", *columns], rows)
