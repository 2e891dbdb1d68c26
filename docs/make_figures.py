"""Makes readme.png, of README.md, from its run of `train ats`, and plots.png, of docs/plots.md, from arrays.

    python docs/make_figures.py runs/smollm2

Writes beside itself.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from calibjax import plot

HERE = Path(__file__).parent
BLUES = LinearSegmentedColormap.from_list("confidence", ["#f3f7fb", "#93c3df", "#0a4a90"])
WRONG = "#b3261e"


def readme(run: Path) -> Figure:
    """Reliability of the base model and with ATS, beside the first tokens of the sample under both."""
    results = json.loads((run / "metrics.json").read_text())
    tokens = json.loads((run / "tokens.json").read_text())["sequences"][0]
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[3, 3, 4.6])
    for ax, method, title in zip(axes, ("uncalibrated", "ats"), ("base model", "after calibration"), strict=False):
        plot.reliability(results, method=method, ax=ax)
        ax.set_title(f"{title}: ECE {results['held_out']['methods'][method]['ece']['value']:.3f}", fontsize=11)
    answer = itertools.takewhile(lambda token: not token["text"].startswith("<|"), (t for t in tokens if t["scored"]))
    heat_map(axes[2], list(answer))
    return figure


def heat_map(ax, tokens, width: int = 44, lines: int = 5) -> None:
    """The first lines of the text, above under the base model, below after calibration; wrong tokens underlined in red.

    Args:
        ax: axes.
        tokens: scored tokens of tokens.json.
        width: characters of a line.
        lines: of the text.
    """
    placed, x, y = [], 0, 0
    for token in tokens:
        text = token["text"].replace("\n", " ")
        if x + len(text) > width:
            x, y, text = 0, y + 1, text.lstrip(" ")
        placed.append((x, y, text, token))
        x += len(text)
    for side, title in enumerate(("base model", "after calibration")):
        top = side * (lines + 1.5)
        ax.text(0, top - 0.15, f"confidence, {title}", fontsize=9, va="bottom")
        for x, y, text, token in placed:
            if y >= lines or not text:
                continue
            confidence = token["confidence"][side]
            ax.fill_between([x, x + len(text)], top + y + 0.06, top + y + 0.94, color=BLUES(confidence), linewidth=0)
            if not token["right"]:
                ax.plot([x + 0.2, x + len(text) - 0.2], [top + y + 0.88] * 2, color=WRONG, linewidth=1.5)
            colour = "white" if confidence > 0.6 else "black"
            middle = {"ha": "center", "va": "center", "family": "monospace"}
            for place, letter in enumerate(text):
                ax.text(x + place + 0.5, top + y + 0.47, letter, fontsize=8, color=colour, **middle)
    ax.set(xlim=(0, width), ylim=(2 * lines + 1.6, -0.9))
    ax.set_axis_off()
    ax.set_title("most likely token wrong: underlined in red", fontsize=11)


def plots() -> Figure:
    """The functions of `calibjax.plot` on arrays."""
    rng = np.random.default_rng(0)
    confidence = rng.beta(3, 2, 4000)
    correct = rng.random(4000) < confidence**1.6
    figure = Figure(figsize=(14, 2.9), layout="constrained")
    axes = figure.subplots(1, 5)
    plot.reliability(confidence, correct, ax=axes[0])
    plot.temperature_histogram(rng.lognormal(0.5, 0.3, 4000), fitted=1.7, ax=axes[1])
    depth = np.linspace(0, 1, 9)
    plot.layers({"accuracy": 0.6 * depth**2, "confidence": 0.7 * depth**1.4}, ax=axes[2])
    plot.risk_coverage(confidence, correct, ax=axes[3])
    rows = {"platt": (-0.01, -0.015, -0.006), "isotonic": (-0.004, -0.01, 0.002), "histogram": (0.006, 0.001, 0.012)}
    plot.forest(rows, title="Δ log loss", ax=axes[4])
    for ax, name in zip(
        axes, ("reliability", "temperature_histogram", "layers", "risk_coverage", "forest"), strict=True
    ):
        ax.set_title(name, fontsize=10, pad=18 if name == "temperature_histogram" else None)
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    readme(Path(sys.argv[1])).savefig(HERE / "readme.png", dpi=110)
    plots().savefig(HERE / "plots.png", dpi=80)
