"""`calibjax compare`: all recalibration methods, on a model and text or on a table of predictions."""

from calibjax.commands.compare.command import CompareOptions, run

__all__ = ["CompareOptions", "run"]
