"""Sequences sampled from the model itself, for likelihood objectives that require samples of the model."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax.data import Sequences, eval_batches
from calibjax.models import LanguageModel
from calibjax.models.frozen import Frozen, freeze, stats_at
from calibjax.models.generate import Sampling, default_stop_tokens, generate
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import on_first, to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import new_file


def sample_sequences(
    lm: LanguageModel,
    sequences: Sequences,
    *,
    prompt: int = 1,
    temperature: float = 1.0,
    batch_size: int = 16,
    context: RunContext | None = None,
) -> Sequences:
    """Continues the first tokens of every sequence with samples of the model, up to its length or the end of the text.

    Returns sequences of the same shape, one text each, padded at the end; `where` is False for the first `prompt`
    tokens. With temperature 0 they are continued greedily. `context` has the seed, progress and its title.
    """
    context = context or RunContext()
    count, length = sequences.tokens.shape
    if not 1 <= prompt <= length:
        raise UserError(f"--prompt-tokens: expected 1 to {length}, the sequences' inputs, got {prompt}.")
    if (sequences.segment_ids[:, prompt - 1] != 1).any():
        raise UserError(
            f"--prompt-tokens {prompt}: some sequences begin with fewer tokens of a text; give a smaller number."
        )
    stops = default_stop_tokens(lm)
    tokens = np.empty((count, length + 1), np.int32)
    tokens[:, :prompt] = sequences.tokens[:, :prompt]
    where = np.zeros((count, length + 1), bool)
    where[:, :prompt] = True
    bar = context.bar(title=context.title or "sampling", unit="sequence", total=count)
    for number, begin in enumerate(range(0, count, batch_size)):
        rows = np.arange(begin, begin + batch_size) % count  # the last batch is filled up to one shape for all
        key = jax.random.fold_in(jax.random.key(context.seed), number) if temperature else None
        generated = generate(
            lm,
            tokens[rows, :prompt].tolist(),
            max_new_tokens=length + 1 - prompt,
            sampling=Sampling(temperature=temperature, key=key),
            stop_tokens=stops,
        )
        drawn = to_host(generated.tokens)[: count - begin]
        real = len(drawn)
        where[begin : begin + real, prompt:] = drawn >= 0
        tokens[begin : begin + real, prompt:] = np.maximum(drawn, 0)
        bar.update(real)
    bar.close()
    inputs = where[:, 1:]  # an input is valid if it has a target
    return Sequences(
        tokens=tokens[:, :-1] * inputs,
        targets=tokens[:, 1:] * inputs,
        where=inputs & (np.arange(length) >= prompt - 1),
        segment_ids=inputs.astype(np.int32),
        positions=np.arange(length, dtype=np.int32) * inputs,
        source=sequences.source,
    )


def mix_samples(
    lm: LanguageModel,
    sequences: Sequences,
    fraction: float,
    *,
    directory: Path,
    prompt: int = 1,
    batch_size: int = 16,
    context: RunContext | None = None,
) -> Sequences:
    """Replaces a fraction in [0, 1] of the sequences, chosen by the seed, with samples; see `sample_sequences`.

    The samples are stored in `directory`, as `samples.npz`, and reused when a run resumes.
    """
    context = context or RunContext()
    order = np.random.default_rng(context.seed).permutation(len(sequences.tokens))
    rows = np.sort(order[: round(fraction * len(order))])
    if not len(rows):
        return sequences
    file, made_of = directory / "samples.npz", json.dumps([lm.fingerprint, fraction, prompt, batch_size, context.seed])
    drawn = None
    if file.is_file():
        with np.load(file) as stored:
            if str(stored["made_of"]) == made_of and np.array_equal(stored["rows"], rows):
                drawn = Sequences(**{name: stored[name] for name in Sequences._fields})
    if drawn is None:
        drawn = sample_sequences(lm, sequences.take(rows), prompt=prompt, batch_size=batch_size, context=context)
        on_first(functools.partial(_save, file, made_of=made_of, rows=rows, **drawn._asdict()))
    mixed = Sequences(*(field.copy() for field in sequences))
    for field, values in zip(mixed, drawn, strict=True):
        field[rows] = values
    return mixed


def _save(file: Path, **arrays: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with new_file(file) as fresh:
        np.savez_compressed(fresh, **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _log_probs(config: Any, dtype: Any, frozen: Frozen, batch: Mapping[str, Any]):
    wanted, zeros = ("log_normalizer", "target_logit"), jnp.zeros(batch["where"].shape, jnp.float32)
    return stats_at(config, frozen, batch, zeros, dtype=dtype, statistics=wanted).log_prob()


def log_probs(lm: LanguageModel, sequences: Sequences, *, batch_size: int = 16) -> Float[np.ndarray, "S T"]:
    """log p of every target under the model, nats, float32 `[S, T]`; 0 where `where` is False."""
    frozen = freeze(lm)
    parts = []
    for batch, real in eval_batches(sequences.arrays(), batch_size):
        parts.append(to_host(_log_probs(lm.config, lm.dtype, frozen, batch))[:real])
    return np.concatenate(parts)
