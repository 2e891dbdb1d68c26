"""Exported heads as modules of PyTorch: reading, features, and scaling of logits."""

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

SCHEMA = 1
FEATURES = {"hidden_states", "logit_statistics", "max_logit", "log_std_logits", "argmax_embedding"}
_FILES = ("head.json", "head.safetensors")
Past = tuple[Any, int]  # a cache of transformers, and the index of a layer in it


class HeadError(ValueError):
    """Files that are not an exported head, a head of another model, or a call that a head does not support."""


class TemperatureHead(nn.Module):
    """A fitted head: log inverse temperature of each token from features of the frozen model.

    It is made of head.json and of parameters by their names in JAX; matrices are `[inputs, outputs]`.
    """

    def __init__(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]):
        super().__init__()
        config, constants = description["head"], description["constants"]
        self.kind = str(config["kind"])
        self.features = tuple(config["features"])
        self.pooling = config["pooling"]
        self.normalize = bool(config["normalize"])
        self.bounds = (math.log(config["min_scale"]), math.log(constants["max_scale"]))
        self.log_factor = float(description["log_factor"])  # a common factor on every scale, which is not clipped
        self.hidden_size = int(config["hidden_size"])
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor.to(torch.float32), persistent=True)
        if self.kind == "transformer":
            width = tensors["block.attention.q.kernel"].shape[0]
            self.num_heads, self.norm_eps = int(constants["num_heads"]), float(constants["norm_eps"])
            pairs = width // self.num_heads // 2
            frequencies = constants["rope_theta"] ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
            self.register_buffer("frequencies", frequencies.to(torch.float32), persistent=False)

    @property
    def reads_sequence(self) -> bool:
        """Whether the scale of a token depends on earlier tokens: then decoding needs keys and values of the head."""
        return self.kind == "transformer"

    @property
    def width(self) -> int:
        """F, the number of features of a token."""
        widths = {"logit_statistics": 4, "max_logit": 1, "log_std_logits": 1}
        return sum(widths.get(name, self.hidden_size) for name in self.features)

    def forward(self, features: Tensor, mask: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Computes log inverse temperatures, float32 `[B, T]`.

        Args:
            features: `[B, T, F]`, see `Export.features`.
            mask: bool `[B, S]`, False for padding; the last T of S columns belong to `features`. None: no padding.
            past: cache of transformers and the index of this head's layer in it; None without a cache.
        """
        hidden = features.to(torch.float32)
        low, high = self.bounds
        if self.kind == "constant":
            return self._get("log_scale").clamp(low, high).expand(hidden.shape[:2]) + self.log_factor
        if self.kind == "mlp":
            if self.normalize:
                hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
            gate, up = (hidden @ self._get("gate_up.kernel")).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        elif self.kind == "transformer":
            hidden = self._block(hidden, mask, past)
        log_scale = (hidden @ self._get("output.kernel"))[..., 0] + self._get("output.bias")
        if self.pooling == "sequence":
            counts = torch.ones_like(log_scale) if mask is None else mask.to(log_scale.dtype)
            total = torch.where(counts > 0, log_scale, 0.0).sum(1, keepdim=True)
            log_scale = (total / counts.sum(1, keepdim=True).clamp(min=1)).expand(log_scale.shape)
        return log_scale.clamp(low, high) + self.log_factor

    def _get(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "_"))

    def _block(self, hidden: Tensor, mask: Tensor | None, past: Past | None) -> Tensor:
        if hasattr(self, "project_kernel"):
            hidden = hidden @ self._get("project.kernel")
        batch, length, width = hidden.shape
        total = length if mask is None else mask.shape[1]
        if past is not None and mask is None:
            total += past[0].layers[past[1]].get_seq_length()
        seen = hidden.new_ones(batch, total, dtype=torch.bool) if mask is None else mask.to(torch.bool)
        hidden = torch.where(seen[:, -length:, None], hidden, 0.0)  # padding may hold NaN
        positions = (seen.long().cumsum(1) - 1).clamp(min=0)[:, -length:]

        def norm(x: Tensor, name: str) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps) * self._get(name)

        def heads(x: Tensor, name: str) -> Tensor:
            return (x @ self._get(name)).view(batch, length, self.num_heads, -1).transpose(1, 2)

        normed = norm(hidden, "block.attention_norm.scale")
        query, key, value = (heads(normed, f"block.attention.{name}.kernel") for name in "qkv")
        angles = positions[:, None, :, None].to(torch.float32) * self._get("frequencies")
        query, key = (_rotate(x, angles.cos(), angles.sin()) for x in (query, key))
        if past is not None:
            key, value = past[0].update(key, value, past[1])
        columns = torch.arange(total, device=hidden.device)
        visible = (columns <= columns[-length:, None]) & (seen[:, None, :] == seen[:, -length:, None])
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None])
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        hidden = hidden + mixed @ self._get("block.attention.o.kernel")
        normed = norm(hidden, "block.mlp_norm.scale")
        inner = F.silu(normed @ self._get("block.mlp.gate.kernel")) * (normed @ self._get("block.mlp.up.kernel"))
        return hidden + inner @ self._get("block.mlp.down.kernel")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Export(NamedTuple):
    """A head, `base` of head.json, and the probe: `tokens` and what the base model computes from them."""

    head: TemperatureHead
    base: Mapping[str, Any]
    probe: Mapping[str, Tensor]

    @property
    def divisor(self) -> float:
        """The base model's divisor of logits."""
        return self.base["logit_divisor"] or 1.0

    def check_hidden_size(self, size: int) -> None:
        """Raises `HeadError` for a base model of another hidden size."""
        expected = self.head.hidden_size
        if size != expected:
            raise HeadError(f"this head was fitted on a model of hidden size {expected}, the model given has {size}.")

    def covariance(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Covariance of the rows of the unembedding `[W b]`, float32 `[D + 1, D + 1]`; None if no feature reads it."""
        if "log_std_logits" not in self.head.features:
            return None
        rows = weight.detach().to(torch.float32) / self.divisor
        last = rows.new_zeros(len(rows)) if bias is None else bias.detach().to(torch.float32)
        rows = torch.column_stack([rows, last])[last > -math.inf]  # a bias of −inf removes an entry
        return torch.cov(rows.T)

    def features(self, hidden: Tensor, logits: Tensor, weight: Tensor, covariance: Tensor | None) -> Tensor:
        """The head's features, float32 `[..., F]`, from hidden states `[..., D]` after the final norm and their logits.

        `weight` `[V, D]` belongs to the model's layer of logits; the method `covariance` returns `covariance`.
        """
        parts = []
        for name in self.head.features:
            if name == "hidden_states":
                parts.append(hidden)
            elif name == "max_logit":
                parts.append(logits.amax(-1, keepdim=True))
            elif name == "logit_statistics":
                parts.append(logit_statistics(logits))
            elif name == "argmax_embedding":
                parts.append(weight.detach()[logits.argmax(-1)].to(torch.float32) / self.divisor)
            else:
                assert covariance is not None
                augmented = F.pad(hidden.to(torch.float32), (0, 1), value=1.0)
                variance = ((augmented @ covariance) * augmented).sum(-1, keepdim=True)
                parts.append(0.5 * variance.clamp(min=1e-12).log())
        return torch.cat([part.to(torch.float32) for part in parts], dim=-1)


def load_head(directory: str | Path) -> TemperatureHead:
    """Reads the head of an export: a directory or `org/name@revision` on the Hub. Raises `HeadError` for others."""
    return read_export(directory).head


def read_export(path: str | Path) -> Export:
    """Reads and verifies what `calibjax export` wrote; path and errors as for `load_head`."""
    directory = _local(path)
    try:
        contents = {name: (directory / name).read_bytes() for name in _FILES}
        expected = json.loads((directory / "checksums.json").read_text(encoding="utf-8"))["files"]
        different = [name for name in _FILES if hashlib.sha256(contents[name]).hexdigest() != expected[name]]
        description = json.loads(contents["head.json"])
        schema, is_export = description.get("schema"), "base" in description
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HeadError(f"{path}: not a head written by `calibjax export` ({error}).") from error
    if different:
        raise HeadError(f"{directory / different[0]}: damaged or edited (its checksum differs). Export the head again.")
    if schema != SCHEMA or not is_export:
        raise HeadError(f"{path}: this calibjax reads exports of schema {SCHEMA}, not {schema}. Export the head again.")
    try:
        tensors = load(contents["head.safetensors"])
        probe = {name: tensors.pop(f"probe.{name}") for name in ("tokens", "hidden", "unembedding")}
        head = TemperatureHead(description, tensors)
        if head.kind not in ("constant", "linear", "mlp", "transformer") or not {*head.features} <= FEATURES:
            raise ValueError(f"an unknown kind or feature: {head.kind}, {', '.join(head.features)}")
        with torch.no_grad():
            output = head(torch.zeros(1, 2, head.width))  # fails where parameters are missing or of other shapes
        if not all(tensor.isfinite().all() for tensor in (*head.buffers(), output)):
            raise ValueError("a parameter is not finite")
        return Export(head, description["base"], probe)
    except Exception as error:  # safetensors raises its own error for malformed headers
        raise HeadError(f"{path}: not a head written by `calibjax export` ({error}).") from error


def _local(path: str | Path) -> Path:
    """The directory of this path; if there is none, the downloaded files of a repository of the Hugging Face Hub."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", str(path))
    if match is None or Path(path).exists():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=[*_FILES, "checksums.json"]))
    except Exception as error:  # httpx's errors are no OSErrors
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HeadError(f"{path}: no such directory, and the Hugging Face Hub gave none ({reason}).") from error


