"""Exported heads in PyTorch, for serving: needs torch and safetensors, and imports neither JAX nor Flax.

`calibjax export RUN --out DIR` writes the directory that these functions read. `attach` calibrates a model of
transformers:

    import calibjax.torch

    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    calibjax.torch.attach(model, "DIR")
    model.generate(...)  # the logits are calibrated; the most likely token of each position does not change
"""

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

__all__ = ["Attached", "Generated", "HeadError", "TemperatureHead", "TokenScores", "attach", "load_head", "to_onnx"]

SCHEMA = 1
_PROBE = "probe."
_FILES = ("head.json", "head.safetensors")


class HeadError(ValueError):
    """Files that are not an exported head, a head of another model, or a call that a head does not support."""


class TemperatureHead(nn.Module):
    """A fitted head: log inverse temperature of each token from features of the frozen model.

    Args:
        config: `head` of head.json.
        tensors: parameters by their names in JAX; matrices are stored `[inputs, outputs]`.
        log_factor: common factor on every scale, as its log; not clipped.
        constants: `constants` of head.json: largest inverse temperature before that factor, and sizes of the block.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        log_factor: float,
        constants: Mapping[str, Any],
    ):
        super().__init__()
        self.kind, self.features = str(config["kind"]), tuple(config["features"])
        self.pooling, self.normalize = config["pooling"], bool(config["normalize"])
        self.bounds = (math.log(config["min_scale"]), math.log(constants["max_scale"]))
        self.log_factor, self.hidden_size = float(log_factor), int(config["hidden_size"])
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
        return sum(1 if name in ("max_logit", "log_std_logits") else self.hidden_size for name in self.features)

    def forward(self, features: Tensor, mask: Tensor | None = None, past: tuple[Any, int] | None = None) -> Tensor:
        """Computes log inverse temperatures.

        Args:
            features: `[B, T, F]`, see `head_features`.
            mask: bool `[B, S]`, False for padding; the last T of S columns are those of `features`. None: no padding.
            past: cache of transformers and the index of this head's layer in it; None without a cache.

        Returns:
            float32 `[B, T]`.
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
            log_scale = ((log_scale * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)).expand(
                log_scale.shape
            )
        return log_scale.clamp(low, high) + self.log_factor

    def _get(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "_"))

    def _block(self, hidden: Tensor, mask: Tensor | None, past: tuple[Any, int] | None) -> Tensor:
        """A Llama block; matrices of JAX are `[inputs, outputs]`."""
        if hasattr(self, "project_kernel"):
            hidden = hidden @ self._get("project.kernel")
        batch, length, width = hidden.shape
        total = length if mask is None else mask.shape[1]
        if past is not None and mask is None:
            total += past[0].layers[past[1]].get_seq_length()
        seen = hidden.new_ones(batch, total, dtype=torch.bool) if mask is None else mask.to(torch.bool)
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
        visible = (columns[None, :] <= columns[-length:, None])[None] & (seen[:, None, :] == seen[:, -length:, None])
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None])
        hidden = hidden + mixed.transpose(1, 2).reshape(batch, length, width) @ self._get("block.attention.o.kernel")
        normed = norm(hidden, "block.mlp_norm.scale")
        inner = F.silu(normed @ self._get("block.mlp.gate.kernel")) * (normed @ self._get("block.mlp.up.kernel"))
        return hidden + inner @ self._get("block.mlp.down.kernel")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Export(NamedTuple):
    head: TemperatureHead
    base: Mapping[str, Any]
    probe: Mapping[str, Tensor]


def load_head(directory: str | Path) -> TemperatureHead:
    """Reads the head of an export, of a directory or `org/name@revision` on the Hub; raises `HeadError` otherwise."""
    return _read(directory).head


def to_onnx(path: str | Path) -> bytes:
    """Returns the head of an export as an ONNX model; needs onnx and onnxscript.

    Args:
        path: as of `load_head`.

    Returns:
        A model of `features` (float32 `[B, T, F]`) and `mask` (bool `[B, T]`, False for padding) to `log_scale`
        (float32 `[B, T]`), B and T of any size.

    Raises:
        HeadError: as `load_head`.
    """
    head = load_head(path).eval()
    features, mask = torch.zeros(2, 3, head.width), torch.ones(2, 3, dtype=torch.bool)
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}
    loggers = [logging.getLogger(f"torch.onnx{part}") for part in ("", "._internal.exporter._registration")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it describes its own workings
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                head,
                (features, mask),
                input_names=["features", "mask"],
                output_names=["log_scale"],
                dynamic_shapes=(axes, axes),
                dynamo=True,
                verbose=False,
            )
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
        assert program is not None
        return program.model_proto.SerializeToString()


def _read(path: str | Path) -> _Export:
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
        params = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PROBE)}
        probe = {name[len(_PROBE) :]: tensor for name, tensor in tensors.items() if name.startswith(_PROBE)}
        head = TemperatureHead(description["head"], params, description["log_factor"], description["constants"])
        return _Export(head, description["base"], {name: probe[name] for name in ("tokens", "hidden")})
    except Exception as error:  # safetensors raises its own error for malformed headers
        raise HeadError(f"{path}: not a head written by `calibjax export` ({error}).") from error


