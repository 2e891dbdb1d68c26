"""`explain`: which implementation of `vocab_stats` or `vocab_curves` runs for some arguments, and what it costs."""

from collections.abc import Sequence
from typing import Unpack

import jax
from jax.typing import ArrayLike

from calibjax.kernels import api
from calibjax.kernels.operator import Call, takes_rows
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import STATISTICS

_ArrayOrShape = ArrayLike | jax.ShapeDtypeStruct


def explain(
    hidden: _ArrayOrShape,
    unembedding: _ArrayOrShape,
    targets: _ArrayOrShape | None = None,
    *,
    bias: _ArrayOrShape | None = None,
    where: _ArrayOrShape | None = None,
    softcap: float | None = None,
    statistics: Sequence[str] | None = None,
    scales: tuple[float, ...] | None = None,
    sharding: VocabSharding | None = None,
    **execution: Unpack[api.Execution],
) -> str:
    """Explains which implementation `vocab_stats`, or `vocab_curves`, chooses, why, and what the call costs.

    Args:
        hidden, unembedding, targets, bias, where: as in `vocab_stats`, or a `jax.ShapeDtypeStruct` each.
        softcap, statistics, sharding, execution: as in `vocab_stats`.
        scales: those of `vocab_curves`, to explain that operator instead.

    Returns:
        Text: the sizes; every implementation in order, with what it would do or why it cannot; the wanted statistics
        with the cost of each; the products N·D·V by what is differentiated.

    Raises:
        ValueError: as `vocab_stats`, but not for a named implementation that cannot run the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2304), (256000, 2304))]
        >>> text = explain(*shapes, implementation="reference", chunk_size=128)
        >>> print(text.splitlines()[-2].strip())
        reference   cannot run this call here: it is dense and takes no chunk_size.
    """
    arrays = (hidden, unembedding, targets, bias, where)
    operator = "vocab_stats" if scales is None else "vocab_curves"
    dispatch, _ = api.prepare(arrays, softcap, statistics, sharding, execution, scales)
    try:
        chosen = dispatch.choose()
    except NotImplementedError:
        chosen = None
    options, shapes, machine = dispatch.options, dispatch.shapes, dispatch.platform()
    tokens, (vocab_size, width) = shapes.hidden.shape[0], shapes.unembedding.shape
    lines = [
        f"{operator}: {tokens} tokens, D = {width}, V = {vocab_size}, {shapes.hidden.dtype}, "
        f"for {machine.name} ({machine.device_kind})"
    ]
    lines += [] if sharding is None else [sharding.describe(tokens, vocab_size)]
    lines += ["implementations, best first:", *(_line(dispatch, name, chosen) for name in api.IMPLEMENTATIONS)]
    if chosen is None:
        return "\n".join([*lines, f"none that was requested can run: {operator} raises NotImplementedError"])
    if scales is not None:
        return "\n".join([*lines, f"1 product N·D·V and, for each logit, three sums at each of {len(scales)} scales"])
    lines.append("statistics, beyond the one product:")
    lines += [f"  {name:<15} {_cost(name, softcap)}" for name in STATISTICS if name in dispatch.wanted]
    call = dispatch.call(chosen)
    implementation = call.implementation
    if options.save_logits and implementation is not None:
        size = implementation.saved_bytes(shapes.hidden.dtype.itemsize) * tokens * vocab_size / 2**20
        lines.append(f"saved logits, where the backward pass needs them: {size:.0f} MiB over all devices")
    shared = implementation is not None and implementation.shares_logits(options, shapes, machine)
    lines.append("products N·D·V, forward + backward, by what is differentiated:")
    for what, d_hidden, d_unembedding in (
        ("nothing, scale", False, False),
        ("hidden", True, False),
        ("unembedding", False, True),
        ("hidden and unembedding", True, True),
    ):
        forward, backward = _products(call, shared, d_hidden, d_unembedding)
        lines.append(f"  {what:<23} {forward} + {backward}")
    return "\n".join(lines)


def _line(dispatch: api.Dispatch, name: str, chosen: str | None) -> str:
    try:
        note, able = dispatch.check(name), True
    except NotImplementedError as reason:
        note, able = str(reason), False
    if name == chosen:
        note = f"chosen: {note}"
    elif not able:
        note = f"cannot run this call here: {note}"
    else:
        requested = dispatch.implementation in (None, name)
        note = f"{'comes later' if requested else 'not requested'} (could: {note})"
    return f"  {name:<11} {note}"


def _cost(name: str, softcap: float | None) -> str:
    if name == "mean_logit":
        return "a row of W (on TPU an elementwise pass)" if softcap is None else "an elementwise pass"
    if name in ("log_normalizer", "max_logit"):
        return "a pass over the logits" if name == "log_normalizer" else "none: log_normalizer's pass"
    return {"target_logit": "a gather", "correct": "argmax's pass"}.get(name, "an elementwise pass")


def _products(call: Call, shared: bool, d_hidden: bool, d_unembedding: bool) -> tuple[int, int]:
    """Products N·D·V of the forward and the backward pass; see `operator`."""
    if call.implementation is None:
        return 1, d_hidden + d_unembedding
    rows = d_hidden and takes_rows(call, alone=not d_unembedding)
    gradients = (d_hidden and not rows) + d_unembedding
    # One pass computes the logits again for both, or each gradient has a pass of its own.
    again = min(gradients, 1) if shared else gradients
    return 1 + rows, gradients + (0 if call.options.save_logits else again)
