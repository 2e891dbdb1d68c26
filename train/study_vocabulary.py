"""What label smoothing does to small decoders trained from scratch, against the size of their vocabulary.

    python train/study_vocabulary.py --assets path/to/assets --out runs/vocabulary

Llamas of random weights learn a little text of books for enough epochs to become overconfident, with byte-pair
vocabularies of different sizes and the same text, label smoothing or none, a temperature of the loss, or a soft-cap.
Each is evaluated on other books and on encyclopaedia text, beside the least entropy that its unembedding allows (arXiv
2508.00264, section 4). Prints a table in Markdown and writes it to --out, where each model's figures are kept, so that
an interrupted run resumes.
"""

import dataclasses
import functools
import gzip
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from pretrain import train_tokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from calibjax import metrics
from calibjax.cli import execute
from calibjax.commands.common import claim_directory
from calibjax.commands.parser import parse_script
from calibjax.data import Sequences
from calibjax.data.load import load_text
from calibjax.eval.layers.bounds import head_bound
from calibjax.eval.layers.layers import layer_outputs, make_readout
from calibjax.models import LanguageModel, init_params
from calibjax.models.families import config_from_hf
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train.sft import SftOptions, fit_sft

BOOKS, WIKI = "data/classic_books", "data/wikitext2/valid.txt.gz"
SKIPPED = 20_000
"""Characters at the start of a book: title, contents, licence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Trains a small decoder for every setting and evaluates it.

    Attributes:
        assets: directory with data/classic_books and data/wikitext2.
        out: for results, tokenizers and logs.
        vocabularies: numbers of byte-pair tokens.
        width: of the residual stream.
        smoothing: of all vocabularies.
        swept: vocabularies with more weights of smoothing, and with a narrower residual stream.
        more_smoothing: those weights.
        narrow: that width.
        plain: vocabulary for temperatures and soft-caps.
        temperatures: of the loss, by which logits are divided in training.
        softcaps: of the logits, in training and evaluation.
        layers: blocks.
        characters: of text to train on, from ten books.
        epochs: passes over it.
        learning_rate: peak.
        held_out: sequences of 128 tokens of either set to evaluate on.
        seeds: of weights and order.
    """

    assets: Path
    out: Path
    vocabularies: tuple[int, ...] = (500, 2000, 8000, 32000, 50000)
    width: int = 64
    smoothing: tuple[float, ...] = (0.0, 0.1)
    swept: tuple[int, ...] = (500, 8000)
    more_smoothing: tuple[float, ...] = (0.05, 0.2, 0.4)
    narrow: int = 16
    plain: int = 2000
    temperatures: tuple[float, ...] = (0.5, 2.0)
    softcaps: tuple[float, ...] = (5.0, 15.0)
    layers: int = 2
    characters: int = 30_000
    epochs: int = 40
    learning_rate: float = 2e-3
    held_out: int = 60
    seeds: tuple[int, ...] = (0,)


class Setting(NamedTuple):
    """One model."""

    vocab_size: int
    width: int
    smoothing: float
    temperature: float = 1.0
    softcap: float | None = None
    seed: int = 0


def settings(study: Study) -> list[Setting]:
    """Every model, the cheap ones first."""
    found = []
    for seed in study.seeds:
        for v in study.vocabularies:
            found += [Setting(v, study.width, beta, seed=seed) for beta in study.smoothing]
            if v in study.swept:
                found += [Setting(v, study.width, beta, seed=seed) for beta in study.more_smoothing]
                found += [Setting(v, study.narrow, beta, seed=seed) for beta in study.smoothing]
            if v == study.plain:
                found += [
                    Setting(v, study.width, beta, t, cap, seed)
                    for t, cap in [*((t, None) for t in study.temperatures), *((1.0, cap) for cap in study.softcaps)]
                    for beta in study.smoothing
                ]
    return found


@functools.cache
def books(directory: Path, name: str) -> tuple[str, ...]:
    """The texts of the books of a file, without their first pages."""
    with gzip.open(directory / name, "rt") as lines:
        return tuple(json.loads(line)["text"][SKIPPED:] for line in lines)


def passages(study: Study) -> dict[str, list[str]]:
    """The text to train on, and that of other books and an encyclopaedia."""
    directory, each = study.assets / BOOKS, study.characters // 10
    with gzip.open(study.assets / WIKI, "rt") as file:
        wiki = file.read()
    return {
        "train": [book[:each] for book in books(directory, "train_00.jsonl.gz")[:10]],
        "books": [book[:20_000] for book in books(directory, "valid.jsonl.gz")],
        "wikitext2": [wiki[start : start + 20_000] for start in range(0, 160_000, 20_000)],
    }


