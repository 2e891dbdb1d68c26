"""Some held-out tokens with all that is known of them, for the heat map of a report."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.data import Sequences, eval_batches
from calibjax.heads import FittedHead
from calibjax.kernels import top_logits
from calibjax.models import LanguageModel
from calibjax.models.frozen import batch_hidden, batch_stats, freeze
from calibjax.runtime.distributed import to_host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATISTICS = ("log_normalizer", "target_logit", "max_logit", "argmax", "expected_logit")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sample_batch(model, config, dtype, count, params, factor, frozen, batch):
    """Of one head, per token: confidence, probability, entropy, temperature, those of the likeliest; and ids."""
    hidden = batch_hidden(model, frozen, batch, dtype)
    shared = {**batch, "hidden": hidden}
    options = {"dtype": dtype, "log_factor": factor, "statistics": _STATISTICS}
    stats, log_scale = batch_stats(model, config, params, frozen, shared, **options)
    top = top_logits(hidden, frozen.unembedding, count, bias=frozen.bias, softcap=model.logit_softcap)
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
    alternatives: int = 5,
    batch_size: int = 8,
) -> dict[str, Any]:
    """The first sequences, token by token, under two heads.

    Args:
        lm: the frozen model, with a tokenizer.
        sequences: from which the first are taken until they hold `tokens` targets that count.
        before, after: the heads to set side by side.
        tokens: how many to keep, at most; whole sequences but for the last.
        alternatives: how many of the most likely tokens to name.
        batch_size: sequences a step.

    Returns:
        `{"windows": [[token, ...], ...]}`, a token being `text`, what stands there; `scored`, whether it was predicted
        (a prompt is not), and if so `right`; `confidence`, `probability` (of the text that stands there), `entropy`
        (nats), each `[before, after]`; `temperature` (after); and `top`, `[text, before, after]` of the likeliest.
    """
    enough = np.cumsum(sequences.where.sum(axis=1))
    sequences = sequences.take(slice(int(np.searchsorted(enough, tokens)) + 1))
    count = min(alternatives, lm.config.vocab_size)
    found = []
    for head in (before, after):
        frozen, parts = freeze(lm, head=head.config), []
        for batch, real in eval_batches(sequences.arrays(), batch_size):
            args = (head.params, jnp.float32(head.log_factor), frozen, batch)
            out = to_host(_sample_batch(lm.config, head.config, lm.dtype, count, *args))
            parts.append(jax.tree.map(lambda x, n=real: x[:n], out))
        found.append(jax.tree.map(lambda *x: np.concatenate(x), *parts))
    (one, argmax, ids), (two, _, _) = found

    rows, left = [], tokens
    for s in range(len(sequences.tokens)):
        row: list[dict[str, Any]] = []
        for t in np.flatnonzero(sequences.segment_ids[s] > 0):
            if not left:
                break
            previous, target = int(sequences.tokens[s, t]), int(sequences.targets[s, t])
            entry: dict[str, Any] = {"text": text_after(lm.tokenizer, previous, target), "scored": False}
            if sequences.where[s, t]:
                left -= 1
                pairs = [[_short(x[k][s, t]) for x in (one, two)] for k in range(3)]
                entry |= dict(zip(("confidence", "probability", "entropy"), pairs, strict=True))
                entry |= {"scored": True, "right": bool(argmax[s, t] == target), "temperature": _short(two[3][s, t])}
                entry["top"] = [
                    [text_after(lm.tokenizer, previous, int(i)), _short(p), _short(q)]
                    for i, p, q in zip(ids[s, t], one[4][s, t], two[4][s, t], strict=True)
                ]
            row.append(entry)
        rows.append(row)
    return {"windows": rows}


def _short(value: Any) -> float:
    return float(f"{float(value):.4g}")


def text_after(tokenizer: "PreTrainedTokenizerBase", previous: int, token: int) -> str:
    """What a token adds to the text: its spaces depend on the tokenizer, so it is decoded behind the one before it."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    start, both = str(decode([previous])), str(decode([previous, token]))
    return both[len(start) :] if both.startswith(start) else str(decode([token]))
