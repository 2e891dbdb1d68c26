"""What every study shares: its options, many heads fitted on the same hidden states, and its end."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from tqdm import tqdm

from calibjax.commands.common import SCHEMA, DataOptions
from calibjax.data import Windows, check_context
from calibjax.eval.report import print_study, write_study
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model
from calibjax.models.frozen import freeze
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file
from calibjax.runtime.sharding import make_mesh, replicated
from calibjax.train import AtsOptions, load_head, save_head
from calibjax.train.ats import train_head
from calibjax.train.hidden_cache import array_hash, window_arrays
from calibjax.train.options import make_plan
from calibjax.train.temperature import fit_single_temperature

SINGLE = "temperature"
"""Name of the single temperature among the heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What every study is told.

    Attributes:
        model: directory with config.json and safetensors, or a hub id.
        out: output directory; started again with the same options, a study fits only the heads that are not there.
        fit_fraction: share of the windows, from the first, to fit on; the rest is held out.
        seeds: every head is fitted with so many: they differ in its start and the order of the windows.
        epochs: passes over the fitting windows.
        batch_size: windows a step.
        learning_rate: peak.
        dtype: compute dtype of the frozen model.
        bins: equal-width bins of the expected calibration error.
        closed: which bin a confidence on an edge belongs to: the one below (right), above (left), or none.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
        text: how text becomes windows.
    """

    model: str
    out: Path
    fit_fraction: float = 0.6
    seeds: int = 3
    epochs: int = 6
    batch_size: int = 16
    learning_rate: float = 2e-3
    dtype: Literal["float32", "bfloat16"] = "float32"
    bins: int = 15
    closed: Literal["right", "left", "none"] = "right"
    json: bool = False
    quiet: bool = False
    text: DataOptions = DataOptions()  # noqa: RUF009 (frozen)

    def variant(self, **changes: Any) -> AtsOptions:
        """How a head of the study is fitted: one loss, on all fitting windows, with no temperature refitted on top."""
        shared = {"epochs": self.epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate}
        return AtsOptions(**{"loss": "joint", "refit_temperature": False, **shared, **changes})

    def identity(self, command: str, windows: Mapping[str, Windows]) -> dict[str, Any]:
        """What makes two studies the same: how a head is fitted, and the windows. More seeds may be asked for later."""
        others = {"out", "json", "quiet", "eval_data", "bins", "closed", "seeds"}
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in others}
        hashes = {name: array_hash(fitted._asdict()) for name, fitted in windows.items()}
        return {"command": f"study {command}", **fields, "windows": hashes}


def load_checked(run: StudyOptions, announce: Callable[[str], None]) -> LanguageModel:
    """The model, and the checks that can be made without the data."""
    for name in ("bins", "seeds"):
        if getattr(run, name) < 1:
            raise UserError(f"--{name}: expected at least 1, got {getattr(run, name)}.")
    lm = load_model(run.model, dtype=jnp.dtype(run.dtype))
    announce(f"model: {lm!r}")
    check_context(run.text.seq_len, lm.config.max_positions)
    make_plan(run.variant(), lm.config.hidden_size)
    return lm


def fit_heads(
    lm: LanguageModel,
    windows: Windows,
    variants: Mapping[str, AtsOptions],
    *,
    seeds: int,
    directory: Path,
    announce: Callable[[str], None] = print,
    quiet: bool = False,
) -> dict[str, list[FittedHead]]:
    """Fits every variant with every seed on the same hidden states, which are computed once, and a single temperature.

    Args:
        lm: the frozen model.
        windows: to fit on.
        variants: name -> options, each of one loss; see `StudyOptions.variant`.
        seeds: how many.
        directory: a head that is there is loaded; one that was being fitted is gone on with.
        announce: told in one line each what was done.
        quiet: no progress bar.

    Returns:
        name -> the head of each seed, first `SINGLE`, which has one.
    """
    folders = {name: directory / re.sub(r"[^\w.+-]+", "-", name) for name in variants}
    places = {(name, seed): folder / str(seed) for name, folder in folders.items() for seed in range(seeds)}
    places = {(SINGLE, 0): directory / SINGLE / "0", **places}
    missing = [at for at, place in places.items() if not (place / "head.json").is_file()]
    if missing:
        plans = {name: make_plan(options, lm.config.hidden_size) for name, options in variants.items()}
        mesh = make_mesh(devices=jax.devices()[:1])
        batch_size = next(iter(plans.values())).batch_size
        arrays, given = window_arrays(
            lm, windows, mode="auto", directory=directory, batch_size=batch_size, announce=announce, quiet=quiet
        )
        of_windows = {"windows": array_hash(windows._asdict())}
        bar = tqdm(missing, desc=f"fitting {directory.name}", unit="head", disable=quiet)
        for name, seed in bar:
            bar.set_postfix_str(f"{name}, seed {seed}")
            place = places[name, seed]
            fit = place.with_name(f"{place.name}.fit")
            if name == SINGLE:
                frozen = jax.device_put(freeze(lm, hidden_given=given), replicated(mesh))
                head = fit_single_temperature(lm, frozen, arrays, batch_size)[1]
            else:
                plan = plans[name]
                frozen = jax.device_put(freeze(lm, head=plan.head, hidden_given=given), replicated(mesh))
                params = train_head(
                    *(lm, plan, plan.trials[0], frozen, arrays),
                    mesh=mesh,
                    directory=fit,
                    seed=seed,
                    run=of_windows,
                    quiet=True,
                )
                head = FittedHead(plan.head, params, 0.0, lm.fingerprint)
            save_head(place, head)
            shutil.rmtree(fit, ignore_errors=True)
    return {
        name: [load_head(place, lm) for (of, _), place in places.items() if of == name] for name in (SINGLE, *variants)
    }


def parameters_of(head: FittedHead) -> int:
    """How many numbers were fitted."""
    return sum(leaf.size for leaf in jax.tree.leaves(head.params))


def finish_study(document: dict[str, Any], run: StudyOptions, announce: Callable[[str], None]) -> dict[str, Any]:
    """Adds what every study says of itself, writes metrics.json and the figures, and prints the tables."""
    described = {name: value for name, value in dataclasses.asdict(run).items() if name not in ("json", "quiet", "out")}
    document = {"schema": SCHEMA, **document, "bins": run.bins, "closed": run.closed, "run": described}
    write_file(run.out / "metrics.json", json.dumps(document, indent=2) + "\n")
    files = write_study(document, run.out)
    if not run.json:
        print_study(document)
    announce(f"results in {run.out}: metrics.json, {', '.join(files)}, heads/")
    return document