def tokenizer(study: Study, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte pairs of the books to train on, learned once."""
    directory = study.out / "tokenizers" / str(vocab_size)
    if not directory.is_dir():
        texts = [
            book[start : start + 20_000]
            for number in range(4)
            for book in books(study.assets / BOOKS, f"train_0{number}.jsonl.gz")
            for start in range(0, 80_000, 20_000)
        ]
        train_tokenizer(texts, vocab_size).save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def start(study: Study, setting: Setting, directory: Path) -> LanguageModel:
    """The model before training."""
    config = LlamaConfig(
        vocab_size=setting.vocab_size,
        hidden_size=setting.width,
        intermediate_size=4 * setting.width,
        num_hidden_layers=study.layers,
        num_attention_heads=setting.width // 16,
        num_key_value_heads=setting.width // 16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    decoder = config_from_hf(directory)
    params = init_params(decoder, jax.random.key(setting.seed))
    return LanguageModel.from_params(decoder, params, tokenizer(study, setting.vocab_size))


def evaluate(lm: LanguageModel, sequences: Sequences) -> dict[str, float]:
    """Figures of the model's own predictions, entropies in nats."""
    found = layer_outputs(lm, sequences, make_readout(lm), batch_size=8, context=RunContext(progress=False))
    confidence, correct, log_prob, entropy = (
        of[-1] for of in (found.confidence, found.correct, found.log_prob, found.entropy)
    )
    sums = metrics.pooled_sums(confidence, correct.astype(np.float32), log_prob=log_prob, groups=found.group)
    error = metrics.error_interval(sums)
    return {
        "nll": -float(log_prob.mean()),
        "accuracy": float(correct.mean()),
        "confidence": float(confidence.mean()),
        "ece": error.value,
        "low": error.low,
        "high": error.high,
        "entropy": float(entropy.mean()),
        "least_entropy": float(entropy.min()),
    }


def run_one(study: Study, setting: Setting) -> dict[str, Any]:
    """The figures of one model."""
    name = "-".join(f"{key}{value:g}" for key, value in zip("vdbtcs", (x or 0 for x in setting), strict=True))
    directory = study.out / name
    done = directory / "figures.json"
    if done.is_file():
        return json.loads(done.read_text())
    lm = start(study, setting, directory)
    sequences = {
        title: load_text(
            [lm.tokenizer(text).input_ids for text in texts],
            lm,
            seq_len=128,
            max_sequences=None if title == "train" else study.held_out,
        )
        for title, texts in passages(study).items()
    }
    options = SftOptions(
        label_smoothing=setting.smoothing,
        temperature=setting.temperature,
        softcap=setting.softcap,
        epochs=study.epochs,
        batch_size=8,
        learning_rate=study.learning_rate,
        schedule="cosine",
        remat="none",
        checkpoint_every=10**6,
    )
    context = RunContext(directory=directory / "sft", seed=setting.seed, progress=False, log=lambda _: None)
    fitted = fit_sft(lm, sequences["train"], options, context=context, consume=True)
    lm = LanguageModel.from_params(fitted.config, fitted.params, lm.tokenizer)
    bound = head_bound(lm, name)
    figures = {
        "tokens": int(sequences["train"].where.sum()),
        "log_bound": bound.bound.log_entropy,
        "logit_norm": bound.logit_norm,
        **{
            title: evaluate(lm, of_set.take(np.arange(min(study.held_out, len(of_set.tokens)))))
            for title, of_set in sequences.items()
        },
    }
    write_file(done, json.dumps(figures, indent=2) + "\n")
    print(f"{name}: ECE {figures['books']['ece']:.3f}", flush=True)
    return figures


def table(study: Study) -> list[str]:
    """A row for each model."""
    head = ["V", "D", "β", "T", "cap", "seed", "tokens", "train NLL", "NLL", "accuracy", "confidence"]
    head += ["ECE", "wikitext2: ECE", "entropy", "least entropy", "bound"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in settings(study):
        found = run_one(study, setting)
        books, wiki = found["books"], found["wikitext2"]
        cells = [f"{setting.vocab_size:,}", str(setting.width), f"{setting.smoothing:g}", f"{setting.temperature:g}"]
        cells += ["none" if setting.softcap is None else f"{setting.softcap:g}", str(setting.seed)]
        cells += [f"{found['tokens']:,}", f"{found['train']['nll']:.3f}", f"{books['nll']:.3f}"]
        cells += [f"{books['accuracy']:.3f}", f"{books['confidence']:.3f}"]
        cells += [f"{of['ece']:.3f} [{of['low']:.3f}, {of['high']:.3f}]" for of in (books, wiki)]
        cells += [f"{books['entropy']:.3f}", f"{books['least_entropy']:.2g}", f"{np.exp(found['log_bound']):.2g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(study: Study) -> None:
    require_directory(study.assets / "data", "--assets")
    shared = {name: getattr(study, name) for name in ("layers", "characters", "epochs", "learning_rate", "held_out")}
    claim_directory(study.out, {"command": "study_vocabulary", **shared})
    lines = table(study)
    write_file(study.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"results in {study.out}: table.md, one directory a model with figures.json")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