def logit_statistics(logits: Tensor) -> Tensor:
    """−log max p, log(1 + max z − E_p[z]), log(1 + Var_p[z]), and mean z − max z, float32 `[..., 4]`."""
    z = logits.to(torch.float32)
    difference = z - z.amax(-1, keepdim=True)
    log_weight = difference.logsumexp(-1)
    p = (difference - log_weight[..., None]).exp()
    counted = torch.where(p > 0, difference, 0.0)  # 0 times −inf is 0
    mean = (p * counted).sum(-1)
    variance = (p * (counted - mean[..., None]).square()).sum(-1)
    lowest = difference.mean(-1).clamp(min=-1e3)
    return torch.stack([log_weight, (-mean).clamp(min=0.0).log1p(), variance.log1p(), lowest], dim=-1)


def scaled_logits(logits: Tensor, log_scale: Tensor) -> Tensor:
    """s * logits in float32. Where rounding makes a tie, the model's own choice stays strictly the largest."""
    logits = logits.to(torch.float32)
    best = logits.argmax(-1, keepdim=True)
    scaled = log_scale.exp()[..., None] * logits
    top = scaled.gather(-1, best)
    others = torch.arange(logits.shape[-1], device=logits.device) != best
    return torch.where(others & (scaled >= top), torch.nextafter(top, top.new_tensor(-math.inf)), scaled)


def to_onnx(path: str | Path) -> bytes:
    """The head of an export as an ONNX model; path and errors as for `load_head`. Needs onnx and onnxscript.

    Its inputs are `features` (float32 `[B, T, F]`) and `mask` (bool `[B, T]`, False for padding), its output is
    `log_scale` (float32 `[B, T]`); B and T are of any size.
    """
    head = load_head(path).eval()
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}
    logging.disable(logging.WARNING)  # the exporter logs its steps
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                head,
                (torch.zeros(2, 3, head.width), torch.ones(2, 3, dtype=torch.bool)),
                input_names=["features", "mask"],
                output_names=["log_scale"],
                dynamic_shapes=(axes, axes),
                dynamo=True,
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    return program.model_proto.SerializeToString()
