"""Options of ATS, its recipes, and the plan that follows from both."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from jax.sharding import Mesh

from calibjax.heads import FEATURES, HEADS, MIN_SCALE, NO_MIN_SCALE, HeadConfig
from calibjax.losses import LOSSES, Hyperparameter
from calibjax.runtime.arrays import round_up
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, NonNegative, OneOf, Positive, Range, check_options
from calibjax.runtime.sharding import check_batch
from calibjax.train.curves import Keep
from calibjax.train.step import OptimizerConfig

HeadKind = Annotated[str, OneOf(HEADS)]
LossName = Annotated[str, OneOf(LOSSES, others=("auto",))]

AUTO = ("cross-entropy", "joint")  # losses that `--loss auto` tries: proper scores
ALPHA_GRID = (1.0, 4.0, 20.0)  # of joint, from the lowest NLL towards the lowest calibration error
AUTO_FEATURES = (("logit_statistics",), ("logit_statistics", "hidden_states"))  # in this order, the simplest first
DECAYS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03)  # tried for a linear head of hidden states, the largest first
_NARROW = 64  # most units of an MLP head that is a candidate among others


# {FEATURES}, {DECAYS} and {ALPHAS} in this docstring are replaced below, by what the tables of the package hold.
@dataclasses.dataclass(frozen=True, kw_only=True)
class AtsOptions:
    """Options of fitting a head. `None` takes the recipe's value.

    With `loss="auto"`, head and loss are chosen by their predictions for sequences that they were not fitted on. First
    the head, fitted with cross-entropy: the simplest one whose NLL is within noise of the lowest NLL. Noise is one
    standard error of the difference, or a tenth of the best head's gain over temperature scaling. Then the loss: of
    those within noise, the one with the least debiased L2 calibration error. A head must have an NLL and a Brier score
    below those of temperature scaling by two standard errors, and no higher ECE; else temperature scaling is kept.

    If heads are compared or a temperature is refitted, the predictions and the head that is returned are moved towards
    temperature scaling: their log scales by a quarter, or with several sets by the best in NLL of 1/4, 1/2 and 3/4.

    Attributes:
        recipe: default, or paper: the paper's head, loss, schedule and batch (arXiv 2409.19817, section 4, and the
            authors' code): a randomly initialised Llama block without a lower bound on 1/T, selective smoothing with
            the authors' mask and alpha 0.5, AdamW 5e-5 with cosine decay, 2 epochs, batches of 8 sequences as 8
            micro-batches, no choice of loss and no refit. docs/studies.md lists what still differs.
        head_kind: the head that gives a token its temperature; without it and features, a small mlp is tried as well.
        features: what the head reads: names among {FEATURES}. By default a linear head tries logit_statistics, and
            these with hidden_states; other heads read hidden_states.
        pooling: a temperature per token, or one per sequence.
        identity_start: start with every temperature 1; by recipe paper every weight is random.
        normalize: divide what an MLP reads by its root mean square; not by recipe paper.
        loss: name of a loss; the docstrings of calibjax.losses have the formulas. selective-authors is
            selective-balanced where ignored tokens count as wrong, as in the authors' code. auto chooses out of
            fold: cross-entropy or joint, with a few alpha, or temperature scaling if no head is better beyond noise.
        alpha: main weight of the loss ({ALPHAS}). With --loss auto it is the one of joint, in place of the grid.
        refit_temperature: fit one more temperature on top of the head, for the calibration of the most likely token on
            sequences that training never saw, and apply it where it differs from 1 by more than two standard errors.
        max_tokens: largest number of tokens of each set to fit on, and to evaluate on; the seed draws the sequences.
        folds: parts of the fitting sequences, each predicted by heads fitted on the others; several sets are the folds.
        epochs: passes over the fitting sequences, for mlp and transformer heads.
        batch_size: sequences per batch of the frozen pass, and per step of an mlp or transformer head.
        accumulate: micro-batches per step.
        learning_rate: peak learning rate, for mlp and transformer heads.
        warmup_fraction: fraction of the steps in which the learning rate rises, for mlp and transformer heads.
        weight_decay: decay of AdamW; for a linear head, which is not fitted in steps, the penalty on the weights of
            hidden states, by default chosen among {DECAYS}.
        keep: where the frozen model's hidden states and curves are kept: on disk, for a resumed run, or in memory.
        checkpoint_every: steps between checkpoints.
    """

    recipe: Literal["default", "paper"] = "default"
    head_kind: HeadKind | None = None
    features: tuple[str, ...] | None = None
    pooling: Literal["token", "sequence"] = "token"
    identity_start: bool | None = None
    normalize: bool | None = None
    loss: LossName | None = None
    alpha: NonNegative | None = None
    refit_temperature: bool | None = None
    max_tokens: Count = 200_000
    folds: Annotated[int, Range(2, 100)] = 4
    epochs: Count | None = None
    batch_size: BatchSize | None = None
    accumulate: Count | None = None
    learning_rate: Positive | None = None
    warmup_fraction: Annotated[float, Range(0, 1, open="high")] | None = None
    weight_decay: NonNegative | None = None
    keep: Keep = "disk"
    checkpoint_every: Count = 200

    def check(self, mesh: Mesh) -> None:
        """Raises `UserError` where options do not fit together, or batches do not divide among the devices."""
        plan = make_plan(self, hidden_size=64)
        check_batch(mesh, plan.batch_size, plan.accumulate)

    @classmethod
    def unset_value(cls, name: str) -> Any:
        """The default recipe's value of an option that is None; None if the recipe has none."""
        return RECIPES["default"].get(name)


