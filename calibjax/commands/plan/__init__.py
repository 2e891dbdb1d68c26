"""Will it fit: a training or evaluation step of full size, compiled for accelerators that are not there."""

from calibjax.commands.plan.command import PlanRun, run_plan

__all__ = ["PlanRun", "run_plan"]
