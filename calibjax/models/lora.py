"""Low-rank adapters: W + (alpha / rank) A B (Hu et al. 2021, arXiv 2106.09685), in training and in files of PEFT.

In training, qwix adds them: it intercepts the products of the selected linen modules and stores A and B next to each
kernel. Adapters in files (`adapter_config.json`, `adapter_model.safetensors`) are merged into a model's weights.
"""

import collections
import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file

from calibjax.models.config import DecoderConfig, Params
from calibjax.models.families import FAMILIES
from calibjax.models.fingerprint import dotted_leaves
from calibjax.runtime.checksums import array_hash, json_digest
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json
from calibjax.runtime.options import Positive, Range, check_options, check_value

_TARGETS = {"all": "layers/.*", "attention": "layers/attention/.*", "mlp": "layers/mlp/.*"}
_A, _B = "_lora_a", "_lora_b"  # suffixes that qwix appends to a kernel's name


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Configuration of low-rank adapters, hashable."""

    rank: int = 16
    """Inner size of A `[in, rank]` and B `[rank, out]`."""
    alpha: Positive = 32.0
    """The product A B is weighted by alpha / rank."""
    targets: Literal["all", "attention", "mlp"] = "all"
    """Adapted kernels; "all" for both."""

    def __post_init__(self):
        check_options(self)

    def check(self, config: DecoderConfig) -> None:
        """Raises `UserError` for a rank above the model's width, and for adapters of a mixture of experts."""
        if self.rank > config.hidden_size:
            raise UserError(f"lora_rank: expected 1 to {config.hidden_size}, the model's width, got {self.rank}.")
        if config.mixture is not None and self.targets != "attention":
            reason = f"the experts and the router of {config.family} have no adapters"
            raise UserError(f"lora_targets: {reason}: expected attention, got {self.targets}.")

    def adapt(self, module: nn.Module) -> nn.Module:
        """The module with adapters, as further parameters next to the kernels of its blocks."""
        import qwix

        provider = qwix.LoraProvider(module_path=_TARGETS[self.targets], rank=self.rank, alpha=self.alpha)
        return qwix.apply_lora_to_model(module, provider)  # pyright: ignore[reportReturnType]

    def join(self, params: Params, adapters: Params) -> dict[str, Any]:
        """The parameters of the adapted module: frozen parameters and adapters in one tree."""
        return traverse_util.unflatten_dict(dict(dotted_leaves(params) + dotted_leaves(adapters)), sep=".")

    def merge(self, params: Params, adapters: Params) -> dict[str, Any]:
        """The parameters with adapters added to kernels; sums are in float32, results in the kernel's dtype."""
        merged, pieces = dict(dotted_leaves(params)), dict(dotted_leaves(adapters))
        for path, a in pieces.items():
            if path.endswith(_A):
                name = path.removesuffix(_A)
                product = jnp.einsum("lir,lro->lio", a, pieces[name + _B], precision="highest")
                kernel = merged[name]
                new = kernel.astype(jnp.float32) + product * (self.alpha / self.rank)
                merged[name] = new.astype(kernel.dtype)
        return traverse_util.unflatten_dict(merged, sep=".")


def adapters_of(params: Params) -> dict[str, Any]:
    """The adapters alone, of an adapted module's parameters."""
    adapters = {path: leaf for path, leaf in dotted_leaves(params) if path.endswith((_A, _B))}
    return traverse_util.unflatten_dict(adapters, sep=".")


_Tensors = dict[str, np.ndarray]
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_SWITCHES = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "layer_replication")
_SWITCHES += ("trainable_token_indices", "target_parameters", "alora_invocation_tokens")
_KEEP_WEIGHTS = (True, "gaussian", "eva", "mica", "orthogonal")  # others, as PiSSA, start from a changed W
_PLAIN: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _KEEP_WEIGHTS}
_PLAIN |= dict.fromkeys(_SWITCHES, ())
"""Settings, beside absent ones, with which an adapter is W + (alpha / r) B A, and no more."""


