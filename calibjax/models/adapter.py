"""Low-rank adapters of PEFT (`adapter_config.json`, `adapter_model.safetensors`), merged into a model's weights."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from calibjax.models.config import DecoderConfig
from calibjax.models.families import FAMILIES
from calibjax.models.rules import Rule
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json

_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(.+)\.lora_(A|B)\.weight")
# Settings that change more than W + (alpha / r) B A, and the values with which they do not.
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}


def merge_adapter(config: DecoderConfig, params: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Returns parameters with `scale * B A` added, in float32, to each adapted kernel, and the adapter's digest.

    `params` are those of the base model by dotted path. `scale` is alpha / r, or alpha / sqrt(r) with `use_rslora`;
    both may differ by module (`alpha_pattern`).

    Raises:
        UserError: the files are missing or damaged, a setting is not supported, or a tensor belongs to no kernel of the
            model or does not fit it.
    """
    settings, tensors = _read(folder)
    merged = dict(params)
    for module, (a, b) in _pairs(folder, tensors).items():
        rule, layer = _rule(config, module, folder)
        place = () if layer is None else (layer,)
        update = _scale(settings, module, len(a)) * (b.astype(np.float32) @ a.astype(np.float32))
        stored = update if rule.transpose else update.T  # as the base model's file holds the kernel
        kernels = [target for target in rule.targets if target in params]
        ends = np.cumsum([params[target].shape[-1] for target in kernels])
        layout = rule.layout(config)
        expected = (params[kernels[0]].shape[-2], int(ends[-1]))
        if update.T.shape != expected:
            raise UserError(f"{folder}: {module} has {update.T.shape} inputs and outputs, expected {expected}.")
        edges = [0, *(int(end) // layout.groups for end in ends)]
        for target, start, end in zip(kernels, edges, edges[1:], strict=False):
            kernel, part = merged[target], layout.take(stored, slice(start, end))
            merged[target] = kernel.at[place].set((kernel[place].astype(jnp.float32) + part).astype(kernel.dtype))
    scales = {name: settings.get(name) for name in ("lora_alpha", "alpha_pattern", "use_rslora")}
    digest = hashlib.sha256(json.dumps(scales, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + np.ascontiguousarray(tensor).tobytes())
    return merged, digest.hexdigest()


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        settings = read_json(folder / _SETTINGS)
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: expected an adapter of PEFT, {_SETTINGS} and {_WEIGHTS} ({error}).") from error
    if not isinstance(settings, dict):
        raise UserError(f"{folder / _SETTINGS}: expected a JSON object.")
    for name, allowed in _PLAIN.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"{folder / _SETTINGS}: {name}={settings[name]!r} is not supported. Merge the adapter with PEFT "
                "(`merge_and_unload`, then `save_pretrained`) and give the merged model."
            )
    return settings, tensors


def _pairs(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A `[r, in]` and B `[out, r]` of each module, by its name in the base model."""
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None or tensor.ndim != 2:
            raise UserError(f"{folder}: expected matrices lora_A and lora_B of modules, got {name} {tensor.shape}.")
        modules.setdefault(match[1], {})[match[2]] = tensor
    for module, pair in modules.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise UserError(f"{folder}: {module}: expected lora_A and lora_B of one rank.")
        if not all(np.isfinite(tensor.astype(np.float32)).all() for tensor in pair.values()):
            raise UserError(f"{folder}: {module} holds NaN or infinity.")
    if not modules:
        raise UserError(f"{folder}: the adapter holds no tensor.")
    return {module: (pair["A"], pair["B"]) for module, pair in modules.items()}


def _rule(config: DecoderConfig, module: str, folder: Path) -> tuple[Rule, int | None]:
    """The rule and the layer of a module's kernel."""
    family = FAMILIES[config.family]
    for rule in family.rules:
        if rule.experts(config) == (None,) and rule.targets[0].endswith("kernel"):
            for layer in range(config.num_layers) if rule.stacked else (None,):
                if f"{module}.weight" == rule.full_name(family.prefix, layer):
                    return rule, layer
    raise UserError(
        f"{folder}: this {config.family} model of {config.num_layers} layers has no projection {module}: is it the "
        "adapter of another model?"
    )


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    alpha = settings.get("lora_alpha", 8)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"lora_alpha: expected a number, got {alpha!r}.")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
