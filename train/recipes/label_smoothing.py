"""The recipes of label-smoothed fine-tuning (arXiv 2508.00264), all weights, with smoothing 0.1.

    python train/recipes/label_smoothing.py llama31_8b tulu3 --out runs/llama-tulu3

Section 5 fine-tunes in the training set-up of open-instruct. Rate, schedule, batch, length and epochs are those of
open-instruct's recipe for Tulu 3 (8B), and the loss is summed over tokens, as there; batches of 128 sequences are 16
micro-batches. Every option of `calibjax train sft` may follow.

Hardware: 8 GPUs of 80 GB (40 GB for Gemma), or a TPU slice with as much memory. Memory for weights, gradients and both
moments in float32, and on each of 8 devices also the inputs of the blocks, kept for the backward pass, and no logits:
llama31_8b: 119.7 GiB, 15.0 GiB on each device; inputs 1.0 GiB; the logits of a sequence would take 1.96 GiB.
mistral_7b: 107.9 GiB, 13.5 GiB on each device; inputs 1.0 GiB; the logits of a sequence would take 0.49 GiB.
gemma2_2b: 39.0 GiB, 4.9 GiB on each device; inputs 0.46 GiB; the logits of a sequence would take 3.91 GiB.
"""

import argparse
import sys
from pathlib import Path

from calibjax.cli import execute
from calibjax.commands import train_sft
from calibjax.commands.groups import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.train.sft import SftOptions

MODELS = {
    "llama31_8b": "meta-llama/Llama-3.1-8B",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "gemma2_2b": "google/gemma-2-2b",
}
DATA = {
    "alpaca": "yahma/alpaca-cleaned",
    "tulu3": "allenai/tulu-3-sft-mixture",
    "openhermes": "teknium/OpenHermes-2.5",
}
"""Names on the command line -> models and data sets on the hub."""


def recipe(model: str, data: str, *, accumulate: int = 16) -> train_sft.TrainSftOptions:
    """The run for a model on one of `DATA`."""
    return train_sft.TrainSftOptions(
        model=model,
        data=DATA[data],
        out=Path("runs") / f"{model.split('/')[-1]}-{data}",
        split="train",
        fit_fraction=0.98,
        dtype="bfloat16",
        save_dtype="bfloat16",
        text=DataOptions(seq_len=4096),
        sft=SftOptions(
            label_smoothing=0.1,
            reduction="sum",
            epochs=2,
            batch_size=128,
            accumulate=accumulate,
            learning_rate=5e-6,
            schedule="linear",
            warmup_fraction=0.03,
            clip_norm=None,
            remat="full",
            validation_fraction=0.01,
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("data", choices=DATA)
    chosen, rest = parser.parse_known_args()
    default = recipe(MODELS[chosen.model], chosen.data)
    return execute(parse_script(train_sft.TrainSftOptions, rest, default=default), train_sft.run)


if __name__ == "__main__":
    sys.exit(main())
