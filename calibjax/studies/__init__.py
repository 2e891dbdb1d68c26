"""Studies of calibration heads: one question each, answered by many heads on the same hidden states."""

from calibjax.studies.ablations import ABLATIONS as ABLATIONS
from calibjax.studies.ablations import AblationRun as AblationRun
from calibjax.studies.ablations import run_ablation as run_ablation
from calibjax.studies.transfer import TransferRun as TransferRun
from calibjax.studies.transfer import run_transfer as run_transfer
