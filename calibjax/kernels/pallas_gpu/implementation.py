"""The two passes of `Implementation` for Hopper GPUs."""

import functools
from typing import Any, NamedTuple

from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options, first_order
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.pallas_gpu import schedule
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments

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
    _, block = schedule.token_blocks(tokens, vocab_size)
    source = " from saved exponentials" if options.save_logits else ""
    note = (
        f"statistics by tiles of {schedule.TOKENS} tokens by {chosen.blocks.columns} columns in {chosen.pieces} pieces "
        f"of the vocabulary; gradients by dz of {held} columns at a time{source}; dh that comes out of the forward "
        f"pass by the exponentials of {block} tokens at a time; not timed on a GPU yet"
    )
    copied = schedule.copied_bytes(*inputs.unembedding.shape)
    return note if not copied else f"{note}; {copied / 2**20:.0f} MiB to pad W to whole tiles of 8 x 64"


def _forward(
    setup: _Setup, options: Options, needed: frozenset[str], save: bool, inputs: Inputs
) -> tuple[Moments, Any]:
    # Not above: Mosaic's GPU half takes as long to import as all kernels.
    from calibjax.kernels.pallas_gpu import forward

    if "rows" in needed:  # never with `save`: nothing is left for a second pass
        kind = platform().device_kind
        return forward.moments_and_rows(options, needed, inputs, setup.blocks, kind, setup.interpret), None
    return forward.moments(options, needed, save, inputs, _schedule(setup, inputs, platform()), setup.interpret)


def _backward(
    setup: _Setup,
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Any,
    into: Gradients | None,
) -> Gradients:
    closed = "hidden" in wanted and cotangents.hidden_is_closed(options)
    rest = wanted - {"hidden"} if closed else wanted
    gradients = into or Gradients()
    if rest:
        from calibjax.kernels.pallas_gpu import backward

        machine = (setup.blocks, platform().device_kind, setup.interpret)
        gradients = backward.gradients(options, rest, inputs, cotangents, saved, into, *machine)
    return gradients._replace(hidden=closed_form_hidden(inputs, cotangents)) if closed else gradients


def make(interpret: Any = None, blocks: schedule.Blocks | None = None) -> Implementation:
    """The implementation.

    Args:
        interpret: as in `plgpu.kernel`, to run the kernel on a CPU.
        blocks: sizes of the kernel; None: those that were chosen for Hopper.
    """
    setup = _Setup(interpret, schedule.Blocks() if blocks is None else blocks)
    return Implementation(
        forward=first_order(functools.partial(_forward, setup), 3),
        backward=first_order(functools.partial(_backward, setup), 2),
        check=functools.partial(_check, setup),
        saved_bytes=schedule.saved_bytes,
        accumulates=True,
    )


IMPLEMENTATION = make()
