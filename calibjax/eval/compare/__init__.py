"""Calibration methods side by side."""
