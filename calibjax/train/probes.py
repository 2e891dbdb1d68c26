"""Probes of hidden states: a linear function of a feature that gives the log-odds of an answer.

What is predicted is the caller's: whether an answer is right, the agreement of samples, a success rate. Cross-entropy
is a proper score for a fraction as for 0 and 1, so one objective serves all.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors.numpy import load_file, save

from calibjax.data import batches
from calibjax.runtime.arrays import round_up
from calibjax.runtime.checksums import read_checksums, write_directory
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json
from calibjax.runtime.sharding import batch_shards, local_rows, replicated
from calibjax.train.loop import train
from calibjax.train.step import OptimizerConfig, create_state, make_train_step

_STEPS, _BATCH = 400, 256
_WEIGHTS, _DESCRIPTION = "probe.safetensors", "probe.json"
_REMEDY = "Remove this directory to fit the probe again."

ProbeParams = dict[str, np.ndarray]
"""weights `[F]` and bias, a scalar; float32."""


def probe_loss(
    params: Mapping[str, Array], frozen: None, batch: Mapping[str, Array], hyper: Mapping[str, Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The `Objective`: cross-entropy −y log q − (1 − y) log(1 − q) of q = sigmoid(w·x + b), and for each row its part
    F‖w‖²/2N of a normal prior with variance 1/F, under which the log-odds of features of variance 1 have variance 1."""
    log_odds = batch["features"] @ params["weights"] + params["bias"]
    loss = jnp.sum(jax.nn.softplus(log_odds) - batch["target"] * log_odds)
    count = jnp.float32(len(log_odds))
    return loss + count * hyper["penalty"] * jnp.sum(jnp.square(params["weights"])), count


def fit_probe(
    features: Float[np.ndarray, "N F"], target: Float[np.ndarray, " N"], *, context: RunContext, identity: Any
) -> ProbeParams:
    """Fits a probe on finite features and targets in [0, 1], by the training loop; a killed fit resumes.

    Features are standardised, and mean and deviation then folded into the parameters. `context`: its directory holds
    the checkpoints; `identity`: JSON-able description of the fit.
    """
    mean, deviation = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    count, width = features.shape
    arrays = {
        "features": ((features - mean) / deviation).astype(np.float32),
        "target": target.astype(np.float32),
        "where": np.ones(count, bool),
    }
    base = np.clip(target.mean(), 0.5 / count, 1 - 0.5 / count)
    config = OptimizerConfig(learning_rate=2e-2)
    optimizer, shards = config.build(_STEPS), batch_shards(context.mesh)
    batch_size = round_up(min(count, _BATCH), shards)
    start = {"weights": jnp.zeros(width), "bias": jnp.float32(np.log(base / (1 - base)))}
    state = train(
        make_train_step(probe_loss, optimizer, clip_norm=config.clip_norm),
        jax.device_put(create_state(start, optimizer), replicated(context.mesh)),
        None,
        {"penalty": jnp.float32(width / (2 * count))},
        batches(arrays, batch_size, seed=context.seed, steps=_STEPS, part=local_rows(context.mesh, batch_size)),
        steps=_STEPS,
        context=context.silent(),
        identity={"probe": identity},
    )
    params = jax.tree.map(np.asarray, jax.device_get(state.params))
    weights = (params["weights"] / deviation).astype(np.float32)
    bias = np.asarray(params["bias"] - weights.astype(np.float64) @ mean, np.float32)
    return {"weights": weights, "bias": bias}


def save_probe(directory: Path, params: ProbeParams, *, name: str, fingerprint: str, notes: Any = None) -> None:
    """Writes `probe.safetensors`, `probe.json` (name, fingerprint of the base model, notes), and checksums."""
    description = {"probe": name, "base_fingerprint": fingerprint, "notes": notes or {}}
    files = {_WEIGHTS: save(params), _DESCRIPTION: json.dumps(description, indent=2) + "\n"}
    write_directory(directory, files, params)


def load_probe(directory: Path, fingerprint: str) -> ProbeParams:
    """Reads a probe that `save_probe` wrote; UserError if it is of another base model, or not as it was written."""
    read_checksums(directory, _REMEDY)
    try:
        base = read_json(directory / _DESCRIPTION)["base_fingerprint"]
        params = load_file(directory / _WEIGHTS)
    except Exception as error:  # safetensors raises an exception of its own
        raise UserError(f"{directory}: not a probe ({error}). {_REMEDY}") from error
    if base != fingerprint:
        raise UserError(f"{directory}: this probe was fitted on another base model. {_REMEDY}")
    return params
