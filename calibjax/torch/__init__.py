"""Exported heads in PyTorch, for serving: needs torch and safetensors, and imports neither JAX nor Flax.

`calibjax export RUN --out DIR` writes what these functions read. `attach` calibrates a model of transformers:

    import calibjax.torch

    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    calibjax.torch.attach(model, "DIR")
    model.generate(...)  # the logits are calibrated; the most likely token of each position does not change

`calibjax.torch.vllm` is a plugin of vLLM.
"""

from calibjax.torch.attach import Attached, Generated, TokenScores, attach
from calibjax.torch.heads import HeadError, TemperatureHead, load_head, to_onnx

__all__ = ["Attached", "Generated", "HeadError", "TemperatureHead", "TokenScores", "attach", "load_head", "to_onnx"]
