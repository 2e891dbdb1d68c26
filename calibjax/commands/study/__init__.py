"""Studies of calibration heads: one question each, answered by many heads on the same hidden states."""

from calibjax.commands.study.ablations import ABLATIONS as ABLATIONS
from calibjax.commands.study.ablations import AblationRun as AblationRun
from calibjax.commands.study.ablations import run_ablation as run_ablation
from calibjax.commands.study.transfer import TransferRun as TransferRun
from calibjax.commands.study.transfer import run_transfer as run_transfer
