"""`calibjax compare`: all recalibration methods, on a model and text or on a table of predictions."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from calibjax.commands.common import (
    SCHEMA,
    BinningOptions,
    ModelOptions,
    OutputOptions,
    TextOptions,
    begin,
    finish,
    presentation,
    split_text,
)
from calibjax.commands.train_ats import fit_ats
from calibjax.data import Sequences, check_context, eval_batches, read_table, split_table
from calibjax.eval.compare.contenders import (
    Contender,
    Outcome,
    Result,
    contenders,
    run_contenders,
    uncalibrated,
    with_confidence,
)
from calibjax.eval.compare.results import SortKey, comparison_json, print_comparison
from calibjax.eval.report.schema import CompareDocument
from calibjax.eval.tokens import evaluate_tokens, identity_head
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model
from calibjax.models.frozen import freeze
from calibjax.recalibrate import METHODS, Predictions
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import Count, run_identity
from calibjax.train.options import AtsOptions, make_plan
from calibjax.train.temperature import fit_single_temperature

_LOGITS_HELD = 2**28  # numbers of each part: a gibibyte


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(BinningOptions, OutputOptions, TextOptions, ModelOptions):
    """Fits every recalibration method on one part of the data and compares them on the other.

    On text: --model and --data; every next token is a prediction, and ATS is fitted as by `train ats` with its
    defaults. On existing predictions: --table, a .csv, .parquet or .jsonl file with the columns confidence and correct
    (0, 1, or a fraction of attempts), or logit_0, logit_1, ... (or p_0, ...) and label, and optionally group; or an
    .npz file with arrays confidence and correct, or logits and labels, and optionally features, unembedding, group.
    Prints a table with intervals and each method's difference from temperature scaling. Exit code 1 where a method
    failed.

    Attributes:
        data: text for the model: file, directory or hub id, as for `train ats`.
        table: file of predictions, in place of --model and --data.
        methods: names (docs/recalibration.md), or all but those with more parameters for pairs of classes than there
            are predictions; the base model and temperature scaling are always shown.
        out: directory for metrics.json, report.html and reliability.png; without it only the tables are printed.
        fit_fraction: fraction of the data to fit on; of sequences the first, of a table's rows (or groups) drawn at
            random.
        max_tokens: of text, predictions in each part at most, whole sequences drawn at random.
        sort: figure that the rows are ordered by, best first.
    """

    model: str | None = None
    data: str | None = None
    table: Path | None = None
    methods: tuple[str, ...] = ("all",)
    out: Path | None = presentation(None)
    max_tokens: Count = 10_000
    sort: SortKey = presentation("ece")

    def check(self) -> None:
        """Raises `UserError` unless there is a model with its text, or else a table."""
        if (self.model is None) != (self.data is None) or (self.table is None) == (self.model is None):
            raise UserError("give either --model and --data, or --table.")


class _Material(NamedTuple):
    """What is compared, and on what."""

    base: Outcome
    rows: dict[str, Contender]
    left_out: dict[str, str]
    reference: str
    groups: np.ndarray | None
    unit: str
    clusters: str
    title: str


def run(options: CompareOptions, log: Callable[[str], None] = print) -> CompareDocument:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    names = _method_names(options.methods)
    context = begin("compare", options, log)
    with tempfile.TemporaryDirectory() as scratch:
        fits = Path(scratch) if options.out is None else options.out / "fit"
        material = _from_table(options, names, log) if options.table else _from_model(options, names, fits, log)
        results, failed = run_contenders(material.rows, context=context)
    results = {"uncalibrated": Result(material.base, 0.0, 0), **results}
    log(f"bootstrap of {len(results)} methods over {material.clusters}")
    methods = comparison_json(
        results,
        reference=material.reference,
        groups=material.groups,
        bins=options.bins,
        closed=options.closed,
        seed=options.seed,
        sort=options.sort,
    )
    document: CompareDocument = {
        "schema": SCHEMA,
        "held_out": {
            "tokens": len(material.base.confidence),
            "unit": material.unit,
            "clusters": material.clusters,
            "reference": material.reference,
            "sort": options.sort,
            "methods": methods,
            "failed": failed,
            "left_out": material.left_out,
        },
        "run": run_identity("compare", options),
    }
    if options.out is not None:
        finish(document, options.out, show=False)
    if not options.json:
        print_comparison(document["held_out"], material.title)
        if options.out is not None:
            print(f"results in {options.out}: report.html, metrics.json, reliability.png")
    return document


def _method_names(asked: tuple[str, ...]) -> tuple[str, ...]:
    names = _split(asked)
    unknown = [name for name in names if name not in (*METHODS, "all", "uncalibrated")]
    if unknown or not names:
        raise UserError(f"--methods: {', '.join(unknown) or 'nothing'}: expected all, or some of {', '.join(METHODS)}.")
    return tuple(name for name in METHODS if _all(asked) or name in names)


def _split(asked: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for part in asked for name in part.split(",") if name)


def _all(asked: tuple[str, ...]) -> bool:
    return "all" in _split(asked)


# --- a table of predictions ---


def _from_table(options: CompareOptions, names: tuple[str, ...], log: Callable[[str], None]) -> _Material:
    assert options.table is not None
    with about("--table"):
        table = read_table(options.table)
    parts = split_table(table, options.fit_fraction, options.seed)
    calibration, held_out = (_with_slices(with_confidence(part.predictions), part.groups) for part in parts)
    groups = parts[1].groups
    reference = "confidence_temperature" if table.predictions.logits is None else "temperature"
    read = (name for name, value in table.predictions._asdict().items() if value is not None)
    log(
        f"table: {len(table):,} rows of {', '.join(read)}"
        + (f" in {len(set(table.groups)):,} groups" if table.groups is not None else "")
        + f"; {len(parts[0]):,} to fit on, {len(parts[1]):,} held out, drawn at random"
    )
    base = uncalibrated(held_out)
    rows, left_out = contenders(
        calibration, held_out, base, _with_reference(names, reference), however_large=not _all(options.methods)
    )
    clusters = "rows" if groups is None else "groups"
    return _Material(
        base, rows, left_out, reference, groups, "predictions", clusters, f"{options.table.name}, held out"
    )


def _with_reference(names: tuple[str, ...], reference: str) -> tuple[str, ...]:
    return tuple(name for name in METHODS if name in names or name == reference)


def _with_slices(data: Predictions, groups: np.ndarray | None) -> Predictions:
    if groups is None:
        return data
    return data._replace(slices=np.unique(groups, return_inverse=True)[1].astype(np.int32))


# --- a model and text ---


def _from_model(options: CompareOptions, names: tuple[str, ...], fits: Path, log: Callable[[str], None]) -> _Material:
    assert options.model is not None
    assert options.data is not None
    with about("--model"):
        lm = load_model(options.model, dtype=jnp.dtype(options.dtype))
    log(f"model: {lm!r}")
    check_context(options.text.seq_len, lm.config.max_positions)
    parts = split_text(options.text.read(options.data, lm, log, split=options.split), options.fit_fraction, log)
    plan = make_plan(AtsOptions(), lm.config.hidden_size)
    batch_size = plan.batch_size

    heads = ("temperature", "ats")  # fitted and tested by statistics of the logits, which are not held
    others = tuple(name for name in names if name not in heads)
    needs_logits = any("logits" in METHODS[name].fit_reads for name in others)
    limit = options.max_tokens
    if needs_logits:
        limit = min(limit, max(1, _LOGITS_HELD // lm.config.vocab_size))
    fit, held_out = (_subsample(part, limit, options.seed) for part in parts)
    log(
        f"split: {_tokens(fit):,} tokens to fit on, {_tokens(held_out):,} held out, of "
        f"{_tokens(parts[0]):,} and {_tokens(parts[1]):,}"
        + (
            " (--max-tokens" + (", or a GiB of logits" if limit < options.max_tokens else "") + ")"
            if fit is not parts[0]
            else ""
        )
    )

    def outcome_of(head: FittedHead, sequences: Sequences) -> Outcome:
        done = evaluate_tokens(
            lm, sequences, {"head": head}, batch_size=batch_size, keep_tokens=True, context=RunContext(progress=False)
        )
        tokens = done["head"].tokens
        assert tokens is not None
        where = sequences.where
        confidence, choice, log_prob = (
            np.asarray(x)[where] for x in (tokens.confidence, tokens.argmax, tokens.log_prob)
        )
        return Outcome(confidence, (choice == sequences.targets[where]).astype(np.float32), choice, log_prob)

    def temperature() -> FittedHead:
        return fit_single_temperature(lm, freeze(lm), fit.arrays(), batch_size)[1]

    def ats() -> FittedHead:
        return fit_ats(lm, fit, plan, RunContext(directory=fits / "ats", seed=options.seed).silent()).head

    base, rows, left_out = outcome_of(identity_head(lm), held_out), {}, {}
    for name, fit_head in (("temperature", temperature), ("ats", ats)):
        if name == "temperature" or name in names:
            rows[name] = Contender(fit_head, lambda head: outcome_of(head, held_out), _head_parameters)
    if others:
        calibration, testing = (
            _predictions(lm, sequences, outcome, batch_size, logits=needs_logits)
            for sequences, outcome in ((fit, outcome_of(identity_head(lm), fit)), (held_out, base))
        )
        more, left_out = contenders(calibration, testing, base, others, however_large=not _all(options.methods))
        rows |= more
        if calibration.unembedding is None and "feature_clipping" in left_out:
            left_out["feature_clipping"] = "the model's logits have a soft-cap or a bias, which it does not know"
    return _Material(
        base,
        rows,
        left_out,
        "temperature",
        _clusters(held_out),
        "tokens",
        "sequences" if _one_row(held_out) else "rows of the text",
        f"{Path(options.model.rstrip('/')).name} on {Path(options.data.rstrip('/')).name}, held out",
    )


def _tokens(sequences: Sequences) -> int:
    return int(sequences.where.sum())


def _head_parameters(head: FittedHead) -> int:
    import jax

    return sum(np.size(leaf) for leaf in jax.tree.leaves(head.params))


def _subsample(sequences: Sequences, limit: int, seed: int) -> Sequences:
    """At most `limit` tokens: sequences drawn at random until the next would exceed it, at least one, in order."""
    sizes = sequences.where.sum(axis=1)
    if sizes.sum() <= limit:
        return sequences
    order = np.random.default_rng(seed).permutation(len(sizes))
    number = max(1, int(np.searchsorted(np.cumsum(sizes[order]), limit, side="right")))
    return sequences.take(np.sort(order[:number]))


def _one_row(sequences: Sequences) -> bool:
    return bool((sequences.source == sequences.source[0]).all())


def _clusters(sequences: Sequences) -> np.ndarray:
    """Of each token that counts: its row of the text, from 0; its sequence where all are of one row."""
    number = np.unique(sequences.source, return_inverse=True)[1]
    number = np.arange(len(number)) if _one_row(sequences) else number
    return np.broadcast_to(number[:, None], sequences.where.shape)[sequences.where].astype(np.int32)


def _predictions(
    lm: LanguageModel, sequences: Sequences, outcome: Outcome, batch_size: int, *, logits: bool
) -> Predictions:
    """The tokens that count, with everything that the methods read; logits only where they are asked for."""
    hidden, z = [], []
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        tokens, segments, positions = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        where = np.asarray(batch["where"])
        where[real:] = False
        hidden.append(
            np.asarray(lm.hidden_states(tokens, segment_ids=segments, positions=positions), np.float32)[where]
        )
        if logits:
            z.append(np.asarray(lm.logits(tokens, segment_ids=segments, positions=positions), np.float32)[where])
    linear = lm.config.logit_softcap is None and lm.unembedding_bias is None
    return Predictions(
        logits=np.concatenate(z) if logits else None,
        labels=sequences.targets[sequences.where],
        confidence=outcome.confidence,
        correct=outcome.correct,
        features=np.concatenate(hidden),
        unembedding=np.asarray(lm.unembedding, np.float32) if linear else None,
        slices=_clusters(sequences),
    )
