"""`calibjax generate`: text from a model, with the calibrated confidence of every token."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibjax.models import load_model
from calibjax.models.generate import check_sampling, generate
from calibjax.runtime.errors import UserError
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
