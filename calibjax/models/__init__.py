"""The frozen language model: one decoder for all families, and its loaders."""

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import (
    abstract_params,
    final_norm,
    hidden_states,
    init_params,
    logits,
    unembed,
    unembedding,
    unembedding_bias,
)
from calibjax.models.families import FAMILIES, config_from_hf
from calibjax.models.fingerprint import fingerprint
from calibjax.models.load import load_model
from calibjax.models.model import LanguageModel

__all__ = [
    "FAMILIES",
    "DecoderConfig",
    "LanguageModel",
    "abstract_params",
    "config_from_hf",
    "final_norm",
    "fingerprint",
    "hidden_states",
    "init_params",
    "load_model",
    "logits",
    "unembed",
    "unembedding",
    "unembedding_bias",
]
