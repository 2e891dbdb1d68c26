"""A model and its heads on held-out text, from a notebook: sequences in, figures with intervals out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from calibjax import metrics
from calibjax.data import Sequences
from calibjax.data.load import load_text
from calibjax.eval.tokens import evaluate_tokens, identity_head, results_json
from calibjax.heads import FittedHead
from calibjax.models.calibrated import check_base
from calibjax.models.own import FrozenModel, check_sequences, placed
from calibjax.runtime.context import RunContext


class Evaluation(NamedTuple):
    """What `evaluate` returns; prints as a table.

    Attributes:
        tokens: how many tokens were predicted.
        figures: method -> "ece", "nll" (nats a token) and "brier" (of the most likely token), each with its 95%
            interval.
        document: JSON-able: every figure, as `held_out` of metrics.json.
    """

    tokens: int
    figures: dict[str, dict[str, metrics.Interval]]
    document: Mapping[str, Any]

    def __repr__(self) -> str:
        width = max(map(len, self.figures))
        names = ("ece", "nll", "brier")
        lines = [f"{self.tokens:,} tokens".ljust(width) + "".join(f"  {name.upper():<24}" for name in names)]
        width = max(width, len(lines[0]) - 26 * len(names))
        for method, of_method in self.figures.items():
            cells = (
                f"{figure.value:.4f} [{figure.low:.4f}, {figure.high:.4f}]" for figure in (of_method[n] for n in names)
            )
            lines.append(method.ljust(width) + "".join(f"  {cell:<24}" for cell in cells))
        return "\n".join(line.rstrip() for line in lines)


def evaluate(
    lm: FrozenModel,
    data: Sequences | str | Path | Sequence[Sequence[int]],
    heads: FittedHead | Mapping[str, FittedHead] | None = None,
    *,
    batch_size: int = 16,
    bins: int = 15,
    closed: metrics.Closed = "right",
    context: RunContext | None = None,
) -> Evaluation:
    """Calibration of a model on held-out text, uncalibrated and with heads; the model runs once for all of them.

    Args:
        lm: the frozen model: a `LanguageModel`, or one of your own by `from_function` or `from_arrays`.
        data: sequences that no head was fitted on; or what `load_text` takes, read as sequences of 128 tokens, or of
            the model's positions where these are fewer.
        heads: name -> head, fitted on `lm`; one head is called "head". None: the uncalibrated model alone.
        batch_size: sequences at a time, rounded up to a multiple of the mesh axes data and fsdp.
        bins: number of equal-width bins of ECE.
        closed: the bin of a confidence on an edge; see `calibjax.metrics`.
        context: seed of the intervals, devices and progress.

    Returns:
        `Evaluation`, with "uncalibrated" first. Intervals treat sequences as the independent units.

    Raises:
        UserError: a head belongs to another model, or the data cannot be read or does not fit the model.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> found = calibjax.evaluate(lm, texts, context=calibjax.RunContext().silent())
        >>> found.tokens, sorted(found.figures["uncalibrated"])
        (760, ['brier', 'ece', 'nll'])
    """
    context = context or RunContext()
    data = data if isinstance(data, Sequences) else load_text(data, lm)
    check_sequences(lm, data)
    lm = placed(lm, context.mesh)
    named = {"head": heads} if isinstance(heads, FittedHead) else dict(heads or {})
    for head in named.values():
        check_base(lm, head)
    named = {"uncalibrated": identity_head(lm), **named}
    rows = context.mesh.shape["data"] * context.mesh.shape["fsdp"]
    batch_size = -(-batch_size // rows) * rows
    with jax.set_mesh(context.mesh):
        results = evaluate_tokens(lm, data, named, batch_size=batch_size, bins=bins, closed=closed, context=context)
    document = results_json(results, closed=closed, seed=context.seed)
    figures = {name: _figures(row) for name, row in document["methods"].items()}
    return Evaluation(document["tokens"], figures, document)


def _figures(row: Mapping[str, Any]) -> dict[str, metrics.Interval]:
    ends = {"ece": row["ece"], **row["intervals"]}
    values = {"ece": row["ece"]["value"], "nll": row["nll"], "brier": row["brier"]}
    return {name: metrics.Interval(value, ends[name]["low"], ends[name]["high"]) for name, value in values.items()}
