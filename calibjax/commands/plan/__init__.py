"""Will it fit: a training or evaluation step of full size, compiled for accelerators that are not there."""

from calibjax.commands.plan.command import PlanOptions, run

__all__ = ["PlanOptions", "run"]
