"""The recipes of label-smoothed fine-tuning at a size that two cores train: three families, three data sets.

    python train/study_recipes.py --assets path/to/assets --out runs/recipes

arXiv 2508.00264 fine-tunes Llama-3.1-8B, Mistral-7B and Gemma-2-2B on Alpaca, Tulu 3 and OpenHermes. Here a small model
of each family is trained from random weights on stories and books, with as many tokens in its vocabulary beside its
width as the published model, and the recipe of `train/recipes/` runs on it, but for sizes, rates and epochs, with label
smoothing 0 and 0.1. Alpaca is the paper's; LIMA in the format of OpenHermes and GSM8K in that of Tulu 3 stand for the
others. Prints a table in Markdown and writes it to --out, where each run's results are kept, so that an interrupted
study resumes.
"""

import dataclasses
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "recipes"))
from label_smoothing import recipe  # pyright: ignore[reportMissingImports]
from pretrain import Pretrain
from pretrain import main as pretrain

from calibjax.cli import execute
from calibjax.commands import train_sft
from calibjax.commands.parser import parse_script
from calibjax.commands.run_directory import claim_directory
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file

FAMILIES = {"llama": 128_256 / 4096, "mistral": 32_768 / 4096, "gemma2": 256_000 / 2304}
"""Architecture -> V/D of Llama-3.1-8B, Mistral-7B-v0.3 and Gemma-2-2B."""

SMOOTHING = (0.0, 0.1)  # weights of the uniform distribution
WIDTH = 128  # of the residual stream
EPOCHS = 10  # of fine-tuning: enough for a model to become overconfident

SETS = {
    "alpaca": "alpaca_cleaned/alpaca_cleaned",
    "openhermes": "lima/lima",
    "tulu3": "llm_foundry_eval/gsm8k",
}
"""Data set of a recipe -> the file that stands for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Trains the models and runs every recipe on each.

    Attributes:
        assets: directory with data/.
        out: for models, results and logs.
        tokens: to train each model on.
        sequences: of 128 tokens of a data set; 60% to fine-tune on, the rest held out.
    """

    assets: Path
    out: Path
    tokens: int = 1_000_000
    sequences: int = 500


def rows(assets: Path, name: str) -> Iterator[dict[str, Any]]:
    """A data set in the format of the one whose name it has."""
    with gzip.open(assets / "data" / f"{SETS[name]}.jsonl.gz", "rt") as lines:
        for row in map(json.loads, lines):
            if name == "alpaca":
                yield row
            elif name == "openhermes":
                prompt = "\n".join(filter(None, (row["instruction"], row["input"])))
                turns = (("human", prompt), ("gpt", row["output"]))
                yield {"conversations": [{"from": who, "value": text} for who, text in turns]}
            else:
                answer = f"{row['chain_of_thought']}\nThe answer is {row['answer']}."
                turns = (("user", row["context"]), ("assistant", answer))
                yield {"messages": [{"role": who, "content": text} for who, text in turns]}


def run_one(study: Study, family: str, name: str, beta: float) -> dict[str, Any]:
    """The held-out figures of a fine-tuned model and of its base, by method."""
    out = study.out / f"{family}-{name}-{beta:g}"
    if not (out / "metrics.json").is_file():
        small = recipe(str(study.out / family / "model"), name, accumulate=1)
        small = dataclasses.replace(
            small,
            data=str(study.out / f"{name}.jsonl"),
            split=None,
            out=out,
            fit_fraction=0.6,
            dtype="float32",
            save_dtype="float32",
            text=dataclasses.replace(small.text, seq_len=128, max_rows=4000, max_sequences=study.sequences),
            sft=dataclasses.replace(
                small.sft,
                label_smoothing=beta,
                batch_size=8,
                epochs=EPOCHS,
                learning_rate=2e-3,
                validation_fraction=0.1,
            ),
        )
        print(f"\n{out.name}", flush=True)
        train_sft.run(small)
    return json.loads((out / "metrics.json").read_text())["held_out"]["methods"]


def main(study: Study) -> None:
    require_directory(study.assets / "data", "--assets")
    claim_directory(study.out, {"command": "study_recipes", "tokens": study.tokens, "sequences": study.sequences})
    for name in SETS:
        write_file(study.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows(study.assets, name)))
    lines = [
        "| model | data | β | NLL | accuracy | confidence | ECE | + temperature scaling: ECE | NLL |",
        "|" + "---|" * 9,
    ]
    for family, ratio in FAMILIES.items():
        model = Pretrain(
            assets=study.assets,
            out=study.out / family,
            family=family,  # pyright: ignore[reportArgumentType]
            tokens=study.tokens,
            vocab_size=round(ratio * WIDTH),
            width=WIDTH,
            layers=4,
            seq_len=128,
            learning_rate=2e-3,
        )
        if not (model.out / "pretrained.json").is_file():
            pretrain(model)
        for name in SETS:
            for beta in SMOOTHING:
                methods = run_one(study, family, name, beta)
                if beta == SMOOTHING[0]:
                    lines.append(line(family, name, "base", methods["base"], methods["base_temperature"]))
                tuned = methods["fine_tuned"], methods["fine_tuned_temperature"]
                lines.append(line(family, name, f"{beta:g}", *tuned))
    table = "\n".join(lines) + "\n"
    write_file(study.out / "table.md", table)
    print(f"\n{table}\nresults in {study.out}: table.md, and a directory of each model and run")


def line(family: str, name: str, beta: str, model: dict[str, Any], scaled: dict[str, Any]) -> str:
    """One row of the table."""
    ece = "{value:.3f} [{low:.3f}, {high:.3f}]".format
    figures = [f"{model[key]:.3f}" for key in ("nll", "accuracy", "confidence")]
    data = Path(SETS[name]).name
    cells = [family, data, beta, *figures, ece(**model["ece"]), ece(**scaled["ece"]), f"{scaled['nll']:.3f}"]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
