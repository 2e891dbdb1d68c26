"""Calibration across layers, directions of the residual stream, entropy neurons, the entropy bound."""
