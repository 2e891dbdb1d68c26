"""Training: state, step, loop and checkpoints, and the objectives over them."""

from calibjax.runtime.errors import NonFiniteLossError as NonFiniteLossError
from calibjax.train.candidates import AtsObjective as AtsObjective
from calibjax.train.options import AtsOptions as AtsOptions
from calibjax.train.saved import head_notes as head_notes
from calibjax.train.saved import load_head as load_head
from calibjax.train.saved import save_head as save_head
from calibjax.train.step import OptimizerConfig as OptimizerConfig
from calibjax.train.step import create_state as create_state
from calibjax.train.step import make_train_step as make_train_step
