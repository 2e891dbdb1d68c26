"""The two passes of `Implementation` for Hopper GPUs."""

import functools
from typing import Any, NamedTuple

from jaxtyping import Array

from calibjax.kernels.operator import Call, Gradients, Implementation, Model, Signal, closed_form_hidden
from calibjax.kernels.pallas_gpu import schedule
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments

_HOPPER = ("H100", "H200", "GH200", "H800", "H20")


class _Setup(NamedTuple):
    """What `make` fixes."""

    interpret: Any
    blocks: schedule.Blocks


def _schedule(setup: _Setup, model: Model, platform: Platform) -> schedule.Schedule:
    tokens, vocab_size = model.hidden.shape[0], model.unembedding.shape[0]
    return schedule.choose(tokens, vocab_size, setup.blocks, platform.device_kind)


def _check(setup: _Setup, call: Call, model: Model, platform: Platform) -> str:
    if not setup.interpret:
        if platform.name != "gpu":
            raise NotImplementedError(f"it runs on Hopper GPUs, and the program is compiled for {platform.name}")
        if not set(_HOPPER) & set(platform.device_kind.split()):
            raise NotImplementedError(f"it runs on Hopper GPUs ({', '.join(_HOPPER)}), not on {platform.device_kind}")
    if call.chunk_size is not None:
        raise NotImplementedError("the GPU kernel does not take chunk_size")
    if model.hidden.dtype.name not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the GPU kernel takes bfloat16 and float16, not {model.hidden.dtype.name}")
    if model.hidden.shape[0] == 0:
        raise NotImplementedError("there are no tokens")
    plan = _schedule(setup, model, platform)
    held = schedule.chunk_size(model.hidden.shape[0], model.unembedding.shape[0], plan.blocks)
    _, block = schedule.token_blocks(model.hidden.shape[0], model.unembedding.shape[0], plan.blocks)
    of_what = " from saved exponentials" if call.save_logits else ""
    of_what += ", multiplied by a kernel where it reaches filter_threshold" if call.filter_threshold else ""
    note = (
        f"statistics by tiles of {schedule.TOKENS} tokens by {plan.blocks.columns} columns in {plan.pieces} pieces of "
        f"the vocabulary; gradients by dz of {held} columns at a time{of_what}; dh that comes out of the forward pass "
        f"by the exponentials of {block} tokens at a time; not timed on a GPU yet"
    )
    copied = schedule.copied_bytes(*model.unembedding.shape)
    return note if not copied else f"{note}; {copied / 2**20:.0f} MiB to pad W to whole tiles of 8 x 64"


def _forward(
    setup: _Setup,
    call: Call,
    model: Model,
    scale: Array,
    targets: Array | None,
    needed: frozenset[str],
    save: bool,
) -> tuple[Moments, Any]:
    # Not above: Mosaic's GPU half takes as long to import as all kernels.
    from calibjax.kernels.pallas_gpu import d_hidden, forward

    if "rows" in needed:  # never with `save`: nothing is left for a second pass
        kind = platform().device_kind
        return d_hidden.moments(call, model, scale, targets, needed, setup.blocks, kind, setup.interpret), None
    plan = _schedule(setup, model, platform())
    return forward.moments(call, model, scale, targets, needed, save, plan, setup.interpret)


def _backward(
    setup: _Setup,
    call: Call,
    model: Model,
    signal: Signal,
    saved: Any,
    wanted: frozenset[str],
    into: Gradients | None = None,
) -> Gradients:
    closed = "hidden" in wanted and signal.hidden_is_closed(call)
    rest = wanted - {"hidden"} if closed else wanted
    found = into or Gradients()
    if rest:
        from calibjax.kernels.pallas_gpu import backward

        kind = platform().device_kind
        found = backward.gradients(call, model, signal, saved, rest, into, setup.blocks, kind, setup.interpret)
    return found._replace(hidden=closed_form_hidden(model, signal)) if closed else found


def make(interpret: Any = None, blocks: schedule.Blocks | None = None) -> Implementation:
    """The implementation.

    Args:
        interpret: as in `plgpu.kernel`, to run the kernel on a CPU.
        blocks: sizes of the kernel; None: those that were chosen for Hopper.
    """
    setup = _Setup(interpret, schedule.Blocks() if blocks is None else blocks)
    alone = Implementation(
        forward=functools.partial(_forward, setup),
        backward=functools.partial(_backward, setup),
        check=functools.partial(_check, setup),
        saved_bytes=schedule.SAVED_BYTES,
    )

    def adding(gradients: Gradients) -> Implementation:
        return alone._replace(backward=functools.partial(_backward, setup, into=gradients))

    return alone._replace(adding=adding)


IMPLEMENTATION = make()
