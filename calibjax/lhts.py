"""The whole job of long-horizon temperatures: train, save, and compare with what else sharpens text."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from calibjax._checks import UserError
from calibjax.data import check_context, split_windows
from calibjax.distributed import DeviceOptions, is_first
from calibjax.eval.analogies import evaluate_analogies, load_analogies
from calibjax.eval.text import evaluate_text, load_bleu, plot_diversity
from calibjax.models import load_model
from calibjax.models.export import save_model
from calibjax.models.samples import log_probs
from calibjax.runs import SCHEMA, DataOptions, claim_directory
from calibjax.sharding import describe_mesh
from calibjax.train.lhts import LhtsOptions, Method, fit_lhts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LhtsRun:
    """Fine-tunes a language model to a long-horizon temperature, and sets it beside what else sharpens text.

    The model is its own frozen scorer. Prints, for the model as it was, the baseline `partition` and every long-horizon
    temperature, each under every myopic temperature: how likely and how varied its text is, and how it answers
    analogies. Leaves in --out: models/ (each in Hugging Face layout), metrics.json, table.md, diversity.png, and the
    logs and checkpoints of training. Started again with the same options, a killed run goes on where it was.

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


def run_lhts(run: LhtsRun, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `LhtsRun`; returns what it wrote to metrics.json. Raises UserError before any work is lost."""
    run.check()
    mesh = run.devices.make_mesh()
    run.lhts.check(mesh)
    claim_directory(run.out, _identity(run))
    placed = mesh if mesh.size > 1 else None
    base = dataclasses.replace(load_model(run.model, dtype=jnp.float32, mesh=placed), dtype=jnp.dtype(run.dtype))
    announce(f"model: {base!r}, on {describe_mesh(mesh)}")
    check_context(run.text.seq_len, base.config.max_positions)
    assert base.path is not None
    windows = run.text.read(run.data, base, announce, split=run.split)
    fit, held_out = split_windows(windows, run.fit_fraction)
    questions = None
    if run.analogies is not None:
        questions = load_analogies(run.analogies, base, count=run.analogy_rows, seed=run.seed)
    fits: dict[str, Any] = {}
    models = {"pretrained": base}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "run": {**_identity(run), "fit": fits, "base_fingerprint": base.fingerprint},
        "held_out_nll": {},
        "texts": {},
        "analogies": {},
    }
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
                save_model(run.out / "models" / name, base.config, params, like=base.path)
                loaded = load_model(run.out / "models" / name, dtype=jnp.float32, mesh=placed)
                models[name] = dataclasses.replace(loaded, dtype=base.dtype)
        for name, lm in models.items():
            held = log_probs(lm, held_out, batch_size=run.lhts.batch_size)
            document["held_out_nll"][name] = float(-held.sum(dtype="float64") / held_out.where.sum())
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
                    lm, questions, run.myopic, batch_size=run.lhts.batch_size
                )
    if not is_first():
        return document
    (run.out / "metrics.json").write_text(json.dumps(document, indent=2) + "\n")
    tables = markdown(document)
    (run.out / "table.md").write_text(tables)
    plot_diversity(document["texts"], run.out / "diversity.png")
    if not run.json:
        print(tables)
        print(f"results in {run.out}: metrics.json, table.md, diversity.png, models/ (for --model, or transformers)")
    return document


def markdown(document: dict[str, Any]) -> str:
    """The tables of a run: a row for every model, a column for every myopic temperature."""

    def table(title: str, cells: dict[str, dict[str, str]]) -> str:
        columns = list(next(iter(cells.values())))
        lines = [
            f"| {title} | " + " | ".join(f"myopic {column}" for column in columns) + " |",
            "|---|" + "---|" * len(columns),
            *(f"| {name} | " + " | ".join(row[column] for column in columns) + " |" for name, row in cells.items()),
        ]
        return "\n".join(lines) + "\n"

    def cells(results: dict[str, dict[str, Any]], show: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, str]]:
        return {name: {column: show(cell) for column, cell in row.items()} for name, row in results.items()}

    texts = document["texts"]
    tables = [
        table("log p of a token", cells(texts, lambda x: f"{x['log_prob']:.3f} ± {x['log_prob_error']:.3f}")),
        table(
            "distinct-1 / 2 / 3",
            cells(texts, lambda x: " / ".join(f"{x[f'distinct_{n}']:.3f}" for n in (1, 2, 3))),
        ),
        table("repeated 4-grams", cells(texts, lambda x: f"{x['repetition']:.3f}")),
    ]
    if any(cell["self_bleu"] is not None for row in texts.values() for cell in row.values()):
        tables.append(table("self-BLEU", cells(texts, lambda x: f"{x['self_bleu']:.1f}")))
    if document["analogies"]:
        shown = cells(document["analogies"], lambda x: f"{100 * x['accuracy']:.1f} ± {100 * x['error']:.1f}")
        tables.append(table("analogies, % right (chance 25)", shown))
    nll = "| NLL of held-out text | |\n|---|---|\n" + "".join(
        f"| {name} | {value:.4f} |\n" for name, value in document["held_out_nll"].items()
    )
    return "\n".join([*tables, nll])


def _identity(run: LhtsRun) -> dict[str, Any]:
    """What makes two runs the same: all options but where it runs and how the result is kept, judged and shown."""
    judged_only = {"myopic", "texts", "text_prompt", "self_bleu", "analogies", "analogy_rows"}
    left_out = {"out", "json", "quiet", "devices", *judged_only}
    return {
        "command": "train lhts",
        **{name: value for name, value in dataclasses.asdict(run).items() if name not in left_out},
    }
