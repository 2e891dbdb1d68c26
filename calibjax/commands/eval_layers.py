"""`calibjax eval layers`: calibration across the layers of a model, and along a direction of its residual stream."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from calibjax import metrics
from calibjax.commands.common import (
    SCHEMA,
    BinningOptions,
    ModelOptions,
    OutputOptions,
    SourceOptions,
    begin,
    finish,
    load_placed,
    on_devices,
    presentation,
    split_text,
)
from calibjax.data import (
    Sequences,
    check_ids,
    choice_sequences,
    is_multiple_choice,
)
from calibjax.eval.figures_json import row_json
from calibjax.eval.layers.ablation import ablate
from calibjax.eval.layers.directions import (
    Recipe,
    choose_edit,
    choose_sets,
    find_directions,
    fit_figures,
    null_space,
    sweep,
)
from calibjax.eval.layers.layers import evaluate_layers, layers_json, make_readout
from calibjax.eval.layers.neurons import entropy_neurons
from calibjax.eval.report.schema import Document
from calibjax.eval.report.terminal import print_report
from calibjax.eval.tasks.subjects import subject_rows
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import DeviceOptions, is_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, Range, run_identity
from calibjax.runtime.sharding import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalLayersOptions(BinningOptions, OutputOptions, SourceOptions, ModelOptions):
    """Evaluates what each layer of a model would predict, and what changes its confidence (arXiv 2511.00280).

    Prints, for each layer, accuracy, confidence, calibration errors, entropy and the divergence from the last; where
    the decision settles and whether confidence is corrected after it; a calibration direction in the residual stream,
    found and chosen on one half of the data, and what adding it does to the other half; and the entropy neurons, and
    what the model does without them. --data with the columns question, choices and answer is read as multiple choice,
    anything else as text.

    Attributes:
        data: file, directory or hub id, as for `train ats`, or of multiple-choice questions.
        out: directory for metrics.json, report.html and figures; without it only the tables are printed.
        letters_only: of a question, compare only the letters; --no-letters-only reads the whole vocabulary.
        direction: the two sets that the direction leads between: overconfident wrong predictions and right ones, all
            wrong ones and right ones, or the more confident and the less confident half.
        strengths: strengths of the edits, in units of the residual's mean norm at the layer.
        sweep_layers: blocks after which to edit, from 1; all by default.
        settled: fraction of predictions equal to those of the last layer from which the decision counts as settled.
        neuron_layers: number of the last blocks in which to look for entropy neurons.
        subjects: print the table of subjects too.
        batch_size: sequences per step.
        devices: devices of the run.
        text: how text becomes sequences; of questions, only `examples` counts, which are drawn at random.
    """

    out: Path | None = presentation(None)
    letters_only: bool = True
    direction: Recipe = "overconfident"
    strengths: tuple[Annotated[float, Range()], ...] = (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)
    sweep_layers: tuple[Count, ...] = ()
    settled: Annotated[float, Range(0, 1, open="low")] = 0.9
    neuron_layers: Count = 1
    batch_size: BatchSize = presentation(16)
    subjects: bool = presentation(False)
    devices: DeviceOptions = presentation(DeviceOptions())


class _Material(NamedTuple):
    """The predictions to look at, in the order: the half that is fitted on, the other."""

    halves: tuple[Sequences, Sequences]
    unit: str
    readout: str
    letters: tuple[int, ...] | None = None
    subjects: tuple[str, ...] = ()


@on_devices
def run(options: EvalLayersOptions, log: Callable[[str], None] = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    context = begin("eval layers", options, log)
    check_batch(context.mesh, options.batch_size)
    lm = load_placed(options.model, context.mesh, options.dtype, adapter=options.adapter, log=log)
    depth = lm.config.num_layers
    swept = options.sweep_layers or tuple(range(1, depth + 1))
    if not all(1 <= layer <= depth for layer in swept):
        raise UserError(f"--sweep-layers: expected blocks from 1 to {depth}, got {options.sweep_layers}.")
    if options.neuron_layers > depth:
        raise UserError(f"--neuron-layers: expected 1 to {depth}, the model's blocks, got {options.neuron_layers}.")
    material = together(functools.partial(_read, options, lm, log))
    document = _analyse(options, lm, swept, material, context)
    if options.out is not None:
        figures = "layers.png, sweep.png" + (", subjects.png" if document["subjects"] else "")
        finish(document, options.out, holds=figures, show=not options.json, subjects=options.subjects)
    elif not options.json and is_first():
        print_report(document, subjects=options.subjects)
    return document


def _analyse(
    options: EvalLayersOptions,
    lm: LanguageModel,
    swept: tuple[int, ...],
    material: _Material,
    context: RunContext,
) -> Document:
    fit, held_out = material.halves
    counts = [int(half.where.sum()) for half in material.halves]
    context.log(f"split: {counts[0]:,} {material.unit} to find a direction and an edit on, {counts[1]:,} held out")
    edits = 1 + len(swept) * len(options.strengths)
    context.log(
        f"work: {sum(int(half.segment_ids.astype(bool).sum()) for half in (fit, held_out)):,} tokens in "
        f"{len(fit.tokens) + len(held_out.tokens):,} sequences, read once for {lm.config.num_layers + 1} layers and "
        f"once for each of {edits} edits"
    )
    both = Sequences(*(np.concatenate(pair) for pair in zip(fit, held_out, strict=True)))
    steps: dict[str, Any] = {"batch_size": options.batch_size, "context": context}
    with jax.set_mesh(context.mesh):
        read = make_readout(lm, material.letters)
        outputs = evaluate_layers(lm, both, read, **steps)
        sets = choose_sets(options.direction, outputs.confidence[-1, : counts[0]], outputs.correct[-1, : counts[0]])
        directions = find_directions(lm, fit, read, sets, **steps)
        space = null_space(lm)
        binned: dict[str, Any] = {**steps, "bins": options.bins, "closed": options.closed}
        on_fit, on_held_out = (
            sweep(lm, half, read, directions, swept, options.strengths, **binned) for half in (fit, held_out)
        )
        neurons = entropy_neurons(lm, space, layers=options.neuron_layers)
        ablation = ablate(lm, material.halves, read, neurons, space, **binned)
    layers = layers_json(
        outputs, bins=options.bins, closed=options.closed, settled_share=options.settled, seed=options.seed
    )
    chosen = choose_edit(on_fit)
    before, after = (on_held_out[edit] for edit in (next(iter(on_held_out)), chosen))
    difference = metrics.error_comparison(after, before, seed=options.seed)

    methods = {
        name: row_json(sums, closed=options.closed, seed=options.seed)
        for name, sums in (("uncalibrated", before), ("edited", after))
        if name == "uncalibrated" or chosen.layer
    }
    shares = space.fraction(directions.vectors)
    rows: list[dict[str, Any]] = [
        {"layer": index + 1, "gap": float(gap), "length": float(length), "null_space_share": float(share)}
        for index, (gap, length, share) in enumerate(zip(directions.gap, directions.length, shares, strict=True))
    ]
    return {
        "schema": SCHEMA,
        "held_out": {"tokens": counts[1], "unit": material.unit, "clusters": "sequences", "methods": methods},
        "layers": {"tokens": sum(counts), "readout": material.readout, **layers},
        "subjects": subject_rows(material.subjects, outputs.confidence[-1], outputs.correct[-1]),
        "direction": {
            "recipe": options.direction,
            "counts": list(directions.counts),
            "expected_share": space.expected,
            "rows": rows,
            "chosen": {"layer": chosen.layer, "strength": chosen.strength},
            "difference": difference._asdict(),
        },
        "sweep": [
            {
                "layer": edit.layer,
                "strength": edit.strength,
                "fit": fit_figures(sums),
                "held_out": _with_intervals(on_held_out[edit], options.seed),
            }
            for edit, sums in on_fit.items()
        ],
        "neurons": [neuron.to_json() for neuron in neurons],
        "ablation": ablation,
        "run": {**run_identity("eval layers", options), "base_fingerprint": lm.fingerprint},
    }


def _with_intervals(sums: metrics.CalibrationSums, seed: int) -> dict[str, Any]:
    values = metrics.summarise(sums)
    statistics = {
        "ece": metrics.ece_from_sums,
        "mce": metrics.mce_from_sums,
        "accuracy": lambda s: s.whole()[2] / s.whole()[0],
        "confidence": lambda s: s.whole()[1] / s.whole()[0],
    }
    out: Any = {}
    for name, statistic in statistics.items():
        low, high = metrics.bootstrap_interval(sums, statistic, seed=seed)
        out[name] = {"value": values[name], "low": low, "high": high}
    return out


def _read(options: EvalLayersOptions, lm: LanguageModel, log: Callable[[str], None]) -> _Material:
    rows = options.text.open(options.data, options.split)
    if not is_multiple_choice(rows):
        sequences = options.text.read(options.data, lm, log, split=options.split)
        return _Material(split_text(sequences, 0.5, log), "tokens", "whole vocabulary")
    asked = choice_sequences(
        rows, lm.tokenizer, lm.config.max_positions, limit=options.text.examples, seed=options.seed
    )
    check_ids(asked.sequences, lm.config.vocab_size)
    names = lm.tokenizer.convert_ids_to_tokens(list(asked.letters))
    log(
        f"data: {rows.name}: multiple choice, {asked.read:,} questions read, {asked.too_long:,} of them longer than "
        f"{lm.config.max_positions} tokens and left out; {len(asked.subjects):,} used, answers {', '.join(names)} "
        f"after {asked.cue!r}"
    )
    # Questions of one subject stand together in most files: the halves should be alike.
    order = np.random.default_rng(options.seed).permutation(len(asked.subjects))
    halves = split_text(asked.sequences.take(order), 0.5, log)
    letters = asked.letters if options.letters_only else None
    readout = "letters only" if options.letters_only else "whole vocabulary"
    subjects = tuple(asked.subjects[index] for index in order)
    return _Material(halves, "questions", readout, letters, subjects)
