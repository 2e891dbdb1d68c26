"""Calibration across the layers of a model, and along a direction of its residual stream (arXiv 2511.00280)."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np

from calibjax import metrics
from calibjax.data import Sequences, check_ids, concatenate
from calibjax.data.load import Source, as_sequences
from calibjax.data.sequences import check_resamples
from calibjax.eval.figures_json import draws_of, row_json, subject_rows
from calibjax.eval.layers import directions
from calibjax.eval.layers.layers import interval_figures, layer_outputs, layers_json, make_readout
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Bins, Closed, Count, Range, check_options, not_identity
from calibjax.runtime.sharding import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersOptions:
    """Options of `evaluate_layers`.

    Attributes:
        direction: overconfident: from the right predictions to the wrong ones with a confidence above the accuracy;
            wrong: to all wrong ones; confident: from the less confident half to the more confident one.
        strengths: strengths of the edits, in units of the residual's mean norm at the layer.
        sweep_layers: blocks after which to edit, from 1; all by default.
        settled: the decision counts as settled where this fraction of predictions equals the last layer's.
        neuron_layers: number of the last blocks in which to look for entropy neurons.
        batch_size: sequences per step.
        bins: number of equal-width bins of the expected calibration error.
        closed: the bin of a confidence on an edge: the one below (right), the one above (left), or none.
    """

    direction: directions.Recipe = "overconfident"
    strengths: tuple[Annotated[float, Range()], ...] = (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)
    sweep_layers: tuple[Count, ...] = ()
    settled: Annotated[float, Range(0, 1, open="low")] = 0.9
    neuron_layers: Count = 1
    batch_size: BatchSize = not_identity(16)
    bins: Bins = not_identity(15)
    closed: Closed = not_identity("right")

    def swept(self, depth: int) -> tuple[int, ...]:
        """The blocks after which to edit a model of this depth; raises `UserError` for blocks that it has not."""
        swept = self.sweep_layers or tuple(range(1, depth + 1))
        if not all(1 <= layer <= depth for layer in swept):
            raise UserError(f"sweep_layers: expected blocks from 1 to {depth}, got {self.sweep_layers}.")
        if self.neuron_layers > depth:
            raise UserError(f"neuron_layers: expected 1 to {depth}, the model's blocks, got {self.neuron_layers}.")
        return swept


def evaluate_layers(
    lm: LanguageModel,
    fit: Sequences | Source,
    held_out: Sequences | Source,
    options: LayersOptions = LayersOptions(),
    context: RunContext | None = None,
    *,
    letters: tuple[int, ...] | None = None,
    subjects: Sequence[str] = (),
) -> Document:
    """What each layer of a model would predict, and what changes its confidence.

    Args:
        lm: the frozen model, on `context.mesh`.
        fit: sequences on which a calibration direction and an edit are found, or what `load_text` takes.
        held_out: those on which they are evaluated, of the same length: give `load_text` one `seq_len` for both.
        letters: token ids of the answers of multiple choice, the only ones that are compared; default: the vocabulary.
        subjects: subject of each question, first of `fit`, then of `held_out`.

    Returns:
        The contents of metrics.json: "layers" (figures of each layer, and the phase in which confidence is corrected),
        "direction" and "sweep" (edits of the residual stream), "neurons" and "ablation" (entropy neurons), and
        "held_out" (figures with the chosen edit and without).

    Raises:
        UserError: sequences that do not fit the model or the letters, or options out of range.

    Example:
        >>> import calibjax
        >>> lm = calibjax.LanguageModel.random(vocab_size=32, num_layers=2)
        >>> texts = [[(row + step) % 32 for step in range(20)] for row in range(40)]
        >>> data = calibjax.load_text(texts, lm, seq_len=16)
        >>> halves = calibjax.split_sequences(data, 0.5)
        >>> document = calibjax.evaluate_layers(lm, *halves, context=calibjax.RunContext().silent())
        >>> [row["layer"] for row in document["layers"]["curves"]]
        [0, 1, 2]
    """
    context = context or RunContext()
    check_options(options)
    check_batch(context.mesh, options.batch_size)
    fit, held_out = as_sequences(fit, lm), as_sequences(held_out, lm)
    for half in (fit, held_out):
        check_ids(half, lm.config.vocab_size)
        if letters is not None and not np.isin(half.targets[half.where], letters).all():
            raise UserError(f"letters: expected every scored target among the tokens {list(letters)}.")
    check_resamples(held_out, "held_out")
    swept = options.swept(lm.config.num_layers)
    counts = [int(half.where.sum()) for half in (fit, held_out)]
    scope = "whole vocabulary" if letters is None else "letters only"
    both = concatenate([fit, held_out])
    run_options: dict[str, Any] = {"batch_size": options.batch_size, "context": context}
    binning: dict[str, Any] = {"bins": options.bins, "closed": options.closed}
    with jax.set_mesh(context.mesh):
        readout, space = make_readout(lm, letters), directions.null_space(lm)
        neurons = directions.entropy_neurons(lm, space, layers=options.neuron_layers)  # refuses mixtures of experts
        outputs = layer_outputs(lm, both, readout, **run_options)
        # At the last layer, of the tokens to fit on, which stand before those held out.
        confidence = outputs.confidence[-1, : counts[0]]
        correct = outputs.correct[-1, : counts[0]]
        sets = directions.choose_sets(options.direction, confidence, correct)
        fitted = directions.find_directions(lm, fit, readout, sets, **run_options)
        binned = {**run_options, **binning}
        on_fit = directions.sweep(lm, fit, readout, fitted, swept, options.strengths, **binned)
        on_held_out = directions.sweep(lm, held_out, readout, fitted, swept, options.strengths, **binned)
        ablation = directions.ablate(lm, (fit, held_out), readout, neurons, space, **binned)
    layers = layers_json(outputs, **binning, settled_fraction=options.settled, seed=context.seed)
    chosen = directions.choose_edit(on_fit)
    before, after = on_held_out[directions.UNEDITED], on_held_out[chosen]
    difference = metrics.error_comparison(after, before, seed=context.seed)
    edited = {} if chosen == directions.UNEDITED else {"edited": after}
    methods = {
        name: row_json(sums, draws_of(sums, context.seed), closed=options.closed, seed=context.seed)
        for name, sums in {"uncalibrated": before, **edited}.items()
    }
    fractions = space.fraction(fitted.vectors)
    rows: list[dict[str, Any]] = []
    for layer, values in enumerate(zip(fitted.gap, fitted.length, fractions, strict=True), 1):
        gap, length, fraction = map(float, values)
        rows.append({"layer": layer, "gap": gap, "length": length, "null_space_fraction": fraction})
    compared = ("ece", "mce", "accuracy", "confidence")
    sweep = []
    for edit, sums in on_fit.items():
        figures = {
            "fit": metrics.summarise(sums),
            "held_out": interval_figures(on_held_out[edit], compared, context.seed),
        }
        sweep.append({**edit._asdict(), **figures})
    return {
        "schema": SCHEMA,
        "held_out": {"tokens": counts[1], "unit": "tokens", "clusters": "sequences", "methods": methods},
        "layers": {"tokens": sum(counts), "readout": scope, **layers},
        "subjects": subject_rows(subjects, outputs.confidence[-1], outputs.correct[-1]),
        "direction": {
            "recipe": options.direction,
            "counts": list(fitted.counts),
            "expected_fraction": space.expected,
            "rows": rows,
            "chosen": chosen._asdict(),
            "difference": difference._asdict(),
        },
        "sweep": sweep,
        "neurons": [neuron._asdict() for neuron in neurons],
        "ablation": ablation,
        "run": {"command": "eval layers", "base_fingerprint": lm.fingerprint},
    }
