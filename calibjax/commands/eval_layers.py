"""The command that looks into a model: calibration across layers, and along a direction of its residual stream."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from calibjax import metrics
from calibjax.commands.common import SCHEMA, DataOptions, claim_directory, finish, load_placed, on_devices
from calibjax.data import (
    Windows,
    check_context,
    choice_windows,
    is_multiple_choice,
    read_source,
    split_windows,
)
from calibjax.eval.layers.directions import (
    Recipe,
    choose_edit,
    choose_sets,
    find_directions,
    null_space,
    sweep,
)
from calibjax.eval.layers.layers import evaluate_layers, layers_json, make_readout
from calibjax.eval.layers.neurons import entropy_neurons
from calibjax.eval.report import print_report
from calibjax.eval.tasks.subjects import subject_rows
from calibjax.eval.tokens import row_json
from calibjax.models import LanguageModel
from calibjax.runtime.distributed import DeviceOptions, is_first, together
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersRun:
    """What every layer of a model would predict, how true that is, and what moves its confidence (arXiv 2511.00280).

    Prints, for each layer, accuracy, confidence, calibration errors, entropy and the divergence from the last; where
    the decision settles and whether confidence is corrected after it; a calibration direction in the residual stream,
    found and chosen on one half of the data, and what adding it does to the other half; and the entropy neurons. --data
    with the columns question, choices and answer is asked as multiple choice, anything else is text.

    Attributes:
        model: directory with config.json and safetensors, or a hub id.
        data: file, directory or hub id, as for `train ats`, or of multiple-choice questions.
        out: directory for metrics.json, report.html and figures; without it the tables are all.
        split: of a hub data set or directory.
        letters_only: of a question, compare only the letters; --no-letters-only reads the whole vocabulary.
        direction: which two sets it leads between: over-confident wrong predictions and right ones, all wrong ones and
            right ones, or the surer and the less sure half.
        strengths: of the edits, in units of the residual's mean length at the layer.
        sweep_layers: blocks after which to edit, from 1; all by default.
        settled: share of most likely tokens equal to the last layer's from which the decision counts as settled.
        neuron_layers: how many of the last blocks to look for entropy neurons in.
        batch_size: windows a step.
        bins: equal-width bins of the expected calibration error.
        closed: which bin a confidence on an edge belongs to: the one below (right), above (left), or none.
        dtype: compute dtype of the model.
        seed: of everything random.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
        devices: what the run uses.
        text: how text becomes windows; of questions, only `examples` counts, which are drawn at random.
    """

    model: str
    data: str
    out: Path | None = None
    split: str | None = None
    letters_only: bool = True
    direction: Recipe = "overconfident"
    strengths: tuple[float, ...] = (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)
    sweep_layers: tuple[int, ...] = ()
    settled: float = 0.9
    neuron_layers: int = 1
    batch_size: int = 16
    bins: int = 15
    closed: Literal["right", "left", "none"] = "right"
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    json: bool = False
    quiet: bool = False
    devices: DeviceOptions = DeviceOptions()  # noqa: RUF009 (frozen)
    text: DataOptions = DataOptions()  # noqa: RUF009 (frozen)


class _Material(NamedTuple):
    """The predictions to look at, in the order: the half that is fitted on, the other."""

    halves: tuple[Windows, Windows]
    unit: str
    readout: str
    letters: tuple[int, ...] | None = None
    subjects: tuple[str, ...] = ()


@on_devices
def run_layers(run: LayersRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `LayersRun`; returns the contents of metrics.json. Raises UserError before any work is lost."""
    for name in ("bins", "batch_size", "neuron_layers"):
        if getattr(run, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(run, name)}.")
    if not 0 < run.settled <= 1:
        raise UserError(f"--settled: expected a share above 0 and at most 1, got {run.settled}.")
    if not np.isfinite(run.strengths).all():
        raise UserError(f"--strengths: expected finite numbers, got {run.strengths}.")
    mesh = run.devices.make_mesh()
    check_batch(mesh, run.batch_size)
    if run.out is not None:
        claim_directory(run.out, _identity(run))
    lm = load_placed(run.model, mesh, run.dtype, announce=announce)
    depth = lm.config.num_layers
    swept = run.sweep_layers or tuple(range(1, depth + 1))
    if not all(1 <= layer <= depth for layer in swept):
        raise UserError(f"--sweep-layers: expected blocks from 1 to {depth}, got {run.sweep_layers}.")
    if run.neuron_layers > depth:
        raise UserError(f"--neuron-layers: expected 1 to {depth}, the model's blocks, got {run.neuron_layers}.")
    material = together(functools.partial(_read, run, lm, announce))
    document = _analyse(run, lm, mesh, swept, material, announce)
    if run.out is not None:
        figures = "layers.png, sweep.png" + (", subjects.png" if document["subjects"] else "")
        finish(document, run.out, holds=figures, show=not run.json)
    elif not run.json and is_first():
        print_report(document)
    return document


