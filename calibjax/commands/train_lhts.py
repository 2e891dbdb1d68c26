"""The whole job of long-horizon temperatures: train, save, and compare with what else sharpens text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from calibjax.commands.common import SCHEMA, DataOptions, claim_directory, finish, load_placed, on_devices
from calibjax.data import check_context, split_windows
from calibjax.eval.tasks.analogies import evaluate_analogies, load_analogies
from calibjax.eval.text import evaluate_text, load_bleu
from calibjax.eval.tokens import MethodResult, evaluate_tokens, identity_head, results_json
from calibjax.models.hf_export import save_model, settings_files
from calibjax.runtime.distributed import DeviceOptions
from calibjax.runtime.errors import UserError
from calibjax.train.lhts import LhtsOptions, Method, fit_lhts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LhtsRun:
    """Fine-tunes a language model to a long-horizon temperature, and sets it beside what else sharpens text.

    The model is its own frozen scorer. Prints, for the model as it was, the baseline `partition` and every long-horizon
    temperature, each under every myopic temperature: how likely and how varied its text is, and how it answers
    analogies; and how true each is of held-out text. Leaves in --out: models/ (each in Hugging Face layout),
    metrics.json, report.html, reliability.png, diversity.png, and the logs and checkpoints of training. Started again
    with the same options, a killed run goes on where it was.

    Attributes:
        model: directory with config.json and safetensors, or a hub id.
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id.
        out: output directory.
        split: of a hub data set or directory.
        fit_fraction: share of the windows, from the first, to train on; the rest begins the texts that are judged.
        partition: train the baseline of likelihood quantiles too.
        myopic: temperatures of every next token that all models are judged at; 0: the most likely token.
        texts: number of texts that each model writes at each of them.
        text_prompt: tokens of a held-out window that a text continues.
        self_bleu: judge the texts by self-BLEU too; needs sacrebleu.
        analogies: file with columns category, a, b, c, d, such as the Google analogies; by default none.
        analogy_rows: number of questions made of them.
        dtype: compute dtype; trained weights are float32 in any case.
        seed: of everything random.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
        devices: what the run uses.
        text: how text becomes windows; by default of full length, without packing.
        lhts: how the student is trained.
    """

    model: str
    data: str
    out: Path
    split: str | None = None
    fit_fraction: float = 0.9
    partition: bool = True
    myopic: tuple[float, ...] = (1.0, 0.5, 0.0)
    texts: int = 64
    text_prompt: int = 8
    self_bleu: bool = False
    analogies: str | None = None
    analogy_rows: int = 1000
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    json: bool = False
    quiet: bool = False
    devices: DeviceOptions = DeviceOptions()  # noqa: RUF009 (frozen)
    text: DataOptions = DataOptions(full_windows=True)  # noqa: RUF009 (frozen)
    lhts: LhtsOptions = LhtsOptions()  # noqa: RUF009 (frozen)

    def check(self) -> None:
        """Raises `UserError` where a value of its own is out of range."""
        ranges = {
            "myopic": (bool(self.myopic) and all(0 <= t < float("inf") for t in self.myopic), "numbers of at least 0"),
            "texts": (self.texts >= 2, "at least 2"),
            "text_prompt": (
                1 <= self.text_prompt < self.text.seq_len,
                f"1 to {self.text.seq_len - 1}, below --seq-len",
            ),
            "analogy_rows": (self.analogy_rows >= 1, "at least 1"),
        }
        for name, (right, expected) in ranges.items():
            if not right:
                raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {getattr(self, name)}.")
        if self.self_bleu:
            load_bleu()


@on_devices
def run_lhts(run: LhtsRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `LhtsRun`; returns what it wrote to metrics.json. Raises UserError before any work is lost."""
    run.check()
    mesh = run.devices.make_mesh()
    run.lhts.check(mesh)
    claim_directory(run.out, _identity(run))
    base = load_placed(run.model, mesh, run.dtype, stored=jnp.float32, announce=announce)
    check_context(run.text.seq_len, base.config.max_positions)
    assert base.path is not None
    settings_files(base.path)  # raises before the training what `save_model` would raise after it
    windows = run.text.read(run.data, base, announce, split=run.split)
    fit, held_out = split_windows(windows, run.fit_fraction)
    questions = None
    if run.analogies is not None:
        questions = load_analogies(run.analogies, base, count=run.analogy_rows, seed=run.seed)
    fits: dict[str, Any] = {}
    models = {"pretrained": base}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "texts": {},
        "analogies": {},
        "run": {**_identity(run), "fit": fits, "base_fingerprint": base.fingerprint},
    }
    results: dict[str, MethodResult] = {}
    begun = held_out.take(slice(run.texts))
    methods: tuple[Method, ...] = ("partition", "lhts") if run.partition else ("lhts",)
    with jax.set_mesh(mesh):
        for method in methods:
            fitted = fit_lhts(
                base,
                fit,
                run.lhts,
                directory=run.out / "fit" / method,
                method=method,
                samples=run.out / "fit",
                mesh=mesh,
                seed=run.seed,
                announce=announce,
                quiet=run.quiet,
            )
            fits[method] = fitted.report
            for name, params in fitted.params.items():
                save_model(run.out / "models" / name, base.config, params, like=base.path, replace=True)
                models[name] = load_placed(run.out / "models" / name, mesh, run.dtype, stored=jnp.float32)
        for name, lm in models.items():
            results |= evaluate_tokens(
                lm,
                held_out,
                {name: identity_head(lm)},
                batch_size=run.lhts.batch_size,
                description=f"evaluating {name}",
                quiet=run.quiet,
            )
            document["texts"][name] = {
                f"{temperature:g}": evaluate_text(
                    lm,
                    base,
                    begun,
                    temperature=temperature,
                    prompt=run.text_prompt,
                    batch_size=run.lhts.batch_size,
                    seed=run.seed,
                    with_self_bleu=run.self_bleu,
                    description=f"{name} at {temperature:g}",
                    quiet=run.quiet,
                )
                for temperature in run.myopic
            }
            if questions is not None:
                document["analogies"][name] = evaluate_analogies(
                    lm,
                    questions,
                    run.myopic,
                    batch_size=run.lhts.batch_size,
                    description=f"{name}: analogies",
                    quiet=run.quiet,
                )
    document["held_out"] = results_json(results, seed=run.seed)
    finish(document, run.out, holds="diversity.png, models/ (for --model, or transformers)", show=not run.json)
    return document


def _identity(run: LhtsRun) -> dict[str, Any]:
    """What makes two runs the same: all options but where it runs and how the result is kept, judged and shown."""
    judged_only = {"myopic", "texts", "text_prompt", "self_bleu", "analogies", "analogy_rows"}
    left_out = {"out", "json", "quiet", "devices", *judged_only}
    return {
        "command": "train lhts",
        **{name: value for name, value in dataclasses.asdict(run).items() if name not in left_out},
    }
