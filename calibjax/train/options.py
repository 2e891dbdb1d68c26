"""How an ATS head is fitted: what the user says, the recipes, and the plan that they make together."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from calibjax.heads import MIN_SCALE, NO_MIN_SCALE, HeadConfig, HeadKind
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Count, Fraction, NonNegative, Positive, Range, check_options, named
from calibjax.train.hidden_cache import CacheMode
from calibjax.train.state import OptimizerConfig

LossName = Literal[
    "auto", "joint", "cross-entropy", "label-smoothing", "selective", "selective-balanced", "selective-authors"
]
ALPHA_GRID = (0.02, 0.1, 0.5)
"""Weights of selective smoothing that `--loss auto` tries; 0.5 is the paper's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtsOptions:
    """How a head is fitted. `None` takes the recipe's value.

    Attributes:
        recipe: default, or paper: the paper's head, loss, schedule and batch (arXiv 2409.19817, section 4, and the
            authors' code): a randomly started Llama block without a lower bound on 1/T, selective smoothing as the
            authors mask it with alpha 0.5, AdamW 5e-5 with cosine decay, 2 epochs, batches of 8 sequences as 8
            micro-batches, no choice of loss and no refit. docs/studies.md lists what still differs.
        head: the head that gives a token its temperature.
        features: what the head reads, names joined by "+": hidden_states, max_logit, log_std_logits, argmax_embedding.
        pooling: a temperature per token, or one per sequence.
        random_start: start from random weights instead of from temperature 1.
        normalize: divide what an MLP reads by its root mean square.
        loss: joint (cross-entropy + log loss of the top label, both proper scores), cross-entropy, label-smoothing,
            selective, selective-balanced, selective-authors (balanced, where ignored tokens count as wrong, as in the
            authors' code), or auto: fits with joint, cross-entropy and selective for a few alpha, and
            keeps the head with the best proper score on sequences that training never saw.
        alpha: weight of wrong tokens in selective smoothing (0.5 if not given), or of the uniform distribution in
            label smoothing (0.1), 0 to 1. With --loss auto, tried in place of the grid.
        top_label_weight: weight of the log loss of the top label in joint, and in the score that auto chooses by.
        refit_temperature: fit one more scalar on top of the finished head, on sequences that training never saw, and
            apply it where it differs from 1 by more than two standard errors.
        validation_fraction: fraction of the fitting sequences kept from training for the choice and the refit.
        epochs: passes over the fitting sequences.
        batch_size: sequences per step.
        accumulate: micro-batches per step.
        learning_rate: peak learning rate.
        warmup_fraction: fraction of the steps in which the learning rate rises.
        weight_decay: weight decay of AdamW.
        cache_hidden: keep the frozen model's hidden states in memory, on disk, or off; auto: memory where they fit.
        checkpoint_every: steps between checkpoints.
    """

    recipe: Literal["default", "paper"] = "default"
    head: HeadKind | None = named("head-kind", None)
    features: str = "hidden_states"
    pooling: Literal["token", "sequence"] = "token"
    random_start: bool | None = None
    normalize: bool | None = None
    loss: LossName | None = None
    alpha: NonNegative | None = None
    top_label_weight: NonNegative = 1.0
    refit_temperature: bool | None = None
    validation_fraction: Fraction = 0.1
    epochs: Count | None = None
    batch_size: Count | None = None
    accumulate: Count | None = None
    learning_rate: Positive | None = None
    warmup_fraction: Annotated[float, Range(0, 1, open="high")] | None = None
    weight_decay: NonNegative = 0.0
    cache_hidden: CacheMode = "auto"
    checkpoint_every: Count = 200

    @classmethod
    def unset_value(cls, name: str) -> Any:
        """What an option that is None comes to in the default recipe; None where that does not say."""
        return getattr(RECIPES["default"], name, None)


class Recipe(NamedTuple):
    """The values that `AtsOptions` leaves to it, and what it alone decides.

    Attributes:
        intermediate_size: D -> width of the head's MLP; None: the head's own.
        min_scale: smallest inverse temperature of the head.
    """

    head: HeadKind
    random_start: bool
    normalize: bool
    loss: LossName
    refit_temperature: bool
    epochs: int
    batch_size: int
    accumulate: int
    learning_rate: float
    warmup_fraction: float
    intermediate_size: Callable[[int], int] | None = None
    min_scale: float = MIN_SCALE


