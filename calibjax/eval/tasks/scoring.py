"""Log-probabilities of given continuations under the base model and under heads, from one forward pass."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from calibjax.heads import FittedHead, HeadConfig
from calibjax.kernels import top_logits, vocab_stats
from calibjax.models import LanguageModel, decoder
from calibjax.models.calibrated import check_base
from calibjax.models.config import DecoderConfig
from calibjax.models.frozen import batch_hidden, batch_log_scale, extend_log_scale, frozen_arrays, vocab_options
from calibjax.nn.kv_cache import Cache, fork
from calibjax.runtime.arrays import round_up
from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import batch_shards, divide_rows, take_states

_POSITIONS_AT_A_TIME = 64  # positions whose logits are computed at a time
_MAX_GROWTH = 4  # most tokens of a row that several requests share, as a multiple of the tokens of its first
_WIDE = 512
"""Tokens of a row beyond which a step has fewer rows, so that few long rows do not pad many."""
_MIN_FILLED = 0.8  # least part of a step after a prefix that holds tokens, where it has more than one row
_MIN_PREFIX = 128  # fewest tokens of a prefix that is run once, and whose keys and values are kept
_FULL = 256  # columns of a row after a prefix; more where one request has more
_OPEN_ROWS = 16  # rows after a prefix that a request can still join


class Continuation(NamedTuple):
    """Tokens to score, and the context before them; neither is empty."""

    context: Sequence[int]
    tokens: Sequence[int]


class Score(NamedTuple):
    """Score of one continuation of n tokens under M heads, float32, nats.

    Attributes:
        log_probs: log-probability of each token given what stands before it.
        greedy: whether each token is the most likely one, the same for every head.
        cut: how many tokens at the start of the context the model could not read.
        distributions: of the distribution of each token the entropy, and the log-probabilities of the `top_k` most
            likely tokens, largest first; empty if `top_k` is 0.
    """

    log_probs: Float[np.ndarray, "M n"]
    greedy: Bool[np.ndarray, " n"]
    cut: int
    distributions: Float[np.ndarray, "M _ n"]


class _Row(NamedTuple):
    """A tree of the tokens that requests read, in depth-first order. A column has a token, its position, and `until`:
    the first column after its branch. `columns`: number of a request -> the columns that predict its tokens."""

    tokens: list[int]
    positions: list[int]
    until: list[int]
    columns: dict[int, list[int]]


_Branch = tuple[tuple[int, ...], Mapping[int, int]]
"""A path of the tree: its tokens, and for each request that reads them (by number) how many at the end it scores."""


class _Group(NamedTuple):
    """Rows after a prefix that all of them have in common; their positions continue it."""

    prefix: tuple[int, ...]
    rows: list[_Row]


class _Program(NamedTuple):  # static arguments of the jitted functions
    config: DecoderConfig
    heads: tuple[HeadConfig, ...]
    dtype: DTypeLike


class Scorer:
    """Scores continuations in batches of a few static shapes.

    Requests that begin alike, such as the options of a question, share a row if that costs less: it holds once what
    they have in common, and each token attends to the tokens before it in its own request. A long prefix of many
    requests, such as the examples before all questions of a subject, is run once; its keys and values are kept, those
    of heads that attend too. With such heads, heads that pool over a sequence, or attention windows, each request has
    its own row, except that requests which read the same tokens (options of one token) share one. With the latter two,
    a row also holds the prefix. A request that is longer than the model reads loses tokens at its start.
    Log-probabilities are of the whole vocabulary, log softmax(s_t z_t).

    Args:
        lm: the frozen model; on a mesh, rows are divided over data and fsdp, and all processes have all scores.
        heads: name -> head; `FittedHead.constant(lm)` for the base model.
        batch_size: rows per step; fewer where they have more than 512 tokens.
        max_length: largest number of tokens of a row; None: `max_positions`.
    """

    def __init__(
        self, lm: LanguageModel, heads: Mapping[str, FittedHead], *, batch_size: int = 16, max_length: int | None = None
    ):
        longest = lm.config.max_positions
        if batch_size < 1:
            raise UserError(f"batch_size: expected at least 1, got {batch_size}.")
        if max_length is not None and not 1 <= max_length <= longest:
            raise UserError(f"max_length: expected 1 to {longest}, the positions of the model, got {max_length}.")
        for head in heads.values():
            check_base(lm, head)
        self.lm, self.max_length = lm, max_length or longest
        self._shards = batch_shards(lm.mesh)
        self.batch_size = round_up(batch_size, self._shards)
        configs = tuple(head.config for head in heads.values())
        self._program = _Program(lm.config, configs, lm.dtype)
        self._arrays = [head.arrays for head in heads.values()], frozen_arrays(lm, *configs)
        pools = any(config.pooling == "sequence" for config in configs)
        self._reads_rows = pools or any(config.attends for config in configs)
        self._keeps_prefixes = not pools and not any(lm.config.local_layers)
        self._shares = self._keeps_prefixes and not self._reads_rows

    def score(self, requests: Sequence[Continuation], top_k: int = 0) -> list[Score]:
        """Returns the scores of `stream` in the order of the requests."""
        scores = dict(self.stream(requests, top_k))
        return [scores[number] for number in range(len(requests))]

    def stream(self, requests: Sequence[Continuation], top_k: int = 0) -> Iterator[tuple[int, Score]]:
        """Yields the index of each request and its score, batch by batch, longest first.

        Raises `UserError` before any work for a request that cannot be scored.
        """
        for number, request in enumerate(requests):
            if not len(request.context) or not 1 <= len(request.tokens) <= self.max_length:
                expected = f"expected a context and 1 to {self.max_length} tokens after it, as the model reads"
                got = f"{len(request.context)} and {len(request.tokens)}"
                raise UserError(f"request {number}: {expected}, got {got}.")
            largest, vocab_size = max(*request.context, *request.tokens), self.lm.config.vocab_size
            if largest >= vocab_size:
                hint = "Does the text hold a token that was added to the tokenizer only?"
                raise UserError(f"request {number}: expected token ids below {vocab_size}, got {largest}. {hint}")
        return self._stream(requests, top_k)

    def _stream(self, requests: Sequence[Continuation], top_k: int) -> Iterator[tuple[int, Score]]:
        groups, rows = self._plan(requests)
        with self.lm.on_mesh():
            for start in range(0, len(groups), self._shards):
                yield from self._after_prefixes(requests, groups[start : start + self._shards], top_k)
            rows, start = sorted(rows, key=lambda row: -len(row.tokens)), 0
            while start < len(rows):
                width = self._width(len(rows[start].tokens))
                count = self.batch_size
                while count * width > self.batch_size * _WIDE and count % (2 * self._shards) == 0:
                    count //= 2
                yield from self._batch(requests, rows[start : start + count], (count, width), top_k)
                start += count

    def _width(self, length: int) -> int:
        """16, 24, 32, 48, 64, ... columns: at most 50% of padding, and few compiled programs."""
        power = 2 ** max((length - 1).bit_length(), 4)
        three_quarters = 3 * power // 4
        width = three_quarters if power > 16 and length <= three_quarters else power
        return min(width, self.max_length)

    def _after_prefixes(
        self, requests: Sequence[Continuation], groups: Sequence[_Group], top_k: int
    ) -> Iterator[tuple[int, Score]]:
        """The scores of some groups, one for each part of the mesh, whose prefixes are run at the same time."""
        shape = self._shards, self._width(max(len(group.prefix) for group in groups))
        tokens, segments = np.zeros((2, *shape), np.int32)
        for index, group in enumerate(groups):
            part = index, slice(shape[1] - len(group.prefix), None)  # on the right, where the rows continue them
            tokens[part], segments[part] = group.prefix, 1
        prefixes = divide_rows({"tokens": tokens, "segment_ids": segments})
        caches = _prefix_caches(self._program, *self._arrays, prefixes)
        widest = self._width(max(len(group.rows[0].tokens) for group in groups))
        empty = _Row([], [], [], {})
        parts = [group.rows for group in groups] + [[]] * (self._shards - len(groups))
        while any(parts):
            step, width = self._next_rows(parts, widest)
            rows = []
            for part in parts:
                rows += part[:step] + [empty] * (step - len(part))
            yield from self._batch(requests, rows, (len(rows), width), top_k, caches)
            parts = [part[step:] for part in parts]

    def _next_rows(self, parts: Sequence[Sequence[_Row]], widest: int) -> tuple[int, int]:
        """How many rows of each part are scored next, and in how many columns."""
        longest = max(len(rows[0].tokens) for rows in parts if rows)
        width = widest // 4 if 4 * longest <= widest else widest  # one more program, for short last rows
        fitting_rows = max(self.batch_size * _WIDE // (width * self._shards), 1)
        step = min(fitting_rows, 2 ** max(map(len, parts)).bit_length())
        while step > 1:
            most_tokens = max(sum(len(row.tokens) for row in rows[:step]) for rows in parts)
            if most_tokens >= _MIN_FILLED * step * width:
                break
            step //= 2
        return step, width

    def _plan(self, requests: Sequence[Continuation]) -> tuple[list[_Group], list[_Row]]:
        """Groups of requests with a long prefix, and rows of all others; those read alike share a branch of a row."""
        alike: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}
        for number, (context, tokens) in enumerate(requests):
            read = tuple((*context, *tokens[:-1])[-self.max_length :])
            scored = 0 if self._shares else len(tokens)  # heads of a whole row depend on what is scored in it
            alike.setdefault((read, scored), {})[number] = len(tokens)
        reads = [(read, numbers) for (read, _), numbers in sorted(alike.items())]
        groups, others = [], []
        for prefix, group in _by_prefix(reads) if self._keeps_prefixes else [(0, reads)]:
            rest = [(read[prefix:], numbers) for read, numbers in group]
            if prefix < _MIN_PREFIX or sum(len(read) for read, _ in rest) <= prefix:
                others += group
            else:
                rows = self._full_rows(rest, prefix)
                groups.append(_Group(group[0][0][:prefix], rows))
        groups.sort(key=lambda group: -len(group.prefix))
        return groups, _in_rows(others, self._joins)

    def _full_rows(self, reads: Sequence[_Branch], position: int) -> list[_Row]:
        """Reads in rows as wide as the longest read, at least `_FULL` columns where they share rows; longest first."""
        longest = max(len(read) for read, _ in reads)
        columns = min(max(self._width(longest), _FULL), self.max_length)

        def joins(*, shared: int, request: int, row: int, **_: int) -> bool:
            return self._shares and row + request - shared <= columns

        rows = _in_rows(reads, joins, position, open_rows=_OPEN_ROWS)
        return sorted(rows, key=lambda row: -len(row.tokens))

    def _joins(self, *, shared: int, request: int, row: int, first: int) -> bool:
        """Whether a request joins a row with whose last request it has its first `shared` tokens in common.

        `request`, `row`, `first`: number of tokens of the request, of the row and of the first request in it. The other
        tokens of the request attend to every column before them. A token costs about as much as attention to D columns.
        """
        new = request - shared
        columns_alone = request**2 / 2  # attended to in a row of its own
        more_columns = row * new + new**2 / 2 - columns_alone
        fits = row + new <= min(self.max_length, _MAX_GROWTH * first)
        return self._shares and fits and shared * self.lm.config.hidden_size >= more_columns

    def _batch(
        self,
        requests: Sequence[Continuation],
        rows: Sequence[_Row],
        shape: tuple[int, int],
        top_k: int,
        caches: "_Caches | None" = None,
    ) -> Iterator[tuple[int, Score]]:
        """The scores of some rows, padded to `shape`; `caches`: of the prefixes before them."""
        tokens, segments, positions, until = np.zeros((4, *shape), np.int32)
        until[:] = shape[1]
        where = np.zeros(tokens.shape, bool)
        coordinates, order = [], []
        for index, row in enumerate(rows):
            part = index, slice(len(row.tokens))
            tokens[part] = row.tokens
            positions[part] = row.positions
            until[part] = row.until
            segments[part] = 1
            for number, columns in row.columns.items():
                order.append((number, row.positions[columns[-1]] + 1))
                where[index, columns] = True
                coordinates += [(index, *pair) for pair in zip(columns, requests[number].tokens, strict=True)]
        batch = {"tokens": tokens, "segment_ids": segments, "positions": positions, "where": where}
        if caches is not None or any(min(row.until) < len(row.tokens) for row in rows):
            batch["until"] = until
        hidden, log_scales = _states(self._program, self._reads_rows, *self._arrays, divide_rows(batch), caches)
        score = functools.partial(_token_scores, self._program, top_k, *self._arrays, hidden, log_scales)
        padded = np.zeros((round_up(len(coordinates), _POSITIONS_AT_A_TIME), 3), np.int32)
        padded[: len(coordinates)] = coordinates
        blocks = padded.reshape(-1, _POSITIONS_AT_A_TIME, 3)
        pieces = to_host([score(block) for block in blocks])
        log_probs, greedy, distributions = (np.concatenate(part, axis=-1) for part in zip(*pieces, strict=True))
        start = 0
        for number, length in order:
            context, continuation = requests[number]
            scored = slice(start, start + len(continuation))
            cut = len(context) + len(continuation) - 1 - length
            yield number, Score(log_probs[:, scored], greedy[scored], cut, distributions[..., scored])
            start = scored.stop


def common_length(one: Sequence[int], two: Sequence[int]) -> int:
    """The number of tokens at the start of both."""
    for length, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return length
    return min(len(one), len(two))


def _by_prefix(reads: Sequence[_Branch]) -> list[tuple[int, list[_Branch]]]:
    """Groups reads in lexical order by a common prefix; a new group begins where less than half of the prefix is left.

    Returns groups with the lengths of their prefixes, which end before every column that predicts a scored token.
    """
    groups: list[tuple[int, list[_Branch]]] = []
    for read, numbers in reads:
        unscored = len(read) - max(numbers.values())
        if groups:
            prefix, group = groups[-1]
            common = min(prefix, unscored, common_length(group[-1][0], read))
            if common >= max(_MIN_PREFIX, prefix // 2):
                groups[-1] = common, [*group, (read, numbers)]
                continue
        groups.append((unscored, [(read, numbers)]))
    return groups


def _in_rows(
    reads: Sequence[_Branch], joins: Callable[..., bool], position: int = 0, *, open_rows: int = 1
) -> list[_Row]:
    """Reads in lexical order in rows whose first token has this position; for `joins` see `Scorer._joins`.

    A read joins one of the last `open_rows` rows: one that holds half of its tokens already, or else the fullest.
    """
    rows: list[list[_Branch]] = []
    sizes: list[int] = []
    for read, numbers in reads:
        candidates = []
        for index in range(max(len(rows) - open_rows, 0), len(rows)):
            shared = common_length(rows[index][-1][0], read)
            first = len(rows[index][0][0])
            if joins(shared=shared, request=len(read), row=sizes[index], first=first):
                candidates.append((2 * shared >= len(read), sizes[index], shared, index))
        if not candidates:
            rows.append([(read, numbers)])
            sizes.append(len(read))
        else:
            *_, shared, index = max(candidates)
            rows[index].append((read, numbers))
            sizes[index] += len(read) - shared
    return [_lay_out(row, position) for row in rows]


def _lay_out(group: Sequence[_Branch], position: int) -> _Row:
    row, before, path = _Row([], [], [], {}), (), []
    for read, numbers in [*group, ((), {})]:
        common = common_length(before, read)
        for column in path[common:]:
            row.until[column] = len(row.tokens)
        end = len(row.tokens) + len(read) - common
        path[common:] = range(len(row.tokens), end)
        row.tokens.extend(read[common:])
        row.positions.extend(range(position + common, position + len(read)))
        row.until.extend(path[common:])
        row.columns.update({number: path[-count:] for number, count in numbers.items()})
        before = read
    return row


class _Caches(NamedTuple):
    """Keys and values of A prefixes `[A, P]`: of the model, and of each head; None for a head that does not attend."""

    model: Cache
    heads: tuple[Cache | None, ...]


@jax.jit(static_argnums=0)
def _prefix_caches(program: _Program, head_arrays, frozen, batch) -> _Caches:
    """Runs the model and the heads that attend on one prefix in each row."""
    config, heads, dtype = program
    segment_ids = batch["segment_ids"]
    hidden, cache = decoder.extend(config, frozen.params, batch["tokens"], None, segment_ids=segment_ids, dtype=dtype)
    run = functools.partial(extend_log_scale, config, dtype=dtype)
    caches = [
        run(head, arrays, frozen, hidden, segment_ids)[1] if head.attends else None
        for head, arrays in zip(heads, head_arrays, strict=True)
    ]
    return _Caches(cache, tuple(caches))


@jax.jit(static_argnums=(0, 1))
def _states(program: _Program, reads_rows, head_arrays, frozen, batch, caches):
    """Returns hidden states `[B, T, D]`, and the log_scale of every head, `[M, B, T]`, if they read whole rows.

    The first B / A rows follow the first of A prefixes in the caches, and so on.
    """
    config, heads, dtype = program
    if caches is None:
        hidden = batch_hidden(config, frozen, batch, dtype)
        read = _log_scales(program, head_arrays, frozen, {**batch, "hidden": hidden}) if reads_rows else None
        return hidden, read
    rows, columns = batch["tokens"].shape
    after = functools.partial(fork, count=rows // len(caches.model.segment_ids), columns=columns)
    layout = {name: batch.get(name) for name in ("segment_ids", "positions", "until")}
    hidden, _ = decoder.extend(config, frozen.params, batch["tokens"], after(caches.model), **layout, dtype=dtype)
    if not reads_rows:
        return hidden, None
    run = functools.partial(extend_log_scale, config, dtype=dtype)
    scales = []
    for head, arrays, cache in zip(heads, head_arrays, caches.heads, strict=True):
        before = None if cache is None else after(cache)
        log_scale, _ = run(head, arrays, frozen, hidden, batch["segment_ids"], before)
        scales.append(log_scale)
    return hidden, jnp.stack(scales)


def _log_scales(program: _Program, head_arrays, frozen, batch):
    """log_scale of every head, `[M, B, T]`, from hidden states `[B, T, D]`."""
    pairs = zip(program.heads, head_arrays, strict=True)
    run = functools.partial(batch_log_scale, program.config, dtype=program.dtype)
    return jnp.stack([run(head, arrays, frozen, batch) for head, arrays in pairs])


@jax.jit(static_argnums=(0, 1))
def _token_scores(program: _Program, top_k, head_arrays, frozen, hidden, log_scales, coordinates):
    """log p `[M, R]`, whether the token is the most likely `[R]`, and distributions `[M, 1 + top_k, R]`."""
    row, position, token = coordinates.T
    states, unembedding = take_states(hidden, row, position), frozen.unembedding.astype(program.dtype)
    if log_scales is None:  # of heads that read nothing but the token's own state
        ones = jnp.ones((len(token), 1), jnp.int32)
        batch = {"hidden": states[:, None], "segment_ids": ones, "where": ones > 0}
        scales = _log_scales(program, head_arrays, frozen, batch)[..., 0]
    else:
        scales = log_scales[:, row, position]
    shared = vocab_options(program.config, frozen)
    largest, statistics = None, ("log_normalizer", "target_logit", "correct")
    if top_k:
        largest = top_logits(states, unembedding, min(top_k, len(unembedding)), **shared).logits.T
        statistics += ("expected_logit",)

    def head_outputs(log_scale) -> tuple[Any, Any, Any]:
        scale = jnp.exp(log_scale)
        stats = vocab_stats(states, unembedding, token, scale=scale, statistics=statistics, **shared)
        distribution = jnp.zeros((0, len(token)))
        if largest is not None:
            log_p = jnp.minimum(scale[None] * largest - stats.require("log_normalizer")[None], 0.0)
            distribution = jnp.concatenate([stats.entropy()[None], log_p])
        return stats.log_prob(), stats.require("correct"), distribution

    log_probs, correct, distributions = jax.lax.map(head_outputs, scales)
    return log_probs, correct[0], distributions
