"""Evaluation of a model and its heads on held-out data, and the reports drawn from it."""

from calibjax.eval.report import print_report, write_report
from calibjax.eval.tokens import evaluate_tokens, identity_head, results_json

__all__ = ["evaluate_tokens", "identity_head", "print_report", "results_json", "write_report"]