def llama_intermediate_size(hidden_size: int) -> int:
    """Width of the MLP of Llama 1 and 2: 8/3 D, rounded up to a multiple of 256.

    Example:
        >>> [llama_intermediate_size(hidden_size) for hidden_size in (4096, 5120)]
        [11008, 13824]
    """
    return 256 * -(-(8 * hidden_size // 3) // 256)


RECIPES = {
    "default": Recipe(
        head="mlp",
        random_start=False,
        normalize=True,
        loss="auto",
        refit_temperature=True,
        epochs=6,
        batch_size=16,
        accumulate=1,
        learning_rate=2e-3,
        warmup_fraction=0.1,
    ),
    "paper": Recipe(
        head="transformer",
        random_start=True,
        normalize=False,
        loss="selective-authors",
        refit_temperature=False,
        epochs=2,
        batch_size=8,
        accumulate=8,
        learning_rate=5e-5,
        warmup_fraction=0.0,
        intermediate_size=llama_intermediate_size,  # those of calibration_configs/ for 7B and 13B
        min_scale=NO_MIN_SCALE,
    ),
}


class Trial(NamedTuple):
    """A loss to train with; `alpha` is None where it has none."""

    loss: str
    alpha: float | None

    def __str__(self) -> str:
        return self.loss if self.alpha is None else f"{self.loss}-{self.alpha:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtsPlan:
    """`AtsOptions` with every value decided; JSON-able by `dataclasses.asdict`."""

    head: HeadConfig
    trials: tuple[Trial, ...]
    top_label_weight: float
    refit_temperature: bool
    validation_fraction: float
    epochs: int
    batch_size: int
    accumulate: int
    optimizer: OptimizerConfig
    cache_hidden: CacheMode
    checkpoint_every: int


def make_plan(options: AtsOptions, hidden_size: int) -> AtsPlan:
    """The options and their recipe, decided and checked, for a model of width `hidden_size`.

    Raises:
        UserError: a value is out of range, or the head cannot be built.
    """
    check_options(options)
    recipe = RECIPES[options.recipe]
    recipe = recipe._replace(**{name: v for name in recipe._fields if (v := getattr(options, name, None)) is not None})
    if recipe.batch_size % recipe.accumulate:
        raise UserError(
            f"--accumulate: expected a divisor of --batch-size {recipe.batch_size}, got {recipe.accumulate}."
        )
    if options.alpha is not None and options.alpha > 1:
        raise UserError(f"--alpha: expected from 0 to 1, got {options.alpha}.")
    if options.alpha is not None and recipe.loss in ("joint", "cross-entropy"):
        raise UserError(f"--alpha: --loss {recipe.loss} has no such weight; leave it out, or choose another loss.")
    asked = {
        "--features": options.features != AtsOptions.features,
        "--pooling": options.pooling != AtsOptions.pooling,
        "--random-start": bool(options.random_start),
    }
    if recipe.head == "constant" and any(asked.values()):
        names = ", ".join(name for name, given in asked.items() if given)
        raise UserError(f"{names}: a constant head reads nothing and always starts at 1; leave it out.")
    if options.normalize is not None and recipe.head != "mlp":
        raise UserError(f"--normalize: a {recipe.head} head does not normalise what it reads; leave it out.")
    try:
        head = HeadConfig(
            kind=recipe.head,
            hidden_size=hidden_size,
            features=tuple(options.features.split("+")),
            pooling=options.pooling,
            identity_start=not recipe.random_start,
            intermediate_size=None if recipe.intermediate_size is None else recipe.intermediate_size(hidden_size),
            normalize=recipe.normalize,
            min_scale=recipe.min_scale,
        )
        head.build()
    except ValueError as error:
        raise UserError(str(error)) from error
    return AtsPlan(
        head=head,
        trials=_trials(recipe.loss, options.alpha),
        top_label_weight=options.top_label_weight,
        refit_temperature=recipe.refit_temperature,
        validation_fraction=options.validation_fraction,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        optimizer=OptimizerConfig(
            learning_rate=recipe.learning_rate,
            warmup_fraction=recipe.warmup_fraction,
            weight_decay=options.weight_decay,
        ),
        cache_hidden=options.cache_hidden,
        checkpoint_every=options.checkpoint_every,
    )


def _trials(loss: LossName, alpha: float | None) -> tuple[Trial, ...]:
    if loss == "auto":
        grid = ALPHA_GRID if alpha is None else (alpha,)
        return (Trial("joint", None), Trial("cross-entropy", None), *(Trial("selective", a) for a in grid))
    if loss in ("selective", "selective-balanced", "selective-authors"):
        return (Trial(loss, 0.5 if alpha is None else alpha),)
    if loss == "label-smoothing":
        return (Trial(loss, 0.1 if alpha is None else alpha),)
    return (Trial(loss, None),)
