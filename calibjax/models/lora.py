"""Low-rank adapters: W + (alpha / rank) A B, with A and B trained and W frozen (Hu et al. 2021, arXiv 2106.09685).

qwix adds them: it intercepts the products of the selected linen modules and stores A and B beside each kernel.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import flax.linen as nn
import jax.numpy as jnp
from flax import traverse_util

from calibjax.models.config import DecoderConfig
from calibjax.runtime.errors import UserError

_TARGETS = {"all": "layers/.*", "attention": "layers/attention/.*", "mlp": "layers/mlp/.*"}
_A, _B = "_lora_a", "_lora_b"  # suffixes that qwix appends to a kernel's name

Module = TypeVar("Module", bound=nn.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Configuration of low-rank adapters, hashable.

    Args:
        rank: rank of A `[in, rank]` and B `[rank, out]`, at least 1.
        alpha: positive; the product A B is weighted by alpha / rank.
        targets: adapted kernels: "attention", "mlp", or "all" for both.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Literal["all", "attention", "mlp"] = "all"

    def __post_init__(self):
        if self.rank < 1:
            raise UserError(f"LoRA: rank must be at least 1, got {self.rank}.")
        if not self.alpha > 0:
            raise UserError(f"LoRA: alpha must be positive, got {self.alpha}.")
        if self.targets not in _TARGETS:
            raise UserError(f"LoRA: targets must be one of {', '.join(_TARGETS)}, got {self.targets!r}.")

    def check(self, config: DecoderConfig) -> None:
        """Raises `UserError` for a rank above the model's width, and for adapters of a mixture of experts."""
        if self.rank > config.hidden_size:
            raise UserError(f"--lora-rank: expected 1 to {config.hidden_size}, the model's width, got {self.rank}.")
        if config.mixture is not None and self.targets != "attention":
            raise UserError(
                f"--lora-targets {self.targets}: the experts and the router of {config.family} have no adapters; "
                "use --lora-targets attention."
            )

    def adapt(self, module: Module) -> Module:
        """Returns the module with adapters, as further parameters, beside the kernels of its blocks."""
        import qwix

        provider = qwix.LoraProvider(module_path=_TARGETS[self.targets], rank=self.rank, alpha=self.alpha)
        return qwix.apply_lora_to_model(module, provider)  # pyright: ignore[reportReturnType]

    def join(self, params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters of the adapted module: frozen parameters and adapters in one tree."""
        return traverse_util.unflatten_dict({**_flat(params), **_flat(adapters)})

    def merge(self, params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters with adapters added to kernels; sums are in float32, results in the kernel's dtype."""
        merged, pieces = _flat(params), _flat(adapters)
        for path, a in pieces.items():
            if path[-1].endswith(_A):
                kernel = (*path[:-1], path[-1].removesuffix(_A))
                b = pieces[(*path[:-1], kernel[-1] + _B)]
                update = jnp.einsum("lir,lro->lio", a, b, precision="highest") * (self.alpha / self.rank)
                merged[kernel] = (merged[kernel].astype(jnp.float32) + update).astype(merged[kernel].dtype)
        return traverse_util.unflatten_dict(merged)


def adapters_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns only the adapters of an adapted module's parameters."""
    return traverse_util.unflatten_dict({k: v for k, v in _flat(params).items() if k[-1].endswith((_A, _B))})


def _flat(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(dict(tree))
