"""The two passes of `Implementation` for Hopper GPUs."""

import functools
from typing import Any, NamedTuple

from calibjax.kernels.contract import (
    BackwardRequest,
    Cotangents,
    ForwardRequest,
    ForwardResult,
    Gradients,
    Implementation,
    Inputs,
    Options,
    first_order,
)
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.pallas_gpu import schedule
from calibjax.kernels.platforms import Platform, platform

_HOPPER = ("H100", "H200", "GH200", "H800", "H20")


class _Setup(NamedTuple):
    """The arguments of `make`."""

    interpret: Any
    blocks: schedule.Blocks


def _schedule(setup: _Setup, inputs: Inputs, platform: Platform) -> schedule.Schedule:
    tokens, vocab_size = inputs.hidden.shape[0], inputs.unembedding.shape[0]
    return schedule.choose(tokens, vocab_size, setup.blocks, platform.device_kind)


def _check(setup: _Setup, options: Options, inputs: Inputs, platform: Platform) -> str:
    if not setup.interpret:
        if platform.name != "gpu":
            raise NotImplementedError(f"it runs on Hopper GPUs, and the program is compiled for {platform.name}")
        if not set(_HOPPER) & set(platform.device_kind.split()):
            raise NotImplementedError(f"it runs on Hopper GPUs ({', '.join(_HOPPER)}), not on {platform.device_kind}")
    if options.scales is not None:
        raise NotImplementedError("the GPU kernel has one scale for each token; vocab_curves runs in chunked there")
    if options.chunk_size is not None:
        raise NotImplementedError("the GPU kernel does not take chunk_size")
    if inputs.hidden.dtype.name not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the GPU kernel takes bfloat16 and float16, not {inputs.hidden.dtype.name}")
    tokens, vocab_size = inputs.hidden.shape[0], inputs.unembedding.shape[0]
    if tokens == 0:
        raise NotImplementedError("there are no tokens")
    chosen = _schedule(setup, inputs, platform)
    held = schedule.chunk_size(tokens, vocab_size, chosen.blocks)
    _, block = schedule.token_blocks(tokens, vocab_size, chosen.blocks)
    of_what = " from saved exponentials" if options.save_logits else ""
    of_what += ", multiplied by a kernel where it reaches filter_threshold" if options.filter_threshold else ""
    note = (
        f"statistics by tiles of {schedule.TOKENS} tokens by {chosen.blocks.columns} columns in {chosen.pieces} pieces "
        f"of the vocabulary; gradients by dz of {held} columns at a time{of_what}; dh that comes out of the forward "
        f"pass by the exponentials of {block} tokens at a time; not timed on a GPU yet"
    )
    copied = schedule.copied_bytes(*inputs.unembedding.shape)
    return note if not copied else f"{note}; {copied / 2**20:.0f} MiB to pad W to whole tiles of 8 x 64"


def _forward(setup: _Setup, request: ForwardRequest, inputs: Inputs) -> ForwardResult:
    # Not above: Mosaic's GPU half takes as long to import as all kernels.
    from calibjax.kernels.pallas_gpu import d_hidden, forward

    if "rows" in request.needed:  # never with `save`: nothing is left for a second pass
        kind = platform().device_kind
        return ForwardResult(d_hidden.moments(request, inputs, setup.blocks, kind, setup.interpret))
    return forward.moments(request, inputs, _schedule(setup, inputs, platform()), setup.interpret)


def _backward(
    setup: _Setup,
    request: BackwardRequest,
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Any,
    into: Gradients | None,
) -> Gradients:
    closed = "hidden" in request.wanted and cotangents.hidden_is_closed(request.options)
    rest = request.wanted - {"hidden"} if closed else request.wanted
    gradients = into or Gradients()
    if rest:
        from calibjax.kernels.pallas_gpu import backward

        launch = schedule.Launch(setup.blocks, platform().device_kind, setup.interpret)
        gradients = backward.gradients(request._replace(wanted=rest), inputs, cotangents, saved, into, launch)
    return gradients._replace(hidden=closed_form_hidden(inputs, cotangents)) if closed else gradients


def make(interpret: Any = None, blocks: schedule.Blocks | None = None) -> Implementation:
    """The implementation.

    Args:
        interpret: as in `plgpu.kernel`, to run the kernel on a CPU.
        blocks: sizes of the kernel; None: those that were chosen for Hopper.
    """
    setup = _Setup(interpret, schedule.Blocks() if blocks is None else blocks)
    return Implementation(
        forward=first_order(functools.partial(_forward, setup)),
        backward=first_order(functools.partial(_backward, setup)),
        check=functools.partial(_check, setup),
        saved_bytes=schedule.saved_bytes,
        accumulates=True,
    )


IMPLEMENTATION = make()
