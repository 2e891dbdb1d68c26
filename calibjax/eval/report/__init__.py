"""Tables in the terminal, figures, and a self-contained page, all drawn from `metrics.json`."""

from calibjax.eval.report.page import Run, save_report, write_report, write_study
from calibjax.eval.report.studies import row_name
from calibjax.eval.report.terminal import print_report, print_study
from calibjax.eval.report.verdicts import verdict

__all__ = [
    "Run",
    "print_report",
    "print_study",
    "row_name",
    "save_report",
    "verdict",
    "write_report",
    "write_study",
]
