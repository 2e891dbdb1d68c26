"""Low-rank adapters: W + (alpha / rank) A B, with A and B trained and W frozen (Hu et al. 2021, arXiv 2106.09685).

qwix puts them in: it intercepts the products of the linen modules named, and keeps A and B beside each kernel.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import flax.linen as nn
import jax.numpy as jnp
from flax import traverse_util

from calibjax.runtime.errors import UserError

_TARGETS = {"all": "layers/.*", "attention": "layers/attention/.*", "mlp": "layers/mlp/.*"}
_A, _B = "_lora_a", "_lora_b"  # what qwix adds to a kernel's name

Module = TypeVar("Module", bound=nn.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which kernels of the blocks get an adapter, and how large. Hashable, so it can be static under `jax.jit`.

    Args:
      rank: Of A `[in, rank]` and B `[rank, out]`, at least 1.
      alpha: The product A B is weighted by alpha / rank; positive.
      targets: The kernels of attention, of the MLP, or all of both.

    Raises:
      UserError: A value is out of range.
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

    def adapt(self, module: Module) -> Module:
        """Returns the module with adapters beside the kernels of its blocks; they are parameters like any other."""
        import qwix

        provider = qwix.LoraProvider(module_path=_TARGETS[self.targets], rank=self.rank, alpha=self.alpha)
        return qwix.apply_lora_to_model(module, provider)  # pyright: ignore[reportReturnType]

    def join(self, params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one tree of the frozen parameters and the adapters, as the adapted module takes it."""
        return traverse_util.unflatten_dict({**_flat(params), **_flat(adapters)})

    def merge(self, params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters with each adapter added to its kernel, in float32, in the kernel's dtype."""
        merged = _flat(params)
        pieces = _flat(adapters)
        for path, a in pieces.items():
            if path[-1].endswith(_A):
                name = path[-1].removesuffix(_A)
                kernel, b = (*path[:-1], name), pieces[(*path[:-1], name + _B)]
                update = jnp.einsum("lir,lro->lio", a, b, precision="highest") * (self.alpha / self.rank)
                merged[kernel] = (merged[kernel].astype(jnp.float32) + update).astype(merged[kernel].dtype)
        return traverse_util.unflatten_dict(merged)


def adapters_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the adapters alone out of the parameters of an adapted module."""
    return traverse_util.unflatten_dict({k: v for k, v in _flat(params).items() if k[-1].endswith((_A, _B))})


def _flat(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return traverse_util.flatten_dict(dict(tree))
