"""Tables in the terminal, figures, and a self-contained page, all drawn from `metrics.json`."""

from calibjax.eval.report.notes import verdict
from calibjax.eval.report.page import Run, save_report, write_report
from calibjax.eval.report.terminal import print_comparison, print_report

__all__ = [
    "Run",
    "print_comparison",
    "print_report",
    "save_report",
    "verdict",
    "write_report",
]
