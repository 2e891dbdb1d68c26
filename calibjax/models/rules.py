"""The words in which a family's tensors are described: which tensor of a checkpoint is which of our parameters."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of a checkpoint, and where in our parameter tree it goes.

    Args:
      source: Its name, without the family's prefix; `{}` stands for the layer.
      targets: Dotted paths in our tree; with several, the tensor is these side by side along its output axis.
      transpose: Whether the file holds `[out, in]`; ours is `[in, out]`, or `[V, D]` for the embeddings.
      by_head: Whether the targets stand side by side within each head, and not as a whole.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    by_head: bool = False

    def full_name(self, prefix: str, layer: int | None) -> str:
        """The tensor's name with the family's prefix, which the unembedding lacks in every family."""
        return ("" if self.targets[0].startswith("unembedding") else prefix) + self.source.format(layer)

    def layout(self, num_heads: int) -> "Layout":
        """How the tensor holds its targets in a model of so many heads."""
        return Layout(self.transpose, num_heads if self.by_head else 1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor of a checkpoint holds our parameters: `take` gets one out of it, `join` puts them back.

    Args:
      transpose: Whether its axes are the other way round.
      groups: Its output axis, the last of ours, is this many groups, and the parameters stand side by side in each.
    """

    transpose: bool = False
    groups: int = 1

    def take(self, tensor: np.ndarray, columns: slice) -> np.ndarray:
        """Returns the parameter that has `columns` of each group."""
        tensor = tensor.T if self.transpose else tensor
        grouped = tensor.reshape(*tensor.shape[:-1], self.groups, -1)[..., columns]
        return grouped.reshape(*tensor.shape[:-1], -1)

    def join(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that holds `parameters`, in this order."""
        grouped = [part.reshape(*part.shape[:-1], self.groups, -1) for part in parameters]
        tensor = np.concatenate(grouped, axis=-1).reshape(*parameters[0].shape[:-1], -1)
        return tensor.T if self.transpose else tensor


def linear(source: str, *targets: str, transpose: bool = True, by_head: bool = False) -> tuple[Rule, Rule]:
    """The rules of a projection: its weight, and its bias where it has one."""
    kernels, biases = (tuple(f"{target}.{name}" for target in targets) for name in ("kernel", "bias"))
    return Rule(f"{source}.weight", kernels, transpose, by_head), Rule(f"{source}.bias", biases, by_head=by_head)


def norm(source: str, target: str) -> tuple[Rule, Rule]:
    """The rules of a norm: its scale, and its bias where it has one."""
    return Rule(f"{source}.weight", (f"{target}.scale",)), Rule(f"{source}.bias", (f"{target}.bias",))
