"""All recalibration methods side by side: fitted on one set of predictions, timed, and compared on another."""

import errno
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from calibjax import metrics
from calibjax.eval.figures_json import add_differences, curve_json, draws_of, ece_json, finite_or_none, reliability_json
from calibjax.eval.report.notes import comparison_verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import comparison_table, figure_of, winner
from calibjax.eval.report.terminal import result_text
from calibjax.heads import FittedHead
from calibjax.metrics import Closed
from calibjax.recalibrate import METHODS, Method, Predictions, Recalibrator, parameter_count
from calibjax.recalibrate.contract import at_labels, checked_fields, class_count
from calibjax.runtime.arrays import AnyArray, ceil_div, label_numbers, plain_array
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError, first_line, storage_failure
from calibjax.runtime.options import Bins, check_value

_Errors = Literal["ece", "debiased_ece", "adaptive_ece", "smooth_ece", "mce"]
SortKey = Literal[_Errors, "brier", "log_loss", "nll", "auroc", "parameters", "fit_seconds"]
COMPARED = ("ece", "brier", "log_loss", "nll")
"""Figures that are compared with those of temperature scaling, on the same resamples."""
_DENSE = ("matrix", "structured_matrix", "dirichlet")  # K² parameters
_BLOCK = 2**24  # log-probabilities computed at a time


class Outcome(NamedTuple):
    """The output of a method for N held-out predictions, and whether they are correct, 0/1 or a fraction of attempts.

    `choice`: the predicted class; `log_prob`: of the true class, nats. None where a method returns confidences alone.
    """

    confidence: Float[np.ndarray, " N"]
    correct: Float[np.ndarray, " N"]
    choice: Int[np.ndarray, " N"] | None = None
    log_prob: Float[np.ndarray, " N"] | None = None


class Contender(NamedTuple):
    """One row of a comparison: fits on the calibration part, and maps the state to the held-out `Outcome`."""

    fit: Callable[[], Any]
    predict: Callable[[Any], Outcome]


class Result(NamedTuple):
    """A contender that did not fail; `fit_seconds` includes compilation, `state` is what `fit` returned."""

    outcome: Outcome
    fit_seconds: float
    parameters: int
    state: Any


def uncalibrated(data: Predictions) -> Outcome:
    """The outcome of the uncalibrated predictions: of logits with labels, or else of confidences."""
    if data.logits is None or data.labels is None:
        assert data.confidence is not None
        return Outcome(np.asarray(data.confidence, np.float32), np.asarray(data.correct, np.float32))
    log_probs = jax.jit(lambda block: jax.nn.log_softmax(jnp.asarray(block.logits, jnp.float32), axis=-1))
    return _log_prob_outcome(log_probs, ("logits",), data, np.asarray(data.logits).argmax(axis=1))


