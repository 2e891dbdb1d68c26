"""What is drawn from `metrics.json`: tables in the terminal, figures, and one self-contained page."""

from calibjax.eval.report.page import Run as Run
from calibjax.eval.report.page import save_report as save_report
from calibjax.eval.report.page import write_report as write_report
from calibjax.eval.report.rows import ABSENT as ABSENT
from calibjax.eval.report.rows import binning as binning
from calibjax.eval.report.rows import figure_of as figure_of
from calibjax.eval.report.rows import title_of as title_of
from calibjax.eval.report.rows import verdict as verdict
from calibjax.eval.report.studies import row_name as row_name
from calibjax.eval.report.studies import write_study as write_study
from calibjax.eval.report.terminal import print_report as print_report
from calibjax.eval.report.terminal import print_study as print_study
