"""`calibjax convert`: a model's files in another form."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

import jax

from calibjax.commands.groups import JsonOptions
from calibjax.eval.report.schema import Document
from calibjax.models import load_model
from calibjax.models.hf_export import save_model, settings_files
from calibjax.models.load import stored_dtype
from calibjax.models.orbax_checkpoint import save_checkpoint
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_directory, check_orbax_path
from calibjax.runtime.sharding import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(JsonOptions):
    """Writes a model as an Orbax checkpoint, which loads on any number of devices, or back as safetensors.

    The checkpoint holds the weights in the dtype of their files (float16 as float32, which holds it exactly), with
    config.json and the tokenizer: it is a --model like any other, with the same fingerprint. With --to safetensors the
    files are in Hugging Face's layout; if the tensors were of several dtypes, all are written in float32.
    Example: calibjax convert --model HuggingFaceTB/SmolLM2-135M --out models/smollm2

    Attributes:
        model: directory with config.json and safetensors, GGUF file, converted model, or hub id.
        out: directory to write; new or empty.
        to: format to write.
    """

    model: str
    out: Path
    to: Literal["orbax", "safetensors"] = "orbax"


def run(options: ConvertOptions, log: Log = print) -> Document:
    model = Path(options.model)
    if model.exists():
        source, out = (Path(os.path.realpath(path)) for path in (model, options.out))
        if source.is_relative_to(out) or out.is_relative_to(source):
            raise UserError(f"--out {options.out}: expected a directory that neither holds --model nor lies in it.")
        settings_files(model)
    with about("--out"):
        check_new_directory(options.out)
        if options.to == "orbax":
            check_orbax_path(options.out)
    devices = jax.device_count()
    mesh = make_mesh((1, devices, 1)) if devices > 1 else None
    with about("--model"):
        dtype = stored_dtype(options.model)
        lm = load_model(options.model, dtype="bfloat16" if dtype == "bfloat16" else "float32", mesh=mesh)
    assert lm.path is not None
    if options.to == "orbax":
        save_checkpoint(options.out, lm, dtype=dtype)
    else:
        save_model(options.out, lm.config, lm.params, like=lm.path, dtype=dtype)
    log(f"The model was converted to {options.to} in {dtype}: {lm!r}.")
    log(f"model in {options.out}, for --model")
    return {"out": str(options.out), "format": options.to, "dtype": dtype, "fingerprint": lm.fingerprint}
