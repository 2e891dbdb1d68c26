"""Calibration after every layer of a model (arXiv 2511.00280) from top to bottom, in one file to read and to adapt.

    python eval/layers.py --model path/to/model --data wikitext.txt --out layers.png

The hidden state after any block gives a next-token distribution too, when the final norm and the unembedding are
applied to it (the logit lens). The script prints accuracy, mean confidence and calibration errors for each layer. Where
confidence falls in the last layers while accuracy does not, the model corrects its confidence there.

`calibjax eval layers` adds intervals, a test of that phase, multiple choice, a calibration direction and entropy
neurons.
"""

import dataclasses
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import calibjax
from calibjax import metrics
from calibjax.models import final_norm, unembedding, unembedding_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to evaluate.

    Attributes:
        model: directory or GGUF file of the model.
        data: text, instructions or chats.
        out: image file to write, such as PNG or PDF.
        seq_len: tokens per sequence.
        max_sequences: largest number of sequences to read.
        batch_size: sequences per forward pass.
    """

    model: str
    data: str
    out: Path = Path("layers.png")
    seq_len: int = 128
    max_sequences: int = 64
    batch_size: int = 8


def predictions(lm: calibjax.LanguageModel, data: calibjax.Sequences, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and correctness of N tokens at each layer, `[L + 1, N]`: the embeddings, then L blocks."""

    @jax.jit
    def read_layers(params, residual, targets, where):
        def read_layer(residual):
            stats = calibjax.vocab_stats(
                final_norm(lm.config, params, residual, lm.dtype),
                unembedding(lm.config, params),
                targets,
                bias=unembedding_bias(params),
                softcap=lm.config.logit_softcap,
                where=where,
                statistics=("log_normalizer", "max_logit", "correct"),
            )
            return stats.confidence(), stats.correct

        return jax.lax.map(read_layer, residual)

    parts = []
    for first in range(0, len(data.tokens), batch_size):
        batch = data.take(slice(first, first + batch_size))
        residual = lm.hidden_states(batch, layers="residual")  # [L + 1, B, T, D]
        confidence, correct = jax.device_get(read_layers(lm.params, residual, batch.targets, batch.where))
        parts.append((confidence[:, batch.where], correct[:, batch.where]))
    confidences, corrects = zip(*parts, strict=True)
    return np.concatenate(confidences, axis=1), np.concatenate(corrects, axis=1)


def main(options: Options) -> list[dict[str, float]]:
    with jax.set_mesh(calibjax.RunContext().mesh) as mesh:
        lm = calibjax.load_model(options.model, mesh=mesh)
        data = calibjax.load_text(options.data, lm, seq_len=options.seq_len, max_sequences=options.max_sequences)
        confidence, correct = predictions(lm, data, options.batch_size)
    print(f"{correct.shape[1]:,} tokens\nlayer  accuracy  confidence     ECE     MCE")
    rows = []
    for layer, (c, y) in enumerate(zip(confidence, correct, strict=True)):
        row = {
            "accuracy": float(y.mean()),
            "confidence": float(c.mean()),
            "ece": float(metrics.expected_calibration_error(c, y)),
            "mce": float(metrics.maximum_calibration_error(c, y)),
        }
        rows.append(row)
        print(f"{layer:5}  {row['accuracy']:8.4f}  {row['confidence']:10.4f}  {row['ece']:.4f}  {row['mce']:.4f}")

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in ("accuracy", "confidence", "ece"):
        axes.plot([row[name] for row in rows], label=name)
    axes.set(xlabel="layer (0: embeddings)", ylim=(0, None))
    axes.legend()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=150)
    print(f"figure: {options.out}")
    return rows


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
