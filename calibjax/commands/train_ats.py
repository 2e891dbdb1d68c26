"""The whole job: fit on one part of the data, evaluate on the other, leave a head, figures and a report."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from calibjax.commands.common import SCHEMA, DataOptions, claim_directory, finish, load_placed, on_devices
from calibjax.data import Windows, check_context, split_windows
from calibjax.eval.token_sample import token_sample
from calibjax.eval.tokens import MethodResult, evaluate_tokens, identity_head, results_json
from calibjax.models import LanguageModel
from calibjax.runtime.distributed import DeviceOptions, is_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file
from calibjax.runtime.sharding import check_batch
from calibjax.train.ats import AtsFit, fit_ats
from calibjax.train.checkpoint import save_head
from calibjax.train.options import AtsOptions, make_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtsRun:
    """Fits Adaptive Temperature Scaling to a language model and proves it on held-out text.

    Prints the model as it is, with a single temperature, and with ATS, and leaves in --out: head/ (Orbax),
    metrics.json, tokens.json (some held-out text, token by token), reliability.png, report.html, and the logs and
    checkpoints of training. Started again with the same options, a killed run goes on where it was.

    Attributes:
        model: directory with config.json and safetensors, or a hub id.
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id.
        out: output directory.
        split: of a hub data set or directory.
        fit_fraction: share of the windows, from the first, to fit on; the rest is held out.
        eval_data: further sets to test the head on: files, directories or hub ids.
        dtype: compute dtype of the frozen model.
        bins: equal-width bins of the expected calibration error.
        closed: which bin a confidence on an edge belongs to: the one below (right), above (left), or none.
        seed: of everything random.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
        devices: what the run uses.
        text: how text becomes windows.
        ats: how the head is fitted.
    """

    model: str
    data: str
    out: Path
    split: str | None = None
    fit_fraction: float = 0.6
    eval_data: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    bins: int = 15
    closed: Literal["right", "left", "none"] = "right"
    seed: int = 0
    json: bool = False
    quiet: bool = False
    devices: DeviceOptions = DeviceOptions()  # noqa: RUF009 (frozen)
    text: DataOptions = DataOptions()  # noqa: RUF009 (frozen)
    ats: AtsOptions = AtsOptions()  # noqa: RUF009 (frozen)


@on_devices
def run_ats(run: AtsRun, announce=print) -> dict[str, Any]:
    """Carries out `AtsRun`; returns what it wrote to metrics.json. Raises UserError before any work is lost."""
    if run.bins < 1:
        raise UserError(f"--bins: expected at least 1, got {run.bins}.")
    mesh = run.devices.make_mesh()
    claim_directory(run.out, _identity(run))
    lm = load_placed(run.model, mesh, run.dtype, announce=announce)
    check_context(run.text.seq_len, lm.config.max_positions)
    plan = make_plan(run.ats, lm.config.hidden_size)
    check_batch(mesh, plan.batch_size, plan.accumulate)

    windows = run.text.read(run.data, lm, announce, split=run.split)
    fit, held_out = split_windows(windows, run.fit_fraction)
    # Every set is read before training starts: a wrong path must not cost the run.
    transfer = run.text.read_all(run.eval_data, lm, announce)
    announce(f"split: {len(fit.tokens):,} windows to fit on, {len(held_out.tokens):,} held out")
    with jax.set_mesh(mesh):
        result = calibrate(
            lm,
            fit,
            held_out,
            options=run.ats,
            out=run.out,
            mesh=mesh,
            transfer=transfer,
            bins=run.bins,
            closed=run.closed,
            seed=run.seed,
            description=_identity(run),
            announce=announce,
            quiet=run.quiet,
        )
        sample = token_sample(lm, held_out, identity_head(lm), result.fit.head, batch_size=plan.batch_size)
    if is_first():
        write_file(run.out / "tokens.json", json.dumps(sample) + "\n")
    finish(result.document, run.out, show=not run.json)
    return result.document


class Calibrated(NamedTuple):
    """What `calibrate` returns: the fit, the contents of metrics.json, and the results on the held-out windows."""

    fit: AtsFit
    document: dict[str, Any]
    held_out: dict[str, MethodResult]


def calibrate(
    lm: LanguageModel,
    fit_windows: Windows,
    held_out: Windows,
    *,
    options: AtsOptions = AtsOptions(),  # noqa: B008 (frozen)
    out: Path,
    mesh: Mesh | None = None,
    transfer: Mapping[str, Windows] | None = None,
    bins: int = 15,
    closed: Literal["right", "left", "none"] = "right",
    seed: int = 0,
    description: dict[str, Any] | None = None,
    keep_tokens: bool = False,
    announce=print,
    quiet: bool = False,
) -> Calibrated:
    """Fits a single temperature and an ATS head, saves the head, and evaluates both beside the model as it is.

    Args:
        lm: the frozen model.
        fit_windows: to fit on.
        held_out: to evaluate on.
        options: of the fit.
        out: directory for the head, checkpoints and logs; see `finish` for the rest.
        mesh: devices to fit on, see `fit_ats`; evaluation is on those that are set (`jax.set_mesh`).
        transfer: further sets to evaluate on, by name.
        bins, closed: of the reliability bins.
        seed: of everything random.
        description: of the run, for metrics.json.
        keep_tokens: keep per-token outputs of the held-out windows.
        announce: told in one line each what was done.
        quiet: no progress bars.

    Returns:
        `Calibrated`.
    """
    fitted = fit_ats(
        lm, fit_windows, options, directory=out / "fit", mesh=mesh, seed=seed, announce=announce, quiet=quiet
    )
    save_head(out / "head", fitted.head, notes=fitted.report)
    heads = {"uncalibrated": identity_head(lm), "temperature": fitted.temperature, "ats": fitted.head}
    batch_size = make_plan(options, lm.config.hidden_size).batch_size

    def evaluate(windows: Windows, name: str, keep: bool) -> dict[str, MethodResult]:
        return evaluate_tokens(
            lm,
            windows,
            heads,
            batch_size=batch_size,
            bins=bins,
            closed=closed,
            keep_tokens=keep,
            description=f"evaluating {name}",
            quiet=quiet,
        )

    results = evaluate(held_out, "held out", keep_tokens)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "held_out": results_json(results, closed=closed, seed=seed),
        "run": {**(description or {}), "fit": fitted.report, "base_fingerprint": lm.fingerprint},
    }
    if transfer:
        document["transfer"] = {
            name: results_json(evaluate(windows, name, False), closed=closed, seed=seed)
            for name, windows in transfer.items()
        }
    return Calibrated(fitted, document, results)


def _identity(run: AtsRun) -> dict[str, Any]:
    """What makes two runs the same: all options but where it runs, where the result goes and how it is shown."""
    shown_only = {"out", "json", "quiet", "eval_data", "bins", "closed", "devices"}
    fields = {name: value for name, value in dataclasses.asdict(run).items() if name not in shown_only}
    return {"command": "train ats", **fields}
