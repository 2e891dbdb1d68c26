"""`LOSSES`: every loss that a head or a model can be trained with, by its name on the command line."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import VocabCurves, VocabStats, top_logits, vocab_stats
from calibjax.losses import per_token
from calibjax.runtime.arrays import AnyArray
from calibjax.runtime.options import Range


class Hyperparameter(NamedTuple):
    """A number that a loss depends on: its default, the range of its values, and what it is."""

    default: float
    limits: Range
    meaning: str


class Loss(NamedTuple):
    """One entry of `LOSSES`, from which `--loss`, `--alpha`, the trials of `--loss auto` and the studies follow.

    Attributes:
        function: `(stats, ...) -> [...]`, per token; the further arguments are the hyper-parameters by name, and
            `doubled` and `top_logits` where the fields below ask for them.
        statistics: what it reads of `vocab_stats(statistics=...)` at the scale s.
        hyperparameters: argument of `function` -> its default, range and meaning.
        alpha: the argument that `--alpha` sets; None if the loss has no such weight.
        doubled: fields of `vocab_stats` that it reads at the scale 2 s, as its argument `doubled`.
        top_k: how many of the largest logits it reads, as its argument `top_logits`; 0: none.
        per_micro_batch: the loss normalises over its micro-batch: ignored tokens count, padding (`where` False) does
            not, and every micro-batch has equal weight. Otherwise a batch is averaged over the tokens that count.
    """

    function: Callable[..., Float[Array, "..."]]
    statistics: tuple[str, ...]
    hyperparameters: Mapping[str, Hyperparameter] = {}
    alpha: str | None = None
    doubled: tuple[str, ...] = ()
    top_k: int = 0
    per_micro_batch: bool = False

    def main_parameter(self) -> Hyperparameter | None:
        """The hyper-parameter that `--alpha` sets; None if the loss has none."""
        return None if self.alpha is None else self.hyperparameters[self.alpha]

    def arguments(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters by argument: from `hyper` ("alpha", or the argument's own name), else the default."""
        values = dict(hyper)
        if unknown := sorted(set(values) - {*self.hyperparameters, "alpha"}):
            raise ValueError(f"hyper: expected names among {[*self.hyperparameters, 'alpha']}, got {unknown}.")
        if self.alpha is not None and "alpha" in hyper:
            values[self.alpha] = hyper["alpha"]
        return {name: values.get(name, parameter.default) for name, parameter in self.hyperparameters.items()}


_TARGET = ("log_normalizer", "target_logit")
_FRACTION, _NON_NEGATIVE = Range(0, 1), Range(0)
_FOCUSING = Hyperparameter(3.0, _NON_NEGATIVE, "focusing exponent gamma")
_SELECTIVE = Loss(
    per_token.selective_smoothing,
    (*_TARGET, "mean_logit", "correct"),
    {"alpha": Hyperparameter(0.5, _FRACTION, "weight of the tokens that the model gets wrong")},
    alpha="alpha",
)


LOSSES: dict[str, Loss] = {
    "joint": Loss(
        per_token.joint,
        (*_TARGET, "max_logit", "correct"),
        {"top_label_weight": Hyperparameter(1.0, _NON_NEGATIVE, "weight of the log loss of the most likely token")},
        alpha="top_label_weight",
    ),
    "cross-entropy": Loss(per_token.cross_entropy, _TARGET),
    "label-smoothing": Loss(
        per_token.label_smoothing,
        (*_TARGET, "mean_logit"),
        {"beta": Hyperparameter(0.1, _FRACTION, "weight of the uniform distribution")},
        alpha="beta",
    ),
    "selective": _SELECTIVE,
    "selective-balanced": _SELECTIVE._replace(function=functools.partial(per_token.selective_smoothing, balanced=True)),
    "selective-authors": _SELECTIVE._replace(
        function=functools.partial(per_token.selective_smoothing, balanced=True, count_ignored=True),
        per_micro_batch=True,
    ),
    "focal": Loss(per_token.focal, _TARGET, {"gamma": _FOCUSING}, alpha="gamma"),
    "sample-dependent-focal": Loss(
        per_token.sample_dependent_focal,
        _TARGET,
        {
            "gamma_below": Hyperparameter(5.0, _NON_NEGATIVE, "focusing exponent below the threshold"),
            "gamma_above": Hyperparameter(3.0, _NON_NEGATIVE, "focusing exponent from the threshold on"),
        },
    ),
    "focal-calibration": Loss(
        per_token.focal_calibration,
        _TARGET,
        {"weight": Hyperparameter(1.0, _NON_NEGATIVE, "weight of the Brier score"), "gamma": _FOCUSING},
        alpha="weight",
        doubled=("log_normalizer",),
    ),
    "brier": Loss(per_token.brier, _TARGET, doubled=("log_normalizer",)),
    "top-k-smoothing": Loss(
        per_token.top_k_smoothing,
        _TARGET,
        {"beta": Hyperparameter(0.1, _FRACTION, "weight of the uniform distribution over the 5 most likely tokens")},
        alpha="beta",
        top_k=5,
    ),
    "confidence-penalty": Loss(
        per_token.confidence_penalty,
        (*_TARGET, "expected_logit"),
        {"weight": Hyperparameter(0.1, _NON_NEGATIVE, "weight of the entropy that is subtracted")},
        alpha="weight",
    ),
    "z-loss": Loss(
        lambda stats, weight: per_token.cross_entropy(stats) + weight * per_token.z_loss(stats),
        _TARGET,
        {"weight": Hyperparameter(1e-4, _NON_NEGATIVE, "weight of the squared log-normaliser, beside cross-entropy")},
        alpha="weight",
    ),
}


