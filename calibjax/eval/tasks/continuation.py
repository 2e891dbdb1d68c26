"""Continuations of contexts up to a stop sequence, in batches of few static shapes."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.models.generate import Sampling, default_stop_tokens, generate
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError

_STEP = 32  # tokens between two checks for a stop sequence


class GeneratedText(NamedTuple):
    """Continuation of a context.

    Attributes:
        text: text before the first stop sequence, without special tokens.
        tokens: ids of that text without trailing space; at least the first token, even if the text is empty. A token
            that holds the end of the text and the beginning of the stop sequence is included.
        log_probs: log-probabilities of these tokens under the base model, nats, however they were drawn.
        confidence: probability of each token, calibrated by the head; without a head, the base model's.
    """

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    confidence: tuple[float, ...]


def room_for_context(max_new_tokens: int, max_length: int) -> int:
    """The number of tokens of a context that fit together with `max_new_tokens`; raises `UserError` if none do."""
    if not 1 <= max_new_tokens < max_length:
        expected = f"expected 1 to {max_length - 1}, so that a context fits beside what is generated"
        raise UserError(f"max_gen_toks: {expected}; got {max_new_tokens}.")
    return max_length - max_new_tokens


def continue_contexts(
    lm: LanguageModel,
    contexts: Sequence[Sequence[int]],
    *,
    until: Sequence[str] = (),
    max_new_tokens: int = 256,
    batch_size: int = 16,
    sampling: Sampling = Sampling(),
    head: FittedHead | None = None,
) -> Iterator[tuple[int, GeneratedText]]:
    """Yields the index of each context and its continuation, batch by batch; `sampling.num_samples` of each context.

    Contexts are cut to the last tokens that leave room for `max_new_tokens`. A row ends at a stop sequence, at a stop
    token of the model or after `max_new_tokens`; rows that have ended are not computed further.

    Args:
        contexts: token ids, none empty, which is checked before the first batch.
        until: stop sequences; a space at the very start of the text does not count as one.
        batch_size: rows per step.
        sampling: how tokens are chosen, by default the most likely one; `prompt_seeds` has one seed per context.
        head: the head of the confidence, and of the distribution that `sampling.calibrated` draws from.
    """
    room = room_for_context(max_new_tokens, lm.config.max_positions)
    if any(not len(context) for context in contexts):
        raise UserError("expected contexts of at least one token; an empty text has none.")
    prompts = [list(context)[-room:] for context in contexts]
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))

    def batches() -> Iterator[tuple[int, GeneratedText]]:
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            seeds = numbers if sampling.prompt_seeds is None else [sampling.prompt_seeds[n] for n in numbers]
            seeded = dataclasses.replace(sampling, prompt_seeds=tuple(seeds))
            results = _continue(lm, [prompts[n] for n in numbers], until, max_new_tokens, batch_size, seeded, head)
            yield from zip([n for n in numbers for _ in range(sampling.num_samples)], results, strict=True)

    return batches()


def _continue(
    lm: LanguageModel,
    prompts: list[list[int]],
    until: Sequence[str],
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling,
    head: FittedHead | None,
) -> list[GeneratedText]:
    count, stops = sampling.num_samples, default_stop_tokens(lm)
    assert sampling.prompt_seeds is not None
    starts = [prompt for prompt in prompts for _ in range(count)]
    tokens: list[list[int]] = [[] for _ in starts]
    log_probs: list[list[float]] = [[] for _ in starts]
    confidence: list[list[float]] = [[] for _ in starts]
    row_seeds = [seed * count + k for seed in sampling.prompt_seeds for k in range(count)]
    inputs, seeds, samples, size = prompts, list(sampling.prompt_seeds), count, batch_size
    open_rows = list(range(len(starts)))
    for done in range(0, max_new_tokens, _STEP):
        if not open_rows:
            break
        missing = size - len(inputs)  # one shape, whatever the number of unfinished rows
        step_sampling = dataclasses.replace(
            sampling,
            key=None if sampling.key is None else jax.random.fold_in(sampling.key, done),
            num_samples=samples,
            prompt_seeds=(*seeds, *seeds[-1:] * missing),
        )
        padded = [*inputs, *inputs[-1:] * missing]
        step = min(_STEP, max_new_tokens - done)
        out = to_host(generate(lm, padded, head=head, max_new_tokens=step, sampling=step_sampling))
        columns = (out.tokens, out.base_log_probs, out.confidence)
        for place, row in enumerate(open_rows):
            for lists, values in zip((tokens, log_probs, confidence), columns, strict=True):
                lists[row] += values[place][out.where[place]].tolist()
        unstopped = [row for row in open_rows if tokens[row][-1] not in stops]
        open_rows = [row for row in unstopped if _first_stop(_decode(lm, tokens[row]), until) is None]
        # Later steps continue samples of their own, with a seed for each prompt and sample.
        inputs = [starts[row] + tokens[row] for row in open_rows]
        seeds = [row_seeds[row] for row in open_rows]
        samples, size = 1, batch_size * count
    return [_cut(lm, until, *row) for row in zip(tokens, log_probs, confidence, strict=True)]


def _decode(lm: LanguageModel, tokens: Sequence[int]) -> str:
    return str(lm.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _first_stop(text: str, until: Sequence[str]) -> int | None:
    # Tokens of byte pairs begin with the space before their word, which does not end an answer of one word.
    places = [text.find(stop, stop == " ") for stop in until if stop]
    return min((place for place in places if place >= 0), default=None)


def _cut(
    lm: LanguageModel, until: Sequence[str], tokens: list[int], log_probs: list[float], confidence: list[float]
) -> GeneratedText:
    text = _decode(lm, tokens)
    end = _first_stop(text, until)
    if end is None:
        count = max(len(tokens) - (tokens[-1] in default_stop_tokens(lm)), 1)
    else:
        text, count, needed = text[:end], 1, len(text[:end].rstrip())
        while count < len(tokens) and len(_decode(lm, tokens[:count])) < needed:
            count += 1
    return GeneratedText(text, tuple(tokens[:count]), tuple(log_probs[:count]), tuple(confidence[:count]))