def contenders(
    calibration: Predictions, held_out: Predictions, base: Outcome, names: tuple[str, ...], *, include_large: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Name -> contender, for predictions to fit on and to evaluate on, and name -> reason for methods left out.

    Without `include_large`, methods with a parameter for each pair of classes are left out if predictions are fewer.
    """
    chosen, left_out = {}, {}
    classes = class_count(held_out)
    impossible = any(data.logits is not None and np.isneginf(data.logits).any() for data in (calibration, held_out))
    for name in names:
        method = METHODS[name]
        missing = [field for field in method.fit_reads if getattr(calibration, field) is None]
        if missing:
            left_out[name] = f"no {', '.join(missing)} to read here"
        elif impossible and "logits" in method.fit_reads and not method.accepts_impossible:
            left_out[name] = "treats every option by itself, and some logits are -inf"
        elif method.max_classes is not None and classes > method.max_classes:
            left_out[name] = f"takes at most {method.max_classes:,} classes, this data has {classes:,}"
        elif not include_large and name in _DENSE and classes**2 > len(np.asarray(calibration.labels)):
            left_out[name] = f"has {classes**2:,} parameters, more than predictions; name it in --methods to fit it"
        else:
            chosen[name] = _contender(method, calibration, held_out, base)
    return chosen, left_out


def _contender(method: Method, calibration: Predictions, held_out: Predictions, base: Outcome) -> Contender:
    def predict(state: Any) -> Outcome:
        if method.returns == "log_probs":
            assert base.choice is not None
            apply = functools.partial(jax.jit(method.apply), state)
            return _log_prob_outcome(apply, method.apply_reads, held_out, base.choice)
        reads = Predictions(**{field: getattr(held_out, field) for field in method.apply_reads})
        confidence = np.asarray(jax.jit(method.apply)(state, reads))
        return Outcome(confidence, base.correct, base.choice)

    return Contender(lambda: method.fit(calibration), predict)


def _log_prob_outcome(
    apply: Callable[[Predictions], Any], reads: tuple[str, ...], data: Predictions, choice: Int[np.ndarray, " N"]
) -> Outcome:
    assert data.labels is not None
    labels = np.asarray(data.labels)
    fields = {field: np.asarray(getattr(data, field)) for field in reads}
    unembedding = fields.pop("unembedding", None)
    parts = []
    for rows in np.array_split(np.arange(len(labels)), ceil_div(len(labels) * class_count(data), _BLOCK)):
        block = Predictions(unembedding=unembedding, **{name: x[rows] for name, x in fields.items()})
        log_probs = np.asarray(apply(block))
        best = log_probs.max(axis=1)
        # Rounding can make two classes equal: the choice has not changed then.
        same = at_labels(log_probs, choice[rows]) >= best
        chosen = np.where(same, choice[rows], log_probs.argmax(axis=1))
        right = (chosen == labels[rows]).astype(np.float32)
        parts.append((np.exp(best), right, chosen, at_labels(log_probs, labels[rows])))
    return Outcome(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _fit_all(compared: Mapping[str, Contender], context: RunContext) -> tuple[dict[str, Result], dict[str, str]]:
    """Results by name, and for each contender that failed, which does not stop the others, the reason."""
    results, failed = {}, {}
    bar = context.bar(compared.items(), title="comparing", unit="method")
    for name, contender in bar:
        bar.set_postfix_str(name)
        try:
            start = time.perf_counter()
            state = contender.fit()
            seconds = time.perf_counter() - start
            outcome = contender.predict(state)
            bad = ~((outcome.confidence >= -1e-5) & (outcome.confidence <= 1 + 1e-5))
            if bad.any():
                raise ValueError(f"it gave {outcome.confidence[bad][0]} as a confidence, {bad.sum():,} such values")
            weights = state.params if isinstance(state, FittedHead) else None
            count = parameter_count(state) if weights is None else sum(map(np.size, jax.tree.leaves(weights)))
            results[name] = Result(outcome, seconds, count, state)
        except Exception as error:
            if (failure := storage_failure(error)) and failure.errno != errno.ENOMEM:  # such as a full disk
                raise
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
    return results, failed


def not_converged(results: Mapping[str, Result]) -> list[str]:
    """Names of those whose fit reports that it did not end at a finite optimum."""
    reports = {name: getattr(result.state, "report", None) for name, result in results.items()}
    return [name for name, report in reports.items() if report is not None and not report.converged]


def comparison_json(
    results: Mapping[str, Result],
    *,
    reference: str,
    groups: np.ndarray | None = None,
    bins: int = 15,
    closed: Closed = "right",
    seed: int = 0,
    sort: SortKey = "log_loss",
) -> dict[str, dict[str, Any]]:
    """The rows of a comparison, best first; fits that did not converge are last.

    A row holds the figures of `metrics.summarise`, and:

    - `nll`: negative log-likelihood of the true class, null for methods that give a confidence alone;
    - `log_loss`: negative log-likelihood of correctness, null where it is infinite;
    - `certain_and_wrong`: number of wrong predictions with confidence 1, and of right ones with confidence 0;
    - `changed`: number of predictions that differ from those of "uncalibrated", or else of the first row;
    - `against`: for each of `COMPARED` the `metrics.PairedDifference` from `reference`, which names temperature
      scaling, with `holm_p`, its p-value corrected for the number of rows (`metrics.holm`);
    - `against_uncalibrated`: the same with "uncalibrated", not corrected.
    """
    base = results.get("uncalibrated", next(iter(results.values()))).outcome
    pool = functools.partial(metrics.pooled_sums, groups=groups, bins=bins, closed=closed, seed=seed)
    rows, sums, draws = {}, {}, {}
    for name, result in results.items():
        confidence, correct = result.outcome.confidence, result.outcome.correct
        ruled_out_and_right = (confidence <= 0) & (correct > 0)
        certain_and_wrong = (confidence >= 1) & (correct < 1)
        sums[name] = pool(confidence, correct)
        resampled = draws_of(sums[name], seed)
        draws[name] = {"brier": resampled["brier"], "log_loss": resampled["nll"]}
        nll = None
        if result.outcome.log_prob is not None:
            likelihood = pool(confidence, correct, log_prob=result.outcome.log_prob)
            nll = finite_or_none(metrics.summarise(likelihood)["nll"])
            draws[name]["nll"] = draws_of(likelihood, seed)["nll"]
        changed = 0
        if base.choice is not None and result.outcome.choice is not None:
            changed = int((base.choice != result.outcome.choice).sum())
        row: dict[str, Any] = metrics.summarise(sums[name])
        log_loss = row.pop("nll")
        further = {
            "adaptive_ece": metrics.adaptive_calibration_error(confidence, correct, bins=bins),
            "smooth_ece": metrics.smooth_ece(confidence, correct),
            "auroc": metrics.auroc(confidence, correct),
        }
        curve = metrics.reliability_curve(confidence, correct, groups=groups, seed=seed)
        rows[name] = row | {
            "nll": nll,
            "log_loss": finite_or_none(log_loss),
            "certain_and_wrong": int((ruled_out_and_right | certain_and_wrong).sum()),
            **ece_json(metrics.error_interval(sums[name], seed=seed), bins=bins, closed=closed),
            **{figure: finite_or_none(float(value)) for figure, value in further.items()},
            "changed": changed,
            "parameters": result.parameters,
            "fit_seconds": round(result.fit_seconds, 4),
            "reliability": reliability_json(metrics.total_sums(sums[name]), resampled["bins"]),
            "curve": curve_json(curve),
        }
    for field, other in (("against", reference), ("against_uncalibrated", "uncalibrated")):
        if other in rows:
            rows[other][field] = {}
            add_differences(rows, sums, draws, field=field, other=other, names=COMPARED[1:], seed=seed)
    _correct_p_values(rows)
    return _best_first(rows, sort, not_converged(results))


def _correct_p_values(rows: dict[str, dict[str, Any]]) -> None:
    """Adds `holm_p`, corrected for all rows that are compared in the same figure."""
    for key in COMPARED:
        differences = {name: row.get("against", {}).get(key) for name, row in rows.items()}
        p_values = {name: x["p_value"] for name, x in differences.items() if x is not None}
        for name, corrected in metrics.holm(p_values).items():
            differences[name]["holm_p"] = corrected


def _best_first(rows: dict[str, dict[str, Any]], sort: SortKey, unconverged: list[str]) -> dict[str, dict[str, Any]]:
    def order(name: str) -> tuple[bool, bool, float]:
        value = figure_of(rows[name], sort)
        size = value or 0.0
        return name in unconverged, value is None, -size if sort == "auroc" else size

    return {name: rows[name] for name in sorted(rows, key=order)}


class ComparisonInputs(NamedTuple):
    """What is compared, and on what.

    Attributes:
        base: the uncalibrated held-out predictions.
        contenders: name -> contender, in the order in which they are fitted.
        left_out: name -> why it cannot run.
        reference: name of temperature scaling among the contenders.
        groups: labels `[N]` of held-out predictions that are resampled together; by default each by itself.
        unit: what a prediction is, in the plural, such as "tokens".
        clusters: what is resampled, in the plural.
        title: a few words on the held-out data.
        save_head: writes the state of a contender that is a head to a directory; None if no contender is one.
    """

    base: Outcome
    contenders: dict[str, Contender]
    left_out: dict[str, str]
    reference: str
    groups: np.ndarray | None = None
    unit: str = "predictions"
    clusters: str = "rows"
    title: str = "held out"
    save_head: Callable[[Path, Any], None] | None = None


class Comparison(NamedTuple):
    """What `compare` returns; prints the verdict and the table.

    Differences from temperature scaling are paired, and corrected for the number of methods.

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
        """The method that the verdict names: temperature scaling where none beats it beyond noise."""
        return winner(self.document)

    def recalibrator(self, name: str | None = None) -> Recalibrator:
        """A fitted method, by default the winner, as a function of further predictions; see `recalibrate.save`."""
        name = name or self.winner
        if self.states.get(name) is None:
            fitted = ", ".join(method for method, state in self.states.items() if state is not None)
            raise UserError(f"name: expected a fitted method ({fitted}): {name} is none.")
        return Recalibrator(name, self.states[name])

    def __repr__(self) -> str:
        return result_text(comparison_verdict(self.document), comparison_table(self.document, self.title))


def compare(
    fit: Predictions,
    held_out: Predictions,
    methods: Sequence[str] = (),
    *,
    groups: AnyArray | None = None,
    sort: SortKey = "log_loss",
    bins: int = 15,
    closed: Closed = "right",
    context: RunContext | None = None,
) -> Comparison:
    """Fits recalibration methods on one set of predictions and compares them on another.

    Args:
        fit: predictions to fit on, with confidence and correct, or logits and labels.
        held_out: predictions to compare on, with the same fields.
        methods: names in `recalibrate.METHODS`; temperature scaling is always added. Empty: all methods whose fields
            these predictions have, except those with a parameter per pair of classes and too few predictions for it.
        groups: `[N]`, labels of the held-out predictions; those with one label are resampled together.
        sort: figure that orders the rows, best first.
        bins, closed: number and edge convention of the reliability bins, see `metrics.bin_index`.
        context: seed of the bootstrap, and progress; by default `RunContext()`.

    Raises:
        UserError: for an unknown method or invalid predictions.

    Example:
        >>> import calibjax
        >>> rng = np.random.default_rng(0)
        >>> logits = rng.normal(size=(800, 4))
        >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        >>> parts = [calibjax.Predictions(logits=3 * logits[i::2], labels=labels[i::2]) for i in range(2)]
        >>> compared = calibjax.compare(*parts, ["isotonic"], context=calibjax.RunContext(progress=False))
        >>> compared.winner
        'temperature'
        >>> compared.recalibrator()(logits=logits[:2]).shape
        (2, 4)
    """
    methods = (methods,) if isinstance(methods, str) else tuple(methods)
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise UserError(f"methods: {', '.join(unknown)}: expected some of {', '.join(METHODS)}.")
    for name, annotation, value in (("sort", SortKey, sort), ("bins", Bins, bins), ("closed", Closed, closed)):
        check_value(name, annotation, value)
    for name, data in (("fit", fit), ("held_out", held_out)):
        if not isinstance(data, Predictions):
            raise UserError(f"{name}: expected Predictions, got {type(data).__name__}.")
    fit, held_out = (Predictions(*map(plain_array, data)) for data in (fit, held_out))
    fields = ("confidence", "correct") if fit.logits is None else ("logits", "labels")
    for data in (fit, held_out):
        checked_fields(data, fields, impossible="logits" in fields)
    inputs = prediction_inputs(fit, held_out, methods or tuple(METHODS), groups, include_large=bool(methods))
    return run_comparison(inputs, sort=sort, bins=bins, closed=closed, context=context or RunContext())


def prediction_inputs(
    fit: Predictions,
    held_out: Predictions,
    names: tuple[str, ...],
    groups: AnyArray | None = None,
    *,
    include_large: bool,
) -> ComparisonInputs:
    """The inputs of a comparison of methods on predictions; `include_large`: see `contenders`."""
    if fit.logits is None:  # confidences are compared, also where `held_out` has logits too
        held_out = held_out._replace(logits=None, labels=None)
    base, reference = uncalibrated(held_out), "confidence_temperature"
    if held_out.logits is not None:
        reference, outcome = "temperature", uncalibrated(fit)
        fit = fit._replace(confidence=outcome.confidence, correct=outcome.correct)
        held_out = held_out._replace(confidence=base.confidence, correct=base.correct)
    names = tuple(name for name in METHODS if name in names or name == reference)
    compared, left_out = contenders(fit, held_out, base, names, include_large=include_large)
    clusters = "rows" if groups is None else "groups"
    groups = None if groups is None else label_numbers("groups", groups, len(base.confidence))
    return ComparisonInputs(base, compared, left_out, reference, groups, clusters=clusters)


def run_comparison(
    inputs: ComparisonInputs, *, sort: SortKey, bins: int, closed: Closed, context: RunContext
) -> Comparison:
    """Fits and compares all contenders of the inputs; raises `UserError` for a single group, whose resamples agree."""
    if inputs.groups is not None and len(np.unique(inputs.groups)) < 2:
        raise UserError(f"held out: expected at least two {inputs.clusters}, got one: no interval. Give more.")
    results, failed = _fit_all(inputs.contenders, context)
    results = {"uncalibrated": Result(inputs.base, 0.0, 0, None), **results}
    options: dict[str, Any] = {"bins": bins, "closed": closed, "seed": context.seed, "sort": sort}
    methods = comparison_json(results, reference=inputs.reference, groups=inputs.groups, **options)
    document: Document = {
        "tokens": len(inputs.base.confidence),
        "unit": inputs.unit,
        "clusters": inputs.clusters,
        "reference": inputs.reference,
        "sort": sort,
        "methods": methods,
        "failed": failed,
        "left_out": inputs.left_out,
        "not_converged": not_converged(results),
    }
    return Comparison(document, {name: result.state for name, result in results.items()}, inputs.title)
