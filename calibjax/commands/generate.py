"""`calibjax generate`: text from a model, with the calibrated confidence of every token."""

import dataclasses
import functools
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from calibjax.commands.groups import ChatOptions, JsonOptions, ModelOptions
from calibjax.data.chat_template import render_chat
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import TextTable
from calibjax.eval.report.terminal import print_result
from calibjax.eval.tokens import text_after
from calibjax.models import LanguageModel
from calibjax.models.generate import Sampling, TopP, generate
from calibjax.runtime.context import Log
from calibjax.runtime.distributed import is_first, to_host
from calibjax.runtime.errors import UserError, about, printable
from calibjax.runtime.options import AnyText, Count, NonNegative, Seed
from calibjax.train import head_notes, load_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(JsonOptions, ChatOptions, ModelOptions):
    """Continues a text, or answers it as a chat, and prints the confidence of every token, calibrated by a head.

    Example: calibjax generate --model HuggingFaceTB/SmolLM2-135M-Instruct --head runs/ats --prompt "Who are you?"

    Attributes:
        prompt: texts to continue or to answer.
        head: directory of a fitted head or its run, or a head on the hub (org/name@revision); by default uncalibrated.
        max_new_tokens: largest number of new tokens; fewer where the model ends its text.
        temperature: 0 takes the most likely token; otherwise tokens are drawn at this temperature, 0.0001 to 10,000.
        top_k: draw from this many of the most likely tokens.
        top_p: draw from the fewest tokens whose probabilities add up to this.
        sample_calibrated: draw from the calibrated distribution; otherwise the head changes no token.
        seed: seed of the draws.
    """

    prompt: tuple[Annotated[str, AnyText()], ...]
    head: Path | None = None
    max_new_tokens: Count = 128
    temperature: NonNegative = 0.0
    top_k: Count | None = None
    top_p: TopP | None = None
    sample_calibrated: bool = False
    seed: Seed = 0


def run(options: GenerateOptions, log: Log = print) -> Document:
    if not options.prompt:
        raise UserError("--prompt: expected at least one text to continue, got none.")
    if options.sample_calibrated and options.head is None:
        raise UserError("--sample-calibrated: expected --head, whose calibrated distribution is drawn from.")
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        calibrated=options.sample_calibrated,
        key=jax.random.key(options.seed),
    )
    if options.head is not None:
        with about("--head"):
            head_notes(options.head)
    lm = options.load(options.devices.make_mesh())
    chat = options.applies(lm, log)
    encode = functools.partial(chat_tokens, lm, system=options.system) if chat else lm.tokenizer.encode
    prompts = [encode(text) for text in options.prompt]
    head = None if options.head is None else load_head(options.head, lm)
    generated = generate(lm, prompts, head=head, max_new_tokens=options.max_new_tokens, sampling=sampling)
    generated = to_host(generated)
    columns = (generated.tokens, generated.base_log_probs, generated.confidence, generated.temperature)
    names = ("id", "token", "base_log_prob", "confidence", "temperature")
    texts = []
    for row, (prompt, (*_, last)) in enumerate(zip(options.prompt, prompts, strict=True)):
        ids, *figures = (column[row][generated.where[row]].tolist() for column in columns)
        written = [text_after(lm.tokenizer, before, token) for before, token in pairwise([last, *ids])]
        tokens = [dict(zip(names, token, strict=True)) for token in zip(ids, written, *figures, strict=True)]
        text = text_after(lm.tokenizer, last, *ids, skip_special=True)
        texts.append({"prompt": prompt, "text": text, "tokens": tokens})
    if not options.json and is_first():
        _print(texts, calibrated=options.head is not None)
    return {
        "model": options.model,
        "fingerprint": lm.fingerprint,
        "calibrated": options.head is not None,
        "chat": chat,
        "texts": texts,
    }


def chat_tokens(lm: LanguageModel, prompt: str, system: str | None) -> list[int]:
    """The tokens of a prompt as a user's message, after which the model answers."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = render_chat(lm.tokenizer, [*messages, {"role": "user", "content": prompt}], add_generation_prompt=True)
    return lm.tokenizer.encode(text, add_special_tokens=False)


def _print(texts: list[dict[str, Any]], calibrated: bool) -> None:
    for text in texts:
        columns = ["token", "confidence", *(("uncalibrated", "temperature") if calibrated else ())]
        rows = []
        for token in text["tokens"]:
            rows.append([repr(token["token"]), f"{token['confidence']:.3f}"])
            if calibrated:
                rows[-1] += [f"{np.exp(token['base_log_prob']):.3f}", f"{token['temperature']:.2f}"]
        print_result(printable(f"{text['prompt']} → {text['text'].lstrip()}"), TextTable("", columns, rows))
