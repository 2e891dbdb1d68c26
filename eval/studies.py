"""What determines the quality of a temperature head? Each study fits many heads on the same hidden states.

    python eval/studies.py pooling --model path/to/model --data data.jsonl --out runs/pooling
    python eval/studies.py transfer --model path/to/model --data alpaca.jsonl lima.jsonl --out runs/transfer

`pooling`, `losses`, `alpha` and `heads` vary one property of the head. `transfer` fits on each set of `--data` and
evaluates on all of them. Each prints tables in Markdown and writes them to --out with metrics.json; fitted heads are
kept there, so that an interrupted study resumes. docs/studies.md has results.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from calibjax import metrics
from calibjax.cli import execute
from calibjax.commands.groups import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.commands.run_directory import claim_directory
from calibjax.data import Sequences, read_source, split_sequences
from calibjax.eval.report.tables import short
from calibjax.eval.tokens import evaluate_tokens
from calibjax.heads import FittedHead
from calibjax.losses import LOSSES
from calibjax.models import LanguageModel, load_model
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file
from calibjax.runtime.options import Positional
from calibjax.train import AtsOptions, load_head, save_head
from calibjax.train.ats import fit_ats
from calibjax.train.candidates import train_head
from calibjax.train.curves import token_curves
from calibjax.train.options import make_plan
from calibjax.train.solve import fit_token_temperature

TEMPERATURE, BASE = "temperature scaling", "uncalibrated"
COMPARED = ("nll", "brier", "ece")
FIGURES = (*COMPARED, "accuracy", "confidence")
"""Figures of every row."""
SUBJECTS = {
    "medical": "anatomy clinical_knowledge college_medicine human_aging medical_genetics nutrition "
    "professional_medicine virology",
    "legal": "international_law jurisprudence professional_law",
    "technical": "abstract_algebra college_computer_science college_mathematics college_physics computer_security "
    "conceptual_physics electrical_engineering high_school_computer_science high_school_physics "
    "high_school_statistics machine_learning",
}
"""Subjects of MMLU that are a domain together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Fits many heads on the same hidden states and compares them on held-out sequences.

    Attributes:
        name: what varies.
        model: directory with config.json and safetensors.
        data: text to fit on and, of the rest, to evaluate on; of transfer several sets.
        out: for tables, metrics.json and heads.
        eval_data: further sets to evaluate on.
        mmlu: of transfer: questions of MMLU; its medical, legal and technical subjects become domains of text, each row
            a question and its right answer.
        fit_fraction: fraction of the sequences, from the first, to fit on.
        seeds: fits of each head.
        head_kind: of losses and alpha: the head that is fitted.
        features: of losses, alpha and pooling: what the heads read.
        text: how text becomes sequences.
    """

    name: Annotated[Literal["pooling", "losses", "alpha", "heads", "transfer"], Positional()]
    model: str
    data: tuple[str, ...]
    out: Path
    eval_data: tuple[str, ...] = ()
    mmlu: str | None = None
    fit_fraction: float = 0.6
    seeds: int = 3
    head_kind: Literal["linear", "mlp", "transformer"] = "mlp"
    features: tuple[str, ...] = ("hidden_states",)
    text: DataOptions = DataOptions()

    def head(self, **changes: Any) -> AtsOptions:
        """What a study does not vary: by default an MLP on hidden states; one loss, no refitted temperature."""
        shared = {"head_kind": self.head_kind, "features": self.features, "loss": "joint", "refit_temperature": False}
        return AtsOptions(**shared | changes)


def variants_of(name: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The heads of a study as changes of `Study.head`, and those that are compared with another one of them."""
    if name == "pooling":
        kinds = ("linear", "mlp", "transformer")
        heads = {f"{kind}, {of}": {"head_kind": kind, "pooling": of} for kind in kinds for of in ("token", "sequence")}
        return heads, {f"{kind}, sequence": f"{kind}, token" for kind in kinds}
    if name == "losses":
        weighted = {"label-smoothing": (0.1, 0.5), "selective": (0.1, 0.5), "selective-balanced": (0.5,)}
        losses = {loss: {"loss": loss} for loss in LOSSES if loss not in weighted} | _weighted(weighted)
        return losses, {loss: "cross-entropy" for loss in losses if loss != "cross-entropy"}
    if name == "alpha":
        grid = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
        return _weighted(dict.fromkeys(("label-smoothing", "selective", "selective-balanced"), grid)), {}
    everything = "hidden_states+max_logit+log_std_logits+argmax_embedding"
    # An MLP normalises what it reads, and of a single number nothing but the sign would be left.
    features = {
        "linear": ("hidden_states", "max_logit", "log_std_logits", "max_logit+log_std_logits", "argmax_embedding"),
        "mlp": ("hidden_states", "argmax_embedding"),
        "transformer": ("hidden_states",),
    }
    variants = {}
    for kind, names in features.items():
        for read in (*names, everything):
            title = "all four" if read == everything else read
            variants[f"{kind}: {title}"] = {"head_kind": kind, "features": tuple(read.split("+"))}
    return variants, {}


