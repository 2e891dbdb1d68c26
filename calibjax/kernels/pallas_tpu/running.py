"""Running values of the statistics, in the sublanes or lanes of the kernels of the forward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.stats import FLOOR

OUTPUTS = ("max_logit", "weight", "first", "second", "total", "target", "argmax")  # rows of the result


def dtype(name: str) -> Any:
    """Of a running value."""
    return jnp.int32 if name == "argmax" else jnp.float32


def states(needed: frozenset[str]) -> tuple[str, ...]:
    """Running values of a kernel; `best` is the largest logit that a sublane or lane has seen."""
    return ("best", "weight", *(name for name in ("first", "second", "total", "target", "argmax") if name in needed))


def initial(name: str, shape: tuple[int, ...]) -> Array:
    """A running value before the first logit."""
    return jnp.full(shape, FLOOR if name in ("best", "top") else 0, dtype(name))


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
    """`state` with its sums moved to another reference, as in `stats.merge`, and the factor exp(s·delta) of `weight`.

    Args:
        state: "weight", and "first" and "second" where they are wanted; other entries stay as they are.
        delta: the old reference less the new one, at most 0 where the reference is a maximum.
        scale: s·log₂e.
    """
    ratio = jnp.exp2(delta * scale)
    weight, first, second = state["weight"], state.get("first"), state.get("second")
    new = {"weight": ratio * weight}
    if first is not None:
        new["first"] = ratio * (first + delta * weight)
        if second is not None:
            new["second"] = ratio * (second + delta * (2.0 * first + delta * weight))
    return state | new, ratio


def added(state, pieces, raw, places, scale, target, reference):
    """`state` after adding pieces of logits, and their exponentials.

    Args:
        state: name -> running value [8, tokens] or [tokens, 128], see `states`.
        pieces: logits, each of the shape of a running value; `FLOOR` beyond the vocabulary.
        raw: the same logits as `total` adds them: 0 beyond the vocabulary.
        places: index in the block of each piece's first column.
        scale: s·log₂e.
        target: index of the target's logit relative to the block's first column and to the sublane or lane.
        reference: logit that is subtracted before the exponential.
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


def named(kind: Any, **refs: Any) -> Any:
    """References of a kernel as a named tuple of this kind, with those called "state_..." as one dictionary `state`."""
    own = {name: refs.pop(name) for name in kind._fields if name in refs}
    return kind(**own, state={name.removeprefix("state_"): ref for name, ref in refs.items()})


def lowest(index: Array, is_best: Array, vocab_size: int) -> Array:
    """The lowest index, float32 [1, tokens], among the sublanes [8, tokens] whose maximum is the best."""
    index = index + jax.lax.broadcasted_iota(jnp.int32, index.shape, 0)
    return jnp.min(jnp.where(is_best, index.astype(jnp.float32), float(vocab_size)), axis=0, keepdims=True)


def write(moments_ref, moments: dict[str, Array]) -> None:
    """The result [8, tokens] of a kernel: each of the moments [1, tokens] is a row."""
    moments_ref[...] = jnp.zeros(moments_ref.shape, jnp.float32)
    for row, name in enumerate(OUTPUTS):
        if name in moments:
            moments_ref[row : row + 1, :] = moments[name]
