"""Generation of text with a calibrated confidence for every token, and of sequences sampled from a model."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from calibjax.data import Sequences, eval_batches
from calibjax.data.chat_template import Tokenizer
from calibjax.data.sequences import check_in_vocabulary
from calibjax.heads import FittedHead, HeadArrays, HeadConfig
from calibjax.kernels.stats import first_equal
from calibjax.models import decoder
from calibjax.models.calibrated import check_base
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import FrozenArrays, extend_log_scale, frozen_arrays, stats_at
from calibjax.models.gguf import is_gguf
from calibjax.models.model import LanguageModel
from calibjax.models.tokenizer import gguf_stop_tokens
from calibjax.nn.kv_cache import Cache, fork
from calibjax.runtime.arrays import as_array, round_up
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import on_first, to_host
from calibjax.runtime.errors import INT_MAX, UserError, shortened
from calibjax.runtime.files import new_file, read_json
from calibjax.runtime.options import Count, Range, check_value
from calibjax.runtime.sharding import batch_shards

# Prompts and stop tokens are padded to multiples of these, so that similar calls use one program.
_PROMPT_COLUMNS, _STOP_TOKENS = 32, 8
TEMPERATURES = (1e-4, 1e4)
"""Smallest and largest sampling temperature: a logit divided by either is finite in float32."""
TopP = Annotated[float, Range(0, 1, open="low")]


class Generation(NamedTuple):
    """Generated tokens, up to and including the first stop token of each row; `[B, N]` each.

    Attributes:
        tokens: int32; -1 after the end of a row.
        base_log_probs: log-probability of each token under the base model, however sampled, nats; 0 after the end.
        confidence: calibrated probability of each token over the whole vocabulary, in [0, 1]; 0 after the end.
        temperature: temperature of the head at each token; 1 without a head and after the end.
        where: True up to the end of a row.
    """

    tokens: Int[Array, "B N"]
    base_log_probs: Float[Array, "B N"]
    confidence: Float[Array, "B N"]
    temperature: Float[Array, "B N"]
    where: Bool[Array, "B N"]

    def __repr__(self) -> str:
        return f"Generation(tokens {list(getattr(self.tokens, 'shape', ()))})"

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Each row as text, without special tokens."""
        rows = (row[row >= 0].tolist() for row in np.asarray(self.tokens))
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


