"""Confidence in whole answers, and who judges them."""
