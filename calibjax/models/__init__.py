"""The frozen language model: one decoder for all families, and its loaders."""

from calibjax.models.config import DecoderConfig as DecoderConfig
from calibjax.models.decoder import abstract_params as abstract_params
from calibjax.models.decoder import final_norm as final_norm
from calibjax.models.decoder import hidden_states as hidden_states
from calibjax.models.decoder import init_params as init_params
from calibjax.models.decoder import logits as logits
from calibjax.models.decoder import unembed as unembed
from calibjax.models.decoder import unembedding as unembedding
from calibjax.models.decoder import unembedding_bias as unembedding_bias
from calibjax.models.families import FAMILIES as FAMILIES
from calibjax.models.families import config_from_hf as config_from_hf
from calibjax.models.fingerprint import fingerprint as fingerprint
from calibjax.models.load import load_model as load_model
from calibjax.models.model import LanguageModel as LanguageModel
