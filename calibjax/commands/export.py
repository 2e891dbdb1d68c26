"""`calibjax export`: a fitted head as safetensors and JSON, for PyTorch, transformers and servers."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from calibjax.commands.common import JsonOptions
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model
from calibjax.runtime.errors import UserError
from calibjax.train import load_head
from calibjax.train.checkpoint import head_notes
from calibjax.train.portable import constant_head, export_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(JsonOptions):
    """Which head leaves JAX.

    Attributes:
        run: directory of a run of `train ats`, or of a head.
        model: base model of the head; by default the one of the run.
        method: the fitted head, or temperature scaling of the same run.
        json: print what was written as one JSON document.
    """

    run: Annotated[Path, tyro.conf.Positional]
    model: str | None = None
    method: Literal["ats", "temperature"] = "ats"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(HeadOptions):
    """Exports the head of a run as one directory of safetensors and JSON, which JAX and PyTorch read.

    In Python: `calibjax.load_head(OUT, lm)`, or `calibjax.torch.attach(model, OUT)` for a model of transformers, which
    needs neither JAX nor Flax.

    Attributes:
        out: directory to write; an earlier export there is replaced.
    """

    out: Path


def run(options: ExportOptions, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the command; returns what was written."""
    head, lm, notes = exported_head(options, log)
    document: dict[str, Any] = {"out": str(options.out), "base_fingerprint": lm.fingerprint}
    if options.method == "temperature":
        document["temperature"] = notes["temperature"]
    export_head(options.out, head, lm, notes=notes)
    document["files"] = sorted(file.name for file in options.out.iterdir())
    log(f"{head!r} in {options.out}: {', '.join(document['files'])}")
    return document


def exported_head(options: HeadOptions, log: Callable[[str], None]) -> tuple[FittedHead, LanguageModel, dict[str, Any]]:
    """The head that the options name, its base model and its notes."""
    head, notes = load_head(options.run), head_notes(options.run)
    lm = load_model(_model_of(options))
    if options.method == "temperature":
        head = _temperature_scaling(head, notes, options.run)
        log(
            f"Temperature scaling at {notes['temperature']:.4f}: the calibrated distribution is softmax(logits / "
            f"{notes['temperature']:.4f}). It is not a sampling temperature: engines that return log-probabilities of "
            "unscaled logits (vLLM's raw_logprobs) return them uncalibrated whatever temperature they sample at. "
            f'To sample from the calibrated distribution, set "temperature": {notes["temperature"]:.4f} and '
            '"do_sample": true in generation_config.json.'
        )
    return head, lm, notes


def _model_of(options: HeadOptions) -> str:
    """The base model: --model, or the one in metrics.json of the run."""
    if options.model is not None:
        return options.model
    for directory in (options.run, options.run.parent):
        try:
            return str(json.loads((directory / "metrics.json").read_text(encoding="utf-8"))["run"]["model"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise UserError(f"--model: expected the base model; {options.run} holds no metrics.json that names it.")


def _temperature_scaling(head: FittedHead, notes: dict[str, Any], directory: Path) -> FittedHead:
    if not isinstance(notes.get("temperature"), float) or not notes["temperature"] > 0:
        raise UserError(f"--method temperature: {directory} does not record a temperature; export its head instead.")
    return constant_head(head, notes["temperature"])