def describe_alphas() -> str:
    """`--alpha` of each loss that has it, for the help."""
    losses: dict[Hyperparameter, list[str]] = {}
    for name, loss in LOSSES.items():
        if (weight := loss.main_parameter()) is not None:
            losses.setdefault(weight, []).append(name)
    return "; ".join(
        f"{', '.join(names)}: {weight.meaning}, {weight.limits}, by default {weight.default:g}"
        for weight, names in losses.items()
    )


AtsOptions.__doc__ = (
    (AtsOptions.__doc__ or "")
    .replace("{ALPHAS}", describe_alphas())
    .replace("{FEATURES}", ", ".join(FEATURES))
    .replace("{DECAYS}", ", ".join(f"{decay:g}" for decay in DECAYS))
)


RECIPES: dict[str, dict[str, Any]] = {
    "default": {
        "head_kind": "linear",
        "identity_start": True,
        "normalize": True,
        "loss": "auto",
        "refit_temperature": True,
        "epochs": 6,
        "batch_size": 16,
        "accumulate": 1,
        "learning_rate": 2e-3,
        "warmup_fraction": 0.1,
        "min_scale": MIN_SCALE,
    },
    "paper": {
        "head_kind": "transformer",
        "identity_start": False,
        "normalize": False,
        "loss": "selective-authors",
        "refit_temperature": False,
        "epochs": 2,
        "batch_size": 8,
        "accumulate": 8,
        "learning_rate": 5e-5,
        "warmup_fraction": 0.0,
        "min_scale": NO_MIN_SCALE,
    },
}
"""What `AtsOptions` leaves to its recipe, and the smallest inverse temperature of the head."""


class Trial(NamedTuple):
    """A loss to train with; `alpha` is None where it has none."""

    loss: str
    alpha: float | None

    def __str__(self) -> str:
        return self.loss if self.alpha is None else f"{self.loss}-{self.alpha:g}"

    def is_solved(self, head: HeadConfig) -> bool:
        """Whether a head is fitted to all tokens at once (`train.solve`), not in steps (`train.loop`)."""
        return head.is_linear_in_features and not LOSSES[self.loss].per_micro_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtsPlan:
    """`AtsOptions` with every value decided; JSON-able by `dataclasses.asdict`.

    `heads`, `decays` and `trials` are tried, the simplest head and the largest decay first. `may_keep_temperature`:
    whether temperature scaling is kept if no head beats it.
    """

    heads: tuple[HeadConfig, ...]
    decays: tuple[float, ...]
    trials: tuple[Trial, ...]
    may_keep_temperature: bool
    refit_temperature: bool
    max_tokens: int
    folds: int
    epochs: int
    batch_size: int
    accumulate: int
    optimizer: OptimizerConfig
    keep: Keep
    checkpoint_every: int


