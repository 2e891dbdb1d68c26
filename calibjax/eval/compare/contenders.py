"""Comparison of recalibrators: each is fitted on the calibration part, timed, and applied to the held-out part."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from calibjax.recalibrate import METHODS, Method, Predictions, parameter_count
from calibjax.runtime.context import RunContext

_DENSE = ("matrix", "dirichlet")  # K² parameters
_BLOCK = 2**24  # log-probabilities computed at a time


class Outcome(NamedTuple):
    """The output of a method for N held-out predictions, and whether they are correct.

    Attributes:
        confidence: float32, of the predicted class.
        correct: 0/1, or the fraction of correct attempts.
        choice: the predicted class; None where only confidences are known.
        log_prob: log-probability of the true class, nats; None where a method returns no distribution.
    """

    confidence: Float[np.ndarray, " N"]
    correct: Float[np.ndarray, " N"]
    choice: Int[np.ndarray, " N"] | None = None
    log_prob: Float[np.ndarray, " N"] | None = None


class Contender(NamedTuple):
    """One row of a comparison.

    Attributes:
        fit: fits on the calibration part and returns the state.
        predict: maps the state to the `Outcome` on the held-out part.
        parameters: maps the state to the number of fitted parameters.
    """

    fit: Callable[[], Any]
    predict: Callable[[Any], Outcome]
    parameters: Callable[[Any], int]


class Result(NamedTuple):
    """Result of a contender that did not fail; `fit_seconds` includes compilation, `state` is what `fit` returned."""

    outcome: Outcome
    fit_seconds: float
    parameters: int
    state: Any


def with_confidence(data: Predictions) -> Predictions:
    """Predictions with confidence and correctness from logits and labels, if there are logits."""
    if data.logits is None:
        return data
    outcome = uncalibrated(data)
    return data._replace(confidence=outcome.confidence, correct=outcome.correct)


def uncalibrated(data: Predictions) -> Outcome:
    """Returns the outcome of the uncalibrated predictions."""
    if data.logits is None:
        assert data.confidence is not None
        return Outcome(np.asarray(data.confidence, np.float32), np.asarray(data.correct, np.float32))
    uncalibrated_log_probs = jax.jit(lambda block: jax.nn.log_softmax(jnp.asarray(block.logits, jnp.float32), axis=-1))
    return _distribution(uncalibrated_log_probs, ("logits",), data, np.asarray(data.logits).argmax(axis=1))


def contenders(
    calibration: Predictions,
    held_out: Predictions,
    base: Outcome,
    names: tuple[str, ...],
    *,
    however_large: bool = True,
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders of `METHODS` for predictions to fit on and to evaluate on, by name; and why others are left out.

    `base` are the uncalibrated held-out predictions; `however_large` False leaves out methods with a parameter per pair
    of classes if there are fewer predictions.
    """
    rows, left_out = {}, {}
    classes = next((np.shape(x)[k] for x, k in ((held_out.logits, 1), (held_out.unembedding, 0)) if x is not None), 0)
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
        elif not however_large and name in _DENSE and classes**2 > len(np.asarray(calibration.labels)):
            left_out[name] = (
                f"has {classes**2:,} parameters, more than predictions; name it in --methods to fit it anyway"
            )
        else:
            rows[name] = _contender(method, calibration, held_out, base)
    return rows, left_out


def _contender(method: Method, calibration: Predictions, held_out: Predictions, base: Outcome) -> Contender:
    def predict(state: Any) -> Outcome:
        if method.gives == "log_probs":
            assert base.choice is not None
            apply = functools.partial(jax.jit(method.apply), state)
            return _distribution(apply, method.apply_reads, held_out, base.choice)
        reads = Predictions(**{field: getattr(held_out, field) for field in method.apply_reads})
        confidence = np.asarray(jax.jit(method.apply)(state, reads))
        return Outcome(confidence, base.correct, base.choice)

    return Contender(lambda: method.fit(calibration), predict, parameter_count)


def _distribution(
    apply: Callable[[Predictions], Any], reads: tuple[str, ...], data: Predictions, choice: Int[np.ndarray, " N"]
) -> Outcome:
    """Computes the outcome of a method that returns log-probabilities, in blocks of rows."""
    assert data.labels is not None
    labels = np.asarray(data.labels)
    fields = {field: np.asarray(getattr(data, field)) for field in reads}
    classes = len(fields["unembedding"]) if "logits" not in fields else fields["logits"].shape[1]
    parts = []
    for rows in np.array_split(np.arange(len(labels)), -(-len(labels) * classes // _BLOCK)):
        block = Predictions(**{name: x if name == "unembedding" else x[rows] for name, x in fields.items()})
        log_probs = np.asarray(apply(block))
        best = log_probs.max(axis=1)
        # Rounding can make two classes equal: the choice has not changed then.
        same = log_probs[np.arange(len(rows)), choice[rows]] >= best
        chosen = np.where(same, choice[rows], log_probs.argmax(axis=1))
        right = (chosen == labels[rows]).astype(np.float32)
        parts.append((np.exp(best), right, chosen, log_probs[np.arange(len(rows)), labels[rows]]))
    return Outcome(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def run_contenders(
    rows: Mapping[str, Contender], *, context: RunContext | None = None
) -> tuple[dict[str, Result], dict[str, str]]:
    """Results of all contenders by name, and for each that failed, which does not stop the others, the reason."""
    results, failed = {}, {}
    bar = (context or RunContext()).bar(rows.items(), title="comparing", unit="method")
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
            results[name] = Result(outcome, seconds, contender.parameters(state), state)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    return results, failed


def not_converged(results: Mapping[str, Result]) -> list[str]:
    """Names of those whose fit reports that it did not end at a finite optimum."""
    reports = {name: getattr(result.state, "report", None) for name, result in results.items()}
    return [name for name, report in reports.items() if report is not None and not report.converged]
