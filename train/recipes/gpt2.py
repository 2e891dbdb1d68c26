"""GPT-2, the student of the long-horizon temperature 0.9, all weights, with the settings of the authors' code.

    python train/recipes/gpt2.py small --analogies analogies.jsonl      # or medium, large

github.com/AndyShih12/LongHorizonTemperatureScaling, commit 5c4c39d: OpenWebText cut to 1,024 tokens, 1,000 steps of 512
texts, rate 1e-4 after 500 steps of warm-up, weight decay 0.001, gradients clipped at norm 1, T = 0.9, mode `authors`.
Differences: here weight decay is on biases and norms too; the gradient that is clipped is that of the mean over the 512
texts, there that of their sum; running means are updated by a micro-batch, there by a text; and a text longer than a
sequence continues in the next one.

Memory, by count, not measured: weights, gradients and both moments in float32; the scorer; the inputs of the student's
blocks, kept for the backward pass, in micro-batches of 32, 16 and 8 sequences:
small:  1.9 GiB for weights, 0.5 GiB for the scorer, 0.6 GiB for the inputs;
medium: 5.3 GiB for weights, 1.3 GiB for the scorer, 0.7 GiB for the inputs;
large:  11.5 GiB for weights, 2.9 GiB for the scorer, 0.7 GiB for the inputs.

Not run yet: it needs a GPU and data from the hub.
"""

import argparse
import sys
from pathlib import Path

from calibjax.cli import execute
from calibjax.commands import train_lhts
from calibjax.commands.groups import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.train.lhts import LhtsOptions

STEPS, BATCH, FIT_FRACTION, VALIDATION = 1_000, 512, 0.998, 0.002
SIZES = {
    "small": ("openai-community/gpt2", 16),
    "medium": ("openai-community/gpt2-medium", 32),
    "large": ("openai-community/gpt2-large", 64),
}
"""Name on the command line -> model on the hub, micro-batches of a step."""


def recipe(model: str, *, accumulate: int) -> train_lhts.TrainLhtsOptions:
    """The run for a GPT-2 of the hub."""
    sequences = (
        round(STEPS * BATCH / (1 - VALIDATION) / FIT_FRACTION) + BATCH
    )  # some are held out, some kept for validation
    return train_lhts.TrainLhtsOptions(
        model=model,
        data="Skylion007/openwebtext",
        out=Path("runs") / f"{model.split('/')[-1]}-lhts",
        split="train",
        fit_fraction=FIT_FRACTION,
        texts=100,
        dtype="bfloat16",
        text=DataOptions(seq_len=1024, full_sequences=True, max_sequences=sequences),
        lhts=LhtsOptions(
            temperatures=(0.9,),
            mode="authors",
            batch_size=BATCH,
            accumulate=accumulate,
            learning_rate=1e-4,
            schedule="constant",
            warmup_fraction=0.5,
            weight_decay=1e-3,
            clip_norm=1.0,
            validation_fraction=VALIDATION,
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES, help="of GPT-2; options of `calibjax train lhts` may follow")
    chosen, rest = parser.parse_known_args()
    model, accumulate = SIZES[chosen.size]
    default = recipe(model, accumulate=accumulate)
    return execute(parse_script(train_lhts.TrainLhtsOptions, rest, default=default), train_lhts.run)


if __name__ == "__main__":
    sys.exit(main())
