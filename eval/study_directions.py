"""Does a calibration direction (arXiv 2511.00280) carry to other texts and tasks, and what is it beside a temperature?

    python eval/study_directions.py --assets path/to/assets --out runs/directions

- transfer: the direction, block and strength found on one half of a text or of an MMLU subject, on the other halves of
  all of them.
- methods: the direction, temperature scaling and an ATS head, fitted and evaluated on the same tokens.

Prints tables in Markdown and writes them to --out, where the figures of each model are kept, so that an interrupted run
resumes.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibjax import metrics
from calibjax.cli import execute
from calibjax.commands.common import DataOptions, claim_directory
from calibjax.commands.parser import parse_script
from calibjax.commands.train_ats import evaluate, fit_ats
from calibjax.data import Sequences, choice_sequences, read_source, split_sequences
from calibjax.eval.layers.directions import (
    Edit,
    choose_edit,
    choose_sets,
    edit_array,
    evaluate_edit,
    find_directions,
    sweep,
)
from calibjax.eval.layers.layers import Readout, layer_outputs, make_readout
from calibjax.models import LanguageModel, load_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train import AtsOptions
from calibjax.train.options import make_plan

TEXTS = {
    "wikitext2": ("wikitext2/valid.txt.gz", DataOptions(seq_len=128)),
    "alpaca": (
        "alpaca_cleaned/alpaca_cleaned.jsonl.gz",
        DataOptions(seq_len=128, rows=3000, text_column="output", full_sequences=True),
    ),
    "stories": ("tinystories_sample/tinystories_sample.jsonl.gz", DataOptions(seq_len=128)),
}
SUBJECTS = ("miscellaneous", "high_school_psychology", "high_school_macroeconomics", "philosophy")
QUIET = RunContext(progress=False, log=lambda _: None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Evaluates directions on other data, and beside a temperature and a head.

    Attributes:
        assets: directory with models/ and data/.
        out: for the tables, and the figures of each model.
        models: names of directories in assets/models, or paths.
        sequences: of 128 tokens of each text; half to fit on.
        questions: of each subject, of at most 256 tokens; half to fit on.
        strengths: of the edits, in mean norms of the residual.
    """

    assets: Path
    out: Path
    models: tuple[str, ...] = ("stories260K", "tinystories-656k")
    sequences: int = 200
    questions: int = 240
    strengths: tuple[float, ...] = (-0.5, -0.25, 0.25, 0.5)


class Domain(NamedTuple):
    """A text or a subject: the half to fit on, the other, and what predictions are read from."""

    fit: Sequences
    held_out: Sequences
    read: Readout


def text(study: Study, lm: LanguageModel, name: str, count: int) -> Sequences:
    """The first sequences of a text."""
    path, options = TEXTS[name]
    options = dataclasses.replace(options, examples=count)
    return options.read(str(study.assets / "data" / path), lm, lambda _: None)


def domains(study: Study, lm: LanguageModel) -> dict[str, Domain]:
    """All texts and subjects."""
    whole = make_readout(lm)
    found = {name: Domain(*split_sequences(text(study, lm, name, study.sequences), 0.5), whole) for name in TEXTS}
    asked = choice_sequences(read_source(str(study.assets / "data/mmlu/mmlu.jsonl.gz")), lm.tokenizer, 256)
    letters, rng = make_readout(lm, asked.letters), np.random.default_rng(0)
    for subject in SUBJECTS:
        rows = rng.permutation(np.flatnonzero(np.array(asked.subjects) == subject))[: study.questions]
        parts = np.array_split(rows, 2)
        found[subject] = Domain(asked.sequences.take(parts[0]), asked.sequences.take(parts[1]), letters)
    return found


def find(study: Study, lm: LanguageModel, of: Domain) -> tuple[Edit, np.ndarray, np.ndarray]:
    """The edit chosen on the fitting half, its array, and the unit vectors of all blocks."""
    outputs = layer_outputs(lm, of.fit, of.read, context=QUIET)
    sets = choose_sets("overconfident", outputs.confidence[-1], outputs.correct[-1])
    directions = find_directions(lm, of.fit, of.read, sets, context=QUIET)
    blocks = range(1, lm.config.num_layers + 1)
    edit = choose_edit(sweep(lm, of.fit, of.read, directions, blocks, study.strengths, context=QUIET))
    return edit, edit_array(directions, edit), directions.vectors


def figures(sums: metrics.CalibrationSums) -> dict[str, float]:
    """Of held-out predictions."""
    found, error = metrics.summarise(sums), metrics.error_interval(sums)
    rows = {name: float(found[name]) for name in ("nll", "brier", "accuracy", "confidence")}
    return {**rows, "ece": error.value, "low": error.low, "high": error.high}


def difference(first: metrics.CalibrationSums, second: metrics.CalibrationSums) -> list[float]:
    """ECE of the first minus that of the second, with its interval."""
    compared = metrics.error_comparison(first, second)
    return [compared.difference, compared.low, compared.high]


