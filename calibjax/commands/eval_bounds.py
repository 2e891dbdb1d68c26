"""`calibjax eval bounds`: the smallest entropy that a model's predictions can have."""

import dataclasses
from pathlib import Path

from calibjax.commands.groups import JsonOptions, load_placed
from calibjax.eval.layers.bounds import model_bound
from calibjax.eval.report.schema import Document
from calibjax.eval.report.terminal import print_bounds
from calibjax.runtime.context import Log
from calibjax.runtime.distributed import DeviceOptions, is_first
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_file, json_text, write_file
from calibjax.runtime.options import not_identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalBoundsOptions(JsonOptions):
    """Computes the smallest entropy of a model's predictions for any text, from its final norm and unembedding.

    Small models with large vocabularies gain less from label smoothing because of it (arXiv 2508.00264, section 4).
    Example: calibjax eval bounds --model HuggingFaceTB/SmolLM2-135M google/gemma-3-270m

    Attributes:
        model: directories with config.json and safetensors, GGUF files, or hub ids.
        out: file to write the figures to, as JSON.
        devices: devices that the weights are divided over.
    """

    model: tuple[str, ...]
    out: Path | None = None
    devices: DeviceOptions = not_identity(DeviceOptions())


def run(options: EvalBoundsOptions, log: Log = print) -> Document:
    if not options.model:
        raise UserError("--model: expected at least one directory or hub id, got none.")
    if options.out is not None:
        with about("--out"):
            check_new_file(options.out)
    mesh = options.devices.make_mesh()
    bounds = []
    for model in options.model:
        lm = load_placed(model, mesh, "float32")
        with about("--model"):
            bounds.append(model_bound(lm, Path(model.rstrip("/")).name))
    document = {"models": [bound.to_json() for bound in bounds]}
    files = ""
    if not is_first():
        return document
    if options.out is not None:
        write_file(options.out, json_text(document))
        files = f"figures in {options.out}"
    if not options.json:
        print_bounds(document, files=files)
    elif files:
        log(files)
    return document
