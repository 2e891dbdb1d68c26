"""Is ATS ever worse than temperature scaling, on the domain that it was fitted on or on another?

    python eval/study_pairs.py --assets path/to/assets --out runs/pairs

On each domain, a part of the rows fits temperature scaling and an ATS head by `--loss auto`; both are evaluated on the
held-out rows of every domain. With --leave-one-out both are fitted on all domains but one, as `train ats --data` with
several sets, and evaluated on that one too. Prints a table in Markdown and writes it to --out; finished pairs are kept
there, so that an interrupted run resumes.
"""

import dataclasses
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from studies import repeats_json
from tqdm.auto import tqdm

from calibjax import metrics
from calibjax.cli import execute
from calibjax.commands.common import claim_directory
from calibjax.commands.parser import parse_script
from calibjax.data import Sequences, split_sequences
from calibjax.data.load import load_text
from calibjax.eval.tokens import evaluate_tokens
from calibjax.models import LanguageModel, load_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train import AtsOptions
from calibjax.train.ats import fit_ats

MODELS = {"stories260K": 128, "tinystories-656k": 128, "baby-llama-105": 128, "craftgpt-5M": 64}
"""Name -> tokens a sequence."""
DOMAINS = {
    "alpaca": ("alpaca_cleaned/alpaca_cleaned.jsonl.gz", "output"),
    "lima": ("lima/lima.jsonl.gz", None),
    "wikitext2": ("wikitext2/test.txt.gz", None),
    "stories": ("tinystories_sample/tinystories_sample.jsonl.gz", None),
    "classic_books": ("classic_books", "text"),
    "tiny_shakespeare": ("tiny_shakespeare/input.txt.gz", None),
}
"""Name -> file in assets/data, and its column; of classic_books a passage of each book."""
_PASSAGE = slice(20_000, 24_000)  # characters: beyond title pages and prefaces
_METHODS = ("temperature scaling", "ATS")
_TITLES = {"nll": "NLL", "brier": "Brier", "ece": "ECE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Fits ATS on every domain with every model and evaluates it on every domain.

    Attributes:
        assets: directory with models/ and data/.
        out: for results.
        models: names of directories in assets/models.
        seeds: fits of each head; a seed sets its start, the order of the sequences and the folds.
        tokens: of each domain, in sequences from its first rows: 3/4 to fit on, the rest held out.
        recipe: as `train ats --recipe`.
        leave_one_out: fit on all domains but one, instead of on one.
        quiet: no progress bar.
    """

    assets: Path
    out: Path
    models: tuple[str, ...] = tuple(MODELS)
    seeds: int = 3
    tokens: int = 128_000
    recipe: Literal["default", "paper"] = "default"
    leave_one_out: bool = False
    quiet: bool = False


def passages(directory: Path, out: Path) -> Path:
    """Writes a passage of every book of a directory to one file; returns it."""
    file = out / f"{directory.name}.jsonl"
    if not file.is_file():
        rows = []
        for part in sorted(directory.glob("*.jsonl.gz")):
            with gzip.open(part, "rt") as lines:
                rows += [json.dumps({"text": json.loads(line)["text"][_PASSAGE]}) for line in lines]
        write_file(file, "\n".join(rows) + "\n")
    return file


def read(study: Study, lm: LanguageModel, domain: str, seq_len: int) -> tuple[Sequences, Sequences]:
    """The sequences of a domain: (fit, held out)."""
    path, column = DOMAINS[domain]
    source = study.assets / "data" / path
    source = passages(source, study.out) if source.is_dir() else source
    count = study.tokens // seq_len
    return split_sequences(load_text(source, lm, seq_len=seq_len, text_column=column, max_sequences=count), 0.75)


def figures(lm: LanguageModel, held_out: Sequences, heads: dict[str, list[Any]], context: RunContext) -> dict[str, Any]:
    """Temperature scaling and ATS on one set: `repeats_json`, and the smooth calibration error of each seed."""
    flat = {f"{name} {index}": head for name, repeats in heads.items() for index, head in enumerate(repeats)}
    outputs = evaluate_tokens(lm, held_out, flat, keep_tokens=True, context=context)
    results = {name: [outputs[f"{name} {index}"] for index in range(len(of))] for name, of in heads.items()}
    document: Any = repeats_json(results, held_out, {"ATS": "temperature scaling"})
    where = held_out.where
    for name, of in results.items():
        smooth = []
        for result in of:
            assert result.tokens is not None
            right = (result.tokens.argmax == held_out.targets)[where]
            smooth.append(float(metrics.smooth_ece(result.tokens.confidence[where], right)))
        document["methods"][name]["smooth_ece"] = {"value": float(np.mean(smooth)), "seeds": smooth}
    return document


def run_domain(study: Study, lm: LanguageModel, sets: dict[str, Any], domain: str, file: Path) -> dict[str, Any]:
    """Fits on one domain (on all others), with every seed, and evaluates on all."""
    if file.is_file():
        return json.loads(file.read_text())
    data = sets[domain][0]
    if study.leave_one_out:
        data = {name: fit for name, (fit, _) in sets.items() if name != domain}
    fits = [
        fit_ats(lm, data, AtsOptions(recipe=study.recipe), RunContext(seed=seed, progress=False))
        for seed in range(study.seeds)
    ]
    heads = {_METHODS[0]: [fits[0].temperature], _METHODS[1]: [fit.head for fit in fits]}
    context = RunContext(progress=False)
    with jax.set_mesh(context.mesh):
        found = {name: figures(lm, held_out, heads, context) for name, (_, held_out) in sets.items()}
    document = {"losses": [fit.report["loss"] for fit in fits], "sets": found}
    write_file(file, json.dumps(document) + "\n")
    return document


def run(study: Study) -> dict[str, dict[str, Any]]:
    """model -> domain -> what `run_domain` returns."""
    require_directory(study.assets / "data", "--assets")
    identity = {name: getattr(study, name) for name in ("tokens", "seeds", "recipe", "leave_one_out")}
    claim_directory(study.out, {"command": "study_pairs", **identity})
    bar = tqdm(total=len(study.models) * len(DOMAINS), desc="pairs", disable=study.quiet)
    found: dict[str, dict[str, Any]] = {}
    for model in study.models:
        lm = load_model(study.assets / "models" / model)
        sets = {name: read(study, lm, name, MODELS.get(model, 128)) for name in DOMAINS}
        for domain in DOMAINS:
            document = run_domain(study, lm, sets, domain, study.out / f"{model}-{domain}.json")
            found.setdefault(model, {})[domain] = document
            bar.update()
        jax.clear_caches()
    bar.close()
    return found


def pairs(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(model, domain of the fit, domain of the evaluation, its figures) of every pair."""
    for model, fits in found.items():
        for domain, document in fits.items():
            for name, of_set in document["sets"].items():
                yield model, domain, name, of_set["methods"]


def outcome(methods: dict[str, Any], figure: str) -> int:
    """-1: ATS is lower beyond noise, 1: higher beyond noise, else 0. Noise: the 95% interval of the difference."""
    difference = methods["ATS"]["against"][figure]
    return -1 if difference["high"] < 0 else int(difference["low"] > 0)


def tables(found: dict[str, dict[str, Any]], *, leave_one_out: bool = False) -> str:
    """Own domains one by one, and counts of the outcomes on own and on carried domains."""
    head = "| model | domain | loss | NLL | Brier | ECE | debiased ECE | smooth ECE |"
    lines = ["Temperature scaling → ATS, mean of the seeds.", "", head, "|---" * 8 + "|"]
    marks = {-1: "", 0: " (=)", 1: " (+)"}

    def cell(methods: dict[str, Any], figure: str, key: str = "value") -> str:
        before, after = (methods[name][figure][key] for name in _METHODS)
        mark = marks[outcome(methods, figure)] if key == "value" and figure in methods["ATS"]["against"] else ""
        return f"{before:.4f} → {after:.4f}{mark}"

    for model, domain, name, methods in pairs(found):
        if domain == name:
            losses = sorted(set(found[model][domain]["losses"]))
            cells = [cell(methods, figure) for figure in ("nll", "brier", "ece")]
            cells += [cell(methods, "ece", "debiased"), cell(methods, "smooth_ece")]
            lines.append(f"| {model} | {domain} | {', '.join(losses)} | " + " | ".join(cells) + " |")
    lines += ["", "(=): the difference is within noise; (+): higher beyond noise; no mark: lower beyond noise.", ""]
    lines += [
        "| pairs | figure | lower | within noise | higher | median ratio ATS / temperature scaling |",
        "|---" * 6 + "|",
    ]
    kinds = ("the domain left out", "the domains of the fit") if leave_one_out else ("own domain", "carried")
    for kind, own in zip(kinds, (True, False), strict=True):
        chosen = [methods for _, domain, name, methods in pairs(found) if (domain == name) == own]
        for figure in ("nll", "brier", "ece"):
            counts = [sum(outcome(methods, figure) == sign for methods in chosen) for sign in (-1, 0, 1)]
            key = "debiased" if figure == "ece" else "value"
            ratio = [m["ATS"][figure][key] / max(m[_METHODS[0]][figure][key], 1e-9) for m in chosen]
            title = _TITLES[figure] + (" (ratio: debiased)" if key == "debiased" else "")
            lines.append(
                f"| {kind} ({len(chosen)}) | {title} | {' | '.join(map(str, counts))} | {np.median(ratio):.2f} |"
            )
    worse = [
        f"{model}, {domain} → {name}: {_TITLES[figure]} {cell(methods, figure)}"
        for model, domain, name, methods in pairs(found)
        for figure in ("nll", "brier", "ece")
        if outcome(methods, figure) > 0
    ]
    return "\n".join([*lines, "", "Higher beyond noise:", "", *(f"- {line}" for line in worse or ["nowhere"])]) + "\n"


def main(study: Study) -> None:
    table = tables(run(study), leave_one_out=study.leave_one_out)
    write_file(study.out / "table.md", table)
    print(f"\n{table}\nresults in {study.out}: table.md, one .json for each model and domain")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
