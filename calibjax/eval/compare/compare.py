"""All recalibration methods side by side: fitted on one set of predictions, compared on another."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibjax import metrics
from calibjax.eval.compare.contenders import (
    Contender,
    Outcome,
    Result,
    contenders,
    not_converged,
    run_contenders,
    uncalibrated,
    with_confidence,
)
from calibjax.eval.compare.results import SortKey, comparison_json
from calibjax.eval.report.notes import comparison_verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import comparison_table, winner
from calibjax.recalibrate import METHODS, Predictions, Recalibrator
from calibjax.runtime.arrays import AnyArray
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError


class Material(NamedTuple):
    """What is compared, and on what.

    Attributes:
        base: the uncalibrated held-out predictions.
        rows: name -> contender.
        left_out: name -> why it cannot run.
        reference: name of temperature scaling.
        groups: labels `[N]` of rows that are resampled together, or None.
        unit, clusters: names of the predictions and of what is resampled.
        title: a few words on the data.
        save_head: writes the state of a contender that is a head.
    """

    base: Outcome
    rows: dict[str, Contender]
    left_out: dict[str, str]
    reference: str
    groups: np.ndarray | None = None
    unit: str = "predictions"
    clusters: str = "rows"
    title: str = "held out"
    save_head: Callable[[Path, Any], None] | None = None


class Comparison(NamedTuple):
    """What `compare` returns; prints the verdict and the table.

    Attributes:
        document: JSON-able: every figure, as `held_out` of metrics.json.
        states: name -> what the method's `fit` returned; None for "uncalibrated".
        title: a few words on the data.
    """

    document: Document
    states: dict[str, Any]
    title: str

    @property
    def winner(self) -> str:
        """Name of the method that the verdict names: temperature scaling where none beats it beyond noise."""
        return winner(self.document)

    def recalibrator(self, name: str | None = None) -> Recalibrator:
        """A fitted method, or the winner, as a function of further predictions, which `recalibrate.save` stores."""
        name = name or self.winner
        if self.states[name] is None:
            raise UserError("no method is better than the uncalibrated predictions; name one, such as temperature.")
        return Recalibrator(name, self.states[name], {})

    def __repr__(self) -> str:
        table = comparison_table(self.document, self.title)
        rows = [row[:7] for row in (table.columns, *table.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([comparison_verdict(self.document), table.title, *lines])


def compare(
    fit: Predictions,
    held_out: Predictions,
    methods: Sequence[str] = (),
    *,
    groups: AnyArray | None = None,
    sort: SortKey = "log_loss",
    bins: int = 15,
    closed: metrics.Closed = "right",
    context: RunContext | None = None,
) -> Comparison:
    """Fits recalibration methods on one set of predictions and compares them on another.

    Args:
        fit: predictions to fit on, with confidence and correct, or logits and labels.
        held_out: predictions to compare on, with the same fields.
        methods: names in `recalibrate.METHODS`; temperature scaling is always among them. Empty: all that these
            predictions have the fields for, but those with more parameters for pairs of classes than predictions.
        groups: labels `[N]` of held-out predictions that depend on each other and are resampled together.
        sort: figure that the rows are ordered by, best first.
        bins, closed: of the reliability bins.
        context: seed of the intervals, and progress.

    Returns:
        `Comparison`. Differences from temperature scaling are paired, and corrected for the number of methods.

    Raises:
        UserError: an unknown method, or invalid predictions.

    Example:
        >>> import calibjax
        >>> from calibjax import recalibrate
        >>> rng = np.random.default_rng(0)
        >>> logits = rng.normal(size=(800, 4))
        >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        >>> parts = [recalibrate.Predictions(logits=3 * logits[i::2], labels=labels[i::2]) for i in range(2)]
        >>> compared = calibjax.compare(*parts, ["isotonic"], context=calibjax.RunContext(progress=False))
        >>> compared.winner
        'temperature'
        >>> compared.recalibrator()(logits=logits[:2]).shape
        (2, 4)
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise UserError(f"methods: {', '.join(unknown)}: expected some of {', '.join(METHODS)}.")
    material = prediction_material(fit, held_out, tuple(methods or METHODS), groups, however_large=bool(methods))
    context = context or RunContext()
    return run_material(material, sort=sort, bins=bins, closed=closed, context=context)


def prediction_material(
    fit: Predictions,
    held_out: Predictions,
    names: tuple[str, ...],
    groups: AnyArray | None = None,
    *,
    however_large: bool,
) -> Material:
    """Methods on predictions; `however_large` as `contenders`'."""
    fit, held_out = with_confidence(fit), with_confidence(held_out)
    reference = "confidence_temperature" if held_out.logits is None else "temperature"
    names = tuple(name for name in METHODS if name in names or name == reference)
    base = uncalibrated(held_out)
    rows, left_out = contenders(fit, held_out, base, names, however_large=however_large)
    clusters = "rows" if groups is None else "groups"
    groups = None if groups is None else np.asarray(groups)
    return Material(base, rows, left_out, reference, groups, clusters=clusters)


def run_material(
    material: Material, *, sort: SortKey, bins: int, closed: metrics.Closed, context: RunContext
) -> Comparison:
    """Fits and compares all contenders of the material."""
    results, failed = run_contenders(material.rows, context=context)
    results = {"uncalibrated": Result(material.base, 0.0, 0, None), **results}
    methods = comparison_json(
        results,
        reference=material.reference,
        groups=material.groups,
        bins=bins,
        closed=closed,
        seed=context.seed,
        sort=sort,
    )
    document: Document = {
        "tokens": len(material.base.confidence),
        "unit": material.unit,
        "clusters": material.clusters,
        "reference": material.reference,
        "sort": sort,
        "methods": methods,
        "failed": failed,
        "left_out": material.left_out,
        "not_converged": not_converged(results),
    }
    return Comparison(document, {name: result.state for name, result in results.items()}, material.title)
