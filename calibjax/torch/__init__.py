"""Exported heads in PyTorch, for serving: needs torch and safetensors, and imports neither JAX nor Flax.

`calibjax export RUN --out DIR` writes the directory that these functions read. `attach` calibrates a model of
transformers:

    import calibjax.torch

    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    calibjax.torch.attach(model, "DIR")
    model.generate(...)  # the logits are calibrated; the most likely token of each position does not change

`calibjax.torch.vllm` is a plugin of vLLM.
"""

from calibjax.torch.attach import Attached as Attached
from calibjax.torch.attach import Generated as Generated
from calibjax.torch.attach import TokenScores as TokenScores
from calibjax.torch.attach import attach as attach
from calibjax.torch.heads import HeadError as HeadError
from calibjax.torch.heads import TemperatureHead as TemperatureHead
from calibjax.torch.heads import load_head as load_head
from calibjax.torch.heads import to_onnx as to_onnx
