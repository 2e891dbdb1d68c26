"""One process of several, for test_distributed.py: `python worker.py WORK FOLDER COORDINATOR PROCESSES PROCESS_ID`."""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from assets import ASSETS, data_path, model_path
from tiny import make_sequences, ragged, silent

from calibjax import fit_ats
from calibjax.cli import execute
from calibjax.commands import compare, compare_text, eval_bounds, eval_layers, eval_tasks, generate, train_ats
from calibjax.commands.groups import DataOptions
from calibjax.data import batches
from calibjax.eval.tokens import evaluate_tokens
from calibjax.models import load_model
from calibjax.models.hf_export import save_model
from calibjax.recalibrate import optimize
from calibjax.runtime.distributed import DeviceOptions, to_host
from calibjax.runtime.platforms import leave_out_torch
from calibjax.runtime.sharding import local_rows, make_mesh
from calibjax.train import AtsOptions, save_head
from calibjax.train.sft import SftOptions, fit_sft

SHAPES = {"ats": (2, 2, 1), "sft": (1, 2, 2)}
SEQUENCES = ragged(make_sequences(44, vocab_size=43))
TUNED = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2, "remat": "none"}
FITTED = {"epochs": 12, "batch_size": 8, "learning_rate": 1e-2, "loss": "joint", "folds": 2, "head_kind": "mlp"}
FITTED |= {"checkpoint_every": 10}


def ats(folder: Path, out: Path, mesh):
    """A head, fitted on a mesh and evaluated; what came out, on the host."""
    lm = load_model(folder / "model", mesh=mesh)
    fitted = fit_ats(lm, SEQUENCES, AtsOptions(**FITTED), silent(out, mesh=mesh))
    save_head(out / "head", fitted.head)
    with jax.set_mesh(mesh):
        sums = evaluate_tokens(lm, SEQUENCES, {"ats": fitted.head}, batch_size=8, context=silent())["ats"].sums
    return {
        "temperature": np.array([fitted.report["temperature"], fitted.report["refit"]["factor"]]),
        "nll": sums.nll,
        "count": sums.count,
        **{f"head{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(fitted.head.params))},
    }


def sft(folder: Path, out: Path, mesh):
    """A model, fine-tuned on a mesh and saved."""
    lm = load_model(folder / "model", mesh=mesh)
    tuned = fit_sft(lm, SEQUENCES, SftOptions(**TUNED), context=silent(out, mesh=mesh))
    save_model(out / "model", tuned.config, tuned.params, like=folder / "model")
    part = local_rows(mesh, 8)
    return {
        "fingerprint": np.frombuffer(lm.fingerprint.encode(), np.uint8),
        "read": next(batches(SEQUENCES._asdict(), 8, seed=0, epochs=1, part=part))["tokens"],
        "validation": np.array(tuned.report["validation_nll"]),
        **{f"tuned{i}": leaf for i, leaf in enumerate(jax.tree.leaves(to_host(tuned.params)))},
    }


def evaluate(out: Path, announce):
    """Both commands that run a model to look at it, on the default mesh of all devices."""
    model = str(model_path("stories260K"))
    tasks = ("arc_easy", "truthfulqa_mc1", "triviaqa")
    settings = {"limit": 12, "max_new_tokens": 4, "max_length": 48, "assets": ASSETS, "quiet": True}
    eval_tasks.run(eval_tasks.EvalTasksOptions(model=model, tasks=tasks, **settings, out=out / "tasks"), announce)
    text = {"data": str(data_path("lima")), "text": DataOptions(max_rows=8, seq_len=256, max_sequences=24)}
    edits = {"strengths": (0.25,), "sweep_layers": (4,), "batch_size": 8, "quiet": True}
    document = eval_layers.run(eval_layers.EvalLayersOptions(model=model, **text, **edits), announce)
    (out / f"layers{jax.process_index()}.json").write_text(json.dumps(document))


def commands(folder: Path, out: Path, devices: DeviceOptions, announce):
    """`compare`, `train ats`, `generate` and `eval bounds` of a model and text in a folder; name -> document."""
    model, data = str(folder / "model"), str(folder / "data.jsonl")
    shared = {"model": model, "devices": devices}
    text = {**shared, "text": DataOptions(seq_len=12), "quiet": True}
    quick = AtsOptions(head_kind="mlp", epochs=2, loss="joint", refit_temperature=False, batch_size=8)
    methods = ("ats", "ensemble_temperature", "feature_clipping", "platt")
    outputs = {"out": out / "compare", "save": out / "saved", "max_tokens": 300}
    few = mock.patch.object(optimize, "STEPS", 100)
    with few, mock.patch.object(compare_text, "AtsOptions", return_value=quick):
        compared = compare.run(compare.CompareOptions(**text, data=data, methods=methods, **outputs), announce)
    fit = {"data": (data,), "ats": quick, "out": out / "ats", "fit_fraction": 0.5}
    trained = train_ats.run(train_ats.TrainAtsOptions(**text, **fit), announce)
    prompts = {"prompt": ("w1 w2", "w3", "w4 w5 w6"), "max_new_tokens": 5, "head": out / "ats"}
    drawn = {"temperature": 1.0, "top_k": 9, "sample_calibrated": True, "seed": 2}
    return {
        "compare": {name: compared["held_out"][name] for name in ("methods", "tokens", "failed")},
        "ats": {name: [row["nll"], row["brier"]] for name, row in trained["held_out"]["methods"].items()},
        "generate": generate.run(generate.GenerateOptions(**shared, **prompts), announce),
        "samples": generate.run(generate.GenerateOptions(**shared, **prompts, **drawn), announce),
        "bounds": eval_bounds.run(eval_bounds.EvalBoundsOptions(model=(model,), devices=devices), announce),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    work: str
    folder: Path
    out: Path
    devices: DeviceOptions
    json: bool = False


def work(run, announce):
    if run.work == "eval":
        evaluate(run.out, announce)
    elif run.work == "commands":
        results = commands(run.folder, run.out, DeviceOptions(), announce)
        (run.out / f"documents{jax.process_index()}.json").write_text(json.dumps(results))
    elif run.work == "sft":
        results = sft(run.folder, run.out, make_mesh(SHAPES["sft"]))
        np.savez(run.out / f"process{jax.process_index()}.npz", **results)
    else:  # twice the same, so that one can be killed; of a second start only what is not finished yet
        for name in ("whole", "killed"):
            if not (run.out / name / "head").exists():
                results = ats(run.folder, run.out / name, make_mesh(SHAPES["ats"]))
                np.savez(run.out / f"{name}{jax.process_index()}.npz", **results)
    announce("done, says the first")
    return {}


if __name__ == "__main__":
    name, folder, out, coordinator, processes, number = sys.argv[1:]
    named = {"coordinator": coordinator, "processes": int(processes), "process_id": int(number)}
    devices = DeviceOptions(heartbeat_timeout=10, **{"distributed": True} if coordinator == "slurm" else named)
    run = WorkerOptions(work=name, folder=Path(folder), out=Path(out), devices=devices)
    leave_out_torch()
    sys.exit(execute(run, work))
