"""The contract of recalibrators: their inputs, their entries, and the checks before a fit."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calibjax.runtime.arrays import AnyArray, as_array, plain_array
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import check_value


class Predictions(NamedTuple):
    """Data on N predictions; a method reads the fields that it names.

    Attributes:
        logits: `[N, K]`, finite; −inf for options that are impossible, where a method accepts them.
        labels: int `[N]`, the true class in [0, K).
        confidence: `[N]` in [0, 1], how probable it is that the prediction is right: the probability of the most likely
            token or of an answer, a verbalised confidence, or the agreement of samples (`sample_agreement`).
        correct: `[N]` in [0, 1]: right (1) or wrong (0), or the fraction c/n of n attempts that were right.
        confidences: `[N, C]` in [0, 1], C kinds of confidence in each prediction, as `eval tasks` computes them.
        features: `[N, D]`, hidden states.
        unembedding: `[K, D]`: features @ unembedding.T are the logits.
        categories: int `[N]`, >= 0, the category (domain, subject); numbers mean the same in new data.
    """

    logits: Float[AnyArray, "N K"] | None = None
    labels: Int[AnyArray, " N"] | None = None
    confidence: Float[AnyArray, " N"] | None = None
    correct: AnyArray | None = None
    confidences: Float[AnyArray, "N C"] | None = None
    features: Float[AnyArray, "N D"] | None = None
    unembedding: Float[AnyArray, "K D"] | None = None
    categories: Int[AnyArray, " N"] | None = None


INTEGERS = ("labels", "categories")
"""The fields that are not float32."""
AXES = {"logits": ("n", "k"), "features": ("n", "d"), "unembedding": ("k", "d"), "confidences": ("n", "c")}
"""The axes of the fields that have two; each other field has ("n",)."""
IMPOSSIBLE = -1e30
"""Fits read this for a logit of -inf: its probability is 0 at every temperature, and its product with 0 is 0."""


class FitReport(NamedTuple):
    """Outcome of a fit; scalars are arrays, so that a state is a pytree that Orbax stores.

    Attributes:
        loss: float32, final objective on the calibration data, a mean per prediction; for networks, on at most 2,048
            rows of a held-out fifth. NaN for methods without an objective.
        converged: bool, the optimiser met its tolerance at a finite optimum. False on data without one (separable).
        iterations: int32.
    """

    loss: np.ndarray
    converged: np.ndarray
    iterations: np.ndarray

    @classmethod
    def of(cls, loss: float = np.nan, converged: bool = True, iterations: int = 1) -> "FitReport":
        return cls(np.asarray(loss, np.float32), np.asarray(converged), np.asarray(iterations, np.int32))


@dataclasses.dataclass(frozen=True)
class Method:
    """One recalibrator: an entry of `METHODS`.

    Attributes:
        fit_arrays: `fit_arrays(*fields, **options) -> state`, of the `checked_fields` of `fit_reads`.
        apply_arrays: `apply_arrays(state, *fields) -> Array`, of the fields in `apply_reads`; pure and jittable.
        fit_reads: the fields of `Predictions` that `fit` needs, among them either `labels` or `correct`.
        keeps_argmax: the most likely class never changes. A method that gives a confidence has no classes to change.
        max_classes: the largest K that `fit` accepts, or None.
    """

    fit_arrays: Callable[..., Any]
    apply_arrays: Callable[..., Array]
    fit_reads: tuple[str, ...]
    keeps_argmax: bool = False
    max_classes: int | None = None

    def fit(self, data: Predictions, where: Bool[AnyArray, " N"] | None = None, **options: Any) -> Any:
        """Fits the method, on the host, to the rows where `where` is True.

        Returns:
            The state: a NamedTuple of arrays with a field `report`, a `FitReport`.

        Raises:
            UserError: as raised by `checked_fields`, and for an option out of range.
        """
        ranges = get_type_hints(self.fit_arrays, include_extras=True) if options else {}
        for name, value in options.items():
            check_value(name, ranges.get(name), value)
        fields = checked_fields(data, self.fit_reads, where, self.max_classes, impossible=self.accepts_impossible)
        return self.fit_arrays(*fields, **options)

    def apply(self, state: Any, data: Predictions) -> Array:
        """Calibrated log_probs `[N, K]` or confidence `[N]`, see `returns`: float32, pure and jittable."""
        values = {name: plain_array(getattr(data, name)) for name in self.apply_reads}
        fields = (value if name in INTEGERS else jnp.asarray(value, jnp.float32) for name, value in values.items())
        return self.apply_arrays(state, *fields)

    @property
    def apply_reads(self) -> tuple[str, ...]:
        """The fields of `Predictions` that `apply` needs: all that `fit` reads but the truth."""
        return tuple(field for field in self.fit_reads if field not in ("labels", "correct"))

    @property
    def accepts_impossible(self) -> bool:
        """Whether logits may be −inf: the method scales all options alike, so that they remain impossible."""
        return "logits" in self.fit_reads and self.keeps_argmax

    @property
    def returns(self) -> Literal["log_probs", "confidence"]:
        """What `apply` returns: log_probs, float32 `[N, K]`, or confidence, float32 `[N]`."""
        return "log_probs" if "labels" in self.fit_reads else "confidence"


def checked_fields(
    data: Predictions,
    fields: tuple[str, ...],
    where: Bool[AnyArray, " N"] | None = None,
    max_classes: int | None = None,
    *,
    impossible: bool = False,
) -> tuple[np.ndarray, ...]:
    """The fields named, in this order: their rows that count, on the host, floats as float32, checked.

    Rows where `where` is False are not read. `impossible`: accept logits of −inf, and return them as `IMPOSSIBLE`.

    Raises:
        UserError: for a missing field, shapes that do not fit, no rows, too many classes, or a value that is not finite
            or out of range, with the first such row.
    """
    arrays = {field: host_field(field, getattr(data, field)) for field in fields}
    unembedding = arrays.pop("unembedding", None)
    rows = _rows(arrays, where)
    if where is not None:
        arrays = {field: value[rows] for field, value in arrays.items()}
    if impossible:
        logits = arrays["logits"]
        arrays["logits"] = np.where(np.isneginf(logits), np.float32(IMPOSSIBLE), logits)
    classes = class_count(Predictions(**arrays, unembedding=unembedding))
    if max_classes is not None and classes > max_classes:
        limit = f"a method with parameters for each class takes at most {max_classes:,} classes"
        raise UserError(f"{limit}, got {classes:,}; take temperature or ensemble_temperature.")
    _check_values(arrays, rows, classes)
    if impossible and "labels" in arrays:
        bad = rows[at_labels(arrays["logits"], arrays["labels"]) <= IMPOSSIBLE]
        if len(bad):
            raise UserError(f"labels: row {bad[0]} is an option whose logit is -inf; correct it or leave it out.")
    if unembedding is not None:
        _check_values({"unembedding": unembedding}, np.arange(len(unembedding)), None)
        features = arrays["features"]
        if features.shape[1] != unembedding.shape[1]:
            raise UserError(f"expected features [N, D], unembedding [K, D]; got {features.shape}, {unembedding.shape}.")
        arrays["unembedding"] = unembedding
    return tuple(arrays[field] for field in fields)


def host_field(field: str, value: Any) -> np.ndarray:
    """A field on the host, its dtype and number of axes checked; floats as float32."""
    if value is None:
        raise UserError(f"this method needs {field}: give Predictions({field}=...).")
    value = as_array(value)
    if field in INTEGERS:
        if not np.issubdtype(value.dtype, np.integer):
            raise UserError(f"{field}: expected integers, got {value.dtype}.")
    elif np.iscomplexobj(value):
        raise UserError(f"{field}: expected real numbers, got {value.dtype}.")
    else:
        value = value.astype(np.float32)
    axes = len(AXES.get(field, ("n",)))
    if value.ndim != axes:
        raise UserError(f"{field}: expected {axes} axes, got the shape {value.shape}.")
    return value


def _rows(arrays: Mapping[str, np.ndarray], where: AnyArray | None) -> np.ndarray:
    """The numbers of the rows that count; at least one."""
    lengths = {field: len(value) for field, value in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise UserError(f"expected one row per prediction in every field, got {lengths}.")
    rows = np.arange(next(iter(lengths.values())))
    if where is not None:
        where = as_array(where)
        if where.shape != rows.shape or where.dtype != bool:
            raise UserError(f"where: expected bool {rows.shape}, got {where.dtype} {where.shape}.")
        rows = rows[where]
    if not len(rows):
        raise UserError("no prediction counts: give at least one row, and check the mask.")
    return rows


def _check_values(arrays: Mapping[str, np.ndarray], rows: np.ndarray, classes: int | None) -> None:
    """Raises `UserError` with the first row that holds a value which is not finite or out of range."""
    largest = {"confidence": 1, "confidences": 1, "correct": 1, "categories": 2**31 - 1, "labels": (classes or 0) - 1}
    for field, value in arrays.items():
        bad, expected = ~np.isfinite(value), "finite values"
        if field in largest:
            bad |= (value < 0) | (value > largest[field])
            expected = "0 to K - 1" if field == "labels" else f"0 to {largest[field]}"
        if bad.any():
            row = rows[np.argwhere(bad)[0, 0]]
            problem = f"row {row} holds {value[bad][0]}, expected {expected}"
            raise UserError(f"{field}: {problem}; correct it or leave it out.")


def log_probs_of(scores: Float[Array, "N K"]) -> Float[Array, "N K"]:
    """log softmax of computed scores, at most 0.

    XLA may compute the scores twice, for their maximum and for the differences from it, and contract only one of the
    two to a fused multiply-add: scores of 1,000 then exceed their own maximum by 6e-5.
    """
    return jnp.minimum(jax.nn.log_softmax(scores, axis=-1), 0.0)


def at_labels(values: Any, labels: Any) -> Any:
    """values[i, labels[i]], `[N]`; a numpy array for numpy arrays."""
    xp = np if isinstance(values, np.ndarray) else jnp
    return xp.take_along_axis(values, labels[:, None], axis=1)[:, 0]


def class_count(data: Predictions) -> int:
    """K, the number of classes of predictions with logits or with an unembedding; 0 for others."""
    if data.logits is not None:
        return np.shape(data.logits)[1]
    return 0 if data.unembedding is None else len(data.unembedding)


def parameter_count(state: Any) -> int:
    """The number of fitted numbers in a state; the reports of its fits do not count."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, FitReport))
    return sum(np.size(leaf) for leaf in leaves if not isinstance(leaf, FitReport))
