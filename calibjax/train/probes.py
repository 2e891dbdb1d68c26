"""Probes of hidden states: a linear function of a feature that gives the log-odds of an answer.

What is predicted is the caller's: whether an answer is right, the agreement of samples, a success rate. Cross-entropy
is a proper score for a fraction as for 0 and 1, so one objective serves all.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from safetensors.numpy import load_file, save

from calibjax.recalibrate.optimize import minimize
from calibjax.runtime.checksums import read_checksums, write_directory
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import json_text, read_json

_WEIGHTS, _DESCRIPTION = "probe.safetensors", "probe.json"
_REMEDY = "Remove this directory to fit the probe again."

ProbeParams = dict[str, np.ndarray]
"""weights `[F]` and bias, a scalar; float32."""


def _loss(params, rows, penalty):
    """Cross-entropy −y log q − (1 − y) log(1 − q) of q = sigmoid(w·x + b), and penalty ‖w‖², for each row."""
    features, target = rows
    log_odds = features @ params["weights"] + params["bias"]
    return jax.nn.softplus(log_odds) - target * log_odds + penalty * jnp.sum(jnp.square(params["weights"]))


def fit_probe(features: Float[np.ndarray, "N F"], target: Float[np.ndarray, " N"]) -> ProbeParams:
    """Fits a probe to finite features and targets in [0, 1], by L-BFGS in float64.

    Features are standardised, and mean and deviation then folded into the parameters. The prior of a weight is normal
    with variance 1/F, under which the log-odds of features of variance 1 have variance 1: a penalty of F‖w‖²/2N.
    """
    mean = features.mean(axis=0)
    deviation = np.maximum(features.std(axis=0), 1e-6)
    standardised = ((features - mean) / deviation).astype(np.float32)
    count, width = features.shape
    base_rate = np.clip(target.mean(), 0.5 / count, 1 - 0.5 / count)
    start = {"weights": np.zeros(width), "bias": np.log(base_rate / (1 - base_rate))}
    params, _ = minimize(_loss, start, (standardised, target.astype(np.float32)), width / (2 * count))
    weights = (params["weights"] / deviation).astype(np.float32)
    bias = np.asarray(params["bias"] - weights.astype(np.float64) @ mean, np.float32)
    return {"weights": weights, "bias": bias}


def save_probe(directory: Path, params: ProbeParams, *, name: str, fingerprint: str, notes: Any = None) -> None:
    """Writes `probe.safetensors`, `probe.json` (name, fingerprint of the base model, notes), and checksums."""
    description = {"probe": name, "base_fingerprint": fingerprint, "notes": notes or {}}
    files = {_WEIGHTS: save(params), _DESCRIPTION: json_text(description)}
    write_directory(directory, files, params)


def load_probe(directory: Path, fingerprint: str) -> ProbeParams:
    """Reads what `save_probe` wrote; raises `UserError` if it is damaged, or belongs to another base model."""
    read_checksums(directory, _REMEDY)
    try:
        base = read_json(directory / _DESCRIPTION)["base_fingerprint"]
        params = load_file(directory / _WEIGHTS)
    except Exception as error:  # safetensors raises an exception of its own
        raise UserError(f"{directory}: not a probe ({error}). {_REMEDY}") from error
    if base != fingerprint:
        raise UserError(f"{directory}: this probe was fitted on another base model. {_REMEDY}")
    return params