def linear_loss(
    loss: Loss,
    hidden: Float[AnyArray, "*B D"],
    unembedding: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "*B"],
    *,
    hyper: Mapping[str, Any] = {},
    scale: Float[AnyArray, "*B"] | float | None = None,
    where: Bool[AnyArray, "*B"] | None = None,
    real: Bool[AnyArray, "*B"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """A loss of `LOSSES` for hidden states under an unembedding, without holding the logits.

    One pass over the vocabulary, and a second if the loss reads statistics at twice the scale or the largest logits.

    Args:
        loss: an entry of `LOSSES`.
        hidden, unembedding, targets, scale, where: as in `vocab_stats`.
        hyper: values of hyper-parameters by argument, or "alpha" for the main one; others have their defaults.
        real: bool `[...]`, False in the padding; read by losses that are `per_micro_batch`.
        **options: `bias`, `softcap` and `sharding` of `vocab_stats`.

    Returns:
        (float32 `[...]`, exactly 0 on tokens that do not count; bool `[...]`, which tokens count).

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, unembedding, y = jnp.ones((2, 4)), jnp.eye(3, 4), jnp.array([0, -100])
        >>> values, counts = linear_loss(LOSSES["brier"], hidden, unembedding, y)  # q = 1/3 each
        >>> [round(float(value), 4) for value in values], counts.tolist()
        ([0.6667, 0.0], [True, False])
    """

    def stats_at(scale: Any, statistics: tuple[str, ...]) -> VocabStats:
        return vocab_stats(hidden, unembedding, targets, scale=scale, where=where, statistics=statistics, **options)

    def largest(valid: Array) -> Array:
        k = min(loss.top_k, unembedding.shape[0])
        return top_logits(hidden, unembedding, k, where=valid, **options).logits

    return _loss(loss, stats_at, largest, scale, hyper, real)


def curve_loss(
    loss: Loss,
    curves: VocabCurves,
    scale: Float[AnyArray, "*B"] | float = 1.0,
    *,
    hyper: Mapping[str, Any] = {},
    where: Bool[AnyArray, "*B"] | None = None,
    real: Bool[AnyArray, "*B"] | None = None,
) -> tuple[Float[Array, "*B"], Bool[Array, "*B"]]:
    """A loss of `LOSSES` for a frozen model's tokens as a function of the scale, without the vocabulary.

    `curves` `[...]` hold at least `loss.top_k` of the largest logits, or as many as there are. A loss with `doubled`
    is exact to 1e-5 where 2 s is within their scales (`kernels.DOUBLED_SCALES`), and beyond off by up to 0.1. For the
    other arguments and the result see `linear_loss`. The loss is differentiable in `scale`.
    """
    if where is not None:
        curves = dataclasses.replace(curves, valid=curves.valid & where)

    def largest(valid: Array) -> Array:
        if curves.top_logits is None:
            raise ValueError(f"this loss reads the largest logits: add top_k={loss.top_k} to vocab_curves(...).")
        return curves.top_logits[..., : loss.top_k]

    return _loss(loss, lambda scale, _: curves.at(scale), largest, scale, hyper, real)


def _loss(
    loss: Loss,
    stats_at: Callable[[Any, tuple[str, ...]], VocabStats],
    largest: Callable[[Array], Array],
    scale: Any,
    hyper: Mapping[str, Any],
    real: Any,
) -> tuple[Array, Array]:
    """The loss from statistics at any scale and the largest logits, and which tokens count."""
    stats = stats_at(scale, loss.statistics)
    reads: dict[str, Any] = loss.arguments(hyper)
    if loss.doubled:
        reads["doubled"] = stats_at(2.0 * stats.scale, loss.doubled)
    if loss.top_k:
        reads["top_logits"] = largest(stats.valid)
    if loss.per_micro_batch:
        reads["where"] = real
    return loss.function(stats, **reads), stats.valid
