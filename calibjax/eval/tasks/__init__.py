"""Benchmarks: questions of lm-eval, their answers and the confidence in each."""
