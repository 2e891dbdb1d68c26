"""`calibjax train ats`: fit Adaptive Temperature Scaling to a frozen model and evaluate it on held-out text."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax

from calibjax.commands import groups, run_directory
from calibjax.data import Sequences, concatenate
from calibjax.data.sequences import check_resamples
from calibjax.eval.report.schema import Document
from calibjax.eval.tokens import MethodResult, evaluate_tokens, token_sample
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.runtime.context import Log, RunContext
from calibjax.runtime.distributed import is_first
from calibjax.runtime.files import write_file
from calibjax.runtime.options import run_identity
from calibjax.train.ats import AtsFit, fit_ats, limit_and_log
from calibjax.train.options import AtsOptions, make_plan
from calibjax.train.saved import save_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainAtsOptions(
    groups.BinningOptions, groups.TrainingOutputOptions, groups.EvalDataOptions, groups.TextOptions, groups.ModelOptions
):
    """Fits Adaptive Temperature Scaling to a frozen language model and evaluates it on held-out text.

    Prints the calibration of the base model, of temperature scaling and of ATS, and writes to --out: head/,
    metrics.json, tokens.json (some held-out text, token by token), reliability.png, report.html, and the logs and
    checkpoints of training. To resume a killed run, start it again with the same options.
    Example: calibjax train ats --model HuggingFaceTB/SmolLM2-135M-Instruct --data yahma/alpaca-cleaned --out runs/ats

    Attributes:
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id. With
            several, such as one per domain, each is predicted by heads fitted on the others, to suit unseen domains.
        ats: how the head is fitted.
    """

    data: tuple[str, ...]  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    ats: AtsOptions = AtsOptions()


def run(options: TrainAtsOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    context = run_directory.begin("train ats", options, log)
    lm = options.load(context.mesh, log)
    plan = make_plan(options.ats, lm.config.hidden_size)

    texts = options.text.read_all(options.data, lm, log, split=options.split, column_optional=len(options.data) > 1)
    parts = {name: options.split_text(sequences, log, options.seed) for name, sequences in texts.items()}
    fit = {name: part for name, (part, _) in parts.items()}
    all_fit = concatenate(list(fit.values()))
    held_out = concatenate([part for _, part in parts.values()])
    log(f"split: {len(all_fit.tokens):,} sequences to fit on, {len(held_out.tokens):,} held out")
    if len(parts) > 1:
        groups.warn_of_repeats(all_fit, held_out, "the held-out parts of all sets", log)
    # Every set is read before training starts: a wrong path must not cost the run.
    further = options.text.read_all(options.eval_data, lm, log, split=options.eval_split)
    for name, part in further.items():
        groups.warn_of_repeats(all_fit, part, name, log)
    sets = {"held_out": held_out, **further}
    if len(parts) > 1:
        sets |= {f"{name}, held out": part for name, (_, part) in parts.items()}
    for name, part in sets.items():
        sets[name] = limit_and_log(part, plan.max_tokens, context, f"to evaluate on ({name})")
        check_resamples(sets[name], name)

    fitted = fit_ats(lm, fit, options.ats, context.within("fit"))
    save_head(options.out / "head", fitted.head, notes=fitted.report)

    identity = run_identity("train ats", options)
    document, _ = evaluate_fit(identity, lm, sets, fitted, context, batch_size=plan.batch_size, binning=options)
    run_directory.finish(document, options)
    return document


def evaluate_fit(
    identity: Mapping[str, Any],
    lm: LanguageModel,
    sets: Mapping[str, Sequences],
    fitted: AtsFit,
    context: RunContext,
    *,
    batch_size: int,
    binning: groups.BinningOptions,
    keep_tokens: bool = False,
) -> tuple[Document, dict[str, dict[str, MethodResult]]]:
    """Evaluates the base model, temperature scaling and ATS on every set, and writes tokens.json.

    `identity`: the run's. Returns the contents of metrics.json, and the results by set.
    """
    heads = {"uncalibrated": FittedHead.constant(lm), "temperature": fitted.temperature, "ats": fitted.head}
    settings: dict[str, Any] = {"bins": binning.bins, "closed": binning.closed, "keep_tokens": keep_tokens}
    results = {}
    with jax.set_mesh(context.mesh):
        for name, sequences in sets.items():
            titled = context.titled(f"evaluating {name.replace('_', ' ')}")
            results[name] = evaluate_tokens(lm, sequences, heads, batch_size=batch_size, context=titled, **settings)
        sample = token_sample(lm, sets["held_out"], heads["uncalibrated"], fitted.head, batch_size=batch_size)
    if is_first():
        write_file(context.require_directory() / "tokens.json", json.dumps(sample) + "\n")
    run = {**identity, "fit": fitted.report, "base_fingerprint": lm.fingerprint}
    document = run_directory.make_document(results, run, closed=binning.closed, seed=context.seed)
    return document | ({} if fitted.comparison is None else {"comparison": fitted.comparison}), results
