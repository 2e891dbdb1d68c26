"""A sample of held-out tokens with their figures under two heads, for the heat map of a report."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.data import Sequences, eval_batches
from calibjax.heads import FittedHead
from calibjax.kernels import top_logits
from calibjax.models import LanguageModel
from calibjax.models.frozen import batch_hidden, batch_stats, freeze, vocab_sharding
from calibjax.runtime.distributed import to_host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATISTICS = ("log_normalizer", "target_logit", "max_logit", "argmax", "expected_logit")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sample_batch(model, config, dtype, count, params, factor, frozen, batch):
    """Per token under one head: confidence, probability, entropy, temperature, top probabilities; argmax; top ids."""
    hidden = batch_hidden(model, frozen, batch, dtype)
    shared = {**batch, "hidden": hidden}
    options = {"dtype": dtype, "log_factor": factor, "statistics": _STATISTICS}
    stats, log_scale = batch_stats(model, config, params, frozen, shared, **options)
    sharding = vocab_sharding(model)
    logits = {"bias": frozen.bias, "softcap": model.logit_softcap, "sharding": sharding}
    top = top_logits(hidden, frozen.unembedding, count, **logits)
    log_prob = stats.scale[..., None] * top.logits - stats.require("log_normalizer")[..., None]
    numbers = (stats.confidence(), jnp.exp(stats.log_prob()), stats.entropy(), jnp.exp(-log_scale), jnp.exp(log_prob))
    return numbers, stats.require("argmax"), top.ids


def token_sample(
    lm: LanguageModel,
    sequences: Sequences,
    before: FittedHead,
    after: FittedHead,
    *,
    tokens: int = 400,
    samples: int = 5,
    alternatives: int = 5,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Some sequences, token by token, under two heads, each cut between two words.

    Of the sequences with enough scored targets, `samples` spread evenly, with at most `tokens` scored tokens in all.

    Returns:
        `{"windows": [[token, ...], ...]}`. A token has `text`, `scored` (False for a prompt), `start` where it is the
        first of an example, of which a packed sequence has several, and, if scored, `right`;
        `confidence`, `probability` (of this token) and `entropy` (nats), each `[before, after]`; `temperature`
        (after); and `top`, rows of `[text, before, after]` of the `alternatives` most likely tokens.
    """
    scored = sequences.where.sum(axis=1)
    each = -(-tokens // samples)
    long = np.flatnonzero(scored >= min(each, scored.max()))
    chosen = np.unique(long[np.linspace(0, len(long) - 1, samples).round().astype(int)])
    sequences = sequences.take(chosen)
    count = min(alternatives, lm.config.vocab_size)
    outputs = []
    for head in (before, after):
        frozen, parts = freeze(lm, head.config), []
        for batch, real in eval_batches(sequences.arrays(), batch_size):
            args = (head.params, jnp.float32(head.log_factor), frozen, batch)
            out = to_host(_sample_batch(lm.config, head.config, lm.dtype, count, *args))
            parts.append(jax.tree.map(lambda x, n=real: x[:n], out))
        outputs.append(jax.tree.map(lambda *x: np.concatenate(x), *parts))
    (one, argmax, ids), (two, _, _) = outputs

    rows: list[list[dict[str, Any]]] = []
    for s in range(len(sequences.tokens)):
        row: list[dict[str, Any]] = []
        left = tokens // len(sequences.tokens)
        for t in np.flatnonzero(sequences.segment_ids[s] > 0):
            if not left:
                break
            previous, target = int(sequences.tokens[s, t]), int(sequences.targets[s, t])
            if sequences.positions[s, t] == 0:
                begin = lm.tokenizer.decode([previous], skip_special_tokens=True)
                row.append({"text": str(begin), "scored": False, "start": True})
            text, is_scored = text_after(lm.tokenizer, previous, target), bool(sequences.where[s, t])
            row.append({"text": text, "scored": is_scored})
            if is_scored:
                left -= 1
                for name, first, second in zip(("confidence", "probability", "entropy"), one, two, strict=False):
                    row[-1][name] = [_rounded(first[s, t]), _rounded(second[s, t])]
                top = zip(ids[s, t], one[4][s, t], two[4][s, t], strict=True)
                row[-1] |= {
                    "right": bool(argmax[s, t] == target),
                    "temperature": _rounded(two[3][s, t]),
                    "top": [[text_after(lm.tokenizer, previous, int(i)), _rounded(p), _rounded(q)] for i, p, q in top],
                }
        rows.append(_whole_words(row))
    return {"windows": rows}


def _whole_words(row: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cuts a text to whole words, at its start only where no prompt is there; unchanged if no token begins a word."""
    starts = [place for place, token in enumerate(row) if token["text"][:1].isspace()]
    begins = row[0]["text"][:1].isupper() or not all(token["scored"] for token in row[1:2])
    first = starts[0] if starts and not begins else 0
    whole = row[first : starts[-1]] if starts and starts[-1] > first else row
    return whole if any(token["scored"] for token in whole) else row


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def text_after(tokenizer: "PreTrainedTokenizerBase", previous: int, token: int) -> str:
    """The text that a token adds: it is decoded after the previous token, since its spaces depend on the tokenizer."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    start, both = str(decode([previous])), str(decode([previous, token]))
    return both[len(start) :] if both.startswith(start) else str(decode([token]))