def merge_adapter(config: DecoderConfig, params: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Adds `scale * B A`, in float32, to adapted kernels of `params`; returns these by dotted path, and the digest.

    `scale` is alpha / r, or alpha / sqrt(r) with `use_rslora`.

    Raises:
        UserError: files are missing or damaged, a setting is not supported, or a tensor fits no kernel of the model.
    """
    settings, tensors = _read(folder)
    family, merged = FAMILIES[config.family], dict(params)
    adaptable = {}
    for rule, layer in family.stored(config, params):
        is_kernel = rule.targets[0].endswith("kernel")
        if is_kernel and rule.experts(config) == (None,):
            adaptable[rule.full_name(family.prefix, layer)] = rule, layer
    for module, pair in _pairs(folder, tensors).items():
        a, b = (pair[part].astype(np.float32) for part in "AB")
        if f"{module}.weight" not in adaptable:
            model = f"this {config.family} model of {config.num_layers} layers"
            raise UserError(f"{folder}: {model} has no projection {module}: is it the adapter of another model?")
        rule, layer = adaptable[f"{module}.weight"]
        layout = rule.layout(config)
        update = _scale(settings, module, len(a)) * (b @ a)
        stored = update if rule.transpose else update.T
        expected, columns = layout.divide([params[target].shape[1:] for target in rule.targets])
        if stored.shape != expected:
            raise UserError(f"{folder}: {module} has the shape {list(stored.shape)}, expected {list(expected)}.")
        for target, part in zip(rule.targets, columns, strict=True):
            kernel = merged[target]
            new = kernel[layer].astype(jnp.float32) + layout.take(stored, part)
            merged[target] = kernel.at[layer].set(new.astype(kernel.dtype))
    scales = {name: settings.get(name) for name in ("lora_alpha", "alpha_pattern", "use_rslora")}
    return merged, json_digest({**scales, "tensors": array_hash(tensors)})


def _read(folder: Path) -> tuple[dict[str, Any], _Tensors]:
    try:
        settings = read_json(folder / _SETTINGS)
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: expected an adapter of PEFT, {_SETTINGS} and {_WEIGHTS} ({error}).") from error
    if not isinstance(settings, dict):
        raise UserError(f"{folder / _SETTINGS}: expected a JSON object.")
    for name, plain in _PLAIN.items():
        if settings.get(name) not in (*plain, False, None, [], {}):
            hint = "Merge the adapter with PEFT (`merge_and_unload`, then `save_pretrained`) and give the merged model."
            raise UserError(f"{folder / _SETTINGS}: {name}={settings[name]!r} is not supported. {hint}")
    return settings, tensors


def _pairs(folder: Path, tensors: _Tensors) -> dict[str, _Tensors]:
    """A `[r, in]` and B `[out, r]` of each module, by its name in the base model."""
    modules = collections.defaultdict(dict)
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2:
            raise UserError(f"{folder}: expected matrices lora_A and lora_B of modules, got {name} {tensor.shape}.")
        modules[match[1]][match[2]] = tensor
    for module, pair in modules.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise UserError(f"{folder}: {module}: expected lora_A and lora_B of one rank.")
        if not all(np.isfinite(tensor.astype(np.float32)).all() for tensor in pair.values()):
            raise UserError(f"{folder}: {module} holds NaN or infinity. Use another checkpoint of it.")
    if not modules:
        raise UserError(f"{folder}: expected tensors lora_A and lora_B, the adapter holds none.")
    return modules


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    patterns = (settings.get("alpha_pattern") or {}).items()
    own = (alpha for pattern, alpha in patterns if re.fullmatch(rf"(.*\.)?({pattern})", module))
    alpha = next(own, settings.get("lora_alpha", 8))
    check_value("lora_alpha", Annotated[float, Range(-1e30, 1e30)], alpha)
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
