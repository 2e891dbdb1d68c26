"""`calibjax train sft`: fine-tune a model with label smoothing and compare it with the base model on held-out text."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from calibjax.commands import groups, run_directory
from calibjax.data import Sequences, validation_split
from calibjax.data.sequences import check_resamples
from calibjax.eval.report.schema import Document
from calibjax.eval.tokens import MethodResult, evaluate_tokens
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.models.hf_export import save_model, settings_files
from calibjax.runtime.context import Log, RunContext
from calibjax.runtime.options import Fraction, run_identity
from calibjax.train.ats import fit_temperature_head
from calibjax.train.sft import SftOptions, fit_sft


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSftOptions(
    groups.BinningOptions, groups.TrainingOutputOptions, groups.EvalDataOptions, groups.TextOptions, groups.ModelOptions
):
    """Fine-tunes a language model with label smoothing and evaluates it on held-out text.

    The loss counts the answers only. Prints the calibration of the base model and of the fine-tuned one, each with and
    without temperature scaling, and writes to --out: model/ (Hugging Face layout, for transformers and for --model),
    metrics.json, reliability.png, report.html, logs and checkpoints. A killed run resumes with the same options.
    Example: calibjax train sft --model HuggingFaceTB/SmolLM2-135M --data data.jsonl --label-smoothing 0.1 --out tuned

    Attributes:
        fit_fraction: fraction of the sequences to train on; the rest is held out.
        dtype: compute dtype, and that of frozen weights; by default that of `train ats`. Trained weights are float32.
        save_dtype: dtype of the weights in model/; by default float32, or bfloat16 where frozen weights were.
        sft: how the model is trained.
    """

    fit_fraction: Fraction = 0.9
    save_dtype: Literal["float32", "bfloat16"] | None = None
    sft: SftOptions = SftOptions()


def run(options: TrainSftOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    context = run_directory.begin("train sft", options, log)
    adapters = options.sft.lora is not None
    stored = None if adapters else jnp.float32
    base = options.load(context.mesh, log, stored=stored)
    options.sft.check_model(base.config)
    compute = base.dtype
    assert base.path is not None
    settings_files(base.path)  # raises before the training what `save_model` would raise after it

    read = options.text.read(options.data, base, log, split=options.split)
    fit, held_out = options.split_text(read, log, options.seed)
    # Every set is read before training starts: a wrong path must not cost the run.
    further = options.text.read_all(options.eval_data, base, log, split=options.eval_split)
    for name, part in further.items():
        check_resamples(part, name)
        groups.warn_of_repeats(fit, part, name, log)
    sets = {"held_out": held_out, **further}
    train_rows, validation_rows = validation_split(fit, options.sft.validation_fraction, seed=options.seed)
    training = f"{len(train_rows):,} sequences to train on, {len(validation_rows):,} for validation"
    log(f"split: {training}, {len(held_out.tokens):,} held out")
    validation = fit.take(validation_rows)

    with jax.set_mesh(context.mesh):
        results = _evaluate(base, "base", sets, validation, options, context)
        fitted = fit_sft(base, fit, options.sft, context=context.within("fit"), donate=not adapters)
        saved = jnp.dtype(options.save_dtype or stored or compute)
        save_model(options.out / "model", fitted.config, fitted.params, like=base.path, dtype=saved, replace=True)
        fingerprint, config, report = base.fingerprint, fitted.config, fitted.report
        del base, fitted  # one model in memory at a time
        tuned = groups.load_placed(options.out / "model", context.mesh, compute)
        if tuned.config != config:
            lost = f"the config.json of {config.family} has no soft-cap of {config.logit_softcap:g}"
            effect = "the figures are with it, and the logits of model/, wherever it is loaded, are without it"
            log(f"WARNING: {lost}: {effect}")
            tuned = dataclasses.replace(tuned, config=config)
        for title, more in _evaluate(tuned, "fine_tuned", sets, validation, options, context).items():
            results[title] |= more
    identity = {**run_identity("train sft", options), "fit": report, "base_fingerprint": fingerprint}
    document = run_directory.make_document(results, identity, closed=options.closed, seed=options.seed)
    run_directory.finish(document, options, holds="model/ (for --model, or transformers)")
    return document


def _evaluate(
    lm: LanguageModel,
    name: str,
    sets: Mapping[str, Sequences],
    validation: Sequences,
    options: TrainSftOptions,
    context: RunContext,
) -> dict[str, dict[str, MethodResult]]:
    """A model on every set, without and with temperature scaling, which is fitted on the validation data."""
    temperature = fit_temperature_head(lm, validation, options.sft.batch_size)
    heads = {name: FittedHead.constant(lm), f"{name}_temperature": temperature}
    shared: dict[str, Any] = {"batch_size": options.sft.batch_size, "bins": options.bins, "closed": options.closed}
    results = {}
    for title, sequences in sets.items():
        titled = context.titled(f"evaluating {name}: {title}".replace("_", " "))
        results[title] = evaluate_tokens(lm, sequences, heads, context=titled, **shared)
    return results
