"""Which kernel runs, with which blocks: the two passes of `Implementation` for TPUs."""

import functools
from typing import Any, NamedTuple

from jaxtyping import Array

from calibjax.kernels.operator import Call, Gradients, Implementation, Model, Signal, closed_form_hidden
from calibjax.kernels.pallas_tpu import blocks, d_hidden, d_unembedding, forward, fused
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments


class _Setup(NamedTuple):
    """What `make` fixes."""

    interpret: Any
    preferences: blocks.Preferences

    def blocks(self, kernel: str, model: Model, device_kind: str, saved: bool) -> blocks.Blocks:
        (tokens, width), itemsize = model.hidden.shape, model.hidden.dtype.itemsize
        return blocks.choose(self.preferences[kernel], kernel, tokens, width, itemsize, device_kind, saved)


def _fused(setup: _Setup, call: Call, model: Model, device_kind: str) -> blocks.Blocks | None:
    """Blocks of the kernel for dh and dW together; None where each has a kernel of its own.

    That is with saved logits, of which each takes one product, and with a filter; on chips with two cores a device, of
    which it would use one; where the float32 dh would take more than 512 MiB; and where too few columns fit on the
    chip.
    """
    refused = "fused" not in setup.preferences or 4 * model.hidden.size > 2**29
    if refused or call.save_logits or call.filter_threshold or blocks.two_cores(device_kind):
        return None
    try:
        size = setup.blocks("fused", model, device_kind, saved=False)
    except NotImplementedError:
        return None
    width, itemsize = model.hidden.shape[1], model.hidden.dtype.itemsize
    columns = size.columns * blocks.pieces(size, width, itemsize, device_kind)
    return size if columns >= blocks.least_columns(itemsize) else None


def _check(setup: _Setup, call: Call, model: Model, platform: Platform) -> str:
    if platform.name != "tpu" and not setup.interpret:
        raise NotImplementedError(f"it runs on TPUs, and the program is compiled for {platform.name}")
    if call.chunk_size is not None:
        raise NotImplementedError("the TPU kernels do not take chunk_size")
    if model.hidden.dtype.name not in ("bfloat16", "float32"):
        raise NotImplementedError(f"the TPU kernels take bfloat16 and float32, not {model.hidden.dtype.name}")
    if model.hidden.shape[0] == 0:
        raise NotImplementedError("there are no tokens")
    kernels = [kernel for kernel in setup.preferences if kernel != "fused"]
    chosen = {kernel: setup.blocks(kernel, model, platform.device_kind, call.save_logits) for kernel in kernels}
    size = chosen["statistics"]
    note = f"blocks of {size.tokens} tokens by {size.columns} columns, in units of {size.unit}"
    if _fused(setup, call, model, platform.device_kind) is None:
        return note
    mebibytes = 4 * model.hidden.size / 2**20
    return f"{note}; where dh and dW both wait for the backward pass, {mebibytes:.0f} MiB for a float32 dh"


def _shares_logits(setup: _Setup, call: Call, model: Model, platform: Platform) -> bool:
    return _fused(setup, call, model, platform.device_kind) is not None


def _forward(
    setup: _Setup,
    call: Call,
    model: Model,
    scale: Array,
    targets: Array | None,
    needed: frozenset[str],
    save: bool,
) -> tuple[Moments, Array | None]:
    kernel = "rows" if "rows" in needed else "statistics"
    size = setup.blocks(kernel, model, platform().device_kind, save)
    return forward.moments(call, model, scale, targets, needed, save, size, setup.interpret)


def _backward(
    setup: _Setup, call: Call, model: Model, signal: Signal, saved: Array | None, wanted: frozenset[str]
) -> Gradients:
    kind, has_saved = platform().device_kind, saved is not None
    hidden = None
    if "hidden" in wanted:
        both = _fused(setup, call, model, kind) if "unembedding" in wanted else None
        if both is not None and not signal.hidden_is_closed(call):
            return fused.gradients(call, model, signal, both, wanted, kind, setup.interpret)
        if signal.hidden_is_closed(call):
            hidden = closed_form_hidden(model, signal)
        else:
            size = setup.blocks("rows", model, kind, has_saved)
            hidden = d_hidden.gradient(call, model, signal, saved, size, setup.interpret)
    rows = bias = None
    if wanted & {"unembedding", "bias"}:
        size = setup.blocks("unembedding", model, kind, has_saved)
        rows, bias = d_unembedding.gradients(call, model, signal, saved, size, wanted, setup.interpret)
    return Gradients(hidden, rows, bias)


def make(interpret: Any = False, preferences: blocks.Preferences = blocks.PREFERENCES) -> Implementation:
    """The implementation.

    Args:
        interpret: as in `pl.pallas_call`, such as `pltpu.InterpretParams()`, to run the kernels on a CPU.
        preferences: blocks to choose among, as in `blocks.PREFERENCES`.
    """
    setup = _Setup(interpret, preferences)
    return Implementation(
        forward=functools.partial(_forward, setup),
        backward=functools.partial(_backward, setup),
        check=functools.partial(_check, setup),
        rows_first=True,
        shares_logits=functools.partial(_shares_logits, setup),
    )


IMPLEMENTATION = make()