def run_transfer(study: Study, lm: LanguageModel) -> dict[str, Any]:
    """The edit of every domain on every domain."""
    sets = domains(study, lm)
    base = {
        name: evaluate_edit(lm, of.held_out, of.read, np.zeros((lm.config.num_layers, lm.config.hidden_size)))
        for name, of in sets.items()
    }
    found: dict[str, Any] = {"base": {name: figures(sums) for name, sums in base.items()}, "edits": {}}
    vectors = {}
    for name, of in sets.items():
        edit, array, vectors[name] = find(study, lm, of)
        on = {other: evaluate_edit(lm, to.held_out, to.read, array) for other, to in sets.items()}
        found["edits"][name] = {
            "edit": list(edit),
            "on": {
                other: {"difference": difference(sums, base[other]), "accuracy": figures(sums)["accuracy"]}
                for other, sums in on.items()
            },
        }
        print(f"{name}: {edit}", flush=True)
    last = np.stack([of[-1] for of in vectors.values()])
    found["cosines"] = (last @ last.T).tolist()
    return found


def described(edit: Edit) -> str:
    return f"{edit.strength:+g} after block {edit.layer}" if edit.layer else "none chosen"


def signed(row: list[float]) -> str:
    return f"{row[0]:+.3f} [{row[1]:+.3f}, {row[2]:+.3f}]"


def transfer_table(found: dict[str, Any]) -> list[str]:
    names = list(found["base"])
    lines = ["| found on | edit | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    base = found["base"].values()
    cells = [f"{of['ece']:.3f} [{of['low']:.3f}, {of['high']:.3f}]" for of in base]
    lines.append("| none: ECE | | " + " | ".join(cells) + " |")
    lines.append("| none: accuracy | | " + " | ".join(f"{of['accuracy']:.3f}" for of in base) + " |")
    for name, of in found["edits"].items():
        what = described(Edit(*of["edit"]))
        lines.append(f"| {name} | {what} | " + " | ".join(signed(of["on"][n]["difference"]) for n in names) + " |")
    lines += ["", "Cosine of the directions after the last block:", ""]
    lines += ["| | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    rows = zip(names, found["cosines"], strict=True)
    lines += [f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |" for name, row in rows]
    return [
        "Change of ECE by the direction that was found on each:",
        "",
        *lines,
        "",
    ]


def run_methods(study: Study, lm: LanguageModel) -> dict[str, Any]:
    """Figures of every method on the same held-out tokens, by text."""
    found: dict[str, Any] = {}
    for name in ("wikitext2", "alpaca"):
        of = Domain(*split_sequences(text(study, lm, name, 2 * study.sequences), 0.5), make_readout(lm))
        edit, array, _ = find(study, lm, of)
        plan = make_plan(AtsOptions(loss="joint"), lm.config.hidden_size)
        fitted = fit_ats(lm, of.fit, plan, QUIET)
        results = evaluate(lm, {"held out": of.held_out}, fitted, plan, QUIET)["held out"]
        sums = {
            "uncalibrated": results["uncalibrated"].sums,
            f"direction, {described(edit)}": evaluate_edit(lm, of.held_out, of.read, array),
            "temperature scaling": results["temperature"].sums,
            "ATS": results["ats"].sums,
        }
        against = sums["temperature scaling"]
        found[name] = {
            "tokens": [int(of.fit.where.sum()), int(of.held_out.where.sum())],
            "methods": {
                method: {**figures(these), "difference": difference(these, against)} for method, these in sums.items()
            },
        }
        print(f"methods on {name}: done", flush=True)
    return found


def methods_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| text | method | NLL | Brier | ECE | against temperature scaling | accuracy |",
        "|---" * 7 + "|",
    ]
    for name, of in found.items():
        for method, row in of["methods"].items():
            ece = f"{row['ece']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"
            against = "" if method == "temperature scaling" else signed(row["difference"])
            lines.append(
                f"| {name} | {method} | {row['nll']:.3f} | {row['brier']:.4f} | {ece} | {against} | "
                f"{row['accuracy']:.3f} |"
            )
            name = ""
    return [*lines, ""]


def main(study: Study) -> None:
    require_directory(study.assets / "data", "--assets")
    shared = {name: getattr(study, name) for name in ("sequences", "questions", "strengths")}
    claim_directory(study.out, {"command": "study_directions", **shared})
    lines = []
    for model in study.models:
        file = study.out / f"{Path(model).name}.json"
        if not file.is_file():
            lm = load_model(study.assets / "models" / model)
            found = {"transfer": run_transfer(study, lm), "methods": run_methods(study, lm)}
            write_file(file, json.dumps(found, indent=2) + "\n")
        found = json.loads(file.read_text())
        lines += [f"### {Path(model).name}", "", *transfer_table(found["transfer"]), *methods_table(found["methods"])]
    write_file(study.out / "table.md", "\n".join(lines))
    print("\n".join(lines))
    print(f"results in {study.out}: table.md, and the figures of each model")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
