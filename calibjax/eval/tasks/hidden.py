"""Hidden states of written answers, for the probes."""

import functools
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibjax.eval.answers.probes import FEATURES, Places
from calibjax.models import LanguageModel, decoder
from calibjax.runtime.distributed import to_host

_ROWS, _WIDTH = 16, 32  # rows a step, and what the width is a multiple of: few shapes


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _features(config: Any, dtype: Any, names: tuple[str, ...], params: Any, tokens: Any, start: Any, end: Any):
    segments = (jnp.arange(tokens.shape[1])[None, :] < end[:, None]).astype(jnp.int32)
    states = decoder.hidden_states(config, params, tokens, segment_ids=segments, layers="all", dtype=dtype)
    places = Places(start, end, tokens, functools.partial(decoder.unembed, config, params))
    return tuple(FEATURES[name](states.astype(jnp.float32), places) for name in names)


def answer_features(
    lm: LanguageModel, contexts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], names: Set[str]
) -> dict[str, Float[np.ndarray, "N F"]]:
    """Features of N answers, each read after its context by one forward pass.

    Args:
        lm: the frozen model.
        contexts, answers: token ids, none empty, that together fit the model.
        names: of `FEATURES`.

    Returns:
        name -> float32 `[N, F]`.
    """
    if not names or not len(contexts):
        return {name: np.zeros((0, 0), np.float32) for name in names}
    wanted = tuple(sorted(names))
    found: list[list[np.ndarray]] = [[] for _ in wanted]
    for batch, count in _batches(contexts, answers, lm.config.max_positions):
        values = to_host(_features(lm.config, lm.dtype, wanted, lm.params, *batch))
        for rows, value in zip(found, values, strict=True):
            rows.append(np.asarray(value)[:count])
    return {name: np.concatenate(rows) for name, rows in zip(wanted, found, strict=True)}


def _batches(
    contexts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], most: int
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]]:
    """Tokens, and where each answer starts and ends, of batches of `_ROWS` rows, the last of them repeated to fill up;
    each with the number of rows that count."""
    longest = max(len(pair[0]) + len(pair[1]) for pair in zip(contexts, answers, strict=True))
    width = min(-(-longest // _WIDTH) * _WIDTH, most)
    for begin in range(0, len(contexts), _ROWS):
        chosen = range(begin, min(begin + _ROWS, len(contexts)))
        rows = [*chosen, *[chosen[-1]] * (_ROWS - len(chosen))]
        start = np.array([len(contexts[row]) for row in rows], np.int32)
        end = start + np.array([len(answers[row]) for row in rows], np.int32)
        tokens = np.zeros((_ROWS, width), np.int32)
        for place, row in enumerate(rows):
            tokens[place, : end[place]] = [*contexts[row], *answers[row]]
        yield (tokens, start, end), len(chosen)
