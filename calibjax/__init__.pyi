from . import heads, kernels, losses, metrics, plot, recalibrate
from .data import Sequences, split_sequences
from .data.load import load_text
from .eval.answers.decide import decide
from .eval.compare import Comparison, compare
from .eval.layers.analysis import LayersOptions, evaluate_layers
from .eval.tasks.benchmark import evaluate_tasks
from .eval.tasks.options import TasksOptions
from .eval.tokens import Evaluation, evaluate
from .heads import (
    ConstantTemperature,
    FittedHead,
    HeadConfig,
    LinearHead,
    MLPHead,
    TransformerHead,
)
from .kernels import VocabCurves, VocabStats, linear_cross_entropy, vocab_curves, vocab_stats
from .models import LanguageModel, load_model
from .models.calibrated import TokenConfidence, calibrated_confidence, calibrated_logprobs
from .models.generate import Generation, Sampling, generate
from .models.own import FrozenModel, FunctionModel, from_arrays, from_function
from .runtime.context import RunContext
from .runtime.errors import UserError
from .runtime.version import __version__
from .train import AtsOptions, load_head, save_head
from .train.ats import AtsFit, fit_ats
from .train.lhts import LhtsFit, LhtsOptions, fit_lhts
from .train.sft import SftFit, SftOptions, fit_sft

__all__ = [
    "AtsFit",
    "AtsOptions",
    "Comparison",
    "ConstantTemperature",
    "Evaluation",
    "FittedHead",
    "FrozenModel",
    "FunctionModel",
    "Generation",
    "HeadConfig",
    "LanguageModel",
    "LayersOptions",
    "LhtsFit",
    "LhtsOptions",
    "LinearHead",
    "MLPHead",
    "RunContext",
    "Sampling",
    "Sequences",
    "SftFit",
    "SftOptions",
    "TasksOptions",
    "TokenConfidence",
    "TransformerHead",
    "UserError",
    "VocabCurves",
    "VocabStats",
    "__version__",
    "calibrated_confidence",
    "calibrated_logprobs",
    "compare",
    "decide",
    "evaluate",
    "evaluate_layers",
    "evaluate_tasks",
    "fit_ats",
    "fit_lhts",
    "fit_sft",
    "from_arrays",
    "from_function",
    "generate",
    "heads",
    "kernels",
    "linear_cross_entropy",
    "load_head",
    "load_model",
    "load_text",
    "losses",
    "metrics",
    "plot",
    "recalibrate",
    "save_head",
    "split_sequences",
    "vocab_curves",
    "vocab_stats",
]
