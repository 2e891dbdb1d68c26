"""Commands that look at models and change nothing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibjax.eval.layers.bounds import head_bound, print_head_bounds
from calibjax.models import load_model
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadBoundRun:
    """How small the entropy of a model's predictions can get, whatever the text: from its final norm and unembedding.

    Prints a table, one row a model: why small models with large vocabularies profit less from label smoothing
    (arXiv 2508.00264, section 4).

    Attributes:
        model: directories with config.json and safetensors, or hub ids.
        out: file to write the figures to, as JSON.
        json: print the figures as one JSON document instead of the table.
    """

    model: tuple[str, ...]
    out: Path | None = None
    json: bool = False


def run_head_bound(run: HeadBoundRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `HeadBoundRun`; returns the figures."""
    if not run.model:
        raise UserError("--model: expected at least one directory or hub id, got none.")
    bounds = [head_bound(load_model(model), Path(model.rstrip("/")).name) for model in run.model]
    document = {"models": [bound.to_json() for bound in bounds]}
    if not run.json:
        print_head_bounds(bounds)
    if run.out is not None:
        write_file(run.out, json.dumps(document, indent=2) + "\n")
        announce(f"figures in {run.out}")
    return document
