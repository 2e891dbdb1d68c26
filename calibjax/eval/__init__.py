"""Evaluation: figures of a model and its heads on held-out sequences, and the report drawn from them."""

from calibjax.eval.report import print_report as print_report
from calibjax.eval.report import write_report as write_report
from calibjax.eval.tokens import evaluate_tokens as evaluate_tokens
from calibjax.eval.tokens import identity_head as identity_head
from calibjax.eval.tokens import results_json as results_json
