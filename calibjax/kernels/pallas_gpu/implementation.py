"""The two passes of `Implementation` for Hopper GPUs."""

from typing import Any

from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options, first_order
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.pallas_gpu import schedule
from calibjax.kernels.platforms import Platform
from calibjax.kernels.stats import Moments

_HOPPER = ("H100", "H200", "GH200", "H800", "H20")


class PallasGpu(Implementation):
    """Kernels with these `blocks`; with `interpret`, `plgpu.kernel` interprets them."""

    gives_expected_row = False
    accumulates = True

    def __init__(self, interpret: Any = None, blocks: schedule.Blocks | None = None) -> None:
        self.interpret, self.blocks = interpret, blocks or schedule.Blocks()

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        if not self.interpret:
            if platform.name != "gpu":
                raise NotImplementedError(f"it runs on Hopper GPUs, and the program is compiled for {platform.name}")
            if not set(_HOPPER) & set(platform.device_kind.split()):
                hopper = ", ".join(_HOPPER)
                raise NotImplementedError(f"it runs on Hopper GPUs ({hopper}), not on {platform.device_kind}")
        if options.scales is not None:
            raise NotImplementedError("the GPU kernel has one scale for each token; vocab_curves runs in chunked there")
        if options.chunk_size is not None:
            raise NotImplementedError("the GPU kernel does not take chunk_size")
        if inputs.hidden.dtype.name not in ("bfloat16", "float16"):
            raise NotImplementedError(f"the GPU kernel takes bfloat16 and float16, not {inputs.hidden.dtype.name}")
        tokens, vocab_size = inputs.hidden.shape[0], inputs.unembedding.shape[0]
        if tokens == 0:
            raise NotImplementedError("there are no tokens")
        pieces = schedule.choose(tokens, vocab_size, self.blocks, platform.device_kind).pieces
        columns = schedule.chunk_size(tokens, vocab_size, self.blocks, options.save_logits)
        source = " from saved exponentials" if options.save_logits else ""
        return (
            f"statistics by tiles of {schedule.TOKENS} tokens by {self.blocks.columns} columns in {pieces} "
            f"pieces of the vocabulary; gradients by dz of {columns} columns at a time{source}"
        )

    def saved_bytes(self, itemsize: int) -> float:
        return itemsize + 4 / schedule.SLICE  # an exponential, and its part of a float32 reference

    @first_order(4)
    def forward(self, options: Options, needed: frozenset[str], save: bool, inputs: Inputs) -> tuple[Moments, Any]:
        # Not above: Mosaic's GPU half takes as long to import as all kernels.
        from calibjax.kernels.pallas_gpu import forward

        return forward.moments(options, needed, save, inputs, self.blocks, self.interpret)

    @first_order(3)
    def backward(
        self, options: Options, wanted: frozenset[str], inputs: Inputs, cotangents: Cotangents, into: Gradients | None
    ) -> Gradients:
        is_closed = "hidden" in wanted and cotangents.hidden_is_closed(options)
        rest = wanted - {"hidden"} if is_closed else wanted
        gradients = into or Gradients()
        if rest:
            from calibjax.kernels.pallas_gpu import backward

            gradients = backward.gradients(options, rest, inputs, cotangents, into, self.blocks, self.interpret)
        return gradients._replace(hidden=closed_form_hidden(inputs, cotangents)) if is_closed else gradients
