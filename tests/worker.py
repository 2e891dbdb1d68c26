"""One process of several, for test_distributed.py: `python worker.py WORK FOLDER COORDINATOR PROCESSES PROCESS_ID`."""

import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
from tiny import make_windows, ragged

from calibjax.cli import carry_out
from calibjax.data import batches
from calibjax.distributed import DeviceOptions, is_first, to_host
from calibjax.eval.tokens import evaluate_tokens, identity_head
from calibjax.models import load_model
from calibjax.models.export import save_model
from calibjax.sharding import local_rows, make_mesh
from calibjax.train import AtsOptions, fit_ats, save_head
from calibjax.train.sft import SftOptions, fit_sft

SHAPES = {"both": (1, 2, 2), "tune": (2, 2, 1)}
WINDOWS = ragged(make_windows(44, vocab_size=43))
TUNED = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2, "remat": "none", "checkpoint_every": 2}
FITTED = {
    "epochs": 3,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "loss": "joint",
    "validation_fraction": 0.2,
    "head": "transformer",
    "features": "hidden_states+argmax_embedding",
    "cache_hidden": "off",
}


def both(folder: Path, out: Path, mesh):
    """A head and a model, fitted on a mesh and evaluated; what came out, on the host."""
    lm = load_model(folder / "model", mesh=mesh)
    fitted = fit_ats(lm, WINDOWS, AtsOptions(**FITTED), directory=out / "ats", mesh=mesh, quiet=True)
    save_head(out / "head", fitted.head)
    heads = {"uncalibrated": identity_head(lm), "ats": fitted.head}
    with jax.set_mesh(mesh):
        evaluated = evaluate_tokens(lm, WINDOWS, heads, batch_size=8, quiet=True)
        tuned = fit_sft(lm, WINDOWS, SftOptions(**TUNED), directory=out / "sft", mesh=mesh, quiet=True)
        save_model(out / "model", tuned.config, tuned.params, like=folder / "model")
    part = local_rows(mesh, 8)
    return {
        "fingerprint": np.frombuffer(bytes.fromhex(lm.fingerprint), np.uint8),
        "temperature": np.array([fitted.report["temperature"], fitted.report["candidates"][0]["validation_nll"]]),
        "nll": np.stack([result.sums.nll for result in evaluated.values()]),
        "count": np.stack([result.sums.count for result in evaluated.values()]),
        "read": next(batches(WINDOWS._asdict(), 8, seed=0, epochs=1, part=part))["tokens"],
        "validation": np.array(tuned.report["validation_nll"]),
        **{f"head{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(fitted.head.params))},
        **{f"tuned{i}": leaf for i, leaf in enumerate(jax.tree.leaves(to_host(tuned.params)))},
    }


def tune(folder: Path, out: Path, mesh):
    """A model, fine-tuned."""
    lm = load_model(folder / "model", mesh=mesh)
    with jax.set_mesh(mesh):
        tuned = fit_sft(lm, WINDOWS, SftOptions(**TUNED | {"epochs": 20}), directory=out, mesh=mesh, quiet=True)
    return {f"tuned{i}": leaf for i, leaf in enumerate(jax.tree.leaves(to_host(tuned.params)))}


def work(run, announce):
    found = {"both": both, "tune": tune}[run.work](run.folder, run.out, make_mesh(SHAPES[run.work]))
    np.savez(run.out / f"process{jax.process_index()}.npz", **found)
    announce(json.dumps({"first": is_first(), "processes": jax.process_count()}))
    return {}


if __name__ == "__main__":
    name, folder, out, coordinator, processes, number = sys.argv[1:]
    devices = DeviceOptions(
        coordinator=coordinator, processes=int(processes), process_id=int(number), heartbeat_timeout=10
    )
    run = types.SimpleNamespace(work=name, folder=Path(folder), out=Path(out), json=False, devices=devices)
    sys.exit(carry_out(run, work))
