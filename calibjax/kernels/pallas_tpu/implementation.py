"""The two passes of `Implementation` for TPUs: the choice of kernels and of their blocks."""

import functools
from typing import Any, NamedTuple

from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options, first_order
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.pallas_tpu import blocks
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments


class _Setup(NamedTuple):
    """The arguments of `make`."""

    interpret: Any
    preferences: blocks.Preferences

    def blocks(
        self, kernel: str, inputs: Inputs, device_kind: str, saved: bool = False, count: int = 1
    ) -> blocks.Blocks:
        (tokens, width), itemsize = inputs.hidden.shape, inputs.hidden.dtype.itemsize
        among = blocks.preferred(self.preferences, kernel, saved)
        return blocks.choose(among, kernel, (tokens, width, itemsize), device_kind, saved, count)


def _fused(setup: _Setup, options: Options, inputs: Inputs, device_kind: str) -> blocks.Blocks | None:
    """Blocks of the kernel for dh and dW together; None where each has a kernel of its own.

    That is with saved exponentials, of which each takes one product; on chips with two cores a device, of which it
    would use one; where the float32 dh would take more than 512 MiB; and where too few columns fit on the chip.
    """
    refused = "fused" not in setup.preferences or 4 * inputs.hidden.size > 2**29
    if refused or options.save_logits or blocks.two_cores(device_kind):
        return None
    try:
        size = setup.blocks("fused", inputs, device_kind, saved=False)
    except NotImplementedError:
        return None
    width, itemsize = inputs.hidden.shape[1], inputs.hidden.dtype.itemsize
    columns = size.columns * blocks.pieces(size, width, itemsize, device_kind)
    return size if columns >= blocks.least_columns(itemsize) else None


def _check(setup: _Setup, options: Options, inputs: Inputs, platform: Platform) -> str:
    if platform.name != "tpu" and not setup.interpret:
        raise NotImplementedError(f"it runs on TPUs, and the program is compiled for {platform.name}")
    if options.chunk_size is not None:
        raise NotImplementedError("the TPU kernels do not take chunk_size")
    if inputs.hidden.dtype.name not in ("bfloat16", "float32"):
        raise NotImplementedError(f"the TPU kernels take bfloat16 and float32, not {inputs.hidden.dtype.name}")
    if inputs.hidden.shape[0] == 0:
        raise NotImplementedError("there are no tokens")
    if options.scales is not None:
        size = setup.blocks("curves", inputs, platform.device_kind, count=len(options.scales))
        return f"blocks of {size.tokens} tokens by {size.columns} columns"
    kernels = ("statistics", "rows", "d_hidden", "unembedding")
    chosen = {kernel: setup.blocks(kernel, inputs, platform.device_kind, options.save_logits) for kernel in kernels}
    size = chosen["statistics"]
    note = f"blocks of {size.tokens} tokens by {size.columns} columns, in units of {size.unit}"
    if _fused(setup, options, inputs, platform.device_kind) is None:
        return note
    mebibytes = 4 * inputs.hidden.size / 2**20
    return f"{note}; where dh and dW both wait for the backward pass, {mebibytes:.0f} MiB for a float32 dh"


def _shares_logits(setup: _Setup, options: Options, inputs: Inputs, platform: Platform) -> bool:
    return _fused(setup, options, inputs, platform.device_kind) is not None


def _forward(
    setup: _Setup, options: Options, needed: frozenset[str], save: bool, inputs: Inputs
) -> tuple[Moments, Any]:
    # Not above: Mosaic takes as long to import as all else of the kernels.
    from calibjax.kernels.pallas_tpu import forward

    kernel = "curves" if options.scales else "rows" if "rows" in needed else "statistics"
    size = setup.blocks(kernel, inputs, platform().device_kind, save, len(options.scales or (1,)))
    return forward.moments(options, needed, save, inputs, size, setup.interpret)


def _backward(
    setup: _Setup,
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Any,
    into: Gradients | None,
) -> Gradients:
    from calibjax.kernels.pallas_tpu import common, d_hidden, d_unembedding, fused, gather

    kind, has_saved, interpret = platform().device_kind, saved is not None, setup.interpret
    unit = setup.blocks("statistics", inputs, kind, saved=True).unit if has_saved else 0
    hidden = None
    if "hidden" in wanted and cotangents.hidden_is_closed(options):
        find = None
        if common.Axes.of(*inputs.unembedding.shape).vocab:
            size = setup.blocks("statistics", inputs, kind)
            find = functools.partial(gather.rows, inputs.unembedding, blocks=size, interpret=interpret)
        hidden = closed_form_hidden(inputs, cotangents, find)
    elif "hidden" in wanted:
        both = None if has_saved or "unembedding" not in wanted else _fused(setup, options, inputs, kind)
        if both is not None:
            return fused.gradients(options, wanted, inputs, cotangents, both, interpret)
        size = setup.blocks("d_hidden", inputs, kind, has_saved)
        hidden = d_hidden.gradient(options, inputs, cotangents, saved, (size, unit), interpret)
    if not wanted & {"unembedding", "bias"}:
        return Gradients(hidden)
    sizes = (setup.blocks("unembedding", inputs, kind, has_saved), unit, blocks.buffers(kind))
    gradients = d_unembedding.gradients(options, wanted, inputs, cotangents, saved, into, sizes, interpret)
    return gradients._replace(hidden=hidden)


def make(interpret: Any = False, preferences: blocks.Preferences = blocks.PREFERENCES) -> Implementation:
    """The implementation.

    Args:
        interpret: as in `pl.pallas_call`, such as `pltpu.InterpretParams()`, to run the kernels on a CPU.
        preferences: blocks to choose among, as in `blocks.PREFERENCES`.
    """
    setup = _Setup(interpret, preferences)
    return Implementation(
        forward=first_order(functools.partial(_forward, setup), 3),
        backward=first_order(functools.partial(_backward, setup), 2),
        check=functools.partial(_check, setup),
        rows_first=True,
        shares_logits=functools.partial(_shares_logits, setup),
        saved_bytes=blocks.saved_bytes,
        accumulates=True,
    )


IMPLEMENTATION = make()
