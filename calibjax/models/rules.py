"""Rules that map the tensors of a family's checkpoints to our parameters."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibjax.models.config import DecoderConfig


class Rule(NamedTuple):
    """The parameters of our tree that one tensor of a checkpoint holds."""

    source: str
    """Name without the family's prefix; `{}` is the layer, a second `{}` the expert (else all are along axis 0)."""
    targets: tuple[str, ...]
    """Dotted paths in our tree; several are concatenated along the output axis of the tensor."""
    transpose: bool = False  # the file holds `[out, in]`; ours is `[in, out]`, or `[V, D]` for embeddings
    groups: str | None = None
    """Field of the configuration with the number of groups of the output axis that each hold all targets; None: one."""

    @property
    def stacked(self) -> bool:
        """Whether there is a tensor for each layer."""
        return self.targets[0].startswith("layers.")

    def experts(self, config: DecoderConfig) -> Sequence[int] | tuple[None]:
        """Experts that have a tensor of their own in each layer, or one `None`."""
        return range(config.mixture.experts) if config.mixture and self.source.count("{}") == 2 else (None,)

    def full_name(self, prefix: str, layer: int | None, expert: int | None = None) -> str:
        """Name of the tensor with the family's prefix, which the unembedding never has."""
        return ("" if self.targets[0].startswith("unembedding") else prefix) + self.source.format(layer, expert)

    def layout(self, config: DecoderConfig) -> "Layout":
        """Layout of the targets in the tensor of a model."""
        return Layout(self.transpose, 1 if self.groups is None else getattr(config, self.groups))


class Layout(NamedTuple):
    """Layout of our parameters in a tensor of a checkpoint: `take` extracts a parameter, `join` is the inverse.

    With `transpose`, the last two axes of the tensor are swapped. Parameters are concatenated within each of the
    `groups` of the output axis, which is our last axis.
    """

    transpose: bool = False
    groups: int = 1

    def divide(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[slice]]:
        """The shape of the tensor that holds parameters of these shapes, and the columns of each in a group."""
        ends = list(itertools.accumulate(shape[-1] for shape in shapes))
        stored = (*shapes[0][:-1], ends[-1])
        if self.transpose:
            stored = (*stored[:-2], stored[-1], stored[-2])
        edges = [0, *(end // self.groups for end in ends)]
        return stored, [slice(start, end) for start, end in itertools.pairwise(edges)]

    def take(self, tensor: np.ndarray, columns: slice) -> np.ndarray:
        """The parameter that holds `columns` of each group."""
        tensor = transposed(tensor) if self.transpose else tensor
        grouped = tensor.reshape(*tensor.shape[:-1], self.groups, -1)[..., columns]
        return grouped.reshape(*tensor.shape[:-1], -1)

    def join(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds `parameters` in this order."""
        grouped = [part.reshape(*part.shape[:-1], self.groups, -1) for part in parameters]
        tensor = np.concatenate(grouped, axis=-1).reshape(*parameters[0].shape[:-1], -1)
        return tensor.swapaxes(-1, -2) if self.transpose else tensor


_WORDS = 8  # words of eight bytes in a line of the cache


def transposed(tensor: np.ndarray) -> np.ndarray:
    """`tensor.swapaxes(-1, -2)` as a contiguous array."""
    *leading, rows, columns = tensor.shape
    out = np.empty((*leading, columns, rows), tensor.dtype)
    transpose_into(out, tensor)
    return out


def transpose_into(target: np.ndarray, tensor: np.ndarray) -> None:
    """Copies `tensor.swapaxes(-1, -2)` to an array of the same dtype, whose last axis is contiguous.

    Rows are interleaved into words of eight bytes, transposed in blocks of a cache line: five times as fast as numpy.
    """
    *leading, rows, columns = tensor.shape
    per_word = 8 // tensor.itemsize
    lanes = per_word if tensor.itemsize in (2, 4) and rows % per_word == 0 else 1
    if lanes > 1:
        words = np.empty((*leading, rows // lanes, columns, lanes), np.dtype(f"u{tensor.itemsize}"))
        for lane in range(lanes):
            words[..., lane] = tensor[..., lane::lanes, :].view(words.dtype)
        tensor, target = words.view(np.uint64)[..., 0], target.view(np.uint64)
    for row in range(0, tensor.shape[-2], _WORDS):
        target[..., row : row + _WORDS] = tensor[..., row : row + _WORDS, :].swapaxes(-1, -2)
