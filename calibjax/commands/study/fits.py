"""What every study shares: its options, many heads fitted on the same hidden states, and its end."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import jax
from jax.sharding import Mesh

from calibjax.commands.common import (
    SCHEMA,
    BinningOptions,
    DataOptions,
    DirectoryOptions,
    ModelOptions,
    check_sources,
    load_placed,
    presentation,
)
from calibjax.data import Sequences
from calibjax.eval.report import print_study, write_study
from calibjax.eval.report.schema import StudyDocument
from calibjax.heads import FittedHead
from calibjax.losses import LOSSES
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import DeviceOptions, is_first, on_first, to_host
from calibjax.runtime.files import write_file
from calibjax.runtime.options import BatchSize, Count, Fraction, Positive, Range, check_options, run_identity
from calibjax.runtime.sharding import check_batch
from calibjax.train import AtsOptions, load_head, save_head
from calibjax.train.ats import fit_temperature_head, train_head
from calibjax.train.curves import array_hash, token_curves
from calibjax.train.options import make_plan

SINGLE = "temperature"
"""Name of temperature scaling among the heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions(BinningOptions, DirectoryOptions, ModelOptions):
    """What every study shares.

    Attributes:
        out: output directory; started again with the same options, a study fits only the heads that are missing.
        fit_fraction: fraction of the sequences, from the first, to fit on; the rest is held out.
        seeds: number of seeds that each head is fitted with; a seed sets its start and the order of the sequences.
        epochs: passes over the sequences to fit on.
        batch_size: sequences per step.
        learning_rate: peak learning rate.
        text: how text becomes sequences.
        devices: devices of the study.
    """

    fit_fraction: Fraction = 0.6
    seeds: Annotated[int, Range(1, 1000)] = presentation(3)
    epochs: Count = 6
    batch_size: BatchSize = 16
    learning_rate: Positive = 2e-3
    text: DataOptions = DataOptions()
    devices: DeviceOptions = presentation(DeviceOptions())

    def variant(self, **changes: Any) -> AtsOptions:
        """Options of one head of the study: one loss, fitted on all sequences, no temperature refitted on top."""
        shared = {"epochs": self.epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate}
        default = {"head": "mlp", "features": "hidden_states", "loss": "joint", "refit_temperature": False}
        return AtsOptions(**{**default, **shared, **changes})

    def identity(self, command: str, sequences: Mapping[str, Sequences]) -> dict[str, Any]:
        """Identity of a study: how heads are fitted, and the sequences; not the number of seeds."""
        hashes = {name: array_hash(fitted._asdict()) for name, fitted in sequences.items()}
        return {**run_identity(f"study {command}", self), "windows": hashes}


def load_checked(options: StudyOptions, log: Callable[[str], None]) -> tuple[LanguageModel, Mesh]:
    """The model on the devices of the study, and the checks that can be made without the data."""
    check_options(options)
    mesh = options.devices.make_mesh()
    check_batch(mesh, options.batch_size)
    make_plan(options.variant(), hidden_size=64)
    check_sources(options)
    lm = load_placed(options.model, mesh, options.dtype, adapter=options.adapter, log=log)
    return lm, mesh


def fit_heads(
    lm: LanguageModel,
    sequences: Sequences,
    variants: Mapping[str, AtsOptions],
    *,
    seeds: int,
    context: RunContext,
) -> dict[str, list[FittedHead]]:
    """Fits every variant with every seed on the same hidden states, computed once, and temperature scaling.

    Runs on the current mesh (`jax.set_mesh`), that of `context`, on which the model was loaded.

    Args:
        lm: the frozen model.
        sequences: to fit on.
        variants: name -> options, each of one loss; see `StudyOptions.variant`.
        seeds: how many.
        context: directory of the heads, log and progress. Heads that are there are loaded, partially fitted heads
            resume.

    Returns:
        name -> the head of each seed, first `SINGLE`, which has one.
    """
    directory = context.require_directory()
    folders = {name: directory / re.sub(r"[^\w.+-]+", "-", name) for name in variants}
    places = {(name, seed): folder / str(seed) for name, folder in folders.items() for seed in range(seeds)}
    places = {(SINGLE, 0): directory / SINGLE / "0", **places}
    missing = [at for at, place in places.items() if not (place / "head.json").is_file()]
    if missing:
        plans = {name: make_plan(options, lm.config.hidden_size) for name, options in variants.items()}
        batch_size = next(iter(plans.values())).batch_size
        heads = [plan.head for plan in plans.values()]
        top_k = max(LOSSES[plan.trials[0].loss].top_k for plan in plans.values())
        options: dict[str, Any] = {"top_k": top_k, "keep": "disk", "batch_size": batch_size}
        tokens = token_curves(lm, sequences, heads, **options, context=context)
        bar = context.bar(missing, title=f"fitting {directory.name}", unit="head")
        for name, seed in bar:
            bar.set_postfix_str(f"{name}, seed {seed}")
            place = places[name, seed]
            fit = place.with_name(f"{place.name}.fit")
            if name == SINGLE:
                head = fit_temperature_head(lm, sequences, batch_size, tokens)
            else:
                plan = plans[name]
                params = train_head(
                    *(tokens, plan, plan.head, plan.trials[0]),
                    context=dataclasses.replace(context.silent(), directory=fit, seed=seed),
                )
                head = FittedHead(plan.head, to_host(params), 0.0, lm.fingerprint)
            save_head(place, head)
            on_first(functools.partial(shutil.rmtree, fit, ignore_errors=True))
    return {
        name: [load_head(place, lm) for (of, _), place in places.items() if of == name] for name in (SINGLE, *variants)
    }


def parameters_of(head: FittedHead) -> int:
    """How many numbers were fitted."""
    return sum(leaf.size for leaf in jax.tree.leaves(head.params))


def finish_study(study: dict[str, Any], options: StudyOptions, log: Callable[[str], None]) -> StudyDocument:
    """Adds what every study reports of itself, writes metrics.json and the figures, and prints the tables."""
    unsaid = ("json", "quiet", "out", "devices")
    described = {name: value for name, value in dataclasses.asdict(options).items() if name not in unsaid}
    convention = {"bins": options.bins, "closed": options.closed}
    document = cast(StudyDocument, {"schema": SCHEMA, **study, **convention, "run": described})
    if not is_first():
        return document
    write_file(options.out / "metrics.json", json.dumps(document, indent=2) + "\n")
    files = write_study(document, options.out)
    where = f"results in {options.out}: metrics.json, {', '.join(files)}, heads/"
    if not options.json:
        print_study(document, files=where)
    else:
        log(where)
    return document
