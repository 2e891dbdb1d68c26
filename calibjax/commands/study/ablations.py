"""Studies of one model and one set of text: what a head reads and is, its loss, and the weight in the loss."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax

from calibjax.commands.common import EvalDataOptions, claim_directory, leave_config, on_devices, split_text
from calibjax.commands.study.fits import SINGLE, StudyOptions, finish_study, fit_heads, load_checked, parameters_of
from calibjax.eval.compare.repeats import evaluate_repeats
from calibjax.eval.report.schema import StudyDocument
from calibjax.eval.tokens import identity_head
from calibjax.losses import LOSSES
from calibjax.runtime.context import RunContext
from calibjax.train.options import make_plan


class Ablation(NamedTuple):
    """A question, and the heads that answer it.

    Attributes:
        question: the question, as printed.
        variants: name -> what is changed in `StudyOptions.variant`: of an MLP that reads the hidden state of each
            token, fitted by the joint loss, in all that is not named.
        against: name -> name of the row it is compared with; the others with temperature scaling.
    """

    question: str
    variants: Mapping[str, Mapping[str, Any]]
    against: Mapping[str, str] = {}


def _pooling() -> Ablation:
    kinds = ("linear", "mlp", "transformer")
    variants = {f"{kind}, {of}": {"head": kind, "pooling": of} for kind in kinds for of in ("token", "sequence")}
    against = {f"{kind}, sequence": f"{kind}, token" for kind in kinds}
    return Ablation("A temperature for each token, or one for each sequence?", variants, against)


def _losses() -> Ablation:
    weighted = {"label-smoothing": (0.1, 0.5), "selective": (0.1, 0.5), "selective-balanced": (0.5,)}
    variants = {"cross-entropy": {"loss": "cross-entropy"}, "joint": {"loss": "joint"}} | _weighted(weighted)
    named = {"cross-entropy", "joint", *weighted}
    variants |= {loss: {"loss": loss} for loss in LOSSES if loss not in named}
    return Ablation(
        "Which loss: cross-entropy, with uniform smoothing, or selective smoothing?",
        variants,
        {name: "cross-entropy" for name in variants if name != "cross-entropy"},
    )


def _alpha() -> Ablation:
    grid = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
    losses = ("label-smoothing", "selective", "selective-balanced")
    return Ablation("How much does the weight alpha of smoothing matter?", _weighted(dict.fromkeys(losses, grid)))


def _heads() -> Ablation:
    everything = "hidden_states+max_logit+log_std_logits+argmax_embedding"
    # An MLP normalises what it reads, and of a single number nothing but the sign would be left.
    read = {
        "linear": ("hidden_states", "max_logit", "log_std_logits", "max_logit+log_std_logits", "argmax_embedding"),
        "mlp": ("hidden_states", "argmax_embedding"),
        "transformer": ("hidden_states",),
    }
    variants = {
        f"{kind}: {'all four' if features == everything else features}": {"head": kind, "features": features}
        for kind, of_kind in read.items()
        for features in (*of_kind, everything)
    }
    return Ablation("Which head, and what should it read?", variants)


def _weighted(grids: Mapping[str, tuple[float, ...]]) -> dict[str, dict[str, Any]]:
    return {f"{loss}, {alpha:g}": {"loss": loss, "alpha": alpha} for loss, grid in grids.items() for alpha in grid}


ABLATIONS = {"pooling": _pooling(), "losses": _losses(), "alpha": _alpha(), "heads": _heads()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationOptions(EvalDataOptions, StudyOptions):
    """Fits every variant of a study on one set of text, with several seeds, and evaluates them on held-out text.

    Prints a table of the held-out set, with the base model and temperature scaling beside the variants, and writes to
    --out: metrics.json, a figure for each set (PNG), and heads/.

    Attributes:
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id.
    """

    heading: ClassVar[str] = "data"
    data: str


@on_devices
def run(name: str, options: AblationOptions, log: Callable[[str], None] = print) -> StudyDocument:
    """Carries out `AblationOptions` for one of `ABLATIONS`; returns what it wrote to metrics.json."""
    study, (lm, mesh) = ABLATIONS[name], load_checked(options, log)
    fit, held_out = split_text(options.text.read(options.data, lm, log), options.fit_fraction, log)
    sets = {"held out": held_out, **options.text.read_all(options.eval_data, lm, log)}
    claim_directory(options.out, options.identity(name, {"fit": fit}))
    leave_config(options.out, f"study {name}", options)
    variants = {variant: options.variant(**changes) for variant, changes in study.variants.items()}
    log(f"{len(variants)} variants, {options.seeds} seeds: {len(fit.tokens):,} sequences to fit on")
    context = RunContext(directory=options.out / "heads", mesh=mesh, log=log, progress=not options.quiet)
    with jax.set_mesh(mesh):
        heads = fit_heads(lm, fit, variants, seeds=options.seeds, context=context)
    against = dict.fromkeys(variants, SINGLE) | dict(study.against)
    document: dict[str, Any] = {"study": name, "question": study.question, "sets": {}}
    for title, sequences in sets.items():
        with jax.set_mesh(mesh):
            of_set = evaluate_repeats(
                lm,
                sequences,
                {"uncalibrated": [identity_head(lm)], **heads},
                against={"uncalibrated": SINGLE, **against},
                batch_size=options.batch_size,
                bins=options.bins,
                closed=options.closed,
                context=context.titled(f"evaluating {title}"),
            )
        for variant, row in of_set["methods"].items():
            row["parameters"] = parameters_of(heads[variant][0]) if variant in heads else 0
            if variant in variants:
                row |= make_plan(variants[variant], lm.config.hidden_size).trials[0]._asdict()
        document["sets"][title] = of_set
    return finish_study(document, options, log)
