"""Running values of the statistics, in the sublanes or lanes of the kernels of the forward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.pallas_tpu import common

OUTPUTS = ("max_logit", "weight", "first", "second", "total", "target", "argmax")  # rows of the result


def dtype(name: str) -> Any:
    """Of a running value."""
    return jnp.int32 if name == "argmax" else jnp.float32


def states(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a kernel; `best` is the largest logit that a sublane or lane has seen."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "target", "argmax") if name in needed))


def initial(name: str, shape: tuple[int, ...]) -> Array:
    """A running value before the first logit."""
    return jnp.full(shape, stats.FLOOR if name in ("best", "top") else 0, dtype(name))


def with_best(state, pieces, places, start):
    """`state` after the maximum, and its index, of `pieces` of logits; arguments as of `added`."""
    best, updated = state["best"], {}
    if "argmax" in state:
        place = jnp.full(best.shape, common.NEVER, jnp.int32)
        for z, k in zip(pieces, places, strict=True):
            larger = z > best
            best, place = jnp.where(larger, z, best), jnp.where(larger, k, place)
        updated["argmax"] = jnp.where(place > common.NEVER, place + start, state["argmax"])
    else:
        best = functools.reduce(jnp.maximum, pieces, best)
    return state | updated | {"best": best}


def moved(state, delta, scale):
    """`state` with its sums moved to another reference by `stats.moved`, and the factor exp(s·delta) of `weight`.

    `delta` is the old reference less the new one, at most 0 where the reference is a maximum; `scale` s·log₂e.
    """
    ratio = jnp.exp2(delta * scale)
    return state | stats.moved(state, delta, ratio), ratio


def added(state, pieces, raw, places, scale, target, reference):
    """`state` after adding pieces of logits, and their exponentials.

    `state` has running values [8, tokens] or [tokens, 128], see `states`; `pieces` are logits of the shape of one,
    `FLOOR` beyond the vocabulary, and `raw` the same as `total` adds them, 0 there; `places` is the index in the block
    of each piece's first column, `scale` s·log₂e, `target` the index of the target's logit relative to the block's
    first column and to the sublane or lane, `reference` the logit that is subtracted before the exponential.
    """
    new, weights = dict(state), []
    for z, addend, k in zip(pieces, raw, places, strict=True):
        shifted = z - reference
        e = jnp.exp2(shifted * scale)
        weights.append(e)
        new["weight"] = new["weight"] + e
        if "first" in state:
            moment = e * shifted
            new["first"] = new["first"] + moment
            if "second" in state:
                new["second"] = new["second"] + moment * shifted
        if "total" in state:
            new["total"] = new["total"] + addend
        if "target" in state:
            new["target"] = jnp.where(target == k, addend, new["target"])
    return new, weights


def write(moments_ref: Any, state: dict[str, Any], scale: Array, vocab_size: int) -> None:
    """The result [8, tokens] of a kernel: in each row a moment, merged from the references [8, tokens] in `state`."""
    state = {name: ref[...] for name, ref in state.items()}
    best, moments = state["best"], {"max_logit": jnp.max(state["best"], axis=0, keepdims=True)}
    if "weight" in state:
        state, _ = moved(state, best - moments["max_logit"], scale)
    sums = [name for name in ("weight", "first", "second", "total", "target") if name in state]
    moments |= {name: jnp.sum(state[name], axis=0, keepdims=True) for name in sums}
    if "argmax" in state:  # the lowest among the sublanes whose maximum is the best
        index = (state["argmax"] + jax.lax.broadcasted_iota(jnp.int32, best.shape, 0)).astype(jnp.float32)
        index = jnp.where(best == moments["max_logit"], index, float(vocab_size))
        moments["argmax"] = jnp.min(index, axis=0, keepdims=True)
    moments_ref[...] = jnp.zeros(moments_ref.shape, jnp.float32)
    for row, name in enumerate(OUTPUTS):
        if name in moments:
            moments_ref[row : row + 1, :] = moments[name]
