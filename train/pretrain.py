"""Trains a small language model of our own from nothing, on two cores in about an hour.

    python train/pretrain.py --assets path/to/assets --out runs/pretrained

Byte-pair tokens are learned from the text, a model of random weights is written, and `fit_sft` without label smoothing
trains it on books and stories, or on --data, with its checkpoints: a killed run resumes. The result is --out/model, in
Hugging Face's layout with a real vocabulary, for every command of calibjax; its weights are not kept in the repository.
"""

import dataclasses
import gzip
import json
import sys
from pathlib import Path
from typing import Literal

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

import calibjax
from calibjax.cli import execute
from calibjax.commands.parser import parse_script
from calibjax.commands.run_directory import claim_directory
from calibjax.data import read_source
from calibjax.data.load import load_text
from calibjax.models import init_params, load_model
from calibjax.models.families import config_from_hf
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train.sft import SftOptions, fit_sft

_END = "<|endoftext|>"
_BOOKS, _STORIES = "data/classic_books", "data/tinystories_sample"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Trains a language model from random weights.

    Attributes:
        assets: directory with data/classic_books and data/tinystories_sample.
        out: for the model, its tokenizer and the checkpoints.
        family: architecture.
        data: other text in place of theirs, as --data of the commands; of rows, the column text.
        tokens: number of tokens to train on: all stories, then an equal part of every book.
        epochs: passes over these tokens.
        vocab_size: byte-pair tokens; 257 are single bytes.
        width: width of the residual stream, a multiple of 64, the width of a head.
        layers: number of blocks.
        seq_len: tokens of a sequence, and the model's context.
        batch_size: sequences per step.
        learning_rate: peak learning rate.
        seed: random seed of the weights and of the order of the sequences.
    """

    assets: Path
    out: Path
    family: Literal["llama", "mistral", "gemma2"] = "llama"
    data: str | None = None
    tokens: int = 8_000_000
    epochs: int = 1
    vocab_size: int = 8192
    width: int = 256
    layers: int = 6
    seq_len: int = 256
    batch_size: int = 16
    learning_rate: float = 1e-3
    seed: int = 0


def documents(directory: Path) -> list[str]:
    texts = []
    for file in sorted(directory.glob("*.jsonl.gz")):
        with gzip.open(file, "rt") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def passages(options: Pretrain) -> list[str]:
    """The texts of --data; otherwise all stories and the start of each book, in all 5 bytes per requested token."""
    if options.data is not None:
        return [row["text"] for row in read_source(options.data)]
    stories, books = (documents(options.assets / name) for name in (_STORIES, _BOOKS))
    left = max(0, 5 * options.tokens - sum(map(len, stories)))
    length = left // max(1, len(books))
    return [*stories, *(book[:length] for book in books if length)]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level byte pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:20_000] for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_END, eos_token=_END)


def write_start(options: Pretrain, texts: list[str], directory: Path) -> None:
    """The tokenizer and a model of random weights, in Hugging Face's layout."""
    like = options.out / "settings"
    train_tokenizer(texts, options.vocab_size).save_pretrained(like)
    own = {"query_pre_attn_scalar": 64} if options.family == "gemma2" else {}
    config = AutoConfig.for_model(
        options.family,
        vocab_size=options.vocab_size,
        hidden_size=options.width,
        intermediate_size=round(8 / 3 * options.width / 64) * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 64,
        head_dim=64,
        max_position_embeddings=options.seq_len,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        architectures=[f"{options.family.capitalize()}ForCausalLM"],
        **own,
    )
    config.save_pretrained(like)
    decoder = config_from_hf(like)
    calibjax.save_model(directory, decoder, init_params(decoder, jax.random.key(options.seed)), like=like, replace=True)


def main(options: Pretrain) -> None:
    if options.data is None:
        require_directory(options.assets / "data", "--assets")
    identity = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("assets", "out")}
    claim_directory(options.out, {"command": "pretrain", **identity})
    texts = passages(options)
    start = options.out / "start"
    if not start.is_dir():
        write_start(options, texts, start)
    lm = load_model(start)
    ids = [[0, *lm.tokenizer(text).input_ids, 0] for text in texts]
    sequences = load_text(ids, lm, seq_len=options.seq_len, max_sequences=options.tokens // options.seq_len)
    tokens = int(sequences.where.sum())
    print(f"{len(texts):,} texts, {len(sequences.tokens):,} sequences of {options.seq_len} tokens, {lm}", flush=True)
    tuning = SftOptions(
        label_smoothing=0.0,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        schedule="cosine",
        weight_decay=0.1,
        remat="none",
        validation_fraction=0.02,
    )
    fitted = fit_sft(lm, sequences, tuning, context=RunContext(directory=options.out / "training", seed=options.seed))
    calibjax.save_model(options.out / "model", fitted.config, fitted.params, like=start, replace=True)
    report = {"tokens": tokens, **fitted.report}
    write_file(options.out / "pretrained.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    print(f"results in {options.out}: model, pretrained.json")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Pretrain), lambda options, _: main(options)))