_AFTER_END = Generation._make([np.int32(-1), np.float32(0), np.float32(0), np.float32(1), np.bool_(False)])
"""Each field after the end of a row: tokens -1, base_log_probs and confidence 0, temperature 1, where False."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """How `generate` chooses each token: by default the most likely one.

    Attributes:
        temperature: 0 for the most likely token; otherwise within `TEMPERATURES`, in addition to a head's own.
        top_k: sample from the `top_k` most likely tokens, at least 1; default: all. See `sampling_logits`.
        top_p: sample from the fewest tokens whose probabilities sum to `top_p`, in (0, 1]; default: all.
        calibrated: sample from the calibrated distribution; otherwise a head changes the confidence and not the text.
        key: of `jax.random`, required above temperature 0. Samples depend only on it, the prompt and its prompt seed.
        num_samples: samples of each prompt, K; each prompt is processed once.
        prompt_seeds: an integer for each prompt, which is folded into the key; default: the prompt's index.

    Raises:
        UserError: a value is out of range, or is given without a temperature.
    """

    temperature: float = 0.0
    top_k: Count | None = None
    top_p: TopP | None = None
    calibrated: bool = False
    key: PRNGKeyArray | None = None
    num_samples: Count = 1
    prompt_seeds: tuple[int, ...] | None = None

    def __post_init__(self):
        low, high = TEMPERATURES
        if self.temperature != 0 and not low <= self.temperature <= high:
            raise UserError(f"temperature: expected 0 or a number from {low:g} to {high:g}, got {self.temperature}.")
        check_value("top_k", Count | None, self.top_k)
        check_value("top_p", TopP | None, self.top_p)
        check_value("num_samples", Count, self.num_samples)
        if self.temperature:
            if self.key is None:
                raise UserError("key: sampling needs one, such as jax.random.key(0); temperature=0 does not sample.")
        elif self.top_k or self.top_p or self.calibrated or self.num_samples > 1:
            options = "top_k, top_p, num_samples above 1 and calibrated (--sample-calibrated)"
            raise UserError(f"{options} need a temperature above 0.")


def sampling_logits(
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""] | float = 1.0,
    top_k: int | None = None,
    top_p: Float[Array, ""] | float | None = None,
) -> Float[Array, "B V"]:
    """Logits of the distribution to sample from, float32: `-inf` for tokens that are excluded.

    As in transformers: divided by the temperature, cut to the `top_k` largest (Fan et al., 2018, arXiv 1805.04833,
    section 5.4), then to the fewest whose probabilities sum to `top_p` at least (Holtzman et al., 2020,
    arXiv 1904.09751, section 3.1). A token that ties with the last of them stays. `top_k` is static.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
        >>> jnp.isfinite(sampling_logits(logits, top_p=0.7)).tolist()
        [[True, True, False]]
    """
    logits = logits / temperature
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered)
        larger = jnp.cumsum(probabilities, axis=-1) - probabilities
        count = jnp.maximum(jnp.sum(larger < top_p, axis=-1, keepdims=True), 1)
        logits = jnp.where(logits >= jnp.take_along_axis(ordered, count - 1, axis=-1), logits, -jnp.inf)
    return logits


class _Program(NamedTuple):  # static arguments of `_decode`
    config: DecoderConfig
    head: HeadConfig
    dtype: DTypeLike
    max_new_tokens: int
    top_k: int | None
    sample_calibrated: bool
    samples: int  # of each prompt


class _DecodeInputs(NamedTuple):
    frozen: FrozenArrays
    head: HeadArrays
    tokens: Any  # prompts [B, T]
    segment_ids: Any
    stop_tokens: Any  # [E], padded with -1, which is no token id
    prompt_seeds: Any  # [B]
    key: PRNGKeyArray
    temperature: Any  # None for the most likely token
    top_p: Any


_Caches = tuple[Cache | None, Cache | None]  # of the model and, if it attends, of the head; None before the prompts


class _State(NamedTuple):
    length: Int[Array, ""]  # tokens that every row has so far, those after its end included
    done: Bool[Array, " B"]
    generated: Generation
    caches: _Caches


@jax.jit(static_argnums=0)
def _decode(program: _Program, inputs: _DecodeInputs) -> Generation:
    """What `generate` returns: processes the prompts into a cache, then adds one token to every row at a time."""
    config, head, frozen = program.config, program.head, inputs.frozen
    fold_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    row_keys = fold_each(inputs.key, inputs.prompt_seeds)
    if program.samples > 1:
        row_keys = jax.vmap(fold_each, in_axes=(0, None))(row_keys, jnp.arange(program.samples)).ravel()

    def forward(tokens: Array, segments: Array, caches: _Caches = (None, None)) -> tuple[Array, Array, _Caches]:
        """Runs decoder and head on new tokens: logits and log_scale of the last column, and the updated caches."""
        cache, head_cache = caches
        hidden, cache = decoder.extend(config, frozen.params, tokens, cache, segment_ids=segments, dtype=program.dtype)
        log_scale, head_cache = extend_log_scale(
            config, head, inputs.head, frozen, hidden, segments, head_cache, dtype=program.dtype
        )
        logits = decoder.unembed(config, frozen.params, hidden[:, -1])
        return logits, log_scale[:, -1], (cache, head_cache)

    def choose_tokens(logits: Array, calibrated: Array, length: Array) -> Array:
        if inputs.temperature is not None:  # as jax.random.categorical, whose argmax is slow on CPUs
            drawn_from = calibrated if program.sample_calibrated else logits
            drawn_from = sampling_logits(drawn_from, inputs.temperature, program.top_k, inputs.top_p)
            # A key for each row: its samples do not depend on the other rows.
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, length)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
            logits = drawn_from + noise
        return first_equal(logits, jnp.max(logits, axis=-1))

    def add_token(state: _State, logits: Array, log_scale: Array, caches: _Caches) -> _State:
        calibrated = jnp.exp(log_scale)[:, None] * logits
        token = choose_tokens(logits, calibrated, state.length)
        active = ~state.done

        def log_prob(z: Array) -> Array:
            return jnp.take_along_axis(jax.nn.log_softmax(z), token[:, None], axis=-1)[:, 0]

        def store(columns: Array, new: Array, after_end: Array) -> Array:
            column = jnp.where(active, new, after_end)[:, None]
            return jax.lax.dynamic_update_slice_in_dim(columns, column, state.length, axis=1)

        new = Generation(
            tokens=token,
            base_log_probs=log_prob(logits),
            confidence=jnp.exp(log_prob(calibrated)),
            temperature=jnp.exp(-log_scale),
            where=active,
        )
        generated = jax.tree.map(store, state.generated, new, _AFTER_END)
        done = state.done | jnp.isin(token, inputs.stop_tokens)
        return _State(state.length + 1, done, generated, caches)

    def step(state: _State) -> _State:
        last = jax.lax.dynamic_slice_in_dim(state.generated.tokens, state.length - 1, 1, axis=1)
        segment_ids = (last >= 0).astype(jnp.int32)
        return add_token(state, *forward(jnp.maximum(last, 0), segment_ids, state.caches))

    def unfinished(state: _State) -> Array:
        return (state.length < program.max_new_tokens) & ~jnp.all(state.done)

    logits, log_scale, caches = forward(inputs.tokens, inputs.segment_ids)
    logits, log_scale = (jnp.repeat(x, program.samples, axis=0) for x in (logits, log_scale))
    columns = max(program.max_new_tokens - 1, 1)  # the last token needs no forward pass
    cache, head_cache = (None if cache is None else fork(cache, program.samples, columns) for cache in caches)
    shape = (len(logits), program.max_new_tokens)
    empty = jax.tree.map(lambda value: jnp.full(shape, value), _AFTER_END)
    start = _State(jnp.int32(0), jnp.zeros(len(logits), bool), empty, (cache, head_cache))
    start = add_token(start, logits, log_scale, start.caches)
    return jax.lax.while_loop(unfinished, step, start).generated


def generate(
    lm: LanguageModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    head: FittedHead | None = None,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] | None = None,
) -> Generation:
    """Continues prompts and returns the calibrated confidence of every token.

    `base_log_probs` and `confidence` come from the whole vocabulary: `sampling` only changes which tokens are chosen.
    Where the model was loaded on a mesh, rows are divided over its data and fsdp axes.

    Args:
        lm: the base model.
        prompts: texts or lists of token ids, none empty; they are padded on the left to a common width.
        head: head fitted on the model, with a temperature per token; None for the uncalibrated model.
        max_new_tokens: N, at least 1; with the longest prompt, at most the model's `max_positions`.
        sampling: how tokens are chosen.
        stop_tokens: ids that end a row, as its last token; () for none. Default: from the model's
            generation_config.json, or else the tokenizer's end of sequence.

    Returns:
        `Generation`, `[B, N]`; with `sampling.num_samples` K above 1 `[B·K, N]`, grouped by prompt.

    Raises:
        UserError: an argument is out of range, a prompt is too long, or the head is of another model or pools.
    """
    ids = _token_ids(lm, prompts)
    seeds = range(len(ids)) if sampling.prompt_seeds is None else sampling.prompt_seeds
    seeds = _whole_numbers("prompt_seeds", seeds)
    if len(seeds) != len(ids):
        raise UserError(f"prompt_seeds: expected one for each of {len(ids)} prompts, got {len(seeds)}.")
    if head is not None:
        check_base(lm, head)
        if head.config.pooling == "sequence":
            raise UserError("head: pooling 'sequence' needs a finished text; fit a head with pooling 'token'.")
    longest = max(map(len, ids))
    room = lm.config.max_positions - longest
    if room < 1:
        raise UserError(f"prompts: expected fewer than {lm.config.max_positions} tokens, got {longest}; cut it.")
    if not 1 <= max_new_tokens <= room:
        raise UserError(f"max_new_tokens: expected 1 to {room} after {longest} prompt tokens, got {max_new_tokens}.")
    if stop_tokens is None:
        stops = default_stop_tokens(lm)
    else:
        stops = _whole_numbers("stop_tokens", stop_tokens)
        check_in_vocabulary("stop_tokens", np.array(stops), lm.config.vocab_size)
    rows = round_up(len(ids), batch_shards(lm.mesh))
    width = round_up(longest, _PROMPT_COLUMNS)
    padded = [*ids, *[ids[-1]] * (rows - len(ids))]
    is_token = np.arange(width) >= width - np.array([len(row) for row in padded])[:, None]
    tokens = np.zeros(is_token.shape, np.int32)
    tokens[is_token] = np.concatenate(padded)
    if head is None:
        head = FittedHead.constant(lm)
    program = _Program(
        lm.config, head.config, lm.dtype, max_new_tokens, sampling.top_k, sampling.calibrated, sampling.num_samples
    )
    stop_padding = _STOP_TOKENS - len(stops) % _STOP_TOKENS
    inputs = _DecodeInputs(
        frozen=frozen_arrays(lm, head.config),
        head=head.arrays,
        tokens=tokens,
        segment_ids=is_token.astype(np.int32),
        stop_tokens=np.pad(np.array(stops, np.int32), (0, stop_padding), constant_values=-1),
        prompt_seeds=np.resize(seeds, rows).astype(np.int32),
        key=jax.random.key(0) if sampling.key is None else sampling.key,
        temperature=np.float32(sampling.temperature) if sampling.temperature else None,
        top_p=None if sampling.top_p is None else np.float32(sampling.top_p),
    )
    with lm.on_mesh():
        generated = _decode(program, inputs)
    real = len(ids) * sampling.num_samples
    return generated if rows == len(ids) else jax.tree.map(lambda x: x[:real], generated)


def default_stop_tokens(lm: LanguageModel) -> tuple[int, ...]:
    """The ids that end a text: of generation_config.json, a GGUF file, or else of the tokenizer."""
    if lm.path is not None and is_gguf(lm.path):
        return gguf_stop_tokens(lm.path)
    file = None if lm.path is None else lm.path / "generation_config.json"
    stops: Any = None
    if file is not None and file.is_file():
        try:
            stops = read_json(file).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file}: not a JSON object ({error}).") from error
    if stops is None and lm.has_tokenizer:
        stops = lm.tokenizer.eos_token_id
    if not isinstance(stops, list):
        stops = [] if stops is None else [stops]
    if not all(type(stop) is int and 0 <= stop <= INT_MAX for stop in stops):
        raise UserError(f"{file}: eos_token_id: expected token ids, got {shortened(stops)}.")
    return tuple(stops)


def _token_ids(lm: LanguageModel, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not len(prompts):
        raise UserError(f"prompts: expected a list of texts or of lists of token ids, got {prompts!r}.")
    ids = []
    for number, prompt in enumerate(prompts):
        name = f"prompts: number {number}"
        row = _whole_numbers(name, lm.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        if not row:
            raise UserError(f"{name} has no tokens, expected at least one; leave it out.")
        check_in_vocabulary(name, np.array(row), lm.config.vocab_size)
        ids.append(row)
    return ids


def _whole_numbers(name: str, values: Any) -> list[int]:
    """The values as integers; raises `UserError` for fractions, and for what int32 does not hold."""
    numbers: Any = None
    with contextlib.suppress(ValueError):  # rows of different lengths
        numbers = as_array(values).tolist()
    if not isinstance(numbers, list) or not all(type(n) is int and abs(n) <= INT_MAX for n in numbers):
        raise UserError(f"{name}: expected a list of whole numbers of at most {INT_MAX}, got {shortened(values)}.")
    return numbers


def sample_sequences(
    lm: LanguageModel,
    sequences: Sequences,
    *,
    prompt_tokens: int = 1,
    temperature: float = 1.0,
    batch_size: int = 16,
    context: RunContext,
) -> Sequences:
    """Keeps the first `prompt_tokens` of every sequence and samples the rest from the model, up to a stop token.

    Returns sequences of the same shape, one text each, padded at the end; `where` is False for targets that are tokens
    of the prompt. Temperature 0 decodes greedily. `context` gives the seed, the progress bar and its title.
    """
    count, length = sequences.tokens.shape
    if not 1 <= prompt_tokens <= length:
        raise UserError(f"prompt_tokens: expected 1 to {length}, the sequences' inputs, got {prompt_tokens}.")
    if (sequences.segment_ids[:, prompt_tokens - 1] != 1).any():
        raise UserError(f"prompt_tokens: some sequences begin with fewer than {prompt_tokens} tokens of a text.")
    stops = default_stop_tokens(lm)
    sampled = np.empty((count, length + 1), np.int32)  # -1 after the end
    sampled[:, :prompt_tokens] = sequences.tokens[:, :prompt_tokens]
    bar = context.bar(title=context.title or "sampling", unit="sequence", total=count)
    for number, begin in enumerate(range(0, count, batch_size)):
        rows = np.arange(begin, begin + batch_size) % count  # the last batch is filled up to one shape for all
        key = jax.random.fold_in(jax.random.key(context.seed), number) if temperature else None
        generated = generate(
            lm,
            sampled[rows, :prompt_tokens].tolist(),
            max_new_tokens=length + 1 - prompt_tokens,
            sampling=Sampling(temperature=temperature, key=key),
            stop_tokens=stops,
        )
        drawn = to_host(generated.tokens)[: count - begin]
        sampled[begin : begin + batch_size, prompt_tokens:] = drawn
        bar.update(len(drawn))
    bar.close()
    inputs = sampled[:, 1:] >= 0  # an input is valid if it has a target
    return Sequences(
        tokens=sampled[:, :-1] * inputs,
        targets=sampled[:, 1:] * inputs,
        where=inputs & (np.arange(length) >= prompt_tokens - 1),
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
    prompt_tokens: int = 1,
    batch_size: int = 16,
    context: RunContext,
) -> Sequences:
    """Replaces a fraction in [0, 1] of the sequences, chosen by the seed, with samples; see `sample_sequences`.

    The samples are stored in `directory`, as `samples.npz`, and reused when a run with the same sequences resumes.
    """
    order = np.random.default_rng(context.seed).permutation(len(sequences.tokens))
    rows = np.sort(order[: round(fraction * len(order))])
    if not len(rows):
        return sequences
    file = directory / "samples.npz"
    data = array_hash(sequences._asdict())
    made_of = json.dumps([lm.fingerprint, str(lm.dtype), fraction, prompt_tokens, batch_size, context.seed, data])
    drawn = None
    if file.is_file():
        with np.load(file) as stored:
            if str(stored["made_of"]) == made_of:
                drawn = Sequences(**{name: stored[name] for name in Sequences._fields})
    if drawn is None:
        chosen = sequences.take(rows)
        drawn = sample_sequences(lm, chosen, prompt_tokens=prompt_tokens, batch_size=batch_size, context=context)
        arrays: Any = {"made_of": made_of, **drawn._asdict()}

        def save() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            with new_file(file) as fresh:
                np.savez_compressed(fresh, **arrays)

        on_first(save)
    mixed = Sequences(*(field.copy() for field in sequences))
    for field, values in zip(mixed, drawn, strict=True):
        field[rows] = values
    return mixed


@jax.jit(static_argnums=(0, 1))
def _log_probs(config: Any, dtype: Any, frozen: FrozenArrays, batch: Mapping[str, Any]):
    zeros = jnp.zeros(batch["where"].shape, jnp.float32)
    return stats_at(config, frozen, batch, zeros, dtype=dtype, statistics=("log_normalizer", "target_logit")).log_prob()


def log_probs(lm: LanguageModel, sequences: Sequences, *, batch_size: int = 16) -> Float[np.ndarray, "S T"]:
    """log p of every target under the model, nats, float32 `[S, T]`; 0 where `where` is False."""
    frozen = frozen_arrays(lm)
    batches = eval_batches(sequences.arrays(), batch_size)
    return np.concatenate([to_host(_log_probs(lm.config, lm.dtype, frozen, batch))[:real] for batch, real in batches])