def _weighted(grids: Mapping[str, tuple[float, ...]]) -> dict[str, dict[str, Any]]:
    return {f"{loss}, {alpha:g}": {"loss": loss, "alpha": alpha} for loss, grid in grids.items() for alpha in grid}


def fit_heads(
    lm: LanguageModel,
    sequences: Sequences,
    variants: Mapping[str, AtsOptions],
    seeds: int,
    context: RunContext,
) -> dict[str, list[FittedHead]]:
    """Temperature scaling, and every variant with every seed, on hidden states that are computed once.

    Heads that are in the context's directory are loaded.
    """
    directory = context.require_directory()
    folders = {name: directory / re.sub(r"[^\w.+-]+", "-", name) for name in (TEMPERATURE, *variants)}
    places = {(name, seed): folders[name] / str(seed) for name in variants for seed in range(seeds)}
    places = {(TEMPERATURE, 0): folders[TEMPERATURE] / "0", **places}
    missing = [at for at, place in places.items() if not (place / "head.json").is_file()]
    if missing:
        plans = {name: make_plan(options, lm.config.hidden_size) for name, options in variants.items()}
        batch_size = next(iter(plans.values())).batch_size
        losses = [plan.trials[0].loss for plan in plans.values()]
        heads = [plan.heads[-1] for plan in plans.values()]
        tokens = token_curves(lm, sequences, heads, losses=losses, keep="disk", batch_size=batch_size, context=context)
        for name, seed in context.bar(missing, title=f"fitting {directory.name}", unit="head"):
            if name == TEMPERATURE:
                head = FittedHead.constant(lm, fit_token_temperature(tokens).log_scale)
            else:
                plan, place = plans[name], places[name, seed]
                silent = dataclasses.replace(context.silent(), directory=place.with_suffix(".fit"), seed=seed)
                params = train_head(tokens, plan, plan.heads[-1], plan.trials[0], context=silent)
                head = FittedHead(plan.heads[-1], to_host(params), lm.fingerprint)
            save_head(places[name, seed], head)
    return {
        name: [load_head(place, lm) for (of, _), place in places.items() if of == name]
        for name in (TEMPERATURE, *variants)
    }


def evaluate_repeats(
    lm: LanguageModel,
    sequences: Sequences,
    heads: Mapping[str, Sequence[FittedHead]],
    against: Mapping[str, str],
    *,
    bins: int = 15,
    context: RunContext | None = None,
) -> dict[str, Any]:
    """The figures of a set of sequences: `{"tokens": n, "sequences": s, "methods": {name: row}}`.

    `heads` are name -> the head of each seed; `against` is name -> name of the row that it is compared with. Each row
    has of each figure `value`, the mean over the seeds; `low` and `high`, its 95% interval over sequences, with the
    heads fixed; `seeds`, the figure of each seed; and the differences from the row of `against`.
    """
    named = {f"{name} {index}": head for name, repeats in heads.items() for index, head in enumerate(repeats)}
    outputs = evaluate_tokens(lm, sequences, named, bins=bins, context=context)
    stacked = _side_by_side([result.sums for result in outputs.values()])
    figures = _figures(metrics.CalibrationSums(*(x.sum(axis=0) for x in stacked)))
    drawn, first = metrics.resample_sums(stacked, _figures), 0
    values, draws, sums = {}, {}, {}
    for name, repeats in heads.items():
        own = slice(first, first + len(repeats))
        values[name], draws[name] = figures[own], drawn[:, own].mean(axis=1)
        sums[name] = metrics.CalibrationSums(*(x[:, own] for x in stacked))
        first += len(repeats)
    rows: dict[str, Any] = {}
    for name in heads:
        mean, row = values[name].mean(axis=0), {}
        for index, figure in enumerate(FIGURES):
            low, high = metrics.percentile_interval(draws[name][:, index])
            row[figure] = {"value": float(mean[index]), "low": low, "high": high}
            row[figure]["seeds"] = [float(value) for value in values[name][:, index]]
        ece = metrics.error_interval(sums[name])
        row["ece"] |= {"low": ece.low, "high": ece.high, "debiased": ece.debiased}
        if other := against.get(name):
            difference = mean - values[other].mean(axis=0)
            row["against"] = {"name": other, "ece": metrics.error_comparison(sums[name], sums[other])._asdict()}
            for index, figure in enumerate(("nll", "brier")):
                pair = draws[name][:, index], draws[other][:, index]
                row["against"][figure] = metrics.compare_resamples(float(difference[index]), *pair)._asdict()
        rows[name] = row
    return {"tokens": int(sequences.where.sum()), "sequences": len(sequences.tokens), "methods": rows}