def _analyse(
    run: LayersRun,
    lm: LanguageModel,
    mesh: Mesh,
    swept: tuple[int, ...],
    material: _Material,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    fit, held_out = material.halves
    counts = [int(half.where.sum()) for half in material.halves]
    announce(f"split: {counts[0]:,} {material.unit} to find a direction and an edit on, {counts[1]:,} held out")
    both = Windows(*(np.concatenate(pair) for pair in zip(fit, held_out, strict=True)))
    steps: dict[str, Any] = {"batch_size": run.batch_size, "quiet": run.quiet}
    with jax.set_mesh(mesh):
        read = make_readout(lm, material.letters)
        outputs = evaluate_layers(lm, both, read, **steps)
        sets = choose_sets(run.direction, outputs.confidence[-1, : counts[0]], outputs.correct[-1, : counts[0]])
        directions = find_directions(lm, fit, read, sets, **steps)
        space = null_space(lm)
        options: dict[str, Any] = {**steps, "bins": run.bins, "closed": run.closed}
        on_fit, on_held_out = (
            sweep(lm, half, read, directions, swept, run.strengths, **options) for half in (fit, held_out)
        )
        neurons = entropy_neurons(lm, space, layers=run.neuron_layers)
    layers = layers_json(outputs, bins=run.bins, closed=run.closed, settled_share=run.settled, seed=run.seed)
    chosen = choose_edit(on_fit)
    before, after = (on_held_out[edit] for edit in (next(iter(on_held_out)), chosen))
    difference = metrics.compare_sums(after, before, seed=run.seed)

    methods = {
        name: row_json(sums, closed=run.closed, seed=run.seed)
        for name, sums in (("uncalibrated", before), ("edited", after))
        if name == "uncalibrated" or chosen.layer
    }
    shares = space.share(directions.vectors)
    rows = [
        {"layer": index + 1, "gap": float(gap), "length": float(length), "null_space_share": float(share)}
        for index, (gap, length, share) in enumerate(zip(directions.gap, directions.length, shares, strict=True))
    ]
    return {
        "schema": SCHEMA,
        "held_out": {"tokens": counts[1], "unit": material.unit, "clusters": "windows", "methods": methods},
        "layers": {"tokens": sum(counts), "readout": material.readout, **layers},
        "subjects": subject_rows(material.subjects, outputs.confidence[-1], outputs.correct[-1]),
        "direction": {
            "recipe": run.direction,
            "counts": list(directions.counts),
            "expected_share": space.expected,
            "rows": rows,
            "chosen": chosen._asdict(),
            "difference": difference._asdict(),
        },
        "sweep": [
            {**edit._asdict(), "fit": metrics.summarise(sums), "held_out": _with_intervals(on_held_out[edit], run.seed)}
            for edit, sums in on_fit.items()
        ],
        "neurons": [neuron._asdict() for neuron in neurons],
        "run": {**_identity(run), "base_fingerprint": lm.fingerprint},
    }


def _with_intervals(sums: metrics.CalibrationSums, seed: int) -> dict[str, dict[str, float]]:
    values = metrics.summarise(sums)
    statistics = {
        "ece": metrics.ece_from_sums,
        "mce": metrics.mce_from_sums,
        "accuracy": lambda s: s.whole()[2] / s.whole()[0],
        "confidence": lambda s: s.whole()[1] / s.whole()[0],
    }
    out = {}
    for name, statistic in statistics.items():
        low, high = metrics.bootstrap_interval(sums, statistic, seed=seed)
        out[name] = {"value": values[name], "low": low, "high": high}
    return out


def _read(run: LayersRun, lm: LanguageModel, announce: Callable[[str], None]) -> _Material:
    rows = read_source(run.data, split=run.split, rows=run.text.rows)
    if not is_multiple_choice(rows):
        check_context(run.text.seq_len, lm.config.max_positions)
        windows = run.text.read(run.data, lm, announce, split=run.split)
        return _Material(split_windows(windows, 0.5), "tokens", "whole vocabulary")
    asked = choice_windows(rows, lm.tokenizer, lm.config.max_positions, limit=run.text.examples, seed=run.seed)
    names = lm.tokenizer.convert_ids_to_tokens(list(asked.letters))
    announce(
        f"data: {rows.name}: multiple choice, {len(rows):,} questions read, {asked.too_long:,} of them longer than "
        f"{lm.config.max_positions} tokens and left out; {len(asked.subjects):,} asked, answers {', '.join(names)} "
        f"after {asked.cue!r}"
    )
    # Questions of one subject stand together in most files: the halves should be alike.
    order = np.random.default_rng(run.seed).permutation(len(asked.subjects))
    halves = split_windows(asked.windows.take(order), 0.5)
    letters = asked.letters if run.letters_only else None
    readout = "letters only" if run.letters_only else "whole vocabulary"
    subjects = tuple(asked.subjects[index] for index in order)
    return _Material(halves, "questions", readout, letters, subjects)


def _identity(run: LayersRun) -> dict[str, Any]:
    """What makes two runs the same: all options but where it runs, where the result goes and how it is shown."""
    shown_only = {"out", "json", "quiet", "bins", "closed", "batch_size", "devices"}
    fields = {name: value for name, value in dataclasses.asdict(run).items() if name not in shown_only}
    return {"command": "eval layers", **fields}
