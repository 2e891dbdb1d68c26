"""Commands on a model itself: text from it, and its files in another form."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibjax._checks import UserError
from calibjax._files import check_new_directory, check_orbax_path
from calibjax.models import load_model
from calibjax.models.checkpoint import save_checkpoint
from calibjax.models.export import save_model, settings_files
from calibjax.models.generate import check_sampling, generate
from calibjax.models.load import stored_dtype, tensor_dtypes
from calibjax.sharding import make_mesh
from calibjax.train import load_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRun:
    """Continues a text, and says of every token how sure the model is of it, calibrated where a head is given.

    Attributes:
        model: directory with config.json and safetensors, a converted model, or a hub id.
        prompt: texts to continue.
        head: directory of a fitted head, or of the run that holds it; without, confidence is the model's own.
        max_new_tokens: at most so many; fewer where the model ends its text.
        temperature: 0 takes the most likely token; otherwise tokens are drawn at this temperature, 0.0001 to 10,000.
        top_k: draw from the so many most likely tokens.
        top_p: draw from the fewest tokens that have this probability together.
        sample_calibrated: draw from the calibrated distribution; otherwise the head changes no token.
        seed: of the draws.
        dtype: to compute in.
        json: print one JSON document instead of text and tables.
    """

    model: str
    prompt: tuple[str, ...]
    head: Path | None = None
    max_new_tokens: int = 100
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    sample_calibrated: bool = False
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    json: bool = False


def run_generate(run: GenerateRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `GenerateRun`; returns texts and tokens."""
    if not run.prompt:
        raise UserError("--prompt: expected at least one text to continue, got none.")
    check_sampling(run.temperature, run.top_k, run.top_p, run.sample_calibrated)
    lm = load_model(run.model, dtype=run.dtype)
    generated = generate(
        lm,
        run.prompt,
        head=None if run.head is None else load_head(run.head, lm),
        max_new_tokens=run.max_new_tokens,
        temperature=run.temperature,
        top_k=run.top_k,
        top_p=run.top_p,
        sample_calibrated=run.sample_calibrated,
        key=jax.random.key(run.seed),
    )
    columns = {name: np.asarray(value) for name, value in generated._asdict().items()}
    texts = []
    for row, (prompt, text) in enumerate(zip(run.prompt, generated.texts(lm.tokenizer), strict=True)):
        kept = columns["where"][row]
        values = (columns[name][row][kept].tolist() for name in ("tokens", "log_probs", "confidence", "temperature"))
        tokens = [
            {"id": i, "token": lm.tokenizer.decode([i]), "log_prob": p, "confidence": c, "temperature": t}
            for i, p, c, t in zip(*values, strict=True)
        ]
        texts.append({"prompt": prompt, "text": text, "tokens": tokens})
    if not run.json:
        _print(texts, calibrated=run.head is not None)
    return {"model": run.model, "fingerprint": lm.fingerprint, "calibrated": run.head is not None, "texts": texts}


def _print(texts: list[dict[str, Any]], calibrated: bool) -> None:
    console = Console()
    for text in texts:
        console.print(Text.assemble(text["prompt"], (" → ", "bold"), text["text"]))
        table = Table("token", "confidence", *(("uncalibrated", "temperature") if calibrated else ()))
        for token in text["tokens"]:
            row = [Text(repr(token["token"])), f"{token['confidence']:.3f}"]
            if calibrated:
                row += [f"{np.exp(token['log_prob']):.3f}", f"{token['temperature']:.2f}"]
            table.add_row(*row)
        console.print(table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertRun:
    """Writes a model as an Orbax checkpoint, which loads on any number of devices, or back as safetensors.

    The checkpoint holds the weights in the dtype of their files (float16 as float32, which holds it exactly), with
    config.json and the tokenizer: it is a --model like any other, with the same fingerprint. Back again, the files are
    those of Hugging Face's layout; where the tensors were of several dtypes, they come back in float32.

    Attributes:
        model: directory with config.json and safetensors, a converted model, or a hub id.
        out: directory to write; new or empty.
        to: what to write.
        json: print what was done as one JSON document.
    """

    model: str
    out: Path
    to: Literal["orbax", "safetensors"] = "orbax"
    json: bool = False


def run_convert(run: ConvertRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `ConvertRun`; returns what was written."""
    model = Path(run.model)
    if model.exists():
        source, out = (Path(os.path.realpath(path)) for path in (model, run.out))
        if source.is_relative_to(out) or out.is_relative_to(source):
            raise UserError(
                f"--out {run.out}, --model {run.model}: expected directories of which neither is in the other."
            )
        settings_files(model)
    check_new_directory(run.out)
    if run.to == "orbax":
        check_orbax_path(run.out)
    devices = jax.device_count()
    mesh = make_mesh((1, devices, 1)) if devices > 1 else None
    dtype = stored_dtype(run.model)
    lm = load_model(run.model, dtype="bfloat16" if dtype == "bfloat16" else "float32", mesh=mesh)
    assert lm.path is not None
    if run.to == "orbax":
        save_checkpoint(run.out, lm, dtype=dtype, tensor_dtypes=tensor_dtypes(run.model))
    else:
        save_model(run.out, lm.config, lm.params, like=lm.path, dtype=dtype)
    announce(f"{lm!r} in {run.out}: {run.to}, {dtype}")
    return {"out": str(run.out), "format": run.to, "dtype": dtype, "fingerprint": lm.fingerprint}