def _side_by_side(sums: Sequence[metrics.CalibrationSums]) -> metrics.CalibrationSums:
    """Stacks sums of heads, each `[sequences, ...]`, to `[sequences, heads, ...]`, for one common resampling."""
    return metrics.CalibrationSums(
        *(np.stack([np.asarray(x, np.float64) for x in field], axis=1) for field in zip(*sums, strict=True))
    )


def _figures(sums: metrics.CalibrationSums) -> np.ndarray:
    count, confidence, correct, _ = sums.totals()
    ece = metrics.ece_from_sums(sums)
    return np.stack([sums.nll / count, sums.brier / count, ece, correct / count, confidence / count], axis=-1)


def table(title: str, figures: Mapping[str, Any]) -> str:
    """A row for every variant: figures ± half the range over seeds, and differences (`+` better, `-` worse)."""
    columns = ["", "NLL", "Brier", "ECE [95% interval]", "Δ against", "NLL", "Brier", "ECE"]
    lines = [f"{title}: {figures['tokens']:,} tokens of {figures['sequences']:,} sequences", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in figures["methods"].items():
        against = row.get("against")
        changes = ["", "", "", ""] if against is None else [against["name"], *(_change(against[f]) for f in COMPARED)]
        ece = f"{_mean(row['ece'])} [{short(row['ece']['low'], '.3f')}, {short(row['ece']['high'], '.3f')}]"
        lines.append(f"| {' | '.join([name, _mean(row['nll']), _mean(row['brier']), ece, *changes])} |")
    return "\n".join(lines) + "\n"


def _mean(figure: Mapping[str, Any]) -> str:
    spread = (max(figure["seeds"]) - min(figure["seeds"])) / 2
    return short(figure["value"]) + (f" ±{short(spread)}" if len(figure["seeds"]) > 1 else "")


def _change(difference: Mapping[str, float]) -> str:
    mark = " +" if difference["high"] < 0 else " -" if difference["low"] > 0 else ""
    return short(difference["difference"], "+.4f") + mark


def compare_variants(study: Study, lm: LanguageModel, context: RunContext) -> dict[str, Any]:
    """Of `pooling`, `losses`, `alpha` and `heads`: the figures of each set."""
    (source,) = study.data
    fit, held_out = split_sequences(study.text.read(source, lm, print), study.fit_fraction, order="sequential")
    changes, against = variants_of(study.name)
    variants = {name: study.head(**change) for name, change in changes.items()}
    heads = {BASE: [FittedHead.constant(lm)], **fit_heads(lm, fit, variants, study.seeds, context)}
    against = {BASE: TEMPERATURE, **dict.fromkeys(variants, TEMPERATURE), **against}
    sets = {"held out": held_out, **study.text.read_all(study.eval_data, lm, print)}
    return {title: evaluate_repeats(lm, of_set, heads, against, context=context) for title, of_set in sets.items()}


def compare_domains(study: Study, lm: LanguageModel, context: RunContext) -> dict[str, Any]:
    """Of `transfer`: the figures on each domain of heads that were fitted on each of them."""
    sources = (*study.data, *(str(file) for file in subject_files(study)))
    domains = study.text.read_all(sources, lm, print)
    if len(domains) < 2:
        raise UserError(f"--data, --mmlu: expected at least two domains, got {', '.join(domains)}.")
    smallest = min(len(sequences.tokens) for sequences in domains.values())
    parts = {
        name: split_sequences(x.take(slice(smallest)), study.fit_fraction, order="sequential")
        for name, x in domains.items()
    }
    heads = {BASE: [FittedHead.constant(lm)]}
    for name, (fit, _) in parts.items():
        for method, head in fit_default(lm, fit, context.within(name.replace("/", "-"))).items():
            heads[f"{method} from {name}"] = [head]
    sets = {}
    for target, (_, held_out) in parts.items():
        against = {f"ATS from {name}": f"{TEMPERATURE} from {name}" for name in parts}
        against |= {f"{TEMPERATURE} from {name}": f"{TEMPERATURE} from {target}" for name in parts if name != target}
        sets[target] = evaluate_repeats(lm, held_out, heads, against, context=context)
    return sets


def transfer_counts(sets: Mapping[str, Any]) -> str:
    """On how many pairs of domains ATS has a lower or a higher figure than temperature scaling of the same text."""
    lines = ["| ATS against temperature scaling | figure | lower | within noise | higher |", "|---|---|---|---|---|"]
    for title, own in (("own domain", True), ("carried", False)):
        rows = [
            row["against"]
            for target, figures in sets.items()
            for name, row in figures["methods"].items()
            if name.startswith("ATS from ") and (name == f"ATS from {target}") == own
        ]
        for figure in COMPARED:
            lower = sum(row[figure]["high"] < 0 for row in rows)
            higher = sum(row[figure]["low"] > 0 for row in rows)
            lines.append(f"| {title} ({len(rows)}) | {figure} | {lower} | {len(rows) - lower - higher} | {higher} |")
    return "\n".join(lines) + "\n"


def subject_files(study: Study) -> list[Path]:
    """Writes the questions of each domain of MMLU with their right answers as text; the order mixes subjects."""
    if study.mmlu is None:
        return []
    rows, files = read_source(study.mmlu), []
    for domain, subjects in SUBJECTS.items():
        texts = [
            json.dumps({"text": f"{row['question']}\n{row['choices'][row['answer']]}"}) + "\n"
            for row in rows
            if row["subject"] in subjects.split()
        ]
        files.append(study.out / f"{domain}.jsonl")
        order = np.random.default_rng(0).permutation(len(texts))
        write_file(files[-1], "".join(texts[number] for number in order))
    return files


def fit_default(lm: LanguageModel, sequences: Sequences, context: RunContext) -> dict[str, FittedHead]:
    """Temperature scaling and ATS as `fit_ats` fits them by default; those in the context's directory are loaded."""
    places = {TEMPERATURE: context.within("temperature"), "ATS": context.within("ats")}
    if not all((place.require_directory() / "head.json").is_file() for place in places.values()):
        fitted = fit_ats(lm, sequences, AtsOptions(), context).heads.values()
        for place, head in zip(places.values(), fitted, strict=True):
            save_head(place.require_directory(), head)
    return {name: load_head(place.require_directory(), lm) for name, place in places.items()}


def main(study: Study) -> None:
    if study.name != "transfer" and len(study.data) != 1:
        raise UserError(f"--data: expected one set of text, got {len(study.data)}; only transfer compares several.")
    lm = load_model(study.model)
    hashes = {source: array_hash(study.text.read(source, lm, lambda _: None)._asdict()) for source in study.data}
    identity = {"command": f"study {study.name}", "model": lm.fingerprint, "fit_fraction": study.fit_fraction}
    claim_directory(study.out, {**identity, **hashes, "head": dataclasses.asdict(study.head())})
    context = RunContext(directory=study.out / "heads")
    sets = (compare_domains if study.name == "transfer" else compare_variants)(study, lm, context)
    tables = "\n".join(table(title, figures) for title, figures in sets.items())
    if study.name == "transfer":
        tables += "\n" + transfer_counts(sets)
    write_file(study.out / "metrics.json", json.dumps({"study": study.name, "sets": sets}, indent=2) + "\n")
    write_file(study.out / "table.md", tables)
    print(f"\n{tables}\nresults in {study.out}: table.md, metrics.json, heads/")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
