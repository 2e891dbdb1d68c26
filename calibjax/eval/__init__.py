"""Evaluation of a model and its heads on held-out data, and the reports drawn from it."""
