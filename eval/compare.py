"""Recalibrate a classifier's predictions by several methods and compare them, in one file to read and to adapt.

    python eval/compare.py --table predictions.npz --out compare

The table holds `logits` `[N, K]` and `labels` `[N]` of any classifier; for a language model these can be its logits at
the letters of multiple choice. Every method is fitted on one half of the rows and evaluated on the other. Differences
from temperature scaling are paired, and the verdict corrects for the number of methods.

`calibjax compare` also reads CSV, JSONL, Parquet and responses of servers, or runs a model on text.
"""

import dataclasses
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import calibjax
from calibjax import plot, recalibrate
from calibjax.data.table import read_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare.

    Attributes:
        table: .npz file with `logits` and `labels`.
        out: directory of the figure and the fitted method.
        methods: names of `calibjax.recalibrate.METHODS`.
        seed: random seed of the split into halves.
    """

    table: Path
    out: Path
    methods: tuple[str, ...] = ("temperature", "vector", "isotonic", "histogram", "beta")
    seed: int = 0


def main(options: Options) -> calibjax.Comparison:
    data = read_table(options.table).predictions
    if data.logits is None:
        raise calibjax.UserError(f"--table {options.table}: expected logits and labels, got confidences.")
    logits, labels = np.asarray(data.logits), np.asarray(data.labels)
    fit_rows, held_out_rows = np.array_split(np.random.default_rng(options.seed).permutation(len(labels)), 2)
    fit = recalibrate.Predictions(logits=logits[fit_rows], labels=labels[fit_rows])
    held_out = recalibrate.Predictions(logits=logits[held_out_rows], labels=labels[held_out_rows])
    comparison = calibjax.compare(fit, held_out, options.methods, context=calibjax.RunContext(seed=options.seed))
    print(comparison)

    name = comparison.winner
    if name == "uncalibrated":
        name = "temperature"
    fitted = comparison.recalibrator(name)
    output = fitted(held_out)  # log-probabilities [N, K], or confidences [N] in the most likely class
    confidence = output if output.ndim == 1 else np.exp(output.max(axis=1))
    predicted = (logits[held_out_rows] if output.ndim == 1 else output).argmax(axis=1)
    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    plot.reliability(confidence, predicted == labels[held_out_rows], ax=axes)
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "reliability.png", dpi=150)
    recalibrate.save(options.out / "method", fitted)
    print(f"{name}: {options.out / 'method'} (for calibjax.recalibrate.load), {options.out / 'reliability.png'}")
    return comparison


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
