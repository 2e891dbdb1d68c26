"""Recalibrate a classifier's predictions by several methods and compare them, in one file to read and to adapt.

    python eval/compare.py --table predictions.npz --out compare

The table holds `logits` `[N, K]` and `labels` `[N]`: of a language model, its logits at the letters of multiple choice;
of any other classifier, what it computes. Every method is fitted on one half and compared on the other, paired with
temperature scaling; the verdict corrects for the number of methods.

`calibjax compare` reads CSV, JSONL, Parquet and responses of servers, and a model with text.
"""

import dataclasses
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import calibjax
from calibjax import plot, recalibrate
from calibjax.commands.parser import parse_script


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare.

    Attributes:
        table: .npz file with `logits` and `labels`.
        out: directory of the figure and the fitted method.
        methods: names of `calibjax.recalibrate.METHODS`.
        seed: of the two halves.
    """

    table: Path
    out: Path
    methods: tuple[str, ...] = ("temperature", "vector", "isotonic", "histogram", "beta")
    seed: int = 0


def main(options: Options) -> calibjax.Comparison:
    arrays = np.load(options.table)
    order = np.random.default_rng(options.seed).permutation(len(arrays["labels"]))
    fit, held_out = (
        recalibrate.Predictions(logits=arrays["logits"][rows], labels=arrays["labels"][rows])
        for rows in np.array_split(order, 2)
    )
    comparison = calibjax.compare(fit, held_out, options.methods, context=calibjax.RunContext(seed=options.seed))
    print(comparison)

    name = comparison.winner if comparison.states[comparison.winner] is not None else "temperature"
    fitted = comparison.recalibrator(name)
    assert held_out.logits is not None
    output = fitted(held_out)  # log-probabilities of the classes, or confidences in the most likely one
    confidence = output if output.ndim == 1 else np.exp(output.max(axis=1))
    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    plot.reliability(confidence, held_out.logits.argmax(axis=1) == held_out.labels, ax=axes)
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "reliability.png", dpi=150)
    recalibrate.save(options.out / "method", name, fitted.state)
    print(f"{name}: {options.out / 'method'} (for calibjax.recalibrate.load), {options.out / 'reliability.png'}")
    return comparison


if __name__ == "__main__":
    main(parse_script(Options))