def _local(path: str | Path) -> Path:
    """A directory as it is; where nothing has this path, the files of a repository of the Hugging Face Hub."""
    found = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", str(path))
    if found is None or Path(path).exists():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=[*_FILES, "checksums.json"]))
    except Exception as error:  # httpx's errors are no OSErrors
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise HeadError(f"{path}: no such directory, and the Hugging Face Hub gave none ({reason}).") from error


class TokenScores(NamedTuple):
    """Scores of all tokens but the first by `Attached.score`, float32 `[B, T - 1]` each; 0 on padding.

    Attributes:
        log_probs: calibrated log-probability of the token, nats.
        confidence: calibrated probability of the most likely token at its position.
        temperature: that was applied.
    """

    log_probs: Tensor
    confidence: Tensor
    temperature: Tensor


class Generated(NamedTuple):
    """Returned by `Attached.generate`: `sequences` `[B, T]`, prompt included, and `TokenScores` of them."""

    sequences: Tensor
    scores: TokenScores


class Attached:
    """A head attached to a model by `attach`. `detach` removes it."""

    def __init__(self, model: Any, export: _Export, calibrate: bool):
        self.model, self.head, self._base, self._calibrate = model, export.head, export.base, calibrate
        self._hidden: Tensor | None = None
        device = model.get_output_embeddings().weight.device
        self.head.to(device)
        self._covariance = _covariance(self._unembedding(), self._bias()) if self._reads("log_std_logits") else None
        self._hooks = [
            model.base_model.register_forward_hook(self._keep_hidden),
            model.register_forward_hook(self._calibrate_output, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Removes the head; the model returns its own logits again."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def score(self, tokens: Tensor, attention_mask: Tensor | None = None) -> TokenScores:
        """Scores given tokens `[B, T]` with one forward pass.

        Args:
            tokens: token ids.
            attention_mask: `[B, T]`, 0 for padding. None: no padding.
        """
        calibrate, self._calibrate = self._calibrate, True
        try:
            output = self.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        finally:
            self._calibrate = calibrate
        log_probs = output.logits[:, :-1].to(torch.float32).log_softmax(-1)
        of_target = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        scores = (of_target, log_probs.amax(-1).exp(), torch.exp(-output.log_scale[:, :-1]))
        if attention_mask is None:
            return TokenScores(*scores)
        real = (attention_mask[:, 1:] * attention_mask[:, :-1]).bool()
        return TokenScores(*(torch.where(real, x, 0.0) for x in scores))

    def generate(self, inputs: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Generated:
        """Generates by `model.generate`, then scores prompt and answer with one more forward pass.

        Args:
            inputs: token ids `[B, T]`; padding on the left.
            attention_mask: `[B, T]`, 0 for padding.
            options: of `model.generate`.
        """
        mask = torch.ones_like(inputs) if attention_mask is None else attention_mask
        sequences = self.model.generate(inputs, attention_mask=mask, **options)
        beams = len(sequences) // len(inputs)
        new = torch.ones_like(sequences[:, inputs.shape[1] :])
        pad, end = self.model.generation_config.pad_token_id, self.model.generation_config.eos_token_id
        if end is not None and pad is not None:
            ends = torch.isin(sequences[:, inputs.shape[1] :], torch.as_tensor(end, device=sequences.device))
            new = ((ends.cumsum(1) - ends.long()) == 0).to(new.dtype)
        mask = torch.cat([mask.repeat_interleave(beams, 0), new], dim=1)
        return Generated(sequences, self.score(sequences, mask))

    def _reads(self, feature: str) -> bool:
        return feature in self.head.features

    def _unembedding(self) -> Tensor:
        return self.model.get_output_embeddings().weight.detach().to(torch.float32) / (
            self._base["logit_divisor"] or 1.0
        )

    def _bias(self) -> Tensor | None:
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return None if bias is None else bias.detach().to(torch.float32)

    def _keep_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def _calibrate_output(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        hidden, self._hidden = self._hidden, None
        if hidden is None or not hasattr(output, "logits"):
            raise HeadError("the head needs a forward pass of the whole model that returns a ModelOutput.")
        logits, keep = output.logits, kwargs.get("logits_to_keep", 0)
        rows = (
            slice(-keep, None) if isinstance(keep, int) and keep else keep if isinstance(keep, Tensor) else slice(None)
        )
        all_logits = logits
        if self.head.reads_sequence and logits.shape[1] != hidden.shape[1] and len(self.head.features) > 1:
            all_logits = self._logits(hidden)
        elif not self.head.reads_sequence:
            hidden = hidden[:, rows]
        features = self._features(hidden, all_logits)
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise HeadError("attention_mask: expected [B, T]; a head does not support masks of other shapes.")
        past = self._past(getattr(output, "past_key_values", None)) if self.head.reads_sequence else None
        if past is not None and mask is not None:
            mask = mask[:, : past[0].layers[past[1]].get_seq_length() + hidden.shape[1]]
        log_scale = self.head(features, mask if self.head.reads_sequence else None, past)
        log_scale = log_scale[:, rows] if self.head.reads_sequence else log_scale
        if self._calibrate:
            output.logits = _scaled(logits, log_scale)
        output.log_scale = log_scale
        return output

    def _past(self, cache: Any) -> tuple[Any, int] | None:
        """The head's keys and values are one more layer of the model's cache, which beam search reorders with them."""
        if cache is None:
            return None
        layers = getattr(cache, "layers", None)
        if layers is None:
            raise HeadError(f"a transformer head needs a cache of layers, got {type(cache).__name__}; use_cache=False.")
        from transformers.cache_utils import DynamicLayer

        index = self.model.config.get_text_config().num_hidden_layers
        if len(layers) == index:
            layers.append(DynamicLayer())
        return cache, index

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden.to(torch.float32) @ self._unembedding().T
        bias = self._bias()
        logits = logits if bias is None else logits + bias
        cap = self._base["logit_softcap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _features(self, hidden: Tensor, logits: Tensor) -> Tensor:
        parts = []
        for name in self.head.features:
            if name == "hidden_states":
                parts.append(hidden)
            elif name == "max_logit":
                parts.append(logits.amax(-1, keepdim=True))
            elif name == "argmax_embedding":
                parts.append(self._unembedding()[logits.argmax(-1)])
            else:
                assert self._covariance is not None
                augmented = torch.cat([hidden.to(torch.float32), hidden.new_ones((*hidden.shape[:-1], 1))], dim=-1)
                variance = ((augmented @ self._covariance) * augmented).sum(-1, keepdim=True)
                parts.append(0.5 * variance.clamp(min=1e-12).log())
        return torch.cat([part.to(torch.float32) for part in parts], dim=-1)


def attach(model: Any, directory: str | Path, *, logits: str = "calibrated", check: bool = True) -> Attached:
    """Makes a causal language model of transformers calibrated by an exported head.

    Args:
        model: `AutoModelForCausalLM`, on one device, in any dtype. Left padding, caches, `generate` and beam search
            work.
        directory: written by `calibjax export`, or `org/name@revision` on the Hub, by `calibjax push`.
        logits: "calibrated": the model's logits become `s * logits`, in float32, so that sampling follows the
            calibrated distribution. "unchanged": logits and sampling stay as they are; use `Attached.score` and
            `Attached.generate` for confidences.
        check: compare the hidden states of a few tokens with those of the model that the head was fitted on. Set it
            to False only for a model quantised after the fit.

    Returns:
        `Attached`. Outputs of the model get `log_scale` `[B, T]` beside their logits.

    Raises:
        HeadError: damaged files, another base model, or a head whose temperature depends on later tokens.
    """
    if logits not in ("calibrated", "unchanged"):
        raise HeadError(f'logits: expected "calibrated" or "unchanged", got {logits!r}.')
    export = _read(directory)
    if export.head.pooling == "sequence":
        raise HeadError("pooling 'sequence': the temperature depends on later tokens; it cannot be used in decoding.")
    found, expected = model.config.get_text_config().hidden_size, export.head.hidden_size
    if found != expected:
        raise HeadError(f"this head was fitted on a model of hidden size {expected}, the model given has {found}.")
    if check:
        _check_base(model, export)
    return Attached(model, export, logits == "calibrated")


@torch.no_grad()
def _check_base(model: Any, export: _Export) -> None:
    weight = model.get_output_embeddings().weight
    tokens = export.probe["tokens"].long().to(weight.device)
    if model.config.get_text_config().vocab_size <= int(tokens.max()):
        raise HeadError("this head was fitted on another base model (its vocabulary is larger).")
    training = model.training
    hidden = model.eval().base_model(input_ids=tokens[None], use_cache=False)[0][0].to(torch.float32)
    model.train(training)
    expected = export.probe["hidden"].to(weight.device)
    error = float((hidden - expected).norm() / expected.norm())
    limit = 1e-3 if weight.dtype == torch.float32 else 5e-2
    if not error <= limit:
        raise HeadError(
            f"this head was fitted on another base model: on a probe of {len(tokens)} tokens the hidden states differ "
            f"by {error:.2g} (relative; {limit:g} is allowed in {weight.dtype}). Fit a head for this model."
        )


def _covariance(unembedding: Tensor, bias: Tensor | None) -> Tensor:
    last = unembedding.new_zeros(len(unembedding), 1) if bias is None else bias[:, None]
    rows = torch.cat([unembedding, last], dim=1)
    rows = rows - rows.mean(0, keepdim=True)
    return rows.T @ rows / max(len(rows) - 1, 1)


def _scaled(logits: Tensor, log_scale: Tensor) -> Tensor:
    """s * logits in float32. Where rounding makes a tie, the model's own choice stays strictly the largest."""
    logits = logits.to(torch.float32)
    best = logits.argmax(-1, keepdim=True)
    scaled = log_scale.exp()[..., None] * logits
    top = scaled.gather(-1, best)
    others = torch.arange(logits.shape[-1], device=logits.device) != best
    return torch.where(others & (scaled >= top), torch.nextafter(top, top.new_tensor(-math.inf)), scaled)
