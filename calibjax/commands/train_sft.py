"""The whole job of fine-tuning: train, save, and compare with the model as it was, on held-out text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from calibjax.commands.common import SCHEMA, DataOptions, claim_directory, finish, load_placed, on_devices
from calibjax.data import Windows, check_context, split_windows
from calibjax.eval.tokens import MethodResult, evaluate_tokens, identity_head, results_json
from calibjax.models import LanguageModel
from calibjax.models.frozen import freeze
from calibjax.models.hf_export import save_model, settings_files
from calibjax.runtime.distributed import DeviceOptions
from calibjax.runtime.errors import UserError
from calibjax.train.sft import SftOptions, fit_sft, split_validation
from calibjax.train.temperature import fit_single_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftRun:
    """Fine-tunes a language model with label smoothing and proves it on held-out text.

    The loss counts the answers only, and never holds the logits. Prints the model as it was and as it is now, each
    without and with a single temperature, and leaves in --out: model/ (Hugging Face layout: transformers loads it, and
    so does --model), metrics.json, reliability.png, report.html, and the logs and checkpoints of training. Started
    again with the same options, a killed run goes on where it was.

    Attributes:
        model: directory with config.json and safetensors, or a hub id.
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id.
        out: output directory.
        split: of a hub data set or directory.
        fit_fraction: share of the windows, from the first, to train on; the rest is held out.
        eval_data: further sets to test on: files, directories or hub ids.
        dtype: compute dtype. Trained weights are float32 in any case; frozen ones (--lora-rank) are of this dtype.
        save_dtype: of the weights in model/; by default float32, or bfloat16 where frozen weights were.
        bins: equal-width bins of the expected calibration error.
        closed: which bin a confidence on an inner edge belongs to: the one below (right) or above (left).
        seed: of everything random.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
        devices: what the run uses.
        text: how text becomes windows.
        sft: how the model is trained.
    """

    model: str
    data: str
    out: Path
    split: str | None = None
    fit_fraction: float = 0.9
    eval_data: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Literal["float32", "bfloat16"] | None = None
    bins: int = 15
    closed: Literal["right", "left"] = "right"
    seed: int = 0
    json: bool = False
    quiet: bool = False
    devices: DeviceOptions = DeviceOptions()  # noqa: RUF009 (frozen)
    text: DataOptions = DataOptions()  # noqa: RUF009 (frozen)
    sft: SftOptions = SftOptions()  # noqa: RUF009 (frozen)


@on_devices
def run_sft(run: SftRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `SftRun`; returns what it wrote to metrics.json. Raises UserError before any work is lost."""
    if run.bins < 1:
        raise UserError(f"--bins: expected at least 1, got {run.bins}.")
    mesh = run.devices.make_mesh()
    run.sft.check(mesh)
    claim_directory(run.out, _identity(run))
    adapters = run.sft.lora is not None
    compute = jnp.dtype(run.dtype)
    stored = compute if adapters else jnp.dtype("float32")
    base = load_placed(run.model, mesh, compute, stored=stored, announce=announce)
    check_context(run.text.seq_len, base.config.max_positions)
    assert base.path is not None
    settings_files(base.path)  # raises before the training what `save_model` would raise after it
    windows = run.text.read(run.data, base, announce, split=run.split)
    fit, held_out = split_windows(windows, run.fit_fraction)
    # Every set is read before training starts: a wrong path must not cost the run.
    sets = {"held_out": held_out, **run.text.read_all(run.eval_data, base, announce)}
    train_rows, validation_rows = split_validation(fit, run.sft, run.seed)
    announce(
        f"split: {len(train_rows):,} windows to train on, {len(validation_rows):,} for validation, "
        f"{len(held_out.tokens):,} held out"
    )
    validation = fit.take(validation_rows)

    def evaluate(lm: LanguageModel, name: str) -> dict[str, dict[str, MethodResult]]:
        _, temperature = fit_single_temperature(lm, freeze(lm), validation.arrays(), run.sft.batch_size)
        heads = {name: identity_head(lm), f"{name}_temperature": temperature}
        return {title: _evaluate(lm, windows, heads, run, f"{name}: {title}") for title, windows in sets.items()}

    with jax.set_mesh(mesh):
        results = evaluate(base, "base")
        fitted = fit_sft(
            base,
            fit,
            run.sft,
            directory=run.out / "fit",
            mesh=mesh,
            seed=run.seed,
            consume=not adapters,
            announce=announce,
            quiet=run.quiet,
        )
        saved = jnp.dtype(run.save_dtype or stored)
        save_model(run.out / "model", fitted.config, fitted.params, like=base.path, dtype=saved, replace=True)
        fingerprint = base.fingerprint
        tuned = dataclasses.replace(load_placed(run.out / "model", mesh, compute), config=fitted.config)
        for title, more in evaluate(tuned, "fine_tuned").items():
            results[title] |= more
        figures = {title: results_json(of_set, closed=run.closed, seed=run.seed) for title, of_set in results.items()}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "held_out": figures.pop("held_out"),
        "run": {**_identity(run), "fit": fitted.report, "base_fingerprint": fingerprint},
    }
    if figures:
        document["transfer"] = figures
    finish(document, run.out, holds="model/ (for --model, or transformers)", show=not run.json)
    return document


def _evaluate(lm: LanguageModel, windows: Windows, heads, run: SftRun, description: str) -> dict[str, MethodResult]:
    return evaluate_tokens(
        lm,
        windows,
        heads,
        batch_size=run.sft.batch_size,
        bins=run.bins,
        closed=run.closed,
        description=f"evaluating {description.replace('_', ' ')}",
        quiet=run.quiet,
    )


def _identity(run: SftRun) -> dict[str, Any]:
    """What makes two runs the same: all options but where it runs, where the result goes and how it is shown."""
    shown_only = {"out", "json", "quiet", "eval_data", "bins", "closed", "devices"}
    return {
        "command": "train sft",
        **{name: value for name, value in dataclasses.asdict(run).items() if name not in shown_only},
    }
