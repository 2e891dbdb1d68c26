"""Shared by the recipes of label-smoothed fine-tuning: the paper's data sets and schedule, and running a recipe.

arXiv 2508.00264, section 5, fine-tunes with smoothing 0.1 in the training set-up of open-instruct. Rate, schedule,
batch, length and epochs are those of open-instruct's recipe for Tulu 3 (8B), and the loss is summed over tokens, as
there.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from calibjax.cli import execute
from calibjax.commands import train_sft
from calibjax.commands.common import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.train.sft import SftOptions

DATA = {
    "alpaca": "yahma/alpaca-cleaned",
    "tulu3": "allenai/tulu-3-sft-mixture",
    "openhermes": "teknium/OpenHermes-2.5",
}
"""Name on the command line -> data set on the hub."""

SFT = SftOptions(
    label_smoothing=0.1,
    reduction="sum",
    epochs=2,
    batch_size=128,
    learning_rate=5e-6,
    schedule="linear",
    warmup_fraction=0.03,
    clip_norm=None,
    remat="full",
    validation_fraction=0.01,
)


def recipe(model: str, data: str, *, accumulate: int, seq_len: int = 4096) -> train_sft.TrainSftOptions:
    """The run for a model on one of `DATA`."""
    return train_sft.TrainSftOptions(
        model=model,
        data=DATA[data],
        out=Path("runs") / f"{model.split('/')[-1]}-{data}",
        split="train",
        fit_fraction=0.98,
        dtype="bfloat16",
        save_dtype="bfloat16",
        text=DataOptions(seq_len=seq_len),
        sft=dataclasses.replace(SFT, accumulate=accumulate),
    )


def main(make: Callable[[str], train_sft.TrainSftOptions], description: str | None) -> int:
    """Runs a recipe: the first argument names the data; every option of `calibjax train sft` may follow."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=DATA, help="to fine-tune on; options of `calibjax train sft` may follow")
    chosen, rest = parser.parse_known_args()
    default = make(chosen.data_set)
    return execute(parse_script(train_sft.TrainSftOptions, rest, default=default), train_sft.run)
