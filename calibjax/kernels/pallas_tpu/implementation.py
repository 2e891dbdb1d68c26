"""The two passes of `Implementation` for TPUs: the choice of kernels and of their blocks."""

from typing import Any

from calibjax.kernels.contract import Cotangents, Gradients, Implementation, Inputs, Options, first_order
from calibjax.kernels.operator import closed_form_hidden
from calibjax.kernels.pallas_tpu import blocks
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.stats import Moments


class PallasTpu(Implementation):
    """Kernels with blocks among `preferences`; with `interpret`, `pl.pallas_call` interprets them."""

    gradients_are_separate = True
    accumulates = True

    def __init__(self, interpret: Any = False, preferences: blocks.Preferences = blocks.PREFERENCES) -> None:
        self.interpret, self.preferences = interpret, preferences

    def _blocks(
        self, kernel: str, inputs: Inputs, device_kind: str, saved: bool = False, count: int = 1
    ) -> blocks.Blocks:
        (tokens, width), itemsize = inputs.hidden.shape, inputs.hidden.dtype.itemsize
        return blocks.choose(self.preferences, kernel, (tokens, width, itemsize), device_kind, saved, count)

    def check(self, options: Options, inputs: Inputs, platform: Platform) -> str:
        if platform.name != "tpu" and not self.interpret:
            raise NotImplementedError(f"it runs on TPUs, and the program is compiled for {platform.name}")
        if options.chunk_size is not None:
            raise NotImplementedError("the TPU kernels do not take chunk_size")
        if inputs.hidden.dtype.name not in ("bfloat16", "float32"):
            raise NotImplementedError(f"the TPU kernels take bfloat16 and float32, not {inputs.hidden.dtype.name}")
        if inputs.hidden.shape[0] == 0:
            raise NotImplementedError("there are no tokens")
        kind = platform.device_kind
        if options.scales is not None:
            size = self._blocks("curves", inputs, kind, count=len(options.scales))
            return f"blocks of {size.tokens} tokens by {size.columns} columns"
        for kernel in ("expected_row", "d_hidden", "d_unembedding"):
            self._blocks(kernel, inputs, kind, options.save_logits)
        size = self._blocks("statistics", inputs, kind, options.save_logits)
        return f"blocks of {size.tokens} tokens by {size.columns} columns, in units of {size.unit}"

    def saved_bytes(self, itemsize: int) -> float:
        return itemsize + 0.125  # an exponential, and its part of the references: 32 bytes for 256 columns

    @first_order(4)
    def forward(self, options: Options, needed: frozenset[str], save: bool, inputs: Inputs) -> tuple[Moments, Any]:
        # Imported here: Mosaic takes as long to import as the rest of the kernels.
        from calibjax.kernels.pallas_tpu import forward

        kernel = "expected_row" if "expected_row" in needed else "statistics"
        if options.scales:
            kernel = "curves"
        size = self._blocks(kernel, inputs, platform().device_kind, save, len(options.scales or (1,)))
        return forward.moments(options, needed, save, inputs, kernel, size, self.interpret)

    @first_order(3)
    def backward(
        self, options: Options, wanted: frozenset[str], inputs: Inputs, cotangents: Cotangents, into: Gradients | None
    ) -> Gradients:
        from calibjax.kernels.pallas_tpu import backward

        kind, saved = platform().device_kind, cotangents.saved is not None
        unit = self._blocks("statistics", inputs, kind, saved=True).unit if saved else 0

        def run(kernel: str, wanted: frozenset[str], into: Gradients | None) -> Gradients:
            sizes = (self._blocks(kernel, inputs, kind, saved), unit, blocks.buffers(kind))
            return backward.gradients(kernel, options, wanted, inputs, cotangents, into, sizes, self.interpret)

        hidden = None
        rest = wanted - {"hidden"}
        if "hidden" in wanted and cotangents.hidden_is_closed(options):
            hidden = closed_form_hidden(inputs, cotangents)
        elif "hidden" in wanted:
            hidden = run("d_hidden", wanted - rest, None).hidden
        gradients = run("d_unembedding", rest, into) if rest else Gradients()
        return gradients._replace(hidden=hidden)
