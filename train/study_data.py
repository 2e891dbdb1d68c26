"""How much text does a temperature head need?

    python train/study_data.py --model path/to/model --data data.jsonl --out runs/data

Temperature scaling and heads are fitted on 10^3 to 10^6 tokens and evaluated on the same held-out sequences, those at
the end of the data. Every seed draws other sequences. Prints a table in Markdown and writes it to --out with
metrics.json; fitted heads are kept there, so that an interrupted run resumes.

A head is fitted for 6 epochs, but for at least 200 steps, because six epochs of a thousand tokens would be six
steps, and for about 2,000 at most.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from calibjax.cli import execute
from calibjax.commands.common import DataOptions, claim_directory
from calibjax.commands.study.fits import SINGLE, fit_heads
from calibjax.data import Sequences
from calibjax.eval.compare.repeats import evaluate_repeats
from calibjax.eval.report.rows import short
from calibjax.eval.tokens import identity_head
from calibjax.heads import FittedHead, HeadKind
from calibjax.models import load_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file
from calibjax.train import AtsOptions
from calibjax.train.curves import array_hash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Fits heads on growing parts of one set of text.

    Attributes:
        model: directory with config.json and safetensors.
        data: file of text.
        out: for tables and heads.
        tokens: numbers of tokens to fit on, ascending; tokens without a loss (prompts, padding) do not count.
        heads: kinds of heads beside temperature scaling.
        held_out: sequences at the end of the data that are held out.
        seeds: draws of the sequences to fit on.
        epochs: passes over the sequences to fit on.
        min_steps: fewest steps.
        max_steps: with at least one epoch, the most steps.
        batch_size: most sequences per step.
        text: how text becomes sequences.
        quiet: no progress bars.
    """

    model: Path
    data: str
    out: Path
    tokens: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    heads: tuple[HeadKind, ...] = ("linear", "mlp")
    held_out: int = 640
    seeds: int = 3
    epochs: int = 6
    min_steps: int = 200
    max_steps: int = 2_000
    batch_size: int = 16
    text: DataOptions = DataOptions()
    quiet: bool = False


def drawn(sequences: Sequences, tokens: int, seed: int) -> Sequences:
    """Sequences drawn at random, of which the first `tokens` or a few more count."""
    order = np.random.default_rng(seed).permutation(len(sequences.tokens))
    count = np.cumsum(sequences.where[order].sum(axis=1))
    if count[-1] < tokens:
        raise UserError(f"tokens: expected at most the {count[-1]:,} tokens of the data, got {tokens:,}.")
    return sequences.take(np.sort(order[: 1 + int(np.searchsorted(count, tokens))]))


def options_of(study: Study, head: HeadKind, sequences: int) -> AtsOptions:
    """One head, by the joint loss of every study."""
    batch = min(study.batch_size, sequences)
    steps = math.ceil(sequences / batch)  # of one epoch
    epochs = max(min(study.epochs, study.max_steps // steps), math.ceil(study.min_steps / steps))
    return AtsOptions(head=head, loss="joint", refit_temperature=False, epochs=epochs, batch_size=batch)


def run(study: Study) -> dict[str, Any]:
    """Fits and evaluates; returns the contents of metrics.json."""
    lm = load_model(study.model)
    read = study.text.read(study.data, lm, print)
    settings = {name: getattr(study, name) for name in ("held_out", "epochs", "min_steps", "max_steps", "batch_size")}
    sequences = {"model": lm.fingerprint, "sequences": array_hash(read._asdict())}
    claim_directory(study.out, {"command": "study_data", **settings, **sequences})
    fit, held_out = read.take(slice(-study.held_out)), read.take(slice(-study.held_out, None))
    context = RunContext(directory=study.out / "heads", progress=not study.quiet)
    heads: dict[str, list[FittedHead]] = {"uncalibrated": [identity_head(lm)]}
    for seed in range(study.seeds):
        for tokens in study.tokens:
            part = drawn(fit, tokens, seed)
            print(f"{tokens:,} tokens, draw {seed}: {len(part.tokens):,} sequences", flush=True)
            variants = {head: options_of(study, head, len(part.tokens)) for head in study.heads}
            fitted = fit_heads(lm, part, variants, seeds=1, context=context.within(f"{tokens}-{seed}"))
            for name, repeats in fitted.items():
                heads.setdefault(f"{name}, {tokens}", []).extend(repeats)
            jax.clear_caches()
    against = {name: f"{SINGLE}, {name.split(', ')[1]}" for name in heads if ", " in name and SINGLE not in name}
    figures = evaluate_repeats(lm, held_out, heads, against=against, context=context)
    return {"study": "data", "tokens": list(study.tokens), "heads": [SINGLE, *study.heads], "held_out": figures}


def table(document: dict[str, Any]) -> str:
    """A row for each number of tokens: NLL and ECE of every head, ± half the range of the draws."""
    rows, names = document["held_out"]["methods"], document["heads"]

    def cell(name: str, figure: str, form: str) -> str:
        of_row = rows[name][figure]
        spread = (max(of_row["seeds"]) - min(of_row["seeds"])) / 2
        return short(of_row["value"], form) + (f" ±{short(spread, form)}" if len(of_row["seeds"]) > 1 else "")

    columns = ["fit tokens", *(f"{name}: {figure}" for name in names for figure in ("NLL", "ECE"))]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    base = [cell("uncalibrated", "nll", ".3f"), cell("uncalibrated", "ece", ".4f")]
    lines.append("| none (uncalibrated) | " + " | ".join(base * len(names)) + " |")
    for tokens in document["tokens"]:
        cells = [cell(f"{name}, {tokens}", *of) for name in names for of in (("nll", ".3f"), ("ece", ".4f"))]
        lines.append(f"| {tokens:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(study: Study) -> None:
    document = run(study)
    write_file(study.out / "metrics.json", json.dumps(document, indent=2) + "\n")
    write_file(study.out / "table.md", table(document))
    print(f"\n{table(document)}\nresults in {study.out}: metrics.json, table.md, heads/")


if __name__ == "__main__":
    sys.exit(execute(tyro.cli(Study), lambda study, _: main(study)))
