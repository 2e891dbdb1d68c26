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
import orbax.checkpoint as ocp
from jaxtyping import Array, Float

from calibjax.data import batches
from calibjax.runtime.checksums import array_digests, different_arrays, read_checksums, write_checksums
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import on_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import check_orbax_path, new_directory, read_json, write_file
from calibjax.runtime.sharding import local_rows, replicated
from calibjax.train.loop import train
from calibjax.train.state import OptimizerConfig, create_state
from calibjax.train.step import make_train_step

_STEPS, _BATCH = 400, 256
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
    """Fits a probe on N answers, by the training loop; a killed fit resumes.

    Features are standardised, and mean and deviation then folded into the parameters.

    Args:
        features: finite.
        target: in [0, 1].
        context: its directory holds the checkpoints.
        identity: JSON-able description of the fit.

    Returns:
        The parameters, on the host.
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
    optimizer, groups = config.build(_STEPS), context.mesh.shape["data"] * context.mesh.shape["fsdp"]
    batch_size = -(-min(count, _BATCH) // groups) * groups
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
    """Writes a probe: `params/` (Orbax), `probe.json` (name, base model's fingerprint, notes), and checksums."""
    check_orbax_path(directory)
    with new_directory(directory, replace=True) as fresh:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", params)

        def describe() -> None:
            size = len(params["weights"])
            known = {"probe": name, "features": size, "base_fingerprint": fingerprint, "notes": notes or {}}
            write_file(fresh / "probe.json", json.dumps(known, indent=2) + "\n")
            write_checksums(fresh, array_digests(params))

        on_first(describe)


def load_probe(directory: Path, fingerprint: str) -> ProbeParams:
    """Reads a probe that `save_probe` wrote.

    Raises:
        UserError: it is of another base model, or not as it was written.
    """
    digests = read_checksums(directory, _REMEDY)
    try:
        known = read_json(directory / "probe.json")
        size, of_model = int(known["features"]), known["base_fingerprint"]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{directory}: not a probe ({error}). {_REMEDY}") from error
    if of_model != fingerprint:
        raise UserError(f"{directory}: this probe was fitted on another base model. {_REMEDY}")
    try:
        like = {"weights": np.zeros(size, np.float32), "bias": np.zeros((), np.float32)}
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(directory.absolute() / "params", like)
    except Exception as error:  # Orbax raises bare Exception for damaged files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{directory}: cannot be read ({reason}). {_REMEDY}") from error
    if digests is None or different_arrays(array_digests(params), digests):
        raise UserError(f"{directory}: damaged (a checksum differs). {_REMEDY}")
    return params
