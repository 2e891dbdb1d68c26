"""Does label smoothing keep a small model calibrated while it overfits, and does ATS improve it further?

    python train/study_smoothing.py --assets path/to/assets --out runs/smoothing

Each model is fine-tuned on the first part of each instruction set with smoothing 0, 0.1 and 0.2, for enough epochs to
overfit. Temperature scaling and an ATS head are fitted to the result on a second part. All are tested on the third
part, on the other instruction set and on encyclopaedia text. Prints a table in Markdown; results are kept in --out, so
that an interrupted run resumes.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from calibjax.cli import execute
from calibjax.commands.common import DataOptions, claim_directory
from calibjax.commands.parser import parse_script
from calibjax.commands.train_ats import ats_document, evaluate, fit_ats
from calibjax.data import split_sequences
from calibjax.models import load_model
from calibjax.models.hf_export import save_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train import AtsOptions
from calibjax.train.checkpoint import save_head
from calibjax.train.options import make_plan
from calibjax.train.sft import SftOptions, fit_sft

MODELS = {"stories260K": 128, "tinystories-656k": 128, "craftgpt-5M": 64}  # name -> tokens a sequence
SETS = {"alpaca": "alpaca_cleaned/alpaca_cleaned.jsonl.gz", "lima": "lima/lima.jsonl.gz"}
FOREIGN = {"wikitext2": "wikitext2/test.txt.gz"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Fine-tunes every model on every set with every smoothing, and calibrates the results.

    Attributes:
        assets: directory with models/ and data/.
        out: for results, models and logs.
        models: names of directories in assets/models.
        smoothing: weights of the uniform distribution.
        sequences: of each set, from its first rows: 60% to train on, 20% to calibrate on, 20% held out.
        foreign_sequences: of the sets that were not trained on.
        epochs: passes over the training sequences.
        learning_rate: peak.
        quiet: no progress bars.
    """

    assets: Path
    out: Path
    models: tuple[str, ...] = tuple(MODELS)
    smoothing: tuple[float, ...] = (0.0, 0.1, 0.2)
    sequences: int = 800
    foreign_sequences: int = 300
    epochs: int = 15
    learning_rate: float = 2e-3
    quiet: bool = False


def run_one(study: Study, model: str, trained_on: str, beta: float | None) -> dict[str, Any]:
    """The figures of one fine-tuned model on all sets, by method; `beta` None: of the pretrained model."""
    name = f"{model}-{trained_on}-{'base' if beta is None else beta}"
    directory = study.out / name
    done = directory / "figures.json"
    context = RunContext(directory=directory, progress=not study.quiet)
    if done.is_file():
        return json.loads(done.read_text())
    source = study.assets / "models" / model
    lm, seq_len = load_model(source), MODELS.get(model, 128)
    print(f"\n{name}", flush=True)

    def read(path: str, count: int):
        options = DataOptions(seq_len=seq_len, rows=4000 if path in SETS.values() else None, examples=count)
        return options.read(str(study.assets / "data" / path), lm, print)

    train, rest = split_sequences(read(SETS[trained_on], study.sequences), 0.6)
    calibration, held_out = split_sequences(rest, 0.5)
    foreign = {**{k: v for k, v in SETS.items() if k != trained_on}, **FOREIGN}
    transfer = {title: read(path, study.foreign_sequences) for title, path in foreign.items()}
    report: dict[str, Any] = {}
    if beta is not None:
        options = SftOptions(label_smoothing=beta, epochs=study.epochs, learning_rate=study.learning_rate, remat="none")
        fitted = fit_sft(lm, train, options, context=context.within("sft"), consume=True)
        save_model(directory / "model", fitted.config, fitted.params, like=source, replace=True)
        lm, report = load_model(directory / "model"), fitted.report
    ats = AtsOptions(loss="joint", batch_size=16)
    plan = make_plan(ats, lm.config.hidden_size)
    fitted = fit_ats(lm, calibration, plan, context.within("fit"))
    save_head(directory / "head", fitted.head, notes=fitted.report)
    results = evaluate(lm, {"held_out": held_out, "train": train, **transfer}, fitted, plan, context)
    document = ats_document(lm, results, fitted, {})
    figures = {"held out": document["held_out"], **document.get("transfer", {})}
    result = {
        "sft": report,
        "sets": {
            title: {
                method: {key: row[key] for key in ("nll", "brier", "accuracy", "confidence")}
                | {"ece": row["ece"]["value"]}
                for method, row in figures_of_set["methods"].items()
            }
            for title, figures_of_set in figures.items()
        },
    }
    write_file(done, json.dumps(result, indent=2) + "\n")
    return result


def main(study: Study) -> None:
    require_directory(study.assets / "data", "--assets")
    shared = {name: getattr(study, name) for name in ("sequences", "foreign_sequences", "epochs", "learning_rate")}
    claim_directory(study.out, {"command": "study_smoothing", **shared})
    for model in study.models:
        other = {"alpaca": "lima", "lima": "alpaca"}
        lines = [
            f"### {model}\n",
            "| trained on | smoothing | NLL train | NLL | Brier | accuracy | ECE | + temperature | + ATS: ECE | NLL | "
            "other set: ECE | NLL | + ATS: ECE | wikitext2: ECE | NLL | + ATS: ECE |",
            "|" + "---|" * 16,
        ]
        for trained_on in SETS:
            for beta in (None, *study.smoothing):
                sets = run_one(study, model, trained_on, beta)["sets"]
                held, elsewhere, wiki = sets["held out"], sets[other[trained_on]], sets["wikitext2"]
                base = held["uncalibrated"]
                cells = [trained_on, "not trained" if beta is None else f"{beta:g}"]
                cells += [f"{sets['train']['uncalibrated']['nll']:.3f}", f"{base['nll']:.3f}", f"{base['brier']:.4f}"]
                cells += [f"{base['accuracy']:.3f}", f"{base['ece']:.4f}", f"{held['temperature']['ece']:.4f}"]
                cells += [f"{held['ats']['ece']:.4f}", f"{held['ats']['nll']:.3f}"]
                for foreign in (elsewhere, wiki):
                    cells += [f"{foreign['uncalibrated']['ece']:.4f}", f"{foreign['uncalibrated']['nll']:.3f}"]
                    cells += [f"{foreign['ats']['ece']:.4f}"]
                lines.append("| " + " | ".join(cells) + " |")
        print("\n" + "\n".join(lines) + "\n", flush=True)
    print(f"results in {study.out}: one directory a model, set and smoothing, each with figures.json, model/ and head/")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
