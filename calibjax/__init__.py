"""calibjax: make the confidence of large language models true."""

from calibjax import heads as heads
from calibjax import losses as losses
from calibjax import metrics as metrics
from calibjax.heads import ConstantTemperature as ConstantTemperature
from calibjax.heads import FittedHead as FittedHead
from calibjax.heads import HeadConfig as HeadConfig
from calibjax.heads import LinearHead as LinearHead
from calibjax.heads import MLPHead as MLPHead
from calibjax.heads import TransformerHead as TransformerHead
from calibjax.kernels import VocabStats as VocabStats
from calibjax.kernels import linear_cross_entropy as linear_cross_entropy
from calibjax.kernels import vocab_stats as vocab_stats
from calibjax.models import LanguageModel as LanguageModel
from calibjax.models import load_model as load_model
from calibjax.models.calibrated import calibrated_confidence as calibrated_confidence
from calibjax.models.calibrated import calibrated_logprobs as calibrated_logprobs
from calibjax.models.generate import Generation as Generation
from calibjax.models.generate import generate as generate
from calibjax.runtime.errors import UserError as UserError
from calibjax.runtime.version import __version__ as __version__
from calibjax.train import load_head as load_head
from calibjax.train import save_head as save_head
