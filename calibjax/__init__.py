"""calibjax: measure and repair the calibration of large language models in JAX.

Example:
    lm = calibjax.load_model("path/to/model")
    fit, held_out = calibjax.split_sequences(calibjax.load_text("data.jsonl", lm), 0.6)
    fitted = calibjax.fit_ats(lm, fit)
    print(calibjax.evaluate(lm, held_out, fitted.heads))
"""

from calibjax import heads, kernels, losses, metrics, plot, recalibrate
from calibjax.commands.train_ats import AtsFit, fit_ats
from calibjax.data import Sequences, split_sequences
from calibjax.data.text import load_text
from calibjax.eval.heads import Evaluation, evaluate
from calibjax.heads import (
    ConstantTemperature,
    FittedHead,
    HeadConfig,
    LinearHead,
    MLPHead,
    TransformerHead,
)
from calibjax.kernels import VocabStats, linear_cross_entropy, vocab_stats
from calibjax.models import LanguageModel, load_model
from calibjax.models.calibrated import TokenConfidence, calibrated_confidence, calibrated_logprobs
from calibjax.models.generate import Generation, Sampling, generate
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.version import __version__
from calibjax.train import AtsOptions, load_head, save_head

__all__ = [
    "AtsFit",
    "AtsOptions",
    "ConstantTemperature",
    "Evaluation",
    "FittedHead",
    "Generation",
    "HeadConfig",
    "LanguageModel",
    "LinearHead",
    "MLPHead",
    "RunContext",
    "Sampling",
    "Sequences",
    "TokenConfidence",
    "TransformerHead",
    "UserError",
    "VocabStats",
    "__version__",
    "calibrated_confidence",
    "calibrated_logprobs",
    "evaluate",
    "fit_ats",
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
    "vocab_stats",
]


def __dir__() -> list[str]:
    """The public names; importing sub-packages adds no others."""
    return list(__all__)
