"""Rules that map the tensors of a family's checkpoints to our parameters."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibjax.models.config import DecoderConfig


class Rule(NamedTuple):
    """Maps one tensor of a checkpoint to the parameters of our tree that it holds."""

    source: str
    """Name without the family's prefix. `{}` is the layer, a second `{}` the expert; else experts lie along axis 0."""
    targets: tuple[str, ...]
    """Dotted paths in our tree. Several parameters are concatenated along the output axis of the tensor."""
    transpose: bool = False  # whether the file holds `[out, in]`; ours is `[in, out]`, or `[V, D]` for embeddings
    groups: str | None = None
    """Field of the configuration: how many groups, each with a part of every target, the output axis has. None: one."""

    @property
    def stacked(self) -> bool:
        """Whether there is a tensor for each layer."""
        return self.targets[0].startswith("layers.")

    def experts(self, config: DecoderConfig) -> Sequence[int] | tuple[None]:
        """The experts, if each has a tensor of its own in every layer, else one `None`."""
        has_own = self.source.count("{}") == 2
        return range(config.mixture.experts) if config.mixture and has_own else (None,)

    def full_name(self, prefix: str, layer: int | None, expert: int | None = None) -> str:
        """Name of the tensor with the family's prefix, which the unembedding never has."""
        return ("" if self.targets[0].startswith("unembedding") else prefix) + self.source.format(layer, expert)

    def layout(self, config: DecoderConfig) -> "Layout":
        return Layout(self.transpose, groups=1 if self.groups is None else getattr(config, self.groups))


class Layout(NamedTuple):
    """Layout of our parameters in a tensor of a checkpoint: `take` extracts a parameter, `join` is the inverse.

    With `transpose`, the last two axes of the tensor are swapped. The output axis, our last axis, consists of `groups`
    equal parts, and within each of them the parameters are concatenated.
    """

    transpose: bool = False
    groups: int = 1

    def divide(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[slice]]:
        """The shape of the tensor that holds parameters of these shapes, and the columns of each within a group."""
        ends = list(itertools.accumulate(shape[-1] for shape in shapes))
        tensor_shape = (*shapes[0][:-1], ends[-1])
        if self.transpose:
            tensor_shape = (*tensor_shape[:-2], tensor_shape[-1], tensor_shape[-2])
        edges = [0, *(end // self.groups for end in ends)]
        columns = [slice(start, end) for start, end in itertools.pairwise(edges)]
        return tensor_shape, columns

    def take(self, tensor: np.ndarray, columns: slice) -> np.ndarray:
        """The parameter that lies in `columns` of each group."""
        tensor = transposed(tensor) if self.transpose else tensor
        leading = tensor.shape[:-1]
        groups = tensor.reshape(*leading, self.groups, -1)  # [..., groups, outputs of a group]
        return groups[..., columns].reshape(*leading, -1)

    def join(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds `parameters` in this order."""
        leading = parameters[0].shape[:-1]
        groups = [parameter.reshape(*leading, self.groups, -1) for parameter in parameters]
        tensor = np.concatenate(groups, axis=-1).reshape(*leading, -1)
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

    Entries of 2 or 4 bytes are first gathered into words of eight bytes from as many consecutive rows; words are then
    transposed in blocks of a cache line. This is five times as fast as numpy.
    """
    *leading, rows, columns = tensor.shape
    per_word = 8 // tensor.itemsize
    if tensor.itemsize in (2, 4) and rows % per_word == 0:
        words = np.empty((*leading, rows // per_word, columns, per_word), np.dtype(f"u{tensor.itemsize}"))
        for i in range(per_word):
            words[..., i] = tensor[..., i::per_word, :].view(words.dtype)
        tensor = words.view(np.uint64)[..., 0]  # [..., rows / per_word, columns]
        target = target.view(np.uint64)
    for row in range(0, tensor.shape[-2], _WORDS):
        target[..., row : row + _WORDS] = tensor[..., row : row + _WORDS, :].swapaxes(-1, -2)