def make_plan(options: AtsOptions, hidden_size: int) -> AtsPlan:
    """The options and their recipe, decided and checked, for a model of width `hidden_size`.

    Raises:
        UserError: a value is out of range, or the head cannot be built.
    """
    check_options(options)
    recipe = RECIPES[options.recipe]
    given = {name: value for name in recipe if (value := getattr(options, name, None)) is not None}
    chosen = SimpleNamespace(**{**recipe, **given})
    trials = _trials(chosen.loss, options.alpha)
    _check_head_options(options, chosen.head_kind)
    heads = _heads(options, chosen, hidden_size)
    heads[-1].build()
    _check_penalty_and_steps(options, heads, trials)
    decays = DECAYS if any(head.is_linear_in_features and head.reads_states for head in heads) else (0.0,)
    return AtsPlan(
        heads=heads,
        decays=decays if options.weight_decay is None else (options.weight_decay,),
        trials=trials,
        may_keep_temperature=chosen.loss == "auto",
        refit_temperature=chosen.refit_temperature,
        max_tokens=options.max_tokens,
        folds=options.folds,
        epochs=chosen.epochs,
        batch_size=chosen.batch_size,
        accumulate=chosen.accumulate,
        optimizer=OptimizerConfig(
            learning_rate=chosen.learning_rate,
            warmup_fraction=chosen.warmup_fraction,
            weight_decay=options.weight_decay or 0.0,
        ),
        keep=options.keep,
        checkpoint_every=options.checkpoint_every,
    )


def _heads(options: AtsOptions, chosen: Any, hidden_size: int) -> tuple[HeadConfig, ...]:
    """The heads to try, the simplest first; several only if the options name neither features nor another kind."""
    shared = HeadConfig(
        kind=chosen.head_kind,
        hidden_size=hidden_size,
        pooling=options.pooling,
        identity_start=chosen.identity_start,
        normalize=chosen.normalize,
        min_scale=chosen.min_scale,
    )
    if options.features is not None:
        heads = [dataclasses.replace(shared, features=options.features)]
    elif shared.is_linear_in_features:
        heads = [dataclasses.replace(shared, features=features) for features in AUTO_FEATURES]
        if options.head_kind is None:
            heads.append(dataclasses.replace(shared, kind="mlp"))
    else:
        heads = [shared]
    width = None
    if options.recipe == "paper":  # 8/3 D as in Llama 1 and 2, and in the authors' calibration_configs/ for 7B and 13B
        width = round_up(8 * hidden_size // 3, 256)
    elif len(heads) > 1:
        width = min(hidden_size, _NARROW)
    return tuple(dataclasses.replace(head, intermediate_size=width) for head in heads)


def _check_penalty_and_steps(options: AtsOptions, heads: tuple[HeadConfig, ...], trials: tuple[Trial, ...]) -> None:
    """Raises `UserError` where `weight_decay`, or an option of training in steps, is given that no head uses."""
    reads_statistics = heads[0].is_linear_in_features and not any(head.reads_states for head in heads)
    if options.weight_decay is not None and reads_statistics:
        raise UserError("weight_decay: a linear head has a penalty on hidden states and embeddings only; leave it out.")
    step_options = ("epochs", "accumulate", "learning_rate", "warmup_fraction")
    given = [name for name in step_options if getattr(options, name) is not None]
    if given and all(trial.is_solved(head) for head in heads for trial in trials):
        raise UserError(f"{', '.join(given)}: a linear head is solved at once, not in steps; leave it out.")


def _check_head_options(options: AtsOptions, kind: str) -> None:
    names = {"features", "pooling", "identity_start", "normalize"} - {*HEADS[kind].options}
    unread = sorted(name for name in names if getattr(options, name) != getattr(AtsOptions, name))
    if unread:
        them = "it" if len(unread) == 1 else "them"
        raise UserError(f"{', '.join(unread)}: a {kind} head does not read {them}; leave {them} out.")


def _trials(loss: LossName, alpha: float | None) -> tuple[Trial, ...]:
    if loss != "auto":
        return (Trial(loss, checked_alpha(loss, alpha)),)
    grid = ALPHA_GRID if alpha is None else (alpha,)
    trials = []
    for name in AUTO:
        values = (None,) if LOSSES[name].alpha is None else grid
        trials += [Trial(name, checked_alpha(name, value)) for value in values]
    return tuple(trials)


def checked_alpha(loss: str, alpha: float | None) -> float | None:
    """The main weight to train with: `alpha`, or the loss's default; None for a loss that has none.

    Raises:
        UserError: there is no such loss, it has no such weight, or the weight is out of range.
    """
    if loss not in LOSSES:
        raise UserError(f"loss: expected one of {', '.join(LOSSES)}, got {loss!r}.")
    weight = LOSSES[loss].main_parameter()
    if weight is None:
        if alpha is not None:
            raise UserError(f"alpha: the loss {loss} has no such weight; leave it out, or choose another loss.")
        return None
    if alpha is not None and not (math.isfinite(alpha) and weight.limits.holds(alpha)):
        limits = weight.limits.expected(alpha)
        raise UserError(f"alpha: expected {limits}, got {alpha} ({weight.meaning} of the loss {loss}).")
    return weight.default if alpha is None else alpha
