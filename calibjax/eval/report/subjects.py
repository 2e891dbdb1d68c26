"""The subjects of a benchmark as a table: accuracy, and confidence and calibration error with each method."""

import re

from calibjax.eval.report.layers import interval
from calibjax.eval.report.rows import TextTable, title_of
from calibjax.eval.report.schema import TasksDocument


def subjects_name(document: TasksDocument, task: str) -> str:
    """The file name of the figure of a task's subjects: with the task's name, or its number if that is no file name."""
    is_file_name = re.fullmatch(r"\w[\w.-]{,79}", task, re.ASCII)
    return f"subjects-{task if is_file_name else list(document['tasks']).index(task)}"


def subject_table(document: TasksDocument, task: str) -> TextTable:
    """A row for every subject of a task, first the one on which the uncalibrated model is the most overconfident."""
    results = document["tasks"][task]
    methods = list(results["methods"])
    columns = [f"{what}, {title_of(name)}" for name in methods for what in ("confidence", "ECE")]
    errors = tuple(4 + 2 * index for index in range(len(methods)))
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
    title = f"subjects of {task} [95% interval: Wilson's for accuracy, over questions for ECE]"
    return TextTable(title, ["subject", "questions", "accuracy, uncalibrated", *columns], rows, (2, *errors, 1))
