"""Shared by the recipes of long-horizon temperatures: the settings of the authors' code for GPT-2.

github.com/AndyShih12/LongHorizonTemperatureScaling, commit 5c4c39d: OpenWebText cut to 1,024 tokens, 1,000 steps of 512
texts, rate 1e-4 after 500 steps of warm-up, weight decay 0.001, gradients clipped at norm 1, T = 0.9, mode `official`.
Differences: here weight decay is on biases and norms too; the gradient that is clipped is that of the mean over the 512
texts, there that of their sum; running means are updated by a micro-batch, there by a text; and a text longer than a
sequence continues in the next one.

None of these recipes has been run: they need a GPU and data from the hub.
"""

from pathlib import Path

from calibjax.cli import execute
from calibjax.commands import train_lhts
from calibjax.commands.common import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.train.lhts import LhtsOptions

STEPS, BATCH, VALIDATION = 1_000, 512, 0.002


def recipe(model: str, *, accumulate: int) -> train_lhts.TrainLhtsOptions:
    """The run for a GPT-2 of the hub."""
    sequences = round(STEPS * BATCH / (1 - VALIDATION) / 0.998) + BATCH  # some are held out, some kept for validation
    return train_lhts.TrainLhtsOptions(
        model=model,
        data="Skylion007/openwebtext",
        out=Path("runs") / f"{model.split('/')[-1]}-lhts",
        split="train",
        fit_fraction=0.998,
        texts=100,
        dtype="bfloat16",
        text=DataOptions(seq_len=1024, packing=False, examples=sequences),
        lhts=LhtsOptions(
            temperatures=(0.9,),
            mode="official",
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


def main(run: train_lhts.TrainLhtsOptions, description: str | None) -> int:
    """Runs a recipe; every option of `calibjax train lhts` may follow."""
    return execute(parse_script(train_lhts.TrainLhtsOptions, description=description, default=run), train_lhts.run)
