"""GGUF, the file format of llama.cpp: header, metadata and the place of every tensor, checked before any is read.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` has its constants,
and dequantises tensors. Its reader is not used: it makes an array of every token (733 MB and 10 s for Gemma 3 270M),
and reads counts from the file without comparing them with the file's size.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibjax.models.config import MOST_LAYERS
from calibjax.runtime.errors import LARGEST_SIZE, UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values, as `struct` names them."""
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_FLOATS = ("F32", "F16", "BF16")
"""Types of tensors that are not quantised, named as safetensors name them. Quantised values are float32."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Args:
        name: its name in the file.
        shape: sizes, the slowest first, as numpy has them; the file has them in reverse.
        kind: name of its `GGMLQuantizationType`.
        file: path of the file.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int

    @property
    def dtype(self) -> str:
        """Dtype of its values, as safetensors name it."""
        return self.kind if self.kind in _FLOATS else "F32"

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row, which is the last axis."""
        block, size = _sizes()[self.kind]
        return self.shape[-1] // block * size

    def read(self, rows: "slice | np.ndarray") -> np.ndarray:
        """Returns rows of the tensor, seen as a matrix `[rows, columns]`, in `dtype`."""
        from gguf import GGMLQuantizationType, dequantize

        stored = np.memmap(self.file, np.uint8, "r", self.offset, (math.prod(self.shape[:-1]), self.row_bytes))[rows]
        stored = np.ascontiguousarray(stored)
        if self.kind in _FLOATS:
            from calibjax.models.hf_tensors import FLOATS

            return stored.view(FLOATS[self.kind])
        with np.errstate(over="ignore", invalid="ignore"):  # values are checked when they are placed
            return dequantize(stored, GGMLQuantizationType[self.kind])


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF file, or the first of several that a model is split into.

    Args:
        path: path of the file.
        metadata: values by key. An array of strings is a `Strings`, another array a numpy array.
        tensors: tensors of all files by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value of a key, checked to be of a Python type; `default` if the key is absent."""
        value = self.metadata.get(key, default)
        if value is not default and type(value) is not kind:
            raise UserError(f"{self.path}: {key}: expected a value of type {kind.__name__}, got {str(value)[:60]}.")
        return value


@dataclasses.dataclass(frozen=True)
class Strings:
    """An array of strings in a file: `count` of them, the first at `offset`."""

    path: Path
    offset: int
    count: int

    def read(self) -> list[str]:
        """Returns the strings; raises `UserError` if one is not UTF-8."""
        with _Reader(self.path) as reader:
            reader.at = self.offset
            return [reader.string() for _ in range(self.count)]


class _Reader:
    """Reads values one after another from a mapped file, and never beyond its end."""

    def __init__(self, path: Path):
        self._path, self.at = path, 0

    def __enter__(self) -> "_Reader":
        with self._path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def bytes(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise ValueError(f"byte {start:,} should be followed by {count:,} more, but the file ends")
        return self._data[start : self.at]

    def number(self, code: str) -> Any:
        value = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]
        # The shortest decimal, 1e-05 and not 9.999999747378752e-06, is what the model's config.json has.
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element == _STRING:
            start = self.at
            for _ in range(count):
                self.bytes(self.number("Q"))
            return Strings(self._path, start, count)
        if element not in _SCALARS:
            raise ValueError(f"an array has elements of type {element}")
        dtype = np.dtype(_SCALARS[element]).newbyteorder("<")
        return np.frombuffer(self.bytes(count * dtype.itemsize), dtype)


@functools.cache
def _sizes() -> dict[str, tuple[int, int]]:
    """Types that can be read: values in a block, and bytes of one."""
    from gguf import GGML_QUANT_SIZES, dequantize

    found = {}
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found[kind.name] = block, size
    return found


def is_gguf(path: str | Path) -> bool:
    """Whether the path is that of a GGUF file, by its name."""
    return Path(path).suffix == ".gguf" and not Path(path).is_dir()


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file, and of the others that its model is split into. No tensor is read.

    Args:
        path: the file; of several, `NAME-00001-of-0000N.gguf`.

    Raises:
        UserError: if the package `gguf` is missing; the file does not exist, is not GGUF, or is of another version or
            byte order; it is cut short; a count, size, type or offset is impossible; or tensors overlap.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: reading GGUF needs the package gguf: pip install 'calibjax[gguf]'.") from error
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    name = _SPLIT.fullmatch(path.name)
    if name is None or int(name[2]) != count:
        raise UserError(f"{path}: one of {count} files of a model; expected NAME-00001-of-{count:05d}.gguf, the first.")
    others = [path.with_name(f"{name[1]}-{number:05d}-of-{name[2]}.gguf") for number in range(2, int(name[2]) + 1)]
    missing = [other.name for other in others if not other.is_file()]
    if missing:
        raise UserError(f"{path}: other files of this model are missing beside it: {', '.join(missing[:5])}.")
    tensors = dict(first.tensors)
    for other in others:
        more = _read_one(other).tensors
        if repeated := tensors.keys() & more.keys():
            raise UserError(f"{other}: holds {min(repeated)!r}, as another file of this model does.")
        tensors |= more
    return dataclasses.replace(first, tensors=tensors)


def _read_one(path: Path) -> GgufFile:
    if not path.exists():
        raise UserError(f"model: {path} does not exist.")
    try:
        if not path.is_file():
            raise ValueError("not a file")
        with _Reader(path) as reader:
            return _parse(path, reader, path.stat().st_size)
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise UserError(f"{path}: not a GGUF file that can be read: {str(error)[:200]}. Download it again.") from error


def _parse(path: Path, reader: _Reader, size: int) -> GgufFile:
    if reader.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        known = "big-endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
        raise ValueError(f"it is {known}; expected version 2 or 3, little-endian")
    tensor_count, key_count = reader.number("Q"), reader.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"the key {key[:60]!r} occurs twice")
        metadata[key] = reader.value(reader.number("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two, got {str(alignment)[:60]}")
    described = [_tensor(path, reader) for _ in range(tensor_count)]
    start = -(-reader.at // alignment) * alignment
    tensors, used = {}, start
    for tensor in sorted(described, key=lambda tensor: tensor.offset):
        placed = dataclasses.replace(tensor, offset=start + tensor.offset)
        if tensor.name in tensors:
            raise ValueError(f"the tensor {tensor.name[:60]!r} occurs twice")
        if tensor.offset % alignment or placed.offset < used:
            raise ValueError(f"the tensor {tensor.name[:60]!r} overlaps another, or its offset is not aligned")
        used = placed.offset + math.prod(tensor.shape[:-1]) * tensor.row_bytes
        if used > size:
            raise ValueError(f"the tensor {tensor.name[:60]!r} ends at byte {used:,}, and the file at {size:,}")
        tensors[tensor.name] = placed
    return GgufFile(path, metadata, tensors)


def _tensor(path: Path, reader: _Reader) -> GgufTensor:
    from gguf import GGMLQuantizationType

    name, axes = reader.string(), reader.number("I")
    if not 1 <= axes <= 4:
        raise ValueError(f"the tensor {name[:60]!r} has {axes} axes; expected 1 to 4")
    shape = tuple(reader.number("Q") for _ in range(axes))[::-1]
    number, offset = reader.number("I"), reader.number("Q")
    if not all(1 <= n <= LARGEST_SIZE for n in shape):
        raise ValueError(f"the tensor {name[:60]!r} has the shape {list(shape)}")
    kinds = {kind.value: kind.name for kind in GGMLQuantizationType}
    if kinds.get(number) not in _sizes():
        raise ValueError(f"the tensor {name[:60]!r} has the type {kinds.get(number, number)}, which is not supported")
    block, _ = _sizes()[kinds[number]]
    if shape[-1] % block:
        raise ValueError(f"the tensor {name[:60]!r} has rows of {shape[-1]}; expected a multiple of {block}")
    return GgufTensor(name, shape, kinds[number], path, offset)


def check_layers(file: GgufFile, layers: Any) -> int:
    """Returns the number of layers; raises `UserError` unless each has tensors in the file."""
    if type(layers) is not int or not 1 <= layers <= min(MOST_LAYERS, len(file.tensors)):
        raise UserError(
            f"{file.path}: block_count: expected a number of layers, with {len(file.tensors):,} tensors, "
            f"got {str(layers)[:60]}."
        )
    return layers


def regrouped(rows: int, groups: Sequence[int] | None) -> np.ndarray:
    """Returns where the rows `[..., b, a, c]` of a tensor are in a file that stores them as `[..., a, b, c]`.

    Args:
        rows: number of rows.
        groups: sizes (a, b, c); `None` if the order is the same.
    """
    order = np.arange(rows)
    if groups is None:
        return order
    a, b, c = groups
    return order.reshape(-1, a, b, c).swapaxes(1, 2).reshape(-1)
