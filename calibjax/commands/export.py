"""`calibjax export`: a fitted head as safetensors and JSON, for PyTorch, transformers and servers."""

import dataclasses
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from calibjax.commands.groups import JsonOptions
from calibjax.eval.report.schema import Document
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model
from calibjax.models.calibrated import head_program
from calibjax.models.generate import default_stop_tokens
from calibjax.recalibrate.programs import stablehlo_program
from calibjax.recalibrate.saved import is_recalibrator, load, save
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_directory, json_text, read_json
from calibjax.runtime.options import Positional
from calibjax.train import load_head
from calibjax.train.saved import export_head, head_notes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(JsonOptions):
    """Which head leaves JAX.

    Attributes:
        run: directory of a run of `train ats` or `quickstart`, of a head, or of what `compare --save` wrote.
        model: base model of the head; by default the one of the run, with its adapter.
        adapter: directory of a low-rank adapter of PEFT, which is merged into the base model.
        method: the fitted head, or temperature scaling of the same run.
    """

    run: Annotated[Path, Positional()]
    model: str | None = None
    adapter: Path | None = None
    method: Literal["ats", "temperature"] = "ats"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(HeadOptions):
    """Exports the head of a run as one directory of safetensors and JSON, which JAX and PyTorch read.

    In Python: `calibjax.load_head(OUT, lm)`, or, without JAX, `calibjax.torch.attach(model, OUT)` for transformers.
    With --method temperature, generation_config.json holds the settings that sample from the calibrated distribution.
    Example: calibjax export runs/ats --out exported

    Attributes:
        out: directory to write; an earlier export of the same files is replaced.
        also: further files: the head, or the method that compare saved, as a program of StableHLO (stablehlo), which
            JAX runs without calibjax; the head as an ONNX model (onnx).
    """

    out: Path
    also: tuple[Literal["onnx", "stablehlo"], ...] = ()


def run(options: ExportOptions, log: Log = print) -> Document:
    with about("--out"):
        check_new_directory(options.out, replace=True)
    if is_recalibrator(options.run):
        return _recalibrator(options, log)
    _check_programs(options.also)
    head, lm = write_export(options, options.out, log, options.also)
    files = sorted(file.name for file in options.out.iterdir())
    log(f"The head was exported: {head!r}.")
    log(f"head in {options.out}: {', '.join(files)}")
    return {"out": str(options.out), "base_fingerprint": lm.fingerprint, "files": files}


def _recalibrator(options: ExportOptions, log: Log) -> dict[str, Any]:
    """Verifies what `compare --save` kept, which is portable already, and writes it again."""
    if options.method != "ats" or options.model is not None or options.adapter is not None:
        raise UserError(f"{options.run} holds a recalibrator: --method, --model and --adapter are options of heads.")
    method = load(options.run)
    if "onnx" in options.also:
        raise UserError(f"--also onnx: {options.run} holds a recalibrator, which is exported as stablehlo.")
    _check_programs(options.also)
    more = {"method.stablehlo": stablehlo_program(method)} if "stablehlo" in options.also else {}
    save(options.out, method, more=more)
    files = sorted(file.name for file in options.out.iterdir())
    log(f"The recalibration method was exported: {method.name}.")
    log(f"method in {options.out}: {', '.join(files)}")
    return {"out": str(options.out), "method": method.name, "files": files}


def write_export(
    options: HeadOptions, directory: Path, log: Log, also: tuple[str, ...] = ()
) -> tuple[FittedHead, LanguageModel]:
    """Writes the head that the options name into a directory; returns it and its base model."""
    head, notes = load_head(options.run), head_notes(options.run)
    with about("--model"):
        base = _base_model(options, notes)
        try:
            lm = load_model(base["model"], adapter=options.adapter or base.get("adapter"))
        except UserError as error:
            if options.model is not None:
                raise
            hint = "If its path was relative to where the run was started, give --model its path from here"
            raise UserError(f"{error} {options.run} names this model. {hint}.") from error
    more: dict[str, str | bytes] = {}
    if options.method == "temperature":
        temperature = notes.get("temperature")
        if not isinstance(temperature, float) or not temperature > 0:
            raise UserError(f"--method temperature: {options.run} records no temperature; export its head instead.")
        config = dataclasses.replace(head.config, kind="constant")
        head = FittedHead(config, {"log_scale": np.float32(-np.log(temperature))}, head.fingerprint)
        # Left out, transformers cuts the distribution to its 50 most likely tokens.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        more["generation_config.json"] = json_text({"eos_token_id": default_stop_tokens(lm), **sampling})
        log(
            f"Temperature scaling: the calibrated distribution is softmax(logits / {temperature}).\n"
            "Sampling at this temperature, with neither top-k nor top-p, draws from it.\n"
            "Log-probabilities before the sampling temperature, as vLLM's raw_logprobs, are uncalibrated."
        )
    if "stablehlo" in also:
        more["head.stablehlo"] = head_program(head)
    if "onnx" in also:
        from calibjax.torch import to_onnx

        with tempfile.TemporaryDirectory() as folder:
            export_head(Path(folder) / "head", head, lm)
            more["head.onnx"] = to_onnx(Path(folder) / "head")
    export_head(directory, head, lm, notes=notes, more=more)
    return head, lm


def _check_programs(names: tuple[str, ...]) -> None:
    """Raises `UserError` where a package that writes one of `--also` is missing."""
    needs = {"onnx": ("torch", "onnx", "onnxscript"), "stablehlo": ("flatbuffers",)}
    for name in names:
        if missing := [package for package in needs[name] if find_spec(package) is None]:
            raise UserError(f"--also {name}: {', '.join(missing)} not installed: pip install 'calibjax[export]'.")


def _base_model(options: HeadOptions, notes: dict[str, Any]) -> dict[str, Any]:
    """`model` and perhaps `adapter`: --model, those that the head or its run names, or the model that the run wrote."""
    if options.model is not None:
        return {"model": options.model}
    if isinstance(notes.get("model"), str):
        return notes
    for directory in (options.run, options.run.parent) if options.run.name == "head" else (options.run,):
        if (directory / "model" / "config.json").is_file():
            return {"model": str(directory / "model")}
        try:
            run = read_json(directory / "metrics.json")["run"]
            return {"model": str(run["model"]), "adapter": run.get("adapter")}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    raise UserError(f"expected the base model; {options.run} holds no metrics.json that names it.")
