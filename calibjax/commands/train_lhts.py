"""`calibjax train lhts`: train a long-horizon temperature and compare its text with that of other temperatures."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from calibjax.commands import groups, run_directory
from calibjax.data import is_hub_id
from calibjax.eval.report.schema import SCHEMA, Document
from calibjax.eval.text import evaluate_analogies, evaluate_text, load_analogies, load_bleu, read_analogies
from calibjax.eval.tokens import MethodResult, evaluate_tokens, results_json
from calibjax.heads import FittedHead
from calibjax.models.hf_export import save_model, settings_files
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import INT_MAX, Count, Fraction, NonNegative, Range, not_identity, run_identity
from calibjax.train.lhts import LhtsOptions, Method, fit_lhts


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainLhtsOptions(groups.TrainingOutputOptions, groups.TextOptions, groups.ModelOptions):
    """Fine-tunes a language model to a long-horizon temperature and compares it with other ways to sharpen text.

    The model is its own frozen scorer. For the base model, the baseline `partition` and every long-horizon temperature,
    each at every myopic temperature, prints how likely and how varied the text is, the accuracy on analogies, and the
    calibration on held-out text. Writes to --out: models/ (each in Hugging Face layout), metrics.json, report.html,
    reliability.png, diversity.png, logs and checkpoints. To resume a killed run, start it again with the same options.
    Example: calibjax train lhts --model HuggingFaceTB/SmolLM2-135M --data stories.txt --out runs/lhts

    Attributes:
        fit_fraction: fraction of the sequences to train on; the rest are the prompts of the texts that are evaluated.
        dtype: compute dtype; the default is that of `train ats`. Trained weights are float32 in any case.
        partition: train the baseline of likelihood quantiles as well.
        myopic: temperatures of the next token at which all models are evaluated; 0: the most likely token.
        texts: number of texts that each model writes at each of them.
        text_prompt_tokens: number of first tokens of a held-out sequence that a text continues.
        self_bleu: evaluate the texts by self-BLEU as well; needs sacrebleu.
        analogies: file with columns category, a, b, c, d, such as the Google analogies; by default none.
        analogy_rows: number of analogy questions.
        text: how text becomes sequences; by default of full length, without packing.
        lhts: how the student is trained.
    """

    fit_fraction: Fraction = 0.9
    partition: bool = True
    myopic: tuple[NonNegative, ...] = not_identity((1.0, 0.5, 0.0))
    texts: Annotated[int, Range(2, INT_MAX)] = not_identity(64)
    text_prompt_tokens: Count = not_identity(8)
    self_bleu: bool = not_identity(False)
    analogies: str | None = not_identity(None)
    analogy_rows: Count = not_identity(1000)
    text: groups.DataOptions = groups.DataOptions(full_sequences=True)
    lhts: LhtsOptions = LhtsOptions()

    def check(self) -> None:
        """Raises `UserError` where options do not fit together, or self-BLEU is not installed."""
        if not self.myopic:
            raise UserError("--myopic: expected at least one temperature, such as 1, got none.")
        if self.analogies is None and self.analogy_rows != TrainLhtsOptions.analogy_rows:
            raise UserError("--analogy-rows: expected --analogies, the file of the questions.")
        rounds = (self.lhts.quantiles, self.lhts.partition_rounds)
        if not self.partition and rounds != (LhtsOptions.quantiles, LhtsOptions.partition_rounds):
            raise UserError("--quantiles, --partition-rounds: of the baseline: leave out --no-partition or these.")
        seq_len, prompt = self.text.seq_len or 128, self.text_prompt_tokens
        if prompt >= seq_len:
            raise UserError(f"--text-prompt-tokens: expected less than --seq-len {seq_len}, got {prompt}.")
        if self.analogies is not None and not is_hub_id(self.analogies):
            with about("--analogies"):
                read_analogies(self.analogies)
        if self.self_bleu:
            load_bleu()


def run(options: TrainLhtsOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    context = run_directory.begin("train lhts", options, log)
    base = options.load(context.mesh, log, stored=jnp.float32)
    assert base.path is not None
    settings_files(base.path)  # raises before the training what `save_model` would raise after it
    read = options.text.read(options.data, base, log, split=options.split)
    fit, held_out = options.split_text(read, log, options.seed)
    prompts = held_out.take(slice(options.texts))
    if len(prompts.tokens) < options.texts:
        log(f"--texts: {len(prompts.tokens)} of {options.texts}; no more sequences are held out")
    prompt, most = options.text_prompt_tokens, (prompts.segment_ids == 1).sum(axis=1).min()
    if prompt > most:
        raise UserError(f"--text-prompt-tokens: expected at most {most}, as in all texts, got {prompt}.")
    items = None
    if options.analogies is not None:
        items = load_analogies(options.analogies, base, count=options.analogy_rows, seed=options.seed)

    fits: dict[str, Any] = {}
    models = {"pretrained": base}
    texts: dict[str, dict[str, dict[str, Any]]] = {}
    analogies: dict[str, dict[str, dict[str, Any]]] = {}
    results: dict[str, MethodResult] = {}
    batch_size = options.lhts.batch_size
    writing: dict[str, Any] = {"prompt": prompt, "with_self_bleu": options.self_bleu, "batch_size": batch_size}
    methods: tuple[Method, ...] = ("partition", "lhts") if options.partition else ("lhts",)
    with jax.set_mesh(context.mesh):
        for method in methods:
            within = context.within("fit", method)
            samples = options.out / "fit"  # of both methods
            fitted = fit_lhts(base, fit, options.lhts, context=within, method=method, samples_directory=samples)
            fits[method] = fitted.report
            for name, params in fitted.params.items():
                directory = options.out / "models" / name
                save_model(directory, base.config, params, like=base.path, replace=True)
                models[name] = groups.load_placed(directory, context.mesh, base.dtype, stored=jnp.float32)
        for name, lm in models.items():
            heads, titled = {name: FittedHead.constant(lm)}, context.titled(f"evaluating {name}")
            results |= evaluate_tokens(lm, held_out, heads, batch_size=batch_size, context=titled)
            texts[name] = {}
            for temperature in options.myopic:
                titled = context.titled(f"{name} at {temperature:g}")
                written = evaluate_text(lm, base, prompts, temperature=temperature, context=titled, **writing)
                texts[name][f"{temperature:g}"] = written
            if items is not None:
                titled = context.titled(f"{name}: analogies")
                analogies[name] = evaluate_analogies(lm, items, options.myopic, batch_size=batch_size, context=titled)
    identity = {**run_identity("train lhts", options), "fit": fits, "base_fingerprint": base.fingerprint}
    document: Document = {"schema": SCHEMA, "texts": texts, "analogies": analogies, "run": identity}
    document["held_out"] = results_json(results, seed=options.seed)
    run_directory.finish(document, options, holds="diversity.png, models/ (for --model, or transformers)")
    return document
