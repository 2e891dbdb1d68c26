"""Calibration across layers, directions of the residual stream, entropy neurons, and the entropy bound."""
