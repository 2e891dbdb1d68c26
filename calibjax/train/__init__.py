"""Training: state, step, loop and checkpoints, and the objectives over them."""

from calibjax.runtime.errors import NonFiniteLossError
from calibjax.train.ats import AtsObjective
from calibjax.train.checkpoint import head_notes, load_head, save_head
from calibjax.train.options import AtsOptions
from calibjax.train.step import OptimizerConfig, TrainState, create_state, make_train_step

__all__ = [
    "AtsObjective",
    "AtsOptions",
    "NonFiniteLossError",
    "OptimizerConfig",
    "TrainState",
    "create_state",
    "head_notes",
    "load_head",
    "make_train_step",
    "save_head",
]
