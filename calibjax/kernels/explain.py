"""`explain`: which implementation of `vocab_stats` runs for some arguments, and what it costs."""

from typing import Any

from calibjax.kernels import api, operator
from calibjax.kernels.operator import Call, Implementation
from calibjax.kernels.platforms import platform
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import STATISTICS


def explain(
    hidden: Any,
    unembedding: Any,
    targets: Any = None,
    *,
    implementation: str | None = None,
    sharding: VocabSharding | None = None,
    **options: Any,
) -> str:
    """Which implementation `vocab_stats` takes for these arguments, why, and what the call costs.

    Args:
        hidden, unembedding, targets, implementation, sharding, options: as for `vocab_stats`; any array may be a
            `jax.ShapeDtypeStruct`. Nothing is computed.

    Returns:
        Text: the sizes; every implementation in order, with what it would do or why it cannot; the wanted statistics
        with what each costs; the products N·D·V by what is differentiated.

    Raises:
        ValueError: as `vocab_stats` for shapes, dtypes and names that do not fit. A named implementation that cannot
            run the call is no error here: the text says so.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2304), (256000, 2304))]
        >>> text = explain(*shapes, implementation="reference", chunk_size=128)
        >>> print(text.splitlines()[-2].strip())
        reference   cannot run this call here: it is dense and takes no chunk_size.
    """
    call, model, wanted = api.plan(hidden, unembedding, targets, sharding=sharding, **options)
    try:
        chosen = api.choose(implementation, call, model, sharding)
    except NotImplementedError:
        chosen = None
    where = platform(None if sharding is None else sharding.mesh)
    tokens, (vocab_size, width) = model.hidden.shape[0], model.unembedding.shape
    lines = [
        f"vocab_stats: {tokens} tokens, D = {width}, V = {vocab_size}, {model.hidden.dtype}, "
        f"for {where.name} ({where.device_kind})"
    ]
    lines += [] if sharding is None else [sharding.describe(tokens, vocab_size)]
    lines += ["implementations, best first:"]
    for name in api.IMPLEMENTATIONS:
        try:
            note, able = api.check(name, call, model, sharding), True
        except NotImplementedError as reason:
            note, able = str(reason), False
        asked = implementation in (None, name)
        if name == chosen:
            note = f"chosen: {note}"
        elif not able:
            note = f"cannot run this call here: {note}"
        else:
            note = f"{'comes later' if asked else 'not asked for'} (could: {note})"
        lines.append(f"  {name:<11} {note}")
    if chosen is None:
        return "\n".join([*lines, "none that was asked for can run: vocab_stats raises NotImplementedError"])
    lines.append("statistics, beyond the one product:")
    lines += [f"  {name:<15} {_cost(name, call)}" for name in STATISTICS if name in wanted]
    ran = api.over_mesh(api.IMPLEMENTATIONS[chosen], sharding)
    if call.save_logits and ran is not None:
        size = ran.saved_bytes * tokens * vocab_size / 2**20
        lines.append(f"saved logits, where the backward pass needs them: {size:.0f} MiB over all devices")
    shared = ran is not None and ran.shares_logits(call, model, where)
    lines.append("products N·D·V, forward + backward, by what is differentiated:")
    for what, of_hidden, of_unembedding in (
        ("nothing, scale", False, False),
        ("hidden", True, False),
        ("unembedding", False, True),
        ("hidden and unembedding", True, True),
    ):
        forward, backward, filtered = _products(call, ran, shared, of_hidden, of_unembedding)
        note = f" ({filtered} of them only where p reaches filter_threshold)" if filtered else ""
        lines.append(f"  {what:<23} {forward} + {backward}{note}")
    return "\n".join(lines)


def _cost(name: str, call: Call) -> str:
    if name == "mean_logit":
        return "a row of W (on TPU an elementwise pass)" if call.softcap is None else "an elementwise pass"
    if name in ("log_normalizer", "max_logit"):
        return "a pass over the logits" if name == "log_normalizer" else "none: log_normalizer's pass"
    return {"target_logit": "a gather", "correct": "argmax's pass"}.get(name, "an elementwise pass")


def _products(
    call: Call, implementation: Implementation | None, shared: bool, of_hidden: bool, of_unembedding: bool
) -> tuple[int, int, int]:
    """Products N·D·V of the forward and the backward pass, and those of the latter with a filter; see `operator`."""
    if implementation is None:
        return 1, of_hidden + of_unembedding, 0
    rows = of_hidden and operator.takes_rows(call, implementation, alone=not of_unembedding)
    gradients = (of_hidden and not rows) + of_unembedding
    # One pass computes the logits anew for both, or each gradient has a pass of its own.
    again = min(gradients, 1) if shared else gradients
    return 1 + rows, gradients + (0 if call.save_logits else again), gradients if call.filter_threshold else 0
